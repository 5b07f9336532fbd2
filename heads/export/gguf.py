"""GGUF files of llama.cpp: metadata and tensors in one file, version 3, little-endian.

Written here, because the `gguf` package (0.19) lacks the architectures `eagle3` and `dflash`.

Source: ggml `docs/gguf.md`. A string is its length as u64 and UTF-8; shapes have the fastest
dimension first, the reverse of torch's.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from conf.errors import InputError
from conf.files import write_atomically

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
ARRAY = 9


class Kind(IntEnum):
    """Types of metadata."""

    u8 = 0
    i8 = 1
    u16 = 2
    i16 = 3
    u32 = 4
    i32 = 5
    f32 = 6
    boolean = 7
    string = 8
    u64 = 10
    i64 = 11
    f64 = 12


LETTERS = dict(zip(Kind, "BbHhIif? Qqd", strict=True))
"""`struct` letter of each type, except strings."""
DTYPES = {0: torch.float32, 1: torch.float16, 27: torch.int64, 30: torch.bfloat16}
"""Types of tensors that are read and written; others are quantised or unused here."""
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Value:
    """Metadata value.

    Attributes:
        kind: type of the content, or of a list's elements.
        content: number, bool or string, or a list of them.
    """

    kind: Kind
    content: Any

    @classmethod
    def from_content(cls, content: Any) -> Self:
        """Make the value that llama.cpp expects: integers are u32, and i32 in a list."""
        plain = content[0] if isinstance(content, list) and content else content
        if isinstance(plain, bool):
            return cls(Kind.boolean, content)
        if isinstance(plain, int):
            return cls(Kind.i32 if isinstance(content, list) else Kind.u32, content)
        return cls(Kind.f32 if isinstance(plain, float) else Kind.string, content)


def write_gguf(file: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> None:
    """Write a file atomically.

    Args:
        file: path, replaced if it exists.
        metadata: values by key, including `general.architecture`.
        tensors: CPU tensors of a dtype in `DTYPES`.

    Raises:
        InputError: an empty list, which llama.cpp takes for damage.
    """
    header = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    header += [_encode_string(key) + _encode_value(key, value) for key, value in metadata.items()]
    start = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        header.append(_encode_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        header.append(struct.pack("<IQ", DTYPE_NUMBERS[tensor.dtype], start))
        start += tensor.nbytes + _compute_padding(tensor.nbytes)
    write_atomically(file, _iter_pieces(b"".join(header), tensors))


def _iter_pieces(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield header + bytes(_compute_padding(len(header)))
    for tensor in tensors.values():
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data
        yield bytes(_compute_padding(tensor.nbytes))


def _compute_padding(size: int) -> int:
    return -size % ALIGNMENT


def _encode_string(text: str) -> bytes:
    return struct.pack("<Q", len(encoded := text.encode())) + encoded


def _encode_value(key: str, value: Value) -> bytes:
    if not isinstance(value.content, list):
        return struct.pack("<I", value.kind) + _encode_scalars(value.kind, [value.content])
    if not value.content:
        raise InputError(f"{key}=[]: a GGUF file cannot hold an empty list; leave the key out")
    elements = _encode_scalars(value.kind, value.content)
    return struct.pack("<IIQ", ARRAY, value.kind, len(value.content)) + elements


def _encode_scalars(kind: Kind, contents: list[Any]) -> bytes:
    if kind is Kind.string:
        return b"".join(map(_encode_string, contents))
    return struct.pack(f"<{len(contents)}{LETTERS[kind]}", *contents)


class GgufFile:
    """GGUF file of which only the metadata and the table of tensors are read at first.

    Args:
        file: path of the file.
        key: setting that names it, for messages.

    Raises:
        InputError: no GGUF file, another version, or cut off.

    Attributes:
        metadata: values by key.
        table: type number, shape and offset of each tensor; offsets count from `start`.
        start: offset of the tensors in bytes.
    """

    def __init__(self, file: Path, key: str) -> None:
        self.file, self._what = file, f"{key}={file}"
        self.metadata: dict[str, Value] = {}
        self.table: dict[str, tuple[int, tuple[int, ...], int]] = {}
        try:
            with file.open("rb") as opened:
                self._read_header(opened)
        except (OSError, struct.error, UnicodeDecodeError, ValueError) as error:
            raise InputError(
                f"{self._what}: not a complete GGUF file: {error}; download or convert it again"
            ) from error

    def _read_header(self, opened: BinaryIO) -> None:
        num_bytes = self.file.stat().st_size

        def take(size: int) -> bytes:
            if size > num_bytes:  # a damaged file may state more than memory holds
                raise ValueError(f"it states {size} more bytes, but has {num_bytes}")
            return opened.read(size)

        def read(form: str) -> tuple[Any, ...]:
            return struct.unpack(f"<{form}", take(struct.calcsize(f"<{form}")))

        def string() -> str:
            return take(read("Q")[0]).decode()

        def scalars(kind: Kind, count: int) -> list[Any]:
            if kind is Kind.string:
                return [string() for _ in range(count)]
            return list(read(f"{count}{LETTERS[kind]}"))

        magic, (version,) = take(4), read("I")
        if magic != MAGIC or version not in (2, VERSION):
            raise ValueError(f"it begins with {magic!r} and version {version}, not {MAGIC!r} and 3")
        num_tensors, num_keys = read("QQ")
        for _ in range(num_keys):
            key, (kind,) = string(), read("I")
            if kind == ARRAY:
                kind, count = read("IQ")
                self.metadata[key] = Value(Kind(kind), scalars(Kind(kind), count))
            else:
                self.metadata[key] = Value(Kind(kind), scalars(Kind(kind), 1)[0])
        for _ in range(num_tensors):
            name, (rank,) = string(), read("I")
            *dims, number, start = read(f"{rank}QIQ")
            self.table[name] = number, tuple(reversed(dims)), start
        alignment = self.metadata.get("general.alignment", Value.from_content(ALIGNMENT)).content
        self.start = opened.tell() + -opened.tell() % alignment

    def load_tensors(self) -> dict[str, Tensor]:
        """Read all tensors to the CPU.

        Raises:
            InputError: a tensor is quantised, or lies beyond the end of the file.
        """
        return {name: self._load_tensor(name, *entry) for name, entry in self.table.items()}

    def _load_tensor(self, name: str, number: int, shape: tuple[int, ...], start: int) -> Tensor:
        dtype = DTYPES.get(number)
        if dtype is None:
            raise InputError(
                f"{self._what}: {name} has GGUF type {number}, which is quantised or unknown; "
                "allowed: F32, F16 and BF16, as `convert_hf_to_gguf.py --outtype f32` writes"
            )
        begin, count = self.start + start, math.prod(shape)
        if begin + count * dtype.itemsize > self.file.stat().st_size:
            raise InputError(
                f"{self._what}: cut off, as {name} lies beyond its end; download or convert it "
                "again"
            )
        with self.file.open("rb") as opened:
            opened.seek(begin)
            raw = bytearray(opened.read(count * dtype.itemsize))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)
