"""Medusa-2: the loss by hand, who learns when, whole runs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from toys import noisy_head, packed, random_target, save_target

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.export import MergeAdapterRun
from conf.settings.medusa import (
    AdapterConfig,
    HeadsSchedule,
    JointConfig,
    Labels,
    Medusa2Run,
    MedusaConfig,
    TargetLoss,
)
from conf.settings.target import Quantization, TargetConfig
from conf.settings.training import TrainConfig
from data.prepared.prepare import prepare_datasets
from eval.measure.target_answers import LocalAnswerSource
from heads.kinds import load_head
from heads.target_model.adapter import Adapter
from heads.target_model.load import load_target
from heads.target_model.model import Target
from scripts import merge_adapter
from tests.train.runs import TWO, arguments, trained
from train import medusa2
from train.batch.batch import NOISE_SEEDS, Batch, add_supervision
from train.loop.evaluation import make_heldout_replay, select_heldout_prompts
from train.medusa2 import AdaptedMedusa, HeldoutLoss, Medusa2Objective, compute_heads_weight

CPU = torch.device("cpu")
TEXT = [5, 9, 17, 40, 8, 61, 23, 77, 31, 5]
UNIT = torch.ones(3)


def objective_of(target: Target, changed: bool = True, **joint: Any) -> Medusa2Objective:
    """Two heads and an adapter which, if `changed`, has learnt something; joint from step 2."""
    config = Medusa2Run(
        head=MedusaConfig(num_heads=2, labels=Labels.hard),
        adapter=AdapterConfig(rank=4, alpha=8, dropout=0.0),
        joint=JointConfig(**{"heads_only_steps": 2, "target_loss": TargetLoss.text, **joint}),
        train=TrainConfig(max_steps=6, warmup_steps=0),
    )
    head = noisy_head(target, 2)
    adapter = Adapter(target, config.adapter, seed=0)
    if changed:
        change(adapter)
    return Medusa2Objective(AdaptedMedusa(head, adapter), target, config)


def change(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, factor in adapter.factors.items():
        if "lora_B" in name:
            factor.data.normal_(std=0.1, generator=generator)


def batch() -> Batch:
    return with_seed(7)


def with_seed(seed: int) -> Batch:
    return {**add_supervision(packed([TEXT]), 2), NOISE_SEEDS: (seed,)}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (HeadsSchedule.constant, [0.2, 0.2, 0.2, 0.2, 0.2]),
        (HeadsSchedule.sine, [0.2, 0.0, 0.0765367, 0.1414214, 0.1847759]),
    ],
)
def test_the_weight_of_the_heads_over_the_joint_steps(
    schedule: HeadsSchedule, expected: list[float]
) -> None:
    config = JointConfig(heads_weight=0.2, heads_schedule=schedule)
    assert [compute_heads_weight(config, s, 4) for s in range(-1, 4)] == pytest.approx(
        expected, abs=1e-7
    )


def test_the_target_counts_from_the_first_joint_step() -> None:
    objective = objective_of(random_target())
    weights = [objective.start_step(step).tolist() for step in (0, 1, 2, 5)]
    heads = pytest.approx([0.16, 0.128])
    assert [w[0] for w in weights] == [0.0, 0.0, 1.0, 1.0]
    assert all(w[1:] == heads for w in weights)
    assert objective.term_weights.tolist() == [1.0, *weights[0][1:]]
    assert objective.compute_divisors(objective.index_batch(batch())).tolist() == [6.0, 6.0, 6.0]
    assert objective.depth == 2


def test_joint_loss_by_hand() -> None:
    """Tokens 4.. are learnt; the target says them from 3 on, head k from 3 - k on."""
    target = random_target()
    objective = objective_of(target)
    text = torch.tensor(TEXT)
    found = target.model(input_ids=text[None], output_hidden_states=True)
    hidden, heads = found.hidden_states[-1][0], objective.head.heads
    expected = [cross_entropy(found.logits[0, 3:-1], text[4:], reduction="sum")]
    for k in (1, 2):
        logits = heads.head_logits(k - 1, hidden[3 - k : -1 - k])
        expected.append(cross_entropy(logits, text[4:], reduction="sum"))
    scale = objective.start_step(2)
    sums = objective(objective.prepare_batch(batch()), scale)
    torch.testing.assert_close(sums.terms[0], torch.stack(expected).detach())
    assert sums.terms[1].tolist() == [6.0, 6.0, 6.0]
    total = expected[0] + 0.16 * expected[1] + 0.128 * expected[2]
    torch.testing.assert_close(sums.total, total)
    parameters = list(objective.head.parameters())
    by_hand = torch.autograd.grad(total, parameters)
    sums.total.backward()
    found = tuple(parameter.grad for parameter in parameters)
    torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=1e-4)


def test_self_distillation_by_hand() -> None:
    """KL(without adapter || with it) over the learnt tokens only."""
    target, bare = random_target(), random_target()
    objective = objective_of(target, target_loss=TargetLoss.self)
    text = torch.tensor([TEXT])
    p = bare.model(input_ids=text).logits[0, 3:-1].log_softmax(-1)
    q = target.model(input_ids=text).logits[0, 3:-1].log_softmax(-1)
    objective.start_step(2)
    found = objective(batch(), UNIT).terms[0, 0]
    torch.testing.assert_close(found, kl_div(q, p, log_target=True, reduction="sum").detach())
    assert found > 0.1


def test_soft_labels_are_the_targets_own_without_the_adapter() -> None:
    target, bare = random_target(), random_target()
    objective = objective_of(target)
    objective.soft = True
    text = torch.tensor([TEXT])
    hidden = target.model(input_ids=text, output_hidden_states=True).hidden_states[-1][0]
    p = (bare.model(input_ids=text).logits[0, 3:-1] / 0.6).log_softmax(-1)
    q = objective.head.heads.head_logits(0, hidden[2:-2]).log_softmax(-1)
    objective.start_step(2)
    found = objective(batch(), UNIT).terms[0, 1]
    torch.testing.assert_close(found, kl_div(q, p, log_target=True, reduction="sum").detach())


def learnt(objective: Medusa2Objective, step: int) -> dict[str, bool]:
    """Which parts get a gradient in a step."""
    scale = objective.start_step(step)
    objective.zero_grad()
    objective(batch(), scale).total.backward()
    parts = objective.head.named_children()
    return {name: all(bool(p.grad.any()) for p in part.parameters()) for name, part in parts}


def test_who_learns_when() -> None:
    target = random_target()
    objective = objective_of(target)
    assert learnt(objective, 1) == {"heads": True, "adapter": False}
    assert all(p.grad.eq(0).all() for p in objective.head.adapter.parameters())
    assert learnt(objective, 2) == {"heads": True, "adapter": True}
    mine = {id(p) for p in objective.head.parameters()}
    others = [p for p in target.model.parameters() if id(p) not in mine]
    assert len(others) == len(list(random_target().model.parameters()))
    assert not any(p.requires_grad or p.grad is not None for p in others)


def test_gradients_reach_the_adapter_of_a_quantised_target(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = save_target(tmp_path / "t", intermediate_size=128)
    gradients = []
    for kind in (Quantization.none, Quantization.int8):
        target = load_target(TargetConfig(path=str(folder), quantization=kind), CPU)
        objective = objective_of(target)
        objective(batch(), objective.start_step(2)).total.backward()
        grads = [p.grad.flatten() for p in objective.head.adapter.parameters()]
        gradients.append(torch.cat(grads))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.95
    target = load_target(TargetConfig(path=str(folder), quantization=Quantization.nf4), CPU)
    with pytest.raises(InputError, match=r"4 bits, through which bitsandbytes gives no gradient"):
        objective_of(target)


def test_dropout_is_drawn_for_the_sequence() -> None:
    objective = objective_of(random_target())
    for dropout in objective.head.adapter.dropouts:
        dropout["default"] = torch.nn.Dropout(0.5)
    objective.start_step(2)
    first, again = (objective(batch(), UNIT).total for _ in range(2))
    other = objective(with_seed(8), UNIT).total
    assert first == again != other
    objective.eval()
    without = objective(batch(), UNIT).total
    assert without == objective(with_seed(8), UNIT).total != first


def test_the_targets_own_loss_before_and_after() -> None:
    target, bare = random_target(), random_target()
    adapter = Adapter(target, AdapterConfig(rank=4, dropout=0.0), seed=0)
    rows = [{name: column[0] for name, column in packed([TEXT]).items()}] * 3
    measure = HeldoutLoss(target, adapter, rows, 2)
    text = torch.tensor(TEXT)
    losses = []
    for model in (bare.model, target.model):
        if model is target.model:
            assert measure()["target_change_percent"] == 0.0
            change(adapter)
        logits = model(input_ids=text[None]).logits[0, 3:-1]
        losses.append(float(cross_entropy(logits, text[4:]).detach()))
    assert measure() == {
        "target_loss_before": pytest.approx(losses[0], rel=1e-5),
        "target_loss": pytest.approx(losses[1], rel=1e-5),
        "target_change_percent": pytest.approx(100 * (losses[1] / losses[0] - 1), rel=1e-3),
    }


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["q_proj", "lm_head"], r"adapter\.modules=.*\['lm_head'\] is the target's embedding"),
        (["q_prj"], r"adapter\.modules=\['q_prj'\]: .*not found"),
    ],
)
def test_modules_that_cannot_be_adapted(modules: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Adapter(random_target(), AdapterConfig(modules=modules), seed=0)


def test_untrained_heads_come_first() -> None:
    steps = TrainConfig(max_steps=1000)
    assert Medusa2Run(train=steps).joint.heads_only_steps == 500
    assert Medusa2Run(head=MedusaConfig(path="head"), train=steps).joint.heads_only_steps == 0
    unset = Medusa2Run()
    assert unset.joint.heads_only_steps is None  # until the data tell the steps
    unset.settle_joint_steps(30)
    assert unset.joint.heads_only_steps == 15


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_strategies_that_cut_parameters_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(InputError, match=r"train/medusa2\.py: cannot run under .*ddp\.yaml"):
        medusa2.main(Medusa2Run())


# --- `train/medusa2.py` from start to end: what a run leaves, resumes, and what is made of it.


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
    assert last["eval/tau"] == pytest.approx(live(head).figures["tau"])
    origin = json.loads((straight / "head/headsmith.json").read_text())
    assert origin["adapter"]["path"] == str(straight / "adapter")
    assert len(origin["adapter"]["sha256"]) == 64
    assert sorted(path.name for path in (straight / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "headsmith.json",
    ]  # fmt: skip


def test_resumed_equals_uninterrupted(straight: Path, inputs: Path, tmp_path: Path) -> None:
    resume = str(straight / "checkpoints/step-000004")  # before the adapter joins
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
