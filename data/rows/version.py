"""Version of a published dataset: its commit on the Hub, or the commit of a local copy."""

import re
from pathlib import Path

from conf.files import find_local_path
from data.rows.files import DATA_ENDINGS

COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def find_dataset_revision(path: str) -> str | None:
    """Find the commit of a Hub dataset, or the commit that a local path is a copy of.

    Args:
        path: `data.path`: Hub dataset id, clone, or file or folder in the Hub client's cache or
            written by `hf download --local-dir`.

    Returns:
        40 hexadecimal digits; None if unknown, or if the Hub cannot be reached.
    """
    local = find_local_path("data.path", path, DATA_ENDINGS)
    if local is None:
        return _on_the_hub(path)
    if found := SNAPSHOT.search(local.absolute().as_posix()):
        return found[1]
    if (local / ".git").is_dir():  # a .git further up belongs to the user's own repository
        return _checked_out(local / ".git")
    places = [place / ".cache/huggingface/download" for place in (local, *local.absolute().parents)]
    return next((_find_downloaded_commit(place) for place in places[:3] if place.is_dir()), None)


def _on_the_hub(path: str) -> str | None:
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(path).sha
    except OSError:
        return None


def _checked_out(git: Path) -> str | None:
    """Commit of a clone."""
    head = _read_file_text(git / "HEAD")
    if not head.startswith("ref: "):
        return _parse_commit(head)
    name = head.removeprefix("ref: ").strip()
    packed = re.search(
        rf"^([0-9a-f]{{40}}) {re.escape(name)}$", _read_file_text(git / "packed-refs"), re.M
    )
    return _parse_commit(_read_file_text(git / name)) or (packed[1] if packed else None)


def _find_downloaded_commit(notes: Path) -> str | None:
    """Commit that the Hub's client noted for every file; None if they differ."""
    commits = {_parse_commit(_read_file_text(file)) for file in notes.rglob("*.metadata")}
    return commits.pop() if len(commits) == 1 else None


def _parse_commit(text: str) -> str | None:
    found = COMMIT.match(text)
    return found[0] if found else None


def _read_file_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
