"""Memory and time of the training-time test's attention against steps J, and against full masks.

`python scripts/bench_unroll.py` prints, for J = 1, 3, 5, 7, the peak of live memory and the
median time of a forward and backward pass of `heads.eagle_layer.branch_attention` over a
sequence, and the ratio to the baseline: one attention over [T, J * T] scores, as the mask of
the training-time test is written down.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from heads.branch_attention import Branches, branch_attention, causal_rows

STEPS = (1, 3, 5, 7)


def ours(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[J, T, Q, d]: every step over the text and its own earlier drafts."""
    allowed = causal_rows(torch.zeros(len(query[0]), device=query.device), _places(query))
    outputs = []
    for step in range(len(query)):
        own = slice(1, step + 1)
        branches = Branches(keys[:1], values[:1], allowed, [*keys[own]], [*values[own]])
        outputs.append(branch_attention(query[step], branches))
    return torch.stack(outputs)


def full_masks(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[J, T, Q, d]: the same by one softmax over all [T, (step + 1) * T] scores."""
    places, groups = _places(query), query.shape[2] // keys.shape[2]
    outputs = []
    for step in range(len(query)):
        causal = causal_rows(torch.zeros_like(places), places)
        diagonal = torch.eye(len(places), dtype=torch.bool, device=places.device)
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        k = keys[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        v = values[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        scores = torch.einsum("tqd,sqd->qts", query[step], k) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("qts,sqd->tqd", weights, v))
    return torch.stack(outputs)


def _places(query: Tensor) -> Tensor:
    return torch.arange(query.shape[1], device=query.device)


def peak_mib(run: Callable[[], None], device: torch.device) -> float:
    """Peak of memory that a run allocates beyond what was there before, in MiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    live = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / 2**20


def median_seconds(run: Callable[[], None], repeats: int) -> float:
    """Median over repeats."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    """Prints one line per J."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{options.tokens} tokens, {options.heads} heads on {options.kv_heads}, {device.type}")
    print("   J  MiB ours  MiB full masks  ratio    s ours  s full masks  ratio")
    for num_steps in STEPS:
        torch.manual_seed(0)
        heads = (options.heads, options.kv_heads, options.kv_heads)
        tensors = [
            torch.randn(num_steps, options.tokens, count, options.head_dim, device=device)
            for count in heads
        ]
        row = [_measure(attend, tensors, options.repeats) for attend in (ours, full_masks)]
        (mib, seconds), (full_mib, full_seconds) = row
        print(
            f"{num_steps:4} {mib:9.0f} {full_mib:15.0f} {mib / full_mib:6.2f} "
            f"{seconds:9.2f} {full_seconds:13.2f} {seconds / full_seconds:6.2f}"
        )


def _measure(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], repeats: int
) -> tuple[float, float]:
    def run() -> None:
        query, keys, values = (tensor.clone().requires_grad_() for tensor in tensors)
        attend(query, keys, values).sum().backward()

    run()
    return peak_mib(run, tensors[0].device), median_seconds(run, repeats)


if __name__ == "__main__":
    main()
