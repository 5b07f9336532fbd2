"""Network of block drafters: one pass drafts a whole block after a known token.

At token t of a text, the target's hidden states up to t and the token x_{t+1} are known. A block of
rows holds that token and then masks, at positions t + 1, t + 2, ... The hidden states give its
layers the keys and values of the text. Depth d of a draft (from 1) is x_{t+1+d}.

Source: DFlash, arXiv 2602.06036; z-lab/dflash `model.py`. Letters: T texts, S tokens of a text, A
blocks, R rows, D depths, H hidden, F width of the hidden states, W draft vocabulary, V vocabulary.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from conf.errors import InputError
from heads.blocks.attention import BlockRange
from heads.blocks.config import BlockHeadConfig, check_layers
from heads.blocks.layer import BlockLayer
from heads.decoding.drafting import PAD
from heads.feature_head import FeatureHead
from heads.head import check_fits
from heads.layers.llama import RmsNorm
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import TargetOutput
from heads.vocab import DraftVocab

TOKENS_PER_CHUNK = 1024
"""Tokens per chunk of a text whose tokens all draft; the rows of a chunk live together."""
ContextKeysValues = list[tuple[Tensor, Tensor]]
"""Rotated keys, and values, [T, S, K, d] of texts, for each layer."""


class BlockNetwork(FeatureHead):
    """Network of a block drafter. `attach` it to its target before use.

    Args:
        config: architecture.
        vocab: draft vocabulary.
    """

    config: BlockHeadConfig

    def __init__(self, config: BlockHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        llama = config.llama
        hidden, eps = llama.hidden_size, llama.rms_norm_eps
        read = len(config.layers) * config.target_hidden_size
        self.fc = nn.Linear(read, hidden, bias=False)
        self.hidden_norm = RmsNorm(hidden, eps)
        self.layers = nn.ModuleList(self.make_layer() for _ in range(llama.num_hidden_layers))
        self.norm = RmsNorm(hidden, eps)
        self._make_embeddings_and_head(config.own_output_head)

    def initialise(self, target: EmbeddingsAndOutputHead, seed: int) -> Self:
        """Draw weights by a seed, copy rows of the target's embedding and output head, and attach.

        Raises:
            InputError: rows of a quantised output head are needed.
        """
        self.draw_weights(seed)
        self.attach(target)
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(target.embedding.weight)
        if self.lm_head is not None:
            if target.head_is_quantized:
                raise InputError(
                    "head.own_output_head=true: starts from rows of the target's output head, but "
                    f"that of target.path={target.name} is quantised; leave head.own_output_head "
                    "unset"
                )
            rows = target.output_head.weight.detach()[self.vocab.ids]
            self.lm_head.weight.data.copy_(rows)
        return self

    def make_layer(self) -> BlockLayer:
        """Make one layer of the network."""
        return BlockLayer(self.config.llama)

    def draw_weights(self, seed: int) -> None:
        """Draw new weights by a seed, for all matrices but the target's."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def complete_config(self, target: EmbeddingsAndOutputHead) -> BlockHeadConfig:
        """See `FeatureHead.fitted`. Without its own embedding, the head has the target's width."""
        config = self.config
        check_fits(self, target, config.target_hidden_size, "feature_size")
        if config.llama.hidden_size != target.hidden_size and not config.own_embedding:
            check_fits(self, target, config.llama.hidden_size)
        check_layers(config.layers, target)
        return replace(config, num_target_layers=target.num_layers)

    def encode_context(self, features: Tensor, position_ids: Tensor) -> ContextKeysValues:
        """Keys and values of texts per layer, joined into one text of S tokens.

        Args:
            features: [S, F].
            position_ids: [S] int64.
        """
        context = self.hidden_norm(self.fc(features))
        rotation = self._get_attention(0).compute_rotation(context, position_ids)
        found = [
            self._get_attention(n).keys_values(context, rotation) for n in range(len(self.layers))
        ]
        return [(keys[None], values[None]) for keys, values in found]

    def _get_attention(self, number: int) -> Any:
        return self.layers[number].self_attn

    def draft(
        self, roots: Tensor, places: Tensor, context: ContextKeysValues, sight: BlockRange
    ) -> Tensor:
        """[A, D, H] normalised outputs of the rows that draft.

        Args:
            roots: [A] int64, last known tokens.
            places: [A] int64, positions of these tokens.
            context: keys and values that blocks may see.
            sight: the part of the text that they see, except in `full_layers`.
        """
        rows = torch.arange(sight.num_rows, device=roots.device)
        ids = torch.where(rows == 0, roots.unsqueeze(1), self.config.mask_token_id)
        positions = (places.unsqueeze(1) + rows).clamp_max(self.max_positions - 1)
        states = self.embed(ids)
        # In the dtype of the text's keys; under autocast, embeddings have another.
        rotation = self._get_attention(0).compute_rotation(context[0][0], positions.flatten())
        whole, full = replace(sight, causal=False, window=None), self.config.full_layers
        for number, layer in enumerate(self.layers):
            seen = whole if number in full else sight
            states = layer(states, rotation, context[number], seen)
        return self.norm(states[:, self.config.first_row :])

    def make_block_range(
        self, first: Tensor, end: Tensor, depth: int, host: tuple[Tensor, Tensor] | None = None
    ) -> BlockRange:
        """Sight of blocks that draft `depth` tokens. Other arguments as in `Sight`."""
        size = self.config.num_rows(depth)
        return BlockRange(first, end, size, self.config.causal, self.config.window, host)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Scale logits [..., W] of the output head's rows as the head's file says.

        Engines omit the target's own scalings.
        """
        return logits

    @abstractmethod
    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, previous_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[N, W] logits of a slot given the previous tokens, and the state for the next slot.

        Args:
            base: [N, W] logits of the output head, not changed.
            outputs: [N, H] outputs of the slot.
            previous_ids: [N] int64 target ids of the previous tokens.
            state: [N, .] state of the previous slots; None for the first slot or without a state.
        """

    def compute_slot_confidence(self, outputs: Tensor, before: Tensor) -> Tensor | None:
        """[N] float32 logits of a slot's chance of acceptance; None without a confidence head.

        Args:
            outputs: [N, H] outputs of the slot.
            before: [N] int64 target ids of the previous tokens.
        """
        del outputs, before
        return None

    @torch.no_grad()
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64 best tokens per depth, see `DraftHead.candidates`."""
        device = output.hidden_states.device
        ids = torch.tensor(token_ids, device=device)
        places = torch.arange(len(ids) - 1, device=device)
        text = self.encode_context(self.collect_features(output)[0], places)
        parts = [
            self._rank_candidates(text, ids, rows, depth, width)
            for rows in places[first:].split(TOKENS_PER_CHUNK)
        ]
        return torch.cat(parts, dim=1)

    def _rank_candidates(
        self, text: ContextKeysValues, ids: Tensor, rows: Tensor, depth: int, width: int
    ) -> Tensor:
        """Likeliest candidates of the slots, for blocks after tokens [n] of a text."""
        nothing, end = torch.zeros_like(rows), rows + 1
        sight = self.make_block_range(nothing, end, depth, (nothing.cpu(), end.cpu()))
        outputs = self.draft(ids[end], end, text, sight)
        best: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(depth):
            # Drafts after the end of a text are not used.
            before = ids[(end + slot).clamp_max(len(ids) - 1)]
            base = self.compute_logits(outputs[:, slot])
            logits, state = self.compute_slot_logits(base, outputs[:, slot], before, state)
            found = self.vocab.to_target_ids(logits.topk(width).indices)
            best.append(
                found.masked_fill(
                    (end + self.config.first_row + slot >= self.max_positions).unsqueeze(1), PAD
                )
            )
        return torch.stack(best)
