"""A contest of heads: its tasks, what it refuses, how it goes on, and its report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from stores import save_inputs

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.scripts import ContestPart, ContestRun, ContestTrainConfig
from conf.settings.target import TargetConfig
from heads.kinds import load_head
from scripts.contest import run as contest
from scripts.quickstart import Stage
from tests.train.runs import ENV, wait_for


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
    hass = contest.list_head_methods(found)["hass"]
    assert hass == {"chain": "eagle_chain_2", "tree": "eagle_tree_2"}


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
    recipes = contest.parse_recipes(config.recipes)
    command = contest.list_training_tasks(config, recipes, tmp_path, 15)[1].command
    assert command[:2] == [sys.executable, "train/eagle.py"]
    assert {"head=eagle3_1", "head.num_steps=2", "train.max_steps=15", "train.batch_size=4",
            "train.resume=auto", "data.max_length=128", "seed=3"} <= set(command)  # fmt: skip
    config.launch = ["--num_processes", "2"]
    (first, _) = contest.list_training_tasks(config, recipes, tmp_path, 15)
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


def test_a_contest_first_ends_what_a_killed_one_left(tmp_path, monkeypatch, capsys) -> None:
    begin_inputs(tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr(contest, "end_orphans", folders.append)
    with pytest.raises(InputError, match=r"run the other parts before report"):
        contest.main(settings(tmp_path, parts=[ContestPart.report]))
    assert folders == [tmp_path / "out"]
    assert capsys.readouterr().out == "medusa, eagle3_1: 15 steps each\n"
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


# --- Reports on results; and whole contests, stopped and not.

WAYS = {
    "medusa": {"chain": "medusa_chain", "tree": "medusa_tree"},
    "eagle3_1": {"chain": "eagle_chain", "tree": "eagle_tree"},
}
RATES = {
    "vanilla": (100, 400), "medusa_chain": (150, 450), "medusa_tree": (300, 200),
    "eagle_chain": (200, 380), "eagle_tree": (120, 420), "suffix": (160, 500),
}  # fmt: skip
"""tokens/s, one and four at a time."""


def rows(*emitted: int) -> list[dict[str, Any]]:
    return [{"dialogue": n, "turn": 1, "emitted": [each] * 2} for n, each in enumerate(emitted)]


def speed() -> dict[str, Any]:
    emitted = {"vanilla": (1, 1), "eagle_chain": (2, 4)}
    sizes = {
        size: {
            "methods": {
                name: {
                    "tokens_per_s": rates[place],
                    "speedup": rates[place] / RATES["vanilla"][place],
                    "speedup_ci95": None if name == "vanilla" else [0.5, 2.5],
                }
                for name, rates in RATES.items()
            }
        }
        for place, size in enumerate(("1", "4"))
    }
    found = {
        n: {"tau": sum(emitted.get(n, (2, 3))) / 2, "prompts": rows(*emitted.get(n, (2, 3)))}
        for n in RATES
    }
    return {"concurrency": sizes, "methods": found}


def acceptance(tau: float, *emitted: int) -> dict[str, Any]:
    figures = {"tau": tau, "tau_ci95": None, "alpha": [0.5], "prompts": rows(*emitted)}
    return {**figures, "num_tokens": 20, "num_prompts": 2, "static_tree": {**figures, "tau": 4.0}}


def measured(out_dir: Path) -> None:
    """A folder in which all but the report is done."""
    contents = {"speed/speedup": speed()}
    contents["acceptance/medusa/acceptance"] = acceptance(2.0, 2, 3)
    contents["acceptance/eagle3_1/acceptance"] = acceptance(2.5, 2, 4)
    for name, content in contents.items():
        path = out_dir / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    for name in WAYS:
        folder = out_dir / "heads" / name / "head"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(name.encode())
        counts = {"num_train_sequences": 40, "num_tokens": 900}
        data = {"sha256": "ab", **counts, "rows_per_s": len(name)}
        (folder / "headsmith.json").write_text(json.dumps({"data": data}))


def test_the_fastest_head_over_all_batch_sizes_wins() -> None:
    # 200 x 380 = 76,000 beats 150 x 450 = 67,500, 300 x 200 and 120 x 420.
    figures = contest.collect_method_figures(speed(), WAYS)
    assert [(row["label"], name) for name, row in figures.items()][:3] == [
        (None, "suffix"), ("eagle3_1", "eagle_chain"), ("medusa", "medusa_chain"),
    ]  # fmt: skip


def test_a_contest_ends_with_tables_and_a_head(tmp_path: Path) -> None:
    assert contest.list_head_methods(contest.parse_recipes([*WAYS])) == WAYS
    measured(tmp_path)
    said = contest.write_report(WAYS, tmp_path, 60)
    text = (tmp_path / "contest.md").read_text()
    assert said.startswith(text)
    lines = text.splitlines()
    assert lines[0] == (
        "eagle3_1 wins, drafting by eagle_chain. Faster over all batch sizes, without training: "
        "suffix."
    )
    # The other head: -0.5 tokens a pass, of which -1 in one dialogue and none in the other.
    assert (
        "| medusa | medusa_chain | 2.500 | -0.500 (-1.000 to +0.000) "
        "| 150, 1.50x (0.50-2.50) | 450, 1.12x (0.50-2.50) |"
    ) in lines
    assert "| - | vanilla | 1.000 | -2.000 (-3.000 to -1.000) | 100, 1.00x |" in text
    assert "| - | suffix | 2.500 | -0.500 (-1.000 to +0.000) | 160, 1.60x (" in text
    assert "| medusa | 2.000 | - | -0.500 (-1.000 to +0.000) | 4.000 |" in text
    assert (tmp_path / "winner/head/weights").read_bytes() == b"eagle3_1"
    content = json.loads((tmp_path / "contest.json").read_text())
    assert (content["winner"], content["method"]) == ("eagle3_1", "eagle_chain")
    assert content["steps"] == {"medusa": 60, "eagle3_1": 60}
    assert content["methods"]["suffix"]["sizes"]["4"]["measured"] == 500


def test_a_report_needs_all_that_is_measured_of_heads_with_the_same_data(tmp_path: Path) -> None:
    measured(tmp_path)
    path = tmp_path / "heads/eagle3_1/head/headsmith.json"
    same = path.read_text()
    path.write_text(same.replace("900", "901"))
    with pytest.raises(InputError, match=r"medusa and eagle3_1, .* num_tokens was 900, is 901"):
        contest.write_report(WAYS, tmp_path, 60)
    path.write_text(same)
    (tmp_path / "speed/speedup.json").unlink()
    missing = r"speedup\.json is missing; run the other parts before report"
    with pytest.raises(InputError, match=missing):
        contest.write_report(WAYS, tmp_path, 60)


def arguments(inputs: Path, out_dir: Path) -> list[str]:
    chat = inputs / "chat.jsonl"
    return [
        sys.executable, str(ROOT / "scripts/contest/run.py"), f"target.path={inputs / 'target'}",
        f"data.path={chat}", "data.max_length=128", "data.eval_fraction=0.2", f"out_dir={out_dir}",
        f"prompts.path={chat}", "prompts.num_prompts=3", "recipes=[medusa,eagle3_1]",
        f"tokens={4 * 128 * 12}", "train.batch_size=4", "untrained=[prompt_lookup,suffix]",
        "concurrency=[1,2]", "max_new_tokens=12", "num_turns=1", "num_repeats=1",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_contest_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path) -> None:
    inputs, out_dir = save_inputs(tmp_path), tmp_path / "killed"
    stops = {
        "logs/train-medusa.log": signal.SIGKILL,
        "heads/eagle3_1/metrics.jsonl": signal.SIGTERM,
        "speed/speedup.partial/0/runs.jsonl": signal.SIGKILL,
    }
    for name, number in stops.items():
        process = commands.Command(arguments(inputs, out_dir), tmp_path, ENV)
        wait_for(out_dir / name, process)
        os.kill(process.pid, number)
        process.communicate()
    finished(inputs, out_dir)
    finished(inputs, tmp_path / "whole")
    for head in WAYS:
        folders = (each / "heads" / head / "head" for each in (out_dir, tmp_path / "whole"))
        ours, theirs = (load_head(str(each)).collect_tensors() for each in folders)
        for key, tensor in ours.items():
            assert tensor.equal(theirs[key]), key
    ours, theirs = (
        json.loads((each / "contest.json").read_text()) for each in (out_dir, tmp_path / "whole")
    )
    for name, row in ours["methods"].items():
        assert (row["tau"], row["label"]) == (theirs["methods"][name]["tau"], row["label"])
    assert load_head(str(out_dir / "winner/head")).collect_tensors()
    assert "then" not in finished(inputs, out_dir)  # nothing is left to do


def finished(inputs: Path, out_dir: Path) -> str:
    done = commands.run(arguments(inputs, out_dir), out_dir.parent, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
