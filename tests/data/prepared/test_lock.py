"""A lock by beats: who holds it, who waits, and when it is taken over."""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from conf import files as lock
from data.prepared import dataset_cache
from data.prepared.dataset_cache import hold_lock

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(dataset_cache, "POLL_S", 0.01)


def never() -> bool:
    return False


def test_it_is_held_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(KeyError), hold_lock(path, never, pytest.fail) as mine:
        assert mine
        assert path.read_text().split()[:2] == [HOST, str(os.getpid())]
        before = path.stat().st_mtime_ns
        time.sleep(0.2)
        assert path.stat().st_mtime_ns > before
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_who_finds_it_taken_waits_for_what_is_made(tmp_path: Path) -> None:
    path, made, told = tmp_path / "lock", tmp_path / "made", []
    with hold_lock(path, never, pytest.fail):
        # This process lives, so its beats alone say so.
        threading.Timer(0.2, made.touch).start()
        with hold_lock(path, made.is_file, told.append) as mine:
            assert not mine
            assert made.is_file()
        assert path.exists()
    assert told == [f"process {os.getpid()} on {HOST}"]


def test_a_lock_left_behind_is_taken_over(tmp_path: Path, monkeypatch) -> None:
    """Of a process on another machine one sees only that it is silent."""
    monkeypatch.setattr(lock, "STALE_S", 0.3)
    path, told, began = tmp_path / "lock", [], time.monotonic()
    path.write_text(f"another {os.getpid()} token")
    with hold_lock(path, never, told.append) as mine:
        assert mine
        assert path.read_text().split()[:2] == [HOST, str(os.getpid())]
    assert 0.3 <= time.monotonic() - began < 10
    assert len(told) == 1


def test_whoever_lost_it_leaves_it_to_the_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path, never, pytest.fail):
        path.write_text("another 1 token")
    assert path.read_text() == "another 1 token"


def test_of_many_at_once_one_holds_it(tmp_path: Path) -> None:
    path, inside, log = tmp_path / "lock", tmp_path / "inside", []

    def enter() -> None:
        with hold_lock(path, never, lambda _: None):
            inside.touch(exist_ok=False)
            time.sleep(0.01)
            log.append(json.dumps(path.read_text()))
            inside.unlink()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(log)) == 8
