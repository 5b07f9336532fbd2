"""Files and folders: what a path names, writes that lose nothing, locks and checksums."""

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from filelock import FileLock, Timeout

from conf.errors import InputError

HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")
"""`name` or `owner/name`, as on the Hub."""
_GGUF_ON_HUB = re.compile(r"(\b[\w.-]+\b/\b[\w.-]{1,96}\b)/(.+\.gguf)")
LEAST_FREE = 50e6
"""Free bytes of disk space below which no command starts, as even the smallest results need
some."""
FINAL = (errno.ENOSPC, errno.ENOENT, errno.EACCES)
"""Errors that a retry cannot mend: full disk, missing file, no permission."""
SAFETENSORS_SUFFIX = ".safetensors"
READ_BYTES = 1 << 24
"""Bytes that are read at once from a file of any size."""
Result = TypeVar("Result")


def cache_dir() -> Path:
    """Return the folder of files made once per machine.

    It is `$HEADSMITH_CACHE`, or `~/.cache/headsmith`.
    """
    return Path(os.environ.get("HEADSMITH_CACHE") or "~/.cache/headsmith").expanduser().absolute()


def find_local_path(key: str, path: str, endings: tuple[str, ...] = ()) -> Path | None:
    """Find the local file or folder of a path; return None for the id of a Hub repository.

    An existing file or folder takes precedence over a Hub id.

    Args:
        key: name of the setting, for the message.
        path: path as the user typed it; `~` is expanded.
        endings: suffixes of files. A path with such a suffix is never taken for a Hub id.

    Raises:
        InputError: nothing exists there, and the path is no Hub id.
    """
    local = Path(path).expanduser()
    if path and local.exists():
        return local
    if path.endswith(endings):
        raise InputError(f"{key}={path}: no such file or folder; type the path of an existing one")
    if not (HUB_ID.fullmatch(path) or _GGUF_ON_HUB.fullmatch(path)):
        what = "file or folder" if endings else "folder"
        raise InputError(
            f"{key}={path}: no such {what}, and not a Hub id; type an existing path, name or "
            "owner/name"
        )
    return None


def split_gguf_path(path: str) -> tuple[str, str] | None:
    """Split the path of a GGUF file into its place and its file name; None for other paths.

    The place is a folder, or a Hub id where no such folder exists. The file name in a Hub
    repository may contain folders.
    """
    if not path.endswith(".gguf") or Path(path).is_dir():
        return None
    folder, name = os.path.split(path)
    on_hub = _GGUF_ON_HUB.fullmatch(path)
    if on_hub is None or Path(folder).exists():
        return folder or ".", name
    return on_hub[1], on_hub[2]


def check_out_dir(out_dir: str) -> None:
    """Refuse an `out_dir` that cannot be written, or whose disk is full.

    Raises:
        InputError: the message names what is in the way.
    """
    folder = Path(out_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a link to nowhere"
        raise InputError(f"out_dir={out_dir}: {existing} is {what}; name a folder")
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE:
        raise InputError(
            f"out_dir={out_dir}: {free / 1e6:.0f} MB are free there; make room for at least "
            f"{LEAST_FREE / 1e6:.0f} MB, or name a folder on another disk"
        )
    try:  # a trial write: permissions alone miss shared disks, quotas and long names
        with tempfile.TemporaryDirectory(dir=existing) as trial:
            make_folder(Path(trial) / folder.relative_to(existing))
    except (OSError, InputError) as error:
        raise InputError(
            f"out_dir={out_dir}: {existing} cannot be written ({error}); name another folder"
        ) from None


def make_folder(folder: Path) -> None:
    """Make a folder, with its parents, unless it exists.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from error


def write_atomically(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file atomically. Readers see the old file or the new one, even after a crash.

    Args:
        path: path of the file.
        content: whole content, or its pieces in order.
    """
    encoded = content.encode() if isinstance(content, str) else content
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        file.writelines([encoded] if isinstance(encoded, bytes) else encoded)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def lock_file(path: Path) -> FileLock:
    """Lock a file until the lock is released or this process ends.

    Raises:
        InputError: another process holds the lock, or the file cannot be written.
    """
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"{path.parent}: another process is writing here; wait for it or name another folder"
        ) from error
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; name another folder"
        ) from error
    return lock


def retry_io(action: Callable[[], Result], attempts: int = 4, wait_s: float = 0.5) -> Result:
    """Run an action, and again after growing pauses while it fails with a passing OSError.

    Args:
        action: function without arguments, which starts from the beginning each time.
        attempts: largest number of attempts.
        wait_s: seconds before the second attempt. The pause doubles each time.

    Raises:
        OSError: the last error, or an error of `FINAL` at once.
    """
    for attempt in range(attempts - 1):
        try:
            return action()
        except OSError as error:
            if error.errno in FINAL:
                raise
            time.sleep(wait_s * 2**attempt)
    return action()


def compute_file_checksum(path: Path) -> str:
    """Compute xxh3_64 of a file's bytes, as 16 hexadecimal digits."""
    with path.open("rb") as file:
        return compute_checksum(iter(partial(file.read, READ_BYTES), b""))


def compute_checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Compute xxh3_64 of concatenated parts, as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def load_json(path: Path) -> dict[str, Any] | None:
    """Load the object in a JSON file; None if there is no such file.

    Raises:
        InputError: the file is not JSON, or no object.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}; repair the file") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: holds a {type(content).__name__}, not an object; repair the file"
        )
    return content
