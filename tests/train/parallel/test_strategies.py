"""One run, laid out in every way: plain, DDP, FSDP2, DeepSpeed; and moved from one to another."""

import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.training import LogConfig, Optimizer
from tests.train import test_eagle_launch as eagle
from tests.train.loop.test_loop import ToyObjective, rows, settings
from tests.train.parallel.test_launch import (
    ENDLESS,
    ENV,
    LAUNCH,
    ROOT,
    arguments,
    begin,
    inputs,
    run,
    trained,
    wait_for,
)
from train.loop import loop
from train.loop.loop import TrainingJob
from train.objective import ParameterGroup
from train.parallel import processes
from train.parallel.optimizers import Muon
from train.parallel.strategies import Fsdp2Strategy, ParallelStrategy, make_strategy

__all__ = ["inputs"]
ONE = [sys.executable]
EAGLE3 = [*eagle.EAGLE3, "head.draft_vocab_size=12"]
KEEP_ALL = "train.num_checkpoints=10"


def launched(layout: str, num_processes: int = 2) -> list[str]:
    file = str(ROOT / "conf/accelerate" / f"{layout}.yaml")
    return [*LAUNCH, "--config_file", file, "--num_processes", str(num_processes)]


def assert_same_run(found: Path, expected: Path, step: int = 12) -> None:
    """Head and optimizer state after a step, to 1e-5 of the largest value of a tensor."""
    for name in ("head.safetensors", "optimizer.safetensors"):
        file = Path(f"checkpoints/step-{step:06d}") / name
        theirs, mine = load_file(expected / file), load_file(found / file)
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            difference = (mine[key] - tensor).abs().max()
            assert difference <= 1e-5 * tensor.abs().max(), (key, difference, tensor.abs().max())
    (weights,) = (found / "head").glob("*.safetensors")
    saved = load_file(weights).values()
    folder = found / "checkpoints/step-000012"
    last, state = (
        load_file(folder / name) for name in ("head.safetensors", "optimizer.safetensors")
    )
    values = [state.get(f"{name}.average", tensor) for name, tensor in last.items()]
    assert sorted(t.sum().item() for t in saved if t.is_floating_point()) == sorted(
        t.sum().item() for t in values
    )


@pytest.fixture(scope="module")
def straight(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, never stopped."""
    out_dir = tmp_path_factory.mktemp("one") / "out"
    trained([*ONE, *arguments(inputs, out_dir, KEEP_ALL)], out_dir.parent)
    return out_dir


@pytest.fixture(scope="module")
def fsdp2(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("fsdp2") / "out"
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    command = [*ONE, *arguments(inputs, out_dir, KEEP_ALL)]
    done = commands.run_two(command, out_dir.parent, ENV | asked)
    assert [process.returncode for process in done] == [0, 0], done
    said = done[0].stdout
    assert "2 process(es), cpu" in said
    assert "layout: FSDP2, 50% of the optimizer state on each process" in said
    return out_dir


def test_fsdp2_equals_one_process(straight: Path, fsdp2: Path) -> None:
    assert_same_run(fsdp2, straight)
    for name in ("train/loss", "train/tokens", "eval/loss", "eval/top1_d1"):
        found, expected = eagle.curve(fsdp2, name), eagle.curve(straight, name)
        assert found == pytest.approx(expected, abs=1e-5), name


@pytest.mark.slow
def test_a_run_of_fsdp2_goes_on_with_zero_3(
    straight: Path, fsdp2: Path, inputs: Path, tmp_path: Path
) -> None:
    """And never shows its weights in pieces: evaluations give the same figures."""
    resume = f"train.resume={fsdp2 / 'checkpoints/step-000004'}"
    said = trained([*launched("zero3"), *arguments(inputs, tmp_path / "out", resume)], tmp_path)
    assert "layout: ZeRO-3, 50% of the optimizer state on each process" in said
    assert f"continuing from {fsdp2 / 'checkpoints/step-000004'}" in said
    assert_same_run(tmp_path / "out", straight)
    for name in ("eval/loss", "eval/top1_d1", "eval/tau"):
        found, expected = eagle.curve(tmp_path / "out", name), eagle.curve(straight, name)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "says"),
    [("ddp", "DDP, 100%"), ("zero1", "ZeRO-1, 50%"), ("zero2", "ZeRO-2, 50%"),
     ("zero3", "ZeRO-3, 50%")],
)  # fmt: skip
def test_every_layout_equals_one_process(
    straight: Path, inputs: Path, tmp_path: Path, layout: str, says: str
) -> None:
    said = trained([*launched(layout), *arguments(inputs, tmp_path / "out")], tmp_path)
    assert f"layout: {says} of the optimizer state" in said
    assert said.count("head saved to") == 1
    assert_same_run(tmp_path / "out", straight)


RUNS = (("float32", "muon"), ("float32", "adamw"), ("bfloat16", "adamw"))
"""Muon in bfloat16 rounds what differs in the last bit apart."""
NUM_SAME = {"float32": 12, "bfloat16": 6}
"""Steps after which a run is the same; later so does bfloat16, a few bits at a time."""


@pytest.fixture(scope="module")
def straight_eagle(
    request: Any, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    dtype, optimizer = request.param
    out_dir = tmp_path_factory.mktemp("eagle") / "out"
    more = [*EAGLE3, f"train.dtype={dtype}", f"train.optimizer={optimizer}"]
    more += ["train.average_decay=0.9", KEEP_ALL]
    trained([*ONE, *eagle.arguments(inputs, out_dir, *more)], out_dir.parent)
    return out_dir, more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("straight_eagle", "layout", "num_same"),
    [
        pytest.param(run, layout, NUM_SAME[run[0]], id="-".join((*run, layout)))
        for run in RUNS
        for layout in ("ddp", "fsdp2", "zero2", "zero3")
        if run[1] == "adamw" or not layout.startswith("zero")
    ],
    indirect=["straight_eagle"],
)
def test_eagle_3_in_every_layout(
    straight_eagle: tuple[Path, list[str]],
    inputs: Path,
    tmp_path: Path,
    layout: str,
    num_same: int,
) -> None:
    straight, more = straight_eagle
    trained([*launched(layout), *eagle.arguments(inputs, tmp_path / "out", *more)], tmp_path)
    assert_same_run(tmp_path / "out", straight, num_same)


def moved(inputs: Path, folder: Path, stages: list[tuple[list[str], int]], *more: str) -> Path:
    """A run whose stages go on from step 4, 8, ... of the stage before; the last one's folder."""
    resume: list[str] = []
    for number, (command, begins) in enumerate(stages):
        if number:
            before = folder / str(number - 1) / "checkpoints" / f"step-{begins:06d}"
            resume = [f"train.resume={before}"]
        own = arguments(inputs, folder / str(number), KEEP_ALL, *resume, *more)
        trained([*command, *own], folder)
    return folder / str(len(stages) - 1)


@pytest.mark.slow
def test_two_sharded_then_one_then_two_with_zero(
    straight: Path, inputs: Path, tmp_path: Path
) -> None:
    stages = [(launched("zero3"), 0), (ONE, 4), (launched("fsdp2"), 6), (launched("zero1"), 10)]
    assert_same_run(moved(inputs, tmp_path, stages), straight)


@pytest.mark.slow
def test_three_processes_whose_shards_are_padded(inputs: Path, tmp_path: Path) -> None:
    six = "train.batch_size=6"
    trained([*ONE, *arguments(inputs, tmp_path / "one", six)], tmp_path)
    layouts = [launched(name, num_processes=3) for name in ("zero3", "fsdp2", "zero3", "zero2")]
    stages = list(zip(layouts, (0, 4, 8, 10), strict=True))
    assert_same_run(moved(inputs, tmp_path, stages, six), tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "cpu2", "fsdp2", "zero3"])
