"""The sequences of a step; batches in order, one step ahead; what goes wrong in the thread."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers
from torch import Tensor

from train.batch import data_loader as prefetch
from train.batch.data_loader import (
    Prefetcher,
    draw_global_batch,
    hash_seed,
    split_micro_batches,
)

CPU = torch.device("cpu")
few = integers(1, 4)


@given(integers(0, 50), few, few, few, integers(1, 30), integers(0, 3))
def test_a_step_is_the_same_for_any_number_of_processes_and_size_of_micro_batches(
    step: int, processes: int, micro: int, accumulated: int, size: int, seed: int
) -> None:
    batch = draw_global_batch(step, processes * micro * accumulated, size, seed)
    parts = [split_micro_batches(batch, rank, processes, micro) for rank in range(processes)]
    assert {len(each) for part in parts for each in part} == {micro}
    assert {len(part) for part in parts} == {accumulated}
    assert [number for part in parts for each in part for number in each] == batch


@given(integers(1, 12), integers(2, 25), integers(0, 3))
def test_an_epoch_draws_every_sequence_once_in_an_order_of_its_own(
    batch_size: int, size: int, seed: int
) -> None:
    steps = range(2 * size)  # in all, 2 * batch_size epochs
    drawn = [i for step in steps for i in draw_global_batch(step, batch_size, size, seed)]
    epochs = [drawn[start : start + size] for start in range(0, len(drawn), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size < 9 or epochs[0] != epochs[1]


def test_an_epoch_is_permuted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = torch.randperm, []

    def counting(number: int, **named: Any) -> Tensor:
        made.append(number)
        return real(number, **named)

    monkeypatch.setattr(torch, "randperm", counting)
    for step in range(10):  # the middle one lies in both epochs
        draw_global_batch(step, 4, 21, seed=8)
        draw_global_batch(step + 1, 4, 21, seed=8)  # the feed is a step ahead
    assert made == [21, 21, 21]


def test_seeds_of_draws_are_a_specified_hash_of_their_numbers() -> None:
    """`printf '7 12 5' | b2sum -l 64`, without the last bit."""
    assert hash_seed(0, 0, 0) == 0x6BC5B0BB356026A2 // 2
    assert hash_seed(7, 12, 5) == 0xFA7381A2272F7FC1 // 2


def load(step: int, number: int = 2) -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor([10 * step + micro])} for micro in range(number)]


load_many = partial(load, number=6)


def double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "y": 2 * batch["x"]}


def test_batches_of_the_steps_asked_for_in_order() -> None:
    prefetcher = Prefetcher(load, double, CPU, 3, 6)
    for step in (3, 4, 5):
        assert prefetcher.next_step() == load(step)
        assert list(prefetcher.iter_micro_batches()) == [double(batch) for batch in load(step)]
    prefetcher.close()


def test_the_next_step_is_loaded_while_this_one_runs() -> None:
    loaded = [threading.Event() for _ in range(3)]

    def telling(step: int) -> list[dict[str, Tensor]]:
        loaded[step].set()
        return load(step)

    prefetcher = Prefetcher(telling, double, CPU, 0, 3)
    prefetcher.next_step()
    assert loaded[1].wait(5)
    assert not loaded[2].is_set()
    prefetcher.close()


def test_an_error_while_loading_comes_where_the_step_is_asked_for() -> None:
    def broken(step: int) -> list[dict[str, Tensor]]:
        if step == 1:
            raise OSError("stale file handle")
        return load(step)

    prefetcher = Prefetcher(broken, double, CPU, 0, 3)
    prefetcher.next_step()
    assert len(list(prefetcher.iter_micro_batches())) == 2
    with pytest.raises(OSError, match="stale file handle"):
        prefetcher.next_step()
    prefetcher.close()


class Device:
    """A GPU of which nothing runs before the host has given it everything.

    Its allocator gives memory back to the stream that it came from, once nobody holds it on the
    host; what another stream has recorded it keeps, as nothing has run that it could wait for.

    Attributes:
        taken: blocks of memory of batches, in all.
        free: those of them that the next batch may have.
        recorded: tensors that another stream was said to use.
    """

    def __init__(self) -> None:
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        self.taken = self.free = 0
        self.recorded: set[int] = set()

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def prepare(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes a block for what the target gives."""
        self.taken, self.free = self.taken + (not self.free), max(0, self.free - 1)
        states = batch["x"].clone()
        weakref.finalize(states, self._give_back, id(states))
        self.current.queue.append(("prepare", int(batch["x"])))
        return {**batch, "y": states}

    def _give_back(self, block: int) -> None:
        self.free += block not in self.recorded

    def most_live(self) -> int:
        """Batches prepared and not yet used, where the target is as fast as it may be."""
        live, most, done = set[int](), 0, set[Event]()
        streams = [self.side.queue, self.main.queue]
        while any(streams):
            queue = next(
                q for q in streams if q and not (q[0][0] == "wait" and q[0][1] not in done)
            )
            what, of = queue.popleft()
            if what == "record":
                done.add(of)
            elif what == "prepare":
                live.add(of)
                most = max(most, len(live))
            elif what == "use":
                live.remove(of)
        return most


