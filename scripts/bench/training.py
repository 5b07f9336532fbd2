"""Runs of training of any size: their speed, the time of their parts, and their memory.

A run is the training loop itself on a random target, with random documents of chat-like lengths.
Utilisation is the FLOPs of the target's forward pass and of the head's forward and backward pass,
counted on one step, divided by the time of a step and by the FLOP/s of a square matrix product
measured in the same run.
"""

import gc
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from conf.command.clock import PART, measure_busy_seconds, measure_seconds
from conf.settings.data import StateFormat, TeacherKind
from conf.settings.target import Dtype
from conf.settings.training import LogConfig, Optimizer, Schedule, TrainConfig
from data.features.store_format import StoreContents
from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from heads.kinds import make_untrained_head
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.harness import (
    REPEATS,
    ROOT,
    Figures,
    compute_peak_bytes,
    run_worker,
)
from train.api import training_objective
from train.batch.data_loader import Dataset
from train.loop import loop, memory
from train.loop.loop import TrainingJob
from train.objective import LaunchSpec
from train.parallel import processes

PARTS = ("waiting", "target", "head", "loss", "backward", "optimizer")
NUM_WARM_UP = 2
MEAN_DOCUMENT_TOKENS = 400
LAUNCH_FILES = {"DDP": "ddp", "FSDP2": "fsdp2", "ZeRO-2": "zero2"}


@dataclass(frozen=True)
class RunSizes:
    """Sizes of a run; the defaults suit a CPU.

    Attributes:
        head: a key of `heads.kinds.build_variant_table`.
        hidden, layers, vocab: sizes of the target.
        draft_vocab: ids of the draft vocabulary, for heads that can have one.
        max_length: tokens per sequence.
        batch_size, micro_batch_size: sequences per step, and per pass.
        steps: number of timed steps.
        dtype: of the target, and of training.
        optimizer: `adamw` or `muon`.
        compile: whether the step's parts are compiled.
    """

    head: str = "eagle3"
    hidden: int = 256
    layers: int = 8
    vocab: int = 4096
    draft_vocab: int = 32000
    max_length: int = 1024
    batch_size: int = 2
    micro_batch_size: int = 1
    steps: int = 6
    dtype: str = "float32"
    optimizer: str = "adamw"
    compile: bool = False


SIZES = {
    "small": RunSizes(hidden=64, layers=6, vocab=256, max_length=128, steps=2),
    "cpu": RunSizes(),
    "8b": RunSizes(
        hidden=4096, layers=32, vocab=128256, max_length=4096, steps=12, dtype="bfloat16",
        compile=True,
    ),
}  # fmt: skip
"""Sizes of the cases: the least that shows that everything runs; a CPU's; Llama-3-8B's shape."""


def make_random_target(sizes: RunSizes, device: torch.device) -> Target:
    """Make a random Llama with 128-wide heads, four per key-value head."""
    torch.manual_seed(0)
    num_heads = max(4, sizes.hidden // 128)
    config = LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden,
        intermediate_size=int(3.5 * sizes.hidden), num_hidden_layers=sizes.layers,
        num_attention_heads=num_heads, num_key_value_heads=max(1, num_heads // 4),
        max_position_embeddings=sizes.max_length, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype))
    return Target(model, None, "random")


