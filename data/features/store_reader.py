"""Reader of feature stores (`data.features.store_format`). Letters: T tokens, D hidden, k, V."""

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
from conf.files import SAFETENSORS_SUFFIX, compute_file_checksum, retry_io
from data.features.store_format import (
    NO_PROBABILITY,
    SCALE,
    SPLITS,
    TEACHER_LOG_PROBS,
    TOKEN_COUNTS,
    Manifest,
    ShardEntry,
    ShardIndex,
    TensorSpec,
    dequantize_states,
    format_repair_advice,
    memory_of,
)
from data.prepared.packing import PackedDataset, VocabularySizes, check_token_ids


def dequantize_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore one-byte hidden states of a batch to numbers, on their device.

    Args:
        batch: tensors of a `StoredDataset`, or stacks of them. States [..., D] with a scale
            `<name>.scale` [...] become float32; other tensors stay, including bfloat16 states.

    Returns:
        The tensors, without the scales.
    """
    return {
        name: dequantize_states(tensor, batch[name + SCALE]) if name + SCALE in batch else tensor
        for name, tensor in batch.items()
        if not name.endswith(SCALE)
    }


class FeatureStore:
    """Whole feature store. Its shards are checked at every read, all other files at once.

    Attributes:
        folder: folder of the store.
        manifest: description of the store.
        train, heldout, replay: sequences of each split.
    """

    def __init__(self, folder: Path) -> None:
        """Open the store.

        Raises:
            InputError: naming the file that is missing, too short or damaged.
        """
        self.folder = folder
        self.manifest = Manifest.from_folder(folder)
        self.train, self.heldout, self.replay = (StoredDataset(self, name) for name in SPLITS)

    def check_file(self, name: str) -> Path:
        """Check the bytes of a file that is no shard, and return its path.

        Raises:
            InputError: the file is missing or damaged.
        """
        path = self.folder / name
        try:
            written = retry_io(partial(compute_file_checksum, path)) == self.manifest.files[name]
        except OSError as error:
            raise InputError(
                f"{path}: {error.strerror}; {format_repair_advice(self.folder)}"
            ) from error
        if not written:
            raise InputError(f"{path}: damaged; {format_repair_advice(self.folder)}")
        return path


class StoredDataset(Dataset):
    """Packed sequences of one split, with the target's hidden states.

    Item i has the tensors [T] of a packed sequence, with `hidden_states` and `layers.{i}` [T, D];
    `restore` turns one-byte states with a `<name>.scale` [T] into numbers. With a top-k teacher,
    `teacher.ids` [T, k] int32 and `teacher.log_probs` [T, k] float16 replace `hidden_states`. They
    are normalised over the whole vocabulary: 1 - sum exp is the mass of all other tokens, up to
    rounding. Without a learnt next token each exp is 0. States on padding are 0.
    """

    def __init__(self, store: FeatureStore, split: str) -> None:
        manifest = store.manifest
        self.store, self.split = store, split
        self.max_length, self.pad_id = manifest.plan.max_length, manifest.plan.pad_id
        self.fields = manifest.plan.contents.tensor_specs
        self.shards = [entry for entry in manifest.shards if entry.split == split]
        self.indexes = [_checked_index(store.folder, entry) for entry in self.shards]
        self.last = list(accumulate(len(index.num_tokens) for index in self.indexes))
        """Number of sequences up to each shard, included."""
        self.target: VocabularySizes | None = None
        """Target to check the token ids against, if any."""

    def check_token_ids(self, target: VocabularySizes) -> None:
        """Let `read` check ids as `PackedDataset.check_ids` does."""
        self.target = target
        self.pad_id = self.pad_id if self.pad_id < target.num_embeddings else 0

    def count_token_ids(self, vocab_size: int) -> Tensor:
        """[V] int64 count of each id among the learnt tokens."""
        counts = load_file(self.store.check_file(TOKEN_COUNTS))[self.split]
        assert len(counts) == vocab_size
        return counts

    def __len__(self) -> int:
        return self.last[-1] if self.last else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.load_sequence(index, self.max_length)

    def load_sequence(self, index: int, room: int | None = None) -> dict[str, Tensor]:
        """Read a sequence, padded to `room` tokens if set.

        Raises:
            InputError: a byte is damaged, or an id is beyond the target's.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self.last, index)
        shard_index = self.indexes[shard]
        number = index - self.last[shard] + len(shard_index.num_tokens)
        num_tokens = shard_index.num_tokens[number]
        path = self.store.folder / f"{self.shards[shard].name}{SAFETENSORS_SUFFIX}"
        room = num_tokens if room is None else room
        try:
            row = retry_io(
                partial(load_shard_sequence, path, self.fields, shard_index, number, room)
            )
        except OSError as error:
            raise InputError(
                f"{path}: {error.strerror}; {format_repair_advice(path.parent)}"
            ) from error
        ids, target = row["input_ids"][:num_tokens], self.target
        if target is not None and int(ids.max()) >= min(target.num_embeddings, target.vocab_size):
            learnt = ids[row["loss_mask"][:num_tokens].bool()]
            where = f"{self.store.folder}: sequence {index} of {self.split}".format
            check_token_ids(ids.tolist(), target, where, learnt.tolist())
        return self._complete_sequence(row, num_tokens)

    def _complete_sequence(self, row: dict[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
        """Add dtypes, positions and padding of a packed sequence to stored tensors."""
        ids, documents = row["input_ids"].long(), row["document_ids"].long()
        ids[num_tokens:] = self.pad_id
        documents[num_tokens:] = -1
        if TEACHER_LOG_PROBS in row:
            row[TEACHER_LOG_PROBS][num_tokens:] = NO_PROBABILITY
        # Positions start at 0 in each document and are 0 on padding.
        places = torch.arange(len(documents))
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[1:] = documents[1:] != documents[:-1]
        begins |= documents < 0
        positions = places - torch.where(begins, places, 0).cummax(0).values
        return {**row, "input_ids": ids, "document_ids": documents, "position_ids": positions}


TrainingData = PackedDataset | StoredDataset


def _checked_index(folder: Path, entry: ShardEntry) -> ShardIndex:
    """Index of a shard whose file has the right size."""
    index = ShardIndex.from_folder(folder, entry.name)
    path = folder / f"{entry.name}{SAFETENSORS_SUFFIX}"
    if (index.size, index.checksum) != (entry.size, entry.checksum):
        raise InputError(
            f"{folder / entry.name}.json: not the index of the manifest; "
            f"{format_repair_advice(folder)}"
        )
    size = path.stat().st_size if path.is_file() else None
    if size != index.size:
        shown = "missing" if size is None else f"{size:,} bytes long"
        raise InputError(
            f"{path}: {shown}, but must have {index.size:,} bytes; {format_repair_advice(folder)}"
        )
    return index


def load_shard_sequence(
    path: Path, fields: tuple[TensorSpec, ...], index: ShardIndex, number: int, room: int
) -> dict[str, Tensor]:
    """Read tensors [room, ...] of a sequence, zero after its tokens, and verify their checksum.

    Reads instead of mapping memory, because a file that vanishes or shrinks must raise an error,
    not end the process by a signal.

    Args:
        path: path of the shard.
        fields: tensors of the shard, in file order.
        index: index of the shard.
        number: position of the sequence in the shard.
        room: tokens to return, at least as many as the sequence has.

    Raises:
        InputError: the file is too short or damaged.
        OSError: the file cannot be read.
    """
    first, num_tokens, total = (
        index.token_offsets[number],
        index.num_tokens[number],
        index.token_offsets[-1],
    )
    # The tensors lie at the end of the file, after the header.
    offset = index.size - total * sum(field.num_bytes for field in fields)
    tensors, digest = {}, xxhash.xxh3_64()
    with path.open("rb") as file:
        for field in fields:
            tensor = torch.zeros(room, *field.shape, dtype=field.dtype)
            memory = memory_of(tensor)[: num_tokens * field.num_bytes]
            file.seek(offset + first * field.num_bytes)
            if file.readinto(memory) != len(memory):
                raise InputError(
                    f"{path}: sequence {number} is cut off; {format_repair_advice(path.parent)}"
                )
            digest.update(memory)
            offset += total * field.num_bytes
            tensors[field.name] = tensor
    if digest.hexdigest() != index.checksums[number]:
        raise InputError(
            f"{path}: sequence {number} is damaged (checksum {digest.hexdigest()}, not "
            f"{index.checksums[number]}); {format_repair_advice(path.parent)}"
        )
    return tensors
