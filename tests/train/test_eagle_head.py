"""The head that an EAGLE run begins with, and the memory of its objective by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import random_target

from conf.errors import InputError
from conf.settings.eagle import EagleConfig, EagleForm, EagleRun, OutputHead
from heads.eagle.eagle import EagleHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from tests.train.loop.test_memory import ONE, eagle
from train.api import training_objective
from train.eagle import main
from train.loop.memory import estimate_pass

LAYERS = [1, 2, 2]
"""Layers of the toy target, which has two: too few to tell."""


class Counted:
    """Training data in which token 90 is the likeliest, then 89, and so on."""

    def count_token_ids(self, vocab_size: int) -> Tensor:
        return torch.arange(vocab_size).clamp_max(90)


def made(target: Target, **settings: Any) -> tuple[EagleHead, list[str]]:
    settings = {"layers": LAYERS, "draft_vocab_size": 8, **settings}
    data: Any = Counted()
    objective, lines = main.build_objective(
        EagleRun(head=EagleConfig(**settings), seed=3), target, data
    )
    return objective.head, lines


@pytest.fixture
def target() -> Target:
    found = random_target()
    found.model.generation_config.eos_token_id = [0, 1]
    return found


def test_a_fresh_head_drafts_the_likeliest_tokens_and_the_special_ones(target: Target) -> None:
    head, lines = made(target)
    assert head.vocab.ids.tolist() == [0, 1, 90, 91, 92, 93, 94, 95]
    assert "of the target's 96" in lines[0] or "8 of 96" in lines[0], lines
    trained = sum(p.numel() for p in head.parameters()) / 1e6
    assert lines[-1] == f"head: eagle3, 3 steps, {trained:.1f} M parameters"
    norms = {"fc_norm": True, "norm_output": True}
    assert made(target, **norms)[1][-1].startswith("head: eagle3_1, 3 steps, ")
    again, _ = made(target)
    assert again.fc.weight.equal(head.fc.weight)
    other: Any = Counted()
    config = EagleRun(head=EagleConfig(layers=LAYERS, draft_vocab_size=8), seed=4)
    assert not main.make_head(config, target, other)[0].fc.weight.equal(head.fc.weight)


def test_eagle1_drafts_all_ids_and_says_nothing_of_coverage(target: Target) -> None:
    head, lines = made(target, form=EagleForm.eagle1, layers=None, num_steps=1)
    assert head.vocab.is_full
    assert [line.split(",")[0] for line in lines] == ["head: eagle1"]


def test_a_saved_head_is_gone_on_from(target: Target, tmp_path: Path) -> None:
    head, _ = made(target)
    head.save(tmp_path / "head")
    path = str(tmp_path / "head")
    found, lines = made(target, path=path, draft_vocab_size=40)
    assert found.vocab.ids.tolist() == head.vocab.ids.tolist()
    assert all(p.equal(found.get_parameter(name)) for name, p in head.named_parameters())
    assert found.target is target
    assert found.lm_head is not None
    assert found.lm_head.weight.requires_grad
    frozen, fewer = made(target, path=path, output_head=OutputHead.frozen)
    assert frozen.lm_head is not None
    assert not frozen.lm_head.weight.requires_grad
    assert all(p.requires_grad for name, p in frozen.named_parameters() if "lm_head" not in name)
    assert lines[-1] == fewer[-1]  # to 0.1 M
    with pytest.raises(InputError, match=r"an eagle3 head, but .* head.form=eagle1; choose an"):
        made(target, path=path, form=EagleForm.eagle1, layers=None)
    with pytest.raises(InputError, match="no such folder"):
        made(target, path=str(tmp_path / "nothing"))


def test_layers_and_revision_reach_the_loader(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = made(target)
    asked: list[Any] = []

    def load(*given: Any) -> EagleHead:
        asked.extend(given)
        return head

    monkeypatch.setattr("train.loop.command.load_head", load)
    made(target, path="user/head", revision="v1", layers=[0, 1, 2])
    assert asked == ["user/head", "v1", [0, 1, 2]]


def test_memory_by_hand() -> None:
    """512 tokens, H 64, I 96, queries 64, keys 32, 32 ids, three steps of three layers."""
    objective = eagle()
    a_step = 4 * (4 * 96 + 2 * 64 + 6 * 32) + 33 * 64
    text = (4 + 4) * 192 + 4 * 2 * 64
    found = estimate_pass(objective, ONE)
    assert found is not None
    assert found["copies in train.dtype"] == 0
    assert found["activations of the head"] == 512 * (3 * a_step + text)
    gradients = 4 * 3 * 512 * 64
    assert found["backward pass"] == 2 * gradients + 3 * 512 * 96 * 4
    logits = 4 * 1536 * 32
    # Rows, their logits, five pieces, and of the teacher's 32 columns.
    assert found["loss"] == gradients + logits + 4 * 1536 * 64 + 4 * logits + 4 * 512 * 32
    narrow = estimate_pass(objective, replace(ONE, dtype=torch.bfloat16))
    assert narrow is not None
    assert narrow["activations of the head"] == 512 * (
        3 * (2 * (384 + 128 + 192) + 33 * 64) + (4 + 2) * 192 + 512
    )
    matrices = sum(p.numel() for p in objective.head.parameters() if p.dim() > 1)
    assert narrow["copies in train.dtype"] == 2 * matrices
    assert narrow["backward pass"] == 2 * gradients + 3 * 512 * 96 * 2


def test_what_is_compiled_is_asked_for() -> None:
    objective = eagle()
    assert not objective.compiled
    objective.compile_parts()
    assert objective.compiled is True
    assert objective.head.layer.mlp._compiled_call_impl is not None


def test_benchmarks_take_the_recipe_of_the_form() -> None:
    objective = eagle()
    recipe = EagleConfig(norm_before_residual=True, path="(in memory)")
    assert training_objective(objective.head, objective.target).config == recipe
    target = random_target()
    settings = EagleConfig(form=EagleForm.eagle1)
    head = EagleHead.from_settings(target, settings, DraftVocab.make_full(96), 0)
    found = training_objective(head, target)
    assert (found.head, found.target) == (head, target)
    assert (found.config.noise, found.config.regression_weight) == (0.2, 1.0)
