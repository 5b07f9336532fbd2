"""The head that a run of any kind begins with: a fresh one, or one that is gone on from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_heads import MASK, settings_of
from toys import noisy_head, packed, random_target, texts

from conf.errors import InputError
from conf.settings.blocks import DFlash2Run, DFlashRun, DSparkRun
from conf.settings.eagle import EagleRun, MtpRun, OutputHead, PEagleRun
from conf.settings.medusa import MedusaConfig, MedusaRun
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train import dflash, dflash2, dspark, eagle, medusa, mtp, peagle
from train.loss import fused_linear as fused
from train.objective import Objective

BLOCKS = "2 layers over hidden states [1, 2], blocks of 5 rows"
KINDS: dict[str, tuple[Any, Any, Any, str]] = {
    "medusa": (medusa, MedusaRun, MedusaConfig(num_heads=2), "2 Medusa heads"),
    "eagle1": (eagle, EagleRun, settings_of("eagle1"), "eagle1, 3 steps"),
    "eagle3": (
        eagle, EagleRun, settings_of("eagle3", layers=[1, 2, 3], draft_vocab_size=8),
        "eagle3, 3 steps",
    ),
    "eagle3.1": (
        eagle, EagleRun, settings_of("eagle3.1", layers=[1, 2, 3]), "eagle3_1, 3 steps",
    ),
    "peagle": (
        peagle, PEagleRun, settings_of("peagle"),
        "P-EAGLE, 2 layers over hidden states [1, 2], 4 draft tokens, mask token 3",
    ),
    "dflash": (
        dflash, DFlashRun, settings_of("dflash"),
        f"DFlash, {BLOCKS} (4 draft tokens), mask token 3",
    ),
    "dflash2": (
        dflash2, DFlash2Run, settings_of("dflash2"),
        f"DFlash-2, {BLOCKS} (4 draft tokens), mask token 3",
    ),
    "dspark": (
        dspark, DSparkRun, settings_of("dspark, rnn"),
        f"DSpark, {BLOCKS} (5 draft tokens), mask token 3",
    ),
    "mtp": (mtp, MtpRun, settings_of("mtp"), "MTP layer of other, a fresh one, 3 steps"),
}  # fmt: skip
"""Module, run, settings and what is said of the head."""


class Counted:
    """Training data in which token 95 is the likeliest, then 94, and so on; one is never used."""

    def __init__(self, unused: int = MASK) -> None:
        self.unused = unused

    def count_token_ids(self, vocab_size: int) -> torch.Tensor:
        counts = torch.arange(1, vocab_size + 1)
        counts[self.unused] = 0
        return counts


@pytest.fixture
def target() -> Target:
    found = random_target(num_hidden_layers=4)
    found.model.generation_config.eos_token_id = [0, 1]
    return found


def begun(
    kind: str, target: Target, seed: int = 3, unused: int = MASK, **changes: Any
) -> tuple[Objective, list[str]]:
    module, run, settings, _ = KINDS[kind]
    config = run(head=replace(settings, **changes), seed=seed)
    return module.main.build_objective(config, target, Counted(unused))


def same(one: Any, other: Any) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_is_drawn_by_its_seed_alone_and_one_that_is_named_is_gone_on_from(
    kind: str, target: Target, tmp_path: Path
) -> None:
    objective, lines = begun(kind, target)
    head: Any = objective.head
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad) / 1e6
    assert lines[-1] == f"head: {KINDS[kind][3]}, {trained:.1f} M parameters"
    assert same(begun(kind, target)[0].head, head)
    # Medusa heads begin as the target's own output head.
    assert same(begun(kind, target, seed=4)[0].head, head) == (kind == "medusa")
    shaken = head.state_dict()
    for tensor in shaken.values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor) * 0.02)
    head.save(tmp_path / "head")
    found: Any = begun(kind, target, path=str(tmp_path / "head"))[0].head
    assert same(found, head)
    assert kind == "medusa" or found.target is target
    assert {n for n, p in found.named_parameters() if p.requires_grad} == {
        n for n, p in head.named_parameters() if p.requires_grad
    }


def test_a_fresh_head_drafts_the_likeliest_tokens_and_those_that_end_texts(target: Target) -> None:
    objective, lines = begun("eagle3", target)
    assert objective.head.vocab.ids.tolist() == [0, 1, 90, 91, 92, 93, 94, 95]
    assert "8 of 96" in lines[0], lines
    objective, lines = begun("eagle1", target)
    assert objective.head.vocab.is_full
    assert len(lines) == 1


def test_settings_that_a_saved_head_has_are_its_own(target: Target, tmp_path: Path) -> None:
    path = str(tmp_path / "head")
    begun("eagle3", target)[0].head.save(tmp_path / "head")
    frozen: Any = begun("eagle3", target, path=path, draft_vocab_size=40,
                        output_head=OutputHead.frozen)[0].head  # fmt: skip
    assert len(frozen.vocab.ids) == 8
    assert [n for n, p in frozen.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    with pytest.raises(InputError, match=r"an eagle3 head, but .* head.form=eagle1; choose an"):
        begun("eagle1", target, path=path)
    with pytest.raises(InputError, match="no such folder"):
        begun("eagle3", target, path=str(tmp_path / "nothing"))
    begun("peagle", target)[0].head.save(tmp_path / "peagle")
    more = begun("peagle", target, path=str(tmp_path / "peagle"), num_steps=6, layers=None)[0]
    assert more.head.config.num_draft_tokens == 6


def test_a_saved_output_head_goes_on_learning_unless_it_is_the_target_s(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heads.eagle.eagle.MIN_FROZEN_SIZE", target.hidden_size)
    auto = {"output_head": OutputHead.auto}
    fresh: Any = begun("eagle3", target, **auto)[0]
    assert fresh.config.output_head is OutputHead.frozen
    fresh.head.save(tmp_path / "same")
    fresh.head.lm_head.weight.data[0] += 1
    fresh.head.save(tmp_path / "other")
    for name, start in (("same", OutputHead.frozen), ("other", OutputHead.copy)):
        saved: Any = begun("eagle3", target, path=str(tmp_path / name), **auto)[0]
        assert saved.config.output_head is start  # which the record keeps
        assert saved.head.lm_head.weight.requires_grad is (start is OutputHead.copy)


def test_layers_and_revision_reach_the_loader(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, asked = begun("eagle3", target)[0].head, list[Any]()
    monkeypatch.setattr("train.loop.command.load_head", lambda *given: asked.extend(given) or head)
    begun("eagle3", target, path="user/head", revision="v1", layers=[0, 1, 2])
    assert asked == ["user/head", "v1", [0, 1, 2]]


def test_heads_that_cannot_be_trained_are_refused(target: Target, tmp_path: Path) -> None:
    pruned = noisy_head(target, 2).prune_vocab(DraftVocab(torch.arange(0, 96, 2), 96))
    pruned.save(tmp_path / "pruned")
    message = "drafts 48 of 96 ids, but Medusa heads learn all; name the head before pruning$"
    with pytest.raises(InputError, match=message):
        begun("medusa", target, path=str(tmp_path / "pruned"))
    with pytest.raises(InputError, match="a Medusa head, but this command trains a"):
        begun("dflash", target, path=str(tmp_path / "pruned"), layers=None)
    for kind in ("peagle", "dflash", "dflash2", "dspark"):
        with pytest.raises(InputError, match=r"head\.mask_token_id=3: occurs 4 times"):
            begun(kind, target, unused=5)
    with pytest.raises(InputError, match=r"head.layers=\[4\]: must be rising and of 0..3"):
        begun("dflash", target, layers=[4])
    target.output_head.weight.requires_grad_(False).data = target.output_head.weight.to(torch.int8)
    for kind in ("medusa", "eagle1", "dflash"):
        with pytest.raises(InputError, match="its output head is quantised"):
            begun(kind, target)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compiled_is_the_loss_and_each_layer(
    kind: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, used = begun(kind, target)[0], list[str]()
    monkeypatch.setattr(
        fused, "_compile_criterion", lambda: used.append("loss") or fused.apply_criterion
    )

    def step() -> None:
        batch = objective.prepare_batch(objective.index_batch(packed(texts(target, 2, 9))))
        objective(batch, torch.ones(len(objective.term_weights)))

    step()
    assert not used
    with monkeypatch.context() as patch:
        patch.setattr(objective.head, "compile_layers", lambda: used.append("layers"))
        objective.compile_parts()
        step()
    assert used[0] == "layers" and set(used[1:]) == {"loss"}
    head: Any = objective.head
    head.compile_layers()
    layers = [each for each in head.modules() if isinstance(each, head.compiled_modules)]
    assert all(each._compiled_call_impl for each in layers)
    assert len(layers) >= (0 if kind == "mtp" else 1)
