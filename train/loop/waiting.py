"""The time that a run waits for the data of its steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from conf.command.clock import Stopwatch

MUCH = 0.1
"""Share of a run's time."""


class Waiting:
    """The share of a run's time that goes by waiting, between one look at it and the next.

    Attributes:
        num_looks: at the share, so far.
    """

    def __init__(self) -> None:
        self.num_looks = 0
        self.begin()

    def begin(self) -> None:
        """Forgets all before."""
        self._watch, self._waited_s = Stopwatch(), 0.0

    @contextmanager
    def here(self) -> Iterator[None]:
        """Counts what goes on inside as waiting."""
        watch = Stopwatch()
        yield
        self._waited_s += watch.host_seconds()

    def share(self) -> float:
        """The share since the last look."""
        share = self._waited_s / self._watch.host_seconds()
        self.num_looks += 1
        self.begin()
        return share


def balance(waiting: float) -> str:
    """Which side waits, of servers that give hidden states and trainers that read them.

    Args:
        waiting: share of the trainers' time.
    """
    if waiting > MUCH:
        return (
            f"training waits for hidden states {waiting:.0%} of the time: "
            f"{1 / (1 - waiting):.1f} times as many servers in target.engine would keep it busy"
        )
    return (
        f"training waits for hidden states {waiting:.0%} of the time: the servers keep up, and "
        "may feed more processes"
    )
