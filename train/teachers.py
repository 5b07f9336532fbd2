"""What a draft head is compared with: the text, or the target's own distribution.

Row r of a teacher is what comes after one token of the text. A draft of depth d from token t
is compared with the row of token t + d, so heads and steps share rows, and each is computed
once. Letters: P rows, c of a chunk, D hidden, V vocabulary, W draft vocabulary, k kept ids.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heads.target import Target
from heads.vocab import DraftVocab

LEAST_MASS = 1e-6


class Distribution(Protocol):
    """The target's distribution after c tokens."""

    @property
    def best(self) -> Tensor:
        """[c] int64, the likeliest id of the whole vocabulary."""
        ...

    def log_p(self, at: Tensor, log_q: Tensor) -> Tensor:
        """[r, W] log-probabilities over the draft vocabulary, normalised over the whole one.

        Args:
            at: [r] int64, rows of the chunk.
            log_q: [r, W], what the students say there.
        """
        ...


@dataclass(frozen=True)
class HiddenTeacher:
    """The target's distribution, from its hidden states.

    Attributes:
        target: its output head.
        vocab: the draft vocabulary.
        hidden: [P, D] last hidden states.
    """

    target: Target
    vocab: DraftVocab
    hidden: Tensor

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.hidden)

    @property
    def num_columns(self) -> int:
        """V."""
        return self.target.vocab_size

    def known(self, begin: int, end: int) -> Distribution:
        """The distribution after rows begin..end."""
        logits = self.target.logits(self.hidden[begin:end]).float()
        log_norm = logits.logsumexp(-1, keepdim=True)
        best = logits.argmax(-1)
        table = logits if self.vocab.full else logits[:, self.vocab.ids]
        return _Table(best, table.sub_(log_norm))


class _Table(NamedTuple):
    best: Tensor
    table: Tensor
    """[c, W]."""

    def log_p(self, at: Tensor, log_q: Tensor) -> Tensor:
        del log_q
        return self.table[at]


@dataclass(frozen=True)
class TopKTeacher:
    """The target's distribution, of which only the k likeliest ids were kept.

    The rest's mass is known, its shape is not: it is taken to be the student's own. A
    divergence of the form sum of q f(p / q) then has the value and the gradient that it has
    over the k ids and one bucket for the rest; KL and the others here are such. Ids outside
    the draft vocabulary are left out, and no part of the rest's mass.

    Attributes:
        vocab: the draft vocabulary.
        ids: [P, k] int, likeliest first.
        log_probs: [P, k], normalised over the whole vocabulary.
    """

    vocab: DraftVocab
    ids: Tensor
    log_probs: Tensor

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.ids)

    @property
    def num_columns(self) -> int:
        """W, of what `log_p` makes."""
        return len(self.vocab.ids)

    def known(self, begin: int, end: int) -> Distribution:
        """The distribution after rows begin..end."""
        ids = self.ids[begin:end].long()
        log_probs = self.log_probs[begin:end].float()
        rest = (1 - log_probs.exp().sum(-1)).clamp_min(LEAST_MASS)
        return _TopK(ids[:, 0], self.vocab.to_draft(ids), log_probs, rest.log())


class _TopK(NamedTuple):
    best: Tensor
    columns: Tensor
    """[c, k] int64, -1 outside the draft vocabulary."""
    log_probs: Tensor
    log_rest: Tensor

    def log_p(self, at: Tensor, log_q: Tensor) -> Tensor:
        columns, log_probs = self.columns[at], self.log_probs[at]
        inside = columns >= 0
        # What is outside repeats one that is inside, since one place is written once or alike.
        stand_in = inside.int().argmax(-1, keepdim=True)
        columns = torch.where(inside, columns, columns.gather(1, stand_in)).clamp_min(0)
        log_probs = torch.where(inside, log_probs, log_probs.gather(1, stand_in))
        q_kept = log_q.gather(1, columns).exp().masked_fill(~inside, 0.0).sum(-1)
        log_q_rest = (1 - q_kept).clamp_min(LEAST_MASS).log()
        log_p = log_q + (self.log_rest[at] - log_q_rest).unsqueeze(1)
        nothing = ~inside.any(-1, keepdim=True)
        log_probs = torch.where(nothing, log_p[:, :1], log_probs)
        return log_p.scatter_(1, columns, log_probs)
