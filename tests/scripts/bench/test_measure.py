import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import torch

from conf.errors import InputError
from scripts.bench import capture, measure
from scripts.bench.harness import run_worker
from scripts.bench.peer_steps import (
    STEPS_BY_NAME,
    StepInputs,
    build_stepper,
)

CPU = torch.device("cpu")
SIZES: dict[str, int] = {
    "tokens": 256, "hidden": 64, "vocab": 128, "draft_vocab": 96, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 32, "intermediate": 96, "threads": 1, "repeats": 1,
}  # fmt: skip
DEPTHS = (3, 7)
"""Steps of the training-time test of `eagle3` and `eagle3_7`."""


def losses(path: str, depth: int, num_steps: int) -> list[float]:
    inputs = StepInputs.from_job(SIZES | {"depth": depth}, CPU)
    step = build_stepper(STEPS_BY_NAME[path](inputs))
    return [float(step()) for _ in range(num_steps)]


def here(_worker: str, question: dict[str, Any], _launch: list[str]) -> dict[str, Any]:
    path, depth = question["path"].removesuffix("_compiled"), question["depth"]
    return {"loss": losses(path, depth, 1)[0], "seconds": 2.0, "peak_bytes": 2**21}


def test_documents_have_prompts_longer_than_any_depth() -> None:
    text = StepInputs.from_job(SIZES | {"depth": 4}, CPU).text
    documents, answers = text["document_ids"][0], text["loss_mask"][0]
    assert {row.shape for row in text.values()} == {(1, 256)}
    for number in documents.unique():
        own = documents == number
        assert text["position_ids"][0, own].tolist() == list(range(own.sum()))
        assert answers[own].tolist() == [i >= own.sum() // 3 for i in range(own.sum())]
        assert own.sum() // 3 > max(DEPTHS)


def test_the_original_medusa_step_trains_the_same_heads() -> None:
    ours = losses("medusa", 4, 3)
    assert ours == pytest.approx(losses("original_medusa", 4, 3), rel=1e-5)
    assert ours[2] < ours[0]


@pytest.mark.engine
@pytest.mark.skipif(measure.SPECULATORS not in os.environ, reason="needs speculators")
@pytest.mark.parametrize("depth", DEPTHS)
def test_speculators_trains_the_same_head(depth: int) -> None:
    question = SIZES | {"path": "speculators", "depth": depth}
    result = run_worker("peer_steps", question, [os.environ[measure.SPECULATORS]])
    assert result["loss"] == pytest.approx(losses("eagle3", depth, 1)[0], rel=1e-5)


def test_the_table_of_our_paths(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(measure, "run_worker", here)
    monkeypatch.delenv(measure.SPECULATORS, raising=False)
    monkeypatch.setattr(sys, "argv", ["measure.py", "eagle3", "medusa", "--size", "small"])
    measure.main()
    told = capsys.readouterr()
    assert "medusa: ms per step, original_medusa: 2,000" in told.err.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in told.out.splitlines()[4:-1]]
    assert rows == [
        ["eagle3", "ms per step, eagle3", "2,000"],
        ["eagle3", "peak, MiB, eagle3", "2"],
        ["eagle3", "ms per step, eagle3_compiled", "2,000"],
        ["eagle3", "peak, MiB, eagle3_compiled", "2"],
        ["eagle3", "eager over compiled, 3 steps", "1"],
        ["medusa", "ms per step, medusa", "2,000"],
        ["medusa", "peak, MiB, medusa", "2"],
        ["medusa", "ms per step, original_medusa", "2,000"],
        ["medusa", "peak, MiB, original_medusa", "2"],
        ["medusa", "original's time over ours", "1"],
        ["medusa", "original's memory over ours", "1"],
    ]


def test_a_python_of_speculators_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measure.SPECULATORS, "nowhere/python")
    monkeypatch.setattr(sys, "argv", ["measure.py", "eagle3", "--size", "small"])
    with pytest.raises(SystemExit, match="error: HEADSMITH_SPECULATORS_PYTHON=nowhere/python: no"):
        measure.main()


def test_a_worker_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def run(command: list[str], cwd: Path, **_: object) -> "subprocess.CompletedProcess[str]":
        begun.extend(command[1:3])
        return commands.run(command, cwd, dict(os.environ))

    monkeypatch.setattr(subprocess, "run", run)
    question = SIZES | {"path": "medusa", "depth": 2}
    result = run_worker("peer_steps", question)
    assert result["loss"] == pytest.approx(losses("medusa", 2, 1)[0], rel=1e-6)
    assert result["seconds"] > 0 and result["peak_bytes"] > 0
    assert begun == ["-m", "scripts.bench.peer_steps"]


@pytest.mark.parametrize("loss", [2.001, float("nan")])
def test_a_step_with_another_loss_is_refused(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"medusa": 2.0, "original_medusa": loss}
    monkeypatch.setattr(
        measure,
        "run_worker",
        lambda _worker, question, _launch: {
            "loss": told[question["path"]], "seconds": 1.0, "peak_bytes": 1,
        },
    )  # fmt: skip
    with pytest.raises(InputError, match="original_medusa: first loss"):
        dict(measure.measure_medusa("small"))


@pytest.mark.slow
def test_captures_are_held_against_the_bare_pass() -> None:
    figures = dict(capture.measure_capture("small"))
    assert figures.keys() >= measure.FLOORS["capture"].keys()
    assert min(figures.values()) > 0
    assert figures["KiB/token of bf16, hidden, 3 layers of 4,096"] == pytest.approx(32, rel=0.01)


@pytest.mark.slow
def test_states_are_read_from_a_stand_in() -> None:
    """By the folder, and by a relay."""
    figures = dict(measure.CASES["servers"]("small"))
    row = "2 x 2 layers of 64, 32 tokens, 2 at once"
    servers = [f"processor s/GB of {name}" for name in ("the readers", "the stand-in", "the relay")]
    assert list(figures) == [
        *(f"{name}, {row}, folder" for name in ("GB/s", *servers[:2])),
        *(f"{name}, {row}, relay" for name in ("GB/s", *servers)),
    ]
    assert figures[f"GB/s, {row}, relay"] > 0
