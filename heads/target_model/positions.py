"""Layers that go by lengths and positions: every text by its own, as it would alone.

LongRoPE reads texts beyond a length with other frequencies altogether, and a model of transformers
picks them by the longest text of a batch. Llama 4's attention temperature rises with a query's
position where there is no RoPE, and transformers counts positions by the slots of a cache: wrong in
draft trees, in batches of texts of unlike length, and in packed documents.

Source: LongRoPE, arXiv 2402.13753; transformers `modeling_rope_utils.py`, `dynamic_rope_update`,
and `modeling_llama4.py`, `Llama4TextAttention`. Letters: B texts, n tokens.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class LongRope:
    """The rotary embeddings of a decoder, told whose tokens are of long texts.

    Args:
        decoder: a transformers model; its rotary embeddings get another `forward`.

    Attributes:
        switch: longest text, in tokens, that is read with the short frequencies; None for a
            decoder without LongRoPE, which nothing is done to.
    """

    def __init__(self, decoder: Any) -> None:
        self.switch: int | None = None
        self._long: Tensor | None = None
        for module in decoder.modules():
            if getattr(module, "rope_type", None) == "longrope":
                rope = module.config.rope_parameters
                self.switch = int(rope["original_max_position_embeddings"])
                module.forward = self._by_length(module, module.forward, self.switch)

    @contextmanager
    def reading(self, long: Tensor) -> Iterator[None]:
        """Inside, tokens are of long texts where `long` [B, n or 1] bool says so."""
        self._long = long
        try:
            yield
        finally:
            self._long = None

    def _by_length(self, module: Any, forward: Callable[..., Any], switch: int) -> Any:
        # By the largest position of a call the module decides for all, which some versions of
        # transformers wait for; below that lies what computes with one set of frequencies.
        compute = inspect.unwrap(type(module).forward)
        made: dict[torch.device, tuple[Tensor, Tensor]] = {}

        def rotate(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            if self._long is None:
                return forward(x, position_ids)
            if x.device not in made:
                far, _ = ROPE_INIT_FUNCTIONS["longrope"](
                    module.config, x.device, seq_len=switch + 1
                )
                made[x.device] = far, module.original_inv_freq.to(x.device, copy=True)
            turns: list[tuple[Tensor, Tensor]] = []
            own = module.inv_freq
            for module.inv_freq in made[x.device]:
                turns.append(compute(module, x, position_ids))
            module.inv_freq = own  # which some versions write over
            long = self._long.unsqueeze(2)
            (far_cos, far_sin), (near_cos, near_sin) = turns
            return torch.where(long, far_cos, near_cos), torch.where(long, far_sin, near_sin)

        return rotate


def scale_by_position(decoder: Any) -> None:
    """Makes Llama 4's layers scale their queries by position; others are left alone."""
    for layer in decoder.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            _Temperature(layer, attention)


class _Temperature:
    """Attention temperature in place of a layer's own, applied to the projection of queries."""

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
