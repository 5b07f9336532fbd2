"""Layouts of a run in one process: plain, and FSDP2 with all of its shards; what is refused."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.training import LogConfig, Optimizer
from tests.train.loop.test_loop import ToyObjective, rows, settings
from train.loop import loop
from train.loop.loop import TrainingJob
from train.objective import ParameterGroup
from train.parallel import processes
from train.parallel.optimizers import Muon
from train.parallel.strategies import Fsdp2Strategy, ParallelStrategy, make_strategy

UNIT = torch.ones(1)


@pytest.fixture(params=["plain", "fsdp2"])
def layout(
    request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[type[ParallelStrategy]]:
    """The class of `placed` in this process alone; FSDP2 with all of its shards."""
    if request.param == "plain":
        yield ParallelStrategy
        return
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Fsdp2Strategy
    finally:
        torch.distributed.destroy_process_group()


def placed(**changes: Any) -> ParallelStrategy:
    config = settings(weight_decay=0.1, **changes)
    return make_strategy(processes.start_accelerator(config), ToyObjective(), config)


def batch(row: int) -> dict[str, Tensor]:
    return {name: values[None] for name, values in rows(4)[row].items()}


def values(placement: ParallelStrategy) -> list[list[float]]:
    tensors = placement.gather_tensors()
    return [value.flatten().tolist() for value in (tensors.head | tensors.state).values()]


def one_step(placement: ParallelStrategy, row: int, number: int = 0) -> float:
    with placement.open_micro_batch(last=True):
        placement.backward(placement.objective(batch(row), UNIT).total)
    norm = float(placement.clip_gradients(number))
    assert placement.step_optimizers(learning_rate=0.1, step=number) == 0
    return norm


MUON = {"optimizer": Optimizer.muon, "adam_learning_rate": 0.025}
"""Half of `settings`'s own rate."""


@pytest.mark.parametrize("changes", [{}, MUON], ids=["adamw", "muon"])
def test_steps_are_those_of_the_optimizers(
    layout: type[ParallelStrategy], changes: dict[str, Any]
) -> None:
    placement, plain = placed(**changes), ToyObjective()
    assert type(placement) is layout
    by_adamw, optimizers = list(plain.parameters()), []
    if changes:
        muon = Muon([plain.head.weight], torch.float32, lr=0.1, weight_decay=0.1)
        muon.state[plain.head.weight]["momentum_buffer"] = torch.zeros(1, 4)
        by_adamw, optimizers = [plain.head.bias], [muon]
    rate = 0.05 if changes else 0.1
    optimizers.append(torch.optim.AdamW(by_adamw, lr=rate, weight_decay=0.1, fused=True))
    for row in range(3):
        plain(batch(row), UNIT).total.backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
        assert one_step(placement, row) == norm
        for optimizer in optimizers:
            optimizer.step()
        plain.zero_grad()
    with placement.open_whole_weights():
        for name, theirs in plain.head.named_parameters():
            assert placement.head.get_parameter(name).equal(theirs), name


@pytest.mark.parametrize(
    ("changes", "steps", "state"),
    [
        ({}, 2, ["bias.exp_avg", "bias.exp_avg_sq", "weight.exp_avg", "weight.exp_avg_sq"]),
        ({**MUON, "average_decay": 0.9}, 2,
         ["bias.average", "bias.exp_avg", "bias.exp_avg_sq", "weight.average",
          "weight.momentum_buffer"]),
    ],
)  # fmt: skip
def test_what_is_restored_goes_on_as_what_was_saved(
    layout: type[ParallelStrategy], changes: dict[str, Any], steps: int, state: list[str]
) -> None:
    saved = placed(**changes)
    for row in range(steps):
        one_step(saved, row)
    tensors = saved.gather_tensors()
    assert sorted(tensors.head) == ["bias", "weight"]
    assert sorted(tensors.state) == state
    objective, config = ToyObjective(), settings(weight_decay=0.1, **changes)
    objective.head.load_state_dict(tensors.head)
    restored = make_strategy(processes.start_accelerator(config), objective, config)
    restored.restore_optimizers(steps, tensors.state)
    one_step(saved, 3), one_step(restored, 3)
    assert values(restored) == values(saved)


def test_averages_move_by_their_decay_and_are_seen_in_averaged_alone(
    layout: type[ParallelStrategy],
) -> None:
    placement = placed(average_decay=0.25)
    average = ToyObjective().head.weight.detach()
    for number, decay in enumerate((1 / 10, 2 / 11, 0.25)):
        one_step(placement, number, number)
        with placement.open_whole_weights():
            weight = placement.head.weight.detach().clone()
        average = decay * average + (1 - decay) * weight
    with placement.open_averaged_weights():
        torch.testing.assert_close(placement.head.weight.detach(), average)
    with placement.open_whole_weights():
        assert placement.head.weight.equal(weight)


