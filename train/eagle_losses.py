"""The loss of EAGLE heads: divergences from the target's distribution, features, top tokens.

Sums over supervised tokens, as in `train.losses`. A step d (from 1) of the training-time test
predicts x_{t+1+d} from token t, so it is supervised where Medusa's head d is, and is compared
with what the target says at t + d.

Letters: N rows, M rows of all steps, P answered places, H hidden, V vocabulary, W draft
vocabulary, J steps.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.schema_eagle import EagleConfig, StepNormalizer
from heads.eagle import EagleHead
from heads.vocab import DraftVocab
from train.divergences import Found, Pair, Said, divergence, top_k
from train.fused import Part, Teacher, Verdict, fused_linear
from train.losses import Sums, term_sums
from train.teachers import Distribution

MEASURES = ("top1", "alpha")
"""Tokens where the head's and the target's first choice agree; and the sum over the whole
vocabulary of min(p, q): the probability that a drafted token is accepted at temperature 1."""


class Step(NamedTuple):
    """The supervised rows of one step.

    Attributes:
        outputs: [N, H] of the head.
        rows: [N] int64, the teacher's row that each is compared with.
    """

    outputs: Tensor
    rows: Tensor


def step_weights(config: EagleConfig) -> Tensor:
    """[J] float32: decay ** j for j = 0..J-1, over their sum if a mean is wanted."""
    weights = torch.tensor([config.step_decay**j for j in range(config.num_steps)])
    return weights / weights.sum() if config.step_normalizer is StepNormalizer.mean else weights


def eagle_loss(
    criterion: "EagleCriterion",
    head: EagleHead,
    steps: Sequence[Step],
    teacher: Teacher,
    features: Tensor | None,
    scale: Tensor,
) -> Sums:
    """The losses of all steps of a text.

    Args:
        criterion: weights and formulas.
        head: its norm and output head are used.
        steps: J of them.
        teacher: what the target says after its P answered places.
        features: [P, H], the target's hidden states there, for the regression loss.
        scale: [J] float32, the weight of each step's sum in the total.

    Returns:
        `terms` with `MEASURES`. Tokens whose likeliest continuation lies outside the draft
        vocabulary add nothing to the loss.
    """
    outputs = torch.cat([step.outputs for step in steps])
    rows = torch.cat([step.rows for step in steps])
    sizes = [len(step.rows) for step in steps]
    scales = torch.cat([each.expand(size) for each, size in zip(scale, sizes, strict=True)])
    part = Part(head.normed(outputs), head.projection(), rows, scales)
    total, (found,) = fused_linear([part], teacher, criterion, criterion.compiled)
    weight = criterion.config.regression_weight
    if weight:
        assert features is not None
        wanted = features[rows].float()
        near = weight * F.smooth_l1_loss(outputs.float(), wanted, reduction="none").mean(-1)
        total = total + (near * scales).sum()
        found[0] += near.detach()
    return Sums(total, torch.stack([term_sums(each) for each in found.split(sizes, 1)], dim=1))


class EagleCriterion:
    """The weighted divergence and top-k loss of a row; compiled on first use if asked for."""

    num_measures = len(MEASURES)

    def __init__(self, config: EagleConfig, vocab: DraftVocab, compiled: bool = False) -> None:
        self.config, self.vocab, self.compiled = config, vocab, compiled

    def __call__(self, known: Distribution, at: Tensor, said: Said, want_grad: bool) -> Verdict:
        """See `train.fused.Criterion`."""
        best = known.best[at]
        top1 = self.vocab.to_target(said.best) == best
        pair = known.pair(at, said)
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        found = self._loss(pair, want_grad).where(self.vocab.to_draft(best) >= 0)
        return Verdict(found.loss, found.grad, torch.stack([top1.to(alpha), alpha]))

    def _loss(self, pair: Pair, want_grad: bool) -> Found:
        config, terms = self.config, []
        if config.divergence_weight:
            found = divergence(config.divergence, pair, config.lk_eta, want_grad)
            terms.append(found.times(config.divergence_weight))
        if config.top_k_weight:
            terms.append(top_k(pair, config.top_k, want_grad).times(config.top_k_weight))
        nothing = Found(pair.q.new_zeros(len(pair.q)), torch.zeros_like(pair.q))
        return reduce(Found.plus, terms) if terms else nothing
