"""Layers that depend on lengths and positions, applied to each text as if alone.

LongRoPE reads texts above a length with other frequencies, and transformers chooses by the longest
text of a batch. Llama 4's attention temperature rises with a query's position in layers without
RoPE, but transformers counts positions by cache slots, which is wrong in draft trees, in batches of
different lengths and in packed documents.

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
    """Rotary embeddings of a decoder that are told which tokens belong to long texts.

    Args:
        decoder: transformers model, whose rotary embeddings get another `forward`.

    Attributes:
        switch: longest text, in tokens, with the short frequencies; None for a decoder without
            LongRoPE, which stays unchanged.
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
    def mark_long_texts(self, long: Tensor) -> Iterator[None]:
        """Context in which tokens belong to long texts where `long` [B, n or 1] bool is True."""
        self._long = long
        try:
            yield
        finally:
            self._long = None

    def _by_length(self, module: Any, forward: Callable[..., Any], switch: int) -> Any:
        # The module decides for all by the largest position of a call, for which some versions of
        # transformers wait. The unwrapped function computes with one set of frequencies.
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
            module.inv_freq = own  # some versions overwrite it
            long = self._long.unsqueeze(2)
            (far_cos, far_sin), (near_cos, near_sin) = turns
            return torch.where(long, far_cos, near_cos), torch.where(long, far_sin, near_sin)

        return rotate


def scale_by_position(decoder: Any) -> None:
    """Make Llama 4's layers scale their queries by position; other layers stay unchanged."""
    for layer in decoder.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            _Temperature(layer, attention)


class _Temperature:
    """Attention temperature that replaces a layer's own, applied after the query projection."""

    def __init__(self, layer: nn.Module, attention: Any) -> None:
        self.scale, self.floor = attention.attn_scale, attention.floor_scale
        self.position_ids = torch.empty(0)
        attention.attn_temperature_tuning = False
        layer.register_forward_pre_hook(self._store_positions, with_kwargs=True)
        attention.q_proj.register_forward_hook(self._scale_queries)

    def _store_positions(self, _layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs["position_ids"]

    def _scale_queries(self, _module: nn.Module, _args: Any, queries: Tensor) -> Tensor:
        rise = torch.log1p(torch.floor((self.position_ids.float() + 1.0) / self.floor))
        return (queries * (rise * self.scale + 1.0).unsqueeze(2)).to(queries.dtype)
