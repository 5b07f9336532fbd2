"""Training from hidden states of serving engines, without the target's layers here.

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

from data.features.store_format import LAYER_PREFIX
from data.prepared.packing import PackedDataset
from data.servers.server_pool import HiddenStatesPool, join_documents, split_documents
from data.servers.state_files import HiddenStatesError

STEPS_AHEAD = 4
"""Largest number of optimizer steps whose sequences are requested together."""
SHARE_OF_MEMORY = 0.25
"""Share of the host's memory for their hidden states."""
NUM_LOOKED_AT = 64
"""Sequences to search for the longest document."""
PADDING = -1
"""Document id of tokens that are not learnt."""


def find_longest_document(rows: PackedDataset) -> list[int]:
    """Token ids of the longest document of the first sequences."""
    first = (rows[index] for index in range(min(len(rows), NUM_LOOKED_AT)))
    return max((document for row in first for document in split_documents(row)), key=len)


def count_prefetch_steps(pool: HiddenStatesPool, num_tokens: int) -> int:
    """Number of optimizer steps to request together, limited by the host's memory.

    Args:
        pool: servers; they give bfloat16 or float32.
        num_tokens: tokens per step in this process.
    """
    itemsize = 4  # float32, the widest dtype of a server
    num_bytes = num_tokens * len(pool.layers) * pool.hidden_size * itemsize
    room = psutil.virtual_memory().available * SHARE_OF_MEMORY
    room /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(STEPS_AHEAD, int(room // num_bytes)))


@dataclass
class ServedSequences:
    """Packed sequences with the hidden states of their documents, named as in `with_states`.

    Documents without states are not learnt, so that all processes stay in step.

    Attributes:
        rows: sequences without states.
        pool: servers that give the states.
        lost: counts left-out documents over all threads.
    """

    rows: PackedDataset
    pool: HiddenStatesPool
    lost: Iterator[int] = field(default_factory=partial(count, 1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        documents, ids = split_documents(row), row["document_ids"].clone()
        found: list[dict[str, Tensor]] = []
        for number, coming in enumerate([self.pool.submit(each) for each in documents]):
            try:
                found.append(coming.result())
            except HiddenStatesError as error:
                found.append({})
                ids[row["document_ids"] == number] = PADDING
                tqdm.write(
                    f"document {number} of sequence {index} is left out (number {next(self.lost)} "
                    f"of this run): {error}"
                )
        dtype = next((t.dtype for states in found for t in states.values()), torch.bfloat16)
        states = {}
        for layer in self.pool.layers:
            name, width = f"{LAYER_PREFIX}{layer}", self.pool.hidden_size
            parts = [
                each[name] if each else torch.zeros(len(lost), width, dtype=dtype)
                for each, lost in zip(found, documents, strict=True)
            ]
            states[name] = join_documents(row, parts)
        return {**row, "document_ids": ids, **states}
