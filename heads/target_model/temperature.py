"""Llama 4's attention temperature, which rises with a query's position where there is no RoPE.

transformers counts positions by the slots of a cache, and so wrongly in draft trees, in batches of
texts of unlike length, and in packed documents. Here they are those that the layer is given.

Source: transformers `modeling_llama4.py`, `Llama4TextAttention`.
"""

from typing import Any

import torch
from torch import Tensor, nn


def scale_by_position(decoder: Any) -> None:
    """Makes such layers of a decoder scale their queries by position; others are left alone."""
    for layer in decoder.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            _Temperature(layer, attention)


class _Temperature:
    """In place of a layer's own; what scales a query scales what it is made of."""

    def __init__(self, layer: nn.Module, attention: Any) -> None:
        self.scale, self.floor = attention.attn_scale, attention.floor_scale
        self.position_ids = torch.empty(0)
        attention.attn_temperature_tuning = False
        layer.register_forward_pre_hook(self._remember, with_kwargs=True)
        attention.q_proj.register_forward_hook(self._scaled)

    def _remember(self, _layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs["position_ids"]

    def _scaled(self, _module: nn.Module, _args: Any, queries: Tensor) -> Tensor:
        rise = torch.log1p(torch.floor((self.position_ids.float() + 1.0) / self.floor))
        return (queries * (rise * self.scale + 1.0).unsqueeze(2)).to(queries.dtype)
