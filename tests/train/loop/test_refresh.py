"""A head that goes on, for the target it was trained for or for one that has changed since."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stores import NUM_LAYERS, captured, save_inputs
from toys import save_target

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.medusa import MedusaConfig, MedusaRun
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import TrainConfig
from heads.target_model.identity import format_target_change, identify_target
from heads.target_model.load import load_target_tokenizer
from tests.train.runs import curve
from train import medusa
from train.loop.sources import load_target_source


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_inputs(tmp_path_factory.mktemp("inputs"))
    save_target(folder / "changed", seed=1, num_hidden_layers=NUM_LAYERS)
    return folder


def settings(inputs: Path, out_dir: Path, head: str | None = None, **changes: Any) -> MedusaRun:
    return MedusaRun(
        target=TargetConfig(path=str(inputs / changes.pop("target", "target"))),
        data=DataConfig(path=str(inputs / "chat.jsonl"), max_length=64, eval_fraction=0.2),
        head=MedusaConfig(num_heads=2, path=head),
        train=TrainConfig(
            max_steps=2, batch_size=2, warmup_steps=1, log_steps=1, num_eval_sequences=2,
            num_replay_prompts=1, save_steps=1,
        ),
        out_dir=str(out_dir),
        **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def head(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        medusa.main(settings(inputs, folder))
    return folder


def test_tau_is_known_before_the_first_step_of_what_goes_on(
    inputs: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    medusa.main(settings(inputs, tmp_path, str(head / "head")))
    assert "was trained for" not in capsys.readouterr().out
    before, after = curve(tmp_path, "eval/loss")
    assert before == pytest.approx(curve(head, "eval/loss")[0], rel=1e-6)
    assert after != before
    lines = [json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 0
    assert "eval/tau" in lines[0]
    assert len(curve(head, "eval/loss")) == 1
    anew, gone_on = (
        json.loads((each / "head" / "headsmith.json").read_text())["config"]["train"]
        for each in (head, tmp_path)
    )
    assert gone_on["learning_rate"] == pytest.approx(0.2 * anew["learning_rate"])


WORDS = re.compile(
    r"head: trained for another target \((\S+), not (\S+)\), so fewer draft tokens may be "
    r"accepted; set target\.path=\1, or train the head further \(docs/data\.md, A target that "
    r"has changed\)\. "
    r"What differs: target\.weights was \w{12}, is \w{12}"
)


def test_a_head_of_another_target_is_told_of(
    inputs: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    medusa.main(settings(inputs, tmp_path / "other", str(head / "head"), target="changed"))
    assert WORDS.search(capsys.readouterr().out)


def test_a_head_from_a_store_knows_the_target_that_was_captured(
    inputs: Path, tmp_path: Path
) -> None:
    store = captured(inputs, tmp_path / "store")
    run = settings(inputs, tmp_path / "out")
    data, target = DataConfig(features=str(store)), TargetConfig()
    medusa.main(replace(run, data=data, target=target))
    found = tmp_path / "out/head"
    for name, told in (("target", False), ("changed", True)):
        where = TargetConfig(path=str(inputs / name))
        identity = identify_target(where, load_target_tokenizer(where), torch.float32)
        assert (format_target_change("head.path", str(found), None, identity) is not None) == told
    noted = json.loads((found / "headsmith.json").read_text())
    noted["target_identity"]["name"] = identity.name
    (found / "headsmith.json").write_text(json.dumps(noted))
    said = format_target_change("head.path", str(found), None, identity)
    assert f"({identity.name} as it was), so fewer" in str(said)
    assert "; train the head further (docs/data.md" in str(said)
    del noted["target_identity"]
    (found / "headsmith.json").write_text(json.dumps(noted))
    assert format_target_change("head.path", str(found), None, identity) is None
    (found / "headsmith.json").unlink()
    assert format_target_change("head.path", str(found), None, identity) is None


def other_target(run: MedusaRun, inputs: Path, _folder: Path) -> None:
    run.target.path = str(inputs / "changed")


def other_dtype(run: MedusaRun, _inputs: Path, _folder: Path) -> None:
    run.target.dtype = Dtype.bfloat16


def other_row(run: MedusaRun, _inputs: Path, folder: Path) -> None:
    """Some of the last, each as long as it was."""
    text = Path(str(run.data.path)).read_text()
    middle = len(text) // 2
    run.data.path = str(folder / "chat.jsonl")
    (folder / "chat.jsonl").write_text(text[:middle] + text[middle:].replace("than", "thin"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_target, r"target\.weights was \w{12}, is \w{12}\. Continue"),
        (other_dtype, r"target\.dtype was 'float32', is 'bfloat16'\. Continue"),
        (other_row, r"data\.checksum was '\w{16}', is '\w{16}'\. Continue"),
    ],
)
def test_a_run_goes_on_with_the_target_and_the_data_that_it_began_with(
    inputs: Path, head: Path, tmp_path: Path, change: Any, says: str
) -> None:
    again = settings(inputs, tmp_path / "out")
    again.train.resume = str(head / "checkpoints/step-000001")
    change(again, inputs, tmp_path)
    with pytest.raises(InputError, match=says):
        medusa.main(again)


def test_training_answers_as_the_generation_config_says(inputs: Path, tmp_path: Path) -> None:
    """Its tau, and what rollouts learn: both ask the target that is made here."""
    folder = shutil.copytree(inputs / "target", tmp_path / "target")
    run = settings(inputs, tmp_path / "out")
    run.target.path = str(folder)
    launched: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    file = folder / "generation_config.json"
    usual = json.loads(file.read_text())

    def source(**asks: Any) -> Any:
        file.write_text(json.dumps(usual | asks))
        return load_target_source(run, launched)

    assert source().target.logits_processing == {}
    found = source(repetition_penalty=1.5, stop_strings=["end"])
    assert (found.target.logits_processing, found.target.stop_strings) == (
        {"repetition_penalty": 1.5},
        ("end",),
    )
    found = source(num_beams=4)
    assert found.target.logits_processing == {}
    assert found.lines[0].startswith("tau is measured on plain greedy answers: ")
    assert "num_beams=4, which drafts cannot be verified with" in found.lines[0]
    run.rollout.steps = 1
    with pytest.raises(InputError, match="num_beams=4, which drafts cannot be verified with"):
        source(num_beams=4)


def test_rollouts_go_on_with_the_answers_that_they_began_with(inputs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(inputs / "target", tmp_path / "target")
    run = settings(inputs, tmp_path / "out")
    run.target.path, run.rollout.steps, run.rollout.max_new_tokens = str(folder), 1, 4
    medusa.main(run)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.5}))
    run.train.resume = "auto"
    said = r"answers\.generation_config was \[\], is \[\['repetition_penalty', 1\.5\]\]\. Continue"
    with pytest.raises(InputError, match=said):
        medusa.main(run)
