"""What preparing data costs: conversations a second, memory, and the time of a second start.

`python scripts/bench/preparing.py --target FOLDER --data chats.jsonl` repeats the rows of a file,
each time with other words, to `--rows` conversations and prepares them with the target's tokenizer;
then two processes open them at once, as two ranks do. The baseline, "one at a time, in memory", is
a loop over the same rows in one process, for the first `--baseline-rows` of them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from conf.command.clock import Stopwatch
from conf.settings.data import DataConfig
from data.prepared.pack import PackedDataset, prepare
from data.prepared.preparing import num_cores
from data.rows.records import load_records
from data.templates.chat import Encoder
from scripts.bench.footprint import add_sizes
from scripts.bench.residence import peak_while, residence

MIB = 2**20
NUM_READERS = 2


class Cost(NamedTuple):
    """Of one way to the packed sequences.

    Attributes:
        rows: conversations.
        seconds: until they were packed.
        busy: processor seconds of all processes; others may share the machine.
        memory: bytes, by what they are.
        checksum: of the training set.
    """

    rows: int
    seconds: float
    busy: float
    memory: dict[str, int]
    checksum: str


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What to prepare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    add_sizes(parser, rows=1_000_000, baseline_rows=20_000, tokens=1024, num_proc=num_cores())
    return parser.parse_args(given)


def write_rows(source: str, path: Path, num_rows: int) -> None:
    """Repeats rows, numbered in their first message, so that no two are alike."""
    records = load_records(source).records
    with path.open("w", encoding="utf-8") as file:
        for number, record in enumerate(islice(cycle(records), num_rows)):
            row: dict[str, Any] = {"text": f"{number} {record.text}"}
            if record.messages is not None:
                first, *others = record.messages
                content = f"{number} {first['content']}"
                row = {"messages": [{**first, "content": content}, *others]}
            file.write(json.dumps(row) + "\n")


def one_at_a_time(path: str, target: str, tokens: int) -> Cost:
    """The baseline: a loop over the rows, which stay in memory."""
    encoder = Encoder(AutoTokenizer.from_pretrained(target))
    before = residence().pss
    watch = Stopwatch()
    records = load_records(path).records
    samples = (sample for record in records for sample in encoder.encode(record))
    packed = PackedDataset(samples, tokens, seed=0)
    seconds, busy = watch.seconds(), watch.processor_seconds()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = {"one process, peak RSS": peak, "beyond what it began with": peak - before}
    return Cost(len(records), seconds, busy, memory, packed.checksum)


def prepared(config: DataConfig, target: str) -> Cost:
    """The first start."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    costs: list[Cost] = []

    def run() -> None:
        watch = Stopwatch()
        train, heldout, report = prepare(config, tokenizer, seed=0, progress=False)
        assert len(heldout)
        seconds = watch.seconds()
        costs.append(Cost(report.num_records, seconds, 0.0, {}, train.checksum))

    peak = peak_while(run, os.getpid())
    memory = {
        "largest process, peak PSS": peak.largest,
        f"all {peak.num_processes} processes, peak PSS": peak.together,
    }
    return costs[0]._replace(memory=memory, busy=peak.processor_seconds)


def opened(config: DataConfig, target: str, meeting: Any) -> Cost:
    """A later start, in one of several processes that read every sequence."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    before = residence()
    meeting.wait()
    watch = Stopwatch()
    train, _, report = prepare(config, tokenizer, seed=0, progress=False)
    seconds, busy = watch.seconds(), watch.processor_seconds()
    for index in range(len(train)):
        train[index]
    meeting.wait()
    after = residence()
    meeting.wait()
    memory = {
        f"each of {NUM_READERS}, all read, RSS": after.rss,
        f"each of {NUM_READERS}, all read, PSS": after.pss,
        "PSS beyond what it began with": after.pss - before.pss,
    }
    return Cost(report.num_records, seconds, busy, memory, train.checksum)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Cost]:
    """All ways, each in processes of its own.

    Raises:
        RuntimeError: a second start does not find what the first made.
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
        baseline = pool.submit(one_at_a_time, str(few), options.target, options.tokens)
        found = {"one at a time, in memory": baseline.result()}
        first = pool.submit(prepared, config, options.target).result()
        found[f"first start, {options.num_proc} workers"] = first
        meeting = manager.Barrier(NUM_READERS)
        readers = [pool.submit(opened, config, options.target, meeting) for _ in range(NUM_READERS)]
        costs = [reader.result() for reader in readers]
    if {cost.checksum for cost in costs} != {first.checksum}:
        raise RuntimeError("a second start has other tokens than the first")
    return found | {"second start": max(costs, key=lambda cost: cost.seconds)}


def table_of(found: dict[str, Cost]) -> Table:
    """A line for each way; processor time is in microseconds of a conversation."""
    table = Table("", "conversations", "seconds", "per second", "ratio", "processor us")
    base, *_ = found.values()
    for name, cost in found.items():
        speed = cost.rows / cost.seconds
        ratio = speed * base.seconds / base.rows
        figures = (f"{cost.rows:,}", f"{cost.seconds:,.1f}", f"{speed:,.0f}", f"{ratio:.2f}")
        table.add_row(name, *figures, f"{1e6 * cost.busy / cost.rows:,.0f}")
    return table


def memory_of(found: dict[str, Cost]) -> Table:
    """A line for each figure."""
    table = Table("", "memory", "MiB")
    for name, cost in found.items():
        for what, size in cost.memory.items():
            table.add_row(name, what, f"{size / MIB:,.0f}")
    return table


def main() -> None:
    """Prints the table."""
    options = arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measured(options, Path(folder))
    print(f"{num_cores()} cores, on which {load:.1f} processes were running before")
    Console().print(table_of(found))
    Console().print(memory_of(found))


if __name__ == "__main__":
    main()
