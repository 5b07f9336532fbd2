"""What a path means: a place on this machine, or the id of a Hub repository."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from conf.errors import InputError

HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")
"""`name` or `owner/name`, as the Hub has them."""
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
    if not HUB_ID.fullmatch(path):
        what = "file or folder" if endings else "folder"
        raise InputError(f"{key}={path}: no such {what}, and not a Hub id (name or owner/name)")
    return None


def check_room(out_dir: str) -> None:
    """Refuses a folder that cannot be written, or whose disk is full.

    Raises:
        InputError: with what is in the way.
    """
    folder = Path(out_dir).absolute()
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
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
