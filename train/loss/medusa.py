"""Losses of Medusa heads, and of the target itself in joint training.

Sums over supervised tokens (see `train.loss.sums`) of a cross-entropy against the text, or of a KL
divergence from a teacher.

Shapes: B batch, T tokens, D hidden, V vocab, K heads, P answered places.
"""

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from data.features.store_format import HIDDEN_STATES
from heads.target_model.adapter import Adapter
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead, Projection
from heads.target_model.model import FeatureLayers, Target
from train.batch.prefetch import Dataset, batch_to_device, stack_sequences
from train.batch.states import add_target_states
from train.batch.supervision import SUPERVISION, Batch, MatchedRows, add_supervision, gather_labels
from train.loss.divergences import Softmax, kl, text_cross_entropy
from train.loss.fused import RowLosses, Scales, Student, Teacher, compute_fused_loss
from train.loss.ranking import mark_top1_and_top5
from train.loss.sums import (
    LossSums,
    OffPathScales,
    OffPathTeacher,
    OffPathTokens,
    build_counted_mask,
    sum_term,
)
from train.loss.teachers import TextTeacher


class SoftLabels(NamedTuple):
    """The target's own distributions, learnt instead of the text.

    Attributes:
        teacher: distributions after the answered places.
        off_path_weight: factor on a draft token's loss for each token before it that is not the
            teacher's first choice.
    """

    teacher: Teacher
    off_path_weight: float = 1.0


class MedusaHeads(Protocol):
    """Heads that the Medusa loss can train."""

    @property
    def num_heads(self) -> int:
        """K."""

    def head_states(self, k: int, hidden_states: Tensor, /) -> Tensor:
        """Input [N, D] of the projection of head k (from 0), for last hidden states [N, D]."""

    def make_projection(self, k: int, /) -> Projection:
        """Projection of head k, from 0."""


def compute_head_weights(num_heads: int, decay: float) -> Tensor:
    """[K] float32 lambda_k = decay ** k for k = 1..K."""
    return torch.tensor([decay**k for k in range(1, num_heads + 1)], dtype=torch.float32)


def compute_medusa_loss(
    heads: MedusaHeads,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    soft: SoftLabels | None = None,
    compiled: bool = False,
) -> LossSums:
    """Sum the cross-entropy of every head against the text, or KL from the target.

    Args:
        heads: heads to train.
        hidden: [B, T, D], the target's last hidden states.
        batch: indexed batch with `input_ids` [B, T].
        scale: [K] float32 weight of each head's sum in the total.
        soft: the target's distributions. Head k at t then learns the one at t + k, which predicts
            x_{t+1+k}. Accuracies are against the text in either case.
        compiled: compile the loss on first use.

    Returns:
        Sums whose measures are: the token was the head's first choice, or among its first five.

    Source: "Medusa", arXiv:2401.10774, section 2.2.1, eq. 1.
    """
    flat, labels = hidden.flatten(0, 1), gather_labels(batch)
    path, teacher = None, None
    if soft is not None:
        path = OffPathTokens(batch, soft.off_path_weight)
        teacher = OffPathTeacher(soft.teacher, labels, path)
    students = []
    with record_function("head"):
        for k in range(heads.num_heads):
            rows: MatchedRows = batch[SUPERVISION].depths[1 + k]
            states = heads.head_states(k, flat[rows.output_indices])
            scales: Scales = scale[k].expand(len(states))
            if path is not None:
                depths = rows.output_indices.new_full((), 1 + k).expand(len(states))
                scales = OffPathScales(path, rows.output_indices, depths, scales[:])
            students.append(Student(states, heads.make_projection(k), rows.teacher_rows, scales))
    with record_function("loss"):
        text = TextTeacher(labels, teacher)
        total, values = compute_fused_loss(students, text, text_criterion, compiled)
    terms = map(sum_term, values, map(build_counted_mask, students))
    return LossSums(total, torch.stack(list(terms), dim=1))


def compute_target_loss(
    target: EmbeddingsAndOutputHead,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    teacher: Teacher | None = None,
    compiled: bool = False,
) -> LossSums:
    """Cross-entropy of the target against the text, or KL from its earlier distributions.

    Args:
        target: the target, whose output head gets no gradient.
        hidden: [B, T, D], its last hidden states.
        batch: indexed batch with `input_ids` [B, T].
        scale: [1] float32, the weight of the sum in the total.
        teacher: distributions after the answered places, learnt instead of the text.
        compiled: compile the loss on first use.

    Returns:
        One term, with the measures of `medusa_loss`.
    """
    rows: MatchedRows = batch[SUPERVISION].depths[0]
    states = hidden.flatten(0, 1)[rows.output_indices]
    student = Student(states, target.projection, rows.teacher_rows, scale.expand(len(states)))
    with record_function("loss"):
        text = TextTeacher(gather_labels(batch), teacher)
        total, (values,) = compute_fused_loss([student], text, text_criterion, compiled)
    return LossSums(total, sum_term(values).unsqueeze(1))


class _TextCriterion:
    """Cross-entropy against the text or KL from a teacher; top-1 and top-5 of the text."""

    num_metrics = 2

    def __call__(
        self, chunk: Any, chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        labels, soft = chunk[0][chunk_rows], chunk[1]
        measures = mark_top1_and_top5(student.logits, labels)
        if soft is not None:
            loss, grad = kl(soft.pair_with(chunk_rows, student), needs_grad)
            return RowLosses(torch.stack([loss, *measures]), grad)
        loss, grad = text_cross_entropy(student, labels, needs_grad)
        return RowLosses(torch.stack([loss, *measures]), grad)


text_criterion = _TextCriterion()


class HeldoutLoss:
    """Mean cross-entropy of a target on the answers of held-out sequences.

    Args:
        target: target with the adapter.
        adapter: adapter in training.
        heldout: packed sequences.
        num_sequences: largest number of sequences to use.
    """

    def __init__(
        self, target: Target, adapter: Adapter, heldout: Dataset, num_sequences: int
    ) -> None:
        self.target = target
        self.adapter = adapter
        self.heldout = heldout
        self.num_sequences = num_sequences

    def __call__(self) -> dict[str, float]:
        """Loss in nats per token without and with the adapter, and its change in percent."""
        adapted = self._compute_mean_loss()
        return {
            "target_loss_before": self.loss_without_adapter,
            "target_loss": adapted,
            "target_change_percent": 100 * (adapted / self.loss_without_adapter - 1),
        }

    @cached_property
    def loss_without_adapter(self) -> float:
        """Loss without the adapter."""
        with self.adapter.pause_adapter():
            return self._compute_mean_loss()

    @torch.no_grad()
    def _compute_mean_loss(self) -> float:
        sums = torch.zeros(2, device=self.target.device)
        for index in range(min(len(self.heldout), self.num_sequences)):
            batch = batch_to_device(
                add_supervision(stack_sequences(self.heldout, [index]), 0), self.target.device
            )
            hidden = add_target_states(self.target, batch, FeatureLayers())[HIDDEN_STATES]
            sums += compute_target_loss(self.target, hidden, batch, sums.new_ones(1)).terms[:2, 0]
        return float(sums[0] / sums[1])
