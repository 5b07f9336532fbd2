import json
from pathlib import Path

import commands
import pytest

from conf.errors import InputError
from conf.settings.scripts import TargetsRun
from scripts.zoo import check as check_targets
from scripts.zoo.check import build_table, check_in_process, format_counts, get_result_path

assert commands.FORKS  # the server of processes that tests share, begun as it wants to be
YES = dict.fromkeys(
    ("loads", "check", "chain", "tree", "batch", "medusa", "eagle", "replay"), "yes"
)  # fmt: skip
MADE = {"class": "LlamaForCausalLM", "layers": "4", "by_hand": {}}
ROWS = {
    "llama": {
        "state": "works", "columns": YES, "attention": "sdpa: document by document", "made": MADE,
        "tau": {"medusa": 2.125, "eagle": 1.5},
    },
    "mamba": {
        "state": "refused", "columns": {"loads": "yes", "check": "refused: no | state"},
        "made": {**MADE, "by_hand": {"mamba": {"expand": 1}}},
    },
    "zamba": {"state": "not made", "why": "ValueError: no"},
}  # fmt: skip


def test_what_was_checked_is_not_checked_again(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    check_in_process(tmp_path, "bloom", timeout=120)
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["bloom.json"]
    found = json.loads(get_result_path(tmp_path, "bloom").read_text())
    assert (found["state"], found["columns"]["loads"]) == ("refused", "yes")
    get_result_path(tmp_path, "bloom").write_text(json.dumps({**found, "attention": "as it was"}))
    check_targets.main(TargetsRun(["bloom", "bert"], out_dir=str(tmp_path)))
    result = json.loads((tmp_path / "targets.json").read_text())
    assert result["counts"] == {"refused": 1}
    assert result["found"]["bloom"]["attention"] == "as it was"
    assert list(result["no_target"]) == ["bert"]
    assert "| as it was |" in (tmp_path / "targets.md").read_text()


def test_a_process_that_hangs_or_dies_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    check_in_process(tmp_path, "llama", timeout=0.01)
    found = json.loads(get_result_path(tmp_path, "llama").read_text())
    assert found["columns"] == {"loads": "FAILED: took more than 0.01 s"}
    assert found["state"] == "fails"
    (tmp_path / "found/qwen2.log").mkdir()  # it cannot write there
    check_in_process(tmp_path, "qwen2", timeout=60)
    found = json.loads(get_result_path(tmp_path, "qwen2").read_text())
    assert found["columns"] == {"loads": "FAILED: its process ended with code 1"}


def test_a_model_type_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = TargetsRun(["llama9"], out_dir=str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"model_types: llama9 is unknown; .*'llama', 'llama4'"):
        check_targets.main(config)
    assert not (tmp_path / "out").exists()


def test_an_out_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InputError, match=r"out.found: cannot be made: "):
        check_targets.main(TargetsRun(["llama"], out_dir=str(tmp_path / "out")))


def test_the_table() -> None:
    lines = build_table(ROWS, {"bert": "an encoder"}).splitlines()
    assert lines[2].startswith(format_counts(ROWS))
    assert format_counts(ROWS).endswith(": 1 works, 1 refused, 1 not made")
    start = lines.index("|---|" + "---|" * 10)
    assert lines[start + 1 :] == [
        "| llama | yes | yes | yes | yes | yes | yes, tau 2.12 | yes, tau 1.50 | yes | sdpa "
        "| LlamaForCausalLM, 4 |",
        "| mamba | yes | refused |  |  |  |  |  |  |  | LlamaForCausalLM, 4; expand=1 |",
        "",
        "## Why not",
        "",
        "| model type | reason |",
        "|---|---|",
        "| mamba | check: refused: no / state |",
        "| zamba | not made: ValueError: no |",
        "",
        "## No targets",
        "",
        "| model type | reason |",
        "|---|---|",
        "| bert | an encoder |",
    ]
