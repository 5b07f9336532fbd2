"""Loss of block drafters: cross-entropy and a divergence over the slots of drawn blocks.

Sums over supervised tokens, as in `train.loss.sums`. The draft at depth d (from 1) of a block after
token t is x_{t+1+d}. Like Medusa's head d, it is compared with the target's prediction at t + d.

Letters: A blocks, M rows of all slots, P answered places, H hidden, W draft vocabulary, D depths.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from conf.settings.blocks import BlockConfig, SlotWeights
from heads.vocab import DraftVocab
from train.batch.supervision import STEP_TARGETS, Batch, StepTargets, gather_labels
from train.loss.divergences import LossGrad, Softmax, compute_divergence
from train.loss.eagle import DRAFT_METRICS, is_top1_match
from train.loss.fused import RowLosses, Student, Teacher, compute_fused_loss
from train.loss.sums import LossSums, scale_off_path_rows, sum_steps
from train.loss.teachers import Distribution, TextTeacher


def compute_slot_weights(config: BlockConfig, num_draft_tokens: int) -> Tensor:
    """[D] float32 weights exp(-(d - 1) / gamma) for d = 1..D, or ones for D-PACE.

    Source: DFlash, arXiv 2602.06036, eq. 4.
    """
    if config.slot_weights is SlotWeights.dpace:
        return torch.ones(num_draft_tokens)
    return torch.exp(-torch.arange(num_draft_tokens) / config.slot_gamma)


@torch.no_grad()
def scale_by_dpace(slots: Student, batch: Batch, criterion: "BlockCriterion") -> Student:
    """Multiply the scales of slots by D-PACE's weights."""
    surprise = _Surprise(criterion.vocab)
    _, (values,) = compute_fused_loss([slots], TextTeacher(gather_labels(batch)), surprise)
    weights = compute_dpace_weights(
        -values[0], batch[STEP_TARGETS], criterion.config.slot_smoothing
    )
    return slots._replace(scales=slots.scales[:] * weights)


def compute_dpace_weights(log_q: Tensor, unrolled: StepTargets, smoothing: float) -> Tensor:
    """[M] expected number of tokens that a block yields from each of its draft tokens on.

    Args:
        log_q: [M] log-probabilities of the text's tokens, in the order of the answers.
        unrolled: rows of blocks with D draft tokens each.
        smoothing: share by which each probability is moved towards 1.

    Source: D-PACE, arXiv 2605.18810; vllm-project/speculators `losses/utils.py`.
    """
    shape, places = (
        (len(unrolled.step_sizes), len(unrolled.anchors)),
        unrolled.matched_rows.output_indices,
    )
    smooth, learnt = log_q.new_ones(shape), log_q.new_zeros(shape)
    smooth.view(-1)[places] = smoothing + (1 - smoothing) * log_q.exp()
    learnt.view(-1)[places] = 1.0
    reached = smooth.cumprod(0) * learnt
    return reached.flip(0).cumsum(0).flip(0).view(-1)[places]


def compute_block_loss(
    criterion: "BlockCriterion",
    slots: Student,
    batch: Batch,
    teacher: Teacher,
    off_path_weight: float,
    beside: Callable[[Tensor], Tensor | None],
) -> LossSums:
    """Sum the losses of all slots of a batch.

    Args:
        criterion: weights and formulas.
        slots: the learnt rows in the order of the answers, scaled by slot.
        batch: an indexed batch.
        teacher: the target's distributions after its P answered places.
        off_path_weight: factor on a draft token's loss for each token before it that is not the
            teacher's first choice.
        beside: function that gives a further loss [M], given the values [1 + L, M] of all rows.

    Returns:
        `terms` with `MEASURES`.
    """
    if criterion.config.slot_weights is SlotWeights.dpace and torch.is_grad_enabled():
        slots = scale_by_dpace(slots, batch, criterion)
    slots, teacher = scale_off_path_rows(slots, teacher, batch, off_path_weight)
    text = TextTeacher(gather_labels(batch), teacher)
    total, (values,) = compute_fused_loss([slots], text, criterion, criterion.compiled)
    more = beside(values)
    if more is not None:
        total = total + (more * slots.scales[:]).sum()
        values[0] += more.detach()
    return LossSums(total, sum_steps(values, slots, batch[STEP_TARGETS]))


class BlockCriterion:
    """Weighted losses of a row, compiled on first use if asked for."""

    num_metrics = len(DRAFT_METRICS)

    def __init__(self, config: BlockConfig, vocab: DraftVocab, compiled: bool = False) -> None:
        self.config, self.vocab, self.compiled = config, vocab, compiled

    def __call__(
        self,
        chunk: tuple[Tensor, Distribution],
        chunk_rows: Tensor,
        student: Softmax,
        needs_grad: bool,
    ) -> RowLosses:
        """See `train.loss.fused.Criterion`."""
        labels, soft = chunk[0][chunk_rows], chunk[1]
        top1 = is_top1_match(self.vocab, student, soft.top1_ids[chunk_rows])
        pair, config = soft.pair_with(chunk_rows, student), self.config
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        terms: list[LossGrad] = []
        if config.divergence_weight:
            of_target = compute_divergence(config.divergence, pair, config.lk_eta, needs_grad)
            terms.append(of_target.scale(config.divergence_weight))
        if config.text_weight:
            of_text = self._cross_entropy(labels, student, needs_grad)
            terms.append(of_text.scale(config.text_weight))
        loss, grad = reduce(LossGrad.add, terms)
        return RowLosses(torch.stack([loss, top1.to(alpha), alpha]), grad)

    def _cross_entropy(self, labels: Tensor, student: Softmax, needs_grad: bool) -> LossGrad:
        """Cross-entropy against the text; 0 for labels outside the draft vocabulary."""
        columns = labels if self.vocab.is_full else self.vocab.to_draft_ids(labels)
        inside = columns >= 0
        column = columns.clamp_min(0).unsqueeze(1)
        loss = -student.log_q_at(column).squeeze(1)
        grad = None
        if needs_grad:
            grad = student.q.scatter_add(1, column, student.q.new_full(column.shape, -1.0))
        return LossGrad(loss, grad).mask_rows(inside)


class _Surprise:
    """-log q of the text's token, infinite outside the draft vocabulary."""

    num_metrics = 0

    def __init__(self, vocab: DraftVocab) -> None:
        self.vocab = vocab

    def __call__(
        self, chunk: tuple[Tensor, None], chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        """See `train.loss.fused.Criterion`. Without a gradient."""
        assert not needs_grad
        columns = self.vocab.to_draft_ids(chunk[0][chunk_rows]).unsqueeze(1)
        surprise = -student.log_q_at(columns.clamp_min(0)).masked_fill(columns < 0, -torch.inf)
        return RowLosses(surprise.T, None)
