"""The estimate of a run's memory: by hand, against what lives, and when it is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_heads import fresh, objective_of, settings_of
from torch.profiler import ProfilerActivity, profile
from toys import random_target

from conf.errors import InputError
from conf.settings.eagle import EagleConfig
from conf.settings.medusa import Labels, MedusaConfig
from conf.settings.training import Optimizer, TrainConfig
from heads.eagle.eagle import EagleHead
from heads.medusa import MedusaHead
from heads.vocab import DraftVocab
from scripts.bench import training as bench_training
from train.eagle import EagleObjective
from train.loop import memory
from train.medusa import MedusaObjective
from train.objective import LaunchSpec, Objective

ONE = LaunchSpec(tokens=512, dtype=torch.float32, strategy="DDP", num_processes=1, cuda=False)
V, H = 96, 64  # of the toy target
TRAINED = 4 * 2 * (H * H + H + V * H)  # two Medusa heads of one block and a projection

WIDE = {
    "hidden_size": 256, "intermediate_size": 896, "head_dim": 64, "num_attention_heads": 4,
    "vocab_size": 4000, "max_position_embeddings": 512,
}  # fmt: skip


def medusa(labels: Labels = Labels.soft, **sizes: int) -> MedusaObjective:
    target = random_target(**sizes)
    return MedusaObjective(
        MedusaHead.from_target(target, 2, 1), target, MedusaConfig(labels=labels)
    )


def eagle(**sizes: int) -> EagleObjective:
    target, settings = random_target(num_hidden_layers=4, **sizes), EagleConfig(num_steps=3)
    settings.layers = [1, 2, 3]
    vocab = DraftVocab(torch.arange(target.vocab_size // 3), target.vocab_size)
    return EagleObjective(EagleHead.from_settings(target, settings, vocab, 0), target, settings)


def untrained(kind: str, num_anchors: int = 64) -> Callable[..., Any]:
    def make(**sizes: int) -> Any:
        target, settings = random_target(num_hidden_layers=4, **sizes), settings_of(kind)
        settings.num_anchors = num_anchors
        if settings.draft_vocab_size is not None:
            settings.draft_vocab_size = target.vocab_size // 3
        return objective_of(fresh(target, settings), target, settings)

    return make


def parts_of(objective: Objective, setting: LaunchSpec = ONE, **changes: Any) -> dict[str, int]:
    parts = memory.estimate_memory(objective, replace(setting, **changes))
    assert parts is not None
    return parts


def test_parts_of_one_process_by_hand() -> None:
    parts = parts_of(medusa())
    assert parts["head"] == parts["gradients"] == TRAINED
    assert parts["optimizer"] == 2 * TRAINED
    assert parts["hidden states"] == 512 * H * 4
    # The states, and of each head what its block keeps twice and what it projects.
    assert parts["activations of the head"] == 512 * H * 4 + 2 * 512 * H * (2 * 4 + 4)
    assert "copies in train.dtype" not in parts


@pytest.mark.parametrize(
    ("strategy", "head", "optimizer"),
    [("DDP", 1, 2), ("FSDP2", 1.25, 0.5), ("ZeRO-1", 1.25, 0.5), ("ZeRO-2", 1.25, 0.5),
     ("ZeRO-3", 1.5, 0.5)],
)  # fmt: skip
def test_what_four_processes_hold(strategy: str, head: float, optimizer: float) -> None:
    parts = parts_of(medusa(), strategy=strategy, num_processes=4)
    assert parts["head"] == head * TRAINED
    assert parts["gradients"] == TRAINED
    assert parts["optimizer"] == optimizer * TRAINED
    if strategy.startswith("ZeRO"):  # its bucket
        assert parts["reduction of gradients"] == 4 * 2**26


def test_muon_holds_one_state_of_a_matrix_and_averages_come_on_top() -> None:
    blocks = 4 * 2 * H * H
    muon = replace(ONE, train=TrainConfig(optimizer=Optimizer.muon, average_decay=0.9))
    assert parts_of(medusa(), muon)["optimizer"] == 2 * TRAINED - blocks + TRAINED
    sharded = parts_of(medusa(), muon, strategy="FSDP2", num_processes=2)
    assert sharded["optimizer"] == (3 * TRAINED - blocks) // 2


def test_on_cuda_states_of_the_next_micro_batch_wait_beside_these() -> None:
    states = 512 * (1 + 3) * H * 4
    assert parts_of(eagle())["hidden states"] == states
    assert parts_of(eagle(), cuda=True)["hidden states"] == 2 * states


@pytest.mark.parametrize(("labels", "projections"), [(Labels.hard, 1), (Labels.soft, 2)])
def test_copies_are_counted_where_the_dtype_is_another(labels: Labels, projections: int) -> None:
    found = parts_of(medusa(labels), dtype=torch.bfloat16)["copies in train.dtype"]
    assert found == 2 * (2 * H * H + projections * V * H)


def test_parts_of_an_eagle_pass_by_hand() -> None:
    """512 tokens, H 64, I 96, queries 64, keys 32, 32 ids, three steps of three layers."""
    objective = eagle()
    a_step = 4 * (4 * 96 + 2 * 64 + 6 * 32) + 33 * 64
    text = (4 + 4) * 192 + 4 * 2 * 64
    found = memory.estimate_pass(objective, ONE)
    assert found is not None
    assert found["copies in train.dtype"] == 0
    assert found["activations of the head"] == 512 * (3 * a_step + text)
    gradients = 4 * 3 * 512 * 64
    assert found["backward pass"] == 2 * gradients + 3 * 512 * 96 * 4
    logits = 4 * 1536 * 32
    # Rows, their logits, five pieces, and of the teacher's 32 columns.
    assert found["loss"] == gradients + logits + 4 * 1536 * 64 + 4 * logits + 4 * 512 * 32
    narrow = memory.estimate_pass(objective, replace(ONE, dtype=torch.bfloat16))
    assert narrow is not None
    assert narrow["activations of the head"] == 512 * (
        3 * (2 * (384 + 128 + 192) + 33 * 64) + (4 + 2) * 192 + 512
    )
    matrices = sum(p.numel() for p in objective.head.parameters() if p.dim() > 1)
    assert narrow["copies in train.dtype"] == 2 * matrices
    assert narrow["backward pass"] == 2 * gradients + 3 * 512 * 96 * 2


def test_an_objective_without_a_formula_has_no_estimate() -> None:
    objective = Objective()
    objective.head, objective.target = medusa().head, medusa().target
    assert memory.estimate_memory(objective, ONE) is None


MAKERS: dict[str, Callable[..., Any]] = {
    "medusa": medusa,
    "eagle": eagle,
    "peagle": untrained("peagle", 200),
    **{kind: untrained(kind) for kind in ("dflash, reduced", "dspark, rnn")},
    # Related to those, so asked seldom.
    **{kind: untrained(kind) for kind in ("dflash", "dflash2", "dspark, gated")},
}
SLOW = ("dflash", "dflash2", "dspark, gated")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else []) for k in MAKERS]
)
def test_a_pass_needs_what_is_estimated(kind: str) -> None:
    """Beyond weights, gradients of the micro batch before, and moments, which lie there."""
    objective = MAKERS[kind](**WIDE)
    row = torch.arange(ONE.tokens)[None]
    batch = {
        "input_ids": row, "position_ids": row, "document_ids": torch.zeros_like(row),
        "loss_mask": torch.ones_like(row),
    }  # fmt: skip
    batch = dict(objective.prepare_batch(objective.index_batch(batch)))
    objective(batch, objective.term_weights).total.backward()  # makes what stays
    objective.zero_grad(set_to_none=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        objective(batch, objective.term_weights).total.backward()
    live = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    before = ("target", "head", "gradients", "optimizer", "hidden states")
    estimated = sum(size for name, size in parts_of(objective).items() if name not in before)
    assert estimated == pytest.approx(peak, rel=0.1)


def test_a_run_that_cannot_fit_is_refused_with_its_parts_and_what_helps() -> None:
    parts = {"target": 16_100_000_000, "head": 8_000_000_000}
    memory.check_memory_fits(parts, 24_100_000_000)
    with pytest.raises(InputError) as refused:
        memory.check_memory_fits(parts, 24_000_000_000)
    said = str(refused.value)
    assert "in GB: target 16.1, head 8.0 = 24.1 of 24.0: does not fit" in said
    for key in (
        "train.micro_batch_size", "data.max_length", "head.draft_vocab_size",
        "target.quantization", "data.features", "fsdp2.yaml",
    ):  # fmt: skip
        assert key in said


def test_a_micro_batch_counts_all_its_tokens() -> None:
    accelerator = type("Launch", (), {"device": torch.device("cpu"), "num_processes": 2})()
    config = TrainConfig(micro_batch_size=3)
    setting = LaunchSpec.from_config(config, 100, "FSDP2", accelerator)
    assert setting == LaunchSpec(300, torch.float32, "FSDP2", 2, cuda=False, train=config)


def test_the_benchmark_estimates_an_8b_target_from_shapes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def launched(worker: str, job: dict, launch: list[str], environ: dict[str, str]) -> dict:
        asked.append((worker, job["hidden"], *launch[-2:], environ["CUDA_VISIBLE_DEVICES"]))
        return {"peak": 8_000_000, "parts": {"target": 6_000_000, "head": 3_000_000}}

    monkeypatch.setattr(bench_training, "run_worker", launched)
    figures = dict(bench_training.measure_memory("eagle1", "cpu"))
    assert sum(name.startswith("GB, DDP, ") for name in figures) > 5
    assert figures["GB, FSDP2, optimizer"] < figures["GB, DDP, optimizer"]
    assert figures["MB, ZeRO-2, estimated"] == 9
    assert figures["estimated over measured, one process"] == 9 / 8
    assert [each[:2] for each in asked] == [("training", 512)] * 4
    assert asked[2][3].endswith("conf/accelerate/fsdp2.yaml")
    assert {each[-1] for each in asked} == {""}
