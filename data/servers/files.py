"""Files of hidden states that a server has written, in a folder that this machine sees.

Letters: S tokens, L layers in a file, D hidden.
"""

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from conf.errors import InputError
from data.servers.buffers import Buffers

VISIBLE_S = 10.0
"""For which a file that the server has named may fail to show, on a network file system."""
LOOK_EVERY_S = 0.01
SWEEP_EVERY_S = 600.0
LOST_AFTER = 3
"""Age of files that nobody waits for any more, in timeouts of a request."""
CANNOT_LOCK = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
HEADER_BYTES = 100_000_000
"""Of the longest header that safetensors takes."""
DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip

BUFFERS = Buffers()


class NotReadError(InputError):
    """A document's states did not come, or not right: another attempt, or server, may give them."""


class Files(Protocol):
    """A way to a server's files."""

    def take(self, path: Path, token_ids: list[int], locks: bool) -> Tensor:
        """Reads a file and deletes it.

        Args:
            path: as the server names it.
            token_ids: that it must hold, `[S]`; others are nobody's to delete.
            locks: until a file is whole the server holds a lock beside it.

        Returns:
            `hidden_states` as written, [S, L, D] of a server that is started right.

        Raises:
            NotReadError: it is not there, not whole, or of other tokens.
            InputError: no such file can be read.
        """

    def free_bytes(self) -> int | None:
        """Room where the server writes; None where nobody knows."""

    def close(self) -> None:
        """Ends what is open."""


class Folder:
    """Files in a folder that this machine sees under the server's name for it.

    What a request that was given up has left behind is deleted there now and then.
    """

    def __init__(self, timeout_s: float) -> None:
        """Looks at nothing yet.

        Args:
            timeout_s: for which a file is waited for, and a request.
        """
        self.timeout_s = timeout_s
        self._folder: Path | None = None
        self._swept_at = -SWEEP_EVERY_S

    def take(self, path: Path, token_ids: list[int], locks: bool) -> Tensor:
        """See `Files`."""
        wait_until_whole(path, locks, self.timeout_s)
        try:
            with path.open("rb", buffering=0) as file:
                tensors = read_tensors(file, os.fstat(file.fileno()).st_size)
        except (OSError, ValueError) as error:
            raise NotReadError(f"{path} cannot be read: {error}") from error
        states = states_of(tensors, token_ids, path)
        try:
            delete(path)
        except OSError as error:
            raise InputError(
                f"cannot delete {path}, and the disk would fill up: {error}"
            ) from error
        self._folder = path.parent
        if time.monotonic() - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            num_lost = sweep(path.parent, LOST_AFTER * self.timeout_s)
            if num_lost:
                tqdm.write(
                    f"{path.parent}: deleted {num_lost} files that nobody has read for "
                    f"{LOST_AFTER * self.timeout_s / 60:.0f} minutes",
                    file=sys.stderr,
                )
        return states

    def free_bytes(self) -> int | None:
        """See `Files`."""
        return None if self._folder is None else shutil.disk_usage(self._folder).free

    def close(self) -> None:
        """See `Files`."""


def wait_until_whole(path: Path, locks: bool, timeout_s: float) -> None:
    """Waits until a file's writer is done and all of it shows.

    A lock tells where there is one. Elsewhere (network file systems may not lock, or show it late)
    a file must be whole twice.

    Args:
        path: of a safetensors file.
        locks: a writer holds `path.lock` until it is done.
        timeout_s: for which the lock may be held.

    Raises:
        NotReadError: it is not done in time, or the file is not whole then: a write that fails
            leaves a free lock, and nothing or a short file.
        InputError: the file may not be read.
    """
    begin = released = time.monotonic()
    was_whole = False
    while True:
        held, now = (_is_held(path) if locks else False), time.monotonic()
        if held:
            released = now
            if now - begin > timeout_s:
                raise NotReadError(
                    f"{path} is not written after {now - begin:.0f} s: see the server's log"
                )
        elif _is_whole(path):
            if held is False or was_whole:
                return
            was_whole = True
        elif now - released > VISIBLE_S:
            raise NotReadError(_why_not_whole(path))
        time.sleep(LOOK_EVERY_S)


