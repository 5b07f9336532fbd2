"""Acceptance beside what vLLM's benchmark reports: files as it writes them, and damaged ones."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.errors import InputError
from conf.settings.scripts import CompareRun
from eval.compare.acceptance_files import (
    ReportedAcceptance,
    check_comparable,
    find_result_file,
    load_reported_acceptance,
)
from eval.measure import acceptance_stats as stats
from scripts import compare
from tests.eval.measure.test_results import result, text

# Shapes of published files, with figures of our own: 5 passes with drafts of 3 accept 8 tokens.
VLLM = {
    "date": "20261126-040000", "endpoint_type": "openai-chat", "backend": "openai-chat",
    "label": None, "model_id": "Qwen/Qwen3-8B", "tokenizer_id": "Qwen/Qwen3-8B",
    "num_prompts": 2, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 1,
    "duration": 1.5, "completed": 2, "failed": 0, "total_input_tokens": 20,
    "total_output_tokens": 15, "request_throughput": 1.3, "output_throughput": 10.0,
    "spec_decode_acceptance_rate": 53.333333333333336, "spec_decode_acceptance_length": 2.6,
    "spec_decode_num_drafts": 5, "spec_decode_draft_tokens": 15, "spec_decode_accepted_tokens": 8,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.4, 0.4],
    "mean_ttft_ms": 12.0, "median_tpot_ms": 3.0, "p99_itl_ms": 9.0,
}  # fmt: skip
# The same passes, as we count them.
OURS = result(text(0, [1, 3, 0]), text(1, [1, 3]), max_new_tokens=128, num_turns=1)


def write(path: Path, content: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


FILES: dict[str, tuple[str, object]] = {
    "vllm": ("openai-infqps-concurrency1-Qwen3-8B-20261126.json", VLLM),
    "ours": ("acceptance.json", OURS),
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Writes a file into a folder of its own, and returns that."""

    def made(name: str, **changes: Any) -> str:
        file, content = FILES[name]
        changed = {**content, **changes} if isinstance(content, dict) else content
        return str(Path(write(tmp_path / name / file, changed)).parent)

    return made


def reported(folder: str) -> ReportedAcceptance:
    return load_reported_acceptance(find_result_file(folder)[1])


def test_a_result_of_vllm(folder) -> None:
    assert reported(folder("vllm")) == ReportedAcceptance(
        "vLLM", {("drafts", "pooled"): 2.6}, [0.8, 0.4, 0.4],
        {"draft tokens": 3, "texts": 2, "turns": "first alone", "target": "qwen3-8b"},
    )  # fmt: skip


def test_our_own_result_has_every_definition(folder) -> None:
    found = reported(folder("ours"))
    assert len(found.lengths) == 12
    assert found.lengths["drafts", "pooled"] == found.lengths["passes", "pooled"] == 2.6
    assert found.lengths["first_pass", "turns"] == pytest.approx((8 / 4 + 7 / 3) / 2)
    assert found.conditions == {
        "draft tokens": 3, "texts": 2, "dialogues": 2, "turns": "first alone",
        "target": "qwen3-8b", "temperature": 0.0, "new tokens": 128,
    }  # fmt: skip


def test_both_side_by_side(folder, tmp_path: Path, capsys) -> None:
    paths = [folder(name) for name in ("ours", "vllm")]
    compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    shown = (tmp_path / "out/comparison.md").read_text().splitlines()
    assert shown[0].startswith("nvidia/SPEED-Bench qualitative, test, version 0123abcd, first")
    assert [line.split(" | ") for line in shown[2:]] == [
        ["| result", "tool", "draft tokens", "texts", "1 + accepted / drafts, as vLLM (pooled)",
         "per position |"],
        ["|---|---|---|---|---|---|"],
        ["| ours", "Headsmith", "3", "2", "2.600", "0.80 0.40 0.40 |"],
        ["| vllm", "vLLM", "3", "2", "2.600", "0.80 0.40 0.40 |"],
    ]  # fmt: skip
    assert (tmp_path / "out/comparison.png").is_file()
    assert shown[2] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vllm", {"model_id": "Qwen/Qwen3-4B"}, "target qwen3-8b and qwen3-4b"),
        ("vllm", {"completed": 3}, "texts 2 and 3"),
        ("vllm", {"spec_decode_per_position_acceptance_rates": [0.8, 0.4, 0.4, 0.0]},
         "draft tokens 3 and 4"),
    ],
)  # fmt: skip
def test_results_of_other_conditions_are_refused(folder, name, changes, message) -> None:
    results = {"mine": reported(folder("ours")), "theirs": reported(folder(name, **changes))}
    with pytest.raises(InputError, match=rf"mine \(Headsmith\) and theirs \(vLLM\).*: {message}"):
        check_comparable(results)


def test_all_turns_are_not_compared_with_first_ones(folder) -> None:
    turns = [text(0, [1, 3, 0]), text(1, [1, 3])]
    asked_all = result(*turns, max_new_tokens=128, num_turns=2)
    theirs = reported(folder("vllm"))
    own = load_reported_acceptance(Path(write(Path(folder("ours")) / "all.json", asked_all)))
    with pytest.raises(InputError, match="turns all and first alone"):
        check_comparable({"mine": own, "theirs": theirs})
    with pytest.raises(InputError, match="turns first alone and all"):
        check_comparable({"mine": reported(folder("ours")), "b": own})
    # Of dialogues of one turn both is the same.
    data = {**OURS["data"], "most_turns": 1}
    one = load_reported_acceptance(
        Path(write(Path(folder("ours")) / "one.json", {**OURS, "data": data}))
    )
    for other in (theirs, own):
        check_comparable({"mine": one, "theirs": other})


