"""Digests of prompts and rows, by which copies and prompts that were trained on are counted.

A digest is xxh3_64 of what a row says, so it is the same in every form and file of the same rows.
"""

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from conf.errors import InputError
from conf.files import load_json

PROMPTS_FILE = "trained_prompts.json"
"""File of a head or a feature store with the digests of the prompts to train on. Exports and
uploads lack the file, as everybody could try prompts on it."""
DIGEST = "xxh3_64 of the first text of the user"
"""What a digest of a prompt is made of, see `compute_prompt_digest`."""


def compute_digest(content: Any) -> int:
    """Compute the digest of JSON content."""
    text = json.dumps(content, sort_keys=True, default=str)
    return xxhash.xxh3_64_intdigest(text.encode())


def count_copies(digests: Iterable[int]) -> int:
    """Count the rows that repeat an earlier row, by their digests."""
    known = list(digests)
    return len(known) - len(set(known))


@dataclass(frozen=True)
class PromptDigests:
    """Digests of distinct prompts.

    Attributes:
        values: [P] uint64, rising.
    """

    values: np.ndarray

    @classmethod
    def from_values(cls, values: Iterable[int] | np.ndarray) -> Self:
        """Build the set of some digests."""
        return cls(np.unique(np.asarray(values, dtype=np.uint64)))

    def __len__(self) -> int:
        return len(self.values)

    def __or__(self, other: "PromptDigests") -> "PromptDigests":
        return PromptDigests.from_values(np.concatenate([self.values, other.values]))

    def count_known(self, values: Iterable[int] | np.ndarray) -> int:
        """Count the digests that are of these prompts."""
        return int(np.isin(np.asarray(values, dtype=np.uint64), self.values).sum())

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON content of 11 bytes for each prompt."""
        packed = base64.b64encode(self.values.astype("<u8").tobytes()).decode()
        return {"digest": DIGEST, "num_prompts": len(self), "base64_of_uint64": packed}

    @classmethod
    def from_file(cls, path: Path) -> Self | None:
        """Read the set from a file with the result of `to_json`; None without a file.

        Raises:
            InputError: the file is damaged.
        """
        stored = load_json(path)
        if stored is None:
            return None
        try:
            packed = base64.b64decode(stored["base64_of_uint64"], validate=True)
            values = np.frombuffer(packed, dtype="<u8").astype(np.uint64)
            if len(values) != stored["num_prompts"]:
                raise ValueError(f"{len(values)} digests in place of {stored['num_prompts']}")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: damaged ({error}); delete the file to go on without a count of prompts "
                "that were trained on"
            ) from error
        return cls(values)
