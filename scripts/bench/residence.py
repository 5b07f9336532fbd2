"""Memory and processor time of processes while they work, as Linux counts it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 0.5


class Residence(NamedTuple):
    """Bytes.

    Attributes:
        rss: in memory, what is shared with other processes included.
        pss: the same with shared pages divided among those that share them.
    """

    rss: int
    pss: int


def residence(pid: int | str = "self") -> Residence:
    """Of a process that runs; nothing of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Residence(0, 0)
    sizes = dict(line.split(":", 1) for line in text.splitlines()[1:])
    found = {name: int(size.split()[0]) * 1024 for name, size in sizes.items()}
    return Residence(found["Rss"], found["Pss"])


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        found = [int(c) for t in tasks.iterdir() for c in (t / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found + [each for child in found for each in descendants(child)]


def processor_seconds(pid: int) -> float:
    """Of a process that runs, in all its threads; 0 of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Peak(NamedTuple):
    """What was seen of a process and its descendants.

    Attributes:
        largest: most bytes of one of them, its proportional set size.
        together: of all of them.
        num_processes: most of them.
        processor_seconds: of all of them, as of the last look at each.
    """

    largest: int
    together: int
    num_processes: int
    processor_seconds: float


def peak_while(run: Callable[[], None], pid: int) -> Peak:
    """Memory of a process and its descendants while something runs, twice a second."""
    seen: list[list[int]] = []
    busy: dict[int, float] = {}
    before = processor_seconds(pid)
    done = threading.Event()

    def look() -> None:
        while not done.wait(INTERVAL_S):
            all_of_them = [pid, *descendants(pid)]
            seen.append([residence(each).pss for each in all_of_them])
            for each in all_of_them:
                busy[each] = max(busy.get(each, 0.0), processor_seconds(each))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        run()
    finally:
        done.set()
        looking.join()
    spent = sum(busy.values()) - before
    return Peak(max(map(max, seen)), max(map(sum, seen)), max(map(len, seen)), spent)