def iter_documents(sizes: RunSizes, num_sequences: int) -> Iterator[Sample]:
    """Yield documents of random tokens, with log-normal lengths; the first third is a prompt."""
    generator = random.Random(0)
    left = num_sequences * sizes.max_length
    while left > 0:
        spread = generator.lognormvariate(math.log(MEAN_DOCUMENT_TOKENS) - 0.5, 1.0)
        length = max(8, min(sizes.max_length, int(spread)))
        ids = [generator.randrange(sizes.vocab) for _ in range(length)]
        yield Sample(ids, [i >= length // 3 for i in range(length)])
        left -= length


def make_objective(variant: str, target: EmbeddingsAndOutputHead, vocab: DraftVocab) -> Any:
    """Make the objective with which an entry script trains an untrained head.

    Args:
        variant: a key of `heads.kinds.build_variant_table`.
        target: the frozen target.
        vocab: draft vocabulary, for heads that can have one.
    """
    return training_objective(make_untrained_head(variant, target, vocab), target)


def start_run(
    sizes: RunSizes,
    out_dir: Path,
    samples: Iterable[Sample] | None = None,
    stored: bool = False,
) -> tuple[loop.TrainingLoop, PackedDataset]:
    """Make a run of the training loop before its first step, and its data.

    Args:
        sizes: sizes of the run.
        out_dir: folder for the output of training.
        samples: samples to learn; unset takes `iter_documents`.
        stored: whether to train on hidden states of a feature store, with only the embedding and
            the output head of the target. The states, of all sequences, are zeros.
    """
    num_steps = NUM_WARM_UP + 2 * sizes.steps + 2
    config = TrainConfig(
        max_steps=num_steps, warmup_steps=1, batch_size=sizes.batch_size,
        micro_batch_size=sizes.micro_batch_size, dtype=Dtype(sizes.dtype), learning_rate=1e-3,
        adam_learning_rate=1e-3, optimizer=Optimizer(sizes.optimizer), schedule=Schedule.constant,
    )  # fmt: skip
    accelerator = processes.start_accelerator(config)
    target: EmbeddingsAndOutputHead
    if stored:
        model = make_random_target(sizes, torch.device("meta")).model
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.to_empty(device=accelerator.device).weight.data.normal_(std=0.02)
        target = EmbeddingsAndOutputHead.from_model(model, None, "random")
    else:
        target = make_random_target(sizes, accelerator.device)
    if samples is None:
        samples = iter_documents(sizes, max(64, sizes.batch_size))
    train = PackedDataset(samples, sizes.max_length, seed=0)
    counts = train.count_token_ids(target.vocab_size)
    vocab = DraftVocab.from_counts(counts, sizes.draft_vocab, [])
    objective = make_objective(sizes.head, target, vocab)
    if sizes.compile:
        objective.compile_parts()
    rows: Dataset = train
    if stored:
        layers, kind = objective.head.taps.layers, TeacherKind.hidden
        contents = StoreContents(target.hidden_size, layers, kind, 0, StateFormat.bf16)
        zeros = {
            each.name: torch.zeros(sizes.max_length, *each.shape, dtype=each.dtype)
            for each in contents.tensor_specs
        }
        rows = [{**zeros, **train[index]} for index in range(len(train))]
    job = TrainingJob(config, LogConfig(), 0, out_dir, objective, rows, rows)
    return loop.TrainingLoop(accelerator, job), train


@contextmanager
def open_run(
    sizes: RunSizes, samples: Iterable[Sample] | None = None, stored: bool = False
) -> Iterator[tuple[loop.TrainingLoop, PackedDataset]]:
    """Open a run as `start_run` does, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        run, train = start_run(sizes, Path(folder) / "out", samples, stored)
        with closing(run):
            yield run, train


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


def measure_training(head: str, size: str, stored: bool = False) -> Figures:
    """Measure the training loop with an untrained head: speed, memory, shares of its parts.

    Memory is the peak of the device, or on a CPU of the process, with weights. Tokens are counted
    without padding.

    Args:
        head: a key of `heads.kinds.build_variant_table`.
        size: a key of `SIZES`.
        stored: whether to train on stored hidden states of a target of Llama-3-70B's shape in
            place of 8B's.
    """
    sizes = replace(SIZES[size], head=head)
    if stored and size == "8b":
        sizes = replace(sizes, hidden=8192, layers=80)
    with open_run(sizes, stored=stored) as (run, data):
        estimated = estimate_run_bytes(run, sizes)
        numbers = sum(map(Tensor.numel, run.job.objective.head.parameters()))
        yield "parameters of the head, M", numbers / 1e6
        reset_peak_memory(run.device)
        for _ in range(NUM_WARM_UP):
            run.optimizer_step()
        flops = count_flops(run.optimizer_step)
        tokens = run.tokens
        times = [measure_seconds(run.optimizer_step, run.device) for _ in range(sizes.steps)]
        tokens = run.tokens - tokens
        rate = measure_matmul_flops(run.device, getattr(torch, sizes.dtype))
        if run.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(run.device)
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        yield "tokens/s", tokens / sum(times)
        yield "ms per step", 1000 * statistics.median(times)
        yield "FLOP/s over those of a matmul", flops / statistics.median(times) / rate
        yield "matmul, TFLOP/s", rate / 1e12
        yield "peak, GB", peak / 1e9
        if estimated:
            yield "peak, GB, estimated", sum(estimated.values()) / 1e9
        yield "padding", 1 - data.num_tokens / (len(data) * sizes.max_length)
        for name, share in measure_part_fractions(run, REPEATS).items():
            yield f"share of {name}", share


def estimate_run_bytes(run: loop.TrainingLoop, sizes: RunSizes) -> memory.BytesByPart:
    """Estimate the memory of a process of a run in bytes, by part; empty without a formula."""
    strategy = run.placement.name
    spec = LaunchSpec.from_config(run.config, sizes.max_length, strategy, run.accelerator)
    return memory.estimate_memory(run.job.objective, spec) or {}


def measure_memory(head: str, size: str) -> Figures:
    """Estimate the memory of training on 8 processes, by part; compare measured peaks.

    The estimate is for an 8B target and 4,096 tokens in bfloat16. Peaks are of a training step on
    a CPU at an eighth of the width and 4 layers, with one process and with two. Every token is
    supervised, as the estimate assumes.

    Args:
        head: a key of `heads.kinds.build_variant_table`.
        size: `small` measures at a 64th of the width.
    """
    sizes = replace(SIZES["8b"], head=head)
    with torch.device("meta"):
        target = make_random_target(sizes, torch.device("meta"))
        vocab = DraftVocab(torch.arange(sizes.draft_vocab), target.vocab_size)
        objective = make_objective(head, target, vocab)
    for strategy in LAUNCH_FILES:
        spec = LaunchSpec(sizes.max_length, torch.bfloat16, strategy, 8, cuda=True)
        for part, num_bytes in (memory.estimate_memory(objective, spec) or {}).items():
            yield f"GB, {strategy}, {part}", num_bytes / 1e9
    scale, length = (64, 128) if size == "small" else (8, 1024)
    job = {
        "head": head, "hidden": 4096 // scale, "layers": 4, "vocab": 128256 // scale,
        "draft_vocab": 32000 // scale, "max_length": length, "dtype": "bfloat16",
    }  # fmt: skip
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for name, file in {"one process": None, **LAUNCH_FILES}.items():
        launch = [sys.executable]
        if file is not None:
            config = str(ROOT / f"conf/accelerate/{file}.yaml")
            launch += ["-m", "accelerate.commands.launch", "--config_file", config]
        result = run_worker("training", job, launch, environ)
        peak, estimated = result["peak"], sum(result["parts"].values())
        yield f"MB, {name}, measured", peak / 1e6
        if estimated:
            yield f"MB, {name}, estimated", estimated / 1e6
            yield f"estimated over measured, {name}", estimated / peak


def measure_step_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the third step of this process, on random texts that are learnt completely.

    Args:
        job: fields of `RunSizes`.

    Returns:
        Estimated bytes by part, and the measured peak in bytes.
    """
    sizes = RunSizes(**job, batch_size=int(os.environ.get("WORLD_SIZE", "1")))
    generator, length = random.Random(0), sizes.max_length
    texts = [[generator.randrange(sizes.vocab) for _ in range(length)] for _ in range(8)]
    samples = [Sample(ids, [True] * length) for ids in texts]
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        open_run(sizes, samples) as (run, _),
    ):
        for _ in range(2):  # DDP lays its buckets out anew in the second step
            run.optimizer_step()
        with record_function("measured"):
            run.optimizer_step()
    peak = compute_peak_bytes(profiler.profiler.kineto_results.events(), "measured")
    parts = estimate_run_bytes(run, sizes)
    processes.end_processes(run.accelerator)
    return {"parts": parts, "peak": peak}


if __name__ == "__main__":
    print(json.dumps(measure_step_memory(json.loads(sys.argv[1]))), flush=True)
