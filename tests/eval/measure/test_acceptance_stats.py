"""Acceptance: figures of texts and categories, intervals, and lengths under every definition."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from eval.decode.engine import Step
from eval.measure import acceptance_stats
from eval.measure.acceptance_stats import (
    LENGTH_DEFINITIONS,
    MEANS,
    PassCounts,
    PromptSteps,
    compare_tau,
    compute_acceptance_lengths,
    compute_mean_acceptance_length,
    compute_per_position,
    compute_tau_interval,
    count_dialogues,
    format_interval,
    format_length_bucket,
    format_shown_interval,
    print_acceptance_lengths,
    select_tree_figures,
    summarise_acceptance,
    tau,
)

# Three passes: both depths kept; first refused; first kept and the text then ends.
STEPS = PromptSteps("a", [Step(2, 3, 5), Step(0, 1, 2), Step(1, 1, 1)])


def test_categories_are_summed_up_by_themselves() -> None:
    """Alpha leaves out depths that a pass could not test, as its text ended; depths count all."""
    other = PromptSteps("b", [Step(0, 1, 2), Step(0, 1, 1)], [4, 2], dialogue=1, turn=2)
    result = summarise_acceptance([STEPS, other], 2, seed=0)
    assert result == {
        "draft_tokens": 4,
        "tau": pytest.approx(7 / 5),
        "tau_ci95": (1.0, pytest.approx(5 / 3)),
        "acceptance_length": compute_acceptance_lengths(
            [PassCounts.from_row(STEPS.build_row()), PassCounts.from_row(other.build_row())]
        ),
        "alpha": [pytest.approx(2 / 5), 1.0],
        "per_position": [pytest.approx(2 / 5), pytest.approx(1 / 5)],
        "histogram": [3, 1, 1],
        "by_category": {
            "a": {
                "tau": pytest.approx(5 / 3),
                "ci95": None,
                "per_draft": 2.0,
                "alpha": [pytest.approx(2 / 3), 1.0],
                "num_prompts": 1,
                "num_dialogues": 1,
            },
            "b": {
                "tau": 1.0, "ci95": None, "per_draft": 1.0, "alpha": [0.0, 0.0], "num_prompts": 1,
                "num_dialogues": 1,
            },
        },
        "by_input_length": {},
        "num_prompts": 2,
        "num_tokens": 7,
        "num_steps": 5,
        "num_drafted": 6,
        "num_accepted": 3,
        "prompts": [
            {
                "dialogue": 0, "turn": 1, "category": "a", "prompt_tokens": 0, "spans": {},
                "drafted": [], "accepted": [2, 0, 1], "emitted": [3, 1, 1],
            },
            {
                "dialogue": 1, "turn": 2, "category": "b", "prompt_tokens": 0, "spans": {},
                "drafted": [4, 2], "accepted": [0, 0], "emitted": [1, 1],
            },
        ],
    }  # fmt: skip


def test_input_lengths_are_summed_up_from_short_to_long() -> None:
    tokens = {0: 9_000, 1: 16_000, 2: 700, 3: 8_000}
    prompts = [
        PromptSteps("a", [Step(n, n + 1, 9)], dialogue=n, prompt_tokens=each)
        for n, each in tokens.items()
    ]
    found = summarise_acceptance(prompts, 3, seed=0)["by_input_length"]
    assert [(name, row["tau"], row["num_prompts"]) for name, row in found.items()] == [
        ("<1k", 3.0, 1), ("8k", 2.5, 2), ("16k", 2.0, 1),
    ]  # fmt: skip


def test_the_interval_of_tau_leaves_out_a_fortieth_at_each_end() -> None:
    # Eight prompts drawn from four of tau 1 and four of tau 2: tau is 1 + k / 8 with k binomial,
    # of which 0.4% lie below 1, 3.5% below 2 and 14.5% below 3, and as many at the other end.
    prompts = [PromptSteps("a", [Step(n % 2, n % 2 + 1, 9)], dialogue=n) for n in range(8)]
    assert compute_tau_interval(prompts, seed=0) == (1.125, 1.875)
    # Asked twice, a dialogue says no more.
    assert compute_tau_interval(prompts * 2, seed=0) == (1.125, 1.875)


def test_one_dialogue_gives_no_interval() -> None:
    turns = [PromptSteps("a", [Step(n, n + 1, 9)], turn=n) for n in range(4)]
    assert compute_tau_interval(turns, seed=0) is None
    assert format_interval(None) == "-"
    assert format_interval((1, 2.345), 1) == "1.0-2.3"
    assert format_interval([1, 2], 2, " to ") == "1.00 to 2.00"


def test_heads_are_compared_in_pairs() -> None:
    """Prompts of tau 1 to 8, and a head that gives half a token more on each."""
    first = [PromptSteps("a", [Step(0, n, 99)] * 2, dialogue=n).build_row() for n in range(1, 9)]
    second = [
        PromptSteps("a", [Step(0, n, 99), Step(0, n + 1, 99)], dialogue=n).build_row()
        for n in range(1, 9)
    ]
    assert compare_tau(first, second, seed=0) == (0.5, (0.5, 0.5))
    assert compare_tau(second, first, seed=0) == (-0.5, (-0.5, -0.5))
    assert compare_tau(first[:1], second[:1], seed=0) == (0.5, None)


def test_the_interval_of_tau_is_that_of_its_seed() -> None:
    prompts = [PromptSteps("a", [Step(n * n, n * n + 1, 999)], dialogue=n) for n in range(12)]
    assert compute_tau_interval(prompts, seed=1) == compute_tau_interval(prompts, seed=1)
    assert compute_tau_interval(prompts, seed=1) != compute_tau_interval(prompts, seed=2)
    found = summarise_acceptance(prompts, 121, seed=1)
    assert (
        found["tau_ci95"]
        == found["by_category"]["a"]["ci95"]
        == compute_tau_interval(prompts, seed=1)
    )


@pytest.mark.parametrize("kind", ["static_tree", "dynamic_tree"])
def test_a_result_tells_of_its_one_tree(kind: str) -> None:
    assert select_tree_figures({"tau": 1.5, kind: {"tau": 2.0}}) == {"tau": 2.0}


def test_nothing_to_verify_is_one_token_per_pass() -> None:
    assert tau([PromptSteps("a", [])]) == 1.0
    assert compute_per_position([PromptSteps("a", [])], 2) == [0.0, 0.0]


def test_an_interval_of_few_dialogues_is_not_shown() -> None:
    assert format_shown_interval((1.1, 1.1), 7) == "few"
    assert format_shown_interval((1.1, 1.25), 8) == "1.10-1.25"
    assert format_shown_interval(None, 1) == "-"
    assert count_dialogues([{"dialogue": 3}, {"dialogue": 3}, {"dialogue": 4}]) == 2


# Acceptance lengths under every definition, by hand.


def lengths_of(rows: list[dict]) -> dict:
    return compute_acceptance_lengths(list(map(PassCounts.from_row, rows)))


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
    assert lengths_of(TEXTS) == {
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
    lengths = lengths_of([text(0, [], [], []), text(1, [1], [2], [3])])
    assert lengths["passes"] == {"pooled": 2.0, "turns": 2.0, "dialogues": 2.0}
    assert lengths["first_token"] == {"pooled": 4.0, "turns": 3.0, "dialogues": 3.0}
    assert lengths["first_pass"] == {"pooled": 4 / 3, "turns": 1.25, "dialogues": 1.25}
    nothing = dict.fromkeys(("pooled", "turns", "dialogues"))
    assert lengths_of([text(0, [], [], [])])["drafts"] == nothing
    assert lengths_of([text(0, [0], [1], [0])])["drafts"] == nothing  # nothing drafted


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


def test_the_table_has_a_row_for_each_definition(capsys) -> None:
    lengths = {
        "passes": {"pooled": 1.5, "turns": 1.25, "dialogues": None},
        "drafts": {"pooled": 2.0, "turns": 2.0625, "dialogues": 3.0},
    }
    print_acceptance_lengths(lengths, Console(width=90), "EAGLE")
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "Acceptance length of EAGLE, as others define it"
    rows = [re.sub(r"\s*[│┃]\s*", " | ", line).strip(" |") for line in lines]
    assert [row for row in rows if row[0] not in "┡└"] == [
        "counted | pooled | mean over turns | over dialogues",
        "tau: tokens per pass | 1.500 | 1.250 | -",
        "1 + accepted / drafts, as vLLM | 2.000 | 2.062 | 3.000",
    ]


def test_the_page_has_every_definition() -> None:
    page = Path(acceptance_stats.__file__).with_name("README.md").read_text()
    assert all(f"| `{count}` |" in page for count in LENGTH_DEFINITIONS)
    assert all(f"- `{mean}`: " in page for mean in MEANS)
