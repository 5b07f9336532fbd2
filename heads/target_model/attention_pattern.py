"""What the layers of a target see of a text: all, a window, a chunk, or a state.

Letters: B texts, Q queries, S keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError

# transformers' names for kinds of layers.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION = {"attention": FULL, "hybrid": FULL, "hybrid_sliding": SLIDING}
RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
NEITHER = {"moe", "mlp", "dummy"}
REFUSED = {
    "indexed_attention": "chooses the keys that a query sees, and keeps an index of them",
    "compressed_sparse_attention": "attends to compressed keys of several tokens",
    "heavily_compressed_attention": "attends to compressed keys of several tokens",
    "minimax_m3_sparse": "chooses the blocks of keys that a query sees",
}
REFUSED_WITH = {
    "alibi": "ALiBi goes by the slots of the cache, and drafts do not lie there in their order",
    "keep_window_size": "drops keys by scores of their own, which drafts change",
    "lru_width": "keeps states in its layers, outside the cache",
}
"""By a key of a config."""
Masks = Tensor | dict[str, Tensor | None]


@dataclass(frozen=True)
class AttentionPattern:
    """By kind of layer.

    Attributes:
        kinds: of each layer, as its config names them.
        window: tokens that a query sees in a sliding layer, its own included.
        chunk: tokens of a chunk; a query sees none of the chunks before its own.
        recurrent: whether any layer may carry a state.
        shares_keys: whether layers attend to the keys of an earlier one.
    """

    kinds: tuple[str, ...]
    window: int | None
    chunk: int | None
    recurrent: bool
    shares_keys: bool

    @classmethod
    def of(cls, config: Any, name: str) -> "AttentionPattern":
        """As a config of transformers says.

        Args:
            config: of the text model.
            name: of the target.

        Raises:
            InputError: layers that cannot be served, with the reason.
        """
        window = getattr(config, "sliding_window", None)
        named = getattr(config, "layer_types", None)
        kinds = tuple(named or [SLIDING if window else FULL] * config.num_hidden_layers)
        known = {FULL, SLIDING, CHUNKED, *ATTENTION, *RECURRENT, *NEITHER}
        for kind in sorted(set(kinds) - known):
            reason = REFUSED.get(kind, f"is none of {sorted(known)}")
            raise _refusal(config, name, f"its layer of kind {kind} {reason}")
        for key, reason in REFUSED_WITH.items():
            # BLOOM, which always has it, has no key for it.
            if getattr(config, key, False) or (key == "alibi" and config.model_type == "bloom"):
                raise _refusal(config, name, f"{key} in its config: {reason}")
        chunk = getattr(config, "attention_chunk_size", None)
        shares = bool(getattr(config, "num_kv_shared_layers", 0))
        return cls(kinds, window, chunk, bool(RECURRENT & set(kinds)), shares)

    @property
    def windows(self) -> list[int | None]:
        """Of each layer that attends; None for all that comes before, or a chunk."""
        attending = [ATTENTION.get(kind, kind) for kind in self.kinds]
        seen = {FULL: None, SLIDING: self.window, CHUNKED: None}
        return [seen[kind] for kind in attending if kind in seen]

    @property
    def chunks(self) -> dict[int, int]:
        """Tokens of a chunk, by the number of each layer that has them."""
        found = [number for number, kind in enumerate(self.kinds) if kind == CHUNKED]
        return dict.fromkeys(found, self.chunk or 0)

    @property
    def reach(self) -> list[int]:
        """Tokens after which some layer sees less than all before it."""
        found = {SLIDING: self.window, CHUNKED: self.chunk}
        kinds = {ATTENTION.get(kind, kind) for kind in self.kinds}
        return [size for kind, size in found.items() if kind in kinds and size]

    def masks(
        self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype
    ) -> Masks | None:
        """Additive masks [B, 1, Q, S], by kind of layer where attention is of several kinds.

        Args:
            allowed: [B, Q, S] bool, True where a query may look; windows and chunks come on top.
            query_positions: [B, Q] int64.
            key_positions: [B, S] int64.
            dtype: of the mask.
        """

        def seen(kind: str) -> Tensor:
            window = self.window if kind == SLIDING else None
            chunk = self.chunk if kind == CHUNKED else None
            return within(allowed, query_positions, key_positions, window, chunk)

        attending = {kind: ATTENTION.get(kind, kind) for kind in self.kinds}
        kinds = {own for own in attending.values() if own in (FULL, SLIDING, CHUNKED)}
        made: dict[str, Tensor | None] = {kind: additive(seen(kind), dtype) for kind in kinds}
        if len(made) < 2:
            return next(iter(made.values()), None)
        recurrent: dict[str, Tensor | None] = dict.fromkeys(RECURRENT)
        return recurrent | made | {kind: made.get(own) for kind, own in attending.items()}


def within(
    allowed: Tensor, queries: Tensor, keys: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """[B, Q, S] bool: where queries may look and a window, or their chunk, reaches.

    Args:
        allowed: [B, Q, S] bool.
        queries: [B, Q] int64, their positions.
        keys: [B, S] int64, theirs.
        window: tokens that a query sees, its own included.
        chunk: tokens of a chunk.
    """
    queries, keys = queries.unsqueeze(2), keys.unsqueeze(1)
    if window is not None:
        allowed = allowed & (queries - keys < window)
    if chunk is not None:
        allowed = allowed & (queries // chunk == keys // chunk)
    return allowed


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, Q, S], 0 where a query may look; boolean masks are silently wrong in eager ones."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min).unsqueeze(1)


def _refusal(config: Any, name: str, reason: str) -> InputError:
    return InputError(f"target.path={name}: {config.model_type} cannot be served: {reason}")
