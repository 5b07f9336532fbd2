"""Cost of preparing data: conversations a second, memory, and the time of a second start.

`python scripts/bench/preparing.py --target FOLDER --data chats.jsonl` repeats the rows of a file
with changed words, up to `--rows` conversations, and prepares them with the target's tokenizer.
Then two processes open them at the same time, like two ranks. The baseline, "one at a time, in
memory", is a loop over the first `--baseline-rows` of these rows in one process.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import count_cores, set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from conf.command.clock import Stopwatch
from conf.settings.data import DataConfig
from data.prepared.packing import PackedDataset
from data.prepared.prepare import prepare_datasets
from data.rows.records import load_records
from data.templates.record_encoder import RecordEncoder
from scripts.bench.harness import add_size_flags

MIB = 2**20
NUM_READERS = 2
INTERVAL_S = 0.5


class Cost(NamedTuple):
    """Hold the cost of one way to make packed sequences.

    Attributes:
        rows: number of conversations.
        seconds: time until the conversations were packed.
        busy: processor seconds of all processes; other programs hardly change them.
        memory: bytes by kind of memory.
        checksum: checksum of the training set.
    """

    rows: int
    seconds: float
    busy: float
    memory: dict[str, int]
    checksum: str


class Memory(NamedTuple):
    """Hold the bytes of a process: `rss` with shared pages, `pss` with its share of them."""

    rss: int
    pss: int


def measure_process_memory(pid: int | str = "self") -> Memory:
    """Read the memory of a process as Linux counts it; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Memory(0, 0)
    sizes = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return Memory(*(int(sizes[name].split()[0]) * 1024 for name in ("Rss", "Pss")))


def find_process_tree(pid: int) -> list[int]:
    """Find the ids of a process and of all its descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        children = []
    return [pid, *(member for child in children for member in find_process_tree(child))]


def measure_processor_seconds(pid: int) -> float:
    """Read the processor time of all threads of a process; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the paths of target and data, and the sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    add_size_flags(
        parser, rows=1_000_000, baseline_rows=20_000, tokens=1024, num_proc=count_cores()
    )
    return parser.parse_args(given)


def write_rows(source: str, path: Path, num_rows: int) -> None:
    """Write repeated rows, numbered in their first message, so that no two are equal."""
    records = load_records(source).records
    with path.open("w", encoding="utf-8") as file:
        for number, record in enumerate(islice(cycle(records), num_rows)):
            row: dict[str, Any] = {"text": f"{number} {record.text}"}
            if record.messages is not None:
                first, *others = record.messages
                content = f"{number} {first['content']}"
                row = {"messages": [{**first, "content": content}, *others]}
            file.write(json.dumps(row) + "\n")


def measure_row_loop(path: str, target: str, tokens: int) -> Cost:
    """Measure the baseline: a loop over the rows, which stay in memory."""
    encoder = RecordEncoder(AutoTokenizer.from_pretrained(target))
    before = measure_process_memory().pss
    watch = Stopwatch()
    records = load_records(path).records
    samples = (sample for record in records for sample in encoder.encode_record(record))
    packed = PackedDataset(samples, tokens, seed=0)
    seconds, busy = watch.seconds(), watch.processor_seconds()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = {"one process, peak RSS": peak, "beyond what it began with": peak - before}
    return Cost(len(records), seconds, busy, sizes, packed.checksum)


