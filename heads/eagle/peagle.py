"""P-EAGLE: EAGLE-3 of several layers, which drafts all tokens in one pass.

At token t the head reads the target's hidden states up to t, each beside the next token. After them
come rows for unknown tokens: a mask token beside a learnt hidden state. Row t itself drafts
x_{t+2}. The d-th row after it sees the text up to t and the rows between, and drafts x_{t+2+d}.

While decoding, tokens committed since the last draft and the rows after them pass the layers
together. Files have EAGLE-3's names, later layers `layers.1.` and so on, and `mask_hidden`.

Source: P-EAGLE, arXiv 2602.01469; vllm-project/speculators `models/peagle`. Letters: B texts, T
texts of a store, S tokens of a text, N rows, n new tokens, D draft tokens, H hidden, I input of the
first layer, F width of a hidden state, W draft vocabulary, K key-value heads, d head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.eagle import EagleForm, PEagleConfig
from conf.settings.export import ExportFormat
from heads.decoding.drafting import CommittedTokens, Frontier, Roots
from heads.draft_head import HeadFacts, HeadFiles, Variant
from heads.eagle.checkpoint import REQUIRED_VALUES, EagleCheckpoint
from heads.eagle.eagle import EagleHead, choose_output_head, iter_feature_variants
from heads.eagle.layouts import LAYOUTS
from heads.eagle.network import (
    EagleDrafter,
    EagleHeadConfig,
    EagleLayer,
    build_eagle_config,
    find_last_rows,
)
from heads.feature_head import choose_mask_token, iter_mask_token_variants
from heads.folders import find_head_weights, has_architecture, list_tensor_names
from heads.layers.branch_attention import (
    BranchCache,
    CausalRange,
    branch_attention,
    build_causal_range,
)
from heads.layers.documents import Documents
from heads.layers.llama import RmsNorm
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab

MASK_HIDDEN = "mask_hidden"
"""Name of the learnt hidden state of rows whose token is unknown."""
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token, in the order of vLLM."""
NUM_DRAFT_TOKENS = 8
"""Number of draft tokens if the file names none, as in speculators' training."""
UNCHECKED_KEYS = ("num_hidden_layers", "speculators_model_type")
"""Keys of `REQUIRED_VALUES` that may have other values in P-EAGLE heads."""
TOKENS_PER_CHUNK = 256
"""Number of tokens that draft at once in `compute_text_outputs`, with all rows in memory."""
VLLM_LAYOUT = replace(LAYOUTS[ExportFormat.vllm][EagleForm.eagle3], layer_prefix="layers.0.")
SPECULATORS_LAYOUT = replace(
    LAYOUTS[ExportFormat.speculators][EagleForm.eagle3],
    architecture="PEagleSpeculator",
    speculators_method="peagle",
    # vLLM drops `fc_norm` when it converts such a config.
    parts=("norm_before_fc", "norm_before_residual", "qk_norm", "window", "mlp_bias"),
)
KeysValues = tuple[Tensor, Tensor]
KeyValueStore = Callable[[int, KeysValues | None], KeysValues]
"""Type of a function (layer number, new keys and values of the context or None).

It stores the new ones and returns all keys and values of that layer, [T, S, K, d] each.
"""


@dataclass(frozen=True, kw_only=True)
class PEagleHeadConfig(EagleHeadConfig):
    """Architecture of a P-EAGLE head.

    Attributes:
        mask_token_id: token id of rows whose token is unknown.
        num_draft_tokens: number of draft tokens per pass in training.
    """

    mask_token_id: int = 0
    num_draft_tokens: int = 8


@dataclass(frozen=True)
class RowGroup:
    """Rows of a text, or rows equally far after its tokens.

    Attributes:
        inputs: [N, I] inputs of the first layer.
        residual: [N, H] residual stream before the first layer.
        rotation: [N, 2, d] rotation of the rows' positions.
        seen: range of context tokens that each row sees.
        parent_rows: [N] int64 rows of the previous group that these rows follow; None for all.
    """

    inputs: Tensor
    residual: Tensor
    rotation: Tensor
    seen: CausalRange
    parent_rows: Tensor | None = None


