"""Speed of storing a target's states against its bare forward pass, and bytes of a store.

Packed sequences run in groups: each group first through `Target.encode_documents` only, then
through every kind of capture, written to disk and synced. A second baseline also computes the
target's logits, which a top-k teacher needs.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from conf.command.clock import Stopwatch
from conf.settings.data import DataConfig, StateFormat, TeacherKind
from conf.settings.scripts import CaptureRun
from conf.settings.target import TargetConfig
from data.embedded import CONVERSATIONS, TARGET_PATH
from data.features.store_format import HIDDEN_STATES, StoreContents
from data.features.store_writer import SHARD_BYTES, PlannedShard, ShardWriterPool
from eval.measure.measurement import join_processes
from heads.target_model.load import load_target
from heads.target_model.model import Target
from scripts.bench.harness import Figures, best_device
from scripts.bench.training import RunSizes, make_random_target
from scripts.capture import (
    ROWS_PER_CHUNK,
    CaptureJob,
    StatesSource,
    capture_shard,
    iter_batches,
    plan_capture,
)

SIZES = {
    "small": (RunSizes(hidden=64, layers=6), 6, 128, 2),
    "cpu": (RunSizes(), 60, 1024, 10),
    "8b": (RunSizes(hidden=2048, layers=16, dtype="bfloat16"), 60, 1024, 10),
}
"""Target, number of packed sequences, their tokens, and sequences that are timed at once."""
STORED: dict[str, dict[str, Any]] = {
    f"{kind.value}, {teacher.value}": {"format": kind, "teacher": teacher, "top_k": k}
    for kind, teacher, k in (
        (StateFormat.bf16, TeacherKind.hidden, 0),
        (StateFormat.int8, TeacherKind.hidden, 0),
        (StateFormat.int8, TeacherKind.top_k, CaptureRun().top_k),
        (StateFormat.fp8, TeacherKind.top_k, CaptureRun().top_k),
    )
}
"""Contents of the stores that are written, by their labels."""


@torch.no_grad()
def run_target_only(
    work: CaptureJob, target: Target, with_logits: bool, shard: PlannedShard
) -> None:
    """Run the target over the sequences of a shard, without storing its states."""
    source = StatesSource.from_target(target, work.plan.contents.layers)
    for batch in iter_batches(work, shard, source.texts):
        states = source.compute_states(batch)
        if with_logits:
            for part in states[HIDDEN_STATES].flatten(0, 1).split(ROWS_PER_CHUNK):
                target.compute_logits(part)


def capture_to_disk(work: CaptureJob, target: Target, shard: PlannedShard) -> None:
    """Capture a shard to disk, as `scripts/capture.py` does."""
    source = StatesSource.from_target(target, work.plan.contents.layers)
    with ShardWriterPool() as writers:
        capture_shard(work, shard, target, source, writers, tqdm(disable=True))


def measure_run_rates(
    runs: dict[str, Callable[[PlannedShard], None]], shards: list[PlannedShard]
) -> dict[str, list[float]]:
    """Measure tokens/s of each run on each shard, in turn; the first shard warms up.

    Seconds include the work of GPU and disk. On a CPU they are the processor time of all threads,
    which other programs hardly change.
    """
    device = best_device()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number, shard in enumerate(tqdm(shards, desc="measuring", unit="group")):
        for name, run in runs.items():
            watch = Stopwatch(device)
            run(shard)
            seconds = watch.seconds() if device.type == "cuda" else watch.processor_seconds()
            if number:
                rates[name].append(shard.num_tokens / seconds)
    return rates


def measure_capture(size: str) -> Figures:
    """Measure tokens/s of each kind of capture over the bare pass, group by group.

    The target is random; its tokenizer and the texts are those of the embedded default.
    """
    sizes, num_sequences, tokens, group = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
        sizes = replace(sizes, vocab=len(tokenizer), max_length=4096)
        made = make_random_target(sizes, torch.device("cpu"))
        made.model.save_pretrained(f"{folder}/target")
        tokenizer.save_pretrained(f"{folder}/target")
        config = CaptureRun(
            target=TargetConfig(path=f"{folder}/target"),
            data=DataConfig(path=CONVERSATIONS, max_length=tokens),
            micro_batch_size=4,
            num_replay_prompts=0,
        )
        state = join_processes()
        work = plan_capture(config, state, SHARD_BYTES)
        target = load_target(config.target, state.device)
        lengths = work.packed_by_split["train"].sequence_lengths[:num_sequences]
        shards = [
            PlannedShard("train-00000", "train", first, first + group, sum(some))
            for first in range(0, len(lengths) - group + 1, group)
            for some in [lengths[first : first + group]]
        ]
        runs: dict[str, Callable[[PlannedShard], None]] = {
            "the bare pass": partial(run_target_only, work, target, False),
            "pass and logits": partial(run_target_only, work, target, True),
        }
        for name, stored in STORED.items():
            plan = replace(work.plan, contents=replace(work.plan.contents, **stored))
            stored_work = replace(work, folder=Path(folder), plan=plan)
            runs[name] = partial(capture_to_disk, stored_work, target)
        rates = measure_run_rates(runs, shards)
    speeds = {name: statistics.median(each) for name, each in rates.items()}
    contents = StoreContents(4096, (2, 16, 29), TeacherKind.hidden, 0, StateFormat.bf16)
    for name, stored in STORED.items():
        base = "pass and logits" if stored["top_k"] else "the bare pass"
        yield f"{name} over {base}", speeds[name] / speeds[base]
        yield f"tokens/s of {name}", speeds[name]
        num_bytes = replace(contents, **stored).bytes_per_token
        yield f"KiB/token of {name}, 3 layers of 4,096", num_bytes / 1024
