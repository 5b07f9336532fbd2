"""A contest of heads: its plan, what it refuses, how it goes on, and its table."""

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
from stores import save_inputs

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.scripts import ContestPart, ContestRun, ContestTrainConfig
from conf.settings.target import TargetConfig
from scripts.contest import run as contest
from scripts.contest import run as plan
from scripts.contest import run as tasks
from scripts.contest.run import Task, TaskCosts


def test_a_recipe_is_a_name_with_settings_behind() -> None:
    found = plan.parse_recipes(
        ["medusa", "dspark head.num_layers=2", "eagle3_1", "hass", "dspark 'head.layers=[1, 2]'"]
    )
    assert [(each.label, each.kind, each.overrides) for each in found] == [
        ("medusa", "medusa", ()),
        ("dspark", "dspark", ("head.num_layers=2",)),
        ("eagle3_1", "eagle", ("head=eagle3_1",)),
        ("hass", "eagle", ("head=hass",)),
        ("dspark-2", "dspark", ("head.layers=[1, 2]",)),
    ]
    assert plan.list_head_methods(found)["hass"] == {
        "chain": "eagle_chain_2",
        "tree": "eagle_tree_2",
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "eagle4",
            r"recipes: 'eagle4' is no recipe; allowed: dflash, dflash2, dspark, eagle, eagle1",
        ),
        ("", r"recipes: '' is no recipe"),
        (
            "medusa data.path=x",
            r"data\.path=x cannot differ between recipes; allowed: head\.\* and",
        ),
        ("medusa train.batch_size=2", r"train\.batch_size=2 cannot differ between recipes"),
        ("medusa seed=1", r"seed=1 cannot differ between recipes"),
        ("medusa head.num_heads", r"head\.num_heads cannot differ between recipes"),
    ],
)
def test_unknown_recipes_and_unfair_settings_are_refused(entry: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan.parse_recipes([entry])


def test_settings_reach_a_command_as_they_are() -> None:
    given = DataConfig(
        path="it's, here [1]=x", columns={"prompt": "my ask"}, num_prompts=3, streaming=True
    )
    words = plan.format_overrides("data", given)
    parsed = OverridesParser.create().parse_overrides(words)
    assert {each.key_or_group: each.value() for each in parsed} == {
        "data.path": "it's, here [1]=x",
        "data.columns": {"prompt": "my ask"},
        "data.num_prompts": 3,
        "data.streaming": True,
    }
    assert plan.format_overrides("target", TargetConfig()) == []


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
    in_tokens, in_minutes = settings(tmp_path), settings(tmp_path, tokens=None, minutes=3.0)
    assert plan.compute_num_steps(in_tokens, "medusa", 100.0, 2) == 15
    # Half of three minutes, at 4 s each.
    assert plan.compute_num_steps(in_minutes, "medusa", 4.0, 2) == 22
    with pytest.raises(InputError, match=r"tokens=511: allows medusa no step of 512 tokens; raise"):
        plan.compute_num_steps(settings(tmp_path, tokens=511), "medusa", 1.0, 2)
    with pytest.raises(InputError, match=r"minutes=3: allows eagle no step of 91\.00 s"):
        plan.compute_num_steps(in_minutes, "eagle", 91.0, 2)


def metrics(*ends: float) -> str:
    """Metrics of a run whose steps of 100 tokens ended at these seconds."""
    rows = [
        {"step": n, "train/tokens": 100 * n, "train/tokens_per_s": 100 * n / end}
        for n, end in enumerate(ends, start=1)
    ]
    return "".join(json.dumps(row) + "\n" for row in [*rows, {"step": len(ends), "eval/loss": 1}])


def test_a_step_takes_what_it_takes_once_the_run_is_warm(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics(30.0, 40.0, 42.0, 44.5, 46.5))
    assert plan.compute_step_seconds(tmp_path / "metrics.jsonl") == pytest.approx(2.0)


def probed(config: ContestRun, took: TaskCosts) -> None:
    """Leaves what probes would."""
    out_dir = Path(config.out_dir)
    for label, a_step in (("medusa", 1.0), ("eagle3_1", 3.0)):
        folder = plan.get_probe_folder(out_dir, label)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(metrics(*(a_step * n for n in range(1, 9))))
        (folder / "weights").write_bytes(bytes(1000))
        took.rows[f"probe {label}"] = {"seconds": 8 * a_step + 5, "memory": 10**9, "since": None}
    names = [name for each in plan.list_head_methods(plan.parse_recipes(config.recipes)).values()
             for name in each.values()]  # fmt: skip
    row = {"tau": 1.0, "prompts": [{"seconds": {"total": [1.0]}}] * 2}
    plan.get_probe_folder(out_dir, "speed").mkdir()
    path = plan.get_probe_folder(out_dir, "speed") / "speedup.json"
    path.write_text(json.dumps({"methods": dict.fromkeys(["vanilla", *names], row)}))
    took.rows["probe speed"] = {"seconds": 20.0, "memory": 2 * 10**9, "since": None}
    heads = [{"chain": 0.2, "tree": 0.3}] * 2
    alone = {"plain": 0.1, "heads": heads}
    # Four at a time: a step of all takes twice as long as one of one.
    together = {"plain": 0.2, "heads": [{w: 2 * s for w, s in each.items()} for each in heads]}
    plan.get_probe_folder(out_dir, "costs").mkdir()
    path = plan.get_probe_folder(out_dir, "costs") / "costs.json"
    path.write_text(json.dumps({"sizes": {"1": alone, "4": together}}))
    took.rows["probe costs"] = {"seconds": 7.0, "memory": 10**9, "since": None}


def made(tmp_path: Path, **changes: Any) -> tuple[ContestRun, dict[str, Any]]:
    save_inputs(tmp_path)
    config, out_dir = settings(tmp_path, **changes), tmp_path / "out"
    out_dir.mkdir()
    took = TaskCosts(out_dir)
    probed(config, took)
    return config, plan.make_plan(config, plan.parse_recipes(config.recipes), out_dir, took)


def test_a_plan_is_made_of_probes(tmp_path: Path) -> None:
    _, found = made(tmp_path, tokens=None, minutes=2.0, concurrency=[1, 4], num_repeats=2)
    assert found["steps"] == {"medusa": 60, "eagle3_1": 20}
    assert found["save_steps"] == {"medusa": 300, "eagle3_1": 100}
    estimate = found["estimate"]
    size = len(metrics(*map(float, range(1, 9)))) + 1000
    # What came around the steps comes again.
    assert estimate["train medusa"] == pytest.approx(
        {"seconds": 65.0, "bytes": size, "memory": 10**9}, rel=0.01
    )
    assert estimate["train eagle3_1"]["seconds"] == pytest.approx(65.0)
    # 20 s less 2 s of each of 5 methods start it; heads are faster once they know something.
    taught = 1 / plan.USUAL_TAU
    assert estimate["acceptance medusa"] == pytest.approx(
        {"seconds": 10 + 4 * (1 + taught), "memory": 2 * 10**9}
    )
    assert estimate["costs"]["seconds"] == 7.0
    # Two repeats over 4 prompts at each size, and a warm-up of 1 and of 4 prompts.
    each = 1 + 4 * taught
    assert estimate["speed"]["seconds"] == pytest.approx(
        10 + each * (2 * 4 + 1) + each / 2 * (2 * 4 + 4)
    )
    assert not (tmp_path / "out/probes").exists()


def test_a_dialogue_takes_what_its_steps_do_and_less_once_a_head_has_learnt() -> None:
    row = {"tau": plan.USUAL_TAU / 2, "prompts": [{"seconds": {"total": [s]}} for s in (1.0, 3.0)]}
    costs = {
        "1": {"plain": 0.1, "heads": [{"chain": 0.2, "tree": 0.3}, {"chain": 0.2, "tree": 0.4}]},
        "2": {"plain": 0.1, "heads": [{"chain": 0.4, "tree": 0.3}, {"chain": 0.3, "tree": 0.6}]},
    }
    ways = {each: {way: f"{each}_{way}" for way in ("chain", "tree")} for each in ("one", "two")}
    methods = dict.fromkeys(["vanilla", "one_chain", "two_tree"], row)
    assert plan.estimate_dialogue_seconds(methods, {"sizes": costs}, ways) == pytest.approx({
        ("vanilla", 1): 2.0, ("vanilla", 2): 1.0,
        ("one_chain", 1): 1.0, ("one_chain", 2): 1.0,
        ("two_tree", 1): 1.0, ("two_tree", 2): 0.75,
    })  # fmt: skip


def test_what_was_planned_is_trained(tmp_path: Path) -> None:
    config, found = made(tmp_path, recipes=["medusa", "eagle3_1 head.num_steps=2"], seed=3)
    todo = plan.list_training_tasks(
        config, plan.parse_recipes(config.recipes), tmp_path / "out", found
    )
    command = todo[1].command
    assert command[:2] == [sys.executable, str(ROOT / "train/eagle.py")]
    assert {"head=eagle3_1", "head.num_steps=2", "train.max_steps=15", "train.batch_size=4",
            "train.resume=auto", "data.max_length=128", "seed=3"} <= set(command)  # fmt: skip
    config.launch = ["--num_processes", "2"]
    (first, _) = plan.list_training_tasks(
        config, plan.parse_recipes(config.recipes), tmp_path, found
    )
    assert first.command[1:5] == ["-m", "accelerate.commands.launch", "--num_processes", "2"]


def test_a_folder_holds_one_contest(tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    config = settings(tmp_path)
    plan.claim_folder(config, out_dir)
    again = settings(tmp_path, launch=["--cpu"], parts=[ContestPart.train], out_dir="elsewhere")
    plan.claim_folder(again, out_dir)
    with pytest.raises(InputError, match=r"holds a contest made in another way: tokens was 7680,"):
        plan.claim_folder(settings(tmp_path, tokens=9000), out_dir)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(InputError, match=r"mine: is not empty and holds no contest; name another"):
        plan.claim_folder(config, tmp_path / "mine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, r"tokens=None, minutes=None: exactly one must be set, as the budget"),
        ({"minutes": 1.0}, r"tokens=7680, minutes=1\.0: exactly one must be set"),
        ({"target": TargetConfig(path="/gone")}, r"target\.path=/gone: no such folder"),
        ({"data": DataConfig(path="gone/chat.jsonl")}, r"data\.path=gone/chat\.jsonl: no such"),
        ({"prompts": DataConfig(path="./gone")}, r"prompts\.path=\./gone: no such file or folder"),
        ({"untrained": ["magic"]}, r"methods=\['magic'\]: unknown; allowed: all"),
        ({"parts": [ContestPart.train]}, r"plan\.json is missing; run the part plan first"),
    ],
)
def test_what_cannot_begin_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    begin_inputs(tmp_path)
    with pytest.raises(InputError, match=message):
        contest.main(settings(tmp_path, **changes))


def task(folder: Path, code: str, **changes: Any) -> Task:
    return Task("a task", [sys.executable, "-c", code], folder / "result", **changes)


def test_a_task_is_counted(tmp_path: Path) -> None:
    (tmp_path / "stale").mkdir()
    code = f"open({str(tmp_path / 'result')!r}, 'x').close(); b = bytearray(100_000_000)"
    one, took = task(tmp_path, code, fresh=tmp_path / "stale"), TaskCosts(tmp_path)
    tasks.run_task(one, tmp_path, took)
    assert not (tmp_path / "stale").exists()
    (row,) = json.loads((tmp_path / "took.json").read_text()).values()
    assert 0 < row["seconds"] < 60
    assert row["memory"] > 100_000_000


def test_what_is_there_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result").touch()
    done = task(tmp_path, "raise SystemExit(3)")
    left = Task("left", [sys.executable, "-c", f"open({str(tmp_path / 'new')!r}, 'x')"],
                tmp_path / "new")  # fmt: skip
    took = TaskCosts(tmp_path)
    contest.run_missing([done, left], tmp_path, took, {"left": {"seconds": 90.0}})
    assert capsys.readouterr().out == "left, about 1.5 min; then nothing more\n"
    assert list(took.rows) == ["left"]
    contest.run_missing([done, left], tmp_path, took, {})
    assert capsys.readouterr().out == ""


def test_a_task_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    took = TaskCosts(tmp_path)
    with pytest.raises(InputError, match=r"a task ended with code 3, but without .*\n  error: why"):
        tasks.run_task(task(tmp_path, "print('error: why'); raise SystemExit(3)"), tmp_path, took)
    assert took.rows["a task"]["since"] is None


def test_a_contest_that_is_stopped_stops_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, codes = tasks._wait_for_task, list[int]()

    def stopped(child: "subprocess.Popen[bytes]") -> tuple[int, int]:
        monkeypatch.setattr(tasks, "_wait_for_task", ended)
        raise KeyboardInterrupt

    def ended(child: "subprocess.Popen[bytes]") -> tuple[int, int]:
        found = wait(child)
        codes.append(found[0])
        return found

    monkeypatch.setattr(tasks, "_wait_for_task", stopped)
    took = TaskCosts(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tasks.run_task(task(tmp_path, "import time; time.sleep(20)"), tmp_path, took)
    assert codes == [-signal.SIGTERM]
    assert took.rows["a task"]["since"] is None


def test_a_contest_first_ends_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_inputs(tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr(tasks, "end_orphans", folders.append)
    with pytest.raises(InputError, match=r"run the part plan first"):
        contest.main(settings(tmp_path, parts=[ContestPart.train]))
    assert folders == [tmp_path / "out"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_killed_start_took_is_known_from_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a-task.log").touch()
    os.utime(tmp_path / "logs/a-task.log", (1030.0, 1030.0))
    row = {"seconds": 5.0, "memory": 7, "since": 1000.0}
    (tmp_path / "took.json").write_text(json.dumps({"a task": row}))
    assert TaskCosts(tmp_path).rows == {"a task": {"seconds": 35.0, "memory": 7, "since": None}}


def test_a_command_that_was_left_alone_is_ended(tmp_path: Path) -> None:
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    environs = [{tasks.MARK: str(folder.resolve())} for folder in (tmp_path, tmp_path / "other")]
    ours, others = (subprocess.Popen(wait, env=os.environ | each) for each in environs)
    try:
        until = time.monotonic() + 10
        while not list(tasks.iter_orphan_pids(tmp_path)):  # it takes its environment when it begins
            assert time.monotonic() < until
        tasks.end_orphans(tmp_path)
        assert ours.wait(10) == -15
        assert others.poll() is None
    finally:
        for each in (ours, others):
            each.kill()
            each.wait()
