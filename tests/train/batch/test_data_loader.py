"""Batches come in order, one step ahead, and what goes wrong in the thread is told."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from train.batch import data_loader as prefetch
from train.batch.data_loader import Prefetcher

CPU = torch.device("cpu")


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
