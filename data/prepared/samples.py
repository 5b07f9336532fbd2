"""Tokenised samples as places in arrays, in memory or memory-mapped: no process copies the ids.

Letters: N samples, P pieces of memory, t tokens of a piece.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from data.templates.chat import Sample


@dataclass(frozen=True)
class Piece:
    """Samples that lie one behind the other.

    Attributes:
        input_ids: [t] int32.
        loss_mask: [t] bool.
    """

    input_ids: Tensor
    loss_mask: Tensor


class Samples:
    """N samples in the order of their pieces.

    Attributes:
        lengths: [N] int32 tokens of each.
        highest: no id of the pieces is higher.
    """

    def __init__(
        self,
        pieces: list[Piece],
        lengths: np.ndarray,
        starts: np.ndarray | None = None,
        *,
        highest: int,
    ) -> None:
        """Of all samples of the pieces, or of those that begin at `starts`.

        Args:
            pieces: P of them.
            lengths: [N] tokens of each sample.
            starts: [N] int64, rising, tokens of all pieces before each sample.
            highest: id of all pieces.
        """
        self._pieces = pieces
        self._bounds = np.cumsum([0, *(len(piece.input_ids) for piece in pieces)])
        if starts is None:
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
        self._starts = starts
        self.highest = highest
        self.lengths = lengths

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Samples":
        """Lays samples out in memory; they are read once."""
        ids, mask, lengths = array("i"), bytearray(), array("i")
        for sample in samples:
            ids.extend(sample.input_ids)
            mask.extend(sample.loss_mask)
            lengths.append(len(sample.input_ids))
        piece = Piece(
            torch.from_numpy(np.array(ids, dtype=np.int32)),
            torch.from_numpy(np.frombuffer(mask, dtype=np.bool_).copy()),
        )
        return cls([piece], np.array(lengths, dtype=np.int32), highest=max(ids, default=0))

    def take(self, numbers: np.ndarray) -> "Samples":
        """Some of the samples.

        Args:
            numbers: rising.
        """
        starts = self._starts[numbers]
        return Samples(self._pieces, self.lengths[numbers], starts, highest=self.highest)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int, length: int) -> Piece:
        """The first `length` tokens of a sample, where they lie."""
        start = self._starts[number]
        piece = int(np.searchsorted(self._bounds, start, "right")) - 1
        begin = int(start - self._bounds[piece])
        whole = self._pieces[piece]
        here = slice(begin, begin + length)
        return Piece(whole.input_ids[here], whole.loss_mask[here])

    def num_learnt(self, max_length: int) -> np.ndarray:
        """[N] int32 learnt tokens among the first `max_length` of each sample."""
        found = np.zeros(len(self), dtype=np.int32)
        for piece, first, last in self._by_piece():
            begins, ends = self._ends(piece, first, last, max_length)
            mask = self._pieces[piece].loss_mask.numpy()
            before = np.concatenate([[0], np.cumsum(mask, dtype=np.int32)])
            found[first:last] = before[ends] - before[begins]
        return found

    def cut(self, max_length: int) -> Iterator[Piece]:
        """The first `max_length` tokens of every sample, copied, as one piece per piece."""
        for piece, first, last in self._by_piece():
            begins, ends = self._ends(piece, first, last, max_length)
            whole = self._pieces[piece]
            steps = np.zeros(len(whole.input_ids) + 1, dtype=np.int8)
            np.add.at(steps, begins, 1)
            np.add.at(steps, ends, -1)
            inside = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
            ids, mask = whole.input_ids.numpy()[inside], whole.loss_mask.numpy()[inside]
            yield Piece(torch.from_numpy(ids), torch.from_numpy(mask))

    def _by_piece(self) -> Iterator[tuple[int, int, int]]:
        """The piece, the first of its samples and the one after its last."""
        firsts = np.searchsorted(self._starts, self._bounds)
        # Only empty samples begin where all pieces have ended.
        firsts[-1] = len(self)
        for piece, (first, last) in enumerate(pairwise(firsts.tolist())):
            if first < last:
                yield piece, first, last

    def _ends(
        self, piece: int, first: int, last: int, max_length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        begins = self._starts[first:last] - self._bounds[piece]
        return begins, begins + np.minimum(self.lengths[first:last], max_length)
