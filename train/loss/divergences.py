"""Compute divergences of the draft distribution q from the target's p, with closed-form gradients.

p is normalised over the target's vocabulary, q over the W columns of the draft vocabulary, so p may
sum to less than 1 there. KL, reverse KL and JS renormalise p over the columns. alpha, the
probability of acceptance, and losses made of alpha use p itself, as a draft cannot reach the rest.

Gradients are with respect to the logits of q: with dL/dq = g, they are q * (g - sum of q g).

Letters: N rows, W columns, k kept columns, c rows of a teacher's chunk, r rows of a piece.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from conf.settings.eagle import Divergence

GROUP = 128
"""Columns of logits whose maximum is looked at first."""
MIN_ALPHA = 1e-6
"""Least alpha, which keeps -log alpha finite where p and q do not overlap in float32."""


class Softmax(NamedTuple):
    """Softmax of the student after N tokens.

    Attributes:
        logits: [N, W] float32 (or float64).
        q: [N, W] softmax of the logits.
        log_norm: [N] logsumexp of the logits.
    """

    logits: Tensor
    q: Tensor
    log_norm: Tensor

    @classmethod
    def from_logits(cls, logits: Tensor) -> "Softmax":
        """Normalise logits [N, W]."""
        q = logits.softmax(-1)
        # Cheaper than logsumexp, which recomputes the exponentials.
        return cls(logits, q, logits.amax(-1) - q.amax(-1).log())

    @property
    def top1_columns(self) -> Tensor:
        """Return the [N] int64 first of the likeliest columns."""
        return fast_argmax(self.logits)

    def log_q(self) -> Tensor:
        """Compute the [N, W] log-probabilities."""
        return self.logits - self.log_norm.unsqueeze(1)

    def log_q_at(self, columns: Tensor) -> Tensor:
        """Compute the [N, n] log-probabilities of some columns [N, n]."""
        return self.logits.gather(1, columns) - self.log_norm.unsqueeze(1)


class DistributionPair(NamedTuple):
    """Distributions p and q of N rows.

    Attributes:
        p: [N, W], normalised over the whole vocabulary.
        mass: [N], the sum of p.
        p_log_p: [N], the sum of p log p.
        student: q with its logits.
    """

    p: Tensor
    mass: Tensor
    p_log_p: Tensor
    student: Softmax

    @property
    def q(self) -> Tensor:
        """Return q [N, W], see `Softmax`."""
        return self.student.q

    def p_log_q(self) -> Tensor:
        """Sum p log q by row: [N]."""
        return dot_rows(self.p, self.student.logits) - self.mass * self.student.log_norm


class Distribution(Protocol):
    """Distribution of the target after c tokens."""

    @property
    def top1_ids(self) -> Tensor:
        """Return the [c] int64 likeliest ids of the whole vocabulary."""

    def pair_with(self, chunk_rows: Tensor, student: Softmax) -> DistributionPair:
        """Pair the target's distribution with the student's, over the draft vocabulary.

        Args:
            chunk_rows: [r] int64 rows of the chunk.
            student: softmax of r student rows.
        """


class LossGrad(NamedTuple):
    """Loss of N rows with its gradient.

    Attributes:
        loss: [N] loss of each row.
        grad: [N, W] gradient of the logits, or None if not asked for.
    """

    loss: Tensor
    grad: Tensor | None

    def scale(self, weight: Tensor | float) -> "LossGrad":
        """Multiply the loss by a weight [N] or by a number."""
        column = weight.unsqueeze(1) if isinstance(weight, Tensor) else weight
        grad = None if self.grad is None else self.grad.mul_(column)
        return LossGrad(self.loss * weight, grad)

    def add(self, other: "LossGrad") -> "LossGrad":
        """Add another loss."""
        if self.grad is None or other.grad is None:
            return LossGrad(self.loss + other.loss, None)
        return LossGrad(self.loss + other.loss, self.grad.add_(other.grad))

    def mask_rows(self, rows: Tensor) -> "LossGrad":
        """Set the loss outside a mask [N] bool to 0.

        Not a product, which would spread values that are not finite.
        """
        grad = None if self.grad is None else self.grad.masked_fill_(~rows.unsqueeze(1), 0.0)
        return LossGrad(torch.where(rows, self.loss, 0.0), grad)


def compute_divergence(
    kind: Divergence, pair: DistributionPair, eta: float, needs_grad: bool
) -> LossGrad:
    """Compute the divergence of a kind, per row. Only `hybrid` reads `eta`."""
    if kind is Divergence.hybrid:
        return hybrid(pair, eta, needs_grad)
    return _SIMPLE[kind](pair, needs_grad)


def kl(pair: DistributionPair, needs_grad: bool) -> LossGrad:
    """Compute KL(p || q), with gradient q - p."""
    loss = (pair.p_log_p - pair.p_log_q()) / pair.mass - pair.mass.log()
    mass = pair.mass.unsqueeze(1)
    return LossGrad(loss, torch.addcdiv(pair.q, pair.p, mass, value=-1.0) if needs_grad else None)


def reverse_kl(pair: DistributionPair, needs_grad: bool) -> LossGrad:
    """Compute KL(q || p)."""
    ratio = pair.student.log_q().sub_(finite_log(pair.p))
    loss = dot_rows(pair.q, ratio) + pair.mass.log()
    shift = (pair.mass.log() - loss).unsqueeze(1)
    return LossGrad(loss, ratio.add_(shift).mul_(pair.q) if needs_grad else None)


def js(pair: DistributionPair, needs_grad: bool) -> LossGrad:
    """Compute the Jensen-Shannon divergence: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_p = finite_log(pair.p).sub_(pair.mass.log().unsqueeze(1))
    log_q = pair.student.log_q()
    log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    from_p = dot_rows(pair.p, log_p.sub_(log_m)) / pair.mass
    log_q_minus_m = log_q.sub_(log_m)
    from_q = dot_rows(pair.q, log_q_minus_m)
    grad = log_q_minus_m.sub_(from_q.unsqueeze(1)).mul_(pair.q).mul_(0.5) if needs_grad else None
    return LossGrad(0.5 * (from_p + from_q), grad)


