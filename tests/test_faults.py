"""Runs that are killed at any moment end as if they had never been stopped."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stores import files

from conf.errors import InputError
from heads import folders as storage
from tests.train.runs import ENV, ROOT, TWO, arguments, begin, inputs, trained, wait_for

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


def killed_as_never_killed(
    folder: Path, entry: str, overrides: list[str], within_s: float
) -> dict[str, Any]:
    """Runs the command in `folder/straight` once and in `folder/killed` under the killer."""
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    straight = killed(folder / "straight", entry, overrides, 0, 1.0)
    assert straight["status"] == 0, straight["log"]
    found = killed(folder / "killed", entry, overrides, NUM_KILLS, within_s)
    assert (found["kills"], found["status"]) == (NUM_KILLS, 0), found["log"][-3000:]
    assert "Traceback" not in found["log"]
    assert found["in_writes"] > NUM_KILLS / 10
    return found


NUM_KILLS = 25


@pytest.mark.slow
def test_training_that_is_killed_again_and_again(inputs: Path, tmp_path: Path) -> None:
    """With noise, so that what is drawn must be the same too; a checkpoint at every step."""
    num_steps = 400
    settings = arguments(inputs, tmp_path)[1:]
    settings = [s for s in settings if not s.startswith(("out_dir", "head."))]
    settings += [
        "head=eagle3", "head.noise=0.5", "head.draft_vocab_size=12", "head.layers=[0,1,2]",
        f"train.max_steps={num_steps}", "train.save_steps=1", f"train.eval_steps={num_steps}",
        "train.num_replay_prompts=0", "train.resume=auto",
    ]  # fmt: skip
    found = killed_as_never_killed(tmp_path, "eagle", settings, 2.5)
    assert "continuing from" in found["log"]
    assert "damaged" not in found["log"]
    heads = [
        load_file(tmp_path / name / "out/head/model.safetensors") for name in ("straight", "killed")
    ]
    assert heads[0].keys() == heads[1].keys()
    for name, expected in heads[0].items():
        assert heads[1][name].equal(expected), name


@pytest.mark.slow
def test_a_capture_that_is_killed_again_and_again(inputs: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text((inputs / "chat.jsonl").read_text() * 8)
    settings = [
        f"target.path={inputs / 'target'}", f"data.path={chats}",
        "data.max_length=32", "data.eval_fraction=0.1", "layers=[0,1,2]", "format=int8",
        "num_replay_prompts=2", "micro_batch_size=1",
    ]  # fmt: skip
    killed_as_never_killed(tmp_path, "capture", settings, 2.0)
    stores = list((tmp_path / "killed").glob("out*"))
    assert tmp_path / "killed/out" in stores
    for store in stores:
        assert files(store) == files(tmp_path / "straight/out"), store


@pytest.mark.slow
def test_when_a_process_dies_the_launch_ends_and_another_number_goes_on(
    inputs: Path, tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    steps = ("train.max_steps=4000", "train.save_steps=1", "train.schedule=constant")
    long = arguments(inputs, out_dir, *steps)
    launch = begin([*TWO, *long], tmp_path)
    wait_for(out_dir / "checkpoints/step-000002", launch)
    children = Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
    began = time.monotonic()
    os.kill(int(children[-1]), signal.SIGKILL)
    said, _ = launch.communicate(timeout=120)
    assert launch.returncode != 0, said
    assert time.monotonic() - began < 90
    newest = max(int(step.name[5:]) for step in (out_dir / "checkpoints").glob("step-*"))
    more = [f"train.max_steps={newest + 2}", "train.resume=auto"]
    said = trained([sys.executable, *long, *more], tmp_path)
    assert f"continuing from {out_dir / 'checkpoints'}/step-{newest:06d}" in said


class Flaky:
    """`save_file` that fails as a network file system does, so many times."""

    def __init__(self, number: int, num_failures: int) -> None:
        self.number, self.left = number, num_failures

    def __call__(self, tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        if self.left:
            self.left -= 1
            path.write_bytes(b"half")
            raise OSError(self.number, os.strerror(self.number))
        save_file(tensors, path, **more)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_folder_is_written_again_where_the_file_system_failed_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conf.files.time.sleep", lambda _: None)
    monkeypatch.setattr("safetensors.torch.save_file", Flaky(number, 2))
    tensors = {"x": torch.arange(3)}
    storage.write_head_folder(tmp_path / "head", "w.safetensors", tensors, {"config.json": {}})
    assert load_file(tmp_path / "head/w.safetensors")["x"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    monkeypatch.setattr("safetensors.torch.save_file", Flaky(number, 9))
    with pytest.raises(InputError, match=r"head: cannot be written: .*content is untouched"):
        storage.write_head_folder(tmp_path / "head", "w.safetensors", tensors, {"config.json": {}})
    assert load_file(tmp_path / "head/w.safetensors")["x"].tolist() == [0, 1, 2]
