"""Linear layers over weights that are packed once, beside torch's own, on a CPU.

`python scripts/bench/products.py` multiplies rows by matrices of several sizes, each time others of
the same size, so that no cache holds them as none holds those of a target, and prints microseconds
of both and their ratio.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import statistics
from copy import deepcopy

import torch
from torch import nn
from tqdm import tqdm

from conf.command.clock import CPU, timed
from heads.layers.packed import pack
from scripts.bench.apart import markdown
from scripts.bench.footprint import add_sizes, where

SIZES = ((256, 1024), (512, 1536), (1024, 3072), (2048, 2048), (4096, 4096))
"""Numbers that a matrix takes, and gives."""


def arguments() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 17])
    parser.add_argument("--megabytes", type=int, default=200, help="of a size, together")
    add_sizes(parser, repeats=7, threads=1)
    return parser.parse_args()


@torch.inference_mode()
def measured(layers: list[nn.Linear], num_rows: list[int], repeats: int) -> list[str]:
    """By number of rows: microseconds of torch's product, of a packed one, and their ratio."""
    packed = [deepcopy(layer) for layer in layers]
    pack(*packed)
    found = []
    for number in num_rows:
        rows = layers[0].weight.new_ones(1, number, layers[0].in_features)

        def seconds(ways: list[nn.Linear]) -> float:
            return timed(lambda: [way(rows) for way in ways], CPU) / len(ways)  # noqa: B023

        both = [(seconds(layers), seconds(packed)) for _ in range(repeats + 1)][1:]
        plain, ours = (1e6 * statistics.median(each) for each in zip(*both, strict=True))
        found.append(f"{plain:.0f} / {ours:.0f} = {plain / ours:.2f}")
    return found


def main() -> None:
    """Prints the table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for width, height in tqdm(SIZES, desc=name, unit="size"):
            layer = nn.Linear(width, height, bias=False, dtype=dtype).requires_grad_(False)
            number = max(1, (options.megabytes << 20) // layer.weight.nbytes)
            layers = [deepcopy(layer) for _ in range(number)]
            cells = measured(layers, options.rows, options.repeats)
            rows.append((name, f"{width} x {height}", *cells))
    print(f"{where(CPU)}; torch's own product / packed, microseconds\n")
    print(markdown(("dtype", "matrix", *(f"{n} rows" for n in options.rows)), rows))


if __name__ == "__main__":
    main()
