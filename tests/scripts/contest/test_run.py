"""A contest of heads: its tasks, what it refuses, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.scripts import ContestPart, ContestRun, ContestTrainConfig
from conf.settings.target import TargetConfig
from scripts.contest import run as contest
from scripts.quickstart import Stage


def test_a_recipe_is_a_name_with_settings_behind() -> None:
    found = contest.parse_recipes(
        ["medusa", "dspark head.num_layers=2", "eagle3_1", "hass", "dspark 'head.layers=[1, 2]'"]
    )
    assert [(each.label, each.kind, each.overrides) for each in found] == [
        ("medusa", "medusa", ()),
        ("dspark", "dspark", ("head.num_layers=2",)),
        ("eagle3_1", "eagle", ("head=eagle3_1",)),
        ("hass", "eagle", ("head=hass",)),
        ("dspark-2", "dspark", ("head.layers=[1, 2]",)),
    ]
    assert contest.list_head_methods(found)["hass"] == {
        "chain": "eagle_chain_2",
        "tree": "eagle_tree_2",
    }


NOT_BETWEEN = "cannot differ between recipes"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("eagle4", "'eagle4' is no recipe; allowed: dflash, dflash2, dspark, eagle, eagle1"),
        ("", "recipes: '' is no recipe"),
        ("medusa data.path=x", rf"data\.path=x {NOT_BETWEEN}; allowed: head\.\* and"),
        ("medusa train.batch_size=2", rf"train\.batch_size=2 {NOT_BETWEEN}"),
        ("medusa seed=1", f"seed=1 {NOT_BETWEEN}"),
        ("medusa head.num_heads", rf"head\.num_heads {NOT_BETWEEN}"),
    ],
)
def test_unknown_recipes_and_unfair_settings_are_refused(entry: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        contest.parse_recipes([entry])


def test_settings_reach_a_command_as_they_are() -> None:
    given = DataConfig(
        path="it's, here [1]=x", columns={"prompt": "my ask"}, num_prompts=3, streaming=True
    )
    words = contest.format_overrides("data", given)
    parsed = OverridesParser.create().parse_overrides(words)
    assert {each.key_or_group: each.value() for each in parsed} == {
        "data.path": "it's, here [1]=x",
        "data.columns": {"prompt": "my ask"},
        "data.num_prompts": 3,
        "data.streaming": True,
    }
    assert contest.format_overrides("target", TargetConfig()) == []


def settings(folder: Path, **changes: Any) -> ContestRun:
    own: dict[str, Any] = {
        "target": TargetConfig(path=str(folder / "target")),
        "data": DataConfig(path=str(folder / "chat.jsonl"), max_length=128, eval_fraction=0.2),
        "prompts": DataConfig(path=str(folder / "chat.jsonl"), num_prompts=4),
        "train": ContestTrainConfig(batch_size=4),
        "recipes": ["medusa", "eagle3_1"],
        "tokens": 4 * 128 * 15,
        "out_dir": str(folder / "out"),
    }
    return ContestRun(**{**own, **changes})


def begin_inputs(folder: Path) -> None:
    """A target and data, as far as they are looked at before anything begins."""
    (folder / "target").mkdir()
    (folder / "target/config.json").write_text('{"model_type": "llama"}')
    (folder / "target/model.safetensors").touch()
    (folder / "chat.jsonl").touch()


def test_a_budget_buys_steps(tmp_path: Path) -> None:
    assert contest.compute_num_steps(settings(tmp_path)) == 15
    with pytest.raises(InputError, match=r"tokens=511: allows no step of 512 tokens; raise"):
        contest.compute_num_steps(settings(tmp_path, tokens=511))


def test_every_head_is_trained_alike(tmp_path: Path) -> None:
    config = settings(tmp_path, recipes=["medusa", "eagle3_1 head.num_steps=2"], seed=3)
    todo = contest.list_training_tasks(config, contest.parse_recipes(config.recipes), tmp_path, 15)
    command = todo[1].command
    assert command[:2] == [sys.executable, str(ROOT / "train/eagle.py")]
    assert {"head=eagle3_1", "head.num_steps=2", "train.max_steps=15", "train.batch_size=4",
            "train.resume=auto", "data.max_length=128", "seed=3"} <= set(command)  # fmt: skip
    config.launch = ["--num_processes", "2"]
    (first, _) = contest.list_training_tasks(
        config, contest.parse_recipes(config.recipes), tmp_path, 15
    )
    assert first.command[1:5] == ["-m", "accelerate.commands.launch", "--num_processes", "2"]


def test_a_folder_holds_one_contest(tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    config = settings(tmp_path)
    contest.claim_folder(config, out_dir)
    again = settings(tmp_path, launch=["--cpu"], parts=[ContestPart.train], out_dir="elsewhere")
    contest.claim_folder(again, out_dir)
    begun = json.loads((out_dir / "settings.json").read_text())
    planned = json.dumps({**begun, "minutes": None, "probe_steps": 8})
    (out_dir / "settings.json").write_text(planned)  # as a contest that planned began
    contest.claim_folder(again, out_dir)
    with pytest.raises(InputError, match=r"holds a contest made in another way: tokens was 7680,"):
        contest.claim_folder(settings(tmp_path, tokens=9000), out_dir)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(InputError, match=r"mine: is not empty and holds no contest; name another"):
        contest.claim_folder(config, tmp_path / "mine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 511}, r"tokens=511: allows no step of 512 tokens"),
        ({"target": TargetConfig(path="/gone")}, r"target\.path=/gone: no such folder"),
        ({"data": DataConfig(path="gone/chat.jsonl")}, r"data\.path=gone/chat\.jsonl: no such"),
        ({"prompts": DataConfig(path="./gone")}, r"prompts\.path=\./gone: no such file or folder"),
        ({"untrained": ["magic"]}, r"methods=\['magic'\]: unknown; allowed: all"),
        ({"parts": [ContestPart.report]}, r"headsmith\.json is missing; run the other parts"),
    ],
)
def test_what_cannot_begin_is_refused(tmp_path, changes, message) -> None:
    begin_inputs(tmp_path)
    with pytest.raises(InputError, match=message):
        contest.main(settings(tmp_path, **changes))


def task(folder: Path, code: str) -> Stage:
    return Stage("a task", folder / "result", [sys.executable, "-c", code])


def test_what_is_there_is_not_made_again(tmp_path, capsys) -> None:
    (tmp_path / "result").touch()
    done = task(tmp_path, "raise SystemExit(3)")
    left = Stage("left", tmp_path / "new",
                 [sys.executable, "-c", f"open({str(tmp_path / 'new')!r}, 'x')"])  # fmt: skip
    contest.run_missing([done, left], tmp_path)
    assert capsys.readouterr().out == "left; then nothing more\n"
    contest.run_missing([done, left], tmp_path)
    assert capsys.readouterr().out == ""


def test_a_task_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a task ended with code 3, but without .*\n  error: why"):
        contest.run_task(task(tmp_path, "print('error: why'); raise SystemExit(3)"), tmp_path)


def test_a_contest_that_is_stopped_stops_its_task(tmp_path, monkeypatch) -> None:
    wait, codes = subprocess.Popen.wait, list[int]()

    def stopped(child: "subprocess.Popen[bytes]") -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", ended)
        raise KeyboardInterrupt

    def ended(child: "subprocess.Popen[bytes]") -> int:
        codes.append(wait(child))
        return codes[-1]

    monkeypatch.setattr(subprocess.Popen, "wait", stopped)
    with pytest.raises(KeyboardInterrupt):
        contest.run_task(task(tmp_path, "import time; time.sleep(20)"), tmp_path)
    assert codes == [-signal.SIGTERM]


def test_a_contest_first_ends_what_a_killed_one_left(tmp_path, monkeypatch) -> None:
    begin_inputs(tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr(contest, "end_orphans", folders.append)
    with pytest.raises(InputError, match=r"run the other parts before report"):
        contest.main(settings(tmp_path, parts=[ContestPart.report]))
    assert folders == [tmp_path / "out"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_command_that_was_left_alone_is_ended(tmp_path: Path) -> None:
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    environs = [{contest.MARK: str(folder.resolve())} for folder in (tmp_path, tmp_path / "other")]
    ours, others = (subprocess.Popen(wait, env=os.environ | each) for each in environs)
    try:
        until = time.monotonic() + 10
        while not list(contest.iter_orphans(tmp_path)):  # it takes its environment when it begins
            assert time.monotonic() < until
        contest.end_orphans(tmp_path)
        assert ours.wait(10) == -15
        assert others.poll() is None
    finally:
        for each in (ours, others):
            each.kill()
            each.wait()
