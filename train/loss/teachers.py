"""Teachers of a draft head: the text, or the target's own distribution.

Row r of a teacher is the distribution after one token of the text. A draft token of depth d from
token t is compared with the row of token t + d, so heads and steps share rows and each row is
computed once.

Letters: P rows, c rows of a chunk, r rows of a piece, D hidden, V vocabulary, W draft vocabulary, k
kept ids.
"""

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
        return build_top_k_teacher(vocab, ids, log_probs, temperature)
    states = batch[HIDDEN_STATES].flatten(0, 1)[indices]
    return build_hidden_teacher(target, vocab, states, temperature)


def build_text_teacher(labels: Tensor, soft: Teacher | None = None) -> Teacher:
    """Build the teacher that gives the text, with the target's distributions beside it if given.

    Args:
        labels: [P] int64 next tokens.
        soft: teacher of distributions to learn instead.
    """

    def compute_chunk(begin: int, end: int) -> tuple[Tensor, Distribution | None]:
        return labels[begin:end], None if soft is None else soft.compute_chunk(begin, end)

    row_bytes = labels.element_size() if soft is None else soft.bytes_per_row
    return Teacher(len(labels), row_bytes, compute_chunk)


def build_hidden_teacher(
    target: EmbeddingsAndOutputHead, vocab: DraftVocab, hidden: Tensor, temperature: float = 1.0
) -> Teacher:
    """Build the teacher that computes the target's distribution from its hidden states.

    Args:
        target: the target, of which only the output head is used.
        vocab: the draft vocabulary.
        hidden: [P, D] last hidden states.
        temperature: divisor of the logits.
    """

    def compute_chunk(begin: int, end: int) -> Distribution:
        logits = target.compute_logits(hidden[begin:end])
        if temperature != 1.0:
            logits = logits.div_(temperature)
        drafted = logits if vocab.is_full else logits.index_select(1, vocab.ids)
        pieces = [
            _target_softmax(logits[rows], drafted[rows])
            for rows in split_evenly(0, len(logits), count_piece_rows(logits))
        ]
        top1_ids, log_norm, mass, p_log_p_sums = map(torch.cat, zip(*pieces, strict=True))
        are_probs = drafted.dtype is torch.float32
        return TargetDistribution(
            top1_ids, drafted, mass, p_log_p_sums, None if are_probs else log_norm
        )

    return Teacher(len(hidden), target.vocab_size * hidden.element_size(), compute_chunk)


def _target_softmax(logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute top-1 ids, log norm, mass and p log p [r] of logits [r, V] and drafted ones [r, W].

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


class TargetDistribution(NamedTuple):
    """Distribution of the target.

    Attributes:
        top1_ids: [c] int64 likeliest ids of the whole vocabulary.
        drafted: [c, W], p normalised over the whole vocabulary; or logits in the target's dtype,
            half as wide.
        mass: [c], the sum of p.
        p_log_p: [c], the sum of p log p.
        log_norm: [c] logsumexp of the logits over the whole vocabulary; None beside p.
    """

    top1_ids: Tensor
    drafted: Tensor
    mass: Tensor
    p_log_p: Tensor
    log_norm: Tensor | None = None

    def pair_with(self, chunk_rows: Tensor, student: Softmax) -> DistributionPair:
        """See `Distribution`."""
        p = self.drafted.index_select(0, chunk_rows)
        if self.log_norm is not None:
            p = (p.to(student.q) - self.log_norm[chunk_rows].unsqueeze(1)).exp_()
        return DistributionPair(p, self.mass[chunk_rows], self.p_log_p[chunk_rows], student)


def build_top_k_teacher(
    vocab: DraftVocab, ids: Tensor, log_probs: Tensor, temperature: float = 1.0
) -> Teacher:
    """Build the teacher that knows the target's k likeliest ids only.

    Only the total probability of all other ids is known, so it is spread over them as the student
    spreads its own. KL, and every divergence of the form sum of q f(p / q), then equals the
    divergence over k ids and one bucket for the rest. Ids outside the draft vocabulary are dropped
    and do not join the rest.

    Args:
        vocab: the draft vocabulary.
        ids: [P, k] int, likeliest first.
        log_probs: [P, k] log-probabilities over the whole vocabulary.
        temperature: divisor of the logits. The rest then counts as a single id.
    """

    def compute_chunk(begin: int, end: int) -> Distribution:
        best, probs = ids[begin:end].long(), log_probs[begin:end].float().exp()
        rest = (1 - probs.sum(-1, keepdim=True)).clamp_min(MIN_MASS)
        if temperature != 1.0:
            cooled = torch.cat([probs, rest], -1).log().div_(temperature).softmax(-1)
            probs, rest = cooled[:, :-1], cooled[:, -1:]
        return _TargetTopK(best[:, 0], vocab.to_draft_ids(best), probs, rest)

    return Teacher(len(ids), 12 * ids.shape[1], compute_chunk)  # of k ids and log-probabilities


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
