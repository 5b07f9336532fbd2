from typing import Any

import pytest

from eval.measure.results import describe_conditions, format_conditions

GREEDY = {
    "data": {
        "path": "nvidia/SPEED-Bench", "subset": "qualitative", "split": "test", "most_turns": 2,
        "version": "0123abcd" + "e" * 32, "sha256": "f" * 64,
    },
    "num_turns": 1, "draft_tokens": 5, "temperature": 0.0, "top_p": 1.0, "top_k": None,
    "min_p": 0.0, "max_new_tokens": 128, "target_identity": {"template": "ab12cd34" + "e" * 56},
}  # fmt: skip


def said(**changes: Any) -> dict[str, Any]:
    return describe_conditions({**GREEDY, **changes})


def test_a_result_says_what_it_holds_under() -> None:
    assert said() == {
        "data": "nvidia/SPEED-Bench qualitative, test, version 0123abcd",
        "turns": "first turns alone of up to 2",
        "draft_tokens": 5,
        "sampling": "greedy",
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "max_new_tokens": 128,
        "chat_template": "ab12cd34" + "e" * 56,
    }
    assert format_conditions({"conditions": said()}) == (
        "nvidia/SPEED-Bench qualitative, test, version 0123abcd, first turns alone of up to 2; "
        "greedy; chains of 5 draft tokens; drafts greedy; rejection standard; at most 128 new "
        "tokens; chat template ab12cd34"
    )


def test_methods_have_draft_tokens_of_their_own() -> None:
    without = {key: value for key, value in GREEDY.items() if key != "draft_tokens"}
    assert "draft tokens" not in format_conditions({"conditions": describe_conditions(without)})
    assert format_conditions({}) == ""


def test_a_file_of_ones_own_is_known_by_its_contents(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.touch()
    own = {"path": str(path), "split": "train", "subset": None, "sha256": "12345678" + "0" * 56}
    assert said(data=own)["data"] == "prompts.jsonl, sha256 12345678"
    assert said(data=own)["turns"] == "first turns alone"


@pytest.mark.parametrize(
    ("asked", "most", "words"),
    [(1, 1, "all turns"), (2, 2, "all turns"), (3, 2, "all turns"),
     (2, 3, "first 2 turns of up to 3"), (2, None, "first 2 turns")],
)  # fmt: skip
def test_turns(asked: int, most: int | None, words: str) -> None:
    data = {**GREEDY["data"], "most_turns": most}
    assert said(num_turns=asked, data=data)["turns"] == words


def test_what_is_drawn_is_told_apart() -> None:
    drawn = said(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    assert drawn["sampling"] == "temperature 0.7, top_p 0.9, top_k 20, min_p 0.05"
    assert said(temperature=1.0)["sampling"] == "temperature 1"
    assert drawn["draft_sample_method"] == "probabilistic in chains, greedy in trees and copies"
    assert str(drawn["rejection_sample_method"]).startswith("standard; in trees")


def test_a_target_without_a_template() -> None:
    bare = said(target_identity={"template": None})
    assert format_conditions({"conditions": bare}).endswith("chat template none")
