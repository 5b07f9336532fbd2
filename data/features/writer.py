"""Writes the shards of a feature store, beside the computation that fills them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from torch import Tensor

from conf.errors import InputError
from conf.files import retried
from data.features.layout import Field
from data.features.shards import write_shard

SHARD_BYTES = 512 * 2**20
NUM_WRITERS = 2


@dataclass(frozen=True)
class Shard:
    """Sequences `first` to `last` - 1 of a split, which lie in one file; how many tokens."""

    name: str
    split: str
    first: int
    last: int
    num_tokens: int


def plan_shards(
    split: str, lengths: Sequence[int], bytes_per_token: int, shard_bytes: int = SHARD_BYTES
) -> list[Shard]:
    """Cuts a split into shards of at most `shard_bytes`, or of one longer sequence.

    Args:
        split: its name.
        lengths: tokens of each sequence.
        bytes_per_token: that are stored.
        shard_bytes: at most.
    """
    begins: list[int] = []
    held = 0
    for number, length in enumerate(lengths):
        if not begins or (held + length) * bytes_per_token > shard_bytes:
            begins.append(number)
            held = 0
        held += length
    return [
        Shard(f"{split}-{number:05}", split, first, last, sum(lengths[first:last]))
        for number, (first, last) in enumerate(pairwise([*begins, len(lengths)]))
    ]


def save_shard(
    folder: Path, shard: Shard, fields: Sequence[Field], sequences: Sequence[Mapping[str, Tensor]]
) -> None:
    """Writes a shard, again where the file system failed for a moment.

    Raises:
        InputError: it cannot be written, the disk is full; nothing of it is left.
    """
    try:
        retried(partial(write_shard, folder, shard.name, fields, sequences))
    except OSError as error:
        raise InputError(
            f"out_dir={folder}: cannot write {shard.name}: {error.strerror}. The shards that are "
            "whole are kept: free space or mend the folder, and start again to continue"
        ) from error


class Writers:
    """Threads that write, few at a time; what one raises, the next call raises.

    As a context manager it waits for all of them at the end.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_WRITERS)
        self._pending: set[Future[None]] = set()

    def submit(self, job: Callable[[], None]) -> None:
        """Starts a job, once fewer than `NUM_WRITERS` are at work."""
        while len(self._pending) >= NUM_WRITERS:
            wait(self._pending, return_when=FIRST_COMPLETED)
            self.check()
        self._pending.add(self._pool.submit(job))

    def check(self) -> None:
        """Raises what a job has raised by now."""
        ended = {future for future in self._pending if future.done()}
        self._pending -= ended
        for future in ended:
            future.result()

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            self.check()
