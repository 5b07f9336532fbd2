"""What a run needs of memory: estimated for an 8B target, and against peaks measured here.

`python scripts/bench/memory.py` prints the estimate by part of every kind of head on a
target of Llama-3-8B's shape, on 8 processes; then, at an eighth of its width and 4 layers, the
estimate beside the peak of live memory of a training step, one process and two. Every token is
supervised, as the estimate assumes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import json
import os
import random
import subprocess
import tempfile
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from conf.settings.target import Dtype
from conf.settings.training import LogConfig, Schedule, TrainConfig
from data.prepared.pack import PackedDataset
from data.templates.encoder import Sample
from heads.kinds import forms
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.harness import ROOT, highest
from scripts.bench.training import fresh_objective
from train.loop import loop
from train.loop.loop import Job
from train.loop.memory import Parts, estimate
from train.loss.sizes import Setting
from train.parallel import processes

HEADS = tuple(forms())
FILES = {"DDP": "ddp", "FSDP2": "fsdp2", "ZeRO-2": "zero2"}
DTYPE = torch.bfloat16


def llama(scale: int, num_layers: int, length: int) -> LlamaConfig:
    """Llama-3-8B's shape, its width and vocabulary divided by `scale`."""
    return LlamaConfig(
        vocab_size=128256 // scale, hidden_size=4096 // scale, intermediate_size=14336 // scale,
        num_hidden_layers=num_layers, num_attention_heads=32 // scale, head_dim=128,
        num_key_value_heads=8 // scale, max_position_embeddings=length, eos_token_id=None,
    )  # fmt: skip


def make_objective(name: str, config: LlamaConfig, size: int, device: torch.device) -> Any:
    """An objective with random weights, on `meta` without any.

    Args:
        name: of `HEADS`.
        config: the target's.
        size: ids of EAGLE-3's draft vocabulary.
        device: of everything.
    """
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
        model.to(DTYPE)
        target = Target(model, None, "random")
        return fresh_objective(name, target, DraftVocab(torch.arange(size), target.vocab_size))


def large(length: int) -> Table:
    """The estimates on 8 processes."""
    title = f"8B target, {length} tokens, 8 processes, bfloat16: GB on each"
    table = Table("part", title=title)
    columns: list[Parts] = []
    for name in HEADS:
        objective = make_objective(name, llama(1, 32, length), 32000, torch.device("meta"))
        for strategy in FILES:
            table.add_column(f"{name}\n{strategy}", justify="right")
            setting = Setting(length, DTYPE, strategy, 8, cuda=True)
            columns.append(estimate(objective, setting) or {})
    for part in dict.fromkeys(part for column in columns for part in column):
        cells = (column.get(part) for column in columns)
        table.add_row(part, *("" if size is None else f"{size / 1e9:.1f}" for size in cells))
    table.add_row("all", *(f"{sum(column.values()) / 1e9:.1f}" for column in columns))
    return table


def measured(name: str, length: int) -> dict[str, Any]:
    """Strategy, estimate and measured peak in bytes of the third step, of this process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        config = TrainConfig(
            batch_size=num_processes, dtype=Dtype.bfloat16, learning_rate=1e-3,
            schedule=Schedule.constant,
        )  # fmt: skip
        accelerator = processes.start(config)
        shape = llama(8, 4, length)
        objective = make_objective(name, shape, 4000, torch.device("cpu"))
        generator = random.Random(0)
        texts = [[generator.randrange(shape.vocab_size) for _ in range(length)] for _ in range(8)]
        samples = [Sample(ids, [True] * length) for ids in texts]
        train = PackedDataset(samples, length, seed=0)
        job = Job(config, LogConfig(), 0, Path(folder) / "out", objective, train, train)
        run = loop.Run(accelerator, job)
        for _ in range(2):  # DDP lays its buckets out anew in the second step
            run.optimizer_step()
        with record_function("measured"):
            run.optimizer_step()
        run.close()
    strategy = run.placement.name
    parts = estimate(objective, Setting.of(config, length, strategy, accelerator)) or {}
    peak = highest(profiler.profiler.kineto_results.events(), "measured")
    processes.end(accelerator)
    return {"strategy": strategy, "parts": parts, "peak": peak}


def launched(name: str, length: int, file: str | None) -> dict[str, Any]:
    """`measured` in processes of its own: one, or two by a launch file."""
    command, environment = [sys.executable], os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    if file is not None:
        config = ROOT / f"conf/accelerate/{file}.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += [__file__, "--worker", name, "--length", str(length)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def small(length: int) -> Table:
    """Estimates and peaks at an eighth of the width."""
    title = f"an eighth of the width, 4 layers, {length} tokens, bfloat16, CPU: MB on each"
    table = Table("head", "launch", "estimated", "measured", "ratio", title=title)
    for name in HEADS:
        for strategy, file in [("one process", None), *FILES.items()]:
            result = launched(name, length, file)
            estimated, peak = sum(result["parts"].values()), result["peak"]
            launch = strategy if file is None else f"{result['strategy']}, 2 processes"
            sizes = (f"{size / 1e6:.0f}" for size in (estimated, peak))
            table.add_row(name, launch, *sizes, f"{estimated / peak:.2f}")
    return table


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens, where measured")
    parser.add_argument("--large-length", type=int, default=4096, help="tokens, on 8B")
    parser.add_argument("--worker", choices=HEADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured(options.worker, options.length)), flush=True)
        return
    console = Console(width=110)
    console.print(large(options.large_length))
    console.print(small(options.length))


if __name__ == "__main__":
    main()
