"""Writer of feature-store shards, beside the computation of the hidden states.

A device copies tensors to pinned host memory on a stream of its own, and threads write the shards.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError
from conf.files import SAFETENSORS_SUFFIX, compute_checksum, retry_io, write_atomically
from data.features.store_format import ShardIndex, TensorSpec, memory_of

SHARD_BYTES = 512 * 2**20
NUM_WRITERS = 2
"""Threads that write shards."""
NUM_BATCHES_COPIED = 2
"""Largest number of batches that are being copied to the host."""
ALIGNMENT = 64
"""Bytes of alignment of each tensor in a pinned block."""
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@dataclass(frozen=True)
class PlannedShard:
    """Sequences `first` to `last` - 1 of a split, which one file will hold.

    Attributes:
        name: name of the shard's files, without endings.
        split: name of the split.
        first: number of the first sequence.
        last: number of the sequence after the last one.
        num_tokens: tokens of all these sequences.
    """

    name: str
    split: str
    first: int
    last: int
    num_tokens: int


def plan_shards(
    split: str, lengths: Sequence[int], bytes_per_token: int, shard_bytes: int = SHARD_BYTES
) -> list[PlannedShard]:
    """Divide a split into shards of at most `shard_bytes`, or of one larger sequence.

    Args:
        split: name of the split.
        lengths: tokens of each sequence.
        bytes_per_token: stored bytes per token.
        shard_bytes: largest size of a shard.
    """
    starts: list[int] = []
    num_tokens = 0
    for number, length in enumerate(lengths):
        if not starts or (num_tokens + length) * bytes_per_token > shard_bytes:
            starts.append(number)
            num_tokens = 0
        num_tokens += length
    return [
        PlannedShard(f"{split}-{number:05}", split, first, last, sum(lengths[first:last]))
        for number, (first, last) in enumerate(pairwise([*starts, len(lengths)]))
    ]


def write_shard(
    folder: Path, name: str, fields: Sequence[TensorSpec], sequences: Sequence[Mapping[str, Tensor]]
) -> ShardIndex:
    """Write a shard and then its index; retry if the file system fails briefly.

    Args:
        folder: folder of the store.
        name: name of the shard, without ending.
        fields: tensors in file order.
        sequences: for each sequence, its tensors [n, ...] on the CPU by name.

    Raises:
        InputError: the shard cannot be written, e.g. on a full disk. Nothing of it is left.
    """
    num_tokens = [len(sequence[fields[0].name]) for sequence in sequences]
    checksums = [
        compute_checksum(memory_of(sequence[field.name]) for field in fields)
        for sequence in sequences
    ]
    path = folder / f"{name}{SAFETENSORS_SUFFIX}"
    parts: list[bytes | memoryview] = [
        _build_header(fields, sum(num_tokens)),
        *(memory_of(sequence[field.name]) for field in fields for sequence in sequences),
    ]

    def write_files() -> ShardIndex:
        write_atomically(path, parts)
        index = ShardIndex(num_tokens, checksums, path.stat().st_size, compute_checksum(parts))
        write_atomically(folder / f"{name}.json", json.dumps(asdict(index)) + "\n")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # makes the names of new files durable too
        finally:
            os.close(descriptor)
        return index

    try:
        return retry_io(write_files)
    except OSError as error:
        raise InputError(
            f"out_dir={folder}: cannot write {name}: {error.strerror}; whole shards are kept. Free "
            "space or mend the folder, and start again to continue"
        ) from error


def _build_header(fields: Sequence[TensorSpec], num_tokens: int) -> bytes:
    """Build the start of a safetensors file.

    It is the length of the JSON header in 8 bytes, and the header, padded to a multiple of 8.
    """
    entries, end = {}, 0
    for field in fields:
        begin, end = end, end + num_tokens * field.num_bytes
        entries[field.name] = {
            "dtype": SAFETENSORS_NAMES[field.dtype],
            "shape": [num_tokens, *field.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ShardWriterPool(ThreadPoolExecutor):
    """Pool of threads that write. The error of a job is raised by the next call.

    At its end the pool waits for all jobs.
    """

    def __init__(self) -> None:
        super().__init__(NUM_WRITERS)
        self._pending: set[Future[None]] = set()

    def submit_job(self, job: Callable[[], None]) -> None:
        """Start a job once fewer than `NUM_WRITERS` jobs are running."""
        while len(self._pending) >= NUM_WRITERS:
            wait(self._pending, return_when=FIRST_COMPLETED)
            self.raise_job_error()
        self._pending.add(self.submit(job))

    def raise_job_error(self) -> None:
        """Raise the error of a finished job, if any."""
        ended = {future for future in self._pending if future.done()}
        self._pending -= ended
        for future in ended:
            future.result()

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            self.raise_job_error()


class HostCopier:
    """Copier of tensors to host memory, on a stream beside the computation.

    At most `NUM_BATCHES_COPIED` batches are in flight, as a program that runs ahead of its GPU
    would fill the memory. torch's pinned allocator rounds sizes up to the next power of two, up to
    twice the size, so tensors are pieces of blocks of such sizes. A block is free once none of its
    tensors lives. The unused rest of a block is smaller than the next tensor.

    Args:
        device: device of the tensors.
        batch_size: number of copies per batch.
        num_bytes: approximate bytes of all tensors to come.
    """

    def __init__(self, device: torch.device, batch_size: int, num_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._max_in_flight = NUM_BATCHES_COPIED * batch_size
        self._left, self._used = num_bytes, 0
        self._block = torch.empty(0, dtype=torch.uint8)
        self._in_flight: deque[torch.cuda.Event] = deque()

    def start_copy(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Start copying tensors of the device to the host. Tensors of a CPU are not copied.

        Returns:
            Function that waits for the tensors in host memory, and returns them by name.
        """
        if self._stream is None:
            return lambda: dict(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            host = {name: self._copy_to_host(tensor) for name, tensor in tensors.items()}
            ready = torch.cuda.Event()
            ready.record()
        self._in_flight.append(ready)
        if len(self._in_flight) > self._max_in_flight:
            self._in_flight.popleft().synchronize()

        def wait_for_tensors() -> dict[str, Tensor]:
            ready.synchronize()
            return host

        return wait_for_tensors

    def _copy_to_host(self, tensor: Tensor) -> Tensor:
        # Keeps the allocator from reusing this memory before the copy ends.
        tensor.record_stream(self._stream)  # type: ignore[arg-type]
        return self._allocate_like(tensor).copy_(tensor, non_blocking=True)

    def _allocate_like(self, tensor: Tensor) -> Tensor:
        """Allocate an uninitialised pinned tensor with the shape and dtype of another."""
        size = tensor.numel() * tensor.element_size()
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        if begin + size > len(self._block):
            # The largest block that will surely be filled, or else the smallest that fits.
            largest = 1 << max(0, self._left.bit_length() - 1)
            block_size = max(largest, 1 << max(0, size - 1).bit_length())
            self._block = torch.empty(block_size, dtype=torch.uint8, pin_memory=True)
            begin = 0
        self._used, self._left = begin + size, max(0, self._left - size)
        return self._block[begin : begin + size].view(tensor.dtype).view(tensor.shape)
