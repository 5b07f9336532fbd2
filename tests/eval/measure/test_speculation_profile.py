"""The profile that travels with a head, the draft tokens that it advises, and comparisons."""

import json
from pathlib import Path
from typing import Any

import pytest
from exports import eagle, toy_target
from feature_heads import feature_head
from toys import noisy_head

from conf.errors import InputError
from eval.measure.speculation_profile import (
    advise_engine,
    build_profile,
    compare_with_published,
    load_profile,
)
from eval.measure.verdict import format_published
from heads.draft_head import DraftHead
from heads.folders import PROFILE
from tests.eval.measure.test_results import result, text

# 10 passes: 4 accept none, 3 one, 2 two and 1 three.
ACCEPTED = [[0, 1, 2], [0, 1, 3], [0, 0, 1, 2]]
KEYS = [
    "schema_version", "measured", "method", "draft_checkpoint", "target_model",
    "num_speculative_tokens", "block_size", "max_supported_k", "verification_method",
    "conditional_accept_rates", "marginal_accept_rates", "mean_accept_length",
    "mean_accept_length_per_request", "accept_length_model", "accept_length_by_k",
    "acceptance_length_histogram", "per_category", "measurement_conditions", "validation",
]  # fmt: skip
"""Those of Model-Optimizer, schema 1.0."""


@pytest.fixture(scope="module")
def head() -> DraftHead:
    target = toy_target()
    target.name = "me/toy"
    return eagle(target)


def measured(**changes: Any) -> dict[str, Any]:
    texts = [text(number, accepted) for number, accepted in enumerate(ACCEPTED)]
    return result(*texts, mode="replay", **changes)


def profile_of(head: DraftHead, **changes: Any) -> dict[str, Any]:
    profile = build_profile(head, "me/head", {}, measured(**changes))
    assert profile is not None
    return profile


def test_the_profile_has_the_published_keys_and_adds_up(head: DraftHead) -> None:
    profile = profile_of(head)
    assert list(profile) == KEYS
    assert profile["marginal_accept_rates"] == [0.6, 0.3, 0.1]
    assert profile["conditional_accept_rates"] == [0.6, 0.5, 0.333333]
    assert profile["acceptance_length_histogram"] == {"1": 4, "2": 3, "3": 2, "4": 1}
    assert profile["mean_accept_length"] == 2.0
    assert profile["accept_length_by_k"] == {"3": 2.0}
    # 2, 7/3 and 7/4 of the texts.
    assert profile["mean_accept_length_per_request"] == pytest.approx((2 + 7 / 3 + 7 / 4) / 3)
    assert profile["per_category"] == {"math": {"mean_accept_length": 2.0}}
    assert profile["validation"] == {
        "mean_consistency": {
            "implied_mean_accept_length": 2.0,
            "reported_mean_accept_length": 2.0,
            "abs_delta": 0.0,
            "tolerance": 0.02,
            "passed": True,
        },
        "marginal_monotonicity": {"passed": True, "violations": []},
    }
    assert (profile["method"], profile["block_size"]) == ("eagle3", None)
    assert (profile["num_speculative_tokens"], profile["max_supported_k"]) == (3, 3)
    assert profile["draft_checkpoint"] == {"name": "me/head"}
    assert profile["target_model"] == {"name": "me/toy"}
    conditions = profile["measurement_conditions"]
    assert (conditions["num_samples"], conditions["osl"]) == (3, 128)
    assert conditions["dataset"] == "nvidia/SPEED-Bench qualitative, test, version 0123abcd"


def test_a_profile_that_does_not_add_up_says_so(head: DraftHead) -> None:
    damaged = measured() | {"per_position": [0.6, 0.3, 0.4]}
    found = (build_profile(head, "x", {}, damaged) or {})["validation"]
    assert not found["mean_consistency"]["passed"]
    assert found["mean_consistency"]["abs_delta"] == 0.3
    violation = {"position": 2, "value": 0.4, "previous": 0.3}
    assert found["marginal_monotonicity"] == {"passed": False, "violations": [violation]}
    old = measured()
    del old["histogram"]
    assert build_profile(head, "x", {}, old) is None


def test_only_heads_that_draft_in_turn_tell_of_shorter_drafts(head: DraftHead) -> None:
    block = feature_head(toy_target(), "dflash")
    assert profile_of(head)["accept_length_model"] == "chain_analytic"
    profile = profile_of(block)
    assert profile["accept_length_model"] == "measured_per_k"
    assert profile["block_size"] == block.config.block_size
    assert profile["max_supported_k"] == block.max_draft_tokens
    assert profile["method"] == "dflash"


@pytest.mark.parametrize(
    ("rates", "tokens", "speed"),
    [
        # 1.6 / 1.115, 1.9 / 1.23, 2.0 / 1.345
        ([0.6, 0.3, 0.1], 2, "1.54"),
        ([0.8, 0.6, 0.5, 0.4], 4, "2.26"),
        ([0.05, 0.04], 1, "0.94"),
        ([0.115], 1, "1.00"),
    ],
)
def test_the_fastest_number_of_draft_tokens_is_advised(head, rates, tokens, speed) -> None:
    advice = advise_engine(head, {"marginal_accept_rates": rates})
    assert (advice.num_tokens, advice.schedule) == (tokens, [])
    assert advice.reason.startswith(f"Draft tokens: {tokens}. By depth, {rates[0]:.2f}")
    assert advice.reason.endswith(f"{tokens} give the most, {speed} of the speed without drafts.")


