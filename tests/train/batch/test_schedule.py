"""The sequences and the learning rate of an optimizer step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conf.settings.training import Schedule, TrainConfig
from train.batch import data_loader as schedule
from train.parallel.optimizers import compute_rate_fraction


def test_global_batches_are_the_same_for_any_number_of_processes() -> None:
    for step in range(5):
        batch = schedule.draw_global_batch(step, 4, 7, seed=3)
        one = [i for micro in schedule.split_micro_batches(batch, 0, 1, 1) for i in micro]
        two = [
            i
            for r in (0, 1)
            for micro in schedule.split_micro_batches(batch, r, 2, 2)
            for i in micro
        ]
        assert one == two == batch


def test_seeds_of_draws_are_a_specified_hash_of_their_numbers() -> None:
    """`printf '7 12 5' | b2sum -l 64`, without the last bit."""
    assert schedule.hash_seed(0, 0, 0) == 0x6BC5B0BB356026A2 // 2
    assert schedule.hash_seed(7, 12, 5) == 0xFA7381A2272F7FC1 // 2
    assert schedule.hash_seed(71, 2, 5) != schedule.hash_seed(7, 12, 5)


def test_an_epoch_draws_every_sequence_once() -> None:
    drawn = [i for step in range(7) for i in schedule.draw_global_batch(step, 4, 7, seed=3)]
    epochs = [drawn[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert len(schedule.draw_global_batch(0, 20, 7, seed=3)) == 20


def test_an_epoch_is_permuted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = torch.randperm, []

    def counting(number: int, **named: Any) -> Tensor:
        made.append(number)
        return real(number, **named)

    monkeypatch.setattr(torch, "randperm", counting)
    for step in range(10):  # the middle one lies in both epochs
        schedule.draw_global_batch(step, 4, 21, seed=8)
        schedule.draw_global_batch(step + 1, 4, 21, seed=8)  # the feed is a step ahead
    assert made == [21, 21, 21]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Schedule.constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Schedule.cosine, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        (Schedule.wsd, [0.5, 1.0, 1.0, 1.0, 2 / 3, 1 / 3]),
    ],
)
def test_schedules(kind: Schedule, expected: list[float]) -> None:
    config = TrainConfig(
        max_steps=6, warmup_steps=2, learning_rate=1.0, schedule=kind, decay_fraction=0.5
    )
    found = [compute_rate_fraction(config, step) for step in range(6)]
    assert found == pytest.approx(expected, abs=1e-6)
