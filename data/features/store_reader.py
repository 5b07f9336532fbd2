"""Reader of feature stores (`data.features.store_format`).

Letters: T tokens of a packed sequence, D hidden, k teacher tokens, V vocabulary.
"""

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
    make_store_error,
    memory_of,
)
from data.prepared.packing import PackedDataset, VocabularySizes, check_token_ids
from data.rows.row_digests import PROMPTS_FILE, PromptDigests


class FeatureStore:
    """Whole feature store. Every read of a shard checks its bytes.

    Attributes:
        folder: folder of the store.
        manifest: description of the store.
        train: sequences to train on.
        heldout: held-out sequences.
        replay: held-out prompts with the target's answers.
    """

    def __init__(self, folder: Path) -> None:
        """Open the store.

        Raises:
            InputError: the message names the file that is missing, too short or damaged.
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
            is_whole = retry_io(partial(compute_file_checksum, path)) == self.manifest.files[name]
        except OSError as error:
            raise make_store_error(self.folder, f"{path}: {error.strerror}") from error
        if not is_whole:
            raise make_store_error(self.folder, f"{path}: damaged")
        return path

    def load_prompts(self) -> PromptDigests | None:
        """Load the digests of the prompts to train on; None for stores of earlier versions."""
        if PROMPTS_FILE not in self.manifest.files:
            return None
        return PromptDigests.from_file(self.check_file(PROMPTS_FILE))


class StoredDataset(Dataset):
    """Packed sequences of one split, with the target's hidden states.

    Item i has the tensors [T] of a packed sequence, with `hidden_states` and `layers.{i}` [T, D];
    `dequantize_batch` turns one-byte states with a `<name>.scale` [T] into float32. With a top-k
    teacher, `teacher.ids` [T, k] int32 and `teacher.log_probs` [T, k] float16 replace
    `hidden_states`. The probabilities are normalised over the whole vocabulary: 1 - sum exp is the
    mass of all other tokens, up to rounding. Where the next token is not learnt, each exp is 0.
    States on padding are 0.
    """

    def __init__(self, store: FeatureStore, split: str) -> None:
        manifest = store.manifest
        self.store, self.split = store, split
        self.max_length, self.pad_id = manifest.plan.max_length, manifest.plan.pad_id
        self.fields = manifest.plan.contents.tensor_specs
        self.shards = [entry for entry in manifest.shards if entry.split == split]
        self.indexes = [_load_shard_index(store.folder, entry) for entry in self.shards]
        self.shard_ends = list(accumulate(len(index.num_tokens) for index in self.indexes))
        """Number of sequences up to the end of each shard."""
        self.target: VocabularySizes | None = None
        """Target whose sizes limit the token ids, if they are checked."""

    def check_token_ids(self, target: VocabularySizes) -> None:
        """Make `load_sequence` check ids as `PackedDataset.check_token_ids` does."""
        self.target = target
        self.pad_id = self.pad_id if self.pad_id < target.num_embeddings else 0

    def count_token_ids(self, vocab_size: int) -> Tensor:
        """Load the count of each id among the learnt tokens, [V] int64."""
        counts = load_file(self.store.check_file(TOKEN_COUNTS))[self.split]
        assert len(counts) == vocab_size
        return counts

    def __len__(self) -> int:
        return self.shard_ends[-1] if self.shard_ends else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.load_sequence(index, self.max_length)

    def load_sequence(self, index: int, room: int | None = None) -> dict[str, Tensor]:
        """Load a sequence.

        Args:
            index: number of the sequence.
            room: number of tokens to pad to; None adds no padding.

        Raises:
            InputError: a byte is damaged, or an id is beyond the target's.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self.shard_ends, index)
        shard_index = self.indexes[shard]
        number = index - self.shard_ends[shard] + len(shard_index.num_tokens)
        num_tokens = shard_index.num_tokens[number]
        path = self.store.folder / f"{self.shards[shard].name}{SAFETENSORS_SUFFIX}"
        room = num_tokens if room is None else room
        try:
            row = retry_io(
                partial(load_shard_sequence, path, self.fields, shard_index, number, room)
            )
        except OSError as error:
            raise make_store_error(path.parent, f"{path}: {error.strerror}") from error
        ids, target = row["input_ids"][:num_tokens], self.target
        if target is not None and int(ids.max()) >= min(target.num_embeddings, target.vocab_size):
            learnt = ids[row["loss_mask"][:num_tokens].bool()]
            where = f"{self.store.folder}: sequence {index} of {self.split}".format
            check_token_ids(ids.tolist(), target, where, learnt.tolist())
        return self._complete_sequence(row, num_tokens)

    def _complete_sequence(self, row: dict[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
        """Turn stored tensors into those of a packed sequence: dtypes, positions, padding."""
        ids, documents = row["input_ids"].long(), row["document_ids"].long()
        ids[num_tokens:] = self.pad_id
        documents[num_tokens:] = -1
        if TEACHER_LOG_PROBS in row:
            row[TEACHER_LOG_PROBS][num_tokens:] = NO_PROBABILITY
        # Positions start at 0 in each document and are 0 on padding.
        lengths = torch.unique_consecutive(documents[:num_tokens], return_counts=True)[1]
        positions = torch.zeros_like(ids)
        positions[:num_tokens] = torch.cat([torch.arange(each) for each in lengths.tolist()])
        return {**row, "input_ids": ids, "document_ids": documents, "position_ids": positions}


TrainingData = PackedDataset | StoredDataset


def _load_shard_index(folder: Path, entry: ShardEntry) -> ShardIndex:
    """Load the index of a shard; refuse another shard's index, or a file of another size."""
    index = ShardIndex.from_folder(folder, entry.name)
    path = folder / f"{entry.name}{SAFETENSORS_SUFFIX}"
    if (index.size, index.checksum) != (entry.size, entry.checksum):
        problem = f"{folder / entry.name}.json: not the index of the manifest"
        raise make_store_error(folder, problem)
    size = path.stat().st_size if path.is_file() else None
    if size != index.size:
        state = "missing" if size is None else f"{size:,} bytes long"
        problem = f"{path}: {state}, but must have {index.size:,} bytes"
        raise make_store_error(folder, problem)
    return index


def load_shard_sequence(
    path: Path, fields: tuple[TensorSpec, ...], index: ShardIndex, number: int, room: int
) -> dict[str, Tensor]:
    """Read the tensors [room, ...] of a sequence, zero after its tokens; verify their checksum.

    The file is read, not mapped into memory: a file that vanishes or shrinks must raise an error,
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
    first, num_tokens = index.token_offsets[number], index.num_tokens[number]
    total = index.token_offsets[-1]
    # The tensors lie at the end of the file, after the header.
    offset = index.size - total * sum(field.num_bytes for field in fields)
    tensors, digest = {}, xxhash.xxh3_64()
    with path.open("rb") as file:
        for field in fields:
            tensor = torch.zeros(room, *field.shape, dtype=field.dtype)
            memory = memory_of(tensor)[: num_tokens * field.num_bytes]
            file.seek(offset + first * field.num_bytes)
            if file.readinto(memory) != len(memory):
                raise make_store_error(path.parent, f"{path}: sequence {number} is cut off")
            digest.update(memory)
            offset += total * field.num_bytes
            tensors[field.name] = tensor
    if digest.hexdigest() != index.checksums[number]:
        found, expected = digest.hexdigest(), index.checksums[number]
        problem = f"sequence {number} is damaged (checksum {found}, not {expected})"
        raise make_store_error(path.parent, f"{path}: {problem}")
    return tensors


def dequantize_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore the one-byte hidden states of a batch to float32, on their device.

    Args:
        batch: tensors of a `StoredDataset`, or stacks of such tensors. States [..., D] with a scale
            `<name>.scale` [...] become float32; other tensors stay, including bfloat16 states.

    Returns:
        All tensors except the scales.
    """
    return {
        name: dequantize_states(tensor, batch[name + SCALE]) if name + SCALE in batch else tensor
        for name, tensor in batch.items()
        if not name.endswith(SCALE)
    }
