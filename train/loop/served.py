"""Training from the states that serving engines compute: the target's layers are nowhere here.

Letters: S tokens of a document, T tokens of a packed sequence, D hidden.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from data.features.format import LAYER
from data.prepared.pack import PackedDataset
from data.servers.files import NotReadError
from data.servers.pool import StatesPool, documents_of, placed

STEPS_AHEAD = 4
"""Optimizer steps at most whose sequences are asked for together."""
SHARE_OF_MEMORY = 0.25
"""Of the host's, for their states."""
NUM_LOOKED_AT = 64
"""Sequences among which the longest document is looked for."""
PADDING = -1
"""Document of tokens that nobody learns from."""


def longest_document(rows: PackedDataset) -> list[int]:
    """Token ids of the longest document of the first sequences."""
    first = (rows[index] for index in range(min(len(rows), NUM_LOOKED_AT)))
    return max((document for row in first for document in documents_of(row)), key=len)


def steps_ahead(pool: StatesPool, num_tokens: int) -> int:
    """Optimizer steps that are asked for together, as many as the host's memory has room for.

    Args:
        pool: gives bfloat16 or float32.
        num_tokens: of a step, in this process.
    """
    itemsize = 4  # of the widest dtype that a server may use
    num_bytes = num_tokens * len(pool.layers) * pool.hidden_size * itemsize
    room = psutil.virtual_memory().available * SHARE_OF_MEMORY
    room /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(STEPS_AHEAD, int(room // num_bytes)))


@dataclass
class ServedRows:
    """Packed sequences with the states of their documents, under the names of `with_states`.

    A document whose states cannot be had is not learnt from, so that all processes keep step.

    Attributes:
        rows: without states.
        pool: has them.
        lost: counts the documents that are left out, in whichever thread.
    """

    rows: PackedDataset
    pool: StatesPool
    lost: Iterator[int] = field(default_factory=partial(count, 1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        documents, ids = documents_of(row), row["document_ids"].clone()
        found: list[dict[str, Tensor]] = []
        for number, coming in enumerate([self.pool.submit(each) for each in documents]):
            try:
                found.append(coming.result())
            except NotReadError as error:
                found.append({})
                ids[row["document_ids"] == number] = PADDING
                tqdm.write(
                    f"document {number} of sequence {index} is left out, the {next(self.lost)}. "
                    f"of this run: {error}"
                )
        dtype = next((t.dtype for states in found for t in states.values()), torch.bfloat16)
        states = {}
        for layer in self.pool.layers:
            name, width = f"{LAYER}{layer}", self.pool.hidden_size
            parts = [
                each[name] if each else torch.zeros(len(lost), width, dtype=dtype)
                for each, lost in zip(found, documents, strict=True)
            ]
            states[name] = placed(row, parts)
        return {**row, "document_ids": ids, **states}
