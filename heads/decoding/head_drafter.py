"""What drafters with a head share: texts of a batch end, and others take their rows.

Letters: B texts.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self, final

from torch import Tensor

from heads.decoding.cache import upload
from heads.decoding.chains import Calibration
from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.tree import Shape


class HeadDrafter(ABC):
    """Drafts with a head, attached to its target; `observe` and `propose` must be written.

    Args:
        head: what drafts.
        shape: of the drafts.
        calibration: cuts chains; None leaves them whole.

    Attributes:
        state: names of the attributes that hold something of each text. Those are tensors [B, ...],
            or have `rows` and `take` as `Generators`; None before anything was seen.
        taps, static_nodes: see `heads.decoding.drafting.Drafter`.
    """

    state: ClassVar[tuple[str, ...]] = ()
    static_nodes: int | None = None

    def __init__(
        self, head: Any, shape: Shape | None = None, calibration: Calibration | None = None
    ) -> None:
        self.head, self.taps = head, head.taps
        self.shape, self.calibration = shape, calibration

    @abstractmethod
    def observe(self, seen: Committed) -> None:
        """See `heads.decoding.drafting.Drafter`."""

    @abstractmethod
    def propose(self, roots: Roots) -> Draft:
        """See `heads.decoding.drafting.Drafter`."""

    @final
    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only, the others have ended; perhaps before any was seen."""
        for name in self.state:
            held = getattr(self, name)
            if isinstance(held, Tensor):
                setattr(self, name, held[upload(rows, held.device)])
            elif held is not None:
                setattr(self, name, held.rows(rows))

    @final
    def take(self, row: int, other: Self) -> None:
        """A row goes on with the one text of another drafter, which has seen its prompt alone."""
        for name in self.state:
            held, new = getattr(self, name), getattr(other, name)
            if isinstance(held, Tensor):
                held[row] = new[0]
            else:
                held.take(row, new)
