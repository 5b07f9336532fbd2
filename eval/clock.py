"""The one clock of all measurements: wall time, the device's work included. Needs torch alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Stopwatch:
    """Runs from the moment at which a device has done what it was given before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        _synchronize(device)
        self.started = time.perf_counter()

    def seconds(self) -> float:
        """So far, what the device was given meanwhile included."""
        _synchronize(self.device)
        return time.perf_counter() - self.started


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the device's work included."""
    watch = Stopwatch(device)
    run()
    return watch.seconds()


@dataclass
class Times:
    """Seconds per part of decoding a batch."""

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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
