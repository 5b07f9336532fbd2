"""Attention pattern of a target: layers see a whole text, a window, a chunk, or a state.

Letters: B texts, Q queries, S keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError

# transformers' names for types of layers.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION = {"attention": FULL, "hybrid": FULL, "hybrid_sliding": SLIDING}
RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
NEITHER = {"moe", "mlp", "dummy"}
REFUSED = {
    "indexed_attention": "chooses the keys of each query by an index",
    "compressed_sparse_attention": "attends to compressed keys of several tokens",
    "heavily_compressed_attention": "attends to compressed keys of several tokens",
    "minimax_m3_sparse": "chooses the blocks of keys that a query sees",
}
REFUSED_WITH = {
    "alibi": "ALiBi uses cache slots as positions, but drafts lie there in another order",
    "keep_window_size": "drops keys by scores, which drafts change",
    "lru_width": "keeps states in its layers, outside the cache",
}
"""Reasons to refuse a target, by keys of its config."""
Masks = Tensor | dict[str, Tensor | None]


@dataclass(frozen=True)
class AttentionPattern:
    """Types of layers, and how far each sees.

    Attributes:
        layer_types: type of each layer, as in the config.
        window: tokens that a query sees in a sliding layer, its own included.
        chunk: tokens per chunk; a query sees no earlier chunks.
        is_recurrent: whether any layer may carry a state.
        shares_keys: whether layers use the keys of an earlier layer.
    """

    layer_types: tuple[str, ...]
    window: int | None
    chunk: int | None
    is_recurrent: bool
    shares_keys: bool

    @classmethod
    def from_config(cls, config: Any, name: str) -> "AttentionPattern":
        """Pattern in a text model's config.

        Raises:
            InputError: layers that are not supported, with the reason.
        """
        window = getattr(config, "sliding_window", None)
        named = getattr(config, "layer_types", None)
        types = tuple(named or [SLIDING if window else FULL] * config.num_hidden_layers)
        known = {FULL, SLIDING, CHUNKED, *ATTENTION, *RECURRENT, *NEITHER}
        for unknown in sorted(set(types) - known):
            reason = REFUSED.get(unknown, f"is none of {sorted(known)}")
            raise _make_refusal(config, name, f"its layer of type {unknown} {reason}")
        for key, reason in REFUSED_WITH.items():
            # BLOOM always has ALiBi, and no key for it.
            if getattr(config, key, False) or (key == "alibi" and config.model_type == "bloom"):
                raise _make_refusal(config, name, f"{key} in its config: {reason}")
        chunk = getattr(config, "attention_chunk_size", None)
        shares = bool(getattr(config, "num_kv_shared_layers", 0))
        return cls(types, window, chunk, bool(RECURRENT & set(types)), shares)

    @property
    def windows(self) -> list[int | None]:
        """Window of each attention layer; None for full or chunked layers."""
        windows = {FULL: None, SLIDING: self.window, CHUNKED: None}
        return [windows[own] for own in self._attention_types if own in windows]

    @property
    def chunks(self) -> dict[int, int]:
        """Tokens per chunk, by the index of each chunked layer."""
        numbers = [number for number, own in enumerate(self.layer_types) if own == CHUNKED]
        return dict.fromkeys(numbers, self.chunk or 0)

    @property
    def length_limits(self) -> list[int]:
        """Lengths above which some layer sees less than everything."""
        sizes = {SLIDING: self.window, CHUNKED: self.chunk}
        return [size for own, size in sizes.items() if own in self._attention_types and size]

    @property
    def _attention_types(self) -> list[str]:
        """Types of layers, hybrids by their attention."""
        return [ATTENTION.get(own, own) for own in self.layer_types]

    def build_masks(
        self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype
    ) -> Masks | None:
        """Additive masks [B, 1, Q, S], by type of layer if there are several.

        Args:
            allowed: [B, Q, S] bool, True for visible tokens; windows and chunks are added.
            query_positions: [B, Q] int64.
            key_positions: [B, S] int64.
            dtype: dtype of the masks.
        """

        def mask(own: str) -> Tensor:
            window = self.window if own == SLIDING else None
            chunk = self.chunk if own == CHUNKED else None
            seen = restrict_visibility(allowed, query_positions, key_positions, window, chunk)
            return build_additive_mask(seen, dtype)

        types = {own for own in self._attention_types if own in (FULL, SLIDING, CHUNKED)}
        masks: dict[str, Tensor | None] = {own: mask(own) for own in types}
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        recurrent: dict[str, Tensor | None] = dict.fromkeys(RECURRENT)
        by_layer = zip(self.layer_types, self._attention_types, strict=True)
        return recurrent | masks | {stated: masks.get(own) for stated, own in by_layer}


def restrict_visibility(
    allowed: Tensor, queries: Tensor, keys: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """[B, Q, S] bool, visible tokens inside a window or chunk.

    `allowed` is [B, Q, S] bool, positions of queries are [B, Q] and of keys [B, S] int64.
    """
    queries, keys = queries.unsqueeze(2), keys.unsqueeze(1)
    if window is not None:
        allowed = allowed & (queries - keys < window)
    if chunk is not None:
        allowed = allowed & (queries // chunk == keys // chunk)
    return allowed


def build_additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, Q, S], 0 for visible tokens; boolean masks are silently wrong in eager attention."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min).unsqueeze(1)


def _make_refusal(config: Any, name: str, reason: str) -> InputError:
    return InputError(
        f"target.path={name}: {config.model_type} is not supported: {reason}; name another target"
    )