@pytest.mark.parametrize(("max_norm", "max_value"), [(None, 0.03), (0.1, None), (0.1, 0.03)])
def test_gradients_are_clipped_by_norm_and_by_value(
    layout: type[ParallelStrategy], max_norm: float | None, max_value: float | None
) -> None:
    placement = placed(max_grad_norm=max_norm, max_grad_value=max_value)
    plain = ToyObjective()
    seen: list[Tensor] = []
    placement.optimizers[0].register_step_pre_hook(
        lambda *_args: seen.extend(whole(p.grad) for p in placement.trained.values())
    )
    plain(batch(0), UNIT).total.backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert norm > 1  # both clip
    assert one_step(placement, 0) == pytest.approx(float(norm))
    for found, parameter in zip(seen, plain.head.parameters(), strict=True):
        assert parameter.grad is not None
        expected = parameter.grad * (1 if max_norm is None else max_norm / norm)
        expected = expected if max_value is None else expected.clamp(-max_value, max_value)
        torch.testing.assert_close(found, expected)
    if max_value is not None:
        assert max(float(each.abs().max()) for each in seen) == pytest.approx(max_value)


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def test_a_group_that_joins_later_starts_as_if_the_run_had() -> None:
    class Late(ToyObjective):
        def list_parameter_groups(self) -> list[ParameterGroup]:
            return [
                ParameterGroup([self.head.weight], rate=0.5),
                ParameterGroup([self.head.bias], first_step=2),
            ]

    config = settings(max_grad_norm=1e9, warmup_steps=2)
    placement = make_strategy(processes.start_accelerator(config), Late(), config)
    plain = ToyObjective()
    early = torch.optim.AdamW([plain.head.weight], lr=0.05, weight_decay=0.0, fused=True)
    late = torch.optim.AdamW([plain.head.bias], lr=0.1, weight_decay=0.0, fused=True)
    for number in range(4):
        if number == 3:
            saved, placement = (
                placement,
                make_strategy(processes.start_accelerator(config), Late(), config),
            )
            placement.head.load_state_dict(saved.gather_tensors().head)
            placement.restore_optimizers(3, saved.gather_tensors().state)
        one_step(placement, number, number)
        plain.zero_grad()
        plain(batch(number), UNIT).total.backward()
        early.step()
        if number >= 2:
            late.param_groups[0]["lr"] = {2: 0.05, 3: 0.1}[number]  # it warms up
            late.step()
        assert placement.head.bias.equal(plain.head.bias), number
        assert placement.head.weight.equal(plain.head.weight), number


def test_the_norm_of_gradients_that_are_not_finite_is_not(layout: type[ParallelStrategy]) -> None:
    placement = placed()
    bad = batch(0) | {"x": torch.full((1, 6, 4), torch.inf), "loss_mask": torch.ones(1, 6)}
    placement.backward(placement.objective(bad, UNIT).total)
    assert not math.isfinite(placement.clip_gradients(0))


def test_processes_that_see_other_checkpoints_are_refused(tmp_path: Path) -> None:
    def gather(steps: Tensor) -> Tensor:
        return torch.cat([steps, torch.tensor([8])])

    accelerator: Any = SimpleNamespace(
        process_index=0, num_processes=2, device=torch.device("cpu"), gather=gather
    )
    job = TrainingJob(settings(), LogConfig(), 0, tmp_path, ToyObjective(), rows(4), rows(1))
    with pytest.raises(InputError, match=r"steps \[0, 8\]; set out_dir=.* that all nodes share"):
        loop.fit_head(accelerator, job)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "fsdp_version=1: .*set fsdp_version: 2"),
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params=true"),
    ],
)
def test_other_kinds_of_fsdp_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in {"ACCELERATE_USE_FSDP": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        processes.start_accelerator(settings())


@pytest.mark.parametrize(
    ("plugin", "config", "ours", "message"),
    [
        (None, {}, {}, "ACCELERATE_USE_CPU: switches DeepSpeed off"),
        ({"zero_stage": 0}, {}, {}, "zero_stage=0: allowed: 1, 2, 3"),
        ({"offload_param_device": "cpu"}, {}, {}, "offload_param_device=cpu: allowed"),
        ({}, {"optimizer": {}}, {}, "deepspeed optimizer: set by"),
        ({}, {"bf16": {"enabled": True}}, {}, "deepspeed bf16: set by"),
        ({}, {}, {"max_grad_value": 0.5}, r"max_grad_value=0\.5: DeepSpeed clips by norm only"),
        ({}, {}, {"optimizer": Optimizer.muon}, r"optimizer=muon: .* DeepSpeed .* fsdp2\.yaml"),
    ],
)
def test_deepspeed_settings_that_would_change_a_run_are_refused(
    plugin: dict[str, Any] | None, config: dict[str, Any], ours: dict[str, Any], message: str
) -> None:
    defaults = {
        "zero_stage": 2, "offload_optimizer_device": "none", "offload_param_device": None,
        "deepspeed_config": config,
    }  # fmt: skip
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(**defaults | (plugin or {})))
    strategy = "MULTI_CPU" if plugin is None else "DEEPSPEED"
    accelerator: Any = SimpleNamespace(distributed_type=strategy, state=state, num_processes=2)
    with pytest.raises(InputError, match=message):
        processes._set_up_deepspeed(accelerator, settings(**ours))
