"""Two runs and one `out_dir`: the second is refused, and a dead run's folder is gone on with."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import commands

from tests.train.parallel.test_launch import ENDLESS, ENV, arguments, begin, inputs, wait_for

__all__ = ["inputs"]


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended(
    inputs: Path, tmp_path: Path
) -> None:
    out, lock = tmp_path / "out", tmp_path / "out/.lock"
    command = [sys.executable, *arguments(inputs, out, *ENDLESS, "train.max_steps=100000")]
    first = begin(command, tmp_path)
    wait_for(lock, first)
    named = f"process {first.pid} on {socket.gethostname()}"
    for more in ([], ["train.resume=auto"]):
        second = commands.run([*command, *more], tmp_path, ENV)
        assert (second.returncode, named in second.stderr) == (2, True), second.stderr
    shutil.copyfile(lock, tmp_path / "copy")
    wait_for(out / "metrics.jsonl", first)
    os.kill(first.pid, signal.SIGTERM)
    said, _ = first.communicate()
    assert "continue with train.resume=auto" in said
    assert not lock.exists()
    shutil.copyfile(tmp_path / "copy", lock)  # as a killed run leaves it
    step = max(int(each.name[5:]) for each in (out / "checkpoints").iterdir())
    more = ["train.resume=auto", f"train.max_steps={step + 1}"]
    third = commands.run([*command, *more], tmp_path, ENV)
    assert third.returncode == 0, third.stderr
    assert (out / "head/config.json").exists()
    assert not lock.exists()


def test_both_processes_of_a_launch_end_where_a_run_of_another_machine_lives(
    inputs: Path, tmp_path: Path
) -> None:
    lock, done = tmp_path / "out/.lock", threading.Event()
    lock.parent.mkdir()
    lock.write_text("another 1 token")

    def give_signs() -> None:
        while not done.wait(0.05):
            os.utime(lock)

    signs = threading.Thread(target=give_signs)
    signs.start()
    try:
        found = commands.run_two([sys.executable, *arguments(inputs, lock.parent)], tmp_path, ENV)
    finally:
        done.set()
        signs.join()
    assert [each.returncode for each in found] == [2, 2], found
    assert "another process is writing here: process 1 on another" in found[0].stderr
    assert lock.read_text() == "another 1 token"


def test_a_refused_run_leaves_neither_lock_nor_folder(inputs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    words = ("the cat", "a mat", "two birds")
    rows = [{"messages": [{"role": "user", "content": each}]} for each in words]
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, *arguments(inputs, tmp_path / "out", f"data.path={bad}")]
    refused = commands.run(command, tmp_path, ENV)
    assert refused.returncode == 2, refused.stderr
    assert "nothing to learn" in refused.stderr
    assert not (tmp_path / "out").exists()
