"""Training on rounds of the target's answers, as users start it: stopped, and in processes."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stores import save_inputs

from conf.settings.data import DataConfig
from conf.settings.medusa import MedusaConfig, MedusaRun
from conf.settings.target import TargetConfig
from conf.settings.training import RolloutConfig, Schedule, TrainConfig
from tests.train import test_blocks_launch as blocks
from tests.train import test_eagle_launch as eagle
from tests.train.parallel import test_launch as medusa
from tests.train.parallel.test_launch import TWO, begin, curve, inputs, trained, wait_for
from tests.train.parallel.test_strategies import launched
from train import medusa as medusa_command

__all__ = ["inputs"]
ROLLOUT = ["rollout.steps=5", "rollout.max_new_tokens=8", "rollout.batch_size=1"]


def arguments(inputs: Path, kind: str, out_dir: Path, *more: str) -> list[str]:
    if kind == "medusa":
        return medusa.arguments(inputs, out_dir, *ROLLOUT, *more)
    if kind == "eagle":
        reduced = [*eagle.EAGLE3, "head.draft_vocab_size=12"]
        return eagle.arguments(inputs, out_dir, *reduced, *ROLLOUT, *more)
    return blocks.arguments(inputs, kind, out_dir, *ROLLOUT, *more)


def weights(out_dir: Path, kind: str) -> dict[str, torch.Tensor]:
    return medusa.weights(out_dir) if kind == "medusa" else blocks.weights(out_dir)


@pytest.fixture(scope="module", params=["medusa", "eagle", "dspark", "peagle"])
def straight(
    request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    text = trained([sys.executable, *arguments(inputs, request.param, folder / "out")], folder)
    assert "answers of the target" in text
    assert len(list((folder / "out/rollouts").iterdir())) == 3
    assert len(curve(folder / "out", "rollout/tau")) == 3
    return request.param, folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["rollouts/round-0001", "checkpoints/step-000006"])
def test_a_killed_run_ends_as_one_that_was_not(
    straight: tuple[str, Path], inputs: Path, tmp_path: Path, reached: str
) -> None:
    kind, out_dir = straight
    process = begin([sys.executable, *arguments(inputs, kind, tmp_path / "out")], tmp_path)
    wait_for(tmp_path / "out" / reached, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = arguments(inputs, kind, tmp_path / "out", "train.resume=auto")
    trained([sys.executable, *again], tmp_path)
    for name, expected in weights(out_dir, kind).items():
        assert torch.equal(weights(tmp_path / "out", kind)[name], expected), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", blocks.LAYOUTS)
def test_two_processes_equal_one_in_every_layout(
    straight: tuple[str, Path], inputs: Path, tmp_path: Path, layout: str
) -> None:
    kind, out_dir = straight
    expected, more = out_dir, list[str]()
    if layout.startswith("zero"):
        more = ["train.optimizer=adamw"]
        trained([sys.executable, *arguments(inputs, kind, tmp_path / "one", *more)], tmp_path)
        expected = tmp_path / "one"
    launcher = TWO if layout == "ddp" else launched(layout)
    trained([*launcher, *arguments(inputs, kind, tmp_path / "out", *more)], tmp_path)
    for name in ("rollout/tau", "rollout/tokens", "train/loss", "eval/loss", "eval/tau"):
        assert curve(tmp_path / "out", name) == pytest.approx(curve(expected, name), abs=1e-4)
    for name, each in weights(expected, kind).items():
        torch.testing.assert_close(weights(tmp_path / "out", kind)[name], each, atol=1e-5, rtol=0)


def test_a_run_goes_on_within_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = save_inputs(tmp_path)
    run = MedusaRun(
        target=TargetConfig(path=str(inputs / "target")),
        data=DataConfig(path=str(inputs / "chat.jsonl"), max_length=64, eval_fraction=0.2),
        head=MedusaConfig(num_heads=2),
        train=TrainConfig(
            max_steps=5, batch_size=2, warmup_steps=1, schedule=Schedule.constant, log_steps=1,
            num_eval_sequences=2, num_replay_prompts=1,
        ),
        rollout=RolloutConfig(steps=2, max_new_tokens=8, batch_size=2),
        out_dir=str(tmp_path / "straight"),
    )  # fmt: skip
    medusa_command.main(run)
    stopped = replace(run, train=replace(run.train, max_steps=3), out_dir=str(tmp_path / "out"))
    medusa_command.main(stopped)
    medusa_command.main(replace(stopped, train=replace(run.train, resume="auto")))
    expected, found = (medusa.weights(tmp_path / name) for name in ("straight", "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert curve(tmp_path / "out", "rollout/tau") == curve(tmp_path / "straight", "rollout/tau")
    assert len(list((tmp_path / "straight/rollouts").iterdir())) == 3
