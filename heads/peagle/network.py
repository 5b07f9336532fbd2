"""P-EAGLE: EAGLE-3 of several layers, which drafts all tokens in one pass.

At token t the head reads the target's hidden states up to t, each beside the next token. After them
come rows for unknown tokens: a mask token beside a learnt hidden state. Row t itself drafts
x_{t+2}. The d-th row after it sees the text up to t and the rows between, and drafts x_{t+2+d}.

Source: P-EAGLE, arXiv 2602.01469; vllm-project/speculators `models/peagle`. Letters: S tokens of a
text, N rows, H hidden, I input of the first layer, F width of a hidden state, K key-value heads, d
head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads.blocks.config import choose_mask_token
from heads.decoding.drafting import PAD
from heads.eagle.branch_attention import branch_attention
from heads.eagle.branches import BranchCache, CausalRange, build_causal_range
from heads.eagle.config import EagleHeadConfig, build_eagle_config
from heads.eagle.layer import EagleLayer
from heads.eagle.network import EagleNetwork
from heads.layers.documents import Documents
from heads.layers.llama import RmsNorm
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import TargetOutput
from heads.vocab import DraftVocab

TOKENS_PER_CHUNK = 256
"""Tokens per chunk of a text whose tokens all draft; the rows of a chunk live together."""
KeysValues = tuple[Tensor, Tensor]
KeyValueStore = Callable[[int, KeysValues | None], KeysValues]
"""Function that stores a layer's new keys and values and returns all, [T, S, K, d], by layer."""


@dataclass(frozen=True)
class PEagleHeadConfig(EagleHeadConfig):
    """Architecture of a head.

    Attributes:
        mask_token_id: token id of rows whose token is unknown.
        num_draft_tokens: draft tokens per pass, as trained.
    """

    mask_token_id: int = 0
    num_draft_tokens: int = 8


@dataclass(frozen=True)
class RowGroup:
    """Rows of the text, or rows equally far after it.

    Attributes:
        inputs: [N, I] inputs of the first layer.
        residual: [N, H].
        rotation: [N, 2, d].
        seen: stretch of the text that they see.
        parent_rows: [N] int64 rows of the previous group that they follow; None for all.
    """

    inputs: Tensor
    residual: Tensor
    rotation: Tensor
    seen: CausalRange
    parent_rows: Tensor | None = None