def total_variation(pair: DistributionPair, needs_grad: bool) -> LossGrad:
    """Compute 1 - alpha, half the sum of |p - q| over the whole vocabulary.

    alpha is the sum of min(p, q).
    """
    least = torch.minimum(pair.p, pair.q)
    loss = 1 - least.sum(-1)
    if not needs_grad:
        return LossGrad(loss, None)
    # Where p and q are equal, half of the gradient goes to each, as in min.
    half = pair.q.new_full((), 0.5)
    below = torch.heaviside(pair.p - pair.q, half)
    return LossGrad(loss, (dot_rows(pair.q, below).unsqueeze(1) - below).mul_(pair.q))


def negative_log_alpha(pair: DistributionPair, needs_grad: bool) -> LossGrad:
    """Compute -log alpha (LK losses, arXiv 2602.23881)."""
    loss, grad = total_variation(pair, needs_grad)
    alpha = (1 - loss).clamp_min(MIN_ALPHA)
    if grad is not None:
        grad.mul_(((1 - loss > MIN_ALPHA) / alpha).unsqueeze(1))
    return LossGrad(-alpha.log(), grad)


def hybrid(pair: DistributionPair, eta: float, needs_grad: bool) -> LossGrad:
    """Compute l KL + (1 - l) (1 - alpha), with l = exp(-eta alpha) per token, taken as a constant.

    Source: LK losses, arXiv 2602.23881.
    """
    accept = total_variation(pair, needs_grad)
    mix = torch.exp(-eta * (1 - accept.loss))
    return kl(pair, needs_grad).scale(mix).add(accept.scale(1 - mix))


_SIMPLE: dict[Divergence, Callable[[DistributionPair, bool], LossGrad]] = {
    Divergence.kl: kl,
    Divergence.rkl: reverse_kl,
    Divergence.js: js,
    Divergence.tv: total_variation,
    Divergence.nla: negative_log_alpha,
}


