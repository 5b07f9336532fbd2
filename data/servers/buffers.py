"""Memory for what is read from servers, used again once nobody has a tensor in it."""

import mmap
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

SMALL = 1 << 20
"""Bytes below which memory is not kept."""
STEPS = 4
"""Sizes of kept memory between one power of two and the next."""


class Buffers:
    """Memory of processes that read much and hold little.

    The kernel clears new pages, which takes several times as long as reading into old ones. As much
    is kept as was in use at once.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # threads take and give back; each change is one step

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory, with anything in it; given back when the array and all that shares it are gone.

        Args:
            num_bytes: of the array.
        """
        if num_bytes < SMALL:
            return np.empty(num_bytes, np.uint8)
        step = (1 << num_bytes.bit_length() - 1) // STEPS
        size = -(-num_bytes // step) * step
        block = self._kept(size) or self._new(size)
        array = np.frombuffer(block, np.uint8, num_bytes)
        weakref.finalize(array, self._free.append, block).atexit = False
        return array

    def _kept(self, size: int) -> mmap.mmap | None:
        for block in [*self._free]:
            if size <= len(block) <= size + size // STEPS:
                with suppress(ValueError):  # another thread was faster
                    self._free.remove(block)
                    return block
        return None

    def _new(self, size: int) -> mmap.mmap:
        """New memory, in place of as much that is kept and does not fit."""
        dropped = 0
        while self._free and dropped < size:
            with suppress(IndexError):
                dropped += len(self._free.pop(0))
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
