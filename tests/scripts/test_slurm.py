"""`scripts/train.slurm` on two nodes that are this machine; `srun` and `scontrol` are stand-ins."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.servers.hidden_states import ServerFeatureLayers
from tests.train.runs import ENV, ROOT, arguments, inputs, trained, wait_for, weights

__all__ = ["inputs"]
SCRIPT = ROOT / "scripts/train.slurm"
SRUN = """#!/bin/bash
# srun --nodes=N OPTIONS COMMAND...: a task on each of N nodes, which get the signals that srun gets
nodes=${1#--nodes=}
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < nodes; node++)); do SLURM_PROCID=$node "$@" & tasks[node]=$!; done
trap 'kill "${tasks[@]}"' TERM
trap 'kill -USR1 "${tasks[@]}"' USR1
for task in "${tasks[@]}"; do
    code=138
    while [ "$code" -eq 138 ]; do code=0; wait "$task" || code=$?; done
    [ "$code" -eq 0 ] || exit "$code"
done
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$REQUEUED"; fi
"""


def test_is_valid_bash() -> None:
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def submit(folder: Path, command: list[str], **more: str) -> "subprocess.Popen[str]":
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (binaries / name).write_text(content)
        (binaries / name).chmod(0o755)
    environment = {
        **ENV, "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1",
        "REQUEUED": str(folder / "requeued"), "LAYOUT": "multi_node", **more,
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", str(SCRIPT), *command], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_job_that_meets_its_time_limit_is_queued_again_and_goes_on(inputs, tmp_path) -> None:
    steps = ["train.max_steps=200", "train.save_steps=1000", "train.eval_steps=200"]
    command = arguments(inputs, tmp_path / "out", *steps)
    job = submit(tmp_path, command)
    wait_for(tmp_path / "out/metrics.jsonl", job)
    os.kill(job.pid, signal.SIGUSR1)  # what `--signal=B:USR1@300` sends
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert "2 process(es), cpu" in said
    assert "continue with train.resume=auto" in said
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    assert not (tmp_path / "out/head").exists()

    again = submit(tmp_path, command)
    said, _ = again.communicate(timeout=180)
    assert again.returncode == 0, said
    assert "continuing from" in said
    assert (tmp_path / "requeued").read_text().count("\n") == 1

    trained([sys.executable, *arguments(inputs, tmp_path / "straight", *steps)], tmp_path)
    for name, expected in weights(tmp_path / "straight").items():
        found = weights(tmp_path / "out")[name]
        assert torch.dist(found, expected, p=torch.inf) <= 1e-4 * expected.abs().max(), name


@pytest.mark.slow
def test_a_job_that_fails_is_not_queued_again(inputs: Path, tmp_path: Path) -> None:
    job = submit(tmp_path, arguments(inputs, tmp_path / "out", "train.batch_size=3"))
    said, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "train.batch_size=3: not divisible by 2 processes" in said
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_the_first_nodes_of_a_job_serve_the_target_to_the_others(inputs, tmp_path) -> None:
    """By a relay, as a trainer sees no folder of another node; both end with the job."""
    (tmp_path / "there").mkdir()
    taps = ServerFeatureLayers((2,), 2, 32, None)
    options = taps.serve_options(tmp_path / "there")
    standin = str(ROOT / "tests/engines/vllm_standin.py")
    server = [sys.executable, standin, "serve", str(inputs / "target")]
    command = arguments(inputs, tmp_path / "out", "target.dtype=float32")
    environment = {"ENGINES": "1", "SERVE": shlex.join([*server, *options])}
    job = submit(tmp_path, command, **environment)
    said, _ = job.communicate(timeout=180)
    assert job.returncode == 0, said
    assert "1 process(es), cpu" in said
    assert "log-probabilities 0.0000 nats" in said
    assert list((tmp_path / "there/layers-2").iterdir()) == []
    trained([sys.executable, *arguments(inputs, tmp_path / "here")], tmp_path)
    for name, expected in weights(tmp_path / "here").items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], expected, rtol=1e-4, atol=1e-4)
