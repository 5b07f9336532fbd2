"""Losses as sums over supervised tokens; that of Medusa, and the target's own.

A loss is a sum and a count, never a mean: the loop divides by the count over all processes and
micro batches of an optimizer step, so the result does not depend on how sequences fall on them.

Shapes: B batch, T tokens, D hidden, V vocab, K terms (heads or steps), P answered places.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from heads.ends import TargetEnds
from heads.projection import Projection
from train.divergences import Said, kl
from train.fused import Part, Teacher, Verdict, fused_linear
from train.teachers import Distribution

Batch = Mapping[str, Tensor]


class Sums(NamedTuple):
    """What a batch gave.

    Attributes:
        total: [] float32, the loss of each term times its scale; the only one with a gradient.
        terms: [2 + L, K] float32, summed over the supervised tokens of each term: the loss,
            the tokens, and L measures.
    """

    total: Tensor
    terms: Tensor


class MedusaHeads(Protocol):
    """What the Medusa loss needs of heads."""

    @property
    def num_heads(self) -> int:
        """K."""
        ...

    def states(self, k: int, hidden_states: Tensor, /) -> Tensor:
        """What head k, from 0, projects: [N, D] of final hidden states [N, D]."""
        ...

    def projection(self, k: int, /) -> Projection:
        """The projection of head k, from 0."""
        ...


def supervised(batch: Batch, k: int) -> Tensor:
    """Positions at which depth k (from 1), a Medusa head or a step of EAGLE, is trained.

    At position t head k predicts x_{t+1+k}. It is trained there if that token is in the loss
    mask and belongs to the document of t: k=1 in `a b c | d e`, all of them in the mask, is
    trained at `a` (on `c`) only.

    Args:
        batch: `loss_mask` [B, T] bool, `document_ids` [B, T] int, -1 on padding.
        k: head, from 1; 0 is the target itself, which predicts x_{t+1} at t.

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


class Answered(NamedTuple):
    """The tokens whose continuation is learnt, over a flattened batch.

    Attributes:
        places: [P] int64, of the tokens.
        number: [B * T] int64, from a token to its number among them; elsewhere meaningless.
    """

    places: Tensor
    number: Tensor


def answered(batch: Batch) -> Answered:
    """The tokens before those in the loss mask; depth d reads those d after its own."""
    before = supervised(batch, 0).flatten()
    return Answered(before.nonzero().squeeze(1), before.cumsum(0) - 1)


def medusa_loss(
    heads: MedusaHeads,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    teacher: Teacher | None = None,
    compiled: bool = False,
) -> Sums:
    """Cross-entropy of every head against the text, or KL from the target's distribution.

    Args:
        heads: the heads.
        hidden: [B, T, D], the target's last hidden states.
        batch: `input_ids` [B, T] and what `supervised` reads.
        scale: [K] float32, the weight of each head's sum in the total.
        teacher: of `answered(batch)`. With it head k at t learns the distribution that the
            target gives at t + k, its own prediction of x_{t+1+k}. Accuracies are against the
            text either way.
        compiled: compile the loss on first use.

    Returns:
        Measures are tokens that were the head's first choice, and among its first five.

    Source: "Medusa", arXiv:2401.10774, section 2.2.1, eq. 1.
    """
    flat = hidden.flatten(0, 1)
    places, number = answered(batch)
    labels = batch["input_ids"].flatten().roll(-1)[places]
    parts = []
    with record_function("head"):
        for k in range(1, heads.num_heads + 1):
            rows = supervised(batch, k).flatten().nonzero().squeeze(1)
            states = heads.states(k - 1, flat[rows])
            scales = scale[k - 1].expand(len(rows))
            parts.append(Part(states, heads.projection(k - 1), number[rows + k], scales))
    with record_function("loss"):
        total, found = fused_linear(parts, TextTeacher(labels, teacher), text_criterion, compiled)
    return Sums(total, torch.stack([term_sums(rows) for rows in found], dim=1))


def target_loss(
    target: TargetEnds,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    teacher: Teacher | None = None,
    compiled: bool = False,
) -> Sums:
    """Cross-entropy of the target itself against the text, or KL from what it said before.

    Args:
        target: its output head, which gets no gradient.
        hidden: [B, T, D], its last hidden states.
        batch: `input_ids` [B, T] and what `supervised` reads.
        scale: [1] float32, the weight of the sum in the total.
        teacher: of `answered(batch)`, learnt in place of the text.
        compiled: compile the loss on first use.

    Returns:
        One term, with the measures of `medusa_loss`.
    """
    places = answered(batch).places
    labels = batch["input_ids"].flatten().roll(-1)[places]
    rows = torch.arange(len(places), device=places.device)
    states = hidden.flatten(0, 1)[places]
    part = Part(states, target.projection, rows, scale.expand(len(rows)))
    with record_function("loss"):
        text = TextTeacher(labels, teacher)
        total, (found,) = fused_linear([part], text, text_criterion, compiled)
    return Sums(total, term_sums(found).unsqueeze(1))


def term_sums(found: Tensor) -> Tensor:
    """[2 + L] float32 loss, tokens and measures of a term, from those of its rows [1 + L, N]."""
    sums = found.sum(1, dtype=torch.float32)
    return torch.cat([sums[:1], sums.new_tensor([float(found.shape[1])]), sums[1:]])


@dataclass(frozen=True)
class TextTeacher:
    """The text itself, and maybe a distribution beside it.

    Attributes:
        labels: [P] int64, the token that comes.
        soft: what is learnt instead of it.
    """

    labels: Tensor
    soft: Teacher | None = None

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.labels)

    @property
    def row_bytes(self) -> int:
        """Of a label, or of the distribution beside it."""
        return self.labels.element_size() if self.soft is None else self.soft.row_bytes

    def known(self, begin: int, end: int) -> tuple[Tensor, Distribution | None]:
        """Labels, and the distribution, of rows begin..end."""
        soft = None if self.soft is None else self.soft.known(begin, end)
        return self.labels[begin:end], soft


class _TextCriterion:
    """Cross-entropy against the text or KL from a distribution; top-1 and top-5 of the text."""

    num_measures = 2

    def __call__(self, known: Any, at: Tensor, said: Said, want_grad: bool) -> Verdict:
        labels, soft = known[0][at], known[1]
        measures = torch.stack(hits(said.logits, labels))
        if soft is not None:
            found = kl(soft.pair(at, said), want_grad)
            return Verdict(found.loss, found.grad, measures)
        column = labels.unsqueeze(1)
        loss = -said.log_q_at(column).squeeze(1)
        # The gradient is q - 1 at the label.
        minus_one = said.q.new_full(column.shape, -1.0)
        grad = said.q.scatter_add_(1, column, minus_one) if want_grad else None
        return Verdict(loss, grad, measures)


text_criterion = _TextCriterion()


def hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels are the first choice, and which are among the first five.

    Exactly one id is first and five are among the first five, also where logits tie, which is
    common in bfloat16; counting all of a tie would flatter.

    Args:
        logits: [N, V].
        labels: [N] int.

    Returns:
        Two [N] tensors of 0 and 1, in the dtype of the logits.
    """
    best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    first = logits.max(1).indices == labels
    return first.to(logits.dtype), best.any(1).to(logits.dtype)
