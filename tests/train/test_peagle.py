"""Training of P-EAGLE: its loss by hand, its settings, heads that training goes on from."""

import pytest
import torch
from feature_heads import fresh, settings_of
from toys import packed, random_target, texts

from heads.target_model.model import Target
from train.batch.batch import NOISE_SEEDS, STEP_TARGETS, SUPERVISION, Batch
from train.peagle import PEagleObjective


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_hidden_layers=4)


def prepared(objective: PEagleObjective, target: Target) -> Batch:
    """Texts, a part of whose tokens the target would not have chosen."""
    rows = [[token if place % 3 else 5 + place for place, token in enumerate(text)]
            for text in texts(target, 2, 16)]  # fmt: skip
    return objective.prepare_batch(objective.index_batch(packed(rows)))


@pytest.mark.parametrize("off_path_weight", [1.0, 0.25])
def test_the_loss_is_a_mean_of_weighed_rows(target: Target, off_path_weight: float) -> None:
    config = settings_of(
        "peagle", draft_vocab_size=None, teacher_temperature=1.0, off_path_weight=off_path_weight
    )
    head = fresh(target, config)
    objective = PEagleObjective(head, target, config)
    batch = prepared(objective, target)
    sums = objective(batch, objective.term_weights / objective.compute_divisors(batch))
    ids, states = batch["input_ids"].flatten(), batch["hidden_states"].flatten(0, 1)
    teacher = target.compute_logits(states).log_softmax(-1)
    unrolled, answered = batch[STEP_TARGETS], batch[SUPERVISION].token_indices.tolist()
    outputs = torch.cat(objective.compute_outputs(batch))[unrolled.matched_rows.output_indices]
    log_q = head.compute_logits(outputs).log_softmax(-1)
    total = torch.zeros(())
    for row, (token, step) in enumerate(
        zip(unrolled.row_anchors.tolist(), unrolled.row_steps.tolist(), strict=True)
    ):
        p = teacher[token + 1 + step]
        loss = (p.exp() * (p - log_q[row])).sum()
        between = [n for n in range(token + 1, token + 1 + step) if n in answered]
        off = sum(int(teacher[n].argmax() != ids[n + 1]) for n in between)
        share = off_path_weight**off
        total = total + (share if share >= 0.05 else 0.0) * loss
    torch.testing.assert_close(sums.total, total / len(log_q), rtol=1e-4, atol=1e-5)
    objective.eval()
    plain = objective(batch, objective.term_weights / objective.compute_divisors(batch)).total
    assert (plain - sums.total).abs() > 1e-3 or off_path_weight == 1.0


def test_rows_and_noise_are_drawn_by_the_seeds_of_a_batch(target: Target) -> None:
    config = settings_of("peagle", num_anchors=4, noise=0.5)
    objective = PEagleObjective(fresh(target, config), target, config)

    def drawn(seed: int) -> tuple[list[int], torch.Tensor]:
        batch = objective.index_batch({**packed(texts(target, 1, 20)), NOISE_SEEDS: (seed,)})
        batch = objective.prepare_batch(batch)
        return batch[STEP_TARGETS].row_anchors.tolist(), objective.compute_outputs(batch)[0]

    rows, outputs = zip(*map(drawn, (1, 2)), strict=True)
    assert rows[0] != rows[1]
    assert not outputs[0].allclose(outputs[1])
    objective.eval()
    _, outputs = zip(*map(drawn, (1, 2)), strict=True)
    assert outputs[0].equal(outputs[1])