def make_list_store(stored: list[KeysValues]) -> KeyValueStore:
    """Make a store that keeps keys and values [S, K, d] of one text in a list, layer by layer."""

    def store(number: int, new: KeysValues | None) -> KeysValues:
        if new is not None:
            stored.append((new[0].unsqueeze(0), new[1].unsqueeze(0)))
        return stored[number]

    return store


class PEagleDrafter(EagleDrafter):
    """Drafts all tokens in one pass of the head, as a chain or the likeliest paths."""

    head: "PEagleHead"

    def _encode_tokens(self, seen: CommittedTokens, following: Tensor) -> None:
        """Encode committed tokens without drafting."""
        self._run_pass(seen, following, 0)

    def _run_pass(self, seen: CommittedTokens, following: Tensor, num_masks: int) -> list[Tensor]:
        """Run the layers on tokens, each with the next one, and on mask rows after the last.

        Returns:
            Outputs [B * n, H] of the tokens, then [B, H] for each of `num_masks` mask rows.
        """
        head, (fused, ids, places) = self.head, self._build_inputs(seen, following)
        flat, end = places.flatten(), self.cache.prepared_slots.committed[:, 0] + seen.counts
        text = head.build_context_rows(
            fused, ids, self._clamp_positions(flat), CausalRange.from_ends(flat + 1)
        )
        steps = torch.arange(num_masks, device=end.device).unsqueeze(1)
        positions = self._clamp_positions((end + steps).flatten())
        masks = head.build_mask_rows(positions, [CausalRange.from_ends(end)] * num_masks)

        def store(layer: int, new: KeysValues | None) -> KeysValues:
            assert new is not None
            return self._store_keys_values(layer, *new, places, seen)

        outputs = head.run_layers(text, masks, store)
        self.cache.prepared_slots.advance(seen.counts, seen.token_ids)
        return outputs

    def _compute_logits(self, roots: Roots) -> Tensor:
        """Compute the logits [B, D, W] of all rows that draft."""
        assert self.pending is not None
        seen, self.pending = self.pending, None
        text, *masks = self._run_pass(seen, roots.tokens, self.shape.depth - 1)
        return self.head.compute_logits(torch.stack([text[find_last_rows(seen)], *masks], 1))

    def start_draft(self, roots: Roots) -> tuple[Tensor, Callable[[Frontier], Tensor]]:
        """Run all rows that draft. See `FeatureDrafter.start_draft`."""
        logits = self._compute_logits(roots)

        def compute_next_logits(frontier: Frontier) -> Tensor:
            each = logits[:, frontier.depth]
            if frontier.rows is None:
                return each
            return each.repeat_interleave(len(frontier.rows) // len(roots), 0)

        return logits[:, 0], compute_next_logits


class PEagleHead(EagleHead):
    """A P-EAGLE head.

    Args:
        config: architecture.
        vocab: draft vocabulary.
    """

    config: PEagleHeadConfig
    variants: ClassVar = {"peagle": Variant("P-EAGLE heads", PEagleConfig)}
    name_with_article = "a P-EAGLE head"
    drafter = PEagleDrafter
    vllm_settings: ClassVar = {"parallel_drafting": True}
    ambiguities = (iter_feature_variants, iter_mask_token_variants)
    layouts: ClassVar = {
        ExportFormat.vllm: {EagleForm.eagle3: VLLM_LAYOUT},
        ExportFormat.speculators: {EagleForm.eagle3: SPECULATORS_LAYOUT},
    }

    def __init__(self, config: PEagleHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.variant, self.layer_prefix, self.own_title = "peagle", "layers.0.", ""
        later = range(1, config.llama.num_hidden_layers)
        # Keyed by number, as in the files.
        self.layers = nn.ModuleDict(
            {str(number): EagleLayer(config.llama, False, config.qk_norm) for number in later}
        )
        for layer in self.layers.values():  # Llama's, with a norm before the attention
            layer.input_layernorm = RmsNorm(config.llama.hidden_size, config.llama.rms_norm_eps)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def draw_weights(self, seed: int) -> None:
        """Draw new weights by a seed, including the hidden state of rows without a token."""
        super().draw_weights(seed)
        nn.init.normal_(self.mask_hidden, generator=torch.Generator().manual_seed(seed))

    def build_context_rows(
        self, fused: Tensor, token_ids: Tensor, position_ids: Tensor, seen: CausalRange
    ) -> RowGroup:
        """Build the rows of a text: arguments of `encode_context`, and the range that each sees."""
        inputs, residual = self.build_layer_inputs(fused, token_ids)
        rotation = self.layer.self_attn.compute_rotation(inputs, position_ids)
        return RowGroup(inputs, residual, rotation, seen)

    def build_mask_rows(
        self,
        position_ids: Tensor,
        seen: Sequence[CausalRange],
        parent_rows: Sequence[Tensor | None] = (),
    ) -> list[RowGroup]:
        """Build mask rows after tokens of a text, in groups of equal distance.

        Args:
            position_ids: [N] int64 positions of the rows of all groups.
            seen: range of context tokens that the rows of each group see.
            parent_rows: for each group, see `RowGroup`; empty for None everywhere.
        """
        if not seen:
            return []
        mask = position_ids.new_full((1,), self.config.mask_token_id)
        fused = self.fuse(self.mask_hidden.flatten(0, 1).to(self.fc.weight))
        inputs, residual = self.build_layer_inputs(fused, mask)
        rotation = self.layer.self_attn.compute_rotation(inputs, position_ids)
        sizes = [len(each.end) for each in seen]
        groups = zip(rotation.split(sizes), seen, parent_rows or [None] * len(seen), strict=True)
        return [
            RowGroup(
                inputs.expand(len(turn), -1), residual.expand(len(turn), -1), turn, visible, parents
            )
            for turn, visible, parents in groups
        ]

    def run_layers(
        self, text: RowGroup | None, masks: Sequence[RowGroup], store: KeyValueStore
    ) -> list[Tensor]:
        """Run all layers on groups of rows, and return the outputs [N, H] of each group.

        Args:
            text: rows of new text; None without any.
            masks: groups of mask rows, the one directly after the text first.
            store: function that stores new keys and values of the text and returns all.
        """
        layers: list[Any] = [self.layer, *self.layers.values()]
        groups = [*([] if text is None else [text]), *masks]
        sizes = [len(group.rotation) for group in groups]
        rotation = torch.cat([group.rotation for group in groups])
        inputs = torch.cat([group.inputs for group in groups])
        states = torch.cat([group.residual for group in groups])
        for number, layer in enumerate(layers):
            if number:
                inputs = layer.input_layernorm(states)
            query = layer.self_attn.compute_query(inputs, rotation).split(sizes)
            both = [each.split(sizes) for each in layer.self_attn.keys_values(inputs, rotation)]
            keys, values = store(number, None if text is None else (both[0][0], both[1][0]))
            row_keys_values: list[list[Tensor]] = [[], []]
            attended = []
            for place, group in enumerate(groups):
                if group is not text:
                    if (parents := group.parent_rows) is not None:
                        row_keys_values = [
                            [r.index_select(0, parents) for r in each] for each in row_keys_values
                        ]
                    for each, rows in zip(row_keys_values, both, strict=True):
                        each.append(rows[place])
                branches = BranchCache(keys, values, group.seen, *row_keys_values)
                attended.append(branch_attention(query[place], branches, self.config.window))
            states = layer.add_attention_and_mlp(states, torch.cat(attended))
        return list(states.split(sizes))

    def compute_text_outputs(
        self, features: Tensor, ids: Tensor, position_ids: Tensor, first: int, depth: int
    ) -> list[Tensor]:
        """See `AutoregressiveHead.compute_text_outputs`. Depth d of row t is the d-th row after t.

        That row sees the text up to t.
        """
        places, stored = torch.arange(len(features), device=ids.device), list[KeysValues]()
        whole, end = Documents.from_lengths([len(features)], ids.device), self.max_positions - 1
        seen, fused = build_causal_range(whole, places), self.fuse(features)
        text = self.build_context_rows(fused, ids[1 : len(features) + 1], position_ids, seen)
        (outputs,) = self.run_layers(text, [], make_list_store(stored))
        parts = []
        for rows in places[first:].split(TOKENS_PER_CHUNK):
            steps = torch.arange(1, depth, device=ids.device).unsqueeze(1)
            positions = (position_ids[rows] + steps).flatten().clamp_max(end)
            masks = self.build_mask_rows(positions, [build_causal_range(whole, rows)] * (depth - 1))
            mask_outputs = self.run_layers(None, masks, make_list_store(stored)) if masks else []
            parts.append([outputs[rows], *mask_outputs])
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load the P-EAGLE head of a folder; None for folders of other heads."""
        if not is_peagle_folder(folder, path):
            return None
        checkpoint = EagleCheckpoint.from_folder(folder, path)
        settings = checkpoint.settings
        required_values = {k: v for k, v in REQUIRED_VALUES.items() if k not in UNCHECKED_KEYS}
        required_values["norm_output"] = False
        eagle_config = checkpoint.build_head_config(layers, required_values)
        if not eagle_config.layers:
            raise checkpoint.make_error(
                "config.json names no layers (eagle_aux_hidden_state_layer_ids); set head.layers"
            )
        mask_token_id = next((settings[key] for key in MASK_KEYS if key in settings), None)
        vocab_size = eagle_config.llama.vocab_size
        if not isinstance(mask_token_id, int) or not 0 <= mask_token_id < vocab_size:
            raise checkpoint.make_error(
                f"config.json says mask_token_id={mask_token_id}: must be from 0 to "
                f"{vocab_size - 1}"
            )
        mask_hidden = checkpoint.tensors.get(MASK_HIDDEN)
        width = len(eagle_config.layers) * eagle_config.target_hidden_size
        if mask_hidden is not None and mask_hidden.numel() == width:
            checkpoint.tensors[MASK_HIDDEN] = mask_hidden.reshape(1, 1, -1)
        methods = settings.get("speculators_config", {}).get("proposal_methods") or [{}]
        trained = methods[0].get("speculative_tokens", NUM_DRAFT_TOKENS)
        num_draft_tokens = int(settings.get("num_depths", trained))
        config = PEagleHeadConfig(
            **vars(eagle_config), mask_token_id=mask_token_id, num_draft_tokens=num_draft_tokens
        )
        return checkpoint.load_into(cls(config, checkpoint.pop_eagle_vocab()))

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: Any, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new head with layers of the target's sizes, attached to the target."""
        eagle_config = build_eagle_config(settings, target)
        eagle_config.llama.num_hidden_layers = settings.num_layers
        config = PEagleHeadConfig(
            **vars(eagle_config),
            mask_token_id=choose_mask_token(target, settings.mask_token_id),
            num_draft_tokens=settings.num_steps,
        )
        start = choose_output_head(settings.output_head, target)
        return cls(config, vocab).initialise(target, start, seed)

    def build_files(self) -> HeadFiles:
        """Build files with EAGLE-3's keys and those of speculators and vLLM for P-EAGLE."""
        files, config = super().build_files(), self.config
        peagle_keys = {"mask_token_id": config.mask_token_id, "num_depths": config.num_draft_tokens}
        return replace(files, config=files.config | peagle_keys)

    def build_card_facts(self, provenance: dict[str, Any]) -> HeadFacts:
        """Collect the facts of the head's model card: layers, hidden states and draft tokens."""
        config = self.config
        return replace(
            super().build_card_facts(provenance),
            tag="peagle",
            name="P-EAGLE head",
            method="P-EAGLE",
            paper="2602.01469",
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {self.vocab.describe_size()}) on the target's hidden "
                f"states {', '.join(map(str, config.layers))} (as `output_hidden_states` counts "
                f"them), fused. It drafts {config.num_draft_tokens} tokens in one pass"
            ),
        )


def is_peagle_folder(folder: Path, path: str) -> bool:
    """Tell whether a folder's config names P-EAGLE, or its files hold `mask_hidden`."""
    if has_architecture(folder, (), "peagle"):
        return True
    try:
        files = find_head_weights(folder, path)
        names = {name.removeprefix("model.") for file in files for name in list_tensor_names(file)}
    except InputError:
        return False  # a later reader reports the damage
    # EAGLE also has a norm of hidden states, but not inside a layer.
    return MASK_HIDDEN in names and any(name.endswith(".hidden_norm.weight") for name in names)
