"""Memory for data from servers, reused once no tensor needs it."""

import mmap
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

SMALL = 1 << 20
"""Bytes below which memory is not kept."""
STEPS = 4
"""Sizes of kept memory between two powers of two."""


class BufferPool:
    """Memory of a process that reads much and holds little.

    The kernel clears new pages, which takes several times as long as reading into old ones. Keeps
    as much memory as was in use at once.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # threads take and return memory; each operation is atomic

    def allocate_bytes(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Uninitialised memory; returned once the array and all views of it are gone.

        Args:
            num_bytes: size of the array.
        """
        if num_bytes < SMALL:
            return np.empty(num_bytes, np.uint8)
        step = (1 << num_bytes.bit_length() - 1) // STEPS
        size = -(-num_bytes // step) * step
        block = self._take_free_block(size) or self._make_block(size)
        array = np.frombuffer(block, np.uint8, num_bytes)
        weakref.finalize(array, self._free.append, block).atexit = False
        return array

    def _take_free_block(self, size: int) -> mmap.mmap | None:
        for block in [*self._free]:
            if size <= len(block) <= size + size // STEPS:
                with suppress(ValueError):  # another thread took it first
                    self._free.remove(block)
                    return block
        return None

    def _make_block(self, size: int) -> mmap.mmap:
        """New memory, instead of kept memory of the same size that does not fit."""
        dropped = 0
        while self._free and dropped < size:
            with suppress(IndexError):
                dropped += len(self._free.pop(0))
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
