"""A launch whose process dies, and a file system that fails once."""

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import InputError
from heads import folders as storage
from tests.train.runs import TWO, arguments, begin, inputs, trained, wait_for

__all__ = ["inputs"]


@pytest.mark.slow
def test_when_a_process_dies_the_launch_ends_and_another_number_goes_on(inputs, tmp_path) -> None:
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
