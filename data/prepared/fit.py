"""Which samples share a sequence: best fit, longest first.

Letters: N samples, S packed sequences.
"""

import random
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

# Samples sorted and packed together: enough to fill sequences well, few enough that
# sequences of different windows stay alike.
WINDOW = 16384


class Packing(Sequence[np.ndarray]):
    """Sample numbers of each sequence, `[S]` arrays that lie in one."""

    def __init__(self, members: np.ndarray, bounds: np.ndarray, order: np.ndarray) -> None:
        """Of sequences in another order.

        Args:
            members: [N] samples, sequence behind sequence.
            bounds: [S + 1] members before each sequence.
            order: [S] sequences in their final order.
        """
        self._members, self._bounds, self._order = members, bounds, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        sequence = self._order[index]
        return self._members[self._bounds[sequence] : self._bounds[sequence + 1]]


def pack(lengths: np.ndarray | list[int], max_length: int, seed: int) -> Packing:
    """Groups samples into sequences: best fit, longest first, in windows of shuffled samples.

    Args:
        lengths: tokens per sample, `[N]`, each at most `max_length`.
        max_length: tokens of a sequence.
        seed: of the shuffle of the samples, and then of the sequences.

    Returns:
        Sample numbers of each sequence.
    """
    generator = random.Random(seed)
    order = _shuffled(len(lengths), generator)
    shuffled = np.asarray(lengths, dtype=np.int64)[order]
    num_sequences = 0
    windows, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for begin in range(0, len(order), WINDOW):
        longest_first = begin + np.argsort(-shuffled[begin : begin + WINDOW], kind="stable")
        fitted = _best_fit(shuffled[longest_first].tolist(), max_length)
        windows.append(longest_first)
        places.append(fitted + num_sequences)
        num_sequences += int(fitted.max()) + 1
    place = np.concatenate(places)
    members = order[np.concatenate(windows)][np.argsort(place, kind="stable")]
    bounds = np.cumsum([0, *np.bincount(place, minlength=num_sequences)])
    return Packing(members, bounds, _shuffled(num_sequences, generator))


def _best_fit(lengths: list[int], max_length: int) -> np.ndarray:
    """The sequence of each sample: of those with room the fullest, of such the oldest, or a new."""
    room: list[int] = []  # tokens left, and the sequence in the lowest bits; sorted
    bits = len(lengths).bit_length()
    found, num_sequences = [], 0
    for length in lengths:
        fit = bisect_left(room, length << bits)
        if fit == len(room):
            free = (max_length << bits) + num_sequences
            num_sequences += 1
        else:
            free = room.pop(fit)
        found.append(free & ((1 << bits) - 1))
        insort(room, free - (length << bits))
    return np.array(found, dtype=np.int64)


def _shuffled(count: int, generator: random.Random) -> np.ndarray:
    """[count] whole numbers as `random.Random.shuffle` leaves a list of them."""
    numbers = array("q", range(count))
    generator.shuffle(numbers)
    return np.array(numbers, dtype=np.int64)
