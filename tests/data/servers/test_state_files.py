"""Files of hidden states in a folder that this machine sees, and memory that is used again."""

import errno
import fcntl
import gc
import io
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from conf.errors import InputError
from data.servers import state_files as files
from data.servers.state_files import (
    MIN_KEPT_BYTES,
    BufferPool,
    HiddenStatesError,
    SharedFolder,
    delete_old_files,
    load_safetensors,
    make_lock_path,
)

IDS = [7, 5, 6]
STATES = torch.arange(3 * 2 * 4).view(3, 2, 4).bfloat16()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "VISIBLE_S", 0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is whole, its lock free."""
    path = tmp_path / "cmpl-1-0.safetensors"
    save_file({"hidden_states": STATES, "token_ids": torch.tensor(IDS)}, path)
    make_lock_path(path).touch()
    return path


def later(seconds: float, action: Any) -> None:
    threading.Timer(seconds, action).start()


def test_a_file_is_read_and_deleted_with_its_lock(path: Path) -> None:
    folder = SharedFolder(timeout_s=5.0)
    assert folder.free_bytes() is None
    assert torch.equal(folder.load_and_delete(path, IDS), STATES)
    assert list(path.parent.iterdir()) == []
    assert folder.free_bytes() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_that_safetensors_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"b": torch.randn(5, 2, 3).to(dtype), "a": torch.arange(5), "none": torch.empty(0)}
    save_file(tensors, tmp_path / "file.safetensors", {"format": "pt"})
    content = (tmp_path / "file.safetensors").read_bytes()
    found = load_safetensors(io.BytesIO(content), len(content))
    for name, expected in load_file(tmp_path / "file.safetensors").items():
        if expected.numel():
            assert found[name].dtype is expected.dtype
            assert torch.equal(found[name], expected)


def test_no_part_of_a_file_is_taken_for_a_whole_one() -> None:
    content = save({"hidden_states": STATES, "token_ids": torch.tensor(IDS)})
    for size in range(len(content)):
        with pytest.raises(ValueError, match="bytes"):
            load_safetensors(io.BytesIO(content[:size]), size)
        with pytest.raises(ValueError, match=r"early|header|bytes"):
            load_safetensors(io.BytesIO(content[:size]), len(content))
    for place in range(160):
        spoilt = bytearray(content)
        spoilt[place] ^= 0x15
        with suppress(ValueError):  # and nothing else
            load_safetensors(io.BytesIO(spoilt), len(spoilt))


def held(path: Path) -> Any:
    """The lock of a file, as its writer holds it."""
    lock = make_lock_path(path).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_a_held_lock_is_waited_for_and_then_the_file(path: Path) -> None:
    lock, content = held(path), path.read_bytes()
    path.write_bytes(content[:-8] + bytes(8))

    def end() -> None:
        path.unlink()
        lock.close()
        later(0.05, lambda: path.write_bytes(content))

    later(0.3, end)
    assert torch.equal(SharedFolder(5.0).load_and_delete(path, IDS), STATES)


def test_a_lock_that_shows_behind_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, num_looks, locks = path.read_bytes(), [], []
    make_lock_path(path).unlink()
    path.write_bytes(content[:-8] + bytes(8))

    def sleep(_: float) -> None:
        num_looks.append(1)
        if len(num_looks) == 1:
            locks.append(held(path))
        elif len(num_looks) == 5:
            path.write_bytes(content)
            locks.pop().close()

    monkeypatch.setattr(files.time, "sleep", sleep)
    assert torch.equal(SharedFolder(5.0).load_and_delete(path, IDS), STATES)
    assert len(num_looks) == 5


def test_a_lock_that_is_held_for_ever(path: Path) -> None:
    message = r": not written after 0 s; see the server's log"
    with held(path), pytest.raises(HiddenStatesError, match=message):
        SharedFolder(0.1).load_and_delete(path, IDS)
    assert path.exists()


@pytest.mark.parametrize("locked", [True, False])
def test_a_file_that_shows_late(path: Path, locked: bool) -> None:
    """As network file systems may show it: first nothing, then a part, then all."""
    content = path.read_bytes()
    path.unlink()
    if not locked:
        make_lock_path(path).unlink()
    later(0.03, lambda: path.write_bytes(content[:150]))
    later(0.08, lambda: path.write_bytes(content))
    assert torch.equal(SharedFolder(5.0).load_and_delete(path, IDS), STATES)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (errno.ENOTSUP, None),
        (errno.ENOLCK, None),
        (errno.EIO, "safetensors.lock: cannot be locked: "),
    ],
)
def test_where_the_file_system_cannot_lock_the_size_tells(
    error: int, refused: str | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    if refused is None:
        assert torch.equal(SharedFolder(5.0).load_and_delete(path, IDS), STATES)
        return
    with pytest.raises(InputError, match=refused):
        SharedFolder(5.0).load_and_delete(path, IDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), r": incomplete \(no such file\); the disk may be"),
        (lambda path: path.write_bytes(b""), r": incomplete \(0 bytes\)"),
        (lambda path: os.truncate(path, 199), r": incomplete \(199 bytes\)"),
        (lambda path: path.write_bytes(bytes(200)), r": incomplete \(200 bytes\)"),
        (lambda path: save_file({"a": STATES}, path), ": holds other tokens than were sent"),
        (
            lambda path: [each.unlink() for each in (path, make_lock_path(path))],
            "cannot be seen from this machine; mount the server's shared_storage_path here under",
        ),
    ],
)
def test_what_another_attempt_may_give(path: Path, change: Any, message: str) -> None:
    change(path)
    with pytest.raises(HiddenStatesError, match=message):
        SharedFolder(5.0).load_and_delete(path, IDS)


def test_what_nobody_waits_for_is_deleted_now_and_then(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files and locks that are older than three timeouts; nothing else, and nothing younger."""
    folder, again, content = SharedFolder(timeout_s=20.0), path.with_name("b"), path.read_bytes()

    def leave(age_s: float) -> None:
        for name in ("old.safetensors", "old.safetensors.lock", ".tmpQx3f9z", "notes.txt"):
            (path.parent / name).touch()
            os.utime(path.parent / name, (time.time() - age_s,) * 2)

    leave(61)
    (path.parent / "young.safetensors").touch()
    folder.load_and_delete(path, IDS)
    names = {each.name for each in path.parent.iterdir()}
    assert names == {"young.safetensors", "notes.txt"}
    told = f"{path.parent}: deleted 2 files that no process has read for 1 minutes\n"
    assert capfd.readouterr().err == told
    leave(61)
    again.write_bytes(content)
    folder.load_and_delete(again, IDS)
    assert (path.parent / "old.safetensors").exists()  # too soon to look again
    monkeypatch.setattr(files, "SWEEP_EVERY_S", 0.0)
    again.write_bytes(content)
    folder.load_and_delete(again, IDS)
    assert not (path.parent / "old.safetensors").exists()
    leave(59)
    assert delete_old_files(path.parent, 60) == 0


