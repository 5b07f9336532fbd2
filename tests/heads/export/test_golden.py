"""Reference values of an export; that its logits are right is seen by `tests/eval/parity`."""

import pytest
import torch
from exports import eagle, make, toy_target

from conf.errors import InputError
from heads.export import writer as module
from heads.export.writer import compute_reference_tensors
from heads.target_model.model import Target

ROWS, DEPTH = 5, 3


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def test_features_are_the_targets_own_as_transformers_counts_them(target: Target) -> None:
    values, _ = compute_reference_tensors(make(target, "eagle3"), target, ROWS, DEPTH)
    first = module._draw_tokens(target, ROWS + DEPTH + 1)[:ROWS]
    assert values["token_ids"][: ROWS - 1].equal(first[1:])
    with torch.no_grad():
        whole = target.model(first[None], output_hidden_states=True).hidden_states
    assert len(whole) == 9
    for index, states in enumerate(whole):
        assert values[f"hidden_states.{index}"].equal(states[0])
    tapped = target.encode_text(first.tolist(), eagle(target).taps)
    for index, states in tapped.layers.items():
        torch.testing.assert_close(values[f"hidden_states.{index}"], states[0], rtol=0, atol=1e-5)


def test_what_is_the_targets_lies_beside(target: Target) -> None:
    values, _ = compute_reference_tensors(make(target, "eagle1"), target, ROWS, DEPTH)
    assert values["token_embeddings"].equal(target.embedding.weight[values["token_ids"]])
    assert values["output_head"].equal(target.output_head.weight)
    assert sorted(values) == [
        "hidden_states.7", "hidden_states.8", "ids", "logits", "output_head", "position_ids",
        "token_embeddings", "token_ids",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3"])
def test_a_large_vocabulary_keeps_the_likeliest_ids_and_a_spread(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    head = make(target, kind)
    whole, _ = compute_reference_tensors(head, target, ROWS, DEPTH)
    for name, size in {"MOST_IDS": 95, "LIKELIEST": 1, "SPREAD": 4}.items():
        monkeypatch.setattr(module, name, size)
    few, _ = compute_reference_tensors(head, target, ROWS, DEPTH)
    likeliest = whole["logits"].argmax(-1).flatten().tolist()
    assert few["ids"].tolist() == sorted({0, 31, 63, 95, *likeliest})
    assert few["logits"].equal(whole["logits"][..., few["ids"]])
    if kind == "eagle1":
        assert few["output_head"].equal(whole["output_head"][few["ids"]])
    else:
        assert few["logsumexp"].equal(whole["logsumexp"])


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3"])
def test_a_bfloat16_head_is_computed_in_float32_on_its_rounded_values(
    target: Target, kind: str
) -> None:
    rounded = make(target, kind).attach(target, torch.bfloat16)
    found, _ = compute_reference_tensors(rounded, target, ROWS, DEPTH)
    widened = rounded.float()
    expected, _ = compute_reference_tensors(widened, target, ROWS, DEPTH)
    if kind == "medusa":
        assert found["logits"].equal(expected["logits"])
    else:
        # What comes from the target is rounded as well.
        assert found["token_embeddings"].dtype == torch.bfloat16
        assert not found["logits"].equal(expected["logits"])
        seen = found["logits"].isfinite()
        scale = expected["logits"][seen].abs().max()
        assert (found["logits"] - expected["logits"])[seen].abs().max() < 0.02 * scale
    assert found["logits"].dtype == torch.float32


def test_a_quantised_output_head_of_the_target_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "has_plain_head", False)
    with pytest.raises(InputError, match=r"target\.path=me/toy: its output head is quantised"):
        compute_reference_tensors(eagle(target, "eagle1"), target, ROWS, DEPTH)
