"""Training speed of EAGLE-3 and DFlash against speculators' step, of Medusa against the original's.

`python scripts/bench/against_peers.py` makes the hidden states of one packed sequence and a
target's two ends, and trains a head on them, each path in a process of its own: forward and
backward pass, clipping at norm 1 and AdamW. Paths that train the same head from the same weights
must agree on the first loss. `HEADSMITH_SPECULATORS_PYTHON` names a Python that has speculators;
without it that path is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from conf.errors import InputError
from scripts.bench.apart import markdown, python_for, result_of
from scripts.bench.footprint import add_sizes, best_device, where

SPECULATORS = "HEADSMITH_SPECULATORS_PYTHON"


class Row(NamedTuple):
    """A path of the worker, and the variable that names its Python."""

    name: str
    path: str
    variable: str | None = None


EAGLE3 = (
    Row("ours", "eagle3"),
    Row("ours, compiled", "eagle3_compiled"),
    Row("speculators' trainer", "speculators", SPECULATORS),
)
DFLASH = (Row("ours", "dflash"), Row("speculators' trainer", "speculators_dflash", SPECULATORS))
MEDUSA = (Row("ours", "medusa"), Row("original Medusa step", "original_medusa"))
EAGLE3_STEPS, MEDUSA_HEADS, BLOCK_SIZE = (3, 7), 4, 16
COLUMNS = (
    "path", "ms a step", "of ours", "tokens/s", "peak, MiB", "of ours", "first loss",
)  # fmt: skip
TOLERANCE = 1e-4
"""Relative, between first losses."""
LEAST_TOKENS = 256
"""The shortest prompt must be longer than the depth: speculators and the original read across
the end of a document, and only where the next one's mask lets them."""


def table(job: dict[str, Any], rows: list[Row], worker: str = "steps") -> tuple[str, str]:
    """The cost of each path, the first of which is ours; and the versions that ran.

    Raises:
        InputError: a first loss is not ours, so it is not the same step.
    """
    ours: dict[str, Any] | None = None
    cells: list[list[str]] = []
    versions: list[str] = []
    for row in tqdm(rows, desc=f"{rows[0].path}, {job['depth']}", unit="path"):
        python = python_for(row.variable)
        assert python is not None
        found = result_of(worker, job | {"path": row.path}, python)
        ours = ours or found
        # Not a number compares false, so it is refused too.
        if not abs(found["loss"] - ours["loss"]) <= TOLERANCE * abs(ours["loss"]):
            raise InputError(f"{row.name}: first loss {found['loss']}, ours {ours['loss']}")
        cells.append([row.name, *_cells(found, ours, job["tokens"])])
        versions.extend(found["versions"])
    return markdown(COLUMNS, cells), ", ".join(dict.fromkeys(versions))


def _cells(found: dict[str, Any], ours: dict[str, Any], tokens: int) -> list[str]:
    seconds, peak = found["seconds"], found["peak_bytes"]
    return [
        f"{1000 * seconds:.0f}",
        f"{seconds / ours['seconds']:.2f}",
        f"{tokens / seconds:,.0f}",
        f"{peak / 2**20:.1f}",
        f"{peak / ours['peak_bytes']:.2f}",
        f"{found['loss']:.5f}",
    ]


def caption(options: argparse.Namespace) -> str:
    """What both heads have in common."""
    torch.set_num_threads(options.threads)
    return (
        f"{options.tokens} tokens in one packed sequence, two thirds of them learnt; hidden size "
        f"{options.hidden}, vocabulary {options.vocab}, float32; {where(best_device())}; median of "
        f"{options.repeats} steps. Peak beyond weights, optimizer state and inputs."
    )


def print_eagle3(options: argparse.Namespace, rows: list[Row]) -> None:
    """One table per number of steps."""
    layer = (
        f"{options.num_heads} heads of {options.head_dim}, {options.num_kv_heads} key-value heads, "
        f"intermediate size {options.intermediate}, draft vocabulary {options.draft_vocab}"
    )
    for depth in EAGLE3_STEPS:
        found, versions = table(vars(options) | {"depth": depth}, rows)
        print(f"\nEAGLE-3, {depth} steps of the training-time test; {layer}; {versions}.")
        if best_device().type == "cpu" and any(row.variable for row in rows):
            print(
                "On a CPU speculators' flex attention has no backward pass and its loss kernel "
                "does not run: its own SDPA and eager loss stand in."
            )
        print(f"\n{found}")


def print_medusa(options: argparse.Namespace, rows: list[Row]) -> None:
    """One table."""
    found, versions = table(vars(options) | {"depth": MEDUSA_HEADS}, rows)
    print(f"\nMedusa, {MEDUSA_HEADS} heads of one layer; {versions}.\n\n{found}")


def print_dflash(options: argparse.Namespace, rows: list[Row]) -> None:
    """One table."""
    job = vars(options) | {"depth": BLOCK_SIZE, "draft_vocab": options.vocab}
    found, versions = table(job, rows, "block_steps")
    print(
        f"\nDFlash, 5 layers, 128 blocks of {BLOCK_SIZE} rows in one document, all ids, on a CPU "
        f"speculators by SDPA and its eager loss; {versions}.\n\n{found}"
    )


def runnable(rows: tuple[Row, ...]) -> list[Row]:
    """Those whose Python is there; says which are left out."""
    found = []
    for row in rows:
        if python_for(row.variable) is None:
            print(f"{row.name}: left out, {row.variable} is not set")
        else:
            found.append(row)
    return found


def arguments() -> argparse.Namespace:
    """The sizes.

    Raises:
        InputError: one is too small, or the draft vocabulary larger than the target's.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_sizes(parser, tokens=1024, hidden=512, vocab=8192, draft_vocab=4096)
    add_sizes(parser, num_heads=8, num_kv_heads=4, head_dim=64, intermediate=1536)
    add_sizes(parser, threads=1, repeats=3)
    options = parser.parse_args()
    least = dict.fromkeys(vars(options), 1) | {"tokens": LEAST_TOKENS}
    for name, value in vars(options).items():
        if value < least[name]:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag}={value}: must be at least {least[name]}")
    if options.draft_vocab > options.vocab:
        raise InputError(
            f"--draft-vocab={options.draft_vocab}: must be at most --vocab={options.vocab}"
        )
    return options


def main() -> None:
    """Prints the tables."""
    try:
        options = arguments()
        print(caption(options))
        print_eagle3(options, runnable(EAGLE3))
        print_medusa(options, runnable(MEDUSA))
        print_dflash(options, runnable(DFLASH))
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
