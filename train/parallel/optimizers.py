"""What updates a head: AdamW, or Muon for its hidden matrices and AdamW for the rest.

Muon moves a matrix alike in all directions, so what few tokens speak for is learnt as fast as the
rest. Output heads and embeddings are AdamW's: a row there is an id, most of which are rare.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from conf.settings.training import Optimizer, TrainConfig
from heads.processor import fast_dtype
from heads.target_model.load import resolve_dtype
from train.objective import Objective
from train.parallel.muon import Muon

KEYS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
}
"""The state of a parameter, besides the number of steps; each is as large as the parameter."""
AVERAGE = "average"
"""Kept beside it: the moving average of the parameter itself."""


def make_optimizers(objective: Objective, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Over the groups of an objective, as its parameters lie now.

    Args:
        objective: its head tells which matrices project to the vocabulary.
        config: the optimizer's settings, with numbers for rates.

    Returns:
        AdamW and maybe Muon; `rate` of their groups is a share of `train.learning_rate`, and `lr`
        is to be set before each step.
    """
    hidden = {id(each) for each in _hidden_matrices(objective.head, config).values()}
    adamw: list[dict[str, Any]] = []
    muon: list[dict[str, Any]] = []
    for group in objective.groups():
        for groups, rate, wanted in ((adamw, _adam_share(config), False), (muon, 1.0, True)):
            chosen = [each for each in group.parameters if (id(each) in hidden) == wanted]
            if chosen:
                more = {"rate": rate * group.rate, "first_step": group.first_step}
                groups.append({"params": chosen, **more})
    made: list[torch.optim.Optimizer] = []
    if adamw:
        made.append(_adamw(adamw, config))
    if muon:
        device = muon[0]["params"][0].device
        dtype = fast_dtype(resolve_dtype(config.dtype, device), device)
        made.append(Muon(muon, dtype, config.weight_decay))
    return made


def state_keys(head: Any, config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """Names of the states of each trained parameter, by the parameter's name.

    Args:
        head: its parameters may lie in shards.
        config: `optimizer`, settled, and `average_decay`.
    """
    hidden = _hidden_matrices(head, config)
    average = () if config.average_decay is None else (AVERAGE,)
    return {
        name: KEYS[Muon if name in hidden else torch.optim.AdamW] + average
        for name, parameter in head.named_parameters()
        if parameter.requires_grad
    }


def fresh_state(
    optimizer: torch.optim.Optimizer, tensor: Tensor, config: TrainConfig
) -> dict[str, Tensor]:
    """The state of a parameter before its first step.

    Args:
        optimizer: AdamW or Muon, whose `state` it is for.
        tensor: the parameter, a shard or a flat piece, float32, as the optimizer holds it.
        config: `average_decay`.

    Returns:
        By name, tensors as large as the parameter, float32; of AdamW also the number of steps [].
    """
    state = {key: torch.zeros_like(tensor) for key in KEYS[type(optimizer)]}
    if isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.zeros((), device=tensor.device)  # where the fused kernel reads it
    if config.average_decay is not None:
        state[AVERAGE] = tensor.detach().clone()
    return state


def _hidden_matrices(head: Any, config: TrainConfig) -> dict[str, nn.Parameter]:
    """By name, the trained matrices that Muon updates; none if there is no Muon."""
    if config.optimizer is not Optimizer.muon:
        return {}
    left_out = {id(each) for each in (*head.output_heads(), *head.embeddings())}
    named: Iterable[tuple[str, nn.Parameter]] = head.named_parameters()
    return {
        name: each
        for name, each in named
        if each.requires_grad and each.dim() == 2 and id(each) not in left_out
    }


def _adam_share(config: TrainConfig) -> float:
    """AdamW's rate over `train.learning_rate`."""
    if config.optimizer is not Optimizer.muon:
        return 1.0
    return float(config.adam_learning_rate) / float(config.learning_rate)


def _adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        betas=(0.9, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=True,  # the other kernels write down a root of every second moment
    )
