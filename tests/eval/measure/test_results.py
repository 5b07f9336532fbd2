"""What a result holds under, and files for other tools, in the shape that those write or read."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.errors import InputError
from eval.decode.engine import Step
from eval.measure.acceptance_stats import PromptSteps, summarise_acceptance
from eval.measure.results import (
    build_vllm_metrics,
    describe_conditions,
    export_results,
    format_conditions,
    format_golden_lengths,
)

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
    (tmp_path / "prompts.jsonl").touch()
    own = {"path": str(tmp_path / "prompts.jsonl"), "split": "train", "subset": None}
    found = said(data={**own, "sha256": "12345678" + "0" * 56})["data"]
    assert found == "prompts.jsonl, sha256 12345678"


@pytest.mark.parametrize(
    ("asked", "most", "words"),
    [(1, 1, "all turns"), (2, 2, "all turns"), (3, 2, "all turns"), (1, None, "first turns alone"),
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


def text(dialogue: int, accepted: list[int], drafted: list[int] | None = None) -> PromptSteps:
    steps = [Step(n, n + 1, 99) for n in accepted]
    sizes = [3] * len(accepted) if drafted is None else drafted
    return PromptSteps("math", steps, sizes, dialogue, prompt_tokens=10)


def result(*texts: PromptSteps, **changes: Any) -> dict[str, Any]:
    figures: dict[str, Any] = summarise_acceptance(texts, 3, seed=0)
    about = {**GREEDY, "head": "outputs/eagle/head", "target": "x", "git": "abc", **changes}
    about["target_identity"] = {"name": "Qwen/Qwen3-8B", "template": "ab" * 32}
    whole = {
        **about,
        **figures,
        "static_tree": summarise_acceptance(texts, 3, seed=0),
        "tree": [0, 0, 1, 1],
    }
    return whole | {"conditions": describe_conditions(whole)}


def test_a_text_as_vllm_tells_of_it() -> None:
    told = build_vllm_metrics(text(0, [2, 0, 0, 3, 1], [3, 3, 0, 3, 2]).build_row(), 3)
    # As vLLM 0.32 answers, `--per-request-spec-decode-metrics detailed`.
    assert told == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 6 / 11,
        "acceptance_histogram": [1, 1, 1, 1],  # the pass without a draft is none
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 11,
        "num_spec_tokens": 3,
        "per_step_accepted": [2, 0, 3, 1],
        "per_step_drafted": [3, 3, 3, 2],
    }
    alone = build_vllm_metrics(text(0, []).build_row(), 3)
    assert (alone["mean_acceptance_length"], alone["acceptance_histogram"]) == (1.0, [0] * 4)
    assert alone["draft_acceptance_rate"] == 0.0


def test_a_line_for_every_request(tmp_path: Path) -> None:
    texts = text(0, [2, 1]), text(7, [0])
    files = export_results(result(*texts), tmp_path)
    assert [file.name for file in files] == ["requests.jsonl", "golden.yaml"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [(row["id"], row["method"]) for row in rows] == [
        ("0.1", "chain"), ("7.1", "chain"), ("0.1", "tree"), ("7.1", "tree")
    ]  # fmt: skip
    assert rows[0]["usage"] == {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
    assert rows[1]["metrics"]["speculative_decoding"] == build_vllm_metrics(texts[1].build_row(), 3)


def test_a_golden_file(tmp_path: Path) -> None:
    export_results(result(text(0, [3, 1]), text(1, [0])), tmp_path)
    written = (tmp_path / "golden.yaml").read_text()
    assert yaml.safe_load(written) == {"qwen3-8b": {"thinking_off": {3: 2.3333}}}
    replay = (
        '# vLLM: "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", '
        '"synthetic_acceptance_length": 2.3333 in --speculative-config\n'
        '#   or, depth by depth, "synthetic_acceptance_rates": [0.6667, 0.3333, 0.3333]\n'
        "# SGLang: SGLANG_SIMULATE_ACC_LEN=2.3333 SGLANG_SIMULATE_ACC_METHOD=match-expected "
    )
    assert replay in written
    assert "first turns alone of up to 2; greedy; chains of 3 draft tokens" in written


def test_lengths_by_draft_tokens_and_names_that_are_no_plain_words() -> None:
    short, long = result(text(0, [1])), result(text(0, [3]), config={
        "data": {"chat_template_kwargs": {"enable_thinking": True}}
    })  # fmt: skip
    long["prompts"][0]["spans"] = {"thinking": [[0, 4]]}
    long["target_identity"]["name"] = "models/my: own\nmodel"
    written = format_golden_lengths({3: long, 1: short}, long)
    assert yaml.safe_load(written) == {"my: own\nmodel": {"thinking_on": {1: 2.0, 3: 4.0}}}
    assert written.endswith("    1: 2.0000\n    3: 4.0000\n")
    assert '# thinking_on chat_template_kwargs: {"enable_thinking": true}\n' in written


def test_methods_that_draft_chains_of_one_length_have_golden_files(tmp_path: Path) -> None:
    def method(tree: list[int] | None, *texts: PromptSteps) -> dict[str, Any]:
        own = {} if tree is None else {"tree": {"parents": tree, "ranks": tree}}
        return {**summarise_acceptance(texts, 3, seed=0), **own}

    whole = result(text(0, [1]))
    whole["methods"] = {
        "vanilla": method(None, text(0, [0, 0], [0, 0])),
        "eagle_chain": method([-1, 0, 1, 2], text(0, [2, 0, 1], [3, 0, 3])),
        "eagle_cut": method([-1, 0, 1, 2], text(0, [2, 1], [3, 2])),
        "eagle_tree": method([-1, 0, 0, 1], text(0, [2, 1])),
        "prompt_lookup": method(None, text(0, [2, 1])),
    }
    files = [file.name for file in export_results(whole, tmp_path)]
    assert files == ["requests_speedup.jsonl", "golden_eagle_chain.yaml"]
    lines = (tmp_path / "requests_speedup.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == list(whole["methods"])[1:]
    golden_file = yaml.safe_load((tmp_path / "golden_eagle_chain.yaml").read_text())
    assert golden_file == {"qwen3-8b": {"thinking_off": {3: 2.5}}}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"out_dir=.*gone: cannot write there"):
        export_results(result(text(0, [1])), tmp_path / "gone")
