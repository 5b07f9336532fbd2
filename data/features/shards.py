"""One file of a feature store: sequences one behind the other, and an index with checksums.

A shard is a safetensors file of tensors [S, ...], S the tokens of all its sequences without
padding. Its index, JSON beside it, is written after it: a shard with an index is whole.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from conf.errors import InputError
from conf.files import retried, write_whole
from data.features.layout import Field

SUFFIX = ".safetensors"
READ_BYTES = 1 << 24
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
class ShardIndex:
    """What a shard holds.

    Attributes:
        num_tokens: of each sequence.
        checksums: xxh3_64 of each sequence's bytes, over its tensors in the order of the file.
        size: bytes of the file.
        checksum: xxh3_64 of the file.
    """

    num_tokens: list[int]
    checksums: list[str]
    size: int
    checksum: str

    @classmethod
    def read(cls, folder: Path, name: str) -> "ShardIndex":
        """The index of a shard.

        Raises:
            InputError: there is none, or it is damaged.
        """
        path = folder / f"{name}.json"
        try:
            return cls(**json.loads(retried(path.read_text)))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path}: missing or damaged ({error}); {repair(folder)}") from error

    @cached_property
    def starts(self) -> list[int]:
        """Tokens before each sequence, and at the end those of all."""
        return list(accumulate(self.num_tokens, initial=0))


def repair(folder: Path) -> str:
    """What to do about a store that is not whole."""
    again = f"start scripts/capture.py with out_dir={folder} again"
    return f"{again}, which writes what is missing or damaged"


def write_shard(
    folder: Path, name: str, fields: Sequence[Field], sequences: Sequence[Mapping[str, Tensor]]
) -> ShardIndex:
    """Writes a shard and then its index, each to a temporary name that is moved into place.

    Args:
        folder: of the store.
        name: of the shard, without an ending.
        fields: the tensors, in the order of the file.
        sequences: each with [n, ...] tensors on the CPU.

    Raises:
        OSError: nothing of the shard is left.
    """
    num_tokens = [len(sequence[fields[0].name]) for sequence in sequences]
    checksums = [_checksum(_bytes(each[field.name]) for field in fields) for each in sequences]
    parts: Iterable[bytes | memoryview] = chain(
        [_header(fields, sum(num_tokens))],
        (_bytes(each[field.name]) for field in fields for each in sequences),
    )
    path = folder / f"{name}{SUFFIX}"
    temporary = path.with_name(path.name + ".tmp")
    whole = xxhash.xxh3_64()
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
                whole.update(part)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    index = ShardIndex(num_tokens, checksums, size, whole.hexdigest())
    write_whole(folder / f"{name}.json", json.dumps(asdict(index)) + "\n")
    _sync(folder)
    return index


def read_sequence(
    path: Path, fields: Sequence[Field], index: ShardIndex, number: int, room: int
) -> dict[str, Tensor]:
    """Tensors [room, ...] of a sequence, zero behind its tokens; their checksum is verified.

    Read, not memory-mapped: a file that has gone or shrunk must be an error, not a signal that
    ends the process.

    Args:
        path: of the shard.
        fields: its tensors, in the order of the file.
        index: its index.
        number: of the sequence in the shard.
        room: tokens, no fewer than the sequence has.

    Raises:
        InputError: the file is missing or too short, or a byte is not what was written.
    """
    try:
        return retried(partial(_read, path, fields, index, number, room))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; {repair(path.parent)}") from error


def is_whole(folder: Path, name: str) -> bool:
    """Whether every byte of a shard is what its index says."""
    try:
        index = ShardIndex.read(folder, name)
        path = folder / f"{name}{SUFFIX}"
        same = path.stat().st_size == index.size
        return same and retried(partial(file_checksum, path)) == index.checksum
    except (InputError, FileNotFoundError):
        return False


def file_checksum(path: Path) -> str:
    """xxh3_64 of a file."""
    with path.open("rb") as file:
        return _checksum(iter(partial(file.read, READ_BYTES), b""))


def _read(
    path: Path, fields: Sequence[Field], index: ShardIndex, number: int, room: int
) -> dict[str, Tensor]:
    first, num_tokens, total = index.starts[number], index.num_tokens[number], index.starts[-1]
    # The header, of no interest here, is what stands before the tensors.
    offset = index.size - total * sum(field.num_bytes for field in fields)
    found, digest = {}, xxhash.xxh3_64()
    with path.open("rb") as file:
        for field in fields:
            tensor = torch.zeros(room, *field.shape, dtype=field.dtype)
            room_bytes = _bytes(tensor)[: num_tokens * field.num_bytes]
            file.seek(offset + first * field.num_bytes)
            if file.readinto(room_bytes) != len(room_bytes):
                raise InputError(f"{path}: sequence {number} is cut off; {repair(path.parent)}")
            digest.update(room_bytes)
            offset += total * field.num_bytes
            found[field.name] = tensor
    if digest.hexdigest() != index.checksums[number]:
        raise InputError(
            f"{path}: the bytes of sequence {number} are not those that were written (checksum "
            f"{digest.hexdigest()}, not {index.checksums[number]}); {repair(path.parent)}"
        )
    return found


def _header(fields: Sequence[Field], num_tokens: int) -> bytes:
    """The length of the JSON header in 8 bytes, and the header, filled up to whole 8 bytes."""
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


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; numpy knows neither bfloat16 nor float8."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _checksum(parts: Iterable[bytes | memoryview]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Puts the names of new files on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
