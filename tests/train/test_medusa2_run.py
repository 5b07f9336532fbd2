"""`train/medusa2.py` from start to end: what a run leaves, resumes, and what is made of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.export import MergeAdapterRun
from conf.settings.measure import AcceptanceRun
from conf.settings.medusa import AdapterConfig, Labels, Medusa2Run, MedusaConfig
from conf.settings.target import TargetConfig
from conf.settings.training import TrainConfig
from data.prepared.prepare import prepare_datasets
from eval import acceptance
from eval.measure.target_answers import LocalAnswerSource
from heads.kinds import load_head
from heads.target_model.load import load_target
from scripts import merge_adapter
from tests.train.runs import TWO, arguments, trained
from train import medusa2
from train.loop.evaluation import make_heldout_replay, select_heldout_prompts

CPU = torch.device("cpu")


def settings(inputs: Path, out_dir: Path, **train: Any) -> Medusa2Run:
    """Settings of `arguments`, but joint from step 6, with dropout."""
    steps: dict[str, Any] = {
        "max_steps": 12, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 0.01,
        "warmup_steps": 2, "eval_steps": 6, "save_steps": 2, "log_steps": 1,
        "num_checkpoints": 10, "num_replay_prompts": 2,
    }  # fmt: skip
    return Medusa2Run(
        target=TargetConfig(path=str(inputs / "target")),
        data=DataConfig(path=str(inputs / "chat.jsonl"), max_length=32, eval_fraction=0.1),
        head=MedusaConfig(num_heads=2, labels=Labels.hard),  # as the command has it
        adapter=AdapterConfig(rank=4, alpha=8),
        train=TrainConfig(**{**steps, **train}),
        out_dir=str(out_dir),
    )


def state(out_dir: Path, kind: str) -> dict[str, Tensor]:
    return load_file(out_dir / f"checkpoints/step-000012/{kind}.safetensors")


@pytest.fixture(scope="module")
def straight(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that was never stopped."""
    out_dir = tmp_path_factory.mktemp("medusa2") / "out"
    medusa2.main(settings(inputs, out_dir))
    return out_dir


def test_a_run_reports_the_target_and_leaves_head_and_adapter(straight: Path, inputs: Path) -> None:
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "train/loss" in line]
    assert [line["train/loss_d0"] > 1e-6 for line in train] == [False] * 7 + [True] * 5
    first, last = (line for line in lines if "eval/target_loss" in line)
    assert first["eval/target_change_percent"] == 0.0
    change = 100 * (last["eval/target_loss"] / last["eval/target_loss_before"] - 1)
    assert last["eval/target_change_percent"] == pytest.approx(change) != 0.0
    adapted = TargetConfig(path=str(inputs / "target"), adapter=str(straight / "adapter"))
    target, config = load_target(adapted, CPU), settings(inputs, straight)
    heldout = prepare_datasets(config.data, target.tokenizer, seed=0)[1]
    head = load_head(str(straight / "head")).attach(target).eval()
    live = make_heldout_replay(
        LocalAnswerSource(target), select_heldout_prompts(heldout, 2), 2, head.taps
    )
    assert last["eval/tau"] == pytest.approx(live(head)["tau"])
    origin = json.loads((straight / "head/headsmith.json").read_text())
    assert origin["adapter"]["path"] == str(straight / "adapter")
    assert len(origin["adapter"]["sha256"]) == 64
    assert sorted(path.name for path in (straight / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "headsmith.json",
    ]  # fmt: skip


def test_the_heads_learn_alone_until_the_joint_steps(straight: Path) -> None:
    before, after = (
        load_file(straight / f"checkpoints/step-0000{step}/head.safetensors")
        for step in ("06", "12")
    )
    factors = [name for name in before if name.startswith("adapter.")]
    assert len(factors) == 2 * 2 * 7  # two factors, two layers, seven projections
    assert all(before[name].eq(0).all() for name in factors if "lora_B" in name)
    assert not any(after[name].equal(before[name]) for name in before)


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_resumed_equals_uninterrupted(
    straight: Path, inputs: Path, tmp_path: Path, step: int
) -> None:
    resume = str(straight / f"checkpoints/step-00000{step}")
    medusa2.main(settings(inputs, tmp_path / "out", resume=resume))
    for kind in ("head", "optimizer"):
        found, expected = state(tmp_path / "out", kind), state(straight, kind)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)


