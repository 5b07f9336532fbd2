"""What a draft weighs in a loss: it counts only behind tokens that the target has chosen itself.

A draft is looked at when all tokens before it are the target's own, so a head that sees none of
them, as Medusa's, has to know what the target says after those, not after any text.

Letters: S tokens of a batch in a row, P answered places, m rows of a student.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.batch.rows import SUPERVISION, UNROLLED, Batch, Unrolled, labels_of
from train.loss.fused import Part, Scales, Teacher
from train.loss.pieces import Where
from train.loss.teachers import Distribution

LEAST_SHARE = 0.05
"""Drafts that weigh less are not learnt: they would teach little, and cost as much as any."""


class Path:
    """Where a text is what its target would have written.

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

    def tell(self, begin: int, end: int, chosen: Tensor) -> None:
        """Which tokens [end - begin] bool behind these answered places the target would choose."""
        self.strays[self.places[begin:end]] = ~chosen


class PathScales:
    """The weight of each row of a student, as far as the teacher is known.

    Args:
        path: of the batch.
        places: [M] int64, the first tokens between, of S: each is the one behind its place.
        between: [M] int64, how many tokens lie between a row and its draft.
        scales: [M] float32, of drafts on the path.
    """

    def __init__(self, path: Path, places: Tensor, between: Tensor, scales: Tensor) -> None:
        self.path, self.places, self.between, self.scales = path, places, between, scales

    def __getitem__(self, rows: Where) -> Tensor:
        """[m] float32."""
        return self.scales[rows] * self.shares(rows)

    def shares(self, rows: Where) -> Tensor:
        """[m] float32 of what drafts on the path weigh; 0 where that is next to nothing."""
        places, between = self.places[rows], self.between[rows]
        strays = torch.zeros_like(between)
        for step in range(self.path.longest):
            inside = step < between
            strays += inside & self.path.strays[places + inside * step]
        found = self.path.weight ** strays.float()
        return found * (found >= LEAST_SHARE)


def looked_at(scales: Scales) -> Tensor | None:
    """[M] bool, rows that a path has not left; None without a path."""
    return scales.shares(slice(None)) > 0 if isinstance(scales, PathScales) else None


@dataclass(frozen=True)
class Followed:
    """A teacher that tells a path what it would have chosen, as far as it is asked.

    Attributes:
        teacher: gives distributions.
        labels: [P] int64, the tokens that came.
        path: is told.
    """

    teacher: Teacher
    labels: Tensor
    path: Path

    @property
    def num_rows(self) -> int:
        """P."""
        return self.teacher.num_rows

    @property
    def row_bytes(self) -> int:
        """The teacher's."""
        return self.teacher.row_bytes

    def chunk(self, begin: int, end: int) -> Distribution:
        """The teacher's."""
        found: Distribution = self.teacher.chunk(begin, end)
        self.path.tell(begin, end, found.best == self.labels[begin:end])
        return found


def on_path(slots: Part, teacher: Teacher, batch: Batch, weight: float) -> tuple[Part, Teacher]:
    """Drafts of a batch's `Unrolled` rows, scaled by how far the text before them is the target's.

    Args:
        slots: those rows.
        teacher: what they are compared with.
        batch: what is learnt of it.
        weight: as of `Path`; 1 leaves all as it is.
    """
    if weight == 1:
        return slots, teacher
    unrolled: Unrolled = batch[UNROLLED]
    path = Path(batch, weight)
    # The token behind that from which a row is drafted is read, and so no reason to doubt.
    scales = PathScales(path, unrolled.tokens + 1, unrolled.steps, slots.scales[:])
    return slots._replace(scales=scales), Followed(teacher, labels_of(batch), path)
