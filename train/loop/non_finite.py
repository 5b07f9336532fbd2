"""Training sequences that a run leaves out because their loss is not finite."""

from collections.abc import Callable, Iterable

import torch

from conf.errors import InputError
from train.batch.supervision import Batch

FEWEST_ALLOWED = 8
FEWEST_SHOWN = 8


class SkippedSequences:
    """Packed training sequences that are left out of all further steps.

    A diverged head makes every loss non-finite, which is no fault of the sequences. To tell both
    cases apart, at least eight sequences are run: those of the step and, if too few, single
    sequences of neighbouring steps. If most are bad, the head is at fault; otherwise the bad
    sequences of the step are left out.

    Args:
        num_sequences: number of training sequences. At most 1% of them, or eight, may be left out.
        known: indices of sequences that a checkpoint lists as left out.
    """

    def __init__(self, num_sequences: int, known: Iterable[int] = ()) -> None:
        self.most = max(FEWEST_ALLOWED, num_sequences // 100)
        self.numbers = set(known)

    def skip_sequences(self, numbers: Iterable[int], step: int) -> str:
        """Leave out more sequences.

        Args:
            numbers: indices of the sequences.
            step: optimizer step, from 1.

        Returns:
            A line to print.

        Raises:
            InputError: too many sequences are left out.
        """
        new = sorted(numbers)
        self.numbers |= {*new}
        if len(self.numbers) > self.most:
            raise InputError(
                f"step {step}: the loss of {len(self.numbers)} packed training sequences is not "
                f"finite; at most {self.most} may be left out. The newest are {new}: look at them, "
                "or set train.dtype=float32 or a lower train.learning_rate"
            )
        return (
            f"step {step}: the loss of packed training sequences {new} is not finite: they are "
            f"left out from this step on ({len(self.numbers)} of at most {self.most})"
        )

    def filter_kept(self, numbers: Iterable[int]) -> list[int]:
        """Filter out sequences that are left out, and repetitions."""
        return [number for number in dict.fromkeys(numbers) if number not in self.numbers]

    def has_diverged(
        self,
        bad: list[int],
        own: list[int],
        around: Iterable[list[int]],
        is_bad: Callable[[int], bool],
    ) -> bool:
        """Tell a diverged head from bad sequences.

        Args:
            bad: sequences of the step with non-finite losses.
            own: all sequences of the step.
            around: sequences of other steps, the likeliest good ones first.
            is_bad: runs the head on a sequence; True if its loss is not finite.
        """
        own = self.filter_kept(own)
        shown = dict.fromkeys(own)
        for numbers in around:
            if len(shown) >= FEWEST_SHOWN:
                break
            shown |= dict.fromkeys(self.filter_kept(numbers))
        others = list(shown)[len(own) : max(len(own), FEWEST_SHOWN)]
        return 2 * (len(bad) + sum(map(is_bad, others))) > len(own) + len(others)

    def blank_skipped(self, batch: Batch, numbers: list[int]) -> Batch:
        """Replace left-out sequences with padding.

        Args:
            batch: [B, T, ...] tensors by name, on the CPU.
            numbers: indices of its B sequences.

        Returns:
            The batch itself if nothing is left out, otherwise a copy.
        """
        rows = [row for row, number in enumerate(numbers) if number in self.numbers]
        if not rows:
            return batch
        copied = {name: torch.clone(tensor) for name, tensor in batch.items()}
        for name, tensor in copied.items():
            tensor[rows] = -1 if name == "document_ids" else 0
        return copied