MB = 1 << 20


def place(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_comes_back_once_no_tensor_is_in_it() -> None:
    buffers = BufferPool()
    array = buffers.allocate_bytes(10 * MB)
    array[:] = 7
    first, tensor = place(array), torch.frombuffer(array, dtype=torch.int16, offset=4, count=1000)
    part = tensor.view(10, 100)[:, 3]
    del array, tensor
    other = buffers.allocate_bytes(10 * MB)
    assert place(other) != first
    assert part.tolist() == [0x0707] * 10
    del part
    again, third = buffers.allocate_bytes(10 * MB), buffers.allocate_bytes(10 * MB)
    assert place(again) == first
    assert place(third) not in (first, place(other))


def test_memory_fits_what_is_a_little_smaller_or_larger() -> None:
    buffers = BufferPool()
    first = place(buffers.allocate_bytes(9 * MB + 1))
    assert place(buffers.allocate_bytes(10 * MB)) == first
    assert place(buffers.allocate_bytes(8 * MB + 1)) == first
    smaller = buffers.allocate_bytes(6 * MB)
    assert place(smaller) != first
    assert len(smaller) == 6 * MB


def test_no_more_is_kept_than_was_in_use() -> None:
    buffers, sizes = BufferPool(), [3, 20, 7, 50, 11, 33, 5]
    for size in sizes * 3:
        del_me = buffers.allocate_bytes(size * MB)
        del del_me
        assert sum(map(len, buffers._free)) <= 1.25 * (50 + 33) * MB
    held = [buffers.allocate_bytes(8 * MB) for _ in range(5)]
    del held
    gc.collect()
    kept = sum(len(block) == 8 * MB for block in buffers._free)
    assert kept == 5


def test_a_little_memory_is_not_kept() -> None:
    buffers = BufferPool()
    assert len(buffers.allocate_bytes(MIN_KEPT_BYTES - 1)) == MIN_KEPT_BYTES - 1
    assert buffers._free == []
    assert len(buffers.allocate_bytes(0)) == 0
