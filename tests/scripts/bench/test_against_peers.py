import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import torch

from conf.errors import InputError
from scripts.bench import against_peers as bench_peers
from scripts.bench.against_peers import Peer
from scripts.bench.harness import run_worker
from scripts.bench.peer_steps import (
    STEPS_BY_NAME,
    StepInputs,
    StepJob,
    build_stepper,
    measure_peer_step,
)

CPU = torch.device("cpu")
SIZES: dict[str, int] = {
    "tokens": 256, "hidden": 64, "vocab": 128, "draft_vocab": 96, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 32, "intermediate": 96, "threads": 1, "repeats": 1,
}  # fmt: skip
OURS = [Peer("ours", "medusa"), Peer("original Medusa step", "original_medusa")]


def job(path: str, depth: int) -> StepJob:
    return StepJob(path=path, depth=depth, **SIZES)


def losses(path: str, depth: int, num_steps: int) -> list[float]:
    asked = job(path, depth)
    step = build_stepper(STEPS_BY_NAME[path](asked, StepInputs.from_job(asked, CPU)))
    return [float(step()) for _ in range(num_steps)]


def here(_worker: str, question: dict[str, Any], _python: str) -> dict[str, Any]:
    asked = StepJob(**question)
    training = STEPS_BY_NAME[asked.path](asked, StepInputs.from_job(asked, CPU))
    return measure_peer_step(asked, training, CPU)


def test_documents_have_prompts_longer_than_any_depth() -> None:
    text = StepInputs.from_job(job("medusa", 4), CPU).text
    documents, answers = text["document_ids"][0], text["loss_mask"][0]
    assert {row.shape for row in text.values()} == {(1, 256)}
    for number in documents.unique():
        own = documents == number
        assert text["position_ids"][0, own].tolist() == list(range(own.sum()))
        assert answers[own].tolist() == [i >= own.sum() // 3 for i in range(own.sum())]
        assert own.sum() // 3 > max(bench_peers.EAGLE3_STEPS)


def test_the_original_medusa_step_trains_the_same_heads() -> None:
    ours = losses("medusa", 4, 3)
    assert ours == pytest.approx(losses("original_medusa", 4, 3), rel=1e-5)
    assert ours[2] < ours[0]


@pytest.mark.engine
@pytest.mark.skipif(bench_peers.SPECULATORS not in os.environ, reason="needs speculators")
@pytest.mark.parametrize("depth", bench_peers.EAGLE3_STEPS)
def test_speculators_trains_the_same_head(depth: int) -> None:
    question = SIZES | {"path": "speculators", "depth": depth}
    result = run_worker("peer_steps", question, os.environ[bench_peers.SPECULATORS])
    assert result["loss"] == pytest.approx(losses("eagle3", depth, 1)[0], rel=1e-5)


def test_tables_of_our_paths(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    threads = torch.get_num_threads()
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    monkeypatch.setattr(sys, "argv", ["against_peers.py", *sizes])
    monkeypatch.setattr(bench_peers, "run_worker", here)
    compiles = bench_peers.EAGLE3[1]
    monkeypatch.setattr(
        bench_peers, "EAGLE3", [row for row in bench_peers.EAGLE3 if row != compiles]
    )
    monkeypatch.delenv(bench_peers.SPECULATORS, raising=False)
    bench_peers.main()
    torch.set_num_threads(threads)
    shown = capsys.readouterr().out.splitlines()
    assert f"speculators' trainer: left out, {bench_peers.SPECULATORS} is not set" in shown
    rows = [line.split(" | ") for line in shown if line.startswith(("| ours", "| original"))]
    assert [row[0] for row in rows] == [
        "| ours",
        "| ours",
        "| ours",
        "| original Medusa step",
    ]
    assert [row[2] for row in rows[:3]] == ["1.00"] * 3
    assert rows[2][6] == rows[3][6]


def test_a_worker_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def run(command: list[str], cwd: Path, **_: object) -> "subprocess.CompletedProcess[str]":
        begun.extend(command[1:3])
        return commands.run(command, cwd, dict(os.environ))

    monkeypatch.setattr(subprocess, "run", run)
    question = SIZES | {"path": "medusa", "depth": 2}
    result = run_worker("peer_steps", question, sys.executable)
    assert result["loss"] == pytest.approx(losses("medusa", 2, 1)[0], rel=1e-6)
    assert result["seconds"] > 0 and result["peak_bytes"] > 0
    assert begun == ["-m", "scripts.bench.peer_steps"]


@pytest.mark.parametrize("loss", [2.001, float("nan")])
def test_a_step_with_another_loss_is_refused(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"medusa": 2.0, "original_medusa": loss}
    monkeypatch.setattr(
        bench_peers,
        "run_worker",
        lambda _worker, question, _python: {
            "loss": told[question["path"]], "seconds": 1.0, "peak_bytes": 1, "versions": [],
        },
    )  # fmt: skip
    with pytest.raises(InputError, match="original Medusa step: first loss"):
        bench_peers.measure_peers(SIZES | {"depth": 4}, OURS)


@pytest.mark.parametrize("size", ["--tokens=255", "--draft-vocab=9000", "--repeats=0"])
def test_sizes_that_cannot_be_compared(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["against_peers.py", size])
    with pytest.raises(SystemExit, match=f"error: {size}: must be"):
        bench_peers.main()
