"""Packing of tokenised samples into sequences of one length, without copying ids.

Letters: N samples, P pieces of memory, t tokens of a piece, S packed sequences, T tokens of a
sequence (`max_length`).
"""

import random
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from conf.errors import InputError
from data.rows.row_digests import PromptDigests
from data.templates.record_encoder import Sample

WINDOW = 16384
"""Samples that are sorted and packed together: enough to fill sequences well, few enough to keep
the sequences of different windows alike."""


@dataclass(frozen=True)
class TokenChunk:
    """Concatenated samples.

    Attributes:
        input_ids: [t] int32.
        loss_mask: [t] bool.
    """

    input_ids: Tensor
    loss_mask: Tensor


class TokenisedSamples:
    """N samples in the order of the P pieces of memory that hold them.

    Attributes:
        lengths: [N] int32 tokens per sample.
        highest: upper bound of the token ids.
    """

    def __init__(
        self,
        pieces: list[TokenChunk],
        lengths: np.ndarray,
        starts: np.ndarray | None = None,
        *,
        highest: int,
    ) -> None:
        """Index the samples of pieces: all, or those that begin at `starts`.

        Args:
            pieces: the P pieces.
            lengths: [N] tokens per sample.
            starts: [N] int64 rising, number of tokens of all pieces before each sample.
            highest: largest token id of all pieces.
        """
        self._pieces = pieces
        self._bounds = np.cumsum([0, *(len(piece.input_ids) for piece in pieces)])
        if starts is None:
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
        self._starts = starts
        self.highest = highest
        self.lengths = lengths

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "TokenisedSamples":
        """Concatenate samples in memory as one piece, reading them once."""
        ids, mask, lengths = array("i"), bytearray(), array("i")
        for sample in samples:
            ids.extend(sample.input_ids)
            mask.extend(sample.loss_mask)
            lengths.append(len(sample.input_ids))
        piece = TokenChunk(
            torch.from_numpy(np.array(ids, dtype=np.int32)),
            torch.from_numpy(np.frombuffer(mask, dtype=np.bool_).copy()),
        )
        return cls([piece], np.array(lengths, dtype=np.int32), highest=max(ids, default=0))

    def select_samples(self, numbers: np.ndarray) -> "TokenisedSamples":
        """Select samples by their indices, which rise. Memory is shared."""
        starts = self._starts[numbers]
        return TokenisedSamples(self._pieces, self.lengths[numbers], starts, highest=self.highest)

    def __len__(self) -> int:
        return len(self.lengths)

    def slice_sample(self, number: int, length: int) -> TokenChunk:
        """Return a view of the first `length` tokens of a sample."""
        start = self._starts[number]
        piece = int(np.searchsorted(self._bounds, start, "right")) - 1
        begin = int(start - self._bounds[piece])
        whole = self._pieces[piece]
        span = slice(begin, begin + length)
        return TokenChunk(whole.input_ids[span], whole.loss_mask[span])

    def count_learnt_tokens(self, max_length: int) -> np.ndarray:
        """Count the learnt tokens among the first `max_length` of each sample, [N] int32."""
        num_learnt = np.zeros(len(self), dtype=np.int32)
        for piece, samples, begins, ends in self._iter_pieces(max_length):
            before = np.concatenate([[0], np.cumsum(piece.loss_mask.numpy(), dtype=np.int32)])
            num_learnt[samples] = before[ends] - before[begins]
        return num_learnt

    def iter_truncated(self, max_length: int) -> Iterator[TokenChunk]:
        """Copy the first `max_length` tokens of every sample, piece by piece."""
        for piece, _, begins, ends in self._iter_pieces(max_length):
            steps = np.zeros(len(piece.input_ids) + 1, dtype=np.int8)
            np.add.at(steps, begins, 1)
            np.add.at(steps, ends, -1)
            inside = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
            ids, mask = piece.input_ids.numpy()[inside], piece.loss_mask.numpy()[inside]
            yield TokenChunk(torch.from_numpy(ids), torch.from_numpy(mask))

    def _iter_pieces(
        self, max_length: int
    ) -> Iterator[tuple[TokenChunk, slice, np.ndarray, np.ndarray]]:
        """Yield each piece with its samples, and the bounds of their first `max_length` tokens."""
        firsts = np.searchsorted(self._starts, self._bounds)
        # Only empty samples begin after the end of all pieces.
        firsts[-1] = len(self)
        for number, (first, last) in enumerate(pairwise(firsts.tolist())):
            if first < last:
                samples = slice(first, last)
                begins = self._starts[samples] - self._bounds[number]
                ends = begins + np.minimum(self.lengths[samples], max_length)
                yield self._pieces[number], samples, begins, ends


