"""Parts of a training step compared with plain versions, as `scripts/bench/gpu.py` measures them.

Letters: J steps, T tokens, H hidden, V vocabulary, Q query heads, d channels of a head.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.command.clock import measure_seconds
from conf.settings.eagle import EagleConfig
from data.prepared.packing import PackedDataset
from heads.layers.branch_attention import (
    BranchCache,
    branch_attention,
    build_causal_range,
    plain_branch_attention,
)
from heads.layers.documents import Documents
from heads.target_model.attention import build_dense_mask
from heads.target_model.embeddings_and_output_head import Projection
from heads.vocab import DraftVocab
from scripts.bench.harness import Footprint, best_device, measure_footprint, measure_peak_bytes
from scripts.bench.training import iter_documents, make_random_target
from train.batch.batch import SortedIndices
from train.eagle import EagleCriterion
from train.loss.fused_linear import Student, compute_fused_loss
from train.loss.teachers import HiddenTeacher

REPEATS = 3


def measure_loss_costs(
    num_tokens: int, hidden: int, vocab_size: int, dtype: torch.dtype
) -> dict[str, Footprint]:
    """KL(teacher || student), forward and backward: `fused`, and `whole` logits by autograd."""
    device = best_device()
    torch.manual_seed(0)
    draw = partial(torch.randn, device=device, dtype=dtype)
    student, teacher = draw(num_tokens, hidden).requires_grad_(), draw(num_tokens, hidden)
    projection, output_head = (draw(vocab_size, hidden) * 2 * hidden**-0.5 for _ in range(2))
    vocab = DraftVocab.make_full(vocab_size).to(device)
    target: Any = SimpleNamespace(
        vocab_size=vocab_size, logits=lambda states: F.linear(states, output_head)
    )
    numbers = torch.arange(num_tokens)
    rows = SortedIndices(numbers, numbers.to(device))
    weights = torch.ones(num_tokens, device=device)
    criterion, judge = EagleCriterion(EagleConfig(), vocab), HiddenTeacher(target, vocab, teacher)

    def fused() -> Tensor:
        part = Student(student, Projection(projection), rows, weights)
        return compute_fused_loss([part], judge, criterion)[0]

    def whole() -> Tensor:
        log_probs = F.linear(student, projection).float().log_softmax(-1)
        probs = F.linear(teacher, output_head).float().softmax(-1)
        return F.kl_div(log_probs, probs, reduction="sum")

    def step(loss: Callable[[], Tensor]) -> None:
        student.grad = None
        loss().backward()

    return {
        run.__name__: measure_footprint(partial(step, run), device, REPEATS)
        for run in (fused, whole)
    }


@torch.no_grad()
def measure_document_costs(options: argparse.Namespace) -> dict[str, Footprint]:
    """Cost of a target over one packed sequence: by `Target.read`, and with an explicit `mask`.

    Args:
        options: options of `scripts.bench.training`.

    Raises:
        RuntimeError: the two give different states.
    """
    device = best_device()
    target = make_random_target(options, device)
    row = PackedDataset(iter_documents(options, 4), options.max_length, seed=0)[0]
    lying = Documents.from_ids(row["document_ids"][None]).to_device(device)
    ids, positions = (row[name][None].to(device) for name in ("input_ids", "position_ids"))
    allowed = build_dense_mask(lying, 1)
    ways = {
        "read": lambda: target.encode_documents(ids, positions, lying),
        "mask": lambda: target.forward(ids, positions, allowed, positions),
    }
    ours, exact = (way().hidden_states.float() for way in ways.values())
    bound = 1e-4 if target.dtype is torch.float32 else 5e-2
    error = float((ours - exact).norm() / exact.norm())
    if not error < bound:
        raise RuntimeError(f"the states differ by {error:.1e}, more than {bound}")
    return {name: measure_footprint(way, device, REPEATS) for name, way in ways.items()}


def measure_unroll_costs(
    num_tokens: int, dtype: torch.dtype, num_steps: int
) -> dict[str, Footprint]:
    """Cost of the training-time test's attention over one text, forward and backward.

    Compares `branch_attention`, which training runs, `plain_attention`, which writes the scores of
    some rows at a time, and `full_masks` over [T, J * T] scores with an explicit mask.
    """
    device = best_device()
    torch.manual_seed(0)
    tensors = [
        torch.randn(num_steps, num_tokens, count, 64, device=device, dtype=dtype)
        for count in (16, 4, 4)
    ]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        query, keys, values = (tensor.clone().requires_grad_() for tensor in tensors)
        attend(query, keys, values).sum().backward()

    runs = {
        "fused": partial(run, partial(run_unrolled_attention, branch_attention)),
        "plain": partial(run, partial(run_unrolled_attention, plain_branch_attention)),
        "full": partial(run, full_masks),
    }
    peaks = {name: measure_peak_bytes(call, device) for name, call in runs.items()}
    # They take turns, so that other load affects all.
    turns = [[measure_seconds(call, device) for call in runs.values()] for _ in range(REPEATS)]
    medians = map(statistics.median, zip(*turns, strict=True))
    return {name: Footprint(next(medians), peak) for name, peak in peaks.items()}


def run_unrolled_attention(
    attend: Callable[[Tensor, BranchCache], Tensor], query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """[J, T, Q, d]: every step over the text and its own earlier drafts."""
    places = torch.arange(query.shape[1], device=query.device)
    text = Documents.from_length(len(places), places.device)
    branches = BranchCache(keys[:1], values[:1], build_causal_range(text, places))
    outputs = []
    for step in range(len(query)):
        if step:
            branches.draft_keys.append(keys[step])
            branches.draft_values.append(values[step])
        outputs.append(attend(query[step], branches))
    return torch.stack(outputs)


def full_masks(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[J, T, Q, d]: the same, by one softmax over all [T, (step + 1) * T] scores."""
    groups = query.shape[2] // keys.shape[2]
    diagonal = torch.eye(query.shape[1], dtype=torch.bool, device=query.device)
    causal = torch.ones_like(diagonal).tril()
    outputs = []
    for step in range(len(query)):
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        k = keys[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        v = values[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        scores = torch.einsum("tqd,sqd->qts", query[step], k) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("qts,sqd->tqd", weights, v))
    return torch.stack(outputs)
