"""What a draft weighs in a loss: it counts only behind tokens that the target has chosen itself.

A draft is looked at when all tokens before it are the target's own, so a head that sees none of
them, as Medusa's, has to know what the target says after those, not after any text.

Letters: S tokens of a batch in a row, P answered places, m rows of a student.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.batch.rows import SUPERVISION, UNROLLED, Batch, Unrolled, labels_of
from train.loss.fused import Part, Teacher
from train.loss.teachers import Distribution


class Path:
    """Where a text is what its target would have written.

    Args:
        batch: what is learnt of it.
        weight: of a draft, for each token before it that the target would not have chosen.

    Attributes:
        longest: depth of a draft.
        shares: [S] float32 for the token after each: 1, or `weight`. Those in no loss mask were
            given to the target, and leave its path as little as its own do.
    """

    def __init__(self, batch: Batch, weight: float) -> None:
        learnt = batch[SUPERVISION]
        self.weight, self.places = weight, learnt.places
        self.longest = len(learnt.depths) - 1
        num_tokens = batch["input_ids"].numel()
        self.shares = torch.ones(num_tokens, device=self.places.device)

    def tell(self, begin: int, end: int, chosen: Tensor) -> None:
        """Which tokens [end - begin] bool behind these answered places the target would choose."""
        self.shares[self.places[begin:end]] = chosen + self.weight * ~chosen


class PathScales:
    """The weight of each row of a student, as far as the teacher is known.

    Args:
        path: of the batch.
        places: [M] int64, the tokens that draft, of S.
        depths: [M] int64 of the drafts, from 1: as many tokens lie between.
        scales: [M] float32, of drafts on the path.
    """

    def __init__(self, path: Path, places: Tensor, depths: Tensor, scales: Tensor) -> None:
        self.path, self.places, self.depths, self.scales = path, places, depths, scales

    def __getitem__(self, rows: slice) -> Tensor:
        """[m] float32."""
        places, depths = self.places[rows], self.depths[rows]
        found = self.scales[rows].clone()
        for step in range(self.path.longest):
            inside = step < depths
            found *= torch.where(inside, self.path.shares[places + inside * step], 1.0)
        return found


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
    scales = PathScales(path, unrolled.tokens, 1 + unrolled.steps, slots.scales[:])
    return slots._replace(scales=scales), Followed(teacher, labels_of(batch), path)
