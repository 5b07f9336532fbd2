"""Settings that may change when a run continues, and refusals, which name the key."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import packed, random_target

from conf.errors import InputError
from conf.settings.eagle import Divergence, EagleConfig, StepNormalizer, TokenNormalizer
from conf.settings.medusa import (
    AdapterConfig,
    HeadsSchedule,
    JointConfig,
    Labels,
    Medusa2Run,
    MedusaConfig,
)
from conf.settings.target import Dtype
from conf.settings.training import LogConfig, Optimizer, Schedule, TrainConfig
from heads.eagle.eagle import EagleHead
from heads.medusa import MedusaHead
from heads.target_model.adapter import Adapter
from heads.vocab import DraftVocab
from tests.train.loop.test_loop import fit, rows, settings, weights
from tests.train.loop.test_loop import lines as metrics
from train.eagle import EagleObjective
from train.loop import loop
from train.loop.command import resolve_length
from train.loop.loop import Outcome, TrainingJob
from train.medusa import MedusaObjective
from train.medusa2 import AdaptedMedusa, Medusa2Objective
from train.parallel import checkpoint as resume
from train.parallel import processes

EAGLE = EagleConfig(num_steps=2, draft_vocab_size=40)


def fit_eagle(
    out_dir: Path, train: TrainConfig, head: EagleConfig = EAGLE, vocab_seed: int = 0
) -> Outcome:
    target = random_target(num_hidden_layers=6)
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(vocab_seed))
    vocab = DraftVocab.from_counts(counts, head.draft_vocab_size, [0])
    objective = EagleObjective(EagleHead.from_settings(target, head, vocab, seed=0), target, head)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 90, (24,), generator=generator).tolist() for _ in range(4)]
    data = [{name: each[0] for name, each in packed([text]).items()} for text in texts]
    job = TrainingJob(train, LogConfig(), 0, out_dir, objective, data, data[:1])
    return loop.fit_head(processes.start_accelerator(train), job)


@pytest.fixture(scope="module")
def eagle_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of EAGLE-3."""
    out_dir = tmp_path_factory.mktemp("eagle")
    train = settings(max_steps=4, save_steps=2, warmup_steps=1)
    fit_eagle(out_dir, train)
    return out_dir / "checkpoints/step-000002"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head.divergence", Divergence.tv), ("head.step_decay", 0.5), ("head.noise", 0.1),
        ("head.step_normalizer", StepNormalizer.mean), ("head.detach_features", True),
        ("head.token_normalizer", TokenNormalizer.supervised), ("head.top_k_weight", 1.0),
        ("train.max_grad_norm", 0.5), ("train.warmup_steps", 2), ("train.batch_size", 2),
        ("train.weight_decay", 0.1), ("train.adam_beta2", 0.95),
        ("train.optimizer", Optimizer.adamw), ("train.average_decay", 0.5),
    ],
)  # fmt: skip
def test_an_eagle_run_does_not_go_on_as_another(
    eagle_run: Path, tmp_path: Path, key: str, value: Any
) -> None:
    group, name = key.split(".")
    train = settings(max_steps=4, save_steps=2, warmup_steps=1, resume=str(eagle_run))
    head = EAGLE
    if group == "head":
        head = replace(head, **{name: value})
    else:
        train = replace(train, **{name: value})
    written = getattr(value, "value", value)
    with pytest.raises(
        InputError,
        match=rf"settings: {key} was .*, is '?{written}'?\. Continue.* \(type {key}=\S+\)",
    ):
        fit_eagle(tmp_path, train, head)


def test_nor_with_a_head_of_another_kind_or_other_draft_tokens(
    eagle_run: Path, tmp_path: Path
) -> None:
    train = settings(max_steps=4, warmup_steps=1, resume=str(eagle_run))
    with pytest.raises(InputError, match=r"kind of head was 'EagleHead', is '\w+'\. Continue"):
        fit(tmp_path, replace(train, learning_rate=0.3))
    with pytest.raises(InputError, match="other settings: checksum of the draft vocabulary was "):
        fit_eagle(tmp_path, train, vocab_seed=1)


def test_what_only_watches_or_rounds_may_change(eagle_run: Path, tmp_path: Path) -> None:
    train = settings(
        max_steps=4, warmup_steps=1, resume=str(eagle_run), eval_steps=1, num_eval_sequences=1,
        num_replay_prompts=3, save_steps=1, num_checkpoints=1, log_steps=2, micro_batch_size=1,
        dtype=Dtype.bfloat16, compile=False,
    )  # fmt: skip
    assert fit_eagle(tmp_path, train).finished


def test_every_setting_of_the_loop_is_compared_or_known_to_be_harmless() -> None:
    """A setting that is added must be put on one side."""
    compared = {
        key.removeprefix("train.") for key in resume.collect_resume_settings("train", TrainConfig())
    }
    harmless = {*resume.ONLY_WATCHED, *resume.ONLY_ROUNDED, *resume.SETTLED}
    assert not compared & harmless
    assert compared | harmless == {field.name for field in fields(TrainConfig)}
    assert {"learning_rate", "schedule", "warmup_steps", "max_grad_norm", "max_steps"} <= compared


