"""LongRoPE across its switch: texts beyond a length are read with other frequencies altogether.

A model picks its frequencies by the longest text of a batch. Here every text and every document
goes by its own length, as it would alone.

Source: LongRoPE, arXiv 2402.13753; transformers `modeling_rope_utils.py`, `dynamic_rope_update`.
Letters: B texts, n tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


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
                module.forward = self._by_length(module.forward)

    @contextmanager
    def reading(self, long: Tensor) -> Iterator[None]:
        """Inside, tokens are of long texts where `long` [B, n or 1] bool says so."""
        self._long = long
        try:
            yield
        finally:
            self._long = None

    def _by_length(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            if self._long is None:
                return forward(x, position_ids)
            assert self.switch is not None
            # By the largest position of a call the module decides for all; the first parts of a
            # long prompt have none that is large.
            far = (
                each[:, :-1] for each in forward(x, pad(position_ids, (0, 1), value=self.switch))
            )
            near = forward(x, position_ids.clamp_max(self.switch - 1))
            long = self._long.unsqueeze(2)
            cos, sin = (torch.where(long, *each) for each in zip(far, near, strict=True))
            return cos, sin

        return rotate
