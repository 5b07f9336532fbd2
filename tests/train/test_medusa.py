"""The Medusa objective over a target: what its heads learn, and from which heads it starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import endless_target, noisy_head, packed, texts

from conf.errors import InputError
from conf.settings.medusa import Labels, MedusaConfig, MedusaRun
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train import medusa
from train.loss import fused_linear as fused
from train.loss.fused_linear import LossSums
from train.medusa import MedusaObjective


@pytest.fixture(scope="module")
def target() -> Target:
    return endless_target()


def sums_of(objective: MedusaObjective, batch: dict) -> LossSums:
    return objective(objective.prepare_batch(objective.index_batch(batch)), torch.ones(2))


@pytest.mark.parametrize(
    ("labels", "training", "heat"),
    [(Labels.hard, True, 1.0), (Labels.soft, True, 0.25), (Labels.soft, False, 1.0)],
)
def test_heads_learn_the_text_or_what_the_target_says_there(target, labels, training, heat) -> None:
    """Token by token: head k at t learns of token t + 1 + k."""
    batch, head = packed(texts(target, 2, 9)), noisy_head(target, 2)
    config = MedusaConfig(labels=labels, teacher_temperature=0.25)
    found = sums_of(MedusaObjective(head, target, config).train(training), batch)
    ids, documents = batch["input_ids"][0], batch["document_ids"][0]
    with torch.no_grad():
        hidden = target.model.model(
            input_ids=ids.view(2, -1), position_ids=batch["position_ids"].view(2, -1)
        ).last_hidden_state.flatten(0, 1)
        expected = [0.0, 0.0]
        for k in (1, 2):
            for t in range(len(ids) - 1 - k):
                end = t + 1 + k
                if documents[t] != documents[end] or not batch["loss_mask"][0, end]:
                    continue
                log_q = head.head_logits(k - 1, hidden[t]).log_softmax(-1)
                p = (target.compute_logits(hidden[t + k]) / heat).softmax(-1)
                soft, hard = (p * (p.log() - log_q)).sum(), -log_q[ids[end]]
                expected[k - 1] += float(soft if labels is Labels.soft else hard)
    assert found.terms[0].tolist() == pytest.approx(expected, rel=1e-4)


def test_compiled_parts_are_the_loss_and_the_blocks(target, monkeypatch) -> None:
    used = []

    def compiled() -> object:
        used.append("loss")
        return fused.apply_criterion

    head = noisy_head(target, 2)
    monkeypatch.setattr(fused, "_compile_criterion", compiled)
    monkeypatch.setattr(head, "compile_layers", lambda: used.append("blocks"))
    objective, batch = MedusaObjective(head, target, MedusaConfig()), packed(texts(target, 2, 9))
    sums_of(objective, batch)
    assert used == []
    objective.compile_parts()
    sums_of(objective, batch)
    assert used[0] == "blocks" and set(used[1:]) == {"loss"}


def test_a_run_starts_from_the_heads_that_are_named(target, tmp_path: Path) -> None:
    saved = noisy_head(target, 2)
    saved.save(tmp_path / "whole")
    for path, num_heads in ((None, 4), (str(tmp_path / "whole"), 2)):
        config = MedusaRun(head=MedusaConfig(path=path, num_heads=4))
        objective, (line,) = medusa.main.build_objective(config, target, None)
        size = sum(parameter.numel() for parameter in objective.head.parameters()) / 1e6
        assert line == f"head: {num_heads} Medusa heads, {size:.1f} M parameters"
        assert objective.head.num_heads == num_heads
    found = objective.head.state_dict()
    assert all(torch.equal(found[name], value) for name, value in saved.state_dict().items())


def test_pruned_heads_are_no_start(target, tmp_path: Path) -> None:
    head = noisy_head(target, 2)
    pruned = head.prune_vocab(DraftVocab(torch.arange(0, 96, 2), 96))
    pruned.save(tmp_path / "pruned")
    config = MedusaRun(head=MedusaConfig(path=str(tmp_path / "pruned")))
    nothing: Any = None
    message = "Medusa heads learn all; name the head before pruning"
    with pytest.raises(InputError, match=f"drafts 48 of 96 ids, but {message}$"):
        medusa.main.make_head(config, target, nothing)


def test_a_run_goes_on_with_the_settings_of_its_heads(target) -> None:
    objective = MedusaObjective(noisy_head(target, 2), target, MedusaConfig(num_heads=2))
    assert objective.resume_settings == {
        "head.num_heads": 2, "head.num_layers": 1, "head.loss_decay": 0.8, "head.labels": "soft",
        "head.teacher_temperature": 0.6, "head.off_path_weight": 0.2,
    }  # fmt: skip