def top_k_cross_entropy(pair: DistributionPair, k: int, needs_grad: bool) -> LossGrad:
    """Sum -p log q over the k likeliest tokens of p (HASS, arXiv 2408.15766, eq. 5)."""
    k = min(k, pair.p.shape[1])
    p, best = pair.p.topk(k)
    p = p / pair.mass.unsqueeze(1)
    loss = -(p * pair.student.log_q_at(best)).sum(-1)
    if not needs_grad:
        return LossGrad(loss, None)
    grad = pair.q * p.sum(-1, keepdim=True)
    return LossGrad(loss, grad.scatter_add_(1, best, -p))


def text_cross_entropy(student: Softmax, columns: Tensor, needs_grad: bool) -> LossGrad:
    """Compute -log q of each row's text token; 0 where `columns` [N] int64 is -1.

    The gradient, q - 1 at the token, overwrites q.
    """
    column = columns.clamp_min(0).unsqueeze(1)
    loss = -student.log_q_at(column).squeeze(1)
    minus_one = student.q.new_full(column.shape, -1.0)
    grad = student.q.scatter_add_(1, column, minus_one) if needs_grad else None
    return LossGrad(loss, grad).mask_rows(columns >= 0)


def fast_argmax(logits: Tensor) -> Tensor:
    """Compute `logits.argmax(-1)`, with the first of equals; nine times as fast on a CPU.

    Args:
        logits: [N, W].

    Returns:
        [N] int64 columns.
    """
    width = math.gcd(logits.shape[1], GROUP) if _should_group(logits) else 1
    if width == 1:
        return logits.argmax(-1)
    grouped = logits.unflatten(1, (-1, width))
    group = grouped.amax(-1).argmax(-1)
    rows = torch.arange(len(logits), device=logits.device)
    return group * width + grouped[rows, group].argmax(-1)


def fast_topk(logits: Tensor, k: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Compute `logits.topk(k)` faster: only the k groups with the largest maxima can hold them.

    Args:
        logits: [N, W].
        k: at most W.
        group: columns per group, if it divides W.

    Returns:
        [N, k] values, largest first, and their [N, k] int64 columns.
    """
    width = math.gcd(logits.shape[1], group)
    num_groups = logits.shape[1] // width
    if num_groups < k:
        values, positions = logits.topk(k)
        return values, positions
    grouped = logits.unflatten(1, (width, num_groups))
    groups = grouped.amax(1).topk(k, sorted=False).indices
    candidates = grouped.gather(2, groups.unsqueeze(1).expand(-1, width, -1)).flatten(1)
    values, positions = candidates.topk(k)
    return values, groups.gather(1, positions % k) + positions // k * num_groups


def mark_top1_and_top5(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mark the labels that are the first choice, and the labels among the first five.

    Ties count once, in order of ids: exactly one id is first and five are among the first five.
    Ties are common in bfloat16, and counting them all would flatter.

    Args:
        logits: [N, W].
        labels: [N] int64.

    Returns:
        Two [N] tensors of 0 and 1, in the dtype of the logits.
    """
    if _should_group(logits):
        best = fast_topk(logits, min(5, logits.shape[1]))[1] == labels.unsqueeze(1)
        return (fast_argmax(logits) == labels).to(logits.dtype), best.any(1).to(logits.dtype)
    label_logits = logits.gather(1, labels.unsqueeze(1))
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels.unsqueeze(1)
    rank = torch.where(earlier, logits >= label_logits, logits > label_logits).sum(1)
    return (rank == 0).to(logits.dtype), (rank < 5).to(logits.dtype)


def _should_group(logits: Tensor) -> bool:
    # Compiled code and GPUs pass over all logits at almost no cost.
    return logits.device.type == "cpu" and not torch.compiler.is_compiling()


def dot_rows(a: Tensor, b: Tensor) -> Tensor:
    """Sum the products of two tensors [N, W] by row: [N]."""
    return torch.linalg.vecdot(a, b)


def p_log_p(p: Tensor) -> Tensor:
    """Sum p log p of probabilities [N, W] by row: [N]."""
    return dot_rows(p, finite_log(p))


def finite_log(p: Tensor) -> Tensor:
    """Compute logarithms [N, W], finite even where p underflows."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log_()
