"""Acceptance lengths under every definition, by hand."""

from pathlib import Path

import pytest

from eval.measure import acceptance_stats as lengths
from eval.measure.acceptance_stats import (
    LENGTH_DEFINITIONS,
    MEANS,
    PassCounts,
    compute_mean_acceptance_length,
    count_accepted_histogram,
    format_length_bucket,
)


def acceptance_lengths(rows: list[dict]) -> dict:
    return lengths.compute_acceptance_lengths(list(map(PassCounts.from_row, rows)))


def text(dialogue: int, accepted: list[int], emitted: list[int], drafted: list[int]) -> dict:
    return {"dialogue": dialogue, "accepted": accepted, "emitted": emitted, "drafted": drafted}


# A dialogue of two turns and one of a single turn. The first text ends within a draft, so that its
# last pass emits no bonus token; one pass of the second has no draft.
TEXTS = [
    text(0, [2, 0, 1], [3, 1, 1], [2, 2, 2]),
    text(0, [0, 1], [1, 2], [0, 2]),
    text(1, [2], [3], [2]),
]


def test_what_is_counted_and_over_what_the_mean_is_taken() -> None:
    assert acceptance_lengths(TEXTS) == {
        "passes": {
            "pooled": 11 / 6,
            "turns": pytest.approx((5 / 3 + 3 / 2 + 3) / 3),
            "dialogues": pytest.approx((8 / 5 + 3) / 2),
        },
        # Three drafts accept 3 tokens, one accepts 1 and one 2.
        "drafts": {
            "pooled": 1 + 6 / 5,
            "turns": pytest.approx((2 + 2 + 3) / 3),
            "dialogues": pytest.approx((2 + 3) / 2),
        },
        "first_token": {
            "pooled": 14 / 6,
            "turns": pytest.approx((6 / 3 + 4 / 2 + 4) / 3),
            "dialogues": pytest.approx((10 / 5 + 4) / 2),
        },
        "first_pass": {
            "pooled": 14 / 9,
            "turns": pytest.approx((6 / 4 + 4 / 3 + 4 / 2) / 3),
            "dialogues": pytest.approx((10 / 7 + 4 / 2) / 2),
        },
    }
    assert compute_mean_acceptance_length(TEXTS) == 1 + 6 / 5


def test_without_counts_of_drafts_every_pass_is_one() -> None:
    assert compute_mean_acceptance_length([text(0, [2, 0], [3, 1], [])]) == 2.0


def test_texts_of_one_token_have_no_pass() -> None:
    lengths = acceptance_lengths([text(0, [], [], []), text(1, [1], [2], [3])])
    assert lengths["passes"] == {"pooled": 2.0, "turns": 2.0, "dialogues": 2.0}
    assert lengths["first_token"] == {"pooled": 4.0, "turns": 3.0, "dialogues": 3.0}
    assert lengths["first_pass"] == {"pooled": 4 / 3, "turns": 1.25, "dialogues": 1.25}
    nothing = dict.fromkeys(("pooled", "turns", "dialogues"))
    assert acceptance_lengths([text(0, [], [], [])])["drafts"] == nothing
    assert acceptance_lengths([text(0, [0], [1], [0])])["drafts"] == nothing  # nothing drafted


def test_accepted_lengths_are_counted_without_bonus_tokens() -> None:
    assert count_accepted_histogram(TEXTS, 3) == [2, 2, 2, 0]
    assert count_accepted_histogram([], 1) == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (1, "<1k"), (724, "<1k"), (725, "1k"), (1_000, "1k"), (1_448, "1k"), (1_449, "2k"),
        (2_000, "2k"), (4_096, "4k"), (8_000, "8k"), (16_000, "16k"), (32_000, "32k"),
        (131_072, "128k"),
    ],
)  # fmt: skip
def test_lengths_are_named_by_the_nearest_power_of_two(tokens: int, name: str) -> None:
    assert format_length_bucket(tokens) == name


def test_the_page_has_every_definition() -> None:
    page = Path(lengths.__file__).with_name("README.md").read_text()
    assert all(f"| `{count}` |" in page for count in LENGTH_DEFINITIONS)
    assert all(f"- `{mean}`: " in page for mean in MEANS)
