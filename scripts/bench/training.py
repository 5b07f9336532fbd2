"""Speed of training, the time of its parts, and the utilisation of the hardware.

`python scripts/bench/training.py [HEAD] [--hidden 4096 --layers 32 ...]` runs the training loop
itself on a random target of that shape, with random documents of chat-like lengths. It prints
tokens/s (without padding), peak memory, padding, the share of time of each part, and model FLOP
utilisation. Utilisation is the FLOPs of the target's forward pass and of the head's forward and
backward pass, counted on one step, divided by the time of a step and by the FLOP/s of a square
matrix product measured in the same run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import gc
import importlib
import math
import random
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from conf.command.clock import PART, measure_busy_seconds, measure_seconds
from conf.settings.data import StateFormat, TeacherKind
from conf.settings.target import Dtype
from conf.settings.training import LogConfig, Optimizer, Schedule, TrainConfig
from data.features.store_format import StoreContents, TensorSpec
from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from heads.kinds import build_variant_table, find_kind_name, make_untrained_head
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.harness import add_size_flags, best_device, format_device
from train.batch.data_loader import Dataset
from train.loop import loop, memory
from train.loop.loop import TrainingJob
from train.objective import LaunchSpec
from train.parallel import processes

PARTS = ("waiting", "target", "head", "loss", "backward", "optimizer")
NUM_WARM_UP = 2
MEAN_DOCUMENT_TOKENS = 400


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the settings; the defaults suit a CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", nargs="?", default="eagle3", choices=tuple(build_variant_table()))
    add_size_flags(parser, hidden=256, layers=8, vocab=4096, draft_vocab=32000, micro_batch_size=1)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per step")
    parser.add_argument("--steps", type=int, default=6, help="number of timed steps")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args(given)


def make_random_target(options: argparse.Namespace, device: torch.device) -> Target:
    """Make a random Llama with 128-wide heads, four per key-value head."""
    torch.manual_seed(0)
    num_heads = max(4, options.hidden // 128)
    config = LlamaConfig(
        vocab_size=options.vocab, hidden_size=options.hidden,
        intermediate_size=int(3.5 * options.hidden), num_hidden_layers=options.layers,
        num_attention_heads=num_heads, num_key_value_heads=max(1, num_heads // 4),
        max_position_embeddings=options.max_length, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return Target(model, None, "random")


def make_embeddings_and_output_head(
    options: argparse.Namespace, device: torch.device
) -> EmbeddingsAndOutputHead:
    """Make the ends of a random target, all that a run beside a feature store has of it."""
    model = make_random_target(options, torch.device("meta")).model
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        end.to_empty(device=device).weight.data.normal_(std=0.02)
    return EmbeddingsAndOutputHead.from_model(model, None, "random")


class StoredRows:
    """Hold packed sequences with hidden states, here zeros, as a feature store gives them.

    Args:
        packed: packed sequences without states.
        fields: name, shape and dtype of each stored tensor.
    """

    def __init__(self, packed: PackedDataset, fields: tuple[TensorSpec, ...]) -> None:
        self.packed, self.fields = packed, fields

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.packed[index]
        length = self.packed.max_length
        states = {
            field.name: torch.zeros(length, *field.shape, dtype=field.dtype)
            for field in self.fields
        }
        return {**states, **row}


def iter_documents(options: argparse.Namespace, num_sequences: int) -> Iterator[Sample]:
    """Yield documents of random tokens, with log-normal lengths; the first third is a prompt."""
    generator = random.Random(0)
    left = num_sequences * options.max_length
    while left > 0:
        spread = generator.lognormvariate(math.log(MEAN_DOCUMENT_TOKENS) - 0.5, 1.0)
        length = max(8, min(options.max_length, int(spread)))
        ids = [generator.randrange(options.vocab) for _ in range(length)]
        yield Sample(ids, [i >= length // 3 for i in range(length)])
        left -= length


def make_objective(variant: str, target: EmbeddingsAndOutputHead, vocab: DraftVocab) -> Any:
    """Make the objective with which an entry script trains an untrained head.

    Args:
        variant: a key of `heads.kinds.build_variant_table`.
        target: the frozen target.
        vocab: draft vocabulary, for heads that can have one.
    """
    head = make_untrained_head(variant, target, vocab)
    entry: Any = importlib.import_module(f"train.{find_kind_name(head)}")
    return entry.main.build_default_objective(head, target)


def start_run(
    options: argparse.Namespace,
    out_dir: Path,
    samples: Iterable[Sample] | None = None,
    stored: bool = False,
) -> tuple[loop.TrainingLoop, PackedDataset]:
    """Make a run of the training loop before its first step, and its data.

    Args:
        options: result of `parse_arguments`.
        out_dir: folder for the output of training.
        samples: samples to learn; unset takes `iter_documents`.
        stored: whether to train on hidden states of a feature store, with only the embedding and
            the output head of the target.
    """
    num_steps = NUM_WARM_UP + 2 * options.steps + 2
    config = TrainConfig(
        max_steps=num_steps, warmup_steps=1, batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size, dtype=Dtype(options.dtype), learning_rate=1e-3,
        adam_learning_rate=1e-3, optimizer=Optimizer(options.optimizer),
        schedule=Schedule.constant,
    )  # fmt: skip
    accelerator = processes.start_accelerator(config)
    target: EmbeddingsAndOutputHead
    target = (make_embeddings_and_output_head if stored else make_random_target)(
        options, accelerator.device
    )
    if samples is None:
        samples = iter_documents(options, max(64, options.batch_size))
    train = PackedDataset(samples, options.max_length, seed=0)
    counts = train.count_token_ids(target.vocab_size)
    vocab = DraftVocab.from_counts(counts, options.draft_vocab, [])
    objective = make_objective(options.head, target, vocab)
    if options.compile:
        objective.compile_parts()
    rows: Dataset = train
    if stored:
        layers, kind = objective.head.taps.layers, TeacherKind.hidden
        contents = StoreContents(target.hidden_size, layers, kind, 0, StateFormat.bf16)
        rows = StoredRows(train, contents.tensor_specs)
    job = TrainingJob(config, LogConfig(), 0, out_dir, objective, rows, rows)
    return loop.TrainingLoop(accelerator, job), train


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a product of two square matrices, by the median time of several."""
    size = 8192 if device.type == "cuda" else 1536
    a = torch.randn(size, size, device=device).to(dtype)
    times = [measure_seconds(lambda: a @ a, device) for _ in range(8)]
    return 2 * size**3 / statistics.median(times[2:])


