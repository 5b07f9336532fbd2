"""Memory of a run: estimated for an 8B target, and against peaks measured here.

`python scripts/bench/memory.py` prints the estimate by part of every kind of head on a target of
Llama-3-8B's shape, on 8 processes. Then, at an eighth of its width and 4 layers, it prints the
estimate beside the measured peak of a training step, with one process and with two.

With `--cuda` it prints instead the estimate beside the peak on a CUDA device at full size: beside
the 8B target, and on stored hidden states of a target of Llama-3-70B's shape. One process trains on
one sequence per pass, compiled.

Every token is supervised, as the estimate assumes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
import os
import random
import subprocess
import tempfile
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from data.templates.record_encoder import Sample
from heads.kinds import build_variant_table
from heads.vocab import DraftVocab
from scripts.bench.harness import ROOT, best_device, compute_peak_bytes, format_device
from scripts.bench.training import (
    make_objective,
    make_random_target,
    parse_arguments,
    reset_peak_memory,
    start_run,
)
from train.loop import loop
from train.loop.memory import BytesByPart, estimate_memory
from train.objective import LaunchSpec
from train.parallel import processes

HEADS = tuple(build_variant_table())
TARGETS = {
    "8B": ["--hidden", "4096", "--layers", "32"],
    "70B, stored": ["--hidden", "8192", "--layers", "80"],
}
LAUNCH_FILES = {"DDP": "ddp", "FSDP2": "fsdp2", "ZeRO-2": "zero2"}


def parse_sizes(head: str, scale: int, *more: str) -> argparse.Namespace:
    """Parse sizes: Llama-3-8B's shape, width and vocabulary divided by `scale`, in bfloat16."""
    shape = ["--hidden", str(4096 // scale), "--vocab", str(128256 // scale)]
    return parse_arguments(
        [head, *shape, "--draft-vocab", str(32000 // scale), "--dtype", "bfloat16", *more]
    )


def build_estimate_table(length: int) -> Table:
    """Build the table of estimates for each head on 8 processes."""
    title = f"8B target, {length} tokens, 8 processes, bfloat16: GB on each"
    table = Table("part", title=title)
    columns: list[BytesByPart] = []
    for name in HEADS:
        options = parse_sizes(name, 1, "--layers", "32", "--max-length", str(length))
        with torch.device("meta"):
            target = make_random_target(options, torch.device("meta"))
            vocab = DraftVocab(torch.arange(options.draft_vocab), target.vocab_size)
            objective = make_objective(name, target, vocab)
        for strategy in LAUNCH_FILES:
            table.add_column(f"{name}\n{strategy}", justify="right")
            setting = LaunchSpec(length, torch.bfloat16, strategy, 8, cuda=True)
            columns.append(estimate_memory(objective, setting) or {})
    for part in dict.fromkeys(part for column in columns for part in column):
        cells = (column.get(part) for column in columns)
        table.add_row(part, *("" if size is None else f"{size / 1e9:.1f}" for size in cells))
    table.add_row("all", *(f"{sum(column.values()) / 1e9:.1f}" for column in columns))
    return table


def make_texts(options: argparse.Namespace, num_texts: int) -> list[Sample]:
    """Make random texts that fill sequences and are learnt completely."""
    generator, length = random.Random(0), options.max_length
    made = [[generator.randrange(options.vocab) for _ in range(length)] for _ in range(num_texts)]
    return [Sample(ids, [True] * length) for ids in made]


def measure_step(name: str, length: int) -> dict[str, Any]:
    """Measure the third step of this process.

    Returns:
        Strategy, estimate and measured peak in bytes.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        options = parse_sizes(
            name, 8, "--layers", "4", "--max-length", str(length), "--batch-size",
            os.environ.get("WORLD_SIZE", "1"),
        )  # fmt: skip
        run, _ = start_run(options, Path(folder) / "out", make_texts(options, 8))
        for _ in range(2):  # DDP lays its buckets out anew in the second step
            run.optimizer_step()
        with record_function("measured"):
            run.optimizer_step()
        run.close()
    peak = compute_peak_bytes(profiler.profiler.kineto_results.events(), "measured")
    return collect_result(run, length, peak)


def measure_on_cuda(name: str, length: int, target: str) -> dict[str, Any]:
    """Measure three steps beside one of `TARGETS` on a CUDA device.

    Returns:
        Strategy, estimate and peak in bytes; the peak is None if memory did not suffice.
    """
    options = parse_sizes(name, 1, *TARGETS[target], "--max-length", str(length), "--compile")
    with tempfile.TemporaryDirectory() as folder:
        stored = target.endswith("stored")
        run, _ = start_run(options, Path(folder) / "out", make_texts(options, 8), stored)
        reset_peak_memory(run.device)
        peak: int | None = None
        with suppress(torch.OutOfMemoryError):
            for _ in range(3):
                run.optimizer_step()
            peak = torch.cuda.max_memory_allocated(run.device)
        run.close()
    return collect_result(run, length, peak)


def collect_result(run: loop.TrainingLoop, length: int, peak: int | None) -> dict[str, Any]:
    """Estimate the memory of a run that was measured, and end its processes.

    Returns:
        Strategy, estimate and measured peak in bytes; the peak is None if memory did not suffice.
    """
    strategy = run.placement.name
    setting = LaunchSpec.from_config(run.config, length, strategy, run.accelerator)
    parts = estimate_memory(run.job.objective, setting) or {}
    processes.end_processes(run.accelerator)
    return {"strategy": strategy, "parts": parts, "peak": peak}


def measure_in_processes(
    name: str, length: int, *more: str, file: str | None = None
) -> dict[str, Any]:
    """Measure in other processes: one, or two by a launch file."""
    command, environment = [sys.executable], {**os.environ}
    if "--target" not in more:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if file is not None:
        config = ROOT / f"conf/accelerate/{file}.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += [__file__, "--worker", name, "--length", str(length), *more]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def build_cuda_table(length: int) -> Table:
    """Measure each head at full size on a CUDA device; build the table of estimates and peaks."""
    title = (
        f"{length} tokens, bfloat16, compiled, one process on {format_device(best_device())}: GB"
    )
    table = Table("target", "head", "estimated", "measured", "ratio", title=title)
    for target in TARGETS:
        for name in HEADS:
            result = measure_in_processes(name, length, "--target", target)
            estimated, peak = sum(result["parts"].values()), result["peak"]
            row = [
                target, name, f"{estimated / 1e9:.1f}" if estimated else "no formula",
                "does not fit" if peak is None else f"{peak / 1e9:.1f}",
                f"{estimated / peak:.2f}" if estimated and peak else "",
            ]  # fmt: skip
            table.add_row(*row)
            print(*row, file=sys.stderr)  # a later head may fail
    return table


def build_comparison_table(length: int) -> Table:
    """Measure each head at an eighth of the width; build the table of estimates and peaks."""
    title = f"an eighth of the width, 4 layers, {length} tokens, bfloat16, CPU: MB on each"
    table = Table("head", "launch", "estimated", "measured", "ratio", title=title)
    for name in HEADS:
        for strategy, file in [("one process", None), *LAUNCH_FILES.items()]:
            result = measure_in_processes(name, length, file=file)
            estimated, peak = sum(result["parts"].values()), result["peak"]
            launch = strategy if file is None else f"{result['strategy']}, 2 processes"
            sizes = (f"{size / 1e6:.0f}" for size in (estimated, peak))
            table.add_row(name, launch, *sizes, f"{estimated / peak:.2f}")
    return table


def main() -> None:
    """Print the table of estimates and a table of measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens, where measured")
    parser.add_argument("--large-length", type=int, default=4096, help="tokens, on 8B")
    parser.add_argument("--cuda", action="store_true", help="peaks on a CUDA device, on 8B and 70B")
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=HEADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        given = options.worker, options.length
        result = measure_on_cuda(*given, options.target) if options.target else measure_step(*given)
        print(json.dumps(result), flush=True)
        return
    console = Console(width=110)
    if options.cuda:
        console.print(build_cuda_table(options.large_length))
        return
    console.print(build_estimate_table(options.large_length))
    console.print(build_comparison_table(options.length))


if __name__ == "__main__":
    main()
