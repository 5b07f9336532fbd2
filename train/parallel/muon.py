"""Muon: a matrix moves by its momentum, all singular values of which are made about alike.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and its
reference code; `torch.optim.Muon` is the same in bfloat16. That rounds to bfloat16 always: what
differs in the last bit of a gradient, as between one process and two, differs by a percent of a
weight a dozen steps later. Here it is `train.dtype`, so that float32 runs stay equal, and float32
on a CPU that only imitates products in that.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that is applied NUM_ITERATIONS times: steepest at 0, near 1 from .3 on."""
NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Of matrices, also those that lie in shards; `momentum_buffer` is the state of each.

    Args:
        groups: as of every optimizer of torch. A matrix [R, C] moves by about
            lr * sqrt(max(1, R / C)) in each singular direction.
        dtype: that singular values are made alike in.
        weight_decay: of groups that have none of their own, and `lr`, likewise.
    """

    def __init__(
        self, groups: Any, dtype: torch.dtype, weight_decay: float, lr: float = 0.0
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix]["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = self._orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                stretch = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                matrix.add_(update, alpha=-group["lr"] * stretch)

    def _orthogonal(self, update: Tensor) -> Tensor:
        """[R, C] `orthogonalized`; of shards the whole is gathered once, each keeps its own."""
        if not isinstance(update, DTensor):
            return orthogonalized(update.to(self.dtype))
        whole = orthogonalized(update.full_tensor().to(self.dtype))
        mesh, placements = update.device_mesh, update.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def orthogonalized(matrix: Tensor) -> Tensor:
    """[R, C] of U S V^T about U V^T: singular values from 0.7 to 1.2, those near 0 apart.

    By Newton and Schulz: products of matrices alone, in the dtype that is given.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
