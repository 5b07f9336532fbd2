"""One head under several conditions, in one table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conf.errors import InputError
from conf.settings.measure import AcceptanceRun, Mode
from eval import acceptance
from eval.acceptance import build_conditions_table
from eval.measure import measurement as bench
from eval.preflight_checks import build_condition_runs
from tests.eval.test_commands import made, settings


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    return made(tmp_path_factory.mktemp("conditions"), "llama")


def test_a_condition_changes_what_it_names() -> None:
    config = AcceptanceRun(
        out_dir="out",
        max_new_tokens=8,
        conditions=[
            "",
            "  mode=decode   temperature=1 top_p=0.9",
            "data.path=a/long.jsonl data.chat_template_kwargs.enable_thinking=false",
        ],
    )
    given, drawn, long = build_condition_runs(config).values()
    assert list(build_condition_runs(config))[1] == "mode=decode temperature=1 top_p=0.9"
    assert (given.mode, given.temperature, given.out_dir) == (Mode.replay, 0.0, "out/as_given")
    assert (drawn.mode, drawn.temperature, drawn.top_p) == (Mode.decode, 1.0, 0.9)
    assert drawn.out_dir == "out/mode=decode_temperature=1_top_p=0.9"
    assert (long.data.path, long.data.chat_template_kwargs) == (
        "a/long.jsonl", {"enable_thinking": False},
    )  # fmt: skip
    assert all((run.max_new_tokens, run.conditions) == (8, []) for run in (given, drawn, long))


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (["hot"], r"conditions: 'hot': 'hot' sets nothing; a condition is settings such as"),
        (["temprature=1"], r"temprature: this command has no such setting"),
        (["head.path=other"], r"conditions: 'head.path=other': head.path is not a condition; allo"),
        (["depth=3"], r"depth is not a condition; allowed: data, num_turns, .*temperature"),
        (["temperature=1"], r"conditions: 'temperature=1': temperature=1.0: only greedy text can"),
        (["temperature=hot"], r"conditions: 'temperature=hot': Value 'hot'.* could not be"),
        (["seed=1", " seed=1"], r"conditions: 'seed=1' stands twice"),
    ],
)
def test_what_is_no_condition_is_refused_before_anything_is_loaded(
    setting, tmp_path, conditions, message
) -> None:
    own = settings(setting, tmp_path)
    with pytest.raises(InputError, match=message):
        acceptance.check_acceptance_run(AcceptanceRun(**own, conditions=conditions))


def test_all_conditions_stand_in_one_table(setting, tmp_path, capsys, monkeypatch) -> None:
    own = settings(setting, tmp_path) | {"max_new_tokens": 8, "num_turns": 1}
    own["data"].num_prompts = 2
    alone = AcceptanceRun(**own | {"out_dir": str(tmp_path / "alone")})
    acceptance.main(alone)
    loaded: list[object] = []
    load = bench.load_target
    monkeypatch.setattr(bench, "load_target", lambda *given: loaded.append(1) or load(*given))

    def run() -> dict[str, Any]:
        capsys.readouterr()
        acceptance.main(AcceptanceRun(**own, conditions=["", "mode=decode temperature=1"]))
        return json.loads((tmp_path / "conditions.json").read_text())["conditions"]

    rows = run()
    assert len(loaded) == 1
    for name, folder in (("", "as_given"), ("mode=decode temperature=1", None)):
        file = tmp_path / (folder or "mode=decode_temperature=1") / "acceptance.json"
        written = json.loads(file.read_text())
        assert (rows[name]["tau"], rows[name]["num_prompts"]) == (written["tau"], 2)
        assert rows[name]["conditions"]["sampling"] == ("temperature 1" if name else "greedy")
    assert rows[""]["tau"] == json.loads((tmp_path / "alone/acceptance.json").read_text())["tau"]
    shown = capsys.readouterr().out
    assert re.search(r"│ as given +│ +2 │ +\d+ │ \d\.\d\d \d", shown)
    assert (tmp_path / "conditions.png").is_file()
    # A second start takes the results that are there.
    (tmp_path / "conditions.json").unlink()
    assert run() == rows
    assert len(loaded) == 1
    (tmp_path / "conditions.json").unlink()
    with pytest.raises(InputError, match=r"as_given/acceptance.json is of other settings"):
        acceptance.main(AcceptanceRun(**own | {"max_new_tokens": 9}, conditions=[""]))


def test_thinking_and_answers_have_columns_where_anything_thinks() -> None:
    def result(by_part: dict) -> dict[str, Any]:
        return {
            "num_prompts": 1, "prompts": [{"prompt_tokens": 5}], "tau": 2.0, "tau_ci95": None,
            "acceptance_length": {"drafts": {"pooled": 2.5}}, "static_tree": {"tau": 3.0},
            "by_part": by_part, "alpha": [0.5], "mode": "replay", "conditions": {},
        }  # fmt: skip

    plain = build_conditions_table({"": result({})})
    assert [column.header for column in plain.columns][-2:] == ["as vLLM", "tree"]
    parts = {"thinking": {"tau": 4.0}, "answer": {"tau": 1.5}}
    both = build_conditions_table({"a": result(parts), "b": result({})})
    assert [column.header for column in both.columns][-2:] == ["thinking", "answer"]
    assert [list(column.cells) for column in both.columns][-2:] == [["4.00", "-"], ["1.50", "-"]]


def test_a_condition_is_read_from_the_command_line(tmp_path: Path) -> None:
    words = 'conditions=["mode=decode temperature=1","data.path=a.jsonl"]'
    composed = acceptance.COMMAND.compose_settings([words])
    assert list(composed.conditions) == ["mode=decode temperature=1", "data.path=a.jsonl"]
