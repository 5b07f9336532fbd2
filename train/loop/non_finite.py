"""Sequences that a run leaves out because their loss is not finite: few, named, remembered."""

from collections.abc import Callable, Iterable

import torch

from conf.errors import InputError
from train.batch.supervision import Batch

FEWEST_ALLOWED = 8
FEWEST_SHOWN = 8


class SkippedSequences:
    """Packed training sequences that are left out of every step from now on.

    A head that has diverged finds no loss finite, and that costs no sequence its place. It is told
    from bad data, at any batch size, by what it finds of eight sequences or more: those of the
    step, and where they are fewer, the last before and the next after it, each alone. Those left
    out before do not count. If most are bad, the head is at fault; else the bad ones of the step.

    Args:
        num_sequences: of the training data; of these 1% may be left out, or eight.
        known: numbers of those that a checkpoint remembers.
    """

    def __init__(self, num_sequences: int, known: Iterable[int] = ()) -> None:
        self.most = max(FEWEST_ALLOWED, num_sequences // 100)
        self.numbers = set(known)

    def add(self, numbers: Iterable[int], step: int) -> str:
        """Leave out more sequences.

        Args:
            numbers: of the sequences.
            step: optimizer step, from 1.

        Returns:
            A line for people.

        Raises:
            InputError: these are too many.
        """
        new = sorted(numbers)
        self.numbers |= {*new}
        if len(self.numbers) > self.most:
            raise InputError(
                f"at step {step} the loss of {len(self.numbers)} packed training sequences has "
                f"not been finite, of which {self.most} may be left out; the newest are {new}. "
                "Look at those, or use train.dtype=float32 or a lower train.learning_rate"
            )
        return (
            f"step {step}: the loss of packed training sequences {new} is not finite: they are "
            f"left out of this step and of all that follow ({len(self.numbers)} of at most "
            f"{self.most})"
        )

    def staying(self, numbers: Iterable[int]) -> list[int]:
        """Filter out sequences that are left out, and repetitions."""
        return [number for number in dict.fromkeys(numbers) if number not in self.numbers]

    def diverged(
        self,
        bad: list[int],
        own: list[int],
        around: Iterable[list[int]],
        is_bad: Callable[[int], bool],
    ) -> bool:
        """Tell a head at fault from bad sequences of a step.

        Args:
            bad: those of the step whose losses are not finite.
            own: all of the step.
            around: of other steps, the likeliest to be good first.
            is_bad: shows the head a sequence, and says whether its loss is not finite.
        """
        own = self.staying(own)
        shown = dict.fromkeys(own)
        for numbers in around:
            if len(shown) >= FEWEST_SHOWN:
                break
            shown |= dict.fromkeys(self.staying(numbers))
        others = list(shown)[len(own) : max(len(own), FEWEST_SHOWN)]
        return 2 * (len(bad) + sum(map(is_bad, others))) > len(own) + len(others)

    def blanked(self, batch: Batch, numbers: list[int]) -> Batch:
        """Put padding in place of sequences that are left out, so nothing reads them.

        Args:
            batch: [B, T, ...] tensors by name, on the CPU.
            numbers: of its B sequences.

        Returns:
            The batch itself where nothing is left out; else a copy.
        """
        rows = [row for row, number in enumerate(numbers) if number in self.numbers]
        if not rows:
            return batch
        copied = {name: torch.clone(tensor) for name, tensor in batch.items()}
        for name, tensor in copied.items():
            tensor[rows] = -1 if name == "document_ids" else 0
        return copied