def test_another_joint_setting_does_not_continue_a_run(
    straight: Path, inputs: Path, tmp_path: Path
) -> None:
    resume = str(straight / "checkpoints/step-000004")
    config = settings(inputs, tmp_path / "out", resume=resume)
    config.joint.heads_only_steps = 8
    with pytest.raises(InputError, match=r"other settings: joint\.heads_only_steps was 6, is 8"):
        medusa2.main(config)


@pytest.mark.slow
def test_two_processes_equal_one(straight: Path, inputs: Path, tmp_path: Path) -> None:
    script = [str(Path(medusa2.__file__)), *arguments(inputs, tmp_path / "out")[1:]]
    more = ["adapter.rank=4", "adapter.alpha=8"]
    said = trained([*TWO, *script, *more], tmp_path)
    assert "2 process(es), cpu" in said
    assert "the target's own held-out loss" in said
    for kind in ("head", "optimizer"):
        for name, expected in state(straight, kind).items():
            found = state(tmp_path / "out", kind)[name]
            difference = (found - expected).abs().max()
            assert difference <= 1e-5 * expected.abs().max(), (name, difference)


@pytest.fixture(scope="module")
def merged(straight: Path, inputs: Path) -> Path:
    out_dir = straight.parent / "merged"
    target = TargetConfig(path=str(inputs / "target"), adapter=str(straight / "adapter"))
    merge_adapter.main(MergeAdapterRun(target, str(out_dir)))
    return out_dir


def test_merged_equals_adapted(straight: Path, inputs: Path, merged: Path) -> None:
    bare, adapted, whole = (
        load_target(TargetConfig(path=str(path), adapter=adapter), CPU)
        for path, adapter in (
            (inputs / "target", None), (inputs / "target", str(straight / "adapter")),
            (merged, None),
        )
    )  # fmt: skip
    said = [
        each.compute_logits(each.encode_text([5, 7, 9, 4]).hidden_states)
        for each in (adapted, whole)
    ]
    torch.testing.assert_close(*said, atol=1e-5, rtol=1e-5)
    before = bare.compute_logits(bare.encode_text([5, 7, 9, 4]).hidden_states)
    assert (said[0] - before).abs().max() > 1e-2
    assert whole.tokenizer.chat_template == bare.tokenizer.chat_template
    assert whole.generation_config.eos_token_id == bare.generation_config.eos_token_id
    assert whole.dtype == bare.dtype


def test_acceptance_takes_the_adapter_or_the_merged_target(
    straight: Path, inputs: Path, merged: Path, tmp_path: Path
) -> None:
    found = []
    for path, adapter in ((inputs / "target", str(straight / "adapter")), (merged, None)):
        out_dir = tmp_path / path.name
        config = AcceptanceRun(
            target=TargetConfig(path=str(path), adapter=adapter),
            head=HeadRef(str(straight / "head")),
            data=DataConfig(path=str(inputs / "chat.jsonl"), num_prompts=3),
            max_new_tokens=16,
            out_dir=str(out_dir),
        )
        acceptance.main(config)
        found.append(json.loads((out_dir / "acceptance.json").read_text()))
    assert found[0]["tau"] == found[1]["tau"]
    assert found[0]["alpha"] == found[1]["alpha"]


def test_a_merge_that_cannot_be_is_refused(tmp_path: Path) -> None:
    adapter = str(tmp_path)
    for target, message in (
        (TargetConfig(adapter=adapter), r"target\.path is unset"),
        (TargetConfig(path="t"), r"target\.adapter is unset"),
    ):
        with pytest.raises(InputError, match=message):
            merge_adapter.main(MergeAdapterRun(target))
    (tmp_path / "mine").touch()
    target = TargetConfig(path="t", adapter=adapter)
    with pytest.raises(InputError, match=r"out_dir=.*: is not an empty folder"):
        merge_adapter.main(MergeAdapterRun(target, str(tmp_path)))
