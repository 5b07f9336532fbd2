"""Format of a feature store: packed sequences with the target's hidden states or predictions.

`scripts/capture.py` writes a store; `data.features=DIR` trains from it without the target:

    capture.json                `StorePlan`, the content to expect; written first
    train-00000.safetensors     a shard: sequences of a split, concatenated
    train-00000.json            `ShardIndex`, written after its shard, which is then whole
    target/ends.safetensors     the target's embedding and output head
    token_counts.safetensors    [V] int64 by split: count of each id among the learnt tokens
    manifest.json               `Manifest`, written last; the store is then whole

A shard has these tensors [S, ...], for S tokens of all its sequences without padding:

    input_ids, document_ids     [S] int32, and loss_mask [S] bool; documents give the positions
    hidden_states, layers.{i}   [S, D] in `format`; `<name>.scale` [S] float32 beside one-byte ones
    teacher.ids                 [S, k] int32, and teacher.log_probs [S, k] float16, over the whole
                                vocabulary: instead of hidden_states with `teacher=top_k`

D hidden, k teacher tokens, V vocabulary.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from conf.errors import InputError
from conf.files import retry_io
from conf.settings.data import StateFormat, TeacherKind

VERSION = 1
PLAN, MANIFEST = "capture.json", "manifest.json"
EMBEDDINGS_AND_HEAD, TOKEN_COUNTS = "target/ends.safetensors", "token_counts.safetensors"
SAFETENSORS_SUFFIX = ".safetensors"
SPLITS = ("train", "heldout", "replay")
"""Splits. `replay` holds held-out prompts with the target's answers, which are learnt; not
packed."""

HIDDEN_STATES = "hidden_states"
LAYER_PREFIX = "layers."
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher.ids", "teacher.log_probs"
SCALE = ".scale"
NO_PROBABILITY = torch.finfo(torch.float16).min
"""Log-probability where the teacher has no prediction; its exponential is 0."""
DTYPES = {
    StateFormat.bf16: torch.bfloat16,
    StateFormat.fp8: torch.float8_e4m3fn,
    StateFormat.int8: torch.int8,
}
LARGEST = {StateFormat.fp8: 448.0, StateFormat.int8: 127.0}
"""Value to which a token's largest magnitude is scaled."""
READ_BYTES = 1 << 24


@dataclass(frozen=True)
class TensorSpec:
    """Tensor of a shard, with the shape of one token."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes per token."""
        return self.dtype.itemsize * prod(self.shape)


TOKEN_FIELDS = (
    TensorSpec("input_ids", torch.int32),
    TensorSpec("document_ids", torch.int32),
    TensorSpec("loss_mask", torch.bool),
)


@dataclass(frozen=True)
class StoreContents:
    """Parts of the target's forward pass that a store keeps.

    Attributes:
        hidden_size: D.
        layers: tapped layers, as indices of `output_hidden_states`.
        teacher: the last hidden state, or the likeliest tokens.
        top_k: number k of stored tokens; 0 with a hidden teacher.
        format: format of the hidden states.
    """

    hidden_size: int
    layers: tuple[int, ...]
    teacher: TeacherKind
    top_k: int
    format: StateFormat

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StoreContents":
        """Read contents from the JSON of `conf.command.run_record.plain`."""
        enums = {"teacher": TeacherKind(stored["teacher"]), "format": StateFormat(stored["format"])}
        return cls(**{**stored, **enums, "layers": tuple(stored["layers"])})

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the hidden states."""
        last = (HIDDEN_STATES,) if self.teacher is TeacherKind.hidden else ()
        return *last, *(f"{LAYER_PREFIX}{index}" for index in self.layers)

    @property
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """All tensors, wide dtypes first, so that each is aligned."""
        fields = list(TOKEN_FIELDS)
        for name in self.state_names:
            fields.append(TensorSpec(name, DTYPES[self.format], (self.hidden_size,)))
            if self.format in LARGEST:
                fields.append(TensorSpec(name + SCALE, torch.float32))
        if self.teacher is TeacherKind.top_k:
            fields.append(TensorSpec(TEACHER_IDS, torch.int32, (self.top_k,)))
            # float16 is off by at most 2^-11 of a log-probability, bfloat16 by 2^-8.
            fields.append(TensorSpec(TEACHER_LOG_PROBS, torch.float16, (self.top_k,)))
        return tuple(sorted(fields, key=lambda field: (-field.dtype.itemsize, field.name)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token, ids, documents and masks included."""
        return sum(field.num_bytes for field in self.tensor_specs)

    def format_line(self) -> str:
        """Line about the contents."""
        last = f"top {self.top_k}" if self.teacher is TeacherKind.top_k else "last hidden state"
        layers = ", ".join(map(str, self.layers)) or "none"
        return f"{self.format.value}, {last}, layers {layers}, {self.bytes_per_token:,} bytes/token"


