"""What a draft weighs in a loss: it counts only behind tokens that the target has chosen itself.

A draft is looked at when all tokens before it are the target's own, so a head that sees none of
them, as Medusa's, has to know what the target says after those, not after any text.

Letters: S tokens of a batch in a row, P answered places, m rows of a student.
"""

import torch
from torch import Tensor

from train.batch.rows import SUPERVISION, Batch


class Path:
    """Where a text is what its target would have written.

    Args:
        batch: what is learnt of it.
        weight: of a draft, for each token before it that the target would not have chosen.

    Attributes:
        shares: [S] float32 for the token after each: 1, or `weight`. Those in no loss mask were
            given to the target, and leave its path as little as its own do.
    """

    def __init__(self, batch: Batch, weight: float) -> None:
        self.weight, self.places = weight, batch[SUPERVISION].places
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
        depth: of the drafts, from 1: as many tokens lie between.
        scale: [] float32, of a draft on the path.
    """

    def __init__(self, path: Path, places: Tensor, depth: int, scale: Tensor) -> None:
        self.path, self.places, self.scale = path, places, scale
        self.ahead = torch.arange(depth, device=places.device)

    def __getitem__(self, rows: slice) -> Tensor:
        """[m] float32."""
        before = self.places[rows].unsqueeze(1) + self.ahead
        return self.scale * self.path.shares[before].prod(1)