def count_flash_flops(num_products: int, query: Tensor, bounds: Tensor) -> int:
    """Count the FLOPs of attention inside documents: 2 P Q d times the sum of n^2.

    Each document of n tokens takes P products for each of Q heads. As in torch's own count, nothing
    is subtracted for a causal mask or a window.

    Args:
        num_products: P. The forward pass has 2, of scores and output. The backward pass has 5, of
            scores and of the gradients of values, probabilities, queries and keys.
        query: [S, Q, d].
        bounds: [1 + number of documents] int, where documents begin and end among the S tokens.
    """
    num_pairs = sum(length**2 for length in bounds.diff().tolist())
    return 2 * num_products * query.shape[1] * query.shape[2] * num_pairs


FLASH_FLOPS = {
    torch.ops.aten._flash_attention_forward: lambda query, _keys, _values, bounds, *_, **_more: (
        count_flash_flops(2, query, bounds)
    ),
    torch.ops.aten._flash_attention_backward: lambda _grad, *given, **_more: count_flash_flops(
        5, given[0], given[5]
    ),
}
"""Counts of the kernels of `heads.layers.documents`. Torch 2.11's own count refuses fewer heads of
keys than of queries."""


def count_flops(run: Callable[[], object]) -> int:
    """Count the FLOPs of matrix products and attention of a call."""
    counter = FlopCounterMode(display=False)
    counter.flop_registry |= FLASH_FLOPS
    with counter:
        run()
    return counter.get_total_flops()


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a CUDA device's memory, after freeing memory that nothing refers to."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure_part_fractions(run: loop.TrainingLoop, num_steps: int) -> dict[str, float]:
    """Measure the share of each part in the time of some steps.

    On CUDA a part has the seconds of the work that it launched; there is no `waiting`.
    """

    def run_steps() -> None:
        for _ in range(num_steps):
            run.optimizer_step()

    if run.device.type == "cuda":
        whole, busy = measure_seconds(run_steps, run.device), measure_busy_seconds(run_steps)
        return {name: busy.get(name, 0.0) / whole for name in PARTS if name != "waiting"}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        whole = measure_seconds(run_steps, run.device)
    seconds = {event.key: event.cpu_time_total / 1e6 for event in profiler.key_averages()}
    return {name: seconds.get(PART + name, 0.0) / whole for name in PARTS}


