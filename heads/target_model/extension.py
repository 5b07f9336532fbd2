"""New tokens behind what a cache holds: draft trees, and tokens that are sure.

Letters: B texts, n new tokens, the last of P pending ones, S slots, Q heads, K key-value heads, d
head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.decoding.cache import TreeCache
from heads.target_model.attention_pattern import within
from heads.target_model.kernels import Scores, causal, folded_mask, masked
from heads.target_model.slots import SlotTexts, fits_slots

LONG = 1024
"""Slots beyond which drafts attend to the text apart: that takes some launches more a layer."""


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
        in_order: whether draft tokens see just those before them, too.
    """

    def __init__(
        self,
        config: Any,
        cache: TreeCache,
        num_new: int,
        draft: tuple[Tensor, Tensor] | None,
        chunks: Mapping[int, int],
        in_order: bool = False,
    ) -> None:
        self.config, self.cache, self.num_new, self.chunks = config, cache, num_new, chunks
        self.slots = cache.slots
        self.in_order = in_order or draft is None
        self.mask: Tensor | None = None
        self.depths = torch.arange(num_new, device=self.slots.device).unsqueeze(0)
        if draft is not None:
            self.mask, self.depths = draft
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self._texts: dict[torch.device, SlotTexts] = {}
        self._near: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """[B, n] int64, of the new tokens."""
        return self.slots.committed + self.depths[:, -self.num_new :]

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """See `heads.target_model.attention.Pass`; keys and values are those of all slots."""
        chunk = None if layer is None else self.chunks.get(layer)
        # Compiled, masks cost no launches, and slots are as many in every pass.
        if chunk is None and not torch.compiler.is_compiling():
            found = self._by_slots(query, key, value, scores)
            if found is not None:
                return found
            reach = (scores.window or self.cache.width) + self.depths.shape[1]
            if self.mask is not None and query.is_cuda and reach < self.cache.width:
                return self._within(query, key, value, scores)
        if self.mask is None and isinstance(self.cache.to, int):
            end = self.cache.to + self.num_new
            return causal(query, key[:, :, :end], value[:, :, :end], scores, chunk).transpose(1, 2)
        key_of_mask = (scores.window, chunk, query.shape[1] // key.shape[1], query.device)
        if key_of_mask not in self._masks:
            self._masks[key_of_mask] = self._mask(*key_of_mask, query.dtype)
        return masked(query, key, value, self._masks[key_of_mask], scores).transpose(1, 2)

    def _by_slots(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor | None:
        """`attend` without a mask over the text; None where the kernel does not do it."""
        width, window = self.cache.width, scores.window
        window = None if window is None or window >= width else window
        alone = self.depths.shape[1] == 1
        apart = self.mask is not None and not alone and window is None and width > LONG
        if not (apart or self.in_order or alone) or not fits_slots(query, key, value, scores):
            return None
        if query.device not in self._texts:
            committed = self.slots.committed[:, 0].to(query.device)
            mask = None if self.mask is None else self.mask.to(query.device)
            self._texts[query.device] = SlotTexts(committed, self.depths.shape[1], mask)
        texts = self._texts[query.device]
        if apart:
            return texts.joined(query, key, value, scores)
        return texts.in_order(query, key, value, scores, window)

    def _within(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """`attend` of draft tokens in a sliding layer, over the slots that they reach to."""
        key_of_near = (scores.window, query.shape[1] // key.shape[1], query.device)
        if key_of_near not in self._near:
            assert scores.window is not None
            self._near[key_of_near] = self._reached(scores.window, *key_of_near[1:], query.dtype)
        texts, slots, mask = self._near[key_of_near]
        key, value = (each[texts, :, slots].transpose(1, 2) for each in (key, value))
        return masked(query, key, value, mask, scores).transpose(1, 2)

    def _reached(
        self, window: int, groups: int, device: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Texts [B, 1], slots [B, window - 1 + P] and what `masked` takes for them."""
        assert self.mask is not None
        committed, num_pending = self.slots.committed, self.depths.shape[1]
        places = torch.arange(1 - window, num_pending, device=self.slots.device)
        slots, depths = committed + places, self.depths[:, -self.num_new :].unsqueeze(2)
        before, behind = slots[:, : window - 1] >= 0, depths - self.depths.unsqueeze(1) < window
        text = before.unsqueeze(1) & (places[: window - 1] > depths - window)
        own = (self.mask & behind).expand(len(slots), -1, -1)
        mask = folded_mask(torch.cat([text, own], 2).to(device), groups, dtype)
        texts = torch.arange(len(slots), device=device).unsqueeze(1)
        return texts, slots.clamp_min(0).to(device), mask

    def _mask(
        self, window: int | None, chunk: int | None, groups: int, device: Any, dtype: torch.dtype
    ) -> Tensor | None:
        """What `masked` takes; None where a single token sees everything there is."""
        full = self.cache.even and self.slots.width(self.depths.shape[1]) == self.cache.width
        whole = full and window is None and chunk is None
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