def measure_first_start(config: DataConfig, target: str) -> Cost:
    """Measure the first start with all its processes, sampled twice a second."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    sizes: list[list[int]] = []
    busy: dict[int, float] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(INTERVAL_S):
            pids = find_process_tree(os.getpid())
            sizes.append([measure_process_memory(pid).pss for pid in pids])
            for pid in pids:
                busy[pid] = max(busy.get(pid, 0.0), measure_processor_seconds(pid))

    before = measure_processor_seconds(os.getpid())
    looking = threading.Thread(target=look)
    looking.start()
    try:
        watch = Stopwatch()
        train, heldout, report = prepare_datasets(config, tokenizer, seed=0, progress=False)
        assert len(heldout)
        seconds = watch.seconds()
    finally:
        done.set()
        looking.join()
    peaks = {
        "largest process, peak PSS": max(map(max, sizes)),
        f"all {max(map(len, sizes))} processes, peak PSS": max(map(sum, sizes)),
    }
    spent = sum(busy.values()) - before
    return Cost(report.num_records, seconds, spent, peaks, train.checksum)


def measure_second_start(config: DataConfig, target: str, meeting: Any) -> Cost:
    """Measure a later start, in one of several processes that read every sequence."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    before = measure_process_memory()
    meeting.wait()
    watch = Stopwatch()
    train, _, report = prepare_datasets(config, tokenizer, seed=0, progress=False)
    seconds, busy = watch.seconds(), watch.processor_seconds()
    for index in range(len(train)):
        train[index]
    meeting.wait()
    after = measure_process_memory()
    meeting.wait()
    sizes = {
        f"each of {NUM_READERS}, all read, RSS": after.rss,
        f"each of {NUM_READERS}, all read, PSS": after.pss,
        "PSS beyond what it began with": after.pss - before.pss,
    }
    return Cost(report.num_records, seconds, busy, sizes, train.checksum)


def measure_ways(options: argparse.Namespace, folder: Path) -> dict[str, Cost]:
    """Measure all ways, each in separate processes.

    Raises:
        RuntimeError: a second start does not find the result of the first.
    """
    path = folder / "rows.jsonl"
    write_rows(options.data, path, options.rows)
    few = folder / "few.jsonl"
    write_rows(options.data, few, min(options.rows, options.baseline_rows))
    config = DataConfig(
        str(path), max_length=options.tokens, num_proc=options.num_proc,
        prepared_dir=str(folder / "prepared"),
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with (
        multiprocessing.Manager() as manager,
        ProcessPoolExecutor(NUM_READERS, context, max_tasks_per_child=1) as pool,
    ):
        baseline = pool.submit(measure_row_loop, str(few), options.target, options.tokens).result()
        first = pool.submit(measure_first_start, config, options.target).result()
        meeting = manager.Barrier(NUM_READERS)
        readers = [
            pool.submit(measure_second_start, config, options.target, meeting)
            for _ in range(NUM_READERS)
        ]
        seconds = [reader.result() for reader in readers]
    if {cost.checksum for cost in seconds} != {first.checksum}:
        raise RuntimeError("a second start has other tokens than the first")
    return {
        "one at a time, in memory": baseline,
        f"first start, {options.num_proc} workers": first,
        "second start": max(seconds, key=lambda cost: cost.seconds),
    }


def print_tables(costs: dict[str, Cost]) -> None:
    """Print the time of each way, with processor microseconds per conversation; then its memory."""
    table = Table("", "conversations", "seconds", "per second", "ratio", "processor us")
    sizes = Table("", "memory", "MiB")
    base, *_ = costs.values()
    for name, cost in costs.items():
        speed = cost.rows / cost.seconds
        ratio = speed * base.seconds / base.rows
        figures = (f"{cost.rows:,}", f"{cost.seconds:,.1f}", f"{speed:,.0f}", f"{ratio:.2f}")
        table.add_row(name, *figures, f"{1e6 * cost.busy / cost.rows:,.0f}")
        for kind, size in cost.memory.items():
            sizes.add_row(name, kind, f"{size / MIB:,.0f}")
    Console().print(table)
    Console().print(sizes)


def main() -> None:
    """Print the table of times and the table of memory."""
    options = parse_arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        costs = measure_ways(options, Path(folder))
    print(f"{count_cores()} cores, on which {load:.1f} processes were running before")
    print_tables(costs)


if __name__ == "__main__":
    main()
