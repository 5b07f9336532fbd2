"""An output projection as numbers: what a fused loss needs to go through it and back.

Letters: N rows, D hidden, V columns.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Projection(NamedTuple):
    """Logits = cap * tanh(s * (h W^T + b) / cap), each part where the target has it.

    Attributes:
        weight: [V, D].
        bias: [V], never trained.
        scale: s, a target's `logit_scale`, or one over its `logits_scaling`.
        cap: a target's `final_logit_softcapping`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of_target(cls, output_head: Any, config: Any) -> "Projection":
        """A target's output head, with the scalings that its config names."""
        scale = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(output_head.weight, getattr(output_head, "bias", None), scale / divisor, cap)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, V] of hidden states [N, D], in the dtype of the weight; in `out` [N, V] if given."""
        logits = torch.matmul(hidden, self.weight.T, out=out)
        return self.scaled(logits if self.bias is None else logits.add_(self.bias))

    def scaled(self, logits: Tensor) -> Tensor:
        """What a target makes of h W^T + b."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def before(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turns the gradient of `logits` [N, V] into that of h W^T + b."""
        if self.cap is not None:
            grad = grad * (1 - (logits.to(grad.dtype) / self.cap).square())
        return grad if self.scale == 1.0 else grad * self.scale
