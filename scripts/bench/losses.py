"""Time and memory of a distillation loss: ours, the textbook's, liger-kernel's, speculators'.

`python scripts/bench/losses.py` makes hidden states and output projections of a student and a
teacher, and takes KL(teacher || student), summed over tokens, forward and backward, through each
path in a process of its own: once with the student's projection frozen, once trained. Before
that all paths are compared at a small size. `HEADSMITH_LIGER_PYTHON` and
`HEADSMITH_SPECULATORS_PYTHON` name Pythons that have liger-kernel and speculators; a path
without its Python is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from conf.errors import InputError
from scripts.bench.apart import markdown, python_for, result_of
from scripts.bench.footprint import add_sizes, best_device, where

WORKER = "losses"
PATHS = {
    "ours": None,
    "naive": None,
    "liger": "HEADSMITH_LIGER_PYTHON",
    "speculators": "HEADSMITH_SPECULATORS_PYTHON",
}
"""Paths of the worker, and the variable that names the Python of each."""
SMALL = {"tokens": 96, "hidden": 64, "vocab": 512}
TOLERANCE = 1e-4
"""Relative, between paths in float32."""
COST_COLUMNS = (
    "path", "projection", "seconds", "of ours", "peak, MiB", "of ours", "its gradient, MiB",
)  # fmt: skip


def errors(found: dict[str, Any], exact: dict[str, Any]) -> list[float]:
    """Relative differences of the loss and of each gradient."""
    loss = abs(found["loss"] - exact["loss"]) / abs(exact["loss"])
    grads = [
        _relative(torch.tensor(found["gradients"][name]), torch.tensor(wanted))
        for name, wanted in exact["gradients"].items()
    ]
    return [loss, *grads]


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def agreement(pythons: dict[str, str], dtype: str) -> str:
    """How far each path is from the naive one in float32, as a table.

    Raises:
        InputError: paths disagree in float32, so they do not compute the same.
    """

    def values(path: str, kind: str) -> dict[str, Any]:
        job = SMALL | {"path": path, "dtype": kind, "trained": True, "repeats": 0}
        return result_of(WORKER, job, pythons[path])

    exact, rows = values("naive", "float32"), []
    for kind in dict.fromkeys(("float32", dtype)):
        for path in tqdm(pythons, desc=f"agreement in {kind}", unit="path"):
            differences = errors(values(path, kind), exact)
            if kind == "float32" and max(differences) > TOLERANCE:
                raise InputError(f"{path}: off by {differences} in float32: another loss")
            rows.append([path, kind, *(f"{each:.1e}" for each in differences)])
    return markdown(("path", "dtype", "loss", "hidden gradient", "projection gradient"), rows)


def costs(options: argparse.Namespace, pythons: dict[str, str]) -> str:
    """Time and memory of each path, as a table."""
    rows = []
    bar = tqdm(total=2 * len(pythons), unit="path")
    for trained in (False, True):
        first: dict[str, Any] | None = None
        for path, python in pythons.items():
            job = vars(options) | {"path": path, "trained": trained}
            found = result_of(WORKER, job, python)
            first = first or found
            rows.append([path, "trained" if trained else "frozen", *_cells(found, first)])
            bar.update()
    bar.close()
    return markdown(COST_COLUMNS, rows)


def _cells(found: dict[str, Any], first: dict[str, Any]) -> list[str]:
    if "needed_bytes" in found:
        needed, free = found["needed_bytes"] / 2**30, found["free_bytes"] / 2**30
        return [f"does not fit: {needed:.1f} GiB, {free:.1f} free", *[""] * 4]
    mib, first_mib = _mib(found), _mib(first)
    return [
        f"{found['seconds']:.3g}",
        f"{found['seconds'] / first['seconds']:.2f}",
        f"{mib:.0f}",
        f"{mib / first_mib:.2f}",
        f"{found['grad_bytes'] / 2**20:.0f}",
    ]


def _mib(found: dict[str, Any]) -> float:
    return (found["peak_bytes"] - found["grad_bytes"]) / 2**20


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_sizes(parser, tokens=8192, hidden=4096, vocab=152064, repeats=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    try:
        found = {path: python_for(variable) for path, variable in PATHS.items()}
        pythons = {path: python for path, python in found.items() if python}
        for path in PATHS.keys() - pythons.keys():
            print(f"{path} is left out: {PATHS[path]} is not set")
        print("\nRelative difference from the naive path in float32, at", SMALL)
        print(f"\n{agreement(pythons, options.dtype)}\n")
        print(
            f"{options.tokens} tokens, hidden size {options.hidden}, vocabulary {options.vocab}, "
            f"{options.dtype}; {where(best_device())}; torch {torch.__version__}; medians of "
            f"{options.repeats}. Peak beyond the inputs, without the projection's own gradient:"
        )
        print(f"\n{costs(options, pythons)}")
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
