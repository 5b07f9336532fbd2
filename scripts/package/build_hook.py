"""Builds the wheel: one package `headsmith` with the six folders below it (a hook of hatchling).

In a clone the folders are top-level packages, named `data` and `eval` among others, which must not
lie at the top of anybody's environment. The hook copies the folders and puts `headsmith.` before
the names of their modules in import statements. An editable installation keeps the names of the
clone, and gets `headsmith` as one module beside them.
"""

import ast
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("conf", "data", "eval", "heads", "scripts", "train")
PUBLIC = Path("scripts/package/headsmith.py")
"""Module of public names: `headsmith/__init__.py` of the wheel."""
PATH_LINE = "sys.path.insert(0, str(Path(__file__).resolve().parents["
"""Start of the line with which a script of a clone finds the folders."""


class PackageHook(BuildHookInterface):
    """Put the package into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files of the wheel in `build_data`.

        Args:
            version: `standard` or `editable`.
            build_data: settings of hatchling for this build.
        """
        root = Path(self.root)
        if version == "editable":
            build_data["force_include_editable"] = {str(root / PUBLIC): "headsmith.py"}
            return
        self.copies = TemporaryDirectory()  # kept until the wheel is written
        folder = Path(self.copies.name) / "headsmith"
        write_package(root, folder)
        build_data["force_include"][str(folder)] = "headsmith"


def write_package(root: Path, folder: Path) -> None:
    """Write the package `headsmith` of a checkout.

    Args:
        root: folder of the checkout, or of an unpacked source distribution.
        folder: new folder of the package.
    """
    for name in list_files(root):
        source, copy = root / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".py":
            copy.write_text(rename_imports(source.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(source, copy)
    public = (root / PUBLIC).read_text(encoding="utf-8")
    (folder / "__init__.py").write_text(rename_imports(public), encoding="utf-8")
    (folder / "py.typed").touch()
    (folder / PUBLIC).unlink()


def list_files(root: Path) -> list[str]:
    """List the files of the package, relative to the root: in a git checkout those git knows."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--", *FOLDERS]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [name for name in listed.split("\0") if (root / name).is_file()]
    files = [path for name in FOLDERS for path in (root / name).rglob("*") if path.is_file()]
    kept = [path for path in files if path.suffix != ".pyc"]
    return sorted(path.relative_to(root).as_posix() for path in kept)


def rename_imports(text: str) -> str:
    """Put `headsmith.` before the modules of `FOLDERS` in the import statements of a module.

    The line that puts a clone on the path of imports goes.

    Raises:
        ValueError: a module is imported as `import conf.errors`, whose uses would need a change.
    """
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names if each.name.split(".")[0] in FOLDERS]
            if names:
                raise ValueError(
                    f"line {node.lineno}: import {names[0]}: write it as from ... import"
                )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOLDERS:
            line, start = lines[node.lineno - 1], node.col_offset + len("from ")
            lines[node.lineno - 1] = f"{line[:start]}headsmith.{line[start:]}"
    return "".join(line for line in lines if not line.startswith(PATH_LINE))
