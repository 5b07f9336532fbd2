"""`train/eagle.py` as users start it: real processes, a tiny target, a small file."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import doors
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from toys import random_model

from conf.errors import InputError
from tests.train.parallel.test_launch import ROOT, TWO, begin, curve, inputs, trained, wait_for
from train import eagle

SCRIPT = str(ROOT / "train" / "eagle.py")
EAGLE3 = ["head=eagle3", "head.layers=[0,1,2]", "head.num_steps=3"]
__all__ = ["inputs"]


def arguments(inputs: Path, out_dir: Path, *more: str) -> list[str]:
    return [
        SCRIPT, f"target.path={inputs / 'target'}", f"data.path={inputs / 'chat.jsonl'}",
        f"out_dir={out_dir}", "data.max_length=32", "data.eval_fraction=0.1",
        "train.batch_size=4", "train.warmup_steps=2", "train.max_steps=12", "train.save_steps=2",
        "train.eval_steps=6", "train.log_steps=1", "train.learning_rate=0.01", *more,
    ]  # fmt: skip


def here(command: list[str]) -> None:
    """The command in this process."""
    eagle.main(OmegaConf.to_object(doors.COMMANDS["train/eagle.py"].compose_settings(command[1:])))


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(out_dir / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def straight(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    more = [*EAGLE3, "head.draft_vocab_size=12"]
    text = trained([sys.executable, *arguments(inputs, folder / "out", *more)], folder)
    assert "draft vocabulary: 12 of 18 ids cover" in text
    assert "draft vocabulary: covers " in text  # of held-out text
    assert "head: eagle3, 3 steps" in text
    assert "head saved to" in text
    return folder / "out"


def test_a_head_learns_and_reports_every_step(straight: Path) -> None:
    losses = curve(straight, "train/loss")
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    for name in ("loss_d3", "top1_d3", "alpha_d3", "greedy_alpha_d3", "tau"):
        assert len(curve(straight, f"eval/{name}")) == 2, name
    saved = weights(straight)
    assert saved["d2t"].shape == (12,)
    assert saved["t2d"].sum() == 12
    assert saved["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert "embed_tokens.weight" not in saved


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_accumulation(
    straight: Path, inputs: Path, tmp_path: Path
) -> None:
    more = [*EAGLE3, "head.draft_vocab_size=12"]
    trained([*TWO, *arguments(inputs, tmp_path / "out", *more)], tmp_path)
    for name in ("train/loss", "eval/loss", "eval/top1_d1", "eval/tau"):
        assert curve(tmp_path / "out", name) == pytest.approx(curve(straight, name), abs=1e-5)
    for name, expected in weights(straight).items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], expected, atol=1e-5, rtol=0)


def test_a_trained_head_is_gone_on_from_with_its_own_vocabulary(
    straight: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    more = [f"head.path={straight / 'head'}", "head.draft_vocab_size=8", "train.max_steps=3"]
    other_half = [f"data.path={tmp_path / 'new.jsonl'}", "data.chat_template_kwargs={brief: true}"]
    rows = [{"prompt": f"the cat {word}", "response": "a mat"} for word in ("sat", "saw", "and")]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here(arguments(inputs, tmp_path / "out", "head=eagle3", *more, *other_half))
    said = (
        f"head.path={straight / 'head'}: was trained with data.chat_template_kwargs={{}}, but is "
        'trained further with data.chat_template_kwargs={"brief": true}, so it sees other prompts'
    )
    assert said in capsys.readouterr().out.splitlines()
    counts = [
        json.loads((each / "head/headsmith.json").read_text())["trained_on"]["num_prompts"]
        for each in (straight, tmp_path / "out")
    ]
    assert counts[1] == counts[0] + 2
    assert weights(tmp_path / "out")["d2t"].equal(weights(straight)["d2t"])
    assert curve(tmp_path / "out", "train/loss_d1")[0] < curve(straight, "train/loss_d1")[0]
    other = arguments(inputs, tmp_path / "other", "head=eagle1", *more)
    with pytest.raises(InputError, match=r"an eagle3 head, but the recipe has head\.form=eagle1"):
        here(other)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle1", "hass"])
def test_kill_9_with_noise_muon_and_averages_then_resume_equals_an_uninterrupted_run(
    inputs: Path, tmp_path: Path, recipe: str
) -> None:
    more = [f"head={recipe}", "train.optimizer=muon", "train.average_decay=0.9"]
    trained([sys.executable, *arguments(inputs, tmp_path / "straight", *more)], tmp_path)
    command = [sys.executable, *arguments(inputs, tmp_path / "out", *more)]
    process = begin(command, tmp_path)
    wait_for(tmp_path / "out/checkpoints/step-000004", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    trained([*command, "train.resume=auto"], tmp_path)
    for name, expected in weights(tmp_path / "straight").items():
        assert torch.equal(weights(tmp_path / "out")[name], expected), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "lfm2", "qwen3_next"])
def test_targets_with_sinks_and_states_train_alike_however_they_are_run(
    inputs: Path, tmp_path: Path, family: str
) -> None:
    """Two processes equal one, and a run that was killed goes on as if it had not been."""
    shutil.copytree(inputs, tmp_path / "inputs")
    model = random_model(family, vocab_size=64, eos_token_id=1)
    model.save_pretrained(tmp_path / "inputs/target")
    more = [*EAGLE3, "head.draft_vocab_size=12"]

    def command(name: str) -> list[str]:
        return arguments(tmp_path / "inputs", tmp_path / name, *more)

    trained([sys.executable, *command("one")], tmp_path)
    expected = weights(tmp_path / "one")
    trained([*TWO, *command("two")], tmp_path)
    for name, found in weights(tmp_path / "two").items():
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=0)
    process = begin([sys.executable, *command("killed")], tmp_path)
    wait_for(tmp_path / "killed/checkpoints/step-000004", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    trained([sys.executable, *command("killed"), "train.resume=auto"], tmp_path)
    for name, found in weights(tmp_path / "killed").items():
        assert torch.equal(found, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle1", "eagle3_1", "hass"])
def test_noise_does_not_depend_on_the_number_of_processes(
    inputs: Path, tmp_path: Path, recipe: str
) -> None:
    layers = ["head.layers=[0,1,2]"] if recipe == "eagle3_1" else []
    for launcher, name in (([sys.executable], "one"), (TWO, "two")):
        own = arguments(inputs, tmp_path / name, f"head={recipe}", *layers)
        trained([*launcher, *own], tmp_path)
    for name, expected in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["nla", "hybrid"])
def test_other_divergences_and_bfloat16(inputs: Path, tmp_path: Path, divergence: str) -> None:
    more = [*EAGLE3, f"head.divergence={divergence}", "train.dtype=bfloat16"]
    trained([sys.executable, *arguments(inputs, tmp_path / "out", *more)], tmp_path)
    losses = curve(tmp_path / "out", "train/loss")
    assert losses[-1] < losses[0]