@pytest.mark.parametrize(
    ("schedule", "step", "allowed"),
    [
        (Schedule.constant, 6, True),
        (Schedule.wsd, 6, True),  # of 12, the last half decays
        (Schedule.wsd, 8, False),
        (Schedule.cosine, 2, True),  # the warm-up is over, and nothing else begun
        (Schedule.cosine, 4, False),
    ],
)
def test_more_steps_go_on_if_those_done_are_the_same(
    schedule: Schedule, step: int, allowed: bool
) -> None:
    made = settings(max_steps=12, schedule=schedule, decay_fraction=0.5)
    longer = replace(made, max_steps=24)
    then, now = (resume.collect_resume_settings("train", each) for each in (made, longer))
    if allowed:
        assert resume.check_resume_settings(Path("a"), then, now, longer, step) == []
        return
    with pytest.raises(InputError, match=r"train\.max_steps was 12, is 24\. Continue"):
        resume.check_resume_settings(Path("a"), then, now, longer, step)


def test_a_run_begun_with_the_old_default_says_what_to_type() -> None:
    """1,000 steps were the default, and the key `train.num_epochs` was null."""
    made = resolve_length(settings(max_steps=1000, warmup_steps=None), 4000, 32, 1)
    then = resume.collect_resume_settings("train", made) | {"train.num_epochs": None}
    unset = resolve_length(settings(max_steps=None, warmup_steps=None), 4000, 32, 1)
    now = resume.collect_resume_settings("train", unset)
    said = (
        r"train\.max_steps was 1000, is 10000; train\.warmup_steps was 40, is 400\. Continue with "
        r"the checkpoint's settings \(type train\.max_steps=1000 train\.warmup_steps=40\), or start"
    )
    with pytest.raises(InputError, match=said):
        resume.check_resume_settings(Path("a"), then, now, unset, step=20)
    same = resume.collect_resume_settings("train", made)
    assert resume.check_resume_settings(Path("a"), then, same, made, step=20) == []


def test_a_constant_rate_may_begin_to_decay_at_any_step(tmp_path: Path) -> None:
    """The checkpoint of step 4 goes on to 6 steps, of which the last two decay."""
    constant = {"schedule": Schedule.constant, "max_steps": 100}
    stopped = settings(save_steps=4, num_checkpoints=9, **constant)
    decaying = {"schedule": Schedule.wsd, "max_steps": 6, "decay_fraction": 0.34}
    fit(tmp_path / "straight", settings(**decaying))
    fit(tmp_path / "out", replace(stopped, max_steps=4))
    saved = tmp_path / "out/checkpoints/step-000004"
    fit(tmp_path / "decayed", settings(resume=str(saved), **decaying))
    assert weights(tmp_path / "decayed") == weights(tmp_path / "straight")
    late = {**decaying, "decay_fraction": 0.9}
    with pytest.raises(InputError, match=r"max_steps was 4, is 6|schedule was 'constant'"):
        fit(tmp_path / "late", settings(resume=str(saved), **late))


def test_a_checkpoint_of_an_earlier_version_goes_on_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, settings())
    state = tmp_path / "checkpoints/step-000004/state.json"
    content = json.loads(state.read_text())
    for key in ("train.schedule", "train.max_grad_norm"):
        del content["run"][key]
    state.write_text(json.dumps(content))
    assert fit(tmp_path, settings(resume=str(state.parent))).finished
    said = capsys.readouterr().out
    assert "did not record train.max_grad_norm, train.schedule: not compared" in said
    assert [line["step"] for line in metrics(tmp_path) if "train/loss" in line][-1] == 6
    with pytest.raises(InputError, match=r"learning_rate was 0.05, is 0.1"):
        fit(tmp_path, settings(resume=str(state.parent), learning_rate=0.1), train=rows(7))


def test_medusa_heads_and_medusa_2_bring_all_of_their_settings() -> None:
    target = random_target()
    config = MedusaConfig(path="elsewhere", labels=Labels.soft, loss_decay=0.5)
    heads = MedusaHead.from_target(target, 3, 1)
    assert MedusaObjective(heads, target, config).resume_settings == {
        "head.num_heads": 4, "head.num_layers": 1, "head.labels": "soft", "head.loss_decay": 0.5,
        "head.teacher_temperature": 0.6, "head.off_path_weight": 0.2,
    }  # fmt: skip
    run = Medusa2Run(
        head=config,
        adapter=AdapterConfig(rank=2),
        joint=JointConfig(heads_only_steps=10, heads_schedule=HeadsSchedule.sine),
        train=TrainConfig(max_steps=1000),
    )
    adapter = Adapter(target, run.adapter, seed=0)
    found = Medusa2Objective(AdaptedMedusa(heads, adapter), target, run).resume_settings
    expected = {
        "head.labels": "soft", "adapter.rank": 2, "adapter.dropout": 0.05, "joint steps": 990,
        "joint.heads_only_steps": 10, "joint.heads_schedule": "sine", "train.micro_batch_size": 1,
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert "head.path" not in found
