import pytest
import torch
from exports import eagle, make, toy_target
from torch import Tensor

from conf.errors import InputError
from heads.eagle.eagle import EagleHead
from heads.export import writer as module
from heads.export.writer import compute_reference_tensors
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.target_model.model import Target, TargetOutput

ROWS, DEPTH = 5, 3


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def last_output(head: EagleHead, fused: Tensor, token_ids: Tensor, places: Tensor) -> Tensor:
    """[H] of the last token of a text that the head reads anew."""
    text = head.encode_context(fused, token_ids, places)
    rows = torch.tensor([len(places) - 1])
    allowed = build_causal_range(Documents.from_length(len(places), torch.device("cpu")), rows)
    return head.draft(text, rows, BranchCache(text.keys[None], text.values[None], allowed))[0]


@torch.no_grad()
def chained(head: EagleHead, values: dict[str, Tensor], row: int) -> list[Tensor]:
    """Normed outputs of one row, each from all that came before, read again from the start."""
    states = [values[f"hidden_states.{i}"] for i in range(9) if f"hidden_states.{i}" in values]
    layers = dict(enumerate(states)) if len(states) == 9 else {}
    fused = head.fuse(head.collect_features(TargetOutput(states[-1], layers)))[: row + 1]
    outputs = []
    for step in range(DEPTH):
        places = values["position_ids"][: row + 1]
        places = torch.cat([places, places[-1] + torch.arange(1, step + 1)])
        tokens = values["token_ids"][: row + 1 + step]
        output = last_output(head, fused, tokens, places)
        outputs.append(head.apply_final_norm(output))
        fed = outputs[-1] if head.config.norm_output else output
        fused = torch.cat([fused, fed[None]])
    return outputs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True, "fc_bias": True},
        {"kind": "eagle1"},
    ],
    ids=["EAGLE-3", "EAGLE-3.1", "residual and bias", "EAGLE-1"],
)
def test_eagle_logits_are_those_of_a_chain_read_again_at_each_token(
    target: Target, settings
) -> None:
    head = eagle(target, **settings)
    values, _ = compute_reference_tensors(head, target, ROWS, DEPTH)
    assert values["position_ids"].tolist() == [0, 62, 125, 188, 251]
    assert values["logits"].shape == (DEPTH, ROWS, 96)
    seen = values["logits"][values["logits"].isfinite()]
    near = {"rtol": 0, "atol": 2e-5 * float(seen.abs().max())}
    for row in range(ROWS):
        for step, output in enumerate(chained(head, values, row)):
            drafted = head.make_projection().compute_logits(output)
            found = values["logits"][step, row]
            torch.testing.assert_close(found[head.vocab.ids], drafted, **near)
            if "logsumexp" in values:
                expected = drafted.logsumexp(-1)
                torch.testing.assert_close(values["logsumexp"][step, row], expected, **near)
    inside = values["logits"].isfinite().all(0).all(0)
    assert inside.equal(head.vocab.build_mask())


def test_medusa_logits_are_those_of_its_heads(target: Target) -> None:
    head = make(target, "medusa")
    values, metadata = compute_reference_tensors(head, target, ROWS)
    with torch.no_grad():
        expected = head(values["hidden_states.8"])
    assert values["logits"].equal(expected)
    assert values["logsumexp"].equal(expected.logsumexp(-1))
    assert metadata == {
        "headsmith_parity": "1",
        "kind": "medusa",
        "num_layers": "8",
        "max_position_embeddings": "256",
        "vocab_size": "96",
    }


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
