"""Writes the shards of a feature store, beside the computation that fills them."""

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
from conf.files import retried, write_whole
from data.features.format import SUFFIX, Field, ShardIndex, checksum, memory_of

SHARD_BYTES = 512 * 2**20
NUM_WRITERS = 2
NUM_BATCHES_COPIED = 2
ALIGNMENT = 64
"""Bytes, of each tensor in a pinned block."""
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
    """Sequences `first` to `last` - 1 of a split, which go into one file; how many tokens."""

    name: str
    split: str
    first: int
    last: int
    num_tokens: int


def plan_shards(
    split: str, lengths: Sequence[int], bytes_per_token: int, shard_bytes: int = SHARD_BYTES
) -> list[PlannedShard]:
    """Cuts a split into shards of at most `shard_bytes`, or of one longer sequence.

    Args:
        split: its name.
        lengths: tokens of each sequence.
        bytes_per_token: that are stored.
        shard_bytes: at most.
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
    folder: Path, name: str, fields: Sequence[Field], sequences: Sequence[Mapping[str, Tensor]]
) -> ShardIndex:
    """Writes a shard and then its index, again where the file system failed for a moment.

    Args:
        folder: of the store.
        name: of the shard, without an ending.
        fields: the tensors, in the order of the file.
        sequences: each with [n, ...] tensors on the CPU.

    Raises:
        InputError: it cannot be written, the disk is full; nothing of it is left.
    """
    try:
        return retried(partial(_write_shard, folder, name, fields, sequences))
    except OSError as error:
        raise InputError(
            f"out_dir={folder}: cannot write {name}: {error.strerror}. The shards that are "
            "whole are kept: free space or mend the folder, and start again to continue"
        ) from error


def _write_shard(
    folder: Path, name: str, fields: Sequence[Field], sequences: Sequence[Mapping[str, Tensor]]
) -> ShardIndex:
    num_tokens = [len(sequence[fields[0].name]) for sequence in sequences]
    checksums = [
        checksum(memory_of(sequence[field.name]) for field in fields) for sequence in sequences
    ]
    parts: Iterable[bytes | memoryview] = chain(
        [_header(fields, sum(num_tokens))],
        (memory_of(sequence[field.name]) for field in fields for sequence in sequences),
    )
    path = folder / f"{name}{SUFFIX}"
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
    write_whole(folder / f"{name}.json", json.dumps(asdict(index)) + "\n")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # names of new files too must be on disk
    finally:
        os.close(descriptor)
    return index


def _header(fields: Sequence[Field], num_tokens: int) -> bytes:
    """The length of safetensors' JSON header in 8 bytes, and the header, padded to whole 8."""
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


class Writers:
    """Threads that write, few at a time; what one raises, the next call raises.

    As a context manager it waits for all of them at the end.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_WRITERS)
        self._pending: set[Future[None]] = set()

    def submit(self, job: Callable[[], None]) -> None:
        """Starts a job, once fewer than `NUM_WRITERS` are at work."""
        while len(self._pending) >= NUM_WRITERS:
            wait(self._pending, return_when=FIRST_COMPLETED)
            self.check()
        self._pending.add(self._pool.submit(job))

    def check(self) -> None:
        """Raises what a job has raised by now."""
        ended = {future for future in self._pending if future.done()}
        self._pending -= ended
        for future in ended:
            future.result()

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            self.check()


@dataclass(frozen=True)
class Copied:
    """Tensors in host memory, once `ready`; at once if that is unset."""

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None

    def wait(self) -> dict[str, Tensor]:
        """The tensors, there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensors


class Copies:
    """Brings tensors to host memory beside the computation, on a stream of its own.

    A program that runs ahead of its GPU would fill it, so copies under way are bounded: by those
    of `NUM_BATCHES_COPIED` batches, or the last ones of a batch would wait for its first.

    Args:
        device: where tensors come from.
        batch_size: copies of a batch.
        num_bytes: of all tensors that there will be, about.
    """

    def __init__(self, device: torch.device, batch_size: int, num_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._max_under_way = NUM_BATCHES_COPIED * batch_size
        self._blocks = PinnedBlocks(num_bytes)
        self._under_way: deque[torch.cuda.Event] = deque()

    def take(self, tensors: Mapping[str, Tensor]) -> Copied:
        """Starts a copy of tensors that lie on the device; those of the CPU stay."""
        if self._stream is None:
            return Copied(dict(tensors), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            host = {name: self._copy(tensor) for name, tensor in tensors.items()}
            ready = torch.cuda.Event()
            ready.record()
        self._under_way.append(ready)
        if len(self._under_way) > self._max_under_way:
            self._under_way.popleft().synchronize()
        return Copied(host, ready)

    def _copy(self, tensor: Tensor) -> Tensor:
        # The allocator may not give this memory away before the copy is through.
        tensor.record_stream(self._stream)  # type: ignore[arg-type]
        return self._blocks.like(tensor).copy_(tensor, non_blocking=True)


class PinnedBlocks:
    """Pinned memory for tensors that a device writes to the host, one after the other.

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
