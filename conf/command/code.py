"""What code does, as a key of what is kept as long as it does the same."""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def code_key(files: Iterable[Path]) -> str:
    """A checksum of Python files, which comments, docstrings and layout do not change.

    Args:
        files: in an order of their own.
    """
    found = [_checksum(file.read_text(encoding="utf-8")) for file in files]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


@cache
def _checksum(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, or words below an attribute."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
