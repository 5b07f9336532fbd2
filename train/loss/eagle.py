"""Loss of EAGLE heads: divergence from the target, features, top tokens.

Sums over supervised tokens, as in `train.loss.sums`. Step d (from 1) of the training-time test
predicts x_{t+1+d} from token t. Like Medusa's head d, it is compared with the target's prediction
at t + d.

Letters: N tokens that draft, M rows of all steps, P answered places, H hidden, V vocabulary,
W draft vocabulary, J steps.
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.settings.eagle import StepNormalizer, UnrolledConfig
from data.features.store_format import HIDDEN_STATES
from heads.vocab import DraftVocab
from train.batch.supervision import STEP_TARGETS, SUPERVISION, Batch
from train.loss.divergences import (
    LossGrad,
    Softmax,
    compute_divergence,
    text_cross_entropy,
    top_k_cross_entropy,
)
from train.loss.fused import RowLosses, Student, Teacher, compute_fused_loss
from train.loss.sums import LossSums, sum_steps

DRAFT_METRICS = ("top1", "alpha")
"""Whether the first choices of head and target agree; and alpha, the sum of min(p, q) over the
whole vocabulary: the probability of acceptance at temperature 1."""


def compute_step_weights(config: UnrolledConfig) -> Tensor:
    """[J] float32 weights decay ** j for j = 0..J-1, divided by their sum for a mean."""
    weights = torch.tensor([config.step_decay**j for j in range(config.num_steps)])
    return weights / weights.sum() if config.step_normalizer is StepNormalizer.mean else weights


def compute_eagle_loss(
    criterion: "EagleCriterion", steps: Student, learnt: Tensor, batch: Batch, teacher: Teacher
) -> LossSums:
    """Sum the losses of all steps of a batch.

    Args:
        criterion: weights and formulas.
        steps: the learnt rows in the order of the answers, scaled by step.
        learnt: [M, H] outputs of these rows before the last norm.
        batch: an indexed batch, with `hidden_states` [B, T, H] for the regression loss.
        teacher: the target's distributions after its P answered places.

    Returns:
        `terms` with `MEASURES`. Tokens whose likeliest continuation is outside the draft vocabulary
        add nothing to the loss.
    """
    total, (values,) = compute_fused_loss([steps], teacher, criterion, criterion.compiled)
    weight = criterion.config.regression_weight
    if weight:
        wanted = (
            batch[HIDDEN_STATES]
            .flatten(0, 1)[batch[SUPERVISION].token_indices[steps.teacher_rows.device]]
            .float()
        )
        near = weight * F.smooth_l1_loss(learnt.float(), wanted, reduction="none").mean(-1)
        total = total + (near * steps.scales[:]).sum()
        values[0] += near.detach()
    return LossSums(total, sum_steps(values, steps, batch[STEP_TARGETS]))


class EagleCriterion:
    """Weighted divergence and top-k loss of a row, compiled on first use if asked for."""

    num_metrics = len(DRAFT_METRICS)

    def __init__(self, config: UnrolledConfig, vocab: DraftVocab, compiled: bool = False) -> None:
        self.config, self.vocab, self.compiled = config, vocab, compiled

    def __call__(
        self, chunk: Any, chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        """See `train.loss.fused.Criterion`. With a text loss, the chunk is a `TextTeacher`'s."""
        config, columns = self.config, None
        if config.text_weight:
            labels, chunk = chunk
            columns = self.vocab.to_draft_ids(labels[chunk_rows])
        best = chunk.top1_ids[chunk_rows]
        top1 = is_top1_match(self.vocab, student, best)
        pair = chunk.pair_with(chunk_rows, student)
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        terms: list[LossGrad] = []
        if config.divergence_weight:
            of_target = compute_divergence(config.divergence, pair, config.lk_eta, needs_grad)
            terms.append(of_target.scale(config.divergence_weight))
        if config.top_k_weight:
            terms.append(
                top_k_cross_entropy(pair, config.top_k, needs_grad).scale(config.top_k_weight)
            )
        if not terms:  # only the regression loss is trained
            terms.append(LossGrad(pair.q.new_zeros(len(pair.q)), torch.zeros_like(pair.q)))
        losses = reduce(LossGrad.add, terms)
        if not self.vocab.is_full:
            losses = losses.mask_rows(self.vocab.to_draft_ids(best) >= 0)
        if columns is not None:
            losses = (
                text_cross_entropy(student, columns, needs_grad)
                .scale(config.text_weight)
                .add(losses)
            )
        return RowLosses(torch.stack([losses.loss, top1.to(alpha), alpha]), losses.grad)


def is_top1_match(vocab: DraftVocab, student: Softmax, best: Tensor) -> Tensor:
    """[r] bool, whether a student's likeliest token is the target's likeliest id `best` [r]."""
    return (
        student.top1_columns if vocab.is_full else vocab.to_target_ids(student.top1_columns)
    ) == best
