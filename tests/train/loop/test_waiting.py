"""Which of two sides waits."""

import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from toys import random_target, texts

from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from train.loop import sources as served
from train.loop.sources import WaitTimer, format_server_balance


def test_the_share_is_of_the_time_since_the_last_look() -> None:
    waiting = WaitTimer()
    for waits_s, works_s, expected in ((0.3, 0.1, 0.75), (0.0, 0.2, 0.0)):
        with waiting.measure_wait():
            time.sleep(waits_s)
        time.sleep(works_s)
        assert waiting.pop_wait_fraction() == pytest.approx(expected, abs=0.1)
    assert waiting.num_looks == 2


def test_the_side_that_waits_is_named() -> None:
    assert format_server_balance(0.6).endswith(
        "60% of the time; 2.5 times as many servers in target.engine would keep it busy"
    )
    assert "the servers keep up" in format_server_balance(0.04)


@pytest.mark.parametrize(("processes", "steps"), [("1", 3), ("2", 1), ("64", 1)])
def test_as_many_steps_are_asked_for_as_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, processes: str, steps: int
) -> None:
    """A step of 1,000 tokens of 2 layers of 64 numbers takes 512,000 bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * 1_600_000))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    pool = SimpleNamespace(taps=SimpleNamespace(layers=(1, 2), hidden_size=64))
    assert served.count_prefetch_steps(pool, 1000) == steps  # type: ignore[arg-type]


def test_the_longest_document_is_of_any_sequence() -> None:
    target = random_target()
    samples = [Sample(text, [True] * len(text)) for text in texts(target, 3, 5)]
    samples += [Sample(text, [True] * len(text)) for text in texts(target, 1, 19)]
    rows = PackedDataset(samples, 24, seed=0)
    longest = max(int(torch.bincount(row["document_ids"] + 1)[1:].max()) for row in rows)
    assert len(served.find_longest_document(rows)) == longest
