"""Prepares files for publication: no local paths, no keys, no data."""

import json
import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from conf.command.run_record import to_json
from conf.errors import InputError

LOCAL_PATH = re.compile(
    r"""(?:(?:file:/*|(?<![\w./:-])~?)/|(?<!\w)[A-Za-z]:[/\\])   # where an absolute path starts
        (?:[^\s,;:'"\[\](){}=/\\]+[/\\]+)*                      # its folders
        ([^\s,;:'"\[\](){}=/\\]+)                               # its last name
    """,
    re.VERBOSE,
)

OWN_SERVER = re.compile(r"(https?://)(?!localhost|127\.)[^/\s,\]]+:\d+")


def scrub_provenance(provenance: dict[str, Any]) -> dict[str, Any]:
    """Publishable contents of a `headsmith.json`."""
    data = provenance.get("data")
    if isinstance(data, dict):
        # Malformed rows are quoted there; they are private data and not needed.
        provenance = {**provenance, "data": {k: v for k, v in data.items() if k != "bad"}}
    return dict(scrub_private_data(provenance))


def scrub_private_data(value: Any) -> Any:
    """Leave only the last name of every absolute local path in a JSON value, and mask keys.

    Also removes the hosts of URLs with a port, as these are private servers.
    """
    if isinstance(value, dict):
        return {_scrubbed_text(str(key)): scrub_private_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrub_private_data(item) for item in value]
    return _scrubbed_text(to_json(value)) if isinstance(value, str) else value


def _scrubbed_text(text: str) -> str:
    # A text that is one path, or key=path, may contain spaces; inside prose a path ends at them.
    text = OWN_SERVER.sub(r"\1HOST", text)
    key, equals, path = text.rpartition("=")
    if not re.search(r"[\s=]", key) and "\n" not in path:
        if path.startswith(("/", "~")):
            return f"{key}{equals}{PurePosixPath(path).name}"
        if PureWindowsPath(path).drive:
            return f"{key}{equals}{PureWindowsPath(path).name}"
    return LOCAL_PATH.sub(r"\1", text)


def load_json(path: Path) -> dict[str, Any] | None:
    """Read the object in a JSON file; None if there is no such file.

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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def link_file(source: Path, there: Path) -> None:
    """Place a large file there without copying it.

    A hard link keeps the checked contents even if training rewrites the head. Without hard links,
    or across file systems, it is a symbolic link.
    """
    try:
        os.link(source.resolve(), there)
    except OSError:
        there.symlink_to(source.resolve())
