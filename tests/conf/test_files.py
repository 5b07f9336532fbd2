"""A folder's lock: who holds it, who is refused, when it is taken over; and JSON files."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf import files
from conf.errors import InputError
from conf.files import find_lock_owner, load_json, lock_file

HOST, PID = socket.gethostname(), os.getpid()
HOLD = (
    "import sys, time; from pathlib import Path; from conf.files import lock_file; "
    "lock = lock_file(Path(sys.argv[1])); print('held', flush=True); "
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def start_holder(path: Path, then: str) -> "subprocess.Popen[str]":
    holder = subprocess.Popen([sys.executable, "-c", HOLD + then, str(path)],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_is_refused_with_host_and_process_of_the_first(path: Path) -> None:
    holder = start_holder(path, "time.sleep(60)")
    named = f"process {holder.pid} on {HOST}; wait for its end, or name another folder"
    with pytest.raises(InputError, match=re.escape(f"{path.parent}: another process is writing")):
        lock_file(path)
    with pytest.raises(InputError, match=re.escape(named)):
        lock_file(path)
    holder.kill()
    holder.wait()
    assert path.exists()
    with lock_file(path):
        assert path.read_text().startswith(f"{HOST} {PID} ")
    assert list(path.parent.iterdir()) == []


def test_a_killed_process_that_nobody_waits_for_is_dead(path: Path) -> None:
    holder = start_holder(path, "time.sleep(60)")
    holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (owner := find_lock_owner(path)) and owner.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    lock_file(path).release()
    holder.wait()


def test_a_process_that_ends_lets_its_lock_go(path: Path) -> None:
    start_holder(path, "raise KeyError").wait()
    assert not path.exists()


def test_a_process_id_that_another_process_has_by_now_is_a_dead_owner(path: Path) -> None:
    lock_file(path).release()
    with lock_file(path):
        host, pid, token, start, machine = path.read_text().split()
    path.write_text(f"{host} {pid} {token} {start} {machine}")
    with pytest.raises(InputError, match=f"process {PID} on"):
        lock_file(path)
    path.write_text(f"{host} {pid} {token} {int(start) - 1} {machine}")
    with lock_file(path):
        assert path.read_text().split()[3] == start


def test_a_process_that_the_machine_does_not_show_is_alive(path, monkeypatch) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    path.write_text(f"{HOST} {PID} token 5")
    monkeypatch.setattr(files, "_find_process_start", lambda _pid: "")
    with monkeypatch.context() as of_another_user:
        of_another_user.setattr(os, "kill", refuse)
        with pytest.raises(InputError, match=f"process {PID} on {HOST}"):
            lock_file(path)
    lock_file(path).release()


@pytest.mark.parametrize("name", ["another", HOST])
def test_an_owner_on_another_machine_is_dead_once_it_gives_no_sign(path, monkeypatch, name) -> None:
    """A container has its host's name at times, and processes of its own."""
    monkeypatch.setattr(files, "STALE_S", 0.5)
    monkeypatch.setattr(files, "POLL_S", 0.01)
    path.write_text(f"{name} {PID} token 1 of-another-start")
    began = time.monotonic()
    with lock_file(path):
        assert time.monotonic() - began >= 0.5
    path.write_text(f"{name} {PID} token 1 of-another-start")
    looks = [0]
    real = find_lock_owner

    def move_and_look(path: Path) -> files.LockOwner | None:
        looks[0] += 1
        os.utime(path, ns=(looks[0] // 5, looks[0] // 5))  # of a clock that is far behind
        return real(path)

    monkeypatch.setattr(files, "find_lock_owner", move_and_look)
    monkeypatch.setattr(files, "STALE_S", 60.0)
    named = f"process {PID} on {name}; .* died, start again: the next start waits 60 s for a sign "
    with pytest.raises(InputError, match=named):
        lock_file(path)
    assert looks[0] == 5


def test_a_lock_taken_over_meanwhile_stays_with_its_owner(path, monkeypatch) -> None:
    path.write_text(f"{HOST} {PID} token 1")
    dead, alive = path.read_text(), f"{HOST} {PID} other {files._find_process_start(PID)}"
    first = [files.LockOwner(dead, 0)]

    def look(path: Path) -> files.LockOwner | None:
        if first:  # between this look and the removal another process takes the lock
            path.write_text(alive)
            return first.pop()
        return find_lock_owner(path)

    monkeypatch.setattr(files, "find_lock_owner", look)
    with pytest.raises(InputError, match=f"process {PID} on {HOST}"):
        lock_file(path)
    assert path.read_text() == alive


def test_a_json_file_that_cannot_be_read_is_refused_by_its_name(tmp_path, monkeypatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert load_json(path) == {}

    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(InputError, match=r"config\.json: cannot be read: Permission denied"):
        load_json(path)
