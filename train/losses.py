"""Losses of draft heads, as sums over supervised tokens.

A loss is returned as a sum and a count, never as a mean: the loop divides by the count over
all processes and micro batches of an optimizer step, so the result does not depend on how
sequences fall on them.

Shapes: B batch, T tokens, D hidden, V vocab, K heads, N supervised rows of one head.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS_PER_CHUNK = 1024
Batch = Mapping[str, Tensor]
Teacher = Callable[[Tensor], Tensor]
"""Hidden states [N, D] to the target's logits [N, V]."""


class Sums(NamedTuple):
    """Per term of the loss (for Medusa: per head), summed over its supervised tokens.

    Attributes:
        loss: [K] float32, the only one with a gradient.
        tokens: [K] float32, supervised tokens.
        top1: [K] float32, tokens that were the head's first choice.
        top5: [K] float32, tokens that were among its first five.
    """

    loss: Tensor
    tokens: Tensor
    top1: Tensor
    top5: Tensor


class HeadLogits(Protocol):
    """What the Medusa loss needs from a head."""

    @property
    def num_heads(self) -> int:
        """K."""
        ...

    def head_logits(self, k: int, hidden_states: Tensor, /) -> Tensor:
        """Logits of head k, counted from 0: hidden states [N, D] to [N, V]."""
        ...


def supervised(batch: Batch, k: int) -> Tensor:
    """Positions at which depth k (from 1), a Medusa head or a step of EAGLE, is trained.

    At position t head k predicts x_{t+1+k}. It is trained there if that token is in the loss
    mask and belongs to the document of t: k=1 in `a b c | d e`, all of them in the mask, is
    trained at `a` (on `c`) only.

    Args:
        batch: `loss_mask` [B, T] bool, `document_ids` [B, T] int, -1 on padding.
        k: head, from 1.

    Returns:
        [B, T] bool, false in the last k + 1 columns.
    """
    loss_mask, documents = batch["loss_mask"], batch["document_ids"]
    found = torch.zeros_like(loss_mask, dtype=torch.bool)
    ahead = 1 + k
    if loss_mask.shape[1] > ahead:
        same = (documents[:, :-ahead] == documents[:, ahead:]) & (documents[:, ahead:] >= 0)
        found[:, :-ahead] = same & loss_mask[:, ahead:].bool()
    return found


def supervised_counts(batch: Batch, depth: int) -> Tensor:
    """Supervised tokens of each depth, known without running any model.

    Returns:
        [depth] float32.
    """
    counts = [supervised(batch, k).sum() for k in range(1, depth + 1)]
    return torch.stack(counts).float()


def medusa_weights(num_heads: int, decay: float) -> Tensor:
    """lambda_k = decay ** k for k = 1..K.

    Returns:
        [K] float32.
    """
    return torch.tensor([decay**k for k in range(1, num_heads + 1)], dtype=torch.float32)


def medusa_loss(
    head: HeadLogits,
    hidden: Tensor,
    batch: Batch,
    teacher: Teacher | None = None,
    chunk: int = ROWS_PER_CHUNK,
) -> Sums:
    """Cross-entropy of every head against the text, or against the target's distribution.

    Rows outside the mask are dropped before the projection, and logits live for `chunk` rows
    of one head at a time, in the backward pass too.

    Args:
        head: the heads.
        hidden: [B, T, D], the target's last hidden states.
        batch: `input_ids` [B, T] and what `supervised` reads.
        teacher: the target's output head. With it head k at t learns the distribution that
            the target gives at t + k, its own prediction of x_{t+1+k}. Accuracies are against
            the text either way.
        chunk: rows per projection.

    Source: "Medusa", arXiv:2401.10774, section 2.2.1, eq. 1.
    """
    flat_hidden = hidden.flatten(0, 1)
    flat_ids = batch["input_ids"].flatten()
    per_head = []
    for k in range(1, head.num_heads + 1):
        rows = supervised(batch, k).flatten().nonzero().squeeze(1)
        terms = []
        # An empty split still runs once: every parameter needs a gradient under DDP.
        for part in rows.split(chunk) if len(rows) else (rows,):
            teacher_hidden = None if teacher is None else flat_hidden[part + k]
            labels = flat_ids[part + 1 + k]
            terms.append(_chunk(head, k - 1, flat_hidden[part], labels, teacher_hidden, teacher))
        loss, top1, top5 = (torch.stack(column).sum() for column in zip(*terms, strict=True))
        tokens = torch.tensor(float(len(rows)), device=hidden.device)
        per_head.append((loss, tokens, top1, top5))
    return Sums(*(torch.stack(column) for column in zip(*per_head, strict=True)))


def _chunk(
    head: HeadLogits,
    k: int,
    hidden: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor | None,
    teacher: Teacher | None,
) -> tuple[Tensor, Tensor, Tensor]:
    def compute(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = head.head_logits(k, hidden).float()
        if teacher is None or teacher_hidden is None:
            loss = F.cross_entropy(logits, labels, reduction="sum")
        else:
            loss = soft_cross_entropy(logits, _logits_of(teacher, teacher_hidden))
        return loss, *hits(logits.detach(), labels)

    if not torch.is_grad_enabled():
        return compute(hidden)
    return checkpoint(compute, hidden, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def _logits_of(teacher: Teacher, hidden: Tensor) -> Tensor:
    return teacher(hidden).float()


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Sum over rows of -sum_v p(v) log q(v); its gradient is that of KL(p || q).

    Args:
        logits: [N, V] float32, of q.
        teacher_logits: [N, V] float32, of p.

    Returns:
        [] float32.
    """
    return F.cross_entropy(logits, teacher_logits.softmax(-1), reduction="sum")


@torch.no_grad()
def hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many labels are the first choice, and how many are among the first five.

    Exactly one id is first and five are among the first five, also where logits tie, which is
    common in bfloat16; counting all of a tie would flatter.

    Args:
        logits: [N, V].
        labels: [N] int.

    Returns:
        Two [] float32 tensors.
    """
    first = logits.argmax(1) == labels
    five = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return first.sum().float(), five.any(1).sum().float()
