"""Trackers: what they get, and that none of them stops a run."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.settings.training import LogConfig, Tracker
from tests.train.loop.test_loop import fit, lines, settings
from train.loop import metric_logger as tracking


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_tracker_that_fails_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    class Broken:
        def __init__(self, *_args: object) -> None:
            self.fail("start")

        def fail(self, here: str) -> None:
            if here == where:
                raise RuntimeError("no network")

        def log(self, metrics: dict[str, float], step: int) -> None:
            self.fail("log")

        def finish(self) -> None:
            self.fail("close")

    monkeypatch.setattr(tracking, "_start_wandb", Broken)
    assert fit(tmp_path, settings(), log=LogConfig(tracker=Tracker.wandb)).finished
    assert capsys.readouterr().out.count("wandb failed, so the run goes on without it") == 1
    assert len(lines(tmp_path)) == 8


def test_a_run_that_goes_on_is_one_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []

    def init(**settings: Any) -> Any:
        begun.append((settings["id"], settings["resume"]))
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    log = LogConfig(tracker=Tracker.wandb)
    for changes in ({}, {"resume": "auto"}, {}):
        fit(tmp_path, settings(**changes), log=log)
    first, again, anew = begun
    assert first == again != anew
    assert {how for _, how in begun} == {"allow"}


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(tracking, "_start_wandb", lambda *_args: release.wait(30))
    monkeypatch.setattr(tracking, "START_TIMEOUT_S", 0.2)
    said: list[str] = []
    begun = time.monotonic()
    tracking.MetricLogger(tmp_path, LogConfig(tracker=Tracker.wandb), {}, said.append).log(
        1, {"a": 1.0}
    )
    release.set()
    assert time.monotonic() - begun < 5
    assert "no answer within" in said[0]


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    fit(tmp_path, settings(max_steps=3), log=LogConfig(tracker=Tracker.tensorboard))
    assert list((tmp_path / "tensorboard").glob("events.*"))
