"""Batches come in order, one step ahead, and what goes wrong in the thread is told."""

import threading

import pytest
import torch
from torch import Tensor

from train.batch.prefetch import Prefetcher

CPU = torch.device("cpu")


def load(step: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor([10 * step + number])} for number in range(2)]


def double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "y": 2 * batch["x"]}


def taken(prefetcher: Prefetcher, num_steps: int) -> list[list[int]]:
    found = []
    for _ in range(num_steps):
        raw = prefetcher.next_step()
        prepared = list(prefetcher.micro_batches())
        assert [int(batch["y"]) for batch in prepared] == [2 * int(batch["x"]) for batch in raw]
        found.append([int(batch["x"]) for batch in prepared])
    prefetcher.close()
    return found


def test_batches_of_the_steps_asked_for_in_order() -> None:
    assert taken(Prefetcher(load, double, CPU, 3, 6), 3) == [[30, 31], [40, 41], [50, 51]]


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
    assert len(list(prefetcher.micro_batches())) == 2
    with pytest.raises(OSError, match="stale file handle"):
        prefetcher.next_step()
    prefetcher.close()


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
        for batch, raw in zip(prefetcher.micro_batches(), load(step), strict=True):
            alone = slow({"x": raw["x"].to(device)})["y"]
            torch.testing.assert_close(batch["y"], alone)
    prefetcher.close()
