"""What a feature store holds of each token: names, dtypes and bytes. D hidden, k teacher tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from conf.settings.data import StateFormat, TeacherKind
from data.features.quantise import DTYPES, LARGEST

HIDDEN = "hidden_states"
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher.ids", "teacher.log_probs"
SCALE = ".scale"
NO_PROBABILITY = torch.finfo(torch.float16).min
"""The log-probability where a teacher says nothing; its exponential is 0."""


@dataclass(frozen=True)
class Field:
    """One tensor: `shape` per token."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Per token."""
        return self.dtype.itemsize * prod(self.shape)


TOKENS = (
    Field("input_ids", torch.int32),
    Field("document_ids", torch.int32),
    Field("loss_mask", torch.bool),
)
"""`position_ids` follow from the documents."""


@dataclass(frozen=True)
class Contents:
    """What is kept of the target's pass.

    Attributes:
        hidden_size: D.
        layers: tapped layers, as indices of `output_hidden_states`.
        teacher: the last hidden state, or the likeliest tokens.
        top_k: k; 0 with a hidden teacher.
        format: of hidden states.
    """

    hidden_size: int
    layers: tuple[int, ...]
    teacher: TeacherKind
    top_k: int
    format: StateFormat

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Contents":
        """What `conf.command.statement.plain` made of one."""
        kinds = {"teacher": TeacherKind(stored["teacher"]), "format": StateFormat(stored["format"])}
        return cls(**{**stored, **kinds, "layers": tuple(stored["layers"])})

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the hidden states."""
        last = (HIDDEN,) if self.teacher is TeacherKind.hidden else ()
        return *last, *(f"layers.{index}" for index in self.layers)

    @property
    def fields(self) -> tuple[Field, ...]:
        """All tensors, wide dtypes first, so that each starts where its dtype may."""
        found = list(TOKENS)
        for name in self.states:
            found.append(Field(name, DTYPES[self.format], (self.hidden_size,)))
            if self.format in LARGEST:
                found.append(Field(name + SCALE, torch.float32))
        if self.teacher is TeacherKind.top_k:
            found.append(Field(TEACHER_IDS, torch.int32, (self.top_k,)))
            # Off by at most 2^-11 of a log-probability; bfloat16 would be by 2^-8.
            found.append(Field(TEACHER_LOG_PROBS, torch.float16, (self.top_k,)))
        return tuple(sorted(found, key=lambda field: (-field.dtype.itemsize, field.name)))

    @property
    def bytes_per_token(self) -> int:
        """Ids, documents and masks included."""
        return sum(field.num_bytes for field in self.fields)

    def line(self) -> str:
        """For people."""
        last = f"top {self.top_k}" if self.teacher is TeacherKind.top_k else "last hidden state"
        layers = ", ".join(map(str, self.layers)) or "none"
        return f"{self.format.value}, {last}, layers {layers}, {self.bytes_per_token:,} bytes/token"