def test_without_a_measurement_or_a_choice_the_usual_number_is_advised(head: DraftHead) -> None:
    assert advise_engine(head, None).num_tokens == 5
    assert "the usual number, as nobody knows" in advise_engine(head, None).reason
    for other in (feature_head(toy_target(), "dflash"), noisy_head(toy_target(), num_heads=2)):
        advice = advise_engine(other, {"marginal_accept_rates": [0.01] * 2})
        assert advice.num_tokens == other.max_draft_tokens
        assert advice.reason.endswith("all of one pass of the head.")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"measured": False, "marginal_accept_rates": [0.0]}, False),
        ({"measured": True, "marginal_accept_rates": None}, False),
        ({"measured": True, "marginal_accept_rates": [0.5, 0.1]}, True),
    ],
)
def test_a_profile_without_figures_is_none(tmp_path: Path, content: Any, found: bool) -> None:
    assert load_profile(tmp_path) is None
    (tmp_path / PROFILE).write_text(json.dumps(content))
    assert load_profile(tmp_path) == (content if found else None)


@pytest.mark.parametrize("rates", [[], [0.5, "x"], [1.2], "0.5"])
def test_a_broken_profile_is_refused(tmp_path: Path, rates: Any) -> None:
    (tmp_path / PROFILE).write_text(json.dumps({"measured": True, "marginal_accept_rates": rates}))
    with pytest.raises(InputError, match=r"profile\.json: marginal_accept_rates=.*: must be sha"):
        load_profile(tmp_path)


def many(**changes: Any) -> dict[str, Any]:
    """A result of nine dialogues, with a mean of 2 and an interval."""
    return result(*(text(n, ACCEPTED[n % 3]) for n in range(9)), mode="replay", **changes)


def held_against(head: DraftHead, folder: Path, mean: float, **profile: Any) -> dict[str, Any]:
    """The comparison with a profile of that mean."""
    whole = profile_of(head) | {"accept_length_by_k": {"3": mean}} | profile
    (folder / PROFILE).write_text(json.dumps(whole))
    here = many()
    here["published"] = compare_with_published(here, folder, 0)
    return here


def test_a_measurement_is_held_against_the_profile(head: DraftHead, tmp_path: Path) -> None:
    here = held_against(head, tmp_path, 2.01)
    found = here["published"]
    assert (found["equal"], found["count"], found["draft_tokens"]) == (True, "drafts", 3)
    assert (found["published"], found["measured"]) == (2.01, 2.0)
    assert found["ci95"][0] <= 2.0 <= found["ci95"][1]
    said = format_published(here)
    assert said.startswith(f"{PROFILE} and this measurement, equal within the interval: 2.010 (3 ")
    assert "2.000 (95% interval " in said and "9 dialogues" in said
    assert format_published(held_against(head, tmp_path, 4.0)).startswith(
        f"{PROFILE} and this measurement, not equal: 4.000 ("
    )


def test_other_lengths_and_other_counts_are_told_apart(head: DraftHead, tmp_path: Path) -> None:
    # A chain's rates tell of shorter drafts, a block's do not.
    longer = {
        "accept_length_by_k": {"4": 2.2}, "marginal_accept_rates": [0.6, 0.3, 0.1, 0.2],
    }  # fmt: skip
    assert held_against(head, tmp_path, 0, **longer)["published"]["published"] == 2.0
    here = held_against(head, tmp_path, 0, **longer, accept_length_model="measured_per_k")
    assert here["published"]["equal"] is None
    assert format_published(here) == (
        f"{PROFILE} knows drafts of 4 tokens, not of 3: set depth to compare."
    )
    # Model-Optimizer counts the prompt's pass as well: 69 tokens in 39 passes.
    found = held_against(head, tmp_path, 2.0, measurement_conditions={"dataset": "x"})["published"]
    assert (found["count"], found["measured"]) == ("first_pass", pytest.approx(69 / 39))


def test_few_dialogues_settle_nothing(head: DraftHead, tmp_path: Path) -> None:
    (tmp_path / PROFILE).write_text(json.dumps(profile_of(head)))
    here = measured()
    here["published"] = compare_with_published(here, tmp_path, 0)
    assert here["published"]["equal"] is None
    assert ", too few to compare: " in format_published(here)


def test_a_head_without_figures_is_held_against_nothing(tmp_path: Path) -> None:
    assert compare_with_published(many(), tmp_path, 0) is None
    assert format_published({"published": None}) == ""
    (tmp_path / "README.md").write_text("# A head\n\n| depth | of the sea |\n|---|---|\n")
    assert compare_with_published(many(), tmp_path, 0) is None
