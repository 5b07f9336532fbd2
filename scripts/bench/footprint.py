"""What a computation costs here: the peak of its memory and its median time.

Needs torch alone, so that it also runs in the environments of other toolkits.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from conf.command.clock import timed


class Footprint(NamedTuple):
    """Of one run.

    Attributes:
        seconds: median.
        peak_bytes: peak of what was allocated beyond what was there before.
    """

    seconds: float
    peak_bytes: int


def footprint(run: Callable[[], object], device: torch.device, repeats: int) -> Footprint:
    """After one run to warm up, one for the memory and `repeats` for the time."""
    run()
    peak = peak_bytes(run, device)
    return Footprint(median_seconds(run, device, repeats), peak)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak of the tensor memory that a run allocates beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    # Every allocation, unlike resident memory, which also counts what nobody holds any more.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    return highest(found.profiler.kineto_results.events())


def highest(events: list[Any], within: str | None = None) -> int:
    """Most bytes that live at once.

    Args:
        events: of a profile with memory, in their order.
        within: name of a stretch that counts, with what lives from before; all of it unless told.
    """
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == within]
    begin, end = spans[0] if within else (0, math.inf)
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            if begin <= event.start_ns() <= end:
                peak = max(peak, live)
    return peak


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over repeats."""
    return statistics.median(timed(run, device) for _ in range(repeats))


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = dict(line.split(":") for line in lines)["MemAvailable"]
    return int(free.split()[0]) * 1024


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """A flag for each whole number."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def best_device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def where(device: torch.device) -> str:
    """The machine, as tables name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s)"