class VocabularySizes(Protocol):
    """Sizes of a target that limit its token ids."""

    name: str

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""


class PackedDataset(Dataset):
    """Packed sequences of whole documents, the same in every process.

    Item i is a dict of tensors [T]. For documents of 3 and 2 tokens and T = 6:

        input_ids    int64  a a a b b p    (p: pad)
        loss_mask    bool   0 1 1 0 1 0
        position_ids int64  0 1 2 0 1 0
        document_ids int64  0 0 0 1 1 -1
    """

    def __init__(
        self,
        samples: Iterable[Sample] | TokenisedSamples,
        max_length: int,
        *,
        seed: int,
        pad_id: int = 0,
        place: Callable[[int], str] = "sample {}".format,
        prompts: Iterable[int] | np.ndarray = (),
    ):
        """Pack samples into sequences. Samples without a learnt token are dropped.

        Args:
            samples: samples in memory, or an iterable that is read once. Longer samples are cut to
                `max_length`.
            max_length: tokens per sequence.
            seed: seed of the packing and of the order of sequences.
            pad_id: token id of the padding.
            place: function that names the place of sample i, from 0.
            prompts: digests of the first prompts of the samples' records.
        """
        self.prompts = PromptDigests.from_values(prompts)
        self.max_length = max_length
        self.pad_id = pad_id
        if not isinstance(samples, TokenisedSamples):
            samples = TokenisedSamples.from_samples(samples)
        num_learnt = samples.count_learnt_tokens(max_length)
        self.num_truncated = int((samples.lengths > max_length).sum())
        self.num_dropped = int((num_learnt == 0).sum())
        """Samples without a learnt token, after truncation."""
        self.num_supervised_tokens = int(num_learnt.sum())
        """Tokens that are learnt."""
        self._place, self._sample_numbers = place, np.flatnonzero(num_learnt)
        self._samples = samples.select_samples(self._sample_numbers)
        self._lengths = np.minimum(self._samples.lengths, max_length)
        self.packing = pack_samples(self._lengths, max_length, seed)
        """Sample indices of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return int(self._lengths.sum())

    @property
    def sequence_lengths(self) -> list[int]:
        """[S] number of tokens of each sequence, without padding."""
        return [int(self._lengths[samples].sum()) for samples in self.packing]

    @property
    def checksum(self) -> str:
        """xxh3_64 of the ids and masks of all samples, in reading order."""
        digest = xxhash.xxh3_64()
        for piece in self._samples.iter_truncated(self.max_length):
            digest.update(piece.input_ids.numpy().tobytes())
        for piece in self._samples.iter_truncated(self.max_length):
            digest.update(piece.loss_mask.numpy().tobytes())
        return digest.hexdigest()

    def count_token_ids(self, vocab_size: int) -> Tensor:
        """Count each id among the learnt tokens, [V] int64.

        Args:
            vocab_size: V, rows of the target's output head; all learnt ids are below it.
        """
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for piece in self._samples.iter_truncated(self.max_length):
            counts += torch.bincount(piece.input_ids[piece.loss_mask], minlength=vocab_size)
        return counts

    def check_token_ids(self, target: VocabularySizes) -> None:
        """Refuse ids beyond a target's embedding, and learnt ids beyond its output head.

        Effects: a padding id beyond the embedding becomes 0.

        Raises:
            InputError: the message names the first such id and its place.
        """
        self.pad_id = self.pad_id if self.pad_id < target.num_embeddings else 0
        if self._samples.highest < min(target.num_embeddings, target.vocab_size):
            return
        for number, length in enumerate(self._lengths.tolist()):
            piece = self._samples.slice_sample(number, length)
            where = partial(self._place, int(self._sample_numbers[number]))
            learnt = piece.input_ids[piece.loss_mask].tolist()
            check_token_ids(piece.input_ids.tolist(), target, where, learnt)

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids = torch.full((self.max_length,), self.pad_id)
        loss_mask = torch.zeros(self.max_length, dtype=torch.bool)
        position_ids = torch.zeros(self.max_length, dtype=torch.int64)
        document_ids = torch.full((self.max_length,), -1)
        start = 0
        for document, sample in enumerate(self.packing[index].tolist()):
            length = int(self._lengths[sample])
            span = slice(start, start + length)
            piece = self._samples.slice_sample(sample, length)
            input_ids[span], loss_mask[span] = piece.input_ids, piece.loss_mask
            position_ids[span] = torch.arange(length)
            document_ids[span] = document
            start += length
        return {
            "input_ids": input_ids,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }


def check_token_ids(
    ids: Sequence[int],
    target: VocabularySizes,
    where: Callable[[], str],
    learnt: Sequence[int] = (),
) -> None:
    """Refuse ids beyond a target's embedding, and learnt ids beyond its output head.

    Args:
        ids: all ids of a text.
        target: target that reads them.
        where: function that names the place of the text.
        learnt: ids of the learnt tokens.

    Raises:
        InputError: the message names the largest id.
    """
    for checked, size, part in (
        (ids, target.num_embeddings, "embedding"),
        (learnt, target.vocab_size, "output head"),
    ):
        largest = max(checked, default=0)
        if largest >= size:
            raise InputError(
                f"{where()}: token id {largest}, but the {part} of {target.name} has {size} rows, "
                "so the tokenizer is larger than the model or the ids come from another; set "
                "target.path to a model with its own tokenizer, or remove the row"
            )


class Packing(Sequence[np.ndarray]):
    """Sample indices of each packed sequence, as S arrays."""

    def __init__(self, members: np.ndarray, bounds: np.ndarray, order: np.ndarray) -> None:
        """Store the packing.

        Args:
            members: [N] sample indices, sequence by sequence.
            bounds: [S + 1] first index into `members` of each sequence, and finally N.
            order: [S] numbers of the sequences in the order in which they are read.
        """
        self._members, self._bounds, self._order = members, bounds, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        sequence = self._order[index]
        return self._members[self._bounds[sequence] : self._bounds[sequence + 1]]


def pack_samples(lengths: np.ndarray | list[int], max_length: int, seed: int) -> Packing:
    """Group samples into sequences by best fit, longest first, in windows of shuffled samples.

    Args:
        lengths: [N] tokens per sample, each at most `max_length`.
        max_length: tokens per sequence.
        seed: seed of the order of samples, then of sequences.

    Returns:
        Sample indices of each sequence.
    """
    generator = random.Random(seed)
    order = _shuffle_numbers(len(lengths), generator)
    shuffled = np.asarray(lengths, dtype=np.int64)[order]
    num_sequences = 0
    windows, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for begin in range(0, len(order), WINDOW):
        longest_first = begin + np.argsort(-shuffled[begin : begin + WINDOW], kind="stable")
        fitted = _fit_samples(shuffled[longest_first].tolist(), max_length)
        windows.append(longest_first)
        places.append(fitted + num_sequences)
        num_sequences += int(fitted.max()) + 1
    place = np.concatenate(places)
    members = order[np.concatenate(windows)][np.argsort(place, kind="stable")]
    bounds = np.cumsum([0, *np.bincount(place, minlength=num_sequences)])
    return Packing(members, bounds, _shuffle_numbers(num_sequences, generator))


def _fit_samples(lengths: list[int], max_length: int) -> np.ndarray:
    """Choose a sequence for each sample of a window.

    The fullest sequence with room is chosen, the oldest among equals, or a new one.
    """
    room: list[int] = []  # tokens left, with the sequence in the lowest bits; sorted
    bits = len(lengths).bit_length()
    sequences, num_sequences = [], 0
    for length in lengths:
        fit = bisect_left(room, length << bits)
        if fit == len(room):
            free = (max_length << bits) + num_sequences
            num_sequences += 1
        else:
            free = room.pop(fit)
        sequences.append(free & ((1 << bits) - 1))
        insort(room, free - (length << bits))
    return np.array(sequences, dtype=np.int64)


def _shuffle_numbers(count: int, generator: random.Random) -> np.ndarray:
    """Shuffle the numbers below `count`, [count] int64, in the order of `random.Random.shuffle`."""
    numbers = array("q", range(count))
    generator.shuffle(numbers)
    return np.array(numbers, dtype=np.int64)
