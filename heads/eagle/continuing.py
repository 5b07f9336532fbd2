"""Shared part of EAGLE and MTP heads: both continue from their own last output.

At token t the head reads the target's hidden state and the token x_{t+1}, and predicts x_{t+2}.
With its own output instead of the target's state it continues to x_{t+3}, and so on.

Letters: S tokens of a text, N rows, H hidden, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from heads.decoding.drafting import PAD
from heads.eagle.branches import BranchCache, build_causal_range
from heads.feature_head import FeatureHead
from heads.layers.documents import Documents
from heads.target_model.model import TargetOutput

ROWS_PER_CHUNK = 256


class AutoregressiveHead(FeatureHead):
    """Head that drafts token by token, to any depth.

    Attributes:
        norm: norm of outputs before the output head; None without one.
        num_layers: number of layers with keys and values.
    """

    norm: nn.Module | None

    @property
    def num_layers(self) -> int:
        """Number of layers that keep keys and values of a text."""
        return self.config.llama.num_hidden_layers

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] state that the head reads beside a token, from the target's hidden states."""

    @abstractmethod
    def encode_context(self, fused: Tensor, token_ids: Tensor, position_ids: Tensor) -> Any:
        """Read hidden states, each with the token after it.

        Args:
            fused: [S, H] result of `fuse`, or an earlier output of the head.
            token_ids: [S] int64 tokens after the hidden states.
            position_ids: [S] int64 positions of the hidden states.

        Returns:
            The text, with `keys` and `values` [S, K, d] and `position_ids` [S].
        """

    @abstractmethod
    def draft(self, context: Any, rows: Tensor, branches: BranchCache) -> Tensor:
        """[N, H] outputs at rows [N] of a text, whose keys `branches` already holds."""

    @abstractmethod
    def advance(
        self, outputs: Tensor, token_ids: Tensor, position_ids: Tensor, branches: BranchCache
    ) -> Tensor:
        """[N, H] next outputs of rows that read their own last output.

        Args:
            outputs: [N, H] last outputs.
            token_ids: [N] int64 tokens drafted from them.
            position_ids: [N] int64 positions, one after the last.
            branches: gets the rows' new keys and values.
        """

    def unroll(
        self,
        text: Any,
        token_ids: Tensor,
        rows: Tensor,
        branches: BranchCache,
        detach: bool = False,
        own_tokens: bool = False,
    ) -> Iterator[Tensor]:
        """Yield outputs [N, H] of depth 1, 2, ... for drafts along the text's own tokens.

        Row t first gives the output after x_{t+1}, then, from its own output and x_{t+2}, the next
        one. This is the training-time test. It also gives greedy decoding's outputs, as a draft is
        only followed while it is accepted.

        Args:
            text: whole text.
            token_ids: [S + 1] int64, the text and the next token.
            rows: [N] int64.
            branches: branches of the rows, without own keys.
            detach: stop gradients into outputs that are fed back.
            own_tokens: follow the likeliest draft tokens instead of the text's.
        """
        outputs = self.draft(text, rows, branches)
        step = 0
        while True:
            yield outputs
            step += 1
            fed = outputs.detach() if detach else outputs
            if own_tokens:
                tokens = self._rank_token_ids(outputs.detach(), 1).squeeze(1)
            else:
                # Rows at the end of the text repeat its last token; their outputs are not used.
                tokens = token_ids[(rows + 1 + step).clamp_max(len(token_ids) - 1)]
            outputs = self.advance(fed, tokens, text.position_ids[rows] + step, branches)

    def apply_final_norm(self, outputs: Tensor) -> Tensor:
        """[..., H] outputs after the last norm."""
        return outputs if self.norm is None else self.norm(outputs)

    def compute_logits(self, outputs: Tensor) -> Tensor:
        """[..., W] draft logits of outputs [..., H]."""
        return super().compute_logits(self.apply_final_norm(outputs))

    @torch.no_grad()
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64 best tokens per depth, see `DraftHead.candidates`."""
        device = output.hidden_states.device
        ids = torch.tensor(token_ids, device=device)
        places = torch.arange(len(ids) - 1, device=device)
        text = self.encode_context(self.fuse(self.collect_features(output)[0]), ids[1:], places)
        rows = places[first:]
        seen = build_causal_range(Documents.from_length(len(places), device), rows)
        unrolled = self.unroll(
            text, ids, rows, BranchCache(text.keys[None], text.values[None], seen)
        )
        best = torch.stack([self._rank_token_ids(next(unrolled), width) for _ in range(depth)])
        reached = rows + torch.arange(depth, device=device).unsqueeze(1)
        return best.masked_fill((reached >= self.max_positions).unsqueeze(2), PAD)

    def _rank_token_ids(self, outputs: Tensor, width: int) -> Tensor:
        """[N, width] best target ids after outputs [N, H]."""
        parts = [
            self.compute_logits(part).topk(width).indices for part in outputs.split(ROWS_PER_CHUNK)
        ]
        return self.vocab.to_target_ids(torch.cat(parts))