def test_sigterm_saves_a_checkpoint_for_another_number_of_processes(
    inputs: Path, tmp_path: Path, layout: str
) -> None:
    launcher = ONE if layout == "one" else launched(layout)
    long = arguments(inputs, tmp_path / "out", *ENDLESS)
    process = begin([*launcher, *long], tmp_path)
    wait_for(tmp_path / "out/metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert "continue with train.resume=auto" in text
    line = f" {' '.join(long)} train.resume=auto\n"
    if layout == "one":
        assert f"next, train on:\n  python{line}" in text
        assert process.returncode == 0  # torch's elastic launcher always reports the signal
    else:
        assert f" (with your options of accelerate launch):\n  accelerate launch{line}" in text
    (saved,) = (tmp_path / "out/checkpoints").iterdir()
    more = [f"train.max_steps={int(saved.name[5:]) + 3}", "train.resume=auto"]
    other = launched("cpu2") if layout == "one" else ONE
    assert f"continuing from {saved}" in trained([*other, *long, *more], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "zero1", "zero3"])
def test_a_loss_that_is_not_finite_is_never_applied(
    inputs: Path, tmp_path: Path, layout: str
) -> None:
    wild = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.save_steps=1"]
    done = run([*launched(layout), *arguments(inputs, tmp_path / "out", *wild)], tmp_path)
    assert done.returncode != 0
    assert "is not finite at step 2" in done.stderr
    (saved,) = (tmp_path / "out/checkpoints").iterdir()
    assert saved.name == "step-000001"
    for name, tensor in load_file(saved / "head.safetensors").items():
        assert tensor.isfinite().all(), name


@pytest.mark.slow
def test_two_machines_of_one_process_each(straight: Path, inputs: Path, tmp_path: Path) -> None:
    port = str(20000 + os.getpid() % 10000)
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    command = [*launched("multi_node"), "--num_machines", "2", *address, "--machine_rank"]
    own = arguments(inputs, tmp_path / "out")
    second = begin([*command, "1", *own], tmp_path)
    first = begin([*command, "0", *own], tmp_path)
    for machine in (first, second):
        said, _ = machine.communicate(timeout=180)
        assert machine.returncode == 0, said
    assert_same_run(tmp_path / "out", straight)


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
        ({}, 0, ["bias.exp_avg", "bias.exp_avg_sq", "weight.exp_avg", "weight.exp_avg_sq"]),
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


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("max_value", [None, 0.03])
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
        ({"FSDP_VERSION": "1"}, "fsdp_version=1: .*set fsdp_version: 2"),
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


def test_no_clipping_is_none_and_not_zero() -> None:
    for name in ("max_grad_norm", "max_grad_value"):
        with pytest.raises(InputError, match=rf"train\.{name}=0: must be above 0"):
            settings(**{name: 0})
