"""New tokens behind what a cache holds: draft trees, and tokens that are sure.

Letters: B texts, n new tokens, the last of P pending ones, S slots, Q heads, K key-value heads, d
head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.cache import TreeCache
from heads.documents import Documents, fits_flash, flash
from heads.target.kernels import Scores, causal, folded_mask, masked
from heads.target.sights import within


class Extension:
    """A pass over new tokens, for layers that attend without masks of transformers' making.

    Tokens that are sure, in texts of which as much is committed, need no mask at all.

    Args:
        config: of the model.
        cache: told by `begin` where the new tokens go.
        num_new: n.
        draft: mask [B or 1, n, P] bool and depths [B or 1, P] int64 of draft tokens; None for
            tokens that are sure, each of which sees those before it.
        chunks: tokens of a chunk, by the number of a layer that sees no further.
    """

    def __init__(
        self,
        config: Any,
        cache: TreeCache,
        num_new: int,
        draft: tuple[Tensor, Tensor] | None,
        chunks: Mapping[int, int],
    ) -> None:
        self.config, self.cache, self.num_new, self.chunks = config, cache, num_new, chunks
        self.slots = cache.slots
        self.mask: Tensor | None = None
        self.depths = torch.arange(num_new, device=self.slots.device).unsqueeze(0)
        if draft is not None:
            self.mask, self.depths = draft
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self._ends: dict[torch.device, Documents] = {}

    @property
    def positions(self) -> Tensor:
        """[B, n] int64, of the new tokens."""
        return self.slots.committed + self.depths[:, -self.num_new :]

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """See `heads.target.attention.Pass`; keys and values are those of all slots."""
        chunk = None if layer is None else self.chunks.get(layer)
        if self.mask is None and self.cache.even:
            return self._sure(query, key, value, scores, chunk).transpose(1, 2)
        key_of_mask = (scores.window, chunk, query.shape[1] // key.shape[1], query.device)
        if key_of_mask not in self._masks:
            self._masks[key_of_mask] = self._mask(*key_of_mask, query.dtype)
        return masked(query, key, value, self._masks[key_of_mask], scores).transpose(1, 2)

    def _sure(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, chunk: int | None
    ) -> Tensor:
        same = query.shape[-1] == value.shape[-1]
        if not (scores.plain and chunk is None and same and fits_flash(query)):
            return causal(query, key, value, scores, chunk)
        if query.device not in self._ends:
            sizes = len(query), query.shape[2], key.shape[2]
            self._ends[query.device] = Documents.ends(*sizes, query.device)
        ends = self._ends[query.device]
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        found, _ = flash(q, k, v, ends, scores.window, scores.scale)
        return found.unflatten(0, (len(query), -1)).transpose(1, 2)

    def _mask(
        self, window: int | None, chunk: int | None, groups: int, device: Any, dtype: torch.dtype
    ) -> Tensor | None:
        """What `masked` takes; None where a single token sees everything there is."""
        whole = self.cache.even and window is None and chunk is None
        if whole and self.depths.shape[1] == 1:
            return None
        if whole and self.mask is not None:
            # All texts are as long: of the pending tokens alone are there some that are not seen.
            own = folded_mask(self.mask.to(device), groups, dtype)
            return pad(own, (self.cache.width - own.shape[3], 0))
        allowed = self.allowed
        if window is not None or chunk is not None:
            allowed = within(allowed, self.positions, self.key_positions, window, chunk)
        return folded_mask(allowed.to(device), groups, dtype)

    @property
    def allowed(self) -> Tensor:
        """[B, n, S] bool, where new tokens may look."""
        mask = self.mask
        if mask is None:
            mask = (self.depths.mT >= self.depths).unsqueeze(0)
        return self.slots.attention_mask(mask, self.cache.width)

    @property
    def key_positions(self) -> Tensor:
        """[B, S] int64, of what is in the slots."""
        return self.slots.positions(self.depths, self.cache.width)