class LlamaLayer(EagleLayer):
    """Layer after the first: Llama's.

    Args:
        config: sizes, norms and RoPE.
        qk_norm: normalise queries and keys per head.
    """

    input_layernorm: RmsNorm

    def __init__(self, config: LlamaConfig, qk_norm: bool) -> None:
        super().__init__(config, two_inputs=False, qk_norm=qk_norm)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class PEagleNetwork(EagleNetwork):
    """Network of a P-EAGLE head. `attach` it to its target before use.

    Args:
        config: architecture.
        vocab: draft vocabulary.
    """

    config: PEagleHeadConfig

    def __init__(self, config: PEagleHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.variant, self.layer_prefix = "peagle", "layers.0."
        later = range(1, config.llama.num_hidden_layers)
        # Keyed by number, as in the files.
        self.layers = nn.ModuleDict(
            {str(number): LlamaLayer(config.llama, config.qk_norm) for number in later}
        )
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def _draw_weights(self, seed: int) -> None:
        super()._draw_weights(seed)
        nn.init.normal_(self.mask_hidden, generator=torch.Generator().manual_seed(seed))

    def build_context_rows(
        self, fused: Tensor, token_ids: Tensor, position_ids: Tensor, seen: CausalRange
    ) -> RowGroup:
        """Rows of a text; arguments as in `read`, and the stretch that each sees."""
        inputs, residual = self.build_layer_inputs(fused, token_ids)
        rotation = self.layer.self_attn.compute_rotation(inputs, position_ids)
        return RowGroup(inputs, residual, rotation, seen)

    def build_mask_rows(
        self, position_ids: Tensor, seen: Sequence[CausalRange], kept: Sequence[Tensor | None] = ()
    ) -> list[RowGroup]:
        """Rows after tokens of a text, in groups.

        Args:
            position_ids: [N] int64 positions of the rows of all groups.
            seen: stretch of the text before the rows, per group.
            kept: rows of the previous group, see `RowGroup`; unset for all.
        """
        if not seen:
            return []
        mask = position_ids.new_full((1,), self.config.mask_token_id)
        fused = self.fuse(self.mask_hidden.flatten(0, 1).to(self.fc.weight))
        inputs, residual = self.build_layer_inputs(fused, mask)
        rotation = self.layer.self_attn.compute_rotation(inputs, position_ids)
        sizes = [len(each.end) for each in seen]
        found = zip(rotation.split(sizes), seen, kept or [None] * len(seen), strict=True)
        return [
            RowGroup(inputs.expand(len(turn), -1), residual.expand(len(turn), -1), turn, see, keep)
            for turn, see, keep in found
        ]

    def run_layers(
        self, text: RowGroup | None, masks: Sequence[RowGroup], store: KeyValueStore
    ) -> list[Tensor]:
        """[N, H] outputs of the rows of each group.

        Args:
            text: rows of new text, if any.
            masks: groups of rows, those directly after the text first.
            store: stores new keys and values and returns all.
        """
        groups = [*([] if text is None else [text]), *masks]
        sizes = [len(group.rotation) for group in groups]
        rotation = torch.cat([group.rotation for group in groups])
        inputs = torch.cat([group.inputs for group in groups])
        states = torch.cat([group.residual for group in groups])
        for number, layer in enumerate(self._every_layer()):
            if number:
                inputs = layer.input_layernorm(states)
            query = layer.self_attn.compute_query(inputs, rotation).split(sizes)
            both = [each.split(sizes) for each in layer.self_attn.keys_values(inputs, rotation)]
            keys, values = store(number, None if text is None else (both[0][0], both[1][0]))
            own: list[list[Tensor]] = [[], []]
            attended = []
            for place, group in enumerate(groups):
                if group is not text:
                    own = [
                        [*_select_kept_rows(each, group.parent_rows), rows[place]]
                        for each, rows in zip(own, both, strict=True)
                    ]
                branches = BranchCache(keys, values, group.seen, *own)
                attended.append(branch_attention(query[place], branches))
            states = layer.add_attention_and_mlp(states, torch.cat(attended))
        return list(states.split(sizes))

    def _every_layer(self) -> list[Any]:
        return [self.layer, *self.layers.values()]

    @torch.no_grad()
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64 best tokens per depth, see `DraftHead.candidates`."""
        device = output.hidden_states.device
        ids = torch.tensor(token_ids, device=device)
        places = torch.arange(len(ids) - 1, device=device)
        fused = self.fuse(self.collect_features(output)[0])
        known: list[KeysValues] = []
        whole = Documents.from_length(len(places), device)
        text = self.build_context_rows(fused, ids[1:], places, build_causal_range(whole, places))
        (outputs,) = self.run_layers(text, [], make_list_store(known))
        parts = []
        for rows in places[first:].split(TOKENS_PER_CHUNK):
            positions = torch.cat([rows + step for step in range(1, depth)] or [rows[:0]])
            seen = [build_causal_range(whole, rows)] * (depth - 1)
            masks = self.build_mask_rows(positions.clamp_max(self.max_positions - 1), seen)
            found = self.run_layers(None, masks, make_list_store(known)) if masks else []
            parts.append(
                torch.stack([self._rank_token_ids(each, width) for each in (outputs[rows], *found)])
            )
        best = torch.cat(parts, 1)
        reached = places[first:] + torch.arange(depth, device=device).unsqueeze(1)
        return best.masked_fill((reached >= self.max_positions).unsqueeze(2), PAD)


def build_peagle_config(settings: Any, target: EmbeddingsAndOutputHead) -> PEagleHeadConfig:
    """Architecture of a new head from a `PEagleConfig`.

    Raises:
        InputError: the target lacks the hidden states or the mask token.
    """
    plain = build_eagle_config(settings, target)
    plain.llama.num_hidden_layers = settings.num_layers
    mask = choose_mask_token(target, settings.mask_token_id)
    return PEagleHeadConfig(**vars(plain), mask_token_id=mask, num_draft_tokens=settings.num_steps)


def make_list_store(known: list[KeysValues]) -> KeyValueStore:
    """Keep keys and values [S, K, d] of one text's layers in a list."""

    def text_of(number: int, new: KeysValues | None) -> KeysValues:
        if new is not None:
            known.append((new[0].unsqueeze(0), new[1].unsqueeze(0)))
        return known[number]

    return text_of


def _select_kept_rows(own: Sequence[Tensor], kept: Tensor | None) -> list[Tensor]:
    return [each if kept is None else each.index_select(0, kept) for each in own]