@dataclass(frozen=True)
class Speed:
    """Hold the cost of some training steps.

    Attributes:
        step_s: median time of a step.
        tokens_per_s: tokens per second, without padding.
        peak_gib: peak of the device's memory in training, or on a CPU of the process's memory.
            Weights are in it.
        padding: share of padding in the data set.
        matmul: FLOP/s of a square matrix product.
        utilisation: FLOP/s of the steps divided by `matmul`.
        head_size: number of parameters of the head.
    """

    step_s: float
    tokens_per_s: float
    peak_gib: float
    padding: float
    matmul: float
    utilisation: float
    head_size: int


@contextmanager
def open_run(options: argparse.Namespace) -> Iterator[tuple[loop.TrainingLoop, PackedDataset]]:
    """Open a run of the training loop before its first step, in a temporary folder.

    Yields:
        The run and its data.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, train = start_run(options, Path(folder) / "out")
        try:
            yield run, train
        finally:
            run.close()


def estimate_bytes(run: loop.TrainingLoop, options: argparse.Namespace) -> int | None:
    """Estimate the memory of one process on a GPU in bytes; None without a formula."""
    sizes = LaunchSpec.from_config(run.config, options.max_length, "DDP", run.accelerator)
    parts = memory.estimate_memory(run.job.objective, sizes)
    return None if parts is None else sum(parts.values())


def measure_steps(
    run: loop.TrainingLoop, train: PackedDataset, options: argparse.Namespace
) -> Speed:
    """Measure some training steps: their time, memory and FLOP/s."""
    reset_peak_memory(run.device)
    for _ in range(NUM_WARM_UP):
        run.optimizer_step()
    flops = count_flops(run.optimizer_step)
    tokens, times = run.tokens, []
    for _ in range(options.steps):
        times.append(measure_seconds(run.optimizer_step, run.device))
    tokens = run.tokens - tokens
    rate = measure_matmul_flops(run.device, getattr(torch, options.dtype))
    step_s = statistics.median(times)
    if run.device.type == "cuda":
        peak_gib = torch.cuda.max_memory_allocated(run.device) / 2**30
    else:
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Speed(
        step_s=step_s,
        tokens_per_s=tokens / sum(times),
        peak_gib=peak_gib,
        padding=1 - train.num_tokens / (len(train) * options.max_length),
        matmul=rate,
        utilisation=flops / step_s / rate,
        head_size=sum(p.numel() for p in run.job.objective.head.parameters()),
    )


def main() -> None:
    """Print the table of figures of a training run."""
    options = parse_arguments()
    with open_run(options) as (run, train):
        speed, parts = (
            measure_steps(run, train, options),
            measure_part_fractions(run, options.steps),
        )
    head = f"{options.head}, head of {speed.head_size / 1e6:.1f} M, {options.dtype}"
    table = Table("figure", "value", title=f"{head}, {format_device(best_device())}")
    table.add_row("time of a step", f"{1000 * speed.step_s:.0f} ms")
    table.add_row("tokens per second", f"{speed.tokens_per_s:,.0f}")
    table.add_row("peak memory", f"{speed.peak_gib:.2f} GiB")
    table.add_row("padding", f"{speed.padding:.1%}")
    for name, share in parts.items():
        table.add_row(f"time: {name}", f"{share:.1%}")
    table.add_row("time: rest", f"{1 - sum(parts.values()):.1%}")
    table.add_row("matmul", f"{speed.matmul / 1e12:.2f} TFLOP/s")
    table.add_row("model FLOP utilisation", f"{speed.utilisation:.1%}")
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
