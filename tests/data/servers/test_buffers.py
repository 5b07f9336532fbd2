"""Memory that is used again."""

import gc

import numpy as np
import torch

from data.servers.state_files import MIN_KEPT_BYTES, BufferPool

MB = 1 << 20


def place(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_comes_back_once_no_tensor_is_in_it() -> None:
    buffers = BufferPool()
    array = buffers.allocate_bytes(10 * MB)
    array[:] = 7
    first, tensor = place(array), torch.frombuffer(array, dtype=torch.int16, offset=4, count=1000)
    part = tensor.view(10, 100)[:, 3]
    del array, tensor
    other = buffers.allocate_bytes(10 * MB)
    assert place(other) != first
    assert part.tolist() == [0x0707] * 10
    del part
    again, third = buffers.allocate_bytes(10 * MB), buffers.allocate_bytes(10 * MB)
    assert place(again) == first
    assert place(third) not in (first, place(other))


def test_memory_fits_what_is_a_little_smaller_or_larger() -> None:
    buffers = BufferPool()
    first = place(buffers.allocate_bytes(9 * MB + 1))
    assert place(buffers.allocate_bytes(10 * MB)) == first
    assert place(buffers.allocate_bytes(8 * MB + 1)) == first
    smaller = buffers.allocate_bytes(6 * MB)
    assert place(smaller) != first
    assert len(smaller) == 6 * MB


def test_no_more_is_kept_than_was_in_use() -> None:
    buffers, sizes = BufferPool(), [3, 20, 7, 50, 11, 33, 5]
    for size in sizes * 3:
        del_me = buffers.allocate_bytes(size * MB)
        del del_me
        assert sum(map(len, buffers._free)) <= 1.25 * (50 + 33) * MB
    held = [buffers.allocate_bytes(8 * MB) for _ in range(5)]
    del held
    gc.collect()
    kept = sum(len(block) == 8 * MB for block in buffers._free)
    assert kept == 5


def test_a_little_memory_is_not_kept() -> None:
    buffers = BufferPool()
    assert len(buffers.allocate_bytes(MIN_KEPT_BYTES - 1)) == MIN_KEPT_BYTES - 1
    assert buffers._free == []
    assert len(buffers.allocate_bytes(0)) == 0
