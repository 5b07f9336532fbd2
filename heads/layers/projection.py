"""Output projection as plain tensors, for fused losses.

Letters: N rows, D hidden, V columns.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Scalings between last hidden states and logits, as configs name them.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MULTIPLIED = "hyperclovax"
"""Model type that multiplies by `logits_scaling`; others divide by it."""
UNSCALED = ("mpt", "aya_vision", "cohere2_vision")
"""Model types whose `logit_scale` transformers does not apply."""


class Projection(NamedTuple):
    """Logits = cap * tanh(s * (h W^T + b) / cap), each part if the target has it.

    Attributes:
        weight: [V, D].
        bias: [V], not trained.
        scale: factor s, the target's multiplier of logits or of last hidden states.
        cap: soft cap of the target.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, V] logits of hidden states [N, D] in the weight's dtype, in `out` if given."""
        logits = torch.matmul(hidden, self.weight.T, out=out)
        return self.scale_logits(logits if self.bias is None else logits.add_(self.bias))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Logits from h W^T + b."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def scale_gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of `logits` [N, V] into that of h W^T + b."""
        if self.cap is not None:
            grad = grad * (1 - (logits.to(grad.dtype) / self.cap).square())
        return grad if self.scale == 1.0 else grad * self.scale


def scaling_of(model_config: Any) -> tuple[float, float | None]:
    """`scale` and `cap` of a target's `Projection`, from the config of the whole model."""
    config, scale = model_config.get_text_config(), 1.0
    if model_config.model_type not in UNSCALED:
        for name in MULTIPLIERS:
            scale *= getattr(config, name, None) or 1.0
    for name in DIVISORS:
        divisor = getattr(config, name, None) or 1.0
        scale = scale * divisor if config.model_type == MULTIPLIED else scale / divisor
    caps = [getattr(config, name, None) for name in CAPS]
    return scale, next((cap for cap in caps if cap), None)
