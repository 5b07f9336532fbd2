"""Writer of feature-store shards, in parallel with the computation."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from conf.errors import InputError
from conf.files import SAFETENSORS_SUFFIX, compute_checksum, retry_io, write_atomically
from data.features.store_format import ShardIndex, TensorSpec, memory_of

SHARD_BYTES = 512 * 2**20
NUM_WRITERS = 2
NUM_BATCHES_COPIED = 2
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
    """Sequences `first` to `last` - 1 of a split for one file, with their number of tokens."""

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
    begins: list[int] = []
    num_tokens = 0
    for number, length in enumerate(lengths):
        if not begins or (num_tokens + length) * bytes_per_token > shard_bytes:
            begins.append(number)
            num_tokens = 0
        num_tokens += length
    return [
        PlannedShard(f"{split}-{number:05}", split, first, last, sum(lengths[first:last]))
        for number, (first, last) in enumerate(pairwise([*begins, len(lengths)]))
    ]


def write_shard(
    folder: Path, name: str, fields: Sequence[TensorSpec], sequences: Sequence[Mapping[str, Tensor]]
) -> ShardIndex:
    """Write a shard and then its index; retry if the file system fails briefly.

    Args:
        folder: folder of the store.
        name: name of the shard, without ending.
        fields: tensors in file order.
        sequences: tensors [n, ...] on the CPU of each sequence.

    Raises:
        InputError: the shard cannot be written, e.g. on a full disk. Nothing of it is left.
    """
    try:
        return retry_io(partial(_write_shard, folder, name, fields, sequences))
    except OSError as error:
        raise InputError(
            f"out_dir={folder}: cannot write {name}: {error.strerror}; whole shards are kept. Free "
            "space or mend the folder, and start again to continue"
        ) from error


def _write_shard(
    folder: Path, name: str, fields: Sequence[TensorSpec], sequences: Sequence[Mapping[str, Tensor]]
) -> ShardIndex:
    num_tokens = [len(sequence[fields[0].name]) for sequence in sequences]
    checksums = [
        compute_checksum(memory_of(sequence[field.name]) for field in fields)
        for sequence in sequences
    ]
    parts: Iterable[bytes | memoryview] = chain(
        [_build_header(fields, sum(num_tokens))],
        (memory_of(sequence[field.name]) for field in fields for sequence in sequences),
    )
    path = folder / f"{name}{SAFETENSORS_SUFFIX}"
    temporary = path.with_name(path.name + ".tmp")
    digest = xxhash.xxh3_64()
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    index = ShardIndex(num_tokens, checksums, size, digest.hexdigest())
    write_atomically(folder / f"{name}.json", json.dumps(asdict(index)) + "\n")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # makes the names of new files durable too
    finally:
        os.close(descriptor)
    return index


def _build_header(fields: Sequence[TensorSpec], num_tokens: int) -> bytes:
    """Length of safetensors' JSON header in 8 bytes, and the header, padded to a multiple of 8."""
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


class ShardWriterPool:
    """Few threads that write. An error of one is raised by the next call.

    As a context manager it waits for all of them at the end.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_WRITERS)
        self._pending: set[Future[None]] = set()

    def submit_job(self, job: Callable[[], None]) -> None:
        """Start a job once fewer than `NUM_WRITERS` are running."""
        while len(self._pending) >= NUM_WRITERS:
            wait(self._pending, return_when=FIRST_COMPLETED)
            self.raise_job_error()
        self._pending.add(self._pool.submit(job))

    def raise_job_error(self) -> None:
        """Raise the error of a finished job, if any."""
        ended = {future for future in self._pending if future.done()}
        self._pending -= ended
        for future in ended:
            future.result()

    def __enter__(self) -> "ShardWriterPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            self.raise_job_error()


@dataclass(frozen=True)
class HostCopy:
    """Tensors in host memory, complete once `ready`; without `ready`, complete at once."""

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None

    def wait_for_tensors(self) -> dict[str, Tensor]:
        """Wait for the tensors and return them."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensors


class HostCopier:
    """Copies tensors to host memory on a stream beside the computation.

    Copies in flight are bounded to `NUM_BATCHES_COPIED` batches, as a program running ahead of its
    GPU would fill the memory.

    Args:
        device: device of the tensors.
        batch_size: copies per batch.
        num_bytes: approximate bytes of all tensors to come.
    """

    def __init__(self, device: torch.device, batch_size: int, num_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._max_under_way = NUM_BATCHES_COPIED * batch_size
        self._blocks = PinnedBlocks(num_bytes)
        self._under_way: deque[torch.cuda.Event] = deque()

    def start_copy(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Start copying tensors from the device. CPU tensors stay."""
        if self._stream is None:
            return HostCopy(dict(tensors), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            host = {name: self._copy_to_host(tensor) for name, tensor in tensors.items()}
            ready = torch.cuda.Event()
            ready.record()
        self._under_way.append(ready)
        if len(self._under_way) > self._max_under_way:
            self._under_way.popleft().synchronize()
        return HostCopy(host, ready)

    def _copy_to_host(self, tensor: Tensor) -> Tensor:
        # Keeps the allocator from reusing this memory before the copy ends.
        tensor.record_stream(self._stream)  # type: ignore[arg-type]
        return self._blocks.allocate_like(tensor).copy_(tensor, non_blocking=True)


class PinnedBlocks:
    """Pinned memory for tensors that a device writes to the host, one after another.

    torch's pinned allocator rounds up to the next power of two, up to twice the size. Blocks of
    such sizes are therefore requested and cut into pieces. A block is free once none of its tensors
    is held. Each block leaves less unused than the next tensor needs.

    Args:
        num_bytes: estimated bytes of all tensors to come.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised tensor of the same shape and dtype."""
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
