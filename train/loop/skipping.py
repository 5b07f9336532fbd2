"""Sequences that a run leaves out because their loss is not finite: few, named, remembered."""

from collections.abc import Iterable

import torch

from conf.schema import InputError
from train.batch.rows import Batch

FEWEST_ALLOWED = 8


class Skipped:
    """Packed training sequences that are left out of every step from now on.

    Args:
        num_sequences: of the training data; of these 1% may be left out, or eight.
        known: numbers of those that a checkpoint remembers.
    """

    def __init__(self, num_sequences: int, known: Iterable[int] = ()) -> None:
        self.most = max(FEWEST_ALLOWED, num_sequences // 100)
        self.numbers = set(known)

    def add(self, numbers: Iterable[int], step: int) -> str:
        """Leaves out more sequences.

        Args:
            numbers: of the sequences.
            step: optimizer step, from 1.

        Returns:
            What to say about it.

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

    def blanked(self, batch: Batch, numbers: list[int]) -> Batch:
        """A batch on the CPU with padding in place of what is left out, so nothing reads it.

        Args:
            batch: [B, T, ...] tensors by name.
            numbers: of its B sequences.

        Returns:
            The batch itself where nothing is left out; else a copy.
        """
        rows = [row for row, number in enumerate(numbers) if number in self.numbers]
        if not rows:
            return batch
        found = {name: torch.clone(tensor) for name, tensor in batch.items()}
        for name, tensor in found.items():
            tensor[rows] = -1 if name == "document_ids" else 0
        return found
