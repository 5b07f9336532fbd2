"""What reading documents as documents saves the target, beside a mask of tokens by tokens.

`python scripts/bench/documents.py [--tokens 8192 ...]` runs a random target over one packed
sequence of documents of chat-like lengths, by `Target.read` and with the mask written out, and
prints time and peak memory of both.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse

import torch
from torch import Tensor

from data.prepared.pack import PackedDataset
from heads.layers.documents import Documents
from heads.target_model.attention import dense
from heads.target_model.model import Target
from scripts.bench.footprint import Footprint, add_sizes, best_device, footprint, where
from scripts.bench.training import documents, random_target


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The sizes; the defaults suit a CPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", dest="max_length", type=int, default=1024)
    add_sizes(parser, hidden=256, layers=4, vocab=4096, repeats=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(given)


@torch.no_grad()
def measured(options: argparse.Namespace) -> dict[str, Footprint]:
    """What both ways cost.

    Raises:
        RuntimeError: they do not give the same states.
    """
    device = best_device()
    target = random_target(options, device)
    row = PackedDataset(documents(options, 4), options.max_length, seed=0)[0]
    ids, positions, names = (
        row[name][None] for name in ("input_ids", "position_ids", "document_ids")
    )
    where_they_lie = Documents.of(names).on(device)
    ids, positions = ids.to(device), positions.to(device)
    allowed = dense(where_they_lie, 1)
    ways = {
        "documents": lambda: target.read(ids, positions, where_they_lie),
        "mask": lambda: target.forward(ids, positions, allowed, positions),
    }
    states = [way().hidden_states.float() for way in ways.values()]
    _same(states[0], states[1], target)
    return {name: footprint(way, device, options.repeats) for name, way in ways.items()}


def _same(found: Tensor, expected: Tensor, target: Target) -> None:
    bound = 1e-4 if target.dtype is torch.float32 else 5e-2
    error = float((found - expected).norm() / expected.norm())
    if not error < bound:
        raise RuntimeError(f"the states differ by {error:.1e}, more than {bound}")


def main() -> None:
    """Prints both."""
    options = arguments()
    found = measured(options)
    print(
        f"{options.max_length} tokens, {options.layers} layers of {options.hidden}, {options.dtype}"
    )
    print(where(best_device()))
    for name, cost in found.items():
        print(f"{name:>10}: {1000 * cost.seconds:.1f} ms, {cost.peak_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
