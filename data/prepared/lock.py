"""Lock between machines: a file whose time stamp its holder keeps updating.

System locks do not work on every network file system. This lock can be held twice after a holder
was cut off for a minute. Use it to save work, not to protect data.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT_S = 5.0
STALE_S = 60.0
"""Seconds without an update after which a holder counts as dead."""
POLL_S = 0.2


@contextmanager
def hold_lock(
    path: Path, ready: Callable[[], bool], waiting: Callable[[str], None]
) -> Iterator[bool]:
    """Hold a lock, or wait until its holder's result is ready.

    Args:
        path: path of the lock.
        ready: function that tells whether the result is ready.
        waiting: function called once with the name of the holder.

    Yields:
        Whether this process holds the lock.

    Raises:
        OSError: the folder cannot be written.
    """
    mine = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
    if not _take_lock(path, mine, ready, waiting):
        yield False
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield True
    finally:
        done.set()
        beating.join()
        if _read_holder(path)[0] == mine:
            path.unlink(missing_ok=True)


def _take_lock(
    path: Path, mine: str, ready: Callable[[], bool], waiting: Callable[[str], None]
) -> bool:
    seen, since, told = ("", 0), time.monotonic(), False
    while not _create_lock_file(path, mine):
        if ready():
            return False
        holder, now = _read_holder(path), time.monotonic()
        if holder != seen:
            # Clocks of machines differ, so the stamp only has to move, as seen from here.
            seen, since = holder, now
        host, pid, _ = f"{holder[0]}  ".split(" ", 2)
        if now - since > STALE_S or _is_dead(host, pid):
            path.unlink(missing_ok=True)
            continue
        if pid and not told:
            told = True
            waiting(f"process {pid} on {host}")
        time.sleep(POLL_S)
    return True


def _create_lock_file(path: Path, mine: str) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(mine)
    return True


def _read_holder(path: Path) -> tuple[str, int]:
    """Holder and time of its last update; an empty name if the file is gone."""
    with suppress(FileNotFoundError):
        return path.read_text(), path.stat().st_mtime_ns
    return "", 0


def _is_dead(host: str, pid: str) -> bool:
    if host != socket.gethostname() or not pid:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
