"""Format of a feature store: packed sequences with the target's hidden states or predictions.

`scripts/capture.py` writes a store; `data.features=DIR` trains from it without the target:

    capture.json                `StorePlan`, the content to expect; written first
    train-00000.safetensors     a shard: sequences of a split, concatenated
    train-00000.json            `ShardIndex`, written after its shard, which is then whole
    target/ends.safetensors     the target's embedding and output head
    token_counts.safetensors    [V] int64 for each split: count of each id among its learnt tokens
    trained_prompts.json        digests of the prompts to train on (`data.rows.row_digests`)
    manifest.json               `Manifest`, written last; the store is then whole

A shard has these tensors [S, ...], for S tokens of all its sequences without padding:

    input_ids, document_ids     [S] int32, and loss_mask [S] bool; documents give the positions
    hidden_states, layers.{i}   [S, D] in `format`; `<name>.scale` [S] float32 beside one-byte ones
    teacher.ids                 [S, k] int32, and teacher.log_probs [S, k] float16, over the whole
                                vocabulary: instead of hidden_states with `teacher=top_k`

D hidden, k teacher tokens, V vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.command.run_record import check_unchanged, flatten_settings, to_json
from conf.errors import InputError
from conf.files import (
    LOCK_NAME,
    SAFETENSORS_SUFFIX,
    is_file_whole,
    load_json,
    retry_io,
    write_atomically,
)
from conf.settings.data import Form, StateFormat, TeacherKind
from data.prepared.prepare import DataReport

VERSION = 1
PLAN, MANIFEST = "capture.json", "manifest.json"
EMBEDDINGS_AND_HEAD, TOKEN_COUNTS = "target/ends.safetensors", "token_counts.safetensors"
SPLITS = ("train", "heldout", "replay")
"""Splits of a store. `replay` holds held-out prompts with the target's answers, which are learnt.
Its sequences are not packed."""
HIDDEN_STATES = "hidden_states"
LAYER_PREFIX = "layers."
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher.ids", "teacher.log_probs"
SCALE = ".scale"
NO_PROBABILITY = torch.finfo(torch.float16).min
"""Log-probability where the teacher has no prediction. Its exponential is 0."""
DTYPES = {
    StateFormat.bf16: torch.bfloat16,
    StateFormat.fp8: torch.float8_e4m3fn,
    StateFormat.int8: torch.int8,
}
LARGEST = {StateFormat.fp8: 448.0, StateFormat.int8: 127.0}
"""Value to which the largest magnitude of a token is scaled."""


@dataclass(frozen=True)
class TensorSpec:
    """Tensor of a shard.

    Attributes:
        name: name in the file.
        dtype: dtype in the file.
        shape: shape of one token's values.
    """

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
        """Build the contents from the JSON that `conf.command.run_record.to_json` gave."""
        enums = {"teacher": TeacherKind(stored["teacher"]), "format": StateFormat(stored["format"])}
        return cls(**{**stored, **enums, "layers": tuple(stored["layers"])})

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the tensors of hidden states."""
        last = (HIDDEN_STATES,) if self.teacher is TeacherKind.hidden else ()
        return *last, *(f"{LAYER_PREFIX}{index}" for index in self.layers)

    @property
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """All tensors of a shard, wide dtypes first, so that each is aligned."""
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
        """Format the contents as one line."""
        last = f"top {self.top_k}" if self.teacher is TeacherKind.top_k else "last hidden state"
        layers = ", ".join(map(str, self.layers)) or "none"
        return f"{self.format.value}, {last}, layers {layers}, {self.bytes_per_token:,} bytes/token"


@dataclass(frozen=True)
class Split:
    """Sequences of a split.

    Attributes:
        num_sequences: number of sequences.
        num_tokens: tokens without padding; None before the target has written them.
        num_supervised_tokens: learnt tokens; None before the target has written them.
        checksum: checksum of ids and loss masks.
    """

    num_sequences: int
    num_tokens: int | None
    num_supervised_tokens: int | None
    checksum: str


