"""Files and folders: what a path means, and writing so that nothing is lost."""

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from conf.errors import InputError

HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")
"""`name` or `owner/name`, as the Hub has them."""
_GGUF_ON_HUB = re.compile(r"(\b[\w.-]+\b/\b[\w.-]{1,96}\b)/(.+\.gguf)")
LEAST_FREE = 50e6
"""Bytes; the smallest results need some of them."""


def cache_dir() -> Path:
    """`$HEADSMITH_CACHE`, or `~/.cache/headsmith`: where this machine keeps what is made once."""
    return Path(os.environ.get("HEADSMITH_CACHE") or "~/.cache/headsmith").expanduser().absolute()


def here(key: str, path: str, endings: tuple[str, ...] = ()) -> Path | None:
    """The file or folder that a path names; None where it is the id of a Hub repository.

    What is there is meant; of what is not, whatever could be an id is one.

    Args:
        key: the setting, for the message.
        path: as the user gave it; `~` is the user's own folder.
        endings: of files, which no id has.

    Raises:
        InputError: nothing is there, and it is no id.
    """
    local = Path(path).expanduser()
    if path and local.exists():
        return local
    if path.endswith(endings):
        raise InputError(f"{key}={path}: no such file or folder")
    if not (HUB_ID.fullmatch(path) or _GGUF_ON_HUB.fullmatch(path)):
        what = "file or folder" if endings else "folder"
        raise InputError(f"{key}={path}: no such {what}, and not a Hub id (name or owner/name)")
    return None


def gguf_parts(path: str) -> tuple[str, str] | None:
    """The place and the name of a GGUF file; None of a path that names none.

    The place is a folder, or the id of a Hub repository where no such folder is here. In a
    repository the name may have folders of its own.
    """
    if not path.endswith(".gguf") or Path(path).is_dir():
        return None
    folder, name = os.path.split(path)
    on_hub = _GGUF_ON_HUB.fullmatch(path)
    if on_hub is None or Path(folder).exists():
        return folder or ".", name
    return on_hub[1], on_hub[2]


def check_room(out_dir: str) -> None:
    """Refuses a folder that cannot be written, or whose disk is full.

    Raises:
        InputError: with what is in the way.
    """
    folder = Path(out_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a link to nowhere"
        raise InputError(f"out_dir={out_dir}: {existing} is {what}: name a folder")
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE:
        raise InputError(
            f"out_dir={out_dir}: {free / 1e6:.0f} MB are free there; make room for "
            f"{LEAST_FREE / 1e6:.0f} at least, or name a folder on another disk"
        )
    try:  # permissions alone do not tell: shared disks, quotas and names have rules of their own
        with tempfile.TemporaryDirectory(dir=existing) as trial:
            make_folder(Path(trial) / folder.relative_to(existing))
    except (OSError, InputError) as error:
        raise InputError(
            f"out_dir={out_dir}: {existing} cannot be written ({error}); name another folder"
        ) from None


def make_folder(folder: Path) -> None:
    """Makes a folder to write to, if it is not there.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from error


def write_whole(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Writes a file, at once or piece by piece.

    A reader, or a crash, sees the old one or the new one.
    """
    encoded = content.encode() if isinstance(content, str) else content
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        file.writelines([encoded] if isinstance(encoded, bytes) else encoded)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def locked(path: Path) -> FileLock:
    """Locks a file until it is released or its process ends, however it ends."""
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(f"{path.parent}: another process is writing here") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    return lock


Result = TypeVar("Result")


FINAL = (errno.ENOSPC, errno.ENOENT, errno.EACCES)
"""A full disk, a missing file and a forbidden one are the same a second later."""


def retried(action: Callable[[], Result], attempts: int = 4, wait_s: float = 0.5) -> Result:
    """Runs an action again, after a growing pause, where it failed with an OSError that may pass.

    Args:
        action: starts from the beginning each time.
        attempts: at most.
        wait_s: seconds before the second attempt; each later pause is twice the one before.

    Raises:
        OSError: the last one, or one of `FINAL` at once.
    """
    for attempt in range(attempts - 1):
        try:
            return action()
        except OSError as error:
            if error.errno in FINAL:
                raise
            time.sleep(wait_s * 2**attempt)
    return action()
