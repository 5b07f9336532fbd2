"""GGUF files as llama.cpp reads them: typed metadata, tensors, and required keys.

Source, read November 2026: llama.cpp b11434 `ggml/src/gguf.cpp`, `src/llama-model-loader.cpp`.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.engine_config import EngineConfig

SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Letters of `struct` by the numbers of types."""
STRING, LIST = 8, 9
# Type numbers that llama.cpp requires.
REQUIRED_TYPES = {int: 4, float: 6, bool: 7, str: STRING}
DTYPES = {0: torch.float32, 1: torch.float16, 27: torch.int64, 30: torch.bfloat16}
OFFSETS = 32
SHARED = ("tokenizer.", "general.")
"""Beginnings of the keys of every architecture."""


class Entry(NamedTuple):
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
        InputError: the file is no complete GGUF file of version 3, or has quantised tensors.
    """
    try:
        content = bytearray(file.read_bytes())
        reader = _Bytes(memoryview(content))
        if bytes(content[:8]) != b"GGUF\3\0\0\0":
            raise ValueError(f"it begins with {bytes(content[:8])!r}")
        reader.offset = 8
        num_tensors, num_entries = reader.unpack_values("QQ")
        entries, places = dict[str, Entry](), []
        for _ in range(num_entries):
            key, (number,) = reader.unpack_string(), reader.unpack_values("I")
            if number == LIST:
                number, size = reader.unpack_values("IQ")
                entries[key] = Entry(number, reader.unpack_list(number, size))
            else:
                entries[key] = Entry(number, reader.unpack_list(number, 1)[0])
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
    return entries, tensors


class GgufMetadata(EngineConfig):
    """Metadata of a head; its keys lack the architecture that they begin with.

    Args:
        entries: all entries of the file.
        file: file name, for messages.
        arch: architecture, with which the keys begin.
    """

    def __init__(self, entries: dict[str, Entry], file: Path, arch: str) -> None:
        prefix = f"{arch}."
        own = {k.removeprefix(prefix): e for k, e in entries.items() if k.startswith(prefix)}
        shared = {k: e for k, e in entries.items() if k.startswith(SHARED)}
        self._entries = own | shared
        values = {key: entry.value for key, entry in self._entries.items()}
        super().__init__(values, file, "llama.cpp", prefix)

    def format_key(self, key: str) -> str:
        """Format a key with its architecture, if it belongs to one."""
        return key if key.startswith(SHARED) else super().format_key(key)

    def check_type(self, key: str, kind: type) -> None:
        """Check that a value has the one type that llama.cpp reads.

        Raises:
            InputError: the value is of another type.
        """
        number, value = self._entries[key]
        if number != REQUIRED_TYPES[kind] or isinstance(value, list):
            raise self.make_error(key, f"a value of type {kind.__name__} ({REQUIRED_TYPES[kind]})")

    def get_value(self, key: str, kind: type, otherwise: Any) -> Any:
        """Return the value of a key, or llama.cpp's default for a missing one.

        Raises:
            InputError: the value is of another type.
        """
        return self.require_key(key, kind, "") if key in self.values else otherwise

    def require_list(self, key: str, number: int, otherwise: str) -> list[Any]:
        """Return the list of a required key, with elements of one type.

        Raises:
            InputError: the key is missing, or of another type.
        """
        if key not in self.values:
            raise self.make_missing_error(key, list, otherwise)
        found, value = self._entries[key]
        if found != number or not isinstance(value, list):
            raise self.make_error(key, f"a list of type {number}")
        return value

    def make_missing_error(self, key: str, kind: type, otherwise: str) -> InputError:
        """Make an error about a missing key."""
        del kind
        return InputError(
            f"{self.file}: no {self.format_key(key)}: without it llama.cpp {otherwise}"
        )
