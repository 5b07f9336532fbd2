"""Speed of capture against the target's bare forward pass, and bytes of a store.

`python scripts/bench/capture.py --target FOLDER --data chats.jsonl` runs packed sequences in
groups: each group first through `Target.encode_documents` only, then through every kind of capture,
written to disk and synced. It prints medians of tokens/s and of the ratio within a group. A second
baseline also computes the target's logits, which a top-k teacher needs. The other table has the
bytes per token of a target with 4,096 channels.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.settings.data import DataConfig, StateFormat, TeacherKind
from conf.settings.scripts import CaptureRun
from conf.settings.target import TargetConfig
from data.features.store_format import HIDDEN_STATES, StoreContents
from data.features.store_writer import SHARD_BYTES, PlannedShard, ShardWriterPool
from eval.measure.measurement import join_processes
from heads.target_model.load import load_target
from heads.target_model.model import Target
from scripts.capture import (
    ROWS_PER_CHUNK,
    CaptureJob,
    StatesSource,
    capture_shard,
    iter_batches,
    plan_capture,
)

STORED = [
    (StateFormat.bf16, TeacherKind.hidden),
    (StateFormat.int8, TeacherKind.hidden),
    (StateFormat.int8, TeacherKind.top_k),
    (StateFormat.fp8, TeacherKind.top_k),
]


def replace_storage(
    contents: StoreContents, state_format: StateFormat, teacher: TeacherKind
) -> StoreContents:
    """Return the contents of a store with another format of states and kind of teacher."""
    k = CaptureRun().top_k if teacher is TeacherKind.top_k else 0
    return replace(contents, format=state_format, teacher=teacher, top_k=k)


@torch.no_grad()
def run_target_only(
    work: CaptureJob, target: Target, with_logits: bool, shard: PlannedShard
) -> None:
    """Run the target over the sequences of a shard, without storing its states."""
    source = StatesSource.from_target(target, work.plan.contents.layers)
    for rows in iter_batches(work, shard, source.texts):
        states = source.compute_states(
            {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        )
        if with_logits:
            for part in states[HIDDEN_STATES].flatten(0, 1).split(ROWS_PER_CHUNK):
                target.compute_logits(part)


def capture_to_disk(work: CaptureJob, target: Target, shard: PlannedShard) -> None:
    """Capture a shard to disk, as `scripts/capture.py` does."""
    source = StatesSource.from_target(target, work.plan.contents.layers)
    with ShardWriterPool() as writers:
        capture_shard(work, shard, target, source, writers, tqdm(disable=True))


def measure_run_seconds(run: Callable[[], None]) -> float:
    """Measure the seconds of a call, including the work of GPU and disk.

    On a CPU this is the processor time of all threads, which other programs hardly change.
    """
    cuda = torch.cuda.is_available()
    watch = Stopwatch(torch.device("cuda" if cuda else "cpu"))
    run()
    return watch.seconds() if cuda else watch.processor_seconds()


def measure_run_rates(
    runs: dict[str, Callable[[PlannedShard], None]], shards: list[PlannedShard]
) -> dict[str, list[float]]:
    """Measure tokens/s of each run on each shard, in turn; the first shard warms up."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number, shard in enumerate(tqdm(shards, desc="measuring", unit="group")):
        for name, run in runs.items():
            speed = shard.num_tokens / measure_run_seconds(partial(run, shard))
            if number:
                rates[name].append(speed)
    return rates


def build_speed_table(rates: dict[str, list[float]]) -> Table:
    """Build a table of median tokens/s, and of median ratios to each of the first two runs."""
    table = Table("", "tokens/s", "of target.read", "of read and logits")
    forward, with_logits = list(rates.values())[:2]
    for name, speeds in rates.items():
        ratios = [
            statistics.median(a / b for a, b in zip(speeds, base, strict=True))
            for base in (forward, with_logits)
        ]
        table.add_row(name, f"{statistics.median(speeds):,.0f}", *(f"{r:.3f}" for r in ratios))
    return table


def build_size_table() -> Table:
    """Build a table of bytes per token of 3 layers, including ids, documents and masks."""
    table = Table("4,096 channels, 3 layers", "bytes/token", "KiB/token", "GiB per million tokens")
    contents = StoreContents(4096, (2, 16, 29), TeacherKind.hidden, 0, StateFormat.bf16)
    for way in STORED:
        size = replace_storage(contents, *way).bytes_per_token
        row = (f"{size:,}", f"{size / 1024:.2f}", f"{size * 1e6 / 2**30:.1f}")
        table.add_row(format_run_label(*way), *row)
    return table


def format_run_label(state_format: StateFormat, teacher: TeacherKind) -> str:
    """Format the label of a capture: its format of states and its kind of teacher."""
    return f"{state_format.value}, {teacher.value}"


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the paths of target and data, and the sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a packed sequence")
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--group", type=int, default=10, help="sequences timed at once")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    return parser.parse_args(given)


def measure_capture_rates(options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure tokens/s of the bare passes and of each kind of capture, group by group."""
    config = CaptureRun(
        target=TargetConfig(path=options.target),
        data=DataConfig(path=options.data, max_length=options.tokens),
        micro_batch_size=options.micro_batch_size,
        num_replay_prompts=0,
    )
    state = join_processes()
    work = plan_capture(config, state, SHARD_BYTES)
    target = load_target(config.target, state.device)
    lengths = work.packed_by_split["train"].sequence_lengths[: options.sequences]
    shards = [
        PlannedShard("train-00000", "train", first, first + options.group, sum(group))
        for first in range(0, len(lengths) - options.group + 1, options.group)
        for group in [lengths[first : first + options.group]]
    ]
    runs: dict[str, Callable[[PlannedShard], None]] = {
        "target.read": partial(run_target_only, work, target, False),
        "target.read and logits": partial(run_target_only, work, target, True),
    }
    with tempfile.TemporaryDirectory() as folder:
        for way in STORED:
            plan = replace(work.plan, contents=replace_storage(work.plan.contents, *way))
            stored_work = replace(work, folder=Path(folder), plan=plan)
            runs[format_run_label(*way)] = partial(capture_to_disk, stored_work, target)
        return measure_run_rates(runs, shards)


def main() -> None:
    """Print the table of speeds and the table of sizes."""
    Console().print(build_speed_table(measure_capture_rates(parse_arguments())))
    Console().print(build_size_table())


if __name__ == "__main__":
    main()