def _is_held(path: Path) -> bool | None:
    """True while a writer holds the lock; None where none shows, or none can be had."""
    try:
        with lock_of(path).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in CANNOT_LOCK:
            return None
        raise InputError(f"cannot lock {lock_of(path)}: {error}") from error
    return False


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            _places(file, os.fstat(file.fileno()).st_size)
    except PermissionError as error:
        raise InputError(f"{error}: read as the user that the server runs as") from error
    except (OSError, ValueError):
        return False
    return True


def _why_not_whole(path: Path) -> str:
    if not path.exists() and not lock_of(path).exists():
        return (
            f"{path} cannot be seen from this machine: mount the server's shared_storage_path here "
            "under the same name, or start scripts/relay.py beside the server and name it in "
            "target.relay"
        )
    found = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
    return f"{path} was not written whole ({found}): the disk may be full, see the server's log"


class Readable(Protocol):
    """A file or a body of HTTP."""

    def read(self, size: int, /) -> bytes | None:
        """Reads that many bytes, less at the end."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fills a part of a buffer, and tells how long a part; 0 at the end."""


def read_tensors(file: Readable, size: int) -> dict[str, Tensor]:
    """Reads a safetensors file into one buffer, which its tensors share.

    Raises:
        ValueError: it is none, or not whole.
        OSError: reading fails.
    """
    num_bytes, places = _places(file, size)
    data = BUFFERS.take(num_bytes)
    filled, view = 0, data.data
    while filled < num_bytes:
        count = file.readinto(view[filled:num_bytes])
        if not count:
            raise ValueError(f"it ends {num_bytes - filled} bytes early")
        filled += count
    return {
        name: torch.frombuffer(data, dtype=dtype, offset=first, count=shape.numel()).view(shape)
        for name, (dtype, shape, first) in places.items()
        if shape.numel()
    }


def _places(
    file: Readable, size: int
) -> tuple[int, dict[str, tuple[torch.dtype, torch.Size, int]]]:
    """Bytes behind the header, and dtype, shape and first byte there of each tensor.

    Raises:
        ValueError: a file of `size` bytes has another header, or none.
    """
    length = int.from_bytes(file.read(8) or b"", "little")
    if not 0 < length <= min(size - 8, HEADER_BYTES):
        raise ValueError(f"no header of a safetensors file in {size} bytes")
    try:
        entries = dict(json.loads(file.read(length) or b""))
        entries.pop("__metadata__", None)
        places, end = {}, 0
        for name, entry in entries.items():
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            first, last = entry["data_offsets"]
            if last - first != shape.numel() * dtype.itemsize or min(first, *shape) < 0:
                raise ValueError(f"{name} of {last - first} bytes")
            places[name], end = (dtype, shape, first), max(end, last)
    except (KeyError, TypeError, RuntimeError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no header of a safetensors file: {error!r}") from error
    if end != size - 8 - length:
        raise ValueError(f"{size} bytes and not {end + 8 + length}")
    return end, places


def states_of(tensors: dict[str, Tensor], token_ids: list[int], path: Path) -> Tensor:
    """The states of a file that holds these tokens; a NotReadError for another one."""
    if "hidden_states" not in tensors or tensors.get("token_ids", torch.empty(0)).tolist() != (
        token_ids
    ):
        raise NotReadError(f"{path} does not hold the tokens that were sent")
    return tensors["hidden_states"]


def lock_of(path: Path) -> Path:
    """The file that a writer locks."""
    return path.with_name(path.name + ".lock")


def delete(path: Path) -> None:
    """Deletes a file and its lock, whichever is there."""
    path.unlink(missing_ok=True)
    lock_of(path).unlink(missing_ok=True)


def sweep(folder: Path, age_s: float) -> int:
    """Deletes files of states, whole or not, and their locks that are older than an age.

    Returns:
        How many files; locks do not count.
    """
    num_files, before = 0, time.time() - age_s
    for path in folder.iterdir():
        # safetensors writes to `.tmp` and six letters first.
        if not (path.name.endswith((".safetensors", ".lock")) or path.name.startswith(".tmp")):
            continue
        with suppress(FileNotFoundError):  # others sweep too
            if path.lstat().st_mtime < before and not path.is_dir():
                path.unlink()
                num_files += not path.name.endswith(".lock")
    return num_files
