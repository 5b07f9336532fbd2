"""Teachers of a draft head: the text, or the target's own distribution.

Row r of a teacher is the distribution after one token of the text. A draft token of depth d from
token t is compared with the row of token t + d, so heads and steps share rows and each row is
computed once. Letters: P rows, c rows of a chunk, D hidden, V vocabulary, W draft vocabulary, k
kept ids.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.loss.divergences import Distribution, DistributionPair, Softmax, dot_rows, p_log_p
from train.loss.fused_linear import Teacher, piece_rows, split_evenly

MIN_MASS = 1e-6


@dataclass(frozen=True)
class TextTeacher:
    """The text, optionally with a teacher of distributions beside it.

    Attributes:
        labels: [P] int64 next tokens.
        soft: distributions to learn instead.
    """

    labels: Tensor
    soft: Teacher | None = None

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.labels)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a label, or of the distribution beside it."""
        return self.labels.element_size() if self.soft is None else self.soft.bytes_per_row

    def compute_chunk(self, begin: int, end: int) -> tuple[Tensor, Distribution | None]:
        """Compute labels, and the distribution if any, of rows begin..end."""
        soft = None if self.soft is None else self.soft.compute_chunk(begin, end)
        return self.labels[begin:end], soft


@dataclass(frozen=True)
class HiddenTeacher:
    """The target's distribution, from its hidden states.

    Attributes:
        target: the target, of which only the output head is used.
        vocab: the draft vocabulary.
        hidden: [P, D] last hidden states.
        temperature: divides the logits.
    """

    target: EmbeddingsAndOutputHead
    vocab: DraftVocab
    hidden: Tensor
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.hidden)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of V logits."""
        return self.target.vocab_size * self.hidden.element_size()

    def compute_chunk(self, begin: int, end: int) -> Distribution:
        """Compute the distribution after rows begin..end."""
        logits = self.target.compute_logits(self.hidden[begin:end])
        if self.temperature != 1.0:
            logits = logits.div_(self.temperature)
        drafted = logits if self.vocab.is_full else logits.index_select(1, self.vocab.ids)
        pieces = [
            _target_softmax(logits[rows], drafted[rows])
            for rows in split_evenly(0, len(logits), piece_rows(logits))
        ]
        top1_ids, log_norm, mass, of_p = (torch.cat(column) for column in zip(*pieces, strict=True))
        if drafted.dtype is torch.float32:
            return TargetProbs(top1_ids, drafted, mass, of_p)
        return _TargetLogits(drafted, top1_ids, log_norm, mass, of_p)


def _target_softmax(logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute fields [r] of `_TargetLogits` from logits [r, V] and their drafted columns [r, W].

    Probabilities overwrite the drafted logits if these are float32; students then need no
    exponentials.
    """
    of_drafted = Softmax.from_logits(drafted.float())
    whole = of_drafted if drafted.shape == logits.shape else Softmax.from_logits(logits.float())
    mass = (of_drafted.log_norm - whole.log_norm).exp()
    p = of_drafted.q.mul_(mass.unsqueeze(1))
    of_p = dot_rows(p, of_drafted.logits) - mass * whole.log_norm
    if drafted.dtype is torch.float32:
        drafted.copy_(p)
    return whole.top1_columns, whole.log_norm, mass, of_p


class _TargetLogits(NamedTuple):
    logits: Tensor
    """[c, W] in the target's dtype, half as wide as probabilities."""
    top1_ids: Tensor
    log_norm: Tensor
    """[c], over the whole vocabulary."""
    mass: Tensor
    p_log_p: Tensor

    def pair_with(self, chunk_rows: Tensor, student: Softmax) -> DistributionPair:
        logits = self.logits.index_select(0, chunk_rows).to(student.q)
        p = (logits - self.log_norm[chunk_rows].unsqueeze(1)).exp_()
        return DistributionPair(p, self.mass[chunk_rows], self.p_log_p[chunk_rows], student)


class TargetProbs(NamedTuple):
    """Distribution given by its probabilities.

    Attributes:
        top1_ids: [c] int64.
        p: [c, W], normalised over the whole vocabulary.
        mass: [c], the sum of p.
        p_log_p: [c], the sum of p log p.
    """

    top1_ids: Tensor
    p: Tensor
    mass: Tensor
    p_log_p: Tensor

    @classmethod
    def from_probs(cls, top1_ids: Tensor, p: Tensor) -> "TargetProbs":
        """Make the distribution from probabilities [c, W]."""
        return cls(top1_ids, p, p.sum(-1), p_log_p(p))

    def pair_with(self, chunk_rows: Tensor, student: Softmax) -> DistributionPair:
        """See `Distribution`."""
        return DistributionPair(
            self.p.index_select(0, chunk_rows),
            self.mass[chunk_rows],
            self.p_log_p[chunk_rows],
            student,
        )


@dataclass(frozen=True)
class TopKTeacher:
    """The target's distribution, given by its k likeliest ids.

    The mass of the other ids is known, but not its shape, which is taken to be the student's. A
    divergence of the form sum of q f(p / q), such as KL, then equals the one over the k ids and one
    bucket for the rest. Ids outside the draft vocabulary are dropped and do not count as rest.

    Attributes:
        vocab: the draft vocabulary.
        ids: [P, k] int, likeliest first.
        log_probs: [P, k] log-probabilities over the whole vocabulary.
        temperature: divides logits. The rest then counts as a single id.
    """

    vocab: DraftVocab
    ids: Tensor
    log_probs: Tensor
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.ids)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of k ids and log-probabilities."""
        return 12 * self.ids.shape[1]

    def compute_chunk(self, begin: int, end: int) -> Distribution:
        """Compute the distribution after rows begin..end."""
        ids, probs = self.ids[begin:end].long(), self.log_probs[begin:end].float().exp()
        rest = (1 - probs.sum(-1, keepdim=True)).clamp_min(MIN_MASS)
        if self.temperature != 1.0:
            cooled = torch.cat([probs, rest], -1).log().div_(self.temperature).softmax(-1)
            probs, rest = cooled[:, :-1], cooled[:, -1:]
        return _TargetTopK(ids[:, 0], self.vocab.to_draft_ids(ids), probs, rest)


class _TargetTopK(NamedTuple):
    top1_ids: Tensor
    columns: Tensor
    """[c, k] int64, -1 outside the draft vocabulary."""
    probs: Tensor
    """[c, k]."""
    rest: Tensor
    """[c, 1]."""

    def pair_with(self, chunk_rows: Tensor, student: Softmax) -> DistributionPair:
        columns, rest = self.columns[chunk_rows], self.rest[chunk_rows]
        inside = columns >= 0
        columns = columns.clamp_min(0)
        probs = self.probs[chunk_rows].to(student.q).masked_fill(~inside, 0.0)
        kept = torch.zeros_like(student.q).scatter_add_(1, columns, probs)
        others = student.q.masked_fill(kept > 0, 0.0)
        left = others.sum(-1, keepdim=True).clamp_min(MIN_MASS)
        p = others.mul_(rest / left).add_(kept)
        mass = probs.sum(-1) + rest.squeeze(1)
        return DistributionPair(p, mass, p_log_p(p), student)