def test_what_has_no_definition_in_common_is_refused(folder) -> None:
    theirs = reported(folder("vllm"))
    own = replace(reported(folder("ours")), lengths={("passes", "pooled"): 2.6})
    message = r"theirs \(vLLM\) has an acceptance length that no other result has: 1 \+ accepted"
    with pytest.raises(InputError, match=message):
        check_comparable({"theirs": theirs, "mine": own})
    assert check_comparable({"a": theirs, "b": theirs}) == [("drafts", "pooled")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vllm", {"completed": 2}, r"'spec_decode_acceptance_length': found nothing; allowed: a r"),
        ("vllm", VLLM | {"spec_decode_per_position_acceptance_rates": [0.8, 1.4, 0.4]},
         r"'spec_decode_per_position_acceptance_rates\[1\]': found 1\.4"),
        ("vllm", VLLM | {"failed": 1}, r"'failed': found 1 requests; allowed: 0"),
        ("vllm", VLLM | {"spec_decode_acceptance_length": 2.5}, r"found 2\.5; allowed: 2\.6, as"),
        ("vllm", [VLLM], r"'\(whole file\)': found \[.*; allowed: an object"),
        ("ours", {"prompts": []}, "'acceptance_length': found nothing; .*; measure again"),
        ("ours", {"prompts": [], "served": {}}, "'served': found a result of eval/serve.py; allow"),
    ],
)  # fmt: skip
def test_files_that_say_nothing_are_named(tmp_path: Path, name, content, message) -> None:
    path = tmp_path / FILES[name][0]
    with pytest.raises(InputError, match=rf"results: {path}: .*{message}"):
        load_reported_acceptance(Path(write(path, content)))


def test_results_are_found_and_called_after_their_folders(folder, tmp_path: Path) -> None:
    path = folder("vllm")
    assert find_result_file(path) == ("vllm", Path(path) / FILES["vllm"][0])
    file = str(Path(path) / FILES["vllm"][0])
    assert find_result_file(file)[0] == FILES["vllm"][0].removesuffix(".json")
    assert find_result_file(folder("ours") + "/acceptance.json")[0] == "ours"
    write(Path(path) / "more.json", VLLM)
    with pytest.raises(
        InputError, match=r"vllm: must hold .*but holds more.json, openai.*; name th"
    ):
        find_result_file(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: must hold .*but holds none"):
        find_result_file(str(tmp_path / "empty"))


def test_one_head_at_several_lengths_gives_a_golden_curve(tmp_path: Path, no_picture) -> None:
    short = result(text(0, [1, 1, 0], [1] * 3), text(1, [1, 1], [1] * 2), max_new_tokens=128)
    paths = [
        str(Path(write(tmp_path / name / "acceptance.json", content)).parent)
        for name, content in (("long", OURS), ("short", short))
    ]
    compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    curve = yaml.safe_load((tmp_path / "out/golden.yaml").read_text())
    assert curve == {"qwen3-8b": {"thinking_off": {1: 1.8, 3: 2.6}}}
    other = Path(write(tmp_path / "other/acceptance.json", short | {"head": "another"})).parent
    compare.main(CompareRun(results=[paths[0], str(other)], out_dir=str(tmp_path / "two")))
    assert not (tmp_path / "two/golden.yaml").exists()


WRONG = (None, True, -1, 0.5, 1e300, float("nan"), float("inf"), "", "x", "{}", [], {}, [None],
         [[3]], {"a": 1}, ["a"])  # fmt: skip


def damaged(content: Any, rng: random.Random) -> Any:
    """A copy with something else in place of a random part."""
    if isinstance(content, dict | list) and content and rng.random() < 0.8:
        copy = dict(content) if isinstance(content, dict) else list(content)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = damaged(copy[key], rng)
        return copy
    return rng.choice(WRONG)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, folder, name: str, monkeypatch) -> None:
    """Whatever was lost or changed: a comparison, or a refusal that names the file or the row."""
    monkeypatch.setattr(compare, "plot_comparison", lambda *_: None)
    monkeypatch.setattr(compare, "plot_reported", lambda *_: None)
    monkeypatch.setattr(stats, "NUM_BOOTSTRAPS", 40)
    rng, (file, content) = random.Random(name), FILES[name]
    whole = Path(write(tmp_path / "whole" / file, content)).read_bytes()
    # Of dialogues of one turn, which no tool asks otherwise.
    beside = folder("ours", data={**OURS["data"], "most_turns": 1})
    path = tmp_path / "damaged" / file
    path.parent.mkdir()
    refused = 0
    for number in range(60):
        if number % 3:
            write(path, damaged(content, rng))
        else:
            place = rng.randrange(len(whole))
            rest = rng.choice([b"", rng.randbytes(1) + whole[place + 1 :]])
            path.write_bytes(whole[:place] + rest)
        try:
            run = CompareRun(results=[beside, str(path)], out_dir=str(tmp_path / "out"))
            compare.main(run)
        except InputError as error:
            assert any(each in str(error) for each in ("damaged", path.stem)), error
            refused += 1
    assert 20 < refused < 60