@dataclass(frozen=True)
class StorePlan:
    """Everything that decides the content of a store.

    Attributes:
        target: identity of the target with checksums, and the settings that load the target.
        contents: parts of the target's pass to keep.
        data: data settings as JSON.
        sha256: checksum of the data at `data.path`.
        max_length: tokens per packed sequence.
        pad_id: token id of the padding.
        seed: seed of the packing.
        splits: splits by name.
        shard_bytes: largest size of a shard, unless one sequence is larger.
    """

    target: dict[str, Any]
    contents: StoreContents
    data: dict[str, Any]
    sha256: str
    max_length: int
    pad_id: int
    seed: int
    splits: dict[str, Split]
    shard_bytes: int

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StorePlan":
        """Build the plan from the JSON that `to_json` gave. Other keys are ignored."""
        values = {name: stored[name] for name in cls.__dataclass_fields__}
        values["contents"] = StoreContents.from_json(values["contents"])
        values["splits"] = {name: Split(**split) for name, split in values["splits"].items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Convert the plan to JSON values, with the version of the format."""
        return {"version": VERSION, **to_json(self)}

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder with other content, or with a capture of other settings.

        Raises:
            InputError: the message names the difference.
        """
        if folder.exists() and not folder.is_dir():
            raise InputError(f"out_dir={folder}: is a file; name a folder")
        if (before := load_json(folder / PLAN, f"out_dir={folder}: ")) is not None:
            what, now = f"out_dir={folder} holds a capture", flatten_settings(self.to_json())
            check_unchanged(what, flatten_settings(before), now)
            return
        # A capture may have been killed while it wrote its plan or put a dead one's lock aside.
        allowed = (LOCK_NAME, f"{PLAN}.tmp")
        if folder.is_dir() and any(not p.name.startswith(allowed) for p in folder.iterdir()):
            raise InputError(
                f"out_dir={folder}: is not empty and holds no capture to continue; name another "
                "folder"
            )

    def save(self, folder: Path) -> None:
        """Write the plan into the store's folder, before the capture."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / PLAN, json.dumps(self.to_json(), indent=2) + "\n")


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
            raise make_store_error(folder, f"{path}: missing or damaged ({error})") from error

    @cached_property
    def token_offsets(self) -> list[int]:
        """Number of tokens before each sequence, and finally of all."""
        return list(accumulate(self.num_tokens, initial=0))


def is_shard_whole(folder: Path, name: str) -> bool:
    """Tell whether every byte of a shard matches its index."""
    try:
        index = ShardIndex.from_folder(folder, name)
        path = folder / f"{name}{SAFETENSORS_SUFFIX}"
        return retry_io(partial(is_file_whole, path, index.size, index.checksum))
    except (InputError, FileNotFoundError):
        return False


@dataclass(frozen=True)
class ShardEntry:
    """Shard of a whole store.

    Attributes:
        name: name of the shard's files, without endings.
        split: split of the shard's sequences.
        size: bytes of the file.
        checksum: xxh3_64 of the file.
    """

    name: str
    split: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Description of a whole store.

    Attributes:
        plan: plan of the capture.
        shards: shards in the order of their sequences.
        files: xxh3_64 of each file that is no shard, by name.
        provenance: result of `conf.command.run_record.collect_provenance`.
    """

    plan: StorePlan
    shards: list[ShardEntry]
    files: dict[str, str]
    provenance: dict[str, Any]

    @property
    def report(self) -> DataReport:
        """Report about the data that were captured."""
        stored = self.provenance["data"]
        return DataReport(**{**stored, "form": Form(stored["form"])})

    def save(self, folder: Path) -> None:
        """Write the manifest, which marks the store as whole."""
        content = {
            **self.plan.to_json(),
            "shards": [asdict(shard) for shard in self.shards],
            "files": self.files,
            "provenance": self.provenance,
        }
        text = json.dumps(content, indent=2) + "\n"
        retry_io(lambda: write_atomically(folder / MANIFEST, text))

    @classmethod
    def from_folder(cls, folder: Path) -> "Manifest":
        """Read the manifest of a store.

        Raises:
            InputError: the manifest is missing, damaged or of another version.
        """
        stored = load_json(folder / MANIFEST, f"data.features={folder}: ")
        if stored is None:
            problem = "is missing, so this is no store or its capture has not ended"
            raise make_store_error(folder, f"data.features={folder}: {MANIFEST} {problem}")
        if stored.get("version") != VERSION:
            raise InputError(
                f"data.features={folder}: version {stored.get('version')} of the format, but this "
                f"Headsmith reads version {VERSION}; capture again, or use the Headsmith that "
                "wrote it"
            )
        try:
            shards = [ShardEntry(**entry) for entry in stored["shards"]]
            return cls(StorePlan.from_json(stored), shards, stored["files"], stored["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"data.features={folder}: {MANIFEST} is damaged: {error!r}"
            raise make_store_error(folder, problem) from error


def make_store_error(folder: Path, problem: str) -> InputError:
    """Make the error about a damaged store, with the advice to repair it."""
    again = f"start scripts/capture.py with out_dir={folder} again"
    return InputError(f"{problem}; {again}: it writes missing and damaged files")


def memory_of(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous tensor, also of bfloat16 and float8, which numpy lacks."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


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
    """Restore hidden states [..., D] float32 from one-byte values [..., D] and scales [...]."""
    return values.float() * scale.unsqueeze(-1)
