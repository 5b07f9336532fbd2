"""Load the batches of each optimizer step: their sequences, stacked, pinned and prefetched.

The sequences of a step are a pure function of the step, so any number of processes and any restart
reads the same.

A thread loads the micro batches of the next step while the current step runs. On CUDA the target
reads the next micro batch on its own stream, beside the head's step.

At most two batches are on the device. The target's stream waits for the step on the previous batch
before it reuses that memory. The host drops a batch before it asks for the next one.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from conf.command.clock import label_part
from conf.errors import InputError
from train.batch.batch import Batch, map_tensors

MIN_SKIP_LIMIT = 8
MIN_TESTED_SEQUENCES = 8
Load = Callable[[int], list[Batch]]
Prepare = Callable[[Batch], Batch]
Started = tuple[Batch, torch.cuda.Event | None]
"""Batch, and the event at whose end its preparation on the side stream is done."""


class Dataset(Protocol):
    """Packed sequences by index."""

    def __len__(self) -> int:
        """Count the sequences."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Return one sequence, as [T] tensors by name."""


class Prefetcher:
    """Loader of the micro batches of steps first..last, in order.

    Args:
        load: function that loads the micro batches of a step on the CPU; called in a thread.
        prepare: function that adds the target's output to a batch on the device.
        device: device of the prepared batches.
        first, last: range of steps, from 0, `last` excluded.
        ahead: number of steps to load in advance.
    """

    def __init__(
        self,
        load: Load,
        prepare: Prepare,
        device: torch.device,
        first: int,
        last: int,
        ahead: int = 1,
    ) -> None:
        self._load, self._prepare, self._device = load, prepare, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(ahead, "headsmith-prefetch")
        self._steps = iter(range(first, last))
        self._futures: deque[Future[list[Batch]]] = deque()
        for _ in range(ahead):
            self._begin_loading()
        self._current: list[Batch] = []
        self._ahead: Started | None = None

    def _begin_loading(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._futures.append(self._pool.submit(self._load_pinned, step))

    def _load_pinned(self, step: int) -> list[Batch]:
        batches = self._load(step)
        if self._stream is None:
            return batches
        return [map_tensors(batch, Tensor.pin_memory) for batch in batches]

    def next_step(self) -> list[Batch]:
        """Return the micro batches of the next step on the CPU; raise errors of loading."""
        assert self._futures, "no step is left"
        with label_part("waiting"):
            self._current = self._futures.popleft().result()
        self._begin_loading()
        return self._current

    def iter_micro_batches(self) -> Iterator[Batch]:
        """Yield the micro batches of `next_step` on the device, prepared.

        Before asking for the next batch, the caller must have launched all work on the current one
        and dropped it.
        """
        for index in range(len(self._current)):
            batch, done = self._ahead or self._start_batch(self._current[index])
            self._ahead = None
            following = self._get_next_batch(index)
            if self._stream is not None and following is not None:
                self._ahead = self._start_batch(following)
            if done is not None:
                # `record_stream` would hold memory until the host, far ahead, looks again.
                torch.cuda.current_stream(self._device).wait_event(done)
            yield batch

    def _get_next_batch(self, index: int) -> Batch | None:
        """Return the batch after micro batch `index` of this step, if it is loaded."""
        if index + 1 < len(self._current):
            return self._current[index + 1]
        future = self._futures[0] if self._futures else None
        is_ready = future is not None and future.done() and future.exception() is None
        return future.result()[0] if future is not None and is_ready else None

    def _start_batch(self, batch: Batch) -> Started:
        if self._stream is not None:
            # The stream reuses memory of the step; see the module docstring.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), label_part("target"):
            prepared = self._prepare(batch_to_device(batch, self._device))
            done = None if self._stream is None else self._stream.record_event()
        return prepared, done

    def close(self) -> None:
        """End the thread after the current load."""
        self._pool.shutdown(cancel_futures=True)


def draw_global_batch(step: int, batch_size: int, num_sequences: int, seed: int) -> list[int]:
    """Draw the sequences of a step, the same for any number of processes.

    Batches are cut from an endless row of per-epoch permutations. A batch may end one epoch and
    begin the next, and resuming needs only a position in the row.

    Args:
        step: optimizer step, from 0.
        batch_size: sequences per step.
        num_sequences: sequences in the dataset.
        seed: seed of the run.

    Returns:
        `batch_size` indices into the dataset.
    """
    batch: list[int] = []
    position = step * batch_size
    while len(batch) < batch_size:
        epoch, offset = divmod(position + len(batch), num_sequences)
        end = offset + batch_size - len(batch)
        batch += _draw_permutation(epoch, num_sequences, seed)[offset:end].tolist()
    return batch


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _draw_permutation(epoch: int, num_sequences: int, seed: int) -> Tensor:
    """Draw the order of an epoch, [num_sequences] int64."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_sequences, generator=generator)


def split_micro_batches(
    batch: list[int], rank: int, num_processes: int, size: int
) -> list[list[int]]:
    """Split off the part of a process from a global batch, as forward passes of `size` sequences.

    Args:
        batch: indices of all sequences of a step.
        rank: number of the process, from 0.
        num_processes: number of processes, which divides the batch.
        size: sequences per forward pass.
    """
    num_own = len(batch) // num_processes
    own = batch[rank * num_own : (rank + 1) * num_own]
    return [own[start : start + size] for start in range(0, num_own, size)]


def hash_seed(*numbers: int) -> int:
    """Hash numbers to a seed from 0 to 2^63 - 1, the same on every machine."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stack_sequences(dataset: Dataset, indices: list[int]) -> dict[str, Tensor]:
    """Stack some sequences of a dataset to a batch, on the CPU."""
    rows = [dataset[index] for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def batch_to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device, without waiting for copies from pinned memory."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


class SkippedSequences:
    """Packed training sequences that all further steps skip.

    A diverged head makes every loss non-finite, which is no fault of the sequences. To tell both
    cases apart, at least eight sequences are run: those of the step and, if too few, single
    sequences of neighbouring steps. If most are bad, the head is at fault; otherwise the bad
    sequences of the step are skipped.

    Args:
        num_sequences: number of training sequences. At most 1% of them, or eight, may be skipped.
        known: indices of sequences that a checkpoint lists as skipped.
    """

    def __init__(self, num_sequences: int, known: Iterable[int] = ()) -> None:
        self.most = max(MIN_SKIP_LIMIT, num_sequences // 100)
        self.numbers = set(known)

    def skip_sequences(self, numbers: Iterable[int], step: int) -> str:
        """Skip more sequences, by index, from optimizer step `step` (from 1) on; return a line.

        Raises:
            InputError: too many sequences are skipped.
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
        """Return the sequences that are not skipped, each once."""
        return [number for number in dict.fromkeys(numbers) if number not in self.numbers]

    def has_diverged(
        self,
        bad: list[int],
        own: list[int],
        around: Iterable[list[int]],
        is_bad: Callable[[int], bool],
    ) -> bool:
        """Tell whether the head has diverged, rather than single sequences being bad.

        Args:
            bad: sequences of the step with non-finite losses.
            own: all sequences of the step.
            around: sequences of other steps, the likeliest good ones first.
            is_bad: function that runs the head on a sequence; True if its loss is not finite.
        """
        own = self.filter_kept(own)
        tested = dict.fromkeys(own)
        for numbers in around:
            if len(tested) >= MIN_TESTED_SEQUENCES:
                break
            tested |= dict.fromkeys(self.filter_kept(numbers))
        others = list(tested)[len(own) : max(len(own), MIN_TESTED_SEQUENCES)]
        return 2 * (len(bad) + sum(map(is_bad, others))) > len(own) + len(others)

    def blank_skipped(self, batch: Batch, numbers: list[int]) -> Batch:
        """Replace skipped sequences of a batch with padding, in a copy.

        Args:
            batch: [B, T, ...] tensors by name, on the CPU.
            numbers: indices of the batch's B sequences.
        """
        rows = [row for row, number in enumerate(numbers) if number in self.numbers]
        if not rows:
            return batch
        copied = {name: torch.clone(tensor) for name, tensor in batch.items()}
        for name, tensor in copied.items():
            tensor[rows] = -1 if name == "document_ids" else 0
        return copied
