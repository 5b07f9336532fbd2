"""Reads a feature store (`data.features.format`). T tokens of a sequence, D hidden, k, V."""

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from conf.errors import InputError
from conf.files import retried
from data.features.format import (
    NO_PROBABILITY,
    SCALE,
    SPLITS,
    SUFFIX,
    TEACHER_LOG_PROBS,
    TOKEN_COUNTS,
    Field,
    ShardIndex,
    decode,
    file_checksum,
    memory_of,
    repair,
)
from data.features.manifest import Manifest, ShardEntry
from data.prepared.pack import PackedDataset, Vocabulary, check_ids


def restore(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its one-byte hidden states as numbers again, on the device they are on.

    Args:
        batch: tensors of a `StoredDataset`, or stacks of them. States [..., D] with a
            `<name>.scale` [...] beside them become float32; everything else, bfloat16 states
            among it, passes through.

    Returns:
        The tensors without the scales.
    """
    return {
        name: decode(tensor, batch[name + SCALE]) if name + SCALE in batch else tensor
        for name, tensor in batch.items()
        if not name.endswith(SCALE)
    }


class FeatureStore:
    """A whole store, checked but for the bytes of its shards, which are at every read.

    Attributes:
        folder: where it is.
        manifest: what it is.
        train, heldout, replay: the sequences of each split.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the store.

        Raises:
            InputError: no whole store: which file is missing, too short or damaged.
        """
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.train, self.heldout, self.replay = (StoredDataset(self, name) for name in SPLITS)

    def check_file(self, name: str) -> Path:
        """The path of a file that is no shard, once its bytes are those that were written.

        Raises:
            InputError: they are not, or it is missing.
        """
        path = self.folder / name
        try:
            written = retried(partial(file_checksum, path)) == self.manifest.files[name]
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; {repair(self.folder)}") from error
        if not written:
            raise InputError(f"{path}: not the bytes that were written; {repair(self.folder)}")
        return path


class StoredDataset(Dataset):
    """The packed sequences of one split, with the target's states.

    Item i has the tensors [T] of a packed sequence; `hidden_states` and `layers.{i}` [T, D], of
    which `restore` makes numbers where a `<name>.scale` [T] stands beside them; or, in place of
    `hidden_states`, `teacher.ids` [T, k] int32 and `teacher.log_probs` [T, k] float16, over the
    whole vocabulary: 1 - sum exp is the mass of all other tokens, but for rounding. The teacher
    speaks where the next token is learnt; elsewhere each exp is 0. States on padding are 0.
    """

    def __init__(self, store: FeatureStore, split: str) -> None:
        manifest = store.manifest
        self.store, self.split = store, split
        self.max_length, self.pad_id = manifest.plan.max_length, manifest.plan.pad_id
        self.fields = manifest.plan.contents.fields
        self.shards = [entry for entry in manifest.shards if entry.split == split]
        self.indexes = [_checked_index(store.folder, entry) for entry in self.shards]
        self.last = list(accumulate(len(index.num_tokens) for index in self.indexes))
        """Sequences up to and with each shard."""
        self.target: Vocabulary | None = None
        """Whose token ids these are, where they are to be checked."""

    def check_ids(self, target: Vocabulary) -> None:
        """Has `read` refuse what `PackedDataset.check_ids` refuses."""
        self.target = target
        self.pad_id = self.pad_id if self.pad_id < target.num_embeddings else 0

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each id occurs among the learnt tokens."""
        counts = load_file(self.store.check_file(TOKEN_COUNTS))[self.split]
        assert len(counts) == vocab_size
        return counts

    def __len__(self) -> int:
        return self.last[-1] if self.last else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.read(index, self.max_length)

    def read(self, index: int, room: int | None = None) -> dict[str, Tensor]:
        """A sequence, filled up to `room` tokens if that is set.

        Raises:
            InputError: a byte of it is not what was written, or it has ids beyond the target's.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self.last, index)
        shard_index = self.indexes[shard]
        number = index - self.last[shard] + len(shard_index.num_tokens)
        num_tokens = shard_index.num_tokens[number]
        path = self.store.folder / f"{self.shards[shard].name}{SUFFIX}"
        room = num_tokens if room is None else room
        try:
            row = retried(partial(read_sequence, path, self.fields, shard_index, number, room))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; {repair(path.parent)}") from error
        ids, target = row["input_ids"][:num_tokens], self.target
        if target is not None and int(ids.max()) >= min(target.num_embeddings, target.vocab_size):
            learnt = ids[row["loss_mask"][:num_tokens].bool()]
            where = f"{self.store.folder}: sequence {index} of {self.split}".format
            check_ids(ids.tolist(), target, where, learnt.tolist())
        return self._item(row, num_tokens)

    def _item(self, row: dict[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
        """Stored tensors with the dtypes, the positions and the padding of a packed sequence."""
        ids, documents = row["input_ids"].long(), row["document_ids"].long()
        ids[num_tokens:] = self.pad_id
        documents[num_tokens:] = -1
        if TEACHER_LOG_PROBS in row:
            row[TEACHER_LOG_PROBS][num_tokens:] = NO_PROBABILITY
        # Positions begin at 0 with each document, and stay 0 on padding.
        places = torch.arange(len(documents))
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[1:] = documents[1:] != documents[:-1]
        begins |= documents < 0
        positions = places - torch.where(begins, places, 0).cummax(0).values
        return {**row, "input_ids": ids, "document_ids": documents, "position_ids": positions}


TrainingData = PackedDataset | StoredDataset


def _checked_index(folder: Path, entry: ShardEntry) -> ShardIndex:
    """The index of a shard whose file has the right size."""
    index = ShardIndex.read(folder, entry.name)
    path = folder / f"{entry.name}{SUFFIX}"
    if (index.size, index.checksum) != (entry.size, entry.checksum):
        raise InputError(f"{folder / entry.name}.json: not the manifest's; {repair(folder)}")
    size = path.stat().st_size if path.is_file() else None
    if size != index.size:
        shown = "missing" if size is None else f"{size:,} bytes long"
        raise InputError(f"{path}: {shown}, not {index.size:,} bytes; {repair(folder)}")
    return index


def read_sequence(
    path: Path, fields: tuple[Field, ...], index: ShardIndex, number: int, room: int
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
        InputError: the file is too short, or a byte is not what was written.
        OSError: it cannot be opened or read.
    """
    first, num_tokens, total = index.starts[number], index.num_tokens[number], index.starts[-1]
    # The header, of no interest here, is what stands before the tensors.
    offset = index.size - total * sum(field.num_bytes for field in fields)
    tensors, digest = {}, xxhash.xxh3_64()
    with path.open("rb") as file:
        for field in fields:
            tensor = torch.zeros(room, *field.shape, dtype=field.dtype)
            memory = memory_of(tensor)[: num_tokens * field.num_bytes]
            file.seek(offset + first * field.num_bytes)
            if file.readinto(memory) != len(memory):
                raise InputError(f"{path}: sequence {number} is cut off; {repair(path.parent)}")
            digest.update(memory)
            offset += total * field.num_bytes
            tensors[field.name] = tensor
    if digest.hexdigest() != index.checksums[number]:
        raise InputError(
            f"{path}: the bytes of sequence {number} are not those that were written (checksum "
            f"{digest.hexdigest()}, not {index.checksums[number]}); {repair(path.parent)}"
        )
    return tensors
