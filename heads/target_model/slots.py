"""PyTorch's flash kernel over texts in the slots of a cache, whose lengths the device alone knows.

It is told by tensors where a text begins and how many of its slots hold tokens. So no pass needs a
mask for slots that are not written yet, a captured one neither, and keys are read where they lie.

Source: PyTorch, `flash_attn/flash_api.cpp`, `mha_varlen_fwd`; it has `seqused_k` since 2.7.
Letters: B texts, n queries of one, the last of P pending tokens, m slots of one, Q heads, K
key-value heads, d head size.
"""

from functools import cached_property

import torch
from torch import Tensor

from heads.layers.documents import fits_flash
from heads.target_model.kernels import Scores, folded_mask


def fits_slots(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> bool:
    """Whether the kernel takes queries [B, Q, n, d] and texts [B, K, m, d] as they lie."""
    same = query.shape[-1] == values.shape[-1]
    if scores.cap is not None or not (same and fits_flash(query)):
        return False
    text, _, row, number = keys.stride()
    return number == 1 and text % row == 0 and keys.stride() == values.stride()


class SlotTexts:
    """Texts of a batch and what is pending behind them, for the layers on one device.

    Args:
        committed: [B] int64, tokens of each.
        num_pending: P.
        mask: [B or 1, n, P] bool, the pending tokens that each new one sees; None for those before
            it, and itself.
    """

    def __init__(self, committed: Tensor, num_pending: int, mask: Tensor | None) -> None:
        self.committed, self.num_pending, self.mask = committed, num_pending, mask
        self._used: dict[int, Tensor] = {}
        self._begins: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}

    def in_order(
        self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, window: int | None
    ) -> Tensor:
        """Of tokens each of which sees all that comes before it.

        A token alone is to the kernel as many of one head as share its keys, and keys are divided
        among blocks.

        Args:
            query: [B, Q, n, d].
            keys: [B, K, m, d], of all slots.
            values: as many.
            scores: of the layer.
            window: tokens that a query sees, its own included; None for all before it.

        Returns:
            [B, n, Q, d].
        """
        text, used = (keys, values), self._seen(self.num_pending)
        left = -1 if window is None else window - 1
        found, norm = self._flash(query.transpose(1, 2), text, used, scores.scale, (True, left))
        if scores.sinks is None:
            return found
        return _sunk(found, norm.t().unflatten(0, found.shape[:2]), scores.sinks)

    def joined(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Of draft tokens, each of which sees all that is committed, and pending ones by the mask.

        Over the text they are heads of one token, so that keys are divided among blocks.
        Arguments and result are those of `in_order`.
        """
        rows = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
        heads, text = rows.flatten(1, 2).unsqueeze(1), (keys, values)
        before, norm = self._flash(heads, text, self._seen(0), scores.scale)
        own, own_norm = self._own(rows, text, scores.scale)
        norm = norm.t().unflatten(1, rows.shape[1:3])
        share = torch.sigmoid(norm - own_norm).unsqueeze(-1).to(own.dtype)
        found = torch.lerp(own, before.view_as(rows), share)
        if scores.sinks is not None:
            sinks = scores.sinks.view(keys.shape[1], -1, 1).expand(-1, -1, query.shape[2])
            found = _sunk(found, torch.logaddexp(norm, own_norm), sinks.flatten(1))
        return found.reshape(query.shape).transpose(1, 2)

    def _flash(
        self, query: Tensor, text: tuple[Tensor, Tensor], used: Tensor, scale: float | None,
        causal: tuple[bool, int] = (False, -1),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output [B, n, Q, d] of queries [B, n, Q, d], and logsumexp [Q, B * n].

        `causal` is whether they are, and how far they see to the left.
        """
        num_texts, num_queries = query.shape[:2]
        begins = self._begin(num_queries), self._begin(_step(text[0]))
        found, log_norm, *_ = torch.ops.aten._flash_attention_forward(
            query.flatten(0, 1), *map(_rows, text), *begins, num_queries, text[0].shape[2],
            0.0, causal[0], False,
            # To the right nobody sees: told so here, the kernel would not divide keys.
            scale=scale, window_size_left=causal[1], window_size_right=-1, seqused_k=used,
        )  # fmt: skip
        return found.unflatten(0, (num_texts, num_queries)), log_norm

    def _own(
        self, rows: Tensor, text: tuple[Tensor, Tensor], scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Of rows [B, K, Q / K * n, d] over the pending tokens, and logsumexp [B, K, Q / K * n]."""
        num_texts, num_heads, num_rows, _ = rows.shape
        keys, values = (each[self._places].transpose(1, 2) for each in text)
        found, log_norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            rows, keys, values, self._bias(rows).expand(num_texts, num_heads, -1, -1), True,
            scale=scale,
        )  # fmt: skip
        return found, log_norm[..., :num_rows]

    @cached_property
    def _places(self) -> tuple[Tensor, slice, Tensor]:
        """Where pending tokens stand in [B, K, m, d]."""
        device, num_texts = self.committed.device, len(self.committed)
        pending = torch.arange(self.num_pending, device=device)
        texts = torch.arange(num_texts, device=device).unsqueeze(1)
        return texts, slice(None), self.committed.unsqueeze(1) + pending

    def _bias(self, rows: Tensor) -> Tensor:
        """[B or 1, 1, Q / K * n, P] of the mask."""
        assert self.mask is not None
        groups = rows.shape[2] // self.mask.shape[1]
        if groups not in self._biases:
            self._biases[groups] = folded_mask(self.mask, groups, rows.dtype)
        return self._biases[groups]

    def _seen(self, num_pending: int) -> Tensor:
        """[B] int32, slots with tokens, so many pending ones among them."""
        if num_pending not in self._used:
            self._used[num_pending] = (self.committed + num_pending).int()
        return self._used[num_pending]

    def _begin(self, step: int) -> Tensor:
        """[B + 1] int32, where texts begin that are so many rows apart."""
        if step not in self._begins:
            end, device = step * (len(self.committed) + 1), self.committed.device
            self._begins[step] = torch.arange(0, end, step, dtype=torch.int32, device=device)
        return self._begins[step]


def _sunk(found: Tensor, log_norm: Tensor, sinks: Tensor) -> Tensor:
    """Output [..., d] with a key more under its softmax, without a value and of scores `sinks`."""
    return found * torch.sigmoid(log_norm - sinks).unsqueeze(-1).to(found.dtype)


def _step(states: Tensor) -> int:
    """Rows of `_rows` from a text to the next; of one text any number will do."""
    return states.stride(0) // states.stride(2) if len(states) > 1 else 1


def _rows(states: Tensor) -> Tensor:
    """[., K, d] of texts [B, K, m, d]: a row for each slot of the first, and so on to the last."""
    num_texts, num_heads, num_slots, size = states.shape
    rows = (num_texts - 1) * _step(states) + num_slots
    return states.as_strided((rows, num_heads, size), (states.stride(2), states.stride(1), 1))
