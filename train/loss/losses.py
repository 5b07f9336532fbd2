"""Losses as sums over supervised tokens; that of Medusa, and the target's own.

A loss is a sum and a count, never a mean: the loop divides by the count over all processes and
micro batches of an optimizer step, so the result does not depend on how sequences fall on them.

Shapes: B batch, T tokens, D hidden, V vocab, K terms (heads or steps), P answered places.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from heads.layers.projection import Projection
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from train.batch.rows import SUPERVISION, Batch, Rows, Unrolled, labels_of
from train.loss.divergences import Softmax, kl
from train.loss.fused import Part, RowLosses, Scales, Teacher, fused_linear
from train.loss.path import Followed, Path, PathScales, looked_at
from train.loss.ranking import hits
from train.loss.teachers import Distribution


class Sums(NamedTuple):
    """What a batch gave.

    Attributes:
        total: [] float32, the loss of each term times its scale; the only one with a gradient.
        terms: [2 + L, K] float32, summed over the supervised tokens of each term: the loss,
            the tokens, and L measures.
    """

    total: Tensor
    terms: Tensor


class SoftLabels(NamedTuple):
    """What the target says, to learn from.

    Attributes:
        teacher: of the answered places.
        off_path_weight: multiplies what a draft adds to the total, for each token between that is
            not the teacher's first choice.
    """

    teacher: Teacher
    off_path_weight: float = 1.0


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


def medusa_weights(num_heads: int, decay: float) -> Tensor:
    """lambda_k = decay ** k for k = 1..K.

    Returns:
        [K] float32.
    """
    return torch.tensor([decay**k for k in range(1, num_heads + 1)], dtype=torch.float32)


def medusa_loss(
    heads: MedusaHeads,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    soft: SoftLabels | None = None,
    compiled: bool = False,
) -> Sums:
    """Cross-entropy of every head against the text, or KL from the target's distribution.

    Args:
        heads: the heads.
        hidden: [B, T, D], the target's last hidden states.
        batch: `input_ids` [B, T], and what is learnt of it.
        scale: [K] float32, the weight of each head's sum in the total.
        soft: with it head k at t learns the distribution that the target gives at t + k, its own
            prediction of x_{t+1+k}. Accuracies are against the text either way.
        compiled: compile the loss on first use.

    Returns:
        Measures are tokens that were the head's first choice, and among its first five.

    Source: "Medusa", arXiv:2401.10774, section 2.2.1, eq. 1.
    """
    flat, learnt = hidden.flatten(0, 1), batch[SUPERVISION]
    labels, teacher = labels_of(batch), None
    path = None if soft is None else Path(batch, soft.off_path_weight)
    if soft is not None and path is not None:
        teacher = Followed(soft.teacher, labels, path)
    parts = []
    with record_function("head"):
        for k in range(heads.num_heads):
            rows: Rows = learnt.depths[1 + k]
            states = heads.states(k, flat[rows.places])
            scales: Scales = scale[k].expand(len(states))
            if path is not None:
                depths = rows.places.new_full((), 1 + k).expand(len(states))
                scales = PathScales(path, rows.places, depths, scales[:])
            parts.append(Part(states, heads.projection(k), rows.answers, scales))
    with record_function("loss"):
        text = TextTeacher(labels, teacher)
        total, found = fused_linear(parts, text, text_criterion, compiled)
    seen = [looked_at(part.scales) for part in parts]
    terms = [term_sums(*each) for each in zip(found, seen, strict=True)]
    return Sums(total, torch.stack(terms, dim=1))


def target_loss(
    target: EmbeddingsAndHead,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    teacher: Teacher | None = None,
    compiled: bool = False,
) -> Sums:
    """Cross-entropy of the target itself against the text, or KL from what it gave before.

    Args:
        target: its output head, which gets no gradient.
        hidden: [B, T, D], its last hidden states.
        batch: `input_ids` [B, T], and what is learnt of it.
        scale: [1] float32, the weight of the sum in the total.
        teacher: of the answered places, learnt in place of the text.
        compiled: compile the loss on first use.

    Returns:
        One term, with the measures of `medusa_loss`.
    """
    rows: Rows = batch[SUPERVISION].depths[0]
    states = hidden.flatten(0, 1)[rows.places]
    part = Part(states, target.projection, rows.answers, scale.expand(len(states)))
    with record_function("loss"):
        text = TextTeacher(labels_of(batch), teacher)
        total, (found,) = fused_linear([part], text, text_criterion, compiled)
    return Sums(total, term_sums(found).unsqueeze(1))


def term_sums(found: Tensor, seen: Tensor | None = None) -> Tensor:
    """[2 + L] float32 loss, tokens and measures of a term, from those of its rows [1 + L, N].

    Args:
        found: of each row.
        seen: [N] bool, the rows that count; None for all.
    """
    sums = (found if seen is None else found * seen).sum(1, dtype=torch.float32)
    tokens = sums.new_full((1,), found.shape[1]) if seen is None else seen.sum()[None].to(sums)
    return torch.cat([sums[:1], tokens, sums[1:]])


def step_sums(found: Tensor, steps: Part, unrolled: Unrolled) -> Tensor:
    """[2 + L, K] `term_sums` of each step, from the rows [1 + L, M] of all in their order."""
    found = found.index_select(1, unrolled.by_step)
    seen = looked_at(steps.scales)
    parts = found.split(unrolled.sizes, 1)
    if seen is None:
        return torch.stack([term_sums(each) for each in parts], dim=1)
    counted = zip(parts, seen[unrolled.by_step].split(unrolled.sizes), strict=True)
    return torch.stack([term_sums(*each) for each in counted], dim=1)


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

    def chunk(self, begin: int, end: int) -> tuple[Tensor, Distribution | None]:
        """Labels, and the distribution, of rows begin..end."""
        soft = None if self.soft is None else self.soft.chunk(begin, end)
        return self.labels[begin:end], soft


class _TextCriterion:
    """Cross-entropy against the text or KL from a distribution; top-1 and top-5 of the text."""

    num_measures = 2

    def __call__(self, chunk: Any, at: Tensor, student: Softmax, want_grad: bool) -> RowLosses:
        labels, soft = chunk[0][at], chunk[1]
        measures = hits(student.logits, labels)
        if soft is not None:
            found = kl(soft.pair(at, student), want_grad)
            return RowLosses(torch.stack([found.loss, *measures]), found.grad)
        column = labels.unsqueeze(1)
        loss = -student.log_q_at(column).squeeze(1)
        # The gradient is q - 1 at the label.
        minus_one = student.q.new_full(column.shape, -1.0)
        grad = student.q.scatter_add_(1, column, minus_one) if want_grad else None
        return RowLosses(torch.stack([loss, *measures]), grad)


text_criterion = _TextCriterion()
