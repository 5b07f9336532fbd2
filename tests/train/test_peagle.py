"""Training of P-EAGLE: its loss by hand, its settings, heads that training goes on from."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_heads import MASK, fresh, settings_of
from safetensors.torch import load_file, save_file
from toys import packed, random_target, texts

from conf.errors import InputError
from conf.settings.eagle import OutputHead, PEagleConfig, PEagleRun
from heads.target_model.model import Target
from train.batch.batch import NOISE_SEEDS, STEP_TARGETS, SUPERVISION, Batch
from train.peagle import PEagleObjective, main


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept_share": 1.2}, "head.kept_share=1.2: must be from 0 to 1"),
        ({"off_path_weight": -0.1}, "head.off_path_weight=-0.1"),
        ({"num_layers": 0}, "head.num_layers"),
        ({"num_segments": 0}, "head.num_segments"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PEagleConfig(**change)


def test_no_head_is_trained_through_a_quantised_output_head(tmp_path) -> None:
    target = random_target(num_hidden_layers=4)
    fresh(target, settings_of("peagle", draft_vocab_size=None)).save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({n: each for n, each in load_file(file).items() if n != "lm_head.weight"}, file)
    whole = target.output_head.weight
    whole.requires_grad_(False).data = whole.to(torch.int8)
    unused = torch.zeros(target.vocab_size, dtype=torch.int64)
    more = {"path": str(tmp_path), "layers": None, "draft_vocab_size": None}
    config = PEagleRun(head=settings_of("peagle", **more))
    with pytest.raises(InputError, match="its output head is quantised"):
        main.make_head(config, target, data(unused))


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


def test_every_layer_is_compiled(target: Target) -> None:
    head = fresh(target, settings_of("peagle", num_layers=3))
    head.compile_layers()
    assert all(each.mlp._compiled_call_impl for each in (head.layer, *head.layers.values()))


def data(counts: torch.Tensor) -> Any:
    return SimpleNamespace(count_token_ids=lambda _size: counts)


def test_a_fresh_head_and_one_that_is_gone_on_from(target: Target, tmp_path) -> None:
    unused = torch.ones(target.vocab_size, dtype=torch.int64)
    unused[MASK] = 0
    config = PEagleRun(head=settings_of("peagle", draft_vocab_size=40))
    objective, lines = main.build_objective(config, target, data(unused))
    head = objective.head
    assert "P-EAGLE, 2 layers over hidden states [1, 2], 4 draft tokens, mask token 3" in lines[-1]
    assert head.mask_hidden.std() > 0.5
    other, _ = main.make_head(replace(config, seed=1), target, data(unused))
    assert not other.mask_hidden.allclose(head.mask_hidden)
    assert len(head.vocab.ids) == 40
    head.save(tmp_path / "head")
    more = settings_of(
        "peagle",
        path=str(tmp_path / "head"),
        num_steps=6,
        layers=None,
        output_head=OutputHead.frozen,
    )
    again = main.build_objective(PEagleRun(head=more), target, data(unused))[0].head
    assert again.config.num_draft_tokens == 6
    assert not again.lm_head.weight.requires_grad
    for name, each in head.state_dict().items():
        assert again.state_dict()[name].equal(each)
    used = torch.ones(target.vocab_size, dtype=torch.int64)
    with pytest.raises(InputError, match=r"head\.mask_token_id=3: occurs 1 times"):
        main.make_head(config, target, data(used))
