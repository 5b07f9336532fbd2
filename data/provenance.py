"""What a head or a result was made from and with; `headsmith.json` beside a head."""

import re
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("headsmith", "torch", "transformers", "accelerate")
_SECRET = re.compile(r"\b(hf_|sk-|wandb_v1_)[\w-]{8,}")


def plain(value: Any) -> Any:
    """Dataclasses, enums and paths as what JSON holds; anything that looks like a key masked."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, str | Path):
        return _SECRET.sub(r"\1***", str(value))
    return value if value is None or isinstance(value, bool | int | float) else repr(value)


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    if not isinstance(value, dict):
        return {key: value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= flat(item, f"{key}.{name}" if key else name)
    return found


def provenance(config: Any, target: str, data: Any) -> dict[str, Any]:
    """Everything needed to make the head again.

    Args:
        config: the resolved configuration, a dataclass.
        target: name of the target.
        data: the data report, a dataclass.

    Returns:
        JSON content without secrets.
    """
    return {
        "config": plain(config),
        "target": target,
        "data": plain(data),
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": sys.version.split()[0],
        "argv": plain(sys.argv),
        "git": git_revision(),
    }


def git_revision() -> str | None:
    """The revision of this checkout, with `+changes` if it has any; None outside git."""
    root = Path(__file__).resolve().parents[1]
    try:
        revision = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{revision}+changes" if changes else revision


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return found.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
