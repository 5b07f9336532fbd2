"""Sums of row losses per term, with the weights of rows and the rows that count.

A loss is a sum and a count, never a mean. The loop divides by the count of the whole optimizer
step, so the result does not depend on how sequences fall on processes and micro batches.

Serving verifies a draft token only if all tokens before it are the target's own. A draft token
therefore weighs less for each earlier token that the target would not have chosen.

Letters: S flattened tokens of a batch, P answered places, M rows of a student, m rows of a chunk, K
terms (heads or steps), L measures.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from train.batch.supervision import STEP_TARGETS, SUPERVISION, Batch, StepTargets, gather_labels
from train.loss.fused import RowSelection, Student, Teacher
from train.loss.teachers import Distribution

MIN_WEIGHT_FRACTION = 0.05
"""Least weight of a draft token to learn; less would teach little at full cost."""


class LossSums(NamedTuple):
    """Losses of a batch.

    Attributes:
        total: [] float32 sum of the terms' losses times their scales. The only one with a gradient.
        terms: [2 + L, K] float32, summed over the supervised tokens of each term: the loss,
            the tokens, and L measures.
    """

    total: Tensor
    terms: Tensor


class OffPathTokens:
    """Tokens of a batch that the target would not have chosen.

    Args:
        batch: indexed batch.
        weight: factor on a draft token's loss for each such token before it.

    Attributes:
        longest: largest depth of a draft token.
        is_off_path: [S] bool, whether the next token is not the target's choice. Tokens outside the
            loss mask were given to the target and count as its own.
    """

    def __init__(self, batch: Batch, weight: float) -> None:
        learnt = batch[SUPERVISION]
        self.weight, self.token_indices = weight, learnt.token_indices
        self.longest = len(learnt.depths) - 1
        num_tokens, device = batch["input_ids"].numel(), self.token_indices.device
        self.is_off_path = torch.zeros(num_tokens, dtype=torch.bool, device=device)


class OffPathScales:
    """Weight of each student row, as far as the teacher's chunks are known.

    Args:
        path: tokens of the batch that leave the target's path.
        places: [M] int64 among S, the first token between the row's last known token and its draft.
        between: [M] int64 number of tokens between a row and its draft token.
        scales: [M] float32 weights of draft tokens on the path.
    """

    def __init__(
        self, path: OffPathTokens, places: Tensor, between: Tensor, scales: Tensor
    ) -> None:
        self.path, self.first_between, self.num_between, self.scales = path, places, between, scales

    def __getitem__(self, rows: RowSelection) -> Tensor:
        """[m] float32."""
        return self.scales[rows] * self.compute_fractions(rows)

    def compute_fractions(self, rows: RowSelection) -> Tensor:
        """[m] float32 weight of each draft token relative to one on the path; 0 if tiny."""
        places, between = self.first_between[rows], self.num_between[rows]
        strays = torch.zeros_like(between)
        for step in range(self.path.longest):
            inside = step < between
            strays += inside & self.path.is_off_path[places + inside * step]
        share = self.path.weight ** strays.float()
        return share * (share >= MIN_WEIGHT_FRACTION)


@dataclass(frozen=True)
class OffPathTeacher:
    """Teacher that records, chunk by chunk, which tokens leave the target's path.

    Attributes:
        teacher: gives the distributions.
        labels: [P] int64 tokens of the text.
        path: gets the tokens that leave the path.
    """

    teacher: Teacher
    labels: Tensor
    path: OffPathTokens

    @property
    def num_rows(self) -> int:
        """P."""
        return self.teacher.num_rows

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row of the teacher."""
        return self.teacher.bytes_per_row

    def compute_chunk(self, begin: int, end: int) -> Distribution:
        """Compute the distribution after rows begin..end."""
        distribution: Distribution = self.teacher.compute_chunk(begin, end)
        strays = distribution.top1_ids != self.labels[begin:end]
        self.path.is_off_path[self.path.token_indices[begin:end]] = strays
        return distribution


def scale_off_path_rows(
    slots: Student, teacher: Teacher, batch: Batch, weight: float
) -> tuple[Student, Teacher]:
    """Scale the draft tokens of `Unrolled` rows by how far their text is the target's own.

    Args:
        slots: rows to scale.
        teacher: teacher of these rows.
        batch: indexed batch.
        weight: weight of `TargetPath`; 1 changes nothing.
    """
    if weight == 1:
        return slots, teacher
    unrolled: StepTargets = batch[STEP_TARGETS]
    path = OffPathTokens(batch, weight)
    # The token after the row's own is read by the head, so it cannot mislead the draft.
    scales = OffPathScales(path, unrolled.row_anchors + 1, unrolled.row_steps, slots.scales[:])
    return slots._replace(scales=scales), OffPathTeacher(teacher, gather_labels(batch), path)


def build_counted_mask(student: Student) -> Tensor | None:
    """[M] bool, rows that no path has dropped; None without a path."""
    scales = student.scales
    return scales.compute_fractions(slice(None)) > 0 if isinstance(scales, OffPathScales) else None


def sum_term(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """[2 + L] float32 loss, tokens and measures of a term.

    Args:
        values: [1 + L, M] loss and measures of each row.
        counted: [M] bool, rows that count; None for all.
    """
    sums = (values if counted is None else values * counted).sum(1, dtype=torch.float32)
    num_rows = sums.new_full((), values.shape[1]) if counted is None else counted.sum().to(sums)
    return torch.cat([sums[:1], num_rows[None], sums[1:]])


def sum_steps(values: Tensor, student: Student, unrolled: StepTargets) -> Tensor:
    """[2 + L, K] `term_sums` of each step, from rows [1 + L, M] of all steps."""
    steps = values.index_select(1, unrolled.step_order).split(unrolled.step_sizes, 1)
    counted = build_counted_mask(student)
    if counted is None:
        return torch.stack([sum_term(step) for step in steps], dim=1)
    masks = counted[unrolled.step_order].split(unrolled.step_sizes)
    return torch.stack(list(map(sum_term, steps, masks)), dim=1)
