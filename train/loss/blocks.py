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
from train.batch.supervision import UNROLLED, Batch, Unrolled, labels_of
from train.loss.divergences import LossGrad, Softmax, divergence
from train.loss.eagle import MEASURES, first_choices_agree
from train.loss.fused import RowLosses, Student, Teacher, fused_linear
from train.loss.sums import Sums, on_path, step_sums
from train.loss.teachers import Distribution, TextTeacher


def slot_weights(config: BlockConfig, num_draft_tokens: int) -> Tensor:
    """[D] float32 weights exp(-(d - 1) / gamma) for d = 1..D, or ones for D-PACE.

    Source: DFlash, arXiv 2602.06036, eq. 4.
    """
    if config.slot_weights is SlotWeights.dpace:
        return torch.ones(num_draft_tokens)
    return torch.exp(-torch.arange(num_draft_tokens) / config.slot_gamma)


@torch.no_grad()
def paced(slots: Student, batch: Batch, criterion: "BlockCriterion") -> Student:
    """Multiply the scales of slots by D-PACE's weights."""
    surprise = _Surprise(criterion.vocab)
    _, (values,) = fused_linear([slots], TextTeacher(labels_of(batch)), surprise)
    weights = dpace_weights(-values[0], batch[UNROLLED], criterion.config.slot_smoothing)
    return slots._replace(scales=slots.scales[:] * weights)


def dpace_weights(log_q: Tensor, unrolled: Unrolled, smoothing: float) -> Tensor:
    """[M] expected number of tokens that a block yields from each of its draft tokens on.

    Args:
        log_q: [M] log-probabilities of the text's tokens, in the order of the answers.
        unrolled: rows of blocks with D draft tokens each.
        smoothing: share by which each probability is moved towards 1.

    Source: D-PACE, arXiv 2605.18810; vllm-project/speculators `losses/utils.py`.
    """
    shape, places = (len(unrolled.sizes), len(unrolled.drafts)), unrolled.rows.places
    smooth, learnt = log_q.new_ones(shape), log_q.new_zeros(shape)
    smooth.view(-1)[places] = smoothing + (1 - smoothing) * log_q.exp()
    learnt.view(-1)[places] = 1.0
    reached = smooth.cumprod(0) * learnt
    return reached.flip(0).cumsum(0).flip(0).view(-1)[places]


def block_loss(
    criterion: "BlockCriterion",
    slots: Student,
    batch: Batch,
    teacher: Teacher,
    off_path_weight: float,
    beside: Callable[[Tensor], Tensor | None],
) -> Sums:
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
        slots = paced(slots, batch, criterion)
    slots, teacher = on_path(slots, teacher, batch, off_path_weight)
    text = TextTeacher(labels_of(batch), teacher)
    total, (values,) = fused_linear([slots], text, criterion, criterion.compiled)
    more = beside(values)
    if more is not None:
        total = total + (more * slots.scales[:]).sum()
        values[0] += more.detach()
    return Sums(total, step_sums(values, slots, batch[UNROLLED]))


class BlockCriterion:
    """Weighted losses of a row, compiled on first use if asked for."""

    num_measures = len(MEASURES)

    def __init__(self, config: BlockConfig, vocab: DraftVocab, compiled: bool = False) -> None:
        self.config, self.vocab, self.compiled = config, vocab, compiled

    def __call__(
        self, chunk: tuple[Tensor, Distribution], at: Tensor, student: Softmax, want_grad: bool
    ) -> RowLosses:
        """See `train.loss.fused.Criterion`."""
        labels, soft = chunk[0][at], chunk[1]
        top1 = first_choices_agree(self.vocab, student, soft.best[at])
        pair, config = soft.pair(at, student), self.config
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        terms: list[LossGrad] = []
        if config.divergence_weight:
            of_target = divergence(config.divergence, pair, config.lk_eta, want_grad)
            terms.append(of_target.times(config.divergence_weight))
        if config.text_weight:
            of_text = self._cross_entropy(labels, student, want_grad)
            terms.append(of_text.times(config.text_weight))
        loss, grad = reduce(LossGrad.plus, terms)
        return RowLosses(torch.stack([loss, top1.to(alpha), alpha]), grad)

    def _cross_entropy(self, labels: Tensor, student: Softmax, want_grad: bool) -> LossGrad:
        """Cross-entropy against the text; 0 for labels outside the draft vocabulary."""
        columns = labels if self.vocab.is_full else self.vocab.to_draft_ids(labels)
        inside = columns >= 0
        column = columns.clamp_min(0).unsqueeze(1)
        loss = -student.log_q_at(column).squeeze(1)
        grad = None
        if want_grad:
            grad = student.q.scatter_add(1, column, student.q.new_full(column.shape, -1.0))
        return LossGrad(loss, grad).where(inside)


class _Surprise:
    """-log q of the text's token, infinite outside the draft vocabulary."""

    num_measures = 0

    def __init__(self, vocab: DraftVocab) -> None:
        self.vocab = vocab

    def __call__(
        self, chunk: tuple[Tensor, None], at: Tensor, student: Softmax, want_grad: bool
    ) -> RowLosses:
        """See `train.loss.fused.Criterion`. Without a gradient."""
        assert not want_grad
        columns = self.vocab.to_draft_ids(chunk[0][at]).unsqueeze(1)
        surprise = -student.log_q_at(columns.clamp_min(0)).masked_fill(columns < 0, -torch.inf)
        return RowLosses(surprise.T, None)
