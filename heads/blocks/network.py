"""The network of block drafters: one pass drafts a whole block behind a token that is sure.

At token t of a text the target's features up to t are known, and the token x_{t+1}. A block of
rows holds that token and then masks, at positions t + 1, t + 2, ...; features give its layers the
keys and values of the text. Depth d of a draft, from 1, is x_{t+1+d}, as everywhere.

Source: DFlash, arXiv 2602.06036; z-lab/dflash `model.py`. Letters: T texts, S tokens of a text, A
blocks, R rows, D depths, H hidden, F width of the features, W draft vocabulary, V vocabulary.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from conf.errors import InputError
from heads.blocks.attention import Sight
from heads.blocks.config import BlockHeadConfig, check_layers
from heads.blocks.layer import BlockLayer
from heads.decoding.drafting import PAD
from heads.feature_head import FeatureHead
from heads.head import check_fits
from heads.layers.llama import RmsNorm
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import TargetOutput
from heads.vocab import DraftVocab

TOKENS_PER_CHUNK = 1024
"""Tokens of a chunk of a text whose tokens all draft: the rows of a chunk live together."""
TextKeys = list[tuple[Tensor, Tensor]]
"""Keys, rotated, and values [T, S, K, d] of texts, for each layer."""


class BlockNetwork(FeatureHead):
    """The network of a block drafter; `attach` it to its target before use.

    Args:
        config: the architecture.
        vocab: the ids it can draft.
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
        self._make_ends(config.own_output_head)

    def begin(self, target: EmbeddingsAndHead, seed: int) -> Self:
        """Fresh weights, alike for a seed, and rows of the target's embedding and head; attached.

        Raises:
            InputError: rows of a quantised output head are wanted.
        """
        self.initialise(seed)
        self.attach(target)
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(target.embedding.weight)
        if self.lm_head is not None:
            if target.head_is_quantized:
                raise InputError(
                    f"head.own_output_head=true: the output head of target.path={target.name} is "
                    "quantised, and the head's starts from its rows"
                )
            rows = target.output_head.weight.detach()[self.vocab.ids]
            self.lm_head.weight.data.copy_(rows)
        return self

    def make_layer(self) -> BlockLayer:
        """One of the network's layers."""
        return BlockLayer(self.config.llama)

    def initialise(self, seed: int) -> None:
        """Fresh weights, alike for a seed, of all matrices but those of the target's."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def fitted(self, target: EmbeddingsAndHead) -> BlockHeadConfig:
        """See `FeatureHead.fitted`; without an embedding of its own, of the target's width."""
        config = self.config
        check_fits(self, target, config.target_hidden_size, "feature_size")
        if config.llama.hidden_size != target.hidden_size and not config.own_embedding:
            check_fits(self, target, config.llama.hidden_size)
        check_layers(config.layers, target)
        return replace(config, num_target_layers=target.num_layers)

    def read(self, features: Tensor, position_ids: Tensor) -> TextKeys:
        """Keys and values of texts, one layer's after another's, as one text of S tokens.

        Args:
            features: [S, F].
            position_ids: [S] int64.
        """
        context = self.hidden_norm(self.fc(features))
        rotation = self._attention(0).rotation(context, position_ids)
        found = [self._attention(n).keys_values(context, rotation) for n in range(len(self.layers))]
        return [(keys[None], values[None]) for keys, values in found]

    def _attention(self, number: int) -> Any:
        return self.layers[number].self_attn

    def draft(self, roots: Tensor, places: Tensor, text: TextKeys, sight: Sight) -> Tensor:
        """[A, D, H] normed outputs of the rows that draft.

        Args:
            roots: [A] int64, the tokens that are sure.
            places: [A] int64, their positions.
            text: what blocks see.
            sight: how much of it, but in `full_layers`.
        """
        rows = torch.arange(sight.size, device=roots.device)
        ids = torch.where(rows == 0, roots.unsqueeze(1), self.config.mask_token_id)
        positions = (places.unsqueeze(1) + rows).clamp_max(self.window - 1)
        states = self.embed(ids)
        # In the dtype of the text's keys, which under autocast is not that of embeddings.
        rotation = self._attention(0).rotation(text[0][0], positions.flatten())
        whole, full = replace(sight, causal=False, window=None), self.config.full_layers
        for number, layer in enumerate(self.layers):
            seen = whole if number in full else sight
            states = layer(states, rotation, text[number], seen)
        return self.norm(states[:, self.config.first_row :])

    def sight(
        self, first: Tensor, end: Tensor, depth: int, host: tuple[Tensor, Tensor] | None = None
    ) -> Sight:
        """The sight of blocks that draft `depth` tokens; the rest as of `Sight`."""
        size = self.config.num_rows(depth)
        return Sight(first, end, size, self.config.causal, self.config.window, host)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits [..., W] of the output head's rows alone, as the head's file says it scales them.

        Engines leave the target's own scalings out.
        """
        return logits

    @abstractmethod
    def step(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[N, W] logits of a slot, given the tokens that stand before it, and the next state.

        Args:
            base: [N, W] of `logits`, which stay as they are.
            outputs: [N, H], the slot's.
            before: [N] int64 target ids of the tokens right before.
            state: [N, .] what the slots before have left; None before the first, or if nothing.
        """

    def sure(self, outputs: Tensor, before: Tensor) -> Tensor | None:
        """[N] float32 logits of the chance that a slot is accepted; None if it does not say.

        Args:
            outputs: [N, H], the slot's.
            before: [N] int64 target ids of the tokens right before.
        """
        del outputs, before
        return None

    @torch.no_grad()
    def candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64, the best tokens of each depth, see `DraftHead.candidates`."""
        device = output.hidden_states.device
        ids = torch.tensor(token_ids, device=device)
        places = torch.arange(len(ids) - 1, device=device)
        text = self.read(self.features(output)[0], places)
        parts = [
            self._candidates(text, ids, rows, depth, width)
            for rows in places[first:].split(TOKENS_PER_CHUNK)
        ]
        return torch.cat(parts, dim=1)

    def _candidates(
        self, text: TextKeys, ids: Tensor, rows: Tensor, depth: int, width: int
    ) -> Tensor:
        """The likeliest candidates of the slots of blocks behind tokens [n] of a text."""
        nothing, end = torch.zeros_like(rows), rows + 1
        sight = self.sight(nothing, end, depth, (nothing.cpu(), end.cpu()))
        outputs = self.draft(ids[end], end, text, sight)
        best: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(depth):
            # Of a text that has ended nobody looks at drafts.
            before = ids[(end + slot).clamp_max(len(ids) - 1)]
            base = self.logits(outputs[:, slot])
            logits, state = self.step(base, outputs[:, slot], before, state)
            found = self.vocab.to_target(logits.topk(width).indices)
            best.append(
                found.masked_fill(
                    (end + self.config.first_row + slot >= self.window).unsqueeze(1), PAD
                )
            )
        return torch.stack(best)
