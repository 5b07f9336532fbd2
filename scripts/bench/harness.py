"""Measure time and memory of a computation, in this process or in a worker; tables of figures.

Needs only torch, so that it also runs in the environments of other toolkits.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from conf.command.clock import measure_seconds
from conf.command.forms import PACKAGE, ROOT
from conf.errors import InputError

Figures = Iterator[tuple[str, float]]
"""Names and values of a case, as soon as they are known."""
PLACE = None if PACKAGE else ROOT
"""Folder of workers. Python finds the modules of a clone in the current folder."""
REPEATS = 3


class Footprint(NamedTuple):
    """Hold the cost of one call.

    Attributes:
        seconds: median time.
        peak_bytes: peak of the memory allocated during the call.
    """

    seconds: float
    peak_bytes: int


def measure_footprint(
    run: Callable[[], object], device: torch.device, repeats: int = REPEATS
) -> Footprint:
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


def run_worker(
    worker: str,
    job: dict[str, Any],
    launch: Sequence[str] = (sys.executable,),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Run a job in a separate process, and return its result.

    A separate process keeps the memory of different paths apart; another toolkit also needs other
    packages.

    Args:
        worker: name of a module in `scripts/bench/`, which prints its result as a line of JSON.
        job: JSON values, the only word of its command line.
        launch: Python that runs the worker, and what launches several processes of it.
        environ: environment variables.

    Raises:
        InputError: the worker failed; the message has the end of its output.
    """
    command = [*launch, "-m", f"{__package__}.{worker}", json.dumps(job)]
    done = subprocess.run(
        command, cwd=PLACE, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(f"{launch[0]}: {job} failed:\n{done.stderr[-2000:]}")
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


class WorkerProcess:
    """Hold a process that answers lines of JSON, and stays open while other processes work.

    Args:
        worker: name of a module in `scripts/bench/`.
        words: words of its command line.
        environ: environment variables to add to those of this process.
    """

    def __init__(self, worker: str, *words: str, **environ: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, which `end_process` closes
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{worker}", *words],
            cwd=PLACE, env=os.environ | environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def send(self, value: Any) -> None:
        """Send a value to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the next answer of the process.

        Raises:
            InputError: the process failed.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise InputError(f"a process failed:\n{self._errors.read()[-2000:]}")
        return json.loads(line)

    def end_process(self) -> None:
        """Let the process end with its input, and kill it if it does not within 10 seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()
        self._errors.close()


def take_answers() -> Callable[[Any], None]:
    """Return the function that answers the parent of a `WorkerProcess`.

    Effects: other output of this process goes to standard error.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    return lambda value: print(json.dumps(value), file=answers, flush=True)


def best_device() -> torch.device:
    """Return the CUDA device if there is one, and the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def format_device(device: torch.device) -> str:
    """Format the name of the device for the titles of tables."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s)"


def format_figure(figure: float | None) -> str:
    """Format a figure with three digits; `-` for none."""
    if figure is None:
        return "-"
    return f"{figure:,.3g}" if abs(figure) < 1000 else f"{figure:,.0f}"
