"""Epochs, batches in tokens and `auto` rates, once data and head are known."""

from typing import Any

import pytest

from conf.errors import InputError
from conf.settings.training import Optimizer, Schedule, TrainConfig
from tests.train.loop.test_memory import eagle, medusa
from train.loop.command import format_run_length, resolve_length, resolve_optimizer
from train.objective import Objective


@pytest.mark.parametrize(
    ("num_epochs", "steps"), [(1.0, 25), (2.0, 50), (0.5, 13), (1.01, 26)]
)  # fmt: skip
def test_epochs_are_whole_steps(num_epochs: float, steps: int) -> None:
    config = TrainConfig(num_epochs=num_epochs, batch_size=4, warmup_steps=5)
    found = resolve_length(config, num_sequences=100, length=512, num_processes=1)
    assert (found.max_steps, found.num_epochs, found.batch_size) == (steps, None, 4)
    with pytest.raises(InputError, match=r"train.warmup_steps=50: .* below train.max_steps=25"):
        resolve_length(TrainConfig(num_epochs=1.0, batch_size=4, warmup_steps=50), 100, 512, 1)


def test_an_unset_warm_up_is_a_share_of_the_steps() -> None:
    for changes, steps in (({}, 40), ({"max_steps": 290}, 12), ({"num_epochs": 1.0}, 1)):
        assert resolve_length(TrainConfig(**changes), 100, 512, 1).warmup_steps == steps
    assert resolve_length(TrainConfig(warmup_steps=0), 100, 512, 1).warmup_steps == 0


@pytest.mark.parametrize(
    ("tokens", "processes", "micro", "batch"),
    [(2048, 1, 1, 4), (2300, 1, 1, 4), (2305, 1, 1, 5), (100, 1, 1, 1), (8192, 3, 2, 18),
     (100, 2, 2, 4)],
)  # fmt: skip
def test_tokens_are_the_nearest_batch_that_divides(
    tokens: int, processes: int, micro: int, batch: int
) -> None:
    config = TrainConfig(batch_tokens=tokens, micro_batch_size=micro)
    found = resolve_length(config, 100, 512, processes)
    assert (found.batch_size, found.batch_tokens) == (batch, None)


def test_what_is_given_stays() -> None:
    assert resolve_length(TrainConfig(), 100, 512, 2) == TrainConfig(warmup_steps=40)


def resolved(
    objective: Objective | None = None, deepspeed: bool = False, trained: bool = False, **given: Any
) -> tuple[TrainConfig, str]:
    return resolve_optimizer(TrainConfig(**given), objective or eagle(), deepspeed, trained)


def test_rates_are_taken_by_optimizer_and_said() -> None:
    muon, adam = eagle().compute_default_rates(Optimizer.muon)
    found, said = resolved(optimizer=Optimizer.muon)
    assert (found.learning_rate, found.adam_learning_rate) == (muon, adam)
    assert said == (
        f"optimizer: Muon at {muon:.2g} (auto) for hidden matrices, "
        f"AdamW at {adam:.2g} (auto) for the rest; schedule: wsd"
    )
    found, said = resolved(optimizer=Optimizer.muon, learning_rate=1, adam_learning_rate=3e-4)
    assert (found.learning_rate, found.adam_learning_rate) == (1.0, 3e-4)
    assert said == (
        "optimizer: Muon at 1 for hidden matrices, AdamW at 0.0003 for the rest; schedule: wsd"
    )
    found, said = resolved(optimizer=Optimizer.adamw)
    assert found.learning_rate == eagle().compute_default_rates(Optimizer.adamw)[0] != muon
    assert said == f"optimizer: AdamW at {found.learning_rate:.2g} (auto); schedule: wsd"


def test_a_trained_head_goes_on_at_a_fifth_of_the_usual_rates() -> None:
    anew, _ = resolved()
    found, said = resolved(trained=True)
    assert found.learning_rate == pytest.approx(0.2 * float(anew.learning_rate))
    assert found.adam_learning_rate == pytest.approx(0.2 * float(anew.adam_learning_rate))
    assert said.startswith("optimizer: Muon at 0.006 (auto)")
    assert resolved(learning_rate=1.0, trained=True)[0].learning_rate == 1.0


def test_auto_is_what_suits_the_head_and_adamw_under_deepspeed() -> None:
    assert resolved()[0].optimizer is Optimizer.muon
    assert resolved(deepspeed=True)[0].optimizer is Optimizer.adamw
    assert resolved(deepspeed=True)[1].startswith("optimizer: AdamW at")
    assert resolved()[0].schedule is Schedule.wsd
    assert resolved(schedule=Schedule.constant)[0].schedule is Schedule.constant
    objective = eagle()
    objective.default_schedule, objective.default_optimizer = Schedule.cosine, Optimizer.adamw
    found, said = resolved(objective=objective)
    assert (found.schedule, found.optimizer) == (Schedule.cosine, Optimizer.adamw)
    assert said.endswith("; schedule: cosine")


@pytest.mark.parametrize("make", [eagle, medusa])
def test_the_rest_learns_slower_in_a_wider_head(make: type) -> None:
    narrow, wide = make(), make(hidden_size=256, num_attention_heads=8)
    for optimizer in (Optimizer.adamw, Optimizer.muon):
        assert narrow.compute_default_rates(optimizer)[1] > wide.compute_default_rates(optimizer)[1]
    assert (
        narrow.compute_default_rates(Optimizer.muon)[0]
        == wide.compute_default_rates(Optimizer.muon)[0]
    )


def test_the_length_of_a_run_in_words() -> None:
    config = TrainConfig(max_steps=290, batch_size=4)
    assert format_run_length(config, 1000, 512) == "290 steps of 4 x 512 = 2,048 tokens, 1.2 epochs"
