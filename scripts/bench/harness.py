"""Measure time and memory of a computation; workers, flags and tables of all benchmarks.

Needs only torch, so that it also runs in the environments of other toolkits.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from conf.command.clock import measure_seconds
from conf.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


class Footprint(NamedTuple):
    """Hold the cost of one call.

    Attributes:
        seconds: median time.
        peak_bytes: peak of the memory allocated during the call.
    """

    seconds: float
    peak_bytes: int


def measure_footprint(run: Callable[[], object], device: torch.device, repeats: int) -> Footprint:
    """Measure a call: once to warm up, once for its memory and `repeats` times for its time."""
    run()
    peak = measure_peak_bytes(run, device)
    return Footprint(statistics.median(measure_seconds(run, device) for _ in range(repeats)), peak)


def measure_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Measure the peak of the tensor memory that a call allocates."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    # Every allocation; resident memory would also count freed memory.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return compute_peak_bytes(profiler.profiler.kineto_results.events())


def compute_peak_bytes(events: list[Any], within: str | None = None) -> int:
    """Compute the most bytes that are alive at the same time.

    Args:
        events: events of a profile with memory, in order.
        within: name of a `record_function` span. The peak is taken over this span only; tensors
            allocated before it count while they live. Unset: the peak of the whole profile.
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


def run_worker(worker: str, job: dict[str, Any], python: str) -> dict[str, Any]:
    """Run a job in a separate process, and return its result.

    A separate process keeps the memory of different paths apart; another toolkit also needs other
    packages. A worker reads a job and writes a result, both JSON files.

    Args:
        worker: name of a module in `scripts/bench/`.
        job: content of the JSON file that the worker reads.
        python: path of the Python that runs the worker.

    Raises:
        InputError: the worker failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        question.write_text(json.dumps(job))
        command = [python, "-m", f"scripts.bench.{worker}", str(question), str(answer)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"{python}: {job} failed:\n{done.stderr[-2000:]}")
        return json.loads(answer.read_text())


def add_size_flags(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add a flag for each whole number, named after its keyword."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def best_device() -> torch.device:
    """Return the CUDA device if there is one, and the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def format_device(device: torch.device) -> str:
    """Format the name of the device for the titles of tables."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s)"


def build_markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Build a Markdown table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