def quantize_states(states: Tensor, state_format: StateFormat) -> tuple[Tensor, Tensor | None]:
    """Round hidden states to the nearest value of a format.

    For the largest magnitude amax of a token, int8 is off by at most amax / 254, and fp8 (e4m3) by
    2^-4 of the value or, near zero, by amax / 448 * 2^-10. A token with NaN or infinity is read
    back as NaN.

    Args:
        states: [T, D], floating point.
        state_format: format to write.

    Returns:
        [T, D] in the format, and one scale [T] float32 per token; None for bf16.
    """
    dtype = DTYPES[state_format]
    if state_format is StateFormat.bf16:
        return states.to(dtype), None
    states = states.float()
    # A token of zeros has magnitude 0, which cannot be a divisor.
    scale = states.abs().amax(-1) / LARGEST[state_format]
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    scaled = states / scale.unsqueeze(-1)
    return (scaled.round() if state_format is StateFormat.int8 else scaled).to(dtype), scale


def dequantize_states(values: Tensor, scale: Tensor) -> Tensor:
    """Restore [..., D] float32 from one-byte values [..., D] and scales [...]."""
    return values.float() * scale.unsqueeze(-1)


@dataclass(frozen=True)
class ShardIndex:
    """Sequences of a shard.

    Attributes:
        num_tokens: tokens of each sequence.
        checksums: xxh3_64 of each sequence's bytes, over its tensors in file order.
        size: bytes of the file.
        checksum: xxh3_64 of the file.
    """

    num_tokens: list[int]
    checksums: list[str]
    size: int
    checksum: str

    @classmethod
    def from_folder(cls, folder: Path, name: str) -> "ShardIndex":
        """Read the index of a shard.

        Raises:
            InputError: the index is missing or damaged.
        """
        path = folder / f"{name}.json"
        try:
            return cls(**json.loads(retry_io(path.read_text)))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path}: missing or damaged ({error}); {format_repair_advice(folder)}"
            ) from error

    @cached_property
    def token_offsets(self) -> list[int]:
        """Tokens before each sequence, and finally the total."""
        return list(accumulate(self.num_tokens, initial=0))


def is_shard_whole(folder: Path, name: str) -> bool:
    """Tell whether every byte of a shard matches its index."""
    try:
        index = ShardIndex.from_folder(folder, name)
        path = folder / f"{name}{SAFETENSORS_SUFFIX}"
        same_size = path.stat().st_size == index.size
        return same_size and retry_io(partial(compute_file_checksum, path)) == index.checksum
    except (InputError, FileNotFoundError):
        return False


def compute_file_checksum(path: Path) -> str:
    """xxh3_64 of a file."""
    with path.open("rb") as file:
        return compute_checksum(iter(partial(file.read, READ_BYTES), b""))


def compute_checksum(parts: Iterable[bytes | memoryview]) -> str:
    """xxh3_64 of concatenated parts."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def memory_of(tensor: Tensor) -> memoryview:
    """Bytes of a contiguous tensor, also of bfloat16 and float8, which numpy lacks."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def format_repair_advice(folder: Path) -> str:
    """Advice for a damaged store."""
    again = f"start scripts/capture.py with out_dir={folder} again"
    return f"{again}: it writes missing and damaged files"
