"""Batches of each optimizer step, loaded a step ahead and on CUDA prepared a pass ahead.

A thread loads the micro batches of the next step while the current step runs. On CUDA the target
reads the next micro batch on its own stream, beside the head's step.

At most two batches are on the device. The target's stream waits for the step on the previous batch
before it reuses that memory. The host drops a batch before it asks for the next one.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from train.batch.batch import Batch, map_tensors


class Dataset(Protocol):
    """Packed sequences."""

    def __len__(self) -> int:
        """Number of sequences."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Get one sequence, as [T] tensors."""


def stack_sequences(dataset: Dataset, indices: list[int]) -> dict[str, Tensor]:
    """Stack some sequences to a batch, on the CPU."""
    rows = [dataset[index] for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def batch_to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device, without waiting for copies from pinned memory."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


Load = Callable[[int], list[Batch]]
Prepare = Callable[[Batch], Batch]


@dataclass(frozen=True)
class _Started:
    """A batch whose preparation may still run on the side stream until `done`."""

    batch: Batch
    done: torch.cuda.Event | None


class Prefetcher:
    """The micro batches of steps first..last, in order.

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
        self._coming: deque[Future[list[Batch]]] = deque()
        for _ in range(ahead):
            self._begin_loading()
        self._current: list[Batch] = []
        self._ahead: _Started | None = None

    def _begin_loading(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._coming.append(self._pool.submit(self._load_pinned, step))

    def _load_pinned(self, step: int) -> list[Batch]:
        batches = self._load(step)
        if self._stream is None:
            return batches
        return [map_tensors(batch, Tensor.pin_memory) for batch in batches]

    def next_step(self) -> list[Batch]:
        """Load the micro batches of the next step on the CPU; raise errors of loading."""
        assert self._coming, "no step is left"
        with record_function("waiting"):
            self._current = self._coming.popleft().result()
        self._begin_loading()
        return self._current

    def iter_micro_batches(self) -> Iterator[Batch]:
        """Micro batches of `next_step` on the device, prepared.

        Before asking for the next batch, the caller must have launched all work on the current one
        and dropped it.
        """
        for number in range(len(self._current)):
            started = self._ahead or self._start_batch(self._current[number])
            self._ahead = None
            following = self._get_next_batch(number)
            if self._stream is not None and following is not None:
                self._ahead = self._start_batch(following)
            yield self._finish_batch(started)

    def _get_next_batch(self, number: int) -> Batch | None:
        """Next batch of this step, if it is loaded."""
        if number + 1 < len(self._current):
            return self._current[number + 1]
        coming = self._coming[0] if self._coming else None
        ready = coming is not None and coming.done() and coming.exception() is None
        return coming.result()[0] if coming is not None and ready else None

    def _start_batch(self, batch: Batch) -> _Started:
        if self._stream is not None:
            # The stream reuses memory of the step; see the module docstring.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), record_function("target"):
            prepared = self._prepare(batch_to_device(batch, self._device))
            done = None if self._stream is None else self._stream.record_event()
        return _Started(prepared, done)

    def _finish_batch(self, started: _Started) -> Batch:
        if started.done is not None:
            # `record_stream` would hold memory until the host, which runs far ahead, looks again.
            torch.cuda.current_stream(self._device).wait_event(started.done)
        return started.batch

    def close(self) -> None:
        """End the thread after the current load."""
        self._pool.shutdown(cancel_futures=True)


def draw_global_batch(step: int, batch_size: int, num_sequences: int, seed: int) -> list[int]:
    """Global batch of a step, the same for any number of processes.

    Batches are cut from an endless row of per-epoch permutations. A batch may end one epoch and
    begin the next, and resuming needs only a position in the row.

    Args:
        step: optimizer step, from 0.
        batch_size: sequences per step.
        num_sequences: sequences in the dataset.
        seed: the run's seed.

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
    """[num_sequences] int64."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_sequences, generator=generator)


def hash_seed(*numbers: int) -> int:
    """Seed from 0 to 2^63 - 1, hashed from numbers; the same on every machine."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def split_micro_batches(
    batch: list[int], rank: int, num_processes: int, size: int
) -> list[list[int]]:
    """Share of a process in a global batch, as forward passes of `size` sequences."""
    share = len(batch) // num_processes
    own = batch[rank * share : (rank + 1) * share]
    return [own[start : start + size] for start in range(0, share, size)]
