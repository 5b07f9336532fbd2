"""Optimizers of a head and their learning rate: AdamW, or Muon for hidden matrices beside AdamW.

Muon moves a matrix equally in all directions, so rare patterns are learnt as fast as common ones.
AdamW updates output heads and embeddings, where each row is an id and most ids are rare.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from conf.settings.training import Optimizer, Schedule, TrainConfig
from heads.devices import choose_fast_dtype
from heads.target_model.load import resolve_dtype
from train.objective import Objective

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Odd polynomial that Muon applies NUM_ITERATIONS times: steep at 0, near 1 above 0.3."""
NUM_ITERATIONS = 5
AVERAGE = "average"
"""Key of a parameter's moving average."""


def make_optimizers(objective: Objective, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make AdamW, and Muon if set, over the groups of an objective.

    Args:
        objective: objective whose head tells which matrices project to the vocabulary.
        config: optimizer settings, with numbers for rates.

    Returns:
        The optimizers. `rate` of a group is a fraction of `train.learning_rate`; set `lr` before
        each step.
    """
    hidden = {id(matrix) for matrix in _find_hidden_matrices(objective.head, config).values()}
    muon_on = config.optimizer is Optimizer.muon
    adam_share = float(config.adam_learning_rate) / float(config.learning_rate) if muon_on else 1.0
    adamw: list[dict[str, Any]] = []
    muon: list[dict[str, Any]] = []
    for group in objective.list_parameter_groups():
        for groups, rate, by_muon in ((adamw, adam_share, False), (muon, 1.0, True)):
            chosen = [p for p in group.parameters if (id(p) in hidden) == by_muon]
            if chosen:
                options = {"rate": rate * group.rate, "first_step": group.first_step}
                groups.append({"params": chosen, **options})
    optimizers: list[torch.optim.Optimizer] = []
    if adamw:
        # Fused: other kernels store the root of every second moment.
        betas, decay = (0.9, config.adam_beta2), config.weight_decay
        optimizers.append(torch.optim.AdamW(adamw, betas=betas, weight_decay=decay, fused=True))
    if muon:
        device = muon[0]["params"][0].device
        dtype = choose_fast_dtype(resolve_dtype(config.dtype, device), device)
        optimizers.append(Muon(muon, dtype, config.weight_decay))
    return optimizers


class Muon(torch.optim.Optimizer):
    """Muon optimizer: moves a matrix by its momentum with singular values made about equal.

    Parameters are matrices, whole or sharded. The state of each matrix is `momentum_buffer`.

    Args:
        groups: parameter groups as in torch. A matrix [R, C] moves by about lr * sqrt(max(1, R /
            C)) in each singular direction.
        dtype: dtype of the orthogonalisation.
        weight_decay, lr: defaults for groups without their own.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and its
        reference code; `torch.optim.Muon` equals this class in bfloat16. Rounding to bfloat16 turns
        a difference in a gradient's last bit into a percent of a weight within a dozen steps. Here
        the dtype is `train.dtype`, so float32 runs stay equal; CPUs without bfloat16 products use
        float32.
    """

    def __init__(
        self, groups: Any, dtype: torch.dtype, weight_decay: float, lr: float = 0.0
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix]["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = self._orthogonalise_update(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                stretch = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                matrix.add_(update, alpha=-group["lr"] * stretch)

    def _orthogonalise_update(self, update: Tensor) -> Tensor:
        """Orthogonalise an update [R, C], see `orthogonalise_matrix`.

        Shards are gathered once; each process keeps its shard.
        """
        if not isinstance(update, DTensor):
            return orthogonalise_matrix(update.to(self.dtype))
        whole = orthogonalise_matrix(update.full_tensor().to(self.dtype))
        mesh, placements = update.device_mesh, update.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def orthogonalise_matrix(matrix: Tensor) -> Tensor:
    """Orthogonalise a matrix [R, C] = U S V^T to about U V^T.

    Newton-Schulz iteration in the matrix's dtype. Singular values end between 0.7 and 1.2, except
    those near 0.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


STATE_KEYS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
}
"""Optimizer states of a parameter besides the step count, each as large as the parameter."""


def state_keys(head: Any, config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """Name the optimizer states of each trained parameter, by the parameter's name.

    Args:
        head: head whose parameters may be sharded.
        config: settings with a choice of `optimizer` and `average_decay`.
    """
    hidden = _find_hidden_matrices(head, config)
    average = () if config.average_decay is None else (AVERAGE,)
    return {
        name: STATE_KEYS[Muon if name in hidden else torch.optim.AdamW] + average
        for name, parameter in head.named_parameters()
        if parameter.requires_grad
    }


def make_initial_state(
    optimizer: torch.optim.Optimizer, tensor: Tensor, config: TrainConfig
) -> dict[str, Tensor]:
    """Make the state of a parameter before its first step.

    Args:
        optimizer: AdamW or Muon.
        tensor: float32 parameter, shard or flat piece, as the optimizer holds it.
        config: settings with `average_decay`.

    Returns:
        Float32 tensors by name, as large as the parameter; for AdamW also the step count [].
    """
    state = {key: torch.zeros_like(tensor) for key in STATE_KEYS[type(optimizer)]}
    if isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.zeros((), device=tensor.device)  # the fused kernel needs it there
    if config.average_decay is not None:
        state[AVERAGE] = tensor.detach().clone()
    return state


def _find_hidden_matrices(head: Any, config: TrainConfig) -> dict[str, nn.Parameter]:
    """Find the trained matrices that Muon updates, by name; empty without Muon."""
    if config.optimizer is not Optimizer.muon:
        return {}
    excluded = {id(matrix) for matrix in (*head.find_output_heads(), *head.find_embeddings())}
    return {
        name: parameter
        for name, parameter in head.named_parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in excluded
    }


def compute_learning_rate(config: TrainConfig, step: int) -> float:
    """Compute the learning rate of optimizer step `step`, from 0, once `auto` is settled."""
    return float(config.learning_rate) * compute_rate_fraction(config, step)


def compute_rate_fraction(config: TrainConfig, step: int) -> float:
    """Compute the fraction of `learning_rate` that optimizer step `step` (from 0) uses.

    Linear warm-up that starts above 0, so no step is wasted; then cosine to 0, constant, or
    constant with a linear decay to 0 over the last `decay_fraction` of the steps (wsd).
    """
    assert config.schedule is not Schedule.auto, "not settled"
    warmup_steps = config.warmup_steps or 0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = max(config.num_steps - step, 0)
    if config.schedule is Schedule.cosine:
        return 0.5 * (1 - math.cos(math.pi * left / (config.num_steps - warmup_steps)))
    if config.schedule is Schedule.wsd:
        return min(1.0, left / max(1.0, config.decay_fraction * config.num_steps))
    return 1.0


def compute_late_warmup(config: TrainConfig, step: int, first_step: int) -> float:
    """Compute the fraction of the rate for parameters that a later step trains first.

    AdamW's first steps have full length even for tiny gradients, so parameters that join later get
    a warm-up too.
    """
    if first_step == 0 or not config.warmup_steps:
        return 1.0
    return min(1.0, max(0, step - first_step + 1) / config.warmup_steps)
