"""Training speed of EAGLE-3 against speculators, and of Medusa against the original.

`python scripts/bench/against_peers.py` makes the hidden states of one packed sequence, an embedding
and an output head. It trains a head on them with each toolkit in a separate process: forward and
backward pass, clipping at norm 1 and AdamW. Toolkits that train the same head from the same weights
must agree on the first loss. `HEADSMITH_SPECULATORS_PYTHON` names a Python that has speculators;
without it speculators is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import os
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from conf.errors import InputError
from scripts.bench.harness import (
    add_size_flags,
    best_device,
    build_markdown_table,
    format_device,
    run_worker,
)

SPECULATORS = "HEADSMITH_SPECULATORS_PYTHON"


class Peer(NamedTuple):
    """Name a path of `peer_steps.py`.

    Attributes:
        name: label in the tables.
        path: key of `STEPS_BY_NAME` in `peer_steps.py`.
        variable: environment variable with the Python of the toolkit; None runs this Python.
    """

    name: str
    path: str
    variable: str | None = None


EAGLE3 = (
    Peer("ours", "eagle3"),
    Peer("ours, compiled", "eagle3_compiled"),
    Peer("speculators' trainer", "speculators", SPECULATORS),
)
MEDUSA = (Peer("ours", "medusa"), Peer("original Medusa step", "original_medusa"))
EAGLE3_STEPS, MEDUSA_HEADS = (3, 7), 4
COLUMNS = (
    "path", "ms a step", "of ours", "tokens/s", "peak, MiB", "of ours", "first loss",
)  # fmt: skip
TOLERANCE = 1e-4
"""Relative tolerance between first losses."""
LEAST_TOKENS = 256
"""The shortest prompt must be longer than the depth: speculators and the original read beyond the
end of a document, except where the next document's mask stops them."""


def measure_peers(job: dict[str, Any], peers: list[Peer]) -> tuple[str, str]:
    """Measure a step of each path; return a table, ours first, and the versions that ran.

    Raises:
        InputError: a first loss differs from ours, so the steps are not the same.
    """
    ours: dict[str, Any] | None = None
    rows: list[list[str]] = []
    versions: list[str] = []
    for peer in tqdm(peers, desc=f"{peers[0].path}, {job['depth']}", unit="path"):
        python = sys.executable if peer.variable is None else os.environ[peer.variable]
        result = run_worker("peer_steps", job | {"path": peer.path}, python)
        ours = ours or result
        # NaN compares as false, so it is refused too.
        if not abs(result["loss"] - ours["loss"]) <= TOLERANCE * abs(ours["loss"]):
            raise InputError(
                f"{peer.name}: first loss {result['loss']}, but ours is {ours['loss']}; the two do "
                "not train the same step"
            )
        seconds, peak = result["seconds"], result["peak_bytes"]
        rows.append([
            peer.name,
            f"{1000 * seconds:.0f}",
            f"{seconds / ours['seconds']:.2f}",
            f"{job['tokens'] / seconds:,.0f}",
            f"{peak / 2**20:.1f}",
            f"{peak / ours['peak_bytes']:.2f}",
            f"{result['loss']:.5f}",
        ])  # fmt: skip
        versions.extend(result["versions"])
    return build_markdown_table(COLUMNS, rows), ", ".join(dict.fromkeys(versions))


def print_tables(options: argparse.Namespace) -> None:
    """Print a table for each head, and for EAGLE-3 a table for each number of steps."""
    print(
        f"{options.tokens} tokens in one packed sequence, two thirds of them learnt; hidden size "
        f"{options.hidden}, vocabulary {options.vocab}, float32; {format_device(best_device())}; "
        "median of "
        f"{options.repeats} steps. Peak beyond weights, optimizer state and inputs."
    )
    peers = find_runnable_peers(EAGLE3)
    layer = (
        f"{options.num_heads} heads of {options.head_dim}, {options.num_kv_heads} key-value heads, "
        f"intermediate size {options.intermediate}, draft vocabulary {options.draft_vocab}"
    )
    for depth in EAGLE3_STEPS:
        text, versions = measure_peers(vars(options) | {"depth": depth}, peers)
        print(f"\nEAGLE-3, {depth} steps of the training-time test; {layer}; {versions}.")
        if best_device().type == "cpu" and any(peer.variable for peer in peers):
            print(
                "On a CPU speculators' flex attention has no backward pass and its loss kernel "
                "does not run: its own SDPA and eager loss stand in."
            )
        print(f"\n{text}")
    text, versions = measure_peers(
        vars(options) | {"depth": MEDUSA_HEADS}, find_runnable_peers(MEDUSA)
    )
    print(f"\nMedusa, {MEDUSA_HEADS} heads of one layer; {versions}.\n\n{text}")


def find_runnable_peers(peers: tuple[Peer, ...]) -> list[Peer]:
    """Return the peers whose Python exists, and print the names of the others.

    Raises:
        InputError: a variable names no file.
    """
    runnable = []
    for peer in peers:
        python = sys.executable if peer.variable is None else os.environ.get(peer.variable)
        if python is None:
            print(f"{peer.name}: left out, {peer.variable} is not set")
        elif not Path(python).is_file():
            raise InputError(
                f"{peer.variable}={python}: no such file; set it to the path of a Python"
            )
        else:
            runnable.append(peer)
    return runnable


def parse_arguments() -> argparse.Namespace:
    """Read the sizes from the command line.

    Raises:
        InputError: a size is too small, or the draft vocabulary exceeds the target's.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_size_flags(parser, tokens=1024, hidden=512, vocab=8192, draft_vocab=4096)
    add_size_flags(parser, num_heads=8, num_kv_heads=4, head_dim=64, intermediate=1536)
    add_size_flags(parser, threads=1, repeats=3)
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
    """Print the tables of all heads."""
    try:
        options = parse_arguments()
        torch.set_num_threads(options.threads)
        print_tables(options)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