class Event:
    """A place in a stream."""


class Stream:
    """Requests of the host, in order."""

    def __init__(self) -> None:
        self.queue: deque[tuple[str, Any]] = deque()

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(("record", event))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(("wait", event))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


def test_two_batches_are_on_a_device_however_far_ahead_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr("torch.cuda.Stream", lambda _: device.side)
    monkeypatch.setattr("torch.cuda.stream", device.on)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: device.current)
    for name in ("map_tensors", "batch_to_device"):
        monkeypatch.setattr(prefetch, name, lambda batch, _: batch)
    recorded = device.recorded
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _: recorded.add(id(tensor)))
    prefetcher = Prefetcher(load_many, device.prepare, torch.device("cuda"), 0, 3)
    for _ in range(3):
        prefetcher.next_step()
        for batch in prefetcher.iter_micro_batches():
            device.main.queue.append(("use", int(batch["y"])))
            del batch
    prefetcher.close()
    assert device.taken == 2
    assert device.most_live() == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_target_on_a_stream_of_its_own_gives_the_same() -> None:
    device = torch.device("cuda")
    weight = torch.randn(512, 512, device=device)

    def slow(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"].float().expand(512, 512) / 100
        for _ in range(50):
            x = torch.tanh(x @ weight)
        return {**batch, "y": x}

    prefetcher = Prefetcher(load, slow, device, 0, 5)
    for step in range(5):
        prefetcher.next_step()
        for batch, raw in zip(prefetcher.iter_micro_batches(), load(step), strict=True):
            alone = slow({"x": raw["x"].to(device)})["y"]
            torch.testing.assert_close(batch["y"], alone)
    prefetcher.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_memory_of_two_batches_serves_all_and_none_is_written_over_too_early() -> None:
    device, size = torch.device("cuda"), 2**22
    weight = torch.randn(2048, 2048, device=device)

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "y": batch["x"].float().expand(size).clone()}

    before, found, expected = torch.cuda.memory_allocated(), [], []
    torch.cuda.reset_peak_memory_stats()
    prefetcher = Prefetcher(load_many, prepare, device, 0, 3)
    for step in range(3):
        prefetcher.next_step()
        for batch, raw in zip(prefetcher.iter_micro_batches(), load_many(step), strict=True):
            late = weight
            for _ in range(50):
                late = torch.tanh(late @ weight)
            found.append(batch["y"].mean() + 0 * late.sum())
            expected.append(float(raw["x"]))
            del batch
    prefetcher.close()
    assert torch.stack(found).tolist() == expected
    most = torch.cuda.max_memory_allocated() - before
    assert most < 2.5 * 4 * size + 3 * 4 * weight.numel()
