"""Provenance of heads and results: settings, versions, git; and checksums of code."""

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conf.command.statement import to_json

_PACKAGES = ("headsmith", "torch", "transformers", "accelerate")


def collect_provenance(config: Any, target: str, data: Any) -> dict[str, Any]:
    """Collects everything needed to make a head or a result again.

    Args:
        config: the resolved configuration, a dataclass.
        target: name of the target.
        data: the data report, a dataclass.

    Returns:
        JSON content without secrets.
    """
    return {
        "config": to_json(config),
        "target": target,
        "data": to_json(data),
        "versions": {name: _find_package_version(name) for name in _PACKAGES},
        "python": sys.version.split()[0],
        "argv": to_json(sys.argv),
        "git": git_revision(),
    }


def git_revision() -> str | None:
    """The revision of this checkout, with `+changes` if it has any; None outside git."""
    root = Path(__file__).resolve().parents[2]
    try:
        revision = _run_git(root, "rev-parse", "HEAD")
        changes = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{revision}+changes" if changes else revision


def _run_git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _find_package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def compute_code_checksum(files: Iterable[Path]) -> str:
    """A checksum of Python files, which comments, docstrings and layout do not change.

    Args:
        files: in an order of their own.
    """
    checksums = [_hash_code(file.read_text(encoding="utf-8")) for file in files]
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()


@cache
def _hash_code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_docstring(part)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_docstring(statement: ast.stmt) -> bool:
    """Also of those below attributes."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
