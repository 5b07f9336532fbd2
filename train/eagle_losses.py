"""Losses of EAGLE heads: divergences from the target's distribution, features, top tokens.

Sums over supervised tokens, as in `train.losses`. A step d (from 1) of the training-time test
predicts x_{t+1+d} from token t, so it is supervised where Medusa's head d is.

Letters: N rows, T tokens, D hidden, V vocabulary, W draft vocabulary, J steps.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conf.schema_eagle import Divergence, EagleConfig, StepNormalizer
from heads.eagle import EagleHead
from heads.target import Target

ROWS_PER_CHUNK = 1024


class StepSums(NamedTuple):
    """Per step, summed over its supervised tokens; each [J] float32.

    Attributes:
        loss: the only one with a gradient. Tokens whose likeliest continuation lies outside
            the draft vocabulary add nothing.
        tokens: supervised tokens, those among them.
        top1: tokens where the head's and the target's first choice agree.
        alpha: sum over the whole vocabulary of min(p, q): the probability that a drafted
            token is accepted at temperature 1.
    """

    loss: Tensor
    tokens: Tensor
    top1: Tensor
    alpha: Tensor


class Teacher:
    """The target's distribution, over its vocabulary and over the draft vocabulary.

    What needs all V columns, once per token, is kept as two numbers: the likeliest id, and the
    log of the normaliser. The W columns that each step compares are computed when needed.

    Args:
        target: the frozen target.
        head: whose draft vocabulary counts.
        hidden_states: [T, D] final hidden states.
        places: [P] int64, the tokens that will be asked for.
    """

    def __init__(
        self, target: Target, head: EagleHead, hidden_states: Tensor, places: Tensor
    ) -> None:
        self.target, self.hidden, self.vocab = target, hidden_states, head.vocab
        plain = target.has_plain_head and not head.vocab.full
        self.rows = target.output_head.weight[head.vocab.ids] if plain else None
        self.best = torch.zeros(len(hidden_states), dtype=torch.int64, device=places.device)
        self.log_norm = torch.zeros(len(hidden_states), device=places.device)
        """[T] int64 and [T] float32."""
        for part in places.split(ROWS_PER_CHUNK):
            logits = target.logits(hidden_states[part]).float()
            self.best[part] = logits.argmax(-1)
            self.log_norm[part] = logits.logsumexp(-1)

    def logits(self, places: Tensor) -> Tensor:
        """[N, W] float32 over the draft vocabulary at tokens [N]."""
        logits = self.target.logits(self.hidden[places], self.rows).float()
        whole = self.rows is not None or self.vocab.full
        return logits if whole else logits[:, self.vocab.ids]


def step_weights(config: EagleConfig) -> Tensor:
    """[J] float32: decay ** j for j = 0..J-1, over their sum if a mean is wanted."""
    weights = torch.tensor([config.step_decay**j for j in range(config.num_steps)])
    return weights / weights.sum() if config.step_normalizer is StepNormalizer.mean else weights


def divergence(config: EagleConfig, teacher: Tensor, logits: Tensor, alpha: Tensor) -> Tensor:
    """[N] how far q is from p.

    Args:
        config: `divergence` and `lk_eta`.
        teacher: [N, W] float32 logits of p over the draft vocabulary.
        logits: [N, W] float32 logits of q.
        alpha: [N] float32 sum of min(p, q), with a gradient.

    Source: EAGLE-3, arXiv 2503.01840, up to the entropy of p, which has no gradient; LK
    losses, arXiv 2602.23881, with lambda per token and without a gradient.
    """
    # 1e-6 keeps -log alpha finite where q has nothing of p in float32.
    if config.divergence is Divergence.nla:
        return -alpha.clamp_min(1e-6).log()
    log_p, log_q = teacher.log_softmax(-1), logits.log_softmax(-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if config.divergence is Divergence.kl:
        return kl
    mix = torch.exp(-config.lk_eta * alpha.detach())
    return mix * kl + (1 - mix) * (1 - alpha)


def acceptance(teacher: Tensor, log_norm: Tensor, logits: Tensor) -> Tensor:
    """[N] alpha = sum of min(p, q), p over the target's whole vocabulary.

    Args:
        teacher: [N, W] float32 logits of p over the draft vocabulary.
        log_norm: [N] float32 logsumexp of the logits of p over the whole vocabulary.
        logits: [N, W] float32 logits of q.
    """
    p = torch.exp(teacher - log_norm.unsqueeze(1))
    return torch.minimum(p, logits.softmax(-1)).sum(-1)


def top_k_loss(teacher: Tensor, logits: Tensor, k: int) -> Tensor:
    """[N] -sum of p log q over the k likeliest tokens of p (HASS, arXiv 2408.15766, eq. 5)."""
    best = teacher.topk(min(k, teacher.shape[1])).indices
    p, log_q = teacher.softmax(-1).gather(1, best), logits.log_softmax(-1).gather(1, best)
    return -(p * log_q).sum(-1)


def step_loss(
    config: EagleConfig, head: EagleHead, outputs: Tensor, teacher: Teacher, places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, top-1 and alpha of one step, summed over rows.

    Args:
        config: weights and formulas.
        head: its output head is used.
        outputs: [N, H] of the head.
        teacher: of the same sequence.
        places: [N] int64, the token after which the target and these outputs predict.
    """
    terms = []
    # An empty split still runs once: every parameter needs a gradient under DDP.
    parts = zip(outputs.split(ROWS_PER_CHUNK), places.split(ROWS_PER_CHUNK), strict=True)
    for rows, at in parts:

        def compute(rows: Tensor, at: Tensor = at) -> tuple[Tensor, Tensor, Tensor]:
            return _chunk(config, head, rows, teacher, at)

        if torch.is_grad_enabled():
            terms.append(checkpoint(compute, rows, use_reentrant=False, preserve_rng_state=False))
        else:
            terms.append(compute(rows))
    loss, top1, alpha = (torch.stack(column).sum() for column in zip(*terms, strict=True))
    return loss, top1, alpha


def _chunk(
    config: EagleConfig, head: EagleHead, outputs: Tensor, teacher: Teacher, places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits, p_logits = head.logits(outputs).float(), teacher.logits(places)
    best = teacher.best[places]
    differentiable = config.divergence is not Divergence.kl
    q_logits = logits if differentiable else logits.detach()
    alpha = acceptance(p_logits, teacher.log_norm[places], q_logits)
    loss = torch.zeros_like(alpha)
    if config.divergence_weight:
        loss = loss + config.divergence_weight * divergence(config, p_logits, logits, alpha)
    if config.top_k_weight:
        loss = loss + config.top_k_weight * top_k_loss(p_logits, logits, config.top_k)
    if config.regression_weight:
        wanted = teacher.hidden[places].float()
        near = F.smooth_l1_loss(outputs.float(), wanted, reduction="none").mean(-1)
        loss = loss + config.regression_weight * near
    reachable = head.vocab.to_draft(best) >= 0
    # Not a product: a loss that is not finite where nothing is learnt must not spread.
    loss = torch.where(reachable, loss, 0.0).sum()
    agree = (head.vocab.to_target(logits.argmax(-1)) == best).sum().float()
    return loss, agree, alpha.detach().sum()
