"""Clocks of all measurements: seconds of calls, of parts of decoding, and of a GPU's work.

This module needs torch alone.
"""

import json
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

CPU = torch.device("cpu")
PART = "part: "
"""Prefix of the names of parts in a profile."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Stopwatch:
    """Clock that starts once a device has done all earlier work."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        _wait_for_device(device)
        self._started, self._busy = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Return the seconds so far, after waiting for the device's work."""
        _wait_for_device(self.device)
        return time.perf_counter() - self._started

    def host_seconds(self) -> float:
        """Return the seconds so far, without waiting for the device."""
        return time.perf_counter() - self._started

    def processor_seconds(self) -> float:
        """Return the processor seconds so far of all threads of this process.

        Other programs on the machine do not add to them.
        """
        return time.process_time() - self._busy


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of a call, including the device's work."""
    watch = Stopwatch(device)
    run()
    return watch.seconds()


@dataclass
class DecodingTimes:
    """Seconds that one text spent in each part of decoding.

    The seconds of a batch are divided equally among its texts. On a GPU, a part lasts from its
    first to its last kernel, so idle time of the device, while it waits for Python, is included;
    `measure_busy_seconds` leaves it out.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    step: float = 0.0
    """Draft, verify and accept, where one CUDA graph holds all three."""
    total: float = 0.0
    capture: float = 0.0
    """Capturing CUDA graphs. These seconds are in no other field."""
    num_captures: float = 0.0
    """Number of captured graphs. A batch's captures are divided equally among its texts."""

    @property
    def decode(self) -> float:
        """Seconds after the prompt's pass."""
        return self.total - self.prefill

    @property
    def host(self) -> float:
        """Seconds of decoding outside the named parts."""
        return self.decode - self.draft - self.verify - self.accept - self.step


class PartClock:
    """Clock that divides the seconds of each part of decoding among the texts of a batch.

    The seconds of a pass over a batch are divided equally among its texts, so the seconds of all
    texts add up to the time that has passed. On CUDA the parts are timed by events, without
    waiting for the device.

    Args:
        device: device that decodes.
        num_texts: number of texts that will be decoded.

    Attributes:
        times: seconds of each text.
    """

    def __init__(self, device: torch.device, num_texts: int = 1) -> None:
        self.times = [DecodingTimes() for _ in range(num_texts)]
        self._watch = Stopwatch(device)
        self._last = self._aside = 0.0
        self._events: list[tuple[str, Sequence[int], torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure_part(self, name: str, texts: Sequence[int] = (0,)) -> Iterator[None]:
        """Time the block as one part.

        Args:
            name: field of `DecodingTimes` to add the seconds to.
            texts: indices of the texts in the batch.
        """
        if self._watch.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with label_part(name):
                yield
            end.record()
            self._events.append((name, texts, start, end))
        else:
            before = self._watch.seconds()
            yield
            self._add_seconds(name, texts, self._watch.seconds() - before)

    @contextmanager
    def pause_timing(self, texts: Sequence[int] = (0,)) -> Iterator[None]:
        """Keep the block, a capture of a CUDA graph, out of all parts and of the total.

        Waits for the device before and after the block.

        Args:
            texts: indices of the texts in the batch.
        """
        start = self._watch.seconds()
        yield
        seconds = self._watch.seconds() - start
        self._aside += seconds
        self._add_seconds("capture", texts, seconds)
        self._add_seconds("num_captures", texts, 1)

    def end_lap(self, texts: Sequence[int] = (0,)) -> float:
        """Divide the seconds since the last lap among texts; return the host's seconds so far."""
        now = self._watch.host_seconds() - self._aside
        self._add_seconds("total", texts, now - self._last)
        self._last = now
        return now

    def finish_timing(self, texts: Sequence[int] = (0,)) -> None:
        """End the last lap, wait for the device and add up its events."""
        self._watch.seconds()
        self.end_lap(texts)
        for name, batch, start, end in self._events:
            end.synchronize()  # it may be of another device
            self._add_seconds(name, batch, start.elapsed_time(end) / 1000)
        self._events = []

    def _add_seconds(self, name: str, texts: Sequence[int], seconds: float) -> None:
        for text in texts:
            times = self.times[text]
            setattr(times, name, getattr(times, name) + seconds / len(texts))


def label_part(name: str) -> record_function:
    """Label what the block does, and what it launches, as a part in profiles."""
    return record_function(PART + name)


def measure_busy_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Measure the seconds per part in which a GPU was busy, in one call under the profiler.

    The profiler slows down launches, not the launched work. The time of the same call without the
    profiler, less these seconds, is therefore the cost of Python and of launching.
    """
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        # torch 2.11 warns, in the middle of a progress bar, that it keeps one cycle's events;
        # `acc_events` keeps all, and takes 18 times as long.
        warnings.filterwarnings("ignore", message=".*clears events")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        # Events as objects lack their kind before torch 2.12.
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        return sum_busy_seconds(json.loads(path.read_text())["traceEvents"])


def sum_busy_seconds(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sum the seconds of the device's work by the part whose block launched the work.

    Args:
        events: events of a profile in Chrome's format, with times in microseconds.
    """
    parts: list[tuple[float, float, str]] = []
    launched: dict[int, float] = {}
    work: list[tuple[int, float]] = []
    for event in events:
        if event["ph"] != "X":
            continue
        category, correlation = event.get("cat", ""), event.get("args", {}).get("correlation", 0)
        if category == "user_annotation" and event["name"].startswith(PART):
            part = event["name"].removeprefix(PART)
            parts.append((event["ts"], event["ts"] + event["dur"], part))
        elif category in LAUNCHES:
            launched[correlation] = event["ts"]
        elif category in WORK:
            work.append((correlation, event["dur"]))
    parts.sort()
    busy: dict[str, float] = {}
    for correlation, duration in work:
        if correlation in launched:
            place = bisect_right(parts, launched[correlation], key=lambda part: part[0]) - 1
            if place >= 0 and launched[correlation] <= parts[place][1]:
                name = parts[place][2]
                busy[name] = busy.get(name, 0.0) + duration / 1e6
    return busy


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
