"""The table of all benchmarks: every figure beside its floor, and nothing that fails is lost."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import gpu as bench_gpu


def test_every_benchmark_has_a_floor() -> None:
    assert bench_gpu.FLOORS.keys() == bench_gpu.BENCHES.keys()
    assert all(bench_gpu.FLOORS.values())


def test_figures_are_held_against_their_floors() -> None:
    name, floor = "medusa", bench_gpu.FLOORS["medusa"]
    reached = dict(floor) | {"tokens/s": 12345.0}
    assert [row["passed"] for row in bench_gpu.rows_of(name, reached, True)] == [True, True, None]
    missed = {figure: value * 0.99 for figure, value in floor.items()}
    assert [row["passed"] for row in bench_gpu.rows_of(name, missed, True)] == [False, False]
    assert [row["passed"] for row in bench_gpu.rows_of(name, missed, False)] == [None, None]
    with pytest.raises(AssertionError, match="medusa gave no"):
        bench_gpu.rows_of(name, {"tokens/s": 1.0}, True)


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code and the rows of a call, in which `unroll` fails."""

    def run(name: str, small: bool) -> list[dict[str, Any]]:
        if name == "unroll":
            return [bench_gpu.failed(name, "out of memory")]
        return bench_gpu.rows_of(name, dict(bench_gpu.FLOORS[name]), True)

    def call(*names: str) -> tuple[Any, list[dict[str, Any]]]:
        out = tmp_path / "bench_gpu.json"
        monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(out), *names])
        with pytest.raises(SystemExit) as ended:
            bench_gpu.main()
        return ended.value.code, json.loads(out.read_text())["rows"]

    monkeypatch.setattr(bench_gpu, "run", run)
    return call


def test_calls_one_after_another_fill_one_table(
    called: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("loss")[0] == 0
    code, rows = called("unroll", "loss")
    assert code == 1
    assert [(row["bench"], row["passed"]) for row in rows] == [
        ("unroll", False), ("loss", True), ("loss", True),
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "failed: out of memory" in said
    assert "1 of 3 figures failed" in said


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "TIMEOUT_S", 0.5)
    began = time.monotonic()
    (row,) = bench_gpu.run("loss", True)
    assert row["figure"] == "failed: no end within 0.5 s"
    assert row["passed"] is False
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["documents", "unroll"])
def test_parts_of_a_step_are_held_against_plain_forms(name: str) -> None:
    figures = bench_gpu.BENCHES[name](True)
    assert figures.keys() >= bench_gpu.FLOORS[name].keys()
    assert min(figures.values()) > 0


@pytest.mark.slow
def test_a_small_benchmark_runs_from_start_to_end() -> None:
    rows = bench_gpu.run("loss", True)
    assert [row["passed"] for row in rows] == [None, None]
    assert all(row["value"] > 0 for row in rows)
