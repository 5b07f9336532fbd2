"""GGUF files as llama.cpp reads them: typed metadata, tensors, and required keys.

Source, read November 2026: llama.cpp b11434 `ggml/src/gguf.cpp`, `src/llama-model-loader.cpp`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, LIST = 8, 9
# Type numbers that llama.cpp requires.
REQUIRED_TYPES = {int: 4, float: 6, bool: 7, str: STRING}
DTYPES = {0: torch.float32, 1: torch.float16, 27: torch.int64, 30: torch.bfloat16}
OFFSETS = 32


@dataclass(frozen=True)
class Entry:
    """Metadata entry.

    Attributes:
        number: number of the value's type; for a list, of the elements' type.
        value: the value in Python.
    """

    number: int
    value: Any


class _Bytes:
    """Reader of bytes in their order."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.offset = content, 0

    def unpack_values(self, letters: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{letters}", self.content, self.offset)
        self.offset += struct.calcsize(f"<{letters}")
        return values

    def unpack_string(self) -> str:
        (size,) = self.unpack_values("Q")
        self.offset += size
        return bytes(self.content[self.offset - size : self.offset]).decode()

    def unpack_list(self, number: int, count: int) -> list[Any]:
        if number == STRING:
            return [self.unpack_string() for _ in range(count)]
        return list(self.unpack_values(f"{count}{SCALARS[number]}"))


def load_gguf(file: Path) -> tuple[dict[str, Entry], dict[str, Tensor]]:
    """Read metadata, and tensors in torch's order of dimensions.

    Raises:
        InputError: the file is no complete GGUF file of version 3, or has quantised tensors, NaN or
            infinity.
    """
    try:
        content = bytearray(file.read_bytes())
        reader = _Bytes(memoryview(content))
        if bytes(content[:8]) != b"GGUF\3\0\0\0":
            raise ValueError(f"it begins with {bytes(content[:8])!r}")
        reader.offset = 8
        num_tensors, num_entries = reader.unpack_values("QQ")
        entries = dict(_iter_entries(reader, num_entries))
        places = []
        for _ in range(num_tensors):
            name, (rank,) = reader.unpack_string(), reader.unpack_values("I")
            places.append(
                (name, reader.unpack_values(f"{rank}Q")[::-1], *reader.unpack_values("IQ"))
            )
        start = -(-reader.offset // OFFSETS) * OFFSETS
        tensors = {}
        for name, shape, number, offset in places:
            if offset % OFFSETS:
                raise ValueError(f"{name} lies at {offset}, no multiple of {OFFSETS}")
            flat = torch.frombuffer(
                content, dtype=DTYPES[number], count=torch.Size(shape).numel(),
                offset=start + offset,
            )  # fmt: skip
            tensors[name] = flat.reshape(shape)
    except (OSError, struct.error, ValueError, KeyError, OverflowError) as error:
        raise InputError(f"{file}: not a whole GGUF file of F32, F16 or BF16: {error}") from error
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{file}: {name}: has values that are NaN or infinite; export again")
    return entries, tensors


def _iter_entries(reader: _Bytes, count: int) -> Iterator[tuple[str, Entry]]:
    for _ in range(count):
        key, (number,) = reader.unpack_string(), reader.unpack_values("I")
        if number != LIST:
            yield key, Entry(number, reader.unpack_list(number, 1)[0])
            continue
        number, size = reader.unpack_values("IQ")
        yield key, Entry(number, reader.unpack_list(number, size))


class GgufMetadata:
    """Metadata of a head. A value that llama.cpp would guess is an error.

    Args:
        entries: all entries of the file.
        file: file name, for messages.
        arch: architecture, with which the keys begin.
    """

    def __init__(self, entries: dict[str, Entry], file: Path, arch: str) -> None:
        self._entries, self.file, self._arch = entries, file, arch

    def expand_key(self, key: str) -> str:
        """Return the full name of a key."""
        return key if key.startswith(("tokenizer.", "general.")) else f"{self._arch}.{key}"

    def get_value(self, key: str, kind: type, otherwise: Any) -> Any:
        """Return the value of a key, or llama.cpp's default.

        Args:
            key: name of the key; without `general` or `tokenizer`, of the architecture.
            kind: type of the value.
            otherwise: llama.cpp's default for a missing key.

        Raises:
            InputError: the value is of another type.
        """
        entry = self._entries.get(self.expand_key(key))
        if entry is None:
            return otherwise
        if entry.number != REQUIRED_TYPES[kind] or isinstance(entry.value, list):
            raise self.make_error(key, f"a value of type {kind.__name__} ({REQUIRED_TYPES[kind]})")
        return entry.value

    def require_key(self, key: str, kind: type, otherwise: str) -> Any:
        """Return the value of a required key; `otherwise` tells what llama.cpp does without it.

        Raises:
            InputError: the key is missing, or of another type.
        """
        value = self.get_value(key, kind, None)
        if value is None:
            raise self.make_missing_error(key, otherwise)
        return value

    def require_list(self, key: str, number: int, otherwise: str) -> list[Any]:
        """Return the list of a required key, with elements of one type.

        Raises:
            InputError: the key is missing, or of another type.
        """
        entry = self._entries.get(self.expand_key(key))
        if entry is None:
            raise self.make_missing_error(key, otherwise)
        if entry.number != number or not isinstance(entry.value, list):
            raise self.make_error(key, f"a list of type {number}")
        return entry.value

    def check_equal(self, key: str, expected: Any, why: str, otherwise: str) -> None:
        """Check a key that must have one value.

        Raises:
            InputError: the key is missing, or has another value.
        """
        if self.require_key(key, type(expected), otherwise) != expected:
            raise self.make_error(key, f"{expected!r}, {why}")

    def make_missing_error(self, key: str, otherwise: str) -> InputError:
        """Make an error about a missing key."""
        return InputError(
            f"{self.file}: no {self.expand_key(key)}: without it llama.cpp {otherwise}"
        )

    def make_error(self, key: str, needed: str) -> InputError:
        """Make an error about the value of a key."""
        found = self._entries[self.expand_key(key)].value
        return InputError(
            f"{self.file}: {self.expand_key(key)} is {found!r}: llama.cpp needs {needed}"
        )
