"""Runs that are killed at any moment end as if they had never been stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_train_launch import ENV, ROOT, arguments, inputs

KILLER = str(ROOT / "tests" / "kill_again.py")
__all__ = ["inputs"]


def killed(folder: Path, entry: str, overrides: list[str], num_kills: int, within_s: float) -> dict:
    """Runs the command under the killer in `folder/out`; what it says, and the log."""
    out_dir, log = folder / "out", folder / "log"
    job = {
        "entry": entry, "overrides": [*overrides, f"out_dir={out_dir}"], "seed": 0,
        "num_kills": num_kills, "within_s": within_s, "out_dir": str(out_dir), "log": str(log),
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, KILLER, str(folder / "job.json")]
    done = subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = log.read_text() if log.exists() else ""
    return {**json.loads(done.stdout.splitlines()[-1]), "log": said}


@pytest.mark.parametrize(
    ("num_kills", "num_steps"), [(2, 20), pytest.param(100, 1500, marks=pytest.mark.slow)]
)
def test_training_that_is_killed_again_and_again(
    inputs: Path, tmp_path: Path, num_kills: int, num_steps: int
) -> None:
    """With noise, so that what is drawn must be the same too; a checkpoint at every step."""
    settings = arguments(inputs, tmp_path)[1:]
    settings = [s for s in settings if not s.startswith(("out_dir", "head."))]
    settings += [
        "head=eagle3", "head.noise=0.5", "head.draft_vocab_size=12", "head.layers=[0,1,2]",
        f"train.max_steps={num_steps}", "train.save_steps=1", f"train.eval_steps={num_steps}",
        "train.num_replay_prompts=0", "train.resume=auto",
    ]  # fmt: skip
    (tmp_path / "straight").mkdir()
    (tmp_path / "killed").mkdir()
    straight = killed(tmp_path / "straight", "eagle", settings, 0, 1.0)
    assert straight["status"] == 0, straight["log"]
    found = killed(tmp_path / "killed", "eagle", settings, num_kills, 2.5)
    assert (found["kills"], found["status"]) == (num_kills, 0), found["log"][-3000:]
    assert "continuing from" in found["log"]
    assert "damaged" not in found["log"]
    assert "Traceback" not in found["log"]
    if num_kills >= 100:
        assert found["in_writes"] > 10
    heads = [
        load_file(tmp_path / name / "out/head/model.safetensors") for name in ("straight", "killed")
    ]
    assert heads[0].keys() == heads[1].keys()
    for name, expected in heads[0].items():
        assert heads[1][name].equal(expected), name
