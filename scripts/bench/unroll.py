"""Memory and time of the training-time test's attention against steps J, and against two others.

`python scripts/bench/unroll.py` prints, for J = 1, 3, 5, 7, the peak of live memory and the
median time of a forward and backward pass over one text: of `branch_attention` as training runs
it, with fused kernels; of `plain_attention`, which writes the scores of some rows at a time and
computes them again in the backward pass; and of one attention over [T, J * T] scores, as the
mask of the training-time test is written down.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from conf.command.clock import timed
from heads.eagle.branch_attention import branch_attention, plain_attention
from heads.eagle.branches import Branches, causal_rows
from heads.layers.documents import Documents
from scripts.bench.footprint import add_sizes, best_device, peak_bytes

STEPS = (1, 3, 5, 7)


def unrolled(
    attend: Callable[[Tensor, Branches], Tensor], query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """[J, T, Q, d]: every step over the text and its own earlier drafts."""
    places = _places(query)
    documents = Documents.single(len(places), places.device)
    branches = Branches(keys[:1], values[:1], causal_rows(documents, places))
    outputs = []
    for step in range(len(query)):
        if step:
            branches.own_keys.append(keys[step])
            branches.own_values.append(values[step])
        outputs.append(attend(query[step], branches))
    return torch.stack(outputs)


def full_masks(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[J, T, Q, d]: the same by one softmax over all [T, (step + 1) * T] scores."""
    places, groups = _places(query), query.shape[2] // keys.shape[2]
    outputs = []
    for step in range(len(query)):
        diagonal = torch.eye(len(places), dtype=torch.bool, device=places.device)
        causal = torch.ones_like(diagonal).tril()
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        k = keys[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        v = values[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        scores = torch.einsum("tqd,sqd->qts", query[step], k) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("qts,sqd->tqd", weights, v))
    return torch.stack(outputs)


def _places(query: Tensor) -> Tensor:
    return torch.arange(query.shape[1], device=query.device)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The sizes; the defaults suit a CPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_sizes(parser, tokens=1024, heads=16, kv_heads=4, head_dim=64, repeats=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(given)


def main() -> None:
    """Prints one line per J."""
    options = arguments()
    device = best_device()
    heads = f"{options.heads} heads on {options.kv_heads}"
    print(f"{options.tokens} tokens, {heads}, {options.dtype}, {device.type}")
    print("   J   MiB fused   plain    full   s fused   plain    full   plain/fused   full/fused")
    for num_steps in STEPS:
        mib, seconds = measured(options, num_steps, device)
        fused, plain, full = seconds
        print(
            f"{num_steps:4} {mib[0]:11.0f} {mib[1]:7.0f} {mib[2]:7.0f} {fused:9.2f} {plain:7.2f} "
            f"{full:7.2f} {plain / fused:13.2f} {full / fused:12.2f}"
        )


def measured(
    options: argparse.Namespace, num_steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """MiB and seconds of the three, which take turns, so that a busy machine is busy for all."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(num_steps, options.tokens, count, options.head_dim, device=device)
        for count in (options.heads, options.kv_heads, options.kv_heads)
    ]
    tensors = [each.to(getattr(torch, options.dtype)) for each in tensors]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        query, keys, values = (tensor.clone().requires_grad_() for tensor in tensors)
        attend(query, keys, values).sum().backward()

    ways = (partial(unrolled, branch_attention), partial(unrolled, plain_attention), full_masks)
    runs = [partial(run, way) for way in ways]
    mib = [peak_bytes(each, device) / 2**20 for each in runs]
    turns = [[timed(each, device) for each in runs] for _ in range(options.repeats)]
    return mib, [statistics.median(column) for column in zip(*turns, strict=True)]


if __name__ == "__main__":
    main()
