"""Sums over terms from the losses of rows: the weight of each row, and the rows that count.

A loss is a sum and a count, never a mean: the loop divides by the count over all processes and
micro batches of an optimizer step, so the result does not depend on how sequences fall on them.

Serving looks at a draft token only when all tokens before it are the target's own. So a draft
weighs less for each token before it that the target would not have chosen.

Letters: S tokens of a batch in a row, P answered places, M rows of a student, m of a chunk,
K terms (heads or steps), L measures.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from train.batch.supervision import SUPERVISION, UNROLLED, Batch, Unrolled, labels_of
from train.loss.fused import Student, Teacher, Where
from train.loss.teachers import Distribution

LEAST_SHARE = 0.05
"""Drafts that weigh less are not learnt: they would teach little, and cost as much as any."""


class Sums(NamedTuple):
    """The losses of a batch.

    Attributes:
        total: [] float32, the loss of each term times its scale; the only one with a gradient.
        terms: [2 + L, K] float32, summed over the supervised tokens of each term: the loss,
            the tokens, and L measures.
    """

    total: Tensor
    terms: Tensor


class TargetPath:
    """The tokens of a batch that its target would not have chosen.

    Args:
        batch: what is learnt of it.
        weight: of a draft, for each token before it that the target would not have chosen.

    Attributes:
        longest: depth of a draft.
        strays: [S] bool for the token after each, whether the target would not have chosen it.
            Those in no loss mask were given to the target, and leave its path as little as its
            own do.
    """

    def __init__(self, batch: Batch, weight: float) -> None:
        learnt = batch[SUPERVISION]
        self.weight, self.places = weight, learnt.places
        self.longest = len(learnt.depths) - 1
        num_tokens, device = batch["input_ids"].numel(), self.places.device
        self.strays = torch.zeros(num_tokens, dtype=torch.bool, device=device)


class PathScales:
    """The weight of each row of a student, as far as the teacher is known.

    Args:
        path: of the batch.
        places: [M] int64, the first tokens between, of S: each is the one behind its place.
        between: [M] int64, how many tokens lie between a row and its draft.
        scales: [M] float32, of drafts on the path.
    """

    def __init__(self, path: TargetPath, places: Tensor, between: Tensor, scales: Tensor) -> None:
        self.path, self.places, self.between, self.scales = path, places, between, scales

    def __getitem__(self, rows: Where) -> Tensor:
        """[m] float32."""
        return self.scales[rows] * self.shares(rows)

    def shares(self, rows: Where) -> Tensor:
        """[m] float32, the weight of each draft as a share of one on the path; 0 if tiny."""
        places, between = self.places[rows], self.between[rows]
        strays = torch.zeros_like(between)
        for step in range(self.path.longest):
            inside = step < between
            strays += inside & self.path.strays[places + inside * step]
        share = self.path.weight ** strays.float()
        return share * (share >= LEAST_SHARE)


@dataclass(frozen=True)
class PathTeacher:
    """A teacher that marks strays on a path, chunk by chunk.

    Attributes:
        teacher: gives distributions.
        labels: [P] int64, the tokens of the text.
        path: is told.
    """

    teacher: Teacher
    labels: Tensor
    path: TargetPath

    @property
    def num_rows(self) -> int:
        """P."""
        return self.teacher.num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the teacher."""
        return self.teacher.row_bytes

    def chunk(self, begin: int, end: int) -> Distribution:
        """Distribution of the teacher after rows begin..end."""
        distribution: Distribution = self.teacher.chunk(begin, end)
        strays = distribution.best != self.labels[begin:end]
        self.path.strays[self.path.places[begin:end]] = strays
        return distribution


def on_path(
    slots: Student, teacher: Teacher, batch: Batch, weight: float
) -> tuple[Student, Teacher]:
    """Scale drafts of a batch's `Unrolled` rows by how far the text before them is the target's.

    Args:
        slots: those rows.
        teacher: what they are compared with.
        batch: what is learnt of it.
        weight: as of `TargetPath`; 1 leaves all as it is.
    """
    if weight == 1:
        return slots, teacher
    unrolled: Unrolled = batch[UNROLLED]
    path = TargetPath(batch, weight)
    # The token behind that from which a row is drafted is read, and so no reason to doubt.
    scales = PathScales(path, unrolled.tokens + 1, unrolled.steps, slots.scales[:])
    return slots._replace(scales=scales), PathTeacher(teacher, labels_of(batch), path)


def counted_rows(student: Student) -> Tensor | None:
    """[M] bool, the rows that a path has not left; None without a path."""
    scales = student.scales
    return scales.shares(slice(None)) > 0 if isinstance(scales, PathScales) else None


def term_sums(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """[2 + L] float32 loss, tokens and measures of a term.

    Args:
        values: [1 + L, M] loss and measures of each row.
        counted: [M] bool, the rows that count; None for all.
    """
    sums = (values if counted is None else values * counted).sum(1, dtype=torch.float32)
    num_rows = sums.new_full((), values.shape[1]) if counted is None else counted.sum().to(sums)
    return torch.cat([sums[:1], num_rows[None], sums[1:]])


def step_sums(values: Tensor, student: Student, unrolled: Unrolled) -> Tensor:
    """[2 + L, K] `term_sums` of each step, from the rows [1 + L, M] of all in their order."""
    steps = values.index_select(1, unrolled.by_step).split(unrolled.sizes, 1)
    counted = counted_rows(student)
    if counted is None:
        return torch.stack([term_sums(step) for step in steps], dim=1)
    masks = counted[unrolled.by_step].split(unrolled.sizes)
    return torch.stack(list(map(term_sums, steps, masks)), dim=1)
