"""Pinned host memory of which little is wasted."""

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; of whatever a tensor holds."""


class PinnedBlocks:
    """Memory for tensors that a device writes to the host, one after the other.

    torch's allocator of pinned memory gives the next power of two bytes, up to twice what is asked
    for. So blocks of such sizes are asked for and cut in pieces; a block is free again when none of
    its tensors is held any more. What is left over of a block is less than the next tensor.

    Args:
        num_bytes: of all tensors that there will be; may be wrong.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and dtype that holds anything."""
        size = tensor.numel() * tensor.element_size()
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        if begin + size > len(self._block):
            # The largest that is sure to be filled, or as large as has to be.
            largest = 1 << max(0, self._left.bit_length() - 1)
            block_size = max(largest, 1 << max(0, size - 1).bit_length())
            self._block = torch.empty(block_size, dtype=torch.uint8, pin_memory=True)
            begin = 0
        self._used, self._left = begin + size, max(0, self._left - size)
        return self._block[begin : begin + size].view(tensor.dtype).view(tensor.shape)
