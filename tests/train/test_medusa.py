"""The Medusa objective over a target: what its heads learn, and from which heads it starts."""

import pytest
import torch
from toys import endless_target, noisy_head, packed, texts

from conf.settings.medusa import Labels, MedusaConfig
from heads.target_model.model import Target
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
