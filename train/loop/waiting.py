"""Time that a run waits for the data of its steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from conf.command.clock import Stopwatch

MUCH = 0.1
"""Share of a run's time from which waiting matters."""


class WaitTimer:
    """Share of a run's time spent waiting, since the last look.

    Attributes:
        num_looks: looks at the share so far.
    """

    def __init__(self) -> None:
        self.num_looks = 0
        self.restart()

    def restart(self) -> None:
        """Forget all times."""
        self._watch, self._waited_s = Stopwatch(), 0.0

    @contextmanager
    def measure_wait(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        watch = Stopwatch()
        yield
        self._waited_s += watch.host_seconds()

    def pop_wait_fraction(self) -> float:
        """Share since the last look."""
        share = self._waited_s / self._watch.host_seconds()
        self.num_looks += 1
        self.restart()
        return share


def format_server_balance(waiting: float) -> str:
    """Line that tells whether servers of hidden states or their trainers wait.

    Args:
        waiting: share of the trainers' time.
    """
    if waiting > MUCH:
        return (
            f"training waits for hidden states {waiting:.0%} of the time; {1 / (1 - waiting):.1f} "
            "times as many servers in target.engine would keep it busy"
        )
    return (
        f"training waits for hidden states {waiting:.0%} of the time; the servers keep up and "
        "could feed more processes"
    )
