"""Files and folders: what a path names, writes that lose nothing, locks and checksums."""

import errno
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
import xxhash

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
LOCK_NAME = ".lock"
"""Name of the file that a process holds while it writes into a folder."""
BEAT_S = 5.0
"""Seconds between signs of life of a lock's owner."""
STALE_S = 60.0
"""Seconds without a sign of life after which an owner on another machine counts as dead."""
POLL_S = 0.2
"""Seconds between looks at a lock that another process holds."""
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


def check_empty_folder(out_dir: str) -> None:
    """Refuse an `out_dir` that is a file, or a folder with files.

    Raises:
        InputError: names the folder.
    """
    path = Path(out_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"out_dir={out_dir}: is not an empty folder; choose another folder")


def make_folder(folder: Path) -> None:
    """Make a folder, with its parents, unless it exists.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from error


def write_atomically(
    path: Path, content: str | bytes | Iterable[bytes | memoryview], *, shared: bool = False
) -> None:
    """Write a file atomically. Readers see the old file or the new one, even after a crash.

    Args:
        path: path of the file.
        content: whole content, or its pieces in order.
        shared: whether other processes may write the file at the same time.

    Raises:
        OSError: the file cannot be written. Nothing of it is left.
    """
    encoded = content.encode() if isinstance(content, str) else content
    partial = path.with_name(
        f"{path.name}.{uuid.uuid4().hex}.tmp" if shared else f"{path.name}.tmp"
    )
    try:
        with partial.open("wb") as file:
            file.writelines([encoded] if isinstance(encoded, bytes) else encoded)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class LockOwner:
    """Process that a lock file names.

    Attributes:
        text: content of the file: host, process id, random token, start of the process, machine.
        stamp: time of the owner's last sign of life, in ns of the file system's clock.
    """

    text: str
    stamp: int

    def __str__(self) -> str:
        host, pid = self._fields[:2]
        return f"process {pid} on {host}" if pid else "a process that has not written its name yet"

    @property
    def _fields(self) -> list[str]:
        return f"{self.text}{' ' * 4}".split(" ", 4)

    def is_alive(self) -> bool | None:
        """Tell whether the process lives; None for a process of another machine.

        A process id alone may be another process's by now, so the start of the process counts too.
        A container may have its host's name, but not its processes, so its machine is another.
        """
        host, pid, _, start, machine = self._fields
        if host != socket.gethostname() or machine.strip() not in ("", _find_machine()):
            return None
        found = _find_process_start(pid)
        return start in ("", found) if found else _is_hidden_process(pid)


class HeldLock:
    """Lock that this process holds until `release`, or until its end.

    A thread moves the file's time stamp every `BEAT_S` seconds, so that other machines see that the
    owner lives. After `STALE_S` seconds without a sign of life another machine takes the lock over.

    Args:
        path: the lock file, which this process has written.
        text: its content, which names host and process.
    """

    def __init__(self, path: Path, text: str) -> None:
        done, pid = threading.Event(), os.getpid()

        def give_signs() -> None:
            while not done.wait(BEAT_S):
                with suppress(OSError):
                    os.utime(path)

        thread = threading.Thread(target=give_signs, daemon=True)
        thread.start()

        def release() -> None:
            if os.getpid() != pid:  # a fork holds nothing
                return
            done.set()
            thread.join()
            owner = find_lock_owner(path)
            if owner is not None and owner.text == text:
                path.unlink(missing_ok=True)

        self.release = weakref.finalize(self, release)  # also at the end of the interpreter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(path: Path) -> Iterator[HeldLock | tuple[LockOwner, bool]]:
    """Try to take a lock that another process may hold, once for each item that is asked for.

    The lock of a dead owner is taken over.

    Yields:
        The lock, at last. Before that, the owner at this look, and whether it is known to live:
        False until a process of another machine has given a sign.

    Raises:
        OSError: the lock file cannot be written.
    """
    text = (
        f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex} "
        f"{_find_process_start(os.getpid())} {_find_machine()}"
    )
    known, since, lives = None, 0.0, False
    while True:
        with suppress(FileExistsError):
            with path.open("x") as file:
                file.write(text)
            yield HeldLock(path, text)
            return
        owner, now = find_lock_owner(path), time.monotonic()
        if owner is None:
            continue
        alive = owner.is_alive()
        if owner != known:
            # Clocks of machines differ, so the stamp only has to move, as seen from here.
            alive = True if alive is None and known is not None else alive
            known, since, lives = owner, now, bool(alive)
        if alive is False or (alive is None and now - since > STALE_S):
            _remove_dead(path, owner)
        else:
            yield owner, lives


def _remove_dead(path: Path, owner: LockOwner) -> None:
    """Remove the lock of a dead owner, unless another process has taken it over meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if aside.read_text() == owner.text:
            aside.unlink()
        else:
            aside.replace(path)


def find_lock_owner(path: Path) -> LockOwner | None:
    """Find the owner that a lock file names; None without a file."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return LockOwner(path.read_text(), path.stat().st_mtime_ns)
    return None


def make_lock_error(path: Path, owner: LockOwner) -> InputError:
    """Make the error about a lock file's living owner."""
    return InputError(
        f"{path.parent}: another process is writing here: {owner}; wait for its end, or name "
        f"another folder (if its machine has died, start again: the next start waits {STALE_S:.0f} "
        "s for a sign of life and goes on)"
    )


def lock_file(path: Path) -> HeldLock:
    """Lock a file until the lock is released or this process ends.

    A dead owner's lock is taken over. A process of this machine is looked up. A process of another
    machine is dead if it gives no sign of life for `STALE_S`, for which this function waits.

    Raises:
        InputError: another process holds the lock, or the file cannot be written.
    """
    try:
        for found in try_lock(path):
            if isinstance(found, HeldLock):
                return found
            owner, lives = found
            if lives:
                raise make_lock_error(path, owner)
            time.sleep(POLL_S)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; name another folder"
        ) from error
    raise AssertionError


def _find_process_start(pid: str | int) -> str:
    """Find when a process of this machine started, in its own units; empty if it has ended."""
    try:
        if not Path("/proc/self/stat").exists():
            return str(psutil.Process(int(pid)).create_time())
        # Ticks since the machine's start, which no change of its clock moves.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, ValueError, IndexError, psutil.Error):
        return ""


def _is_hidden_process(pid: str) -> bool:
    """Tell whether a process is another user's, which some machines do not show."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, ValueError, OverflowError):
        pass
    return False


@cache
def _find_machine() -> str:
    """Find the start of this machine and its table of processes; empty where unknown."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


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


def is_file_whole(path: Path, size: int, checksum: str) -> bool:
    """Tell whether a file is there with this size in bytes and this xxh3_64."""
    return (
        path.is_file() and path.stat().st_size == size and compute_file_checksum(path) == checksum
    )


def compute_checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Compute xxh3_64 of concatenated parts, as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def load_json(path: Path, setting: str = "") -> dict[str, Any] | None:
    """Load the object in a JSON file; None if there is no such file.

    Args:
        path: the file.
        setting: "key=value: " of the setting that leads to the file, for errors.

    Raises:
        InputError: the file cannot be read, is not JSON, or no object.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(retry_io(partial(path.read_text, encoding="utf-8")))
    except OSError as error:
        raise InputError(
            f"{setting}{path}: cannot be read: {error.strerror}; make it readable"
        ) from error
    except ValueError as error:
        raise InputError(f"{setting}{path}: not JSON: {error}; repair the file") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{setting}{path}: holds a {type(content).__name__}, not an object; repair the file"
        )
    return content
