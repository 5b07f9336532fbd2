"""The quickstart's parts on this processor, and on it as an old one that has AVX2 and no more.

`python scripts/bench/cpu.py` runs passes of a target, training steps of heads and texts by ways to
draft in two processes, one of which is told by its environment to leave newer instructions alone,
and in two more in bfloat16. They take turns; a table shows medians, the part that loses most last.
Ends with 1 if a float32 part takes more than `--limit` times as long on the old one: it fell off
the fast path. What only a real old processor does not have, as its memory, is not seen.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from tempfile import TemporaryFile

from tqdm import tqdm

from conf.errors import InputError
from scripts.bench.apart import ROOT, markdown
from scripts.bench.footprint import add_sizes
from scripts.bench.parts import SIZES

OLD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What makes an x86 CPU behave as one that has AVX2 and nothing newer."""
KINDS = {
    "as it is": ({}, "float32"),
    "AVX2": (OLD, "float32"),
    "bfloat16": ({}, "bfloat16"),
    "AVX2, bfloat16": (OLD, "bfloat16"),
}
"""Variables and dtype of each process, by its column."""
Times = Mapping[str, Mapping[str, Sequence[float]]]
"""Milliseconds by column and part."""


class Worker:
    """A process of `scripts.bench.parts`, which goes on while others are started.

    Args:
        variables: of its environment, besides ours.
        sizes: for it.
    """

    def __init__(self, variables: Mapping[str, str], sizes: Mapping[str, object]) -> None:
        self._errors = TemporaryFile("w+")  # noqa: SIM115, which `end` closes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.parts", json.dumps(sizes)],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(sizes["threads"]), **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    @cached_property
    def about(self) -> tuple[str, list[str]]:
        """Its processor, and the names of its parts, once it is ready.

        Raises:
            InputError: it failed.
        """
        processor, parts = json.loads(self._answer())
        return processor, parts

    def run(self, part: str) -> tuple[float, int]:
        """Milliseconds and steps of a part.

        Raises:
            InputError: it failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(part + "\n")
        self._process.stdin.flush()
        milliseconds, num_steps = self._answer().split()
        return float(milliseconds), int(num_steps)

    def end(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise InputError(f"a process failed:\n{self._errors.read()[-2000:]}")
        return line


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The sizes; the defaults are those of the embedded default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_sizes(parser, **SIZES, repeats=5)
    parser.add_argument("--limit", type=float, default=3.0, help="times as long, at most")
    return parser.parse_args(given)


def measured(workers: Mapping[str, Worker], repeats: int) -> Times:
    """Of all parts, each run by one process after the other, after one run to warm up.

    Raises:
        InputError: they do not take the same steps, so that their times say nothing.
    """
    parts = next(iter(workers.values())).about[1]
    found: dict[str, dict[str, list[float]]] = {
        column: {part: [] for part in parts} for column in workers
    }
    for repeat in tqdm(range(repeats + 1), unit="round"):
        for part in parts:
            steps = {}
            for column, worker in workers.items():
                milliseconds, steps[column] = worker.run(part)
                if repeat:
                    found[column][part].append(milliseconds)
            if len(set(steps.values())) > 1:
                raise InputError(f"{part}: takes other steps in other processes: {steps}")
    return found


def table(times: Times) -> tuple[list[tuple[str, ...]], float]:
    """Rows of part, milliseconds as it is and with AVX2, their ratio, and milliseconds in bfloat16.

    Args:
        times: of all columns of `KINDS`.

    Returns:
        The rows, the part that loses most last, and its ratio.
    """
    medians = {
        column: {part: statistics.median(each) for part, each in parts.items()}
        for column, parts in times.items()
    }
    new, old, *narrow = medians.values()
    ratios = {part: old[part] / new[part] for part in new}
    rows = [
        (
            part,
            *(f"{each:.1f}" for each in (new[part], old[part])),
            f"{ratio:.2f}",
            *(f"{each[part]:.1f}" for each in narrow),
        )
        for part, ratio in sorted(ratios.items(), key=lambda pair: pair[1])
    ]
    return rows, max(ratios.values())


def main(given: list[str] | None = None) -> int:
    """Prints the table; 1 if a part fell off."""
    options = arguments(given)
    sizes = {name: getattr(options, name) for name in SIZES}
    with ExitStack() as stack:
        workers = {
            column: Worker(variables, sizes | {"dtype": dtype})
            for column, (variables, dtype) in KINDS.items()
        }
        for each in workers.values():
            stack.callback(each.end)
        try:
            here, old, *_ = (each.about[0] for each in workers.values())
            times = measured(workers, options.repeats)
        except InputError as error:
            sys.exit(f"error: {error}")
    rows, worst = table(times)
    print(f"{here} / {old}, {options.threads} thread(s), processor time, milliseconds\n")
    print(markdown(("part", "as it is", "AVX2", "ratio", *list(KINDS)[2:]), rows))
    if worst > options.limit:
        print(f"\n{rows[-1][0]}: {worst:.1f} times as long with AVX2, {options.limit:g} allowed")
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
