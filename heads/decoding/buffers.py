"""Keys and values of one layer for a batch of texts, a row each, and how they move.

Letters: B texts, S slots, n tokens added, A nodes kept, K heads, d head size.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

ROUND_TO = 64  # slots


class SlotBuffer:
    """Keys and values [B, K, S, d] of one layer, written by slot.

    Args:
        capacity: slots of a buffer that never grows; None grows on demand.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(
        self, keys: Tensor, values: Tensor, slots: Tensor | int, width: int, needed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Stores [B, K, n, d] at slots [B, n], or from one on; gives everything up to `width`.

        Slots that will be needed may be told before.
        """
        self._reserve(keys, values, max(width, needed), len(keys))
        assert self.keys is not None
        assert self.values is not None
        if isinstance(slots, int):
            self.keys.narrow(2, slots, keys.shape[2]).copy_(keys)
            self.values.narrow(2, slots, keys.shape[2]).copy_(values)
        else:
            texts, slots = _index(slots, self.keys)
            self.keys[texts, :, slots] = keys.transpose(1, 2)
            self.values[texts, :, slots] = values.transpose(1, 2)
        return self.keys.narrow(2, 0, width), self.values.narrow(2, 0, width)

    def reserve(self, width: int) -> None:
        """Grows to at least so many slots, once anything has been written."""
        assert self.keys is not None
        assert self.values is not None
        self._reserve(self.keys, self.values, width, len(self.keys))

    def keep(self, rows: list[int]) -> None:
        """Goes on with some rows only."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = (_kept(each, rows) for each in (self.keys, self.values))

    def replace(self, row: int, other: "SlotBuffer", num_slots: int, num_texts: int) -> None:
        """Takes the first slots of one row of so many from a buffer of one row."""
        if num_slots == 0:
            return
        assert other.keys is not None
        assert other.values is not None
        self._reserve(other.keys, other.values, num_slots, num_texts)
        for own, new in ((self.keys, other.keys), (self.values, other.values)):
            assert own is not None
            assert new is not None
            own[row, :, :num_slots] = new[0, :, :num_slots]

    def _reserve(self, keys: Tensor, values: Tensor, width: int, num_texts: int) -> None:
        held = 0 if self.keys is None else self.keys.shape[2]
        if width <= held:
            return
        size = self.capacity or reserved(width)
        if width > size:
            raise RuntimeError(f"{width} slots needed in a cache of {size}")
        self.keys = _enlarged(self.keys, keys, size, num_texts)
        self.values = _enlarged(self.values, values, size, num_texts)


def move(buffers: Sequence[SlotBuffer], source: Tensor, to: Tensor) -> None:
    """Copies slots [B, A] to slots [B, A] of every buffer."""
    for buffer in buffers:
        for held in (buffer.keys, buffer.values):
            assert held is not None
            texts, from_slots = _index(source, held)
            held[texts, :, to.to(held.device)] = held[texts, :, from_slots]


def reserved(num_slots: int) -> int:
    """Slots of a buffer that is made where so many are needed: an eighth more."""
    return rounded(num_slots + num_slots // 8)


def rounded(num_slots: int) -> int:
    """The next of the few numbers of slots that drafters read; every buffer has as many.

    Texts grow with each step, and oneDNN compiles a bfloat16 product anew for each new length.
    """
    return -(-num_slots // ROUND_TO) * ROUND_TO


def _enlarged(old: Tensor | None, like: Tensor, size: int, num_texts: int) -> Tensor:
    # Zeros: a masked slot still enters a product with weight 0, which NaN would survive.
    new = like.new_zeros(num_texts, like.shape[1], size, like.shape[3])
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new


def _kept(buffer: Tensor, rows: list[int]) -> Tensor:
    moved = [(to, row) for to, row in enumerate(rows) if to != row]
    if any(row < len(rows) for _, row in moved):
        return buffer[rows]
    # Rows from the end fill the gaps, so that the others stay where they are.
    for to, row in moved:
        buffer[to].copy_(buffer[row])
    return buffer[: len(rows)]


def _index(slots: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, 1] and slots [B, n] of a buffer; whole vectors move, unlike with `scatter`."""
    return _texts(len(slots), buffer.device), slots.to(buffer.device)


@cache
def _texts(num_texts: int, device: torch.device) -> Tensor:
    # Captured graphs read it where it is.
    return torch.arange(num_texts, device=device).unsqueeze(1)
