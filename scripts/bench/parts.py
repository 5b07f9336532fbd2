"""Parts of a training step beside their plain forms: loss, documents, training-time test.

Letters: J steps, T tokens, H hidden, V vocabulary, Q query heads, d channels of a head.
"""

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
from scripts.bench import training
from scripts.bench.harness import (
    REPEATS,
    Figures,
    best_device,
    measure_footprint,
    measure_peak_bytes,
)
from train.batch.batch import SortedIndices
from train.loss.fused_linear import Student, compute_fused_loss
from train.loss.teachers import build_hidden_teacher
from train.step_objective import StepCriterion


def measure_loss(size: str) -> Figures:
    """Compare time and memory of the fused loss with those of complete logits.

    Both compute KL(teacher || student), forward and backward: `fused` as in training, `whole` from
    [T, V] logits by autograd. The student and the teacher are [T, H] states, each with its own
    [V, H] matrix.
    """
    dtype, num_tokens, hidden, vocab_size = torch.float32, 256, 64, 512
    if size == "8b":
        dtype, num_tokens, hidden, vocab_size = torch.bfloat16, 8192, 4096, 128256
    device = best_device()
    torch.manual_seed(0)
    draw = partial(torch.randn, device=device, dtype=dtype)
    student, teacher = draw(num_tokens, hidden).requires_grad_(), draw(num_tokens, hidden)
    projection, output_head = (draw(vocab_size, hidden) * 2 * hidden**-0.5 for _ in range(2))
    vocab = DraftVocab.make_full(vocab_size).to(device)
    target: Any = SimpleNamespace(
        vocab_size=vocab_size, compute_logits=lambda states: F.linear(states, output_head)
    )
    numbers = torch.arange(num_tokens)
    rows = SortedIndices(numbers, numbers.to(device))
    weights = torch.ones(num_tokens, device=device)
    criterion = StepCriterion(EagleConfig(), vocab)
    judge = build_hidden_teacher(target, vocab, teacher)

    def compute_fused() -> Tensor:
        part = Student(student, Projection(projection), rows, weights)
        return compute_fused_loss([part], judge, criterion)[0]

    def compute_whole() -> Tensor:
        log_probs = F.linear(student, projection).float().log_softmax(-1)
        probs = F.linear(teacher, output_head).float().softmax(-1)
        return F.kl_div(log_probs, probs, reduction="sum")

    def step(loss: Callable[[], Tensor]) -> None:
        student.grad = None
        loss().backward()

    fused, whole = (
        measure_footprint(partial(step, loss), device) for loss in (compute_fused, compute_whole)
    )
    yield "textbook's time over ours", whole.seconds / fused.seconds
    yield "textbook's memory over ours", whole.peak_bytes / fused.peak_bytes


@torch.no_grad()
def measure_documents(size: str) -> Figures:
    """Compare the target's pass over packed documents with a pass under a written mask.

    Raises:
        RuntimeError: the two give different states.
    """
    sizes = training.RunSizes(max_length=512, hidden=64, layers=4)
    if size == "8b":
        sizes = training.RunSizes(
            max_length=8192, hidden=2048, layers=8, vocab=32000, dtype="bfloat16"
        )
    device = best_device()
    target = training.make_random_target(sizes, device)
    row = PackedDataset(training.iter_documents(sizes, 4), sizes.max_length, seed=0)[0]
    documents = Documents.from_ids(row["document_ids"][None]).to_device(device)
    ids, positions = (row[name][None].to(device) for name in ("input_ids", "position_ids"))
    allowed = build_dense_mask(documents, 1)
    ways = (
        lambda: target.encode_documents(ids, positions, documents),
        lambda: target.forward(ids, positions, allowed, positions),
    )
    found, exact = (way().hidden_states.float() for way in ways)
    bound = 1e-4 if target.dtype is torch.float32 else 5e-2
    error = float((found - exact).norm() / exact.norm())
    if not error < bound:
        raise RuntimeError(f"the states differ by {error:.1e}, more than {bound}")
    ours, mask = (measure_footprint(way, device) for way in ways)
    yield "time of a written mask over ours", mask.seconds / ours.seconds
    yield "its memory over ours", mask.peak_bytes / ours.peak_bytes
    yield "milliseconds", 1000 * ours.seconds


def measure_unroll(size: str) -> Figures:
    """Compare ways to compute attention of the training-time test over one text, at 7 steps.

    Forward and backward: `branch_attention` as in training; `plain_branch_attention`, which writes
    the scores of some rows at a time; `run_unrolled_full_masks`, over [T, J * T] scores with an
    explicit mask.
    """
    num_tokens, dtype = (4096, torch.bfloat16) if size == "8b" else (128, torch.float32)
    device = best_device()
    torch.manual_seed(0)
    tensors = [
        torch.randn(7, num_tokens, count, 64, device=device, dtype=dtype) for count in (16, 4, 4)
    ]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        query, keys, values = (tensor.clone().requires_grad_() for tensor in tensors)
        attend(query, keys, values).sum().backward()

    runs = [
        partial(run, partial(run_unrolled_attention, branch_attention)),
        partial(run, partial(run_unrolled_attention, plain_branch_attention)),
        partial(run, run_unrolled_full_masks),
    ]
    fused_peak, _, full_peak = (measure_peak_bytes(call, device) for call in runs)
    # They take turns, so that other load affects all.
    turns = [[measure_seconds(call, device) for call in runs] for _ in range(REPEATS)]
    fused, plain, full = map(statistics.median, zip(*turns, strict=True))
    yield "time of full masks over ours, 7 steps", full / fused
    yield "their memory over ours", full_peak / fused_peak
    yield "time of plain torch over ours", plain / fused


def run_unrolled_attention(
    attend: Callable[[Tensor, BranchCache], Tensor], query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Compute [J, T, Q, d]: at every step each token sees the text and its own earlier drafts."""
    places = torch.arange(query.shape[1], device=query.device)
    text = Documents.from_lengths([len(places)], places.device)
    branches = BranchCache(keys[:1], values[:1], build_causal_range(text, places))
    outputs = []
    for step in range(len(query)):
        if step:
            branches.draft_keys.append(keys[step])
            branches.draft_values.append(values[step])
        outputs.append(attend(query[step], branches))
    return torch.stack(outputs)


def run_unrolled_full_masks(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the same [J, T, Q, d] by one softmax over all [T, (step + 1) * T] scores."""
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
