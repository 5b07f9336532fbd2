"""The one clock of all measurements. Needs torch alone."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

CPU = torch.device("cpu")
PART = "part: "
"""What the names of parts begin with in a profile."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Stopwatch:
    """Runs from the moment at which a device has done what it was given before."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        _synchronize(device)
        self._started, self._busy = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """So far, what the device was given meanwhile included."""
        _synchronize(self.device)
        return time.perf_counter() - self._started

    def processor_seconds(self) -> float:
        """So far, of all threads of this process: other programs do not add to it."""
        return time.process_time() - self._busy


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the device's work included."""
    watch = Stopwatch(device)
    run()
    return watch.seconds()


@dataclass
class Times:
    """Seconds per part of decoding a batch.

    On a GPU a part lasts from its first to its last work on the device: what the device stood
    still in between, waiting for Python, is in it. `busy_seconds` tells the two apart.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    total: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after the prompts."""
        return self.total - self.prefill

    @property
    def host(self) -> float:
        """What is left when the named parts are taken away."""
        return self.decode - self.draft - self.verify - self.accept


class PartClock:
    """Adds up seconds per part, on CUDA by events in the stream, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self.times = Times()
        self._watch = Stopwatch(device)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times the block; `name` is a field of `Times`."""
        if self._watch.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with record_function(PART + name):
                yield
            end.record()
            self._events.append((name, start, end))
        else:
            watch = Stopwatch(self._watch.device)
            yield
            self._add(name, watch.seconds())

    def stop(self) -> None:
        """Takes the total; waits for the device."""
        self.times.total = self._watch.seconds()
        for name, start, end in self._events:
            end.synchronize()  # it may be of another device
            self._add(name, start.elapsed_time(end) / 1000)
        self._events = []

    def _add(self, name: str, seconds: float) -> None:
        setattr(self.times, name, getattr(self.times, name) + seconds)


class Traced(NamedTuple):
    """Something that a profile shows; nanoseconds.

    Attributes:
        kind: as Kineto calls it.
        name: of a part, a call or a kernel.
        start: when it began.
        end: when it was done.
        launch: the same number for a call and what it launched.
    """

    kind: str
    name: str
    start: int
    end: int
    launch: int


def busy_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Seconds per part in which a GPU really worked, in one call under the profiler.

    The profiler slows down what launches, not what is launched: against the clock of the same
    call without it, the difference is what Python and launching cost.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    assert traced.profiler is not None
    return busy_by_part(map(_traced, traced.profiler.kineto_results.events()))


def busy_by_part(traced: Iterable[Traced]) -> dict[str, float]:
    """Adds up the device's work by the part whose block launched it."""
    events = list(traced)
    parts = sorted(
        (each.start, each.end, each.name.removeprefix(PART))
        for each in events
        if each.kind == "user_annotation" and each.name.startswith(PART)
    )
    launched = {each.launch: each.start for each in events if each.kind in LAUNCHES}
    busy: dict[str, float] = {}
    for each in events:
        if each.kind in WORK and each.launch in launched:
            place = bisect_right(parts, launched[each.launch], key=lambda part: part[0]) - 1
            if place >= 0 and launched[each.launch] <= parts[place][1]:
                name = parts[place][2]
                busy[name] = busy.get(name, 0.0) + (each.end - each.start) / 1e9
    return busy


def _traced(event: Any) -> Traced:
    start, kind = event.start_ns(), event.activity_type()
    end = start + event.duration_ns()
    return Traced(kind, event.name(), start, end, event.correlation_id())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
