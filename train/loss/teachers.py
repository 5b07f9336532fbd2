"""Teachers of a draft head: the text, or the target's own distribution.

Row r of a teacher is the distribution after one token of the text. A draft token of depth d from
token t is compared with the row of token t + d, so heads and steps share rows and each row is
computed once.

Letters: P rows, c rows of a chunk, r rows of a piece, D hidden, V vocabulary, W draft vocabulary, k
kept ids.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from data.features.store_format import HIDDEN_STATES, TEACHER_IDS, TEACHER_LOG_PROBS
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.batch.batch import SUPERVISION, Batch
from train.loss.divergences import Distribution, DistributionPair, Softmax, dot_rows, p_log_p
from train.loss.fused_linear import Teacher, count_piece_rows, split_evenly

MIN_MASS = 1e-6


def build_target_teacher(
    target: EmbeddingsAndOutputHead, vocab: DraftVocab, batch: Batch, temperature: float
) -> Teacher:
    """Build the teacher of the target's distributions, P rows.

    Args:
        target: the target.
        vocab: the draft vocabulary.
        batch: indexed batch with the target's last hidden states, or with stored top-k ids.
        temperature: divisor of the logits.
    """
    indices = batch[SUPERVISION].token_indices
    if TEACHER_IDS in batch:
        names = (TEACHER_IDS, TEACHER_LOG_PROBS)
        ids, log_probs = (batch[name].flatten(0, 1)[indices] for name in names)
        return TopKTeacher(vocab, ids, log_probs, temperature)
    states = batch[HIDDEN_STATES].flatten(0, 1)[indices]
    return HiddenTeacher(target, vocab, states, temperature)


@dataclass(frozen=True)
class TextTeacher:
    """Teacher that gives the text, optionally with the target's distributions beside it.

    Attributes:
        labels: [P] int64 next tokens.
        soft: teacher of distributions to learn instead.
    """

    labels: Tensor
    soft: Teacher | None = None

    @property
    def num_rows(self) -> int:
        """Return P, the number of rows."""
        return len(self.labels)

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes of a label, or of the distribution beside it."""
        return self.labels.element_size() if self.soft is None else self.soft.bytes_per_row

    def compute_chunk(self, begin: int, end: int) -> tuple[Tensor, Distribution | None]:
        """Compute the labels [c], and the distribution if any, of rows begin..end."""
        soft = None if self.soft is None else self.soft.compute_chunk(begin, end)
        return self.labels[begin:end], soft


@dataclass(frozen=True)
class HiddenTeacher:
    """Teacher that computes the target's distribution from its hidden states.

    Attributes:
        target: the target, of which only the output head is used.
        vocab: the draft vocabulary.
        hidden: [P, D] last hidden states.
        temperature: divisor of the logits.
    """

    target: EmbeddingsAndOutputHead
    vocab: DraftVocab
    hidden: Tensor
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        """Return P, the number of rows."""
        return len(self.hidden)

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes of V logits."""
        return self.target.vocab_size * self.hidden.element_size()

    def compute_chunk(self, begin: int, end: int) -> Distribution:
        """Compute the distribution after rows begin..end."""
        logits = self.target.compute_logits(self.hidden[begin:end])
        if self.temperature != 1.0:
            logits = logits.div_(self.temperature)
        drafted = logits if self.vocab.is_full else logits.index_select(1, self.vocab.ids)
        pieces = [
            _target_softmax(logits[rows], drafted[rows])
            for rows in split_evenly(0, len(logits), count_piece_rows(logits))
        ]
        top1_ids, log_norm, mass, p_log_p_sums = (
            torch.cat(column) for column in zip(*pieces, strict=True)
        )
        if drafted.dtype is torch.float32:
            return TargetProbs(top1_ids, drafted, mass, p_log_p_sums)
        return _TargetLogits(drafted, top1_ids, log_norm, mass, p_log_p_sums)


def _target_softmax(logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute fields [r] of `_TargetLogits` from logits [r, V] and their drafted columns [r, W].

    Probabilities overwrite the drafted logits if these are float32; students then need no
    exponentials.
    """
    drafted_softmax = Softmax.from_logits(drafted.float())
    full_softmax = (
        drafted_softmax if drafted.shape == logits.shape else Softmax.from_logits(logits.float())
    )
    mass = (drafted_softmax.log_norm - full_softmax.log_norm).exp()
    p = drafted_softmax.q.mul_(mass.unsqueeze(1))
    p_log_p_sums = dot_rows(p, drafted_softmax.logits) - mass * full_softmax.log_norm
    if drafted.dtype is torch.float32:
        drafted.copy_(p)
    return full_softmax.top1_columns, full_softmax.log_norm, mass, p_log_p_sums


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
    """Distribution of the target as probabilities.

    Attributes:
        top1_ids: [c] int64 likeliest ids of the whole vocabulary.
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
    """Teacher that knows the target's k likeliest ids only.

    Only the total probability of all other ids is known, so it is spread over them as the student
    spreads its own. KL, and every divergence of the form sum of q f(p / q), then equals the
    divergence over k ids and one bucket for the rest. Ids outside the draft vocabulary are dropped
    and do not join the rest.

    Attributes:
        vocab: the draft vocabulary.
        ids: [P, k] int, likeliest first.
        log_probs: [P, k] log-probabilities over the whole vocabulary.
        temperature: divisor of the logits. The rest then counts as a single id.
    """

    vocab: DraftVocab
    ids: Tensor
    log_probs: Tensor
    temperature: float = 1.0

    @property
    def num_rows(self) -> int:
        """Return P, the number of rows."""
        return len(self.ids)

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes of k ids and log-probabilities."""
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
        known = torch.zeros_like(student.q).scatter_add_(1, columns, probs)
        rest_p = student.q.masked_fill(known > 0, 0.0)
        student_rest = rest_p.sum(-1, keepdim=True).clamp_min(MIN_MASS)
        p = rest_p.mul_(rest / student_rest).add_(known)
        mass = probs.sum(-1) + rest.squeeze(1)
        return DistributionPair(p, mass, p_log_p(p), student)
