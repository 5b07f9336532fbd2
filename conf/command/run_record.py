"""Record of a run: its fingerprint, its provenance, and the command that comes next.

A fingerprint says what an artefact was made of, as flat JSON by dotted key: `target.*` of
`heads.target_model.identity`, `data.*`, and the settings. Checkpoints, heads, feature stores,
answers and results each store one. A command that continues or measures an artefact makes a new
fingerprint and compares both here.

Provenance adds settings, versions, git revision and checksums of code. The next command is a line
to paste, with the paths of the run that has ended.

This module needs neither hydra, omegaconf, rich nor torch.
"""

import ast
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conf.command.forms import PACKAGE, ROOT, list_arguments, name_commands
from conf.errors import InputError
from conf.files import split_gguf_path

_SECRET = re.compile(r"\b(hf_|sk-|wandb_v1_)[\w-]{8,}")
_CHECKSUM = re.compile(r"[0-9a-f]{32,}")
_UNKNOWN = ("target.revision", "target.weights", "target.adapter_weights")
"""Keys that may be None: checksum or revision of a model that is not on this machine or not from
the Hub. None on either side counts as equal."""
_NAMES = {
    "target.name": ("target.weights", "target.revision"),
    "target.adapter": ("target.adapter_weights",),
}
"""Keys that say where a model lies, each with the keys that identify the model better. If one of
those is known on both sides, the place is not compared."""
_PACKAGES = ("headsmith", "torch", "transformers", "accelerate")
EMBEDDED = ROOT / "data/embedded"
"""Folder of the default target and data, for unset `target.path` and `data.path`."""
PARENT_COMMAND_VARIABLE = "HEADSMITH_PART_OF"
"""Environment variable of a command that another command starts. The other one prints the next
command itself."""
PROMPTS_PLACEHOLDER, CHATS_PLACEHOLDER = "PROMPTS.jsonl", "CHATS.jsonl"
"""Placeholders of files that only the user knows: to measure on, and to train on."""
SERVER_SETTINGS = ("target.engine", "target.adapter_name", "target.relay")
"""Settings of a target whose layers a server runs."""
SERVER_SCRIPTS = ("eval/acceptance.py", "train/eagle.py")
"""Scripts of `NEXT_COMMANDS` that take a target on a server."""
PLAIN = re.compile(r"[\w./:@%+-]*")
"""Values that a shell and Hydra read without quotes."""


def make_fingerprint(**parts: Any) -> dict[str, Any]:
    """Make a fingerprint of named parts.

    Args:
        parts: e.g. `target` and `data`, each a dataclass or a mapping.

    Returns:
        JSON values by dotted key, which begins with the part's name.
    """
    return flatten_settings(to_json(parts))


def to_json(value: Any) -> Any:
    """Convert dataclasses, enums and paths to JSON values; mask what looks like a secret key."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [to_json(item) for item in value]
    if isinstance(value, str | Path):
        return _SECRET.sub(r"\1***", str(value))
    return value if value is None or isinstance(value, bool | int | float) else repr(value)


def flatten_settings(value: Any, key: str = "") -> dict[str, Any]:
    """Flatten nested settings to values by dotted key.

    Args:
        value: mapping, perhaps of mappings.
        key: dotted key of the mapping itself; empty at the top.
    """
    if not isinstance(value, Mapping):
        return {key: value}
    settings: dict[str, Any] = {}
    for name, item in value.items():
        settings |= flatten_settings(item, f"{key}.{name}" if key else name)
    return settings


def check_unchanged(
    holding: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    remedy: str = "type another out_dir",
) -> None:
    """Refuse to continue an artefact that was made in another way.

    Args:
        holding: start of the message, which names the folder and its content.
        before: fingerprint of the content so far.
        now: fingerprint of the content to come.
        remedy: what to type to begin anew.

    Raises:
        InputError: the message names each value that differs.
    """
    keys = find_changed_keys(before, now)
    if keys:
        raise InputError(
            f"{holding} made in another way: {format_changes(before, now, keys)}; {remedy}, "
            "or the setting as it was to continue"
        )


def find_changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Find the keys whose values differ in two fingerprints, in their order."""
    keys = dict.fromkeys([*before, *now])
    differing = [key for key in keys if before.get(key) != now.get(key)]
    unknown = [k for k in keys if k in _UNKNOWN and None in (before.get(k), now.get(k))]
    known = {key for key in keys if key in _UNKNOWN} - set(unknown)
    for name, better in _NAMES.items():
        if known & set(better) and before.get(name) and now.get(name):
            unknown.append(name)
    return [key for key in differing if key not in unknown]


def format_changes(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Format the values that two fingerprints have under some keys, for a message."""
    return "; ".join(
        f"{k} was {_format_changed_value(before.get(k))}, is {_format_changed_value(now.get(k))}"
        for k in keys
    )


def _format_changed_value(value: Any) -> str:
    """Format a value; shorten a checksum to 12 digits, which can be compared by eye."""
    return value[:12] if isinstance(value, str) and _CHECKSUM.fullmatch(value) else repr(value)


def collect_provenance(config: Any, target: str, data: Any) -> dict[str, Any]:
    """Collect everything needed to make a head or a result again.

    Args:
        config: settings of the run, a dataclass.
        target: name of the target.
        data: report about the data, a dataclass.

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
    """Return the git revision of this checkout, `+changes` behind it if files differ, or None.

    An installed package has a version instead.
    """
    if PACKAGE:
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*"]
    command.append("--dirty=+changes")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _find_package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def compute_code_checksum(files: Iterable[Path]) -> str:
    """Compute a checksum of Python files that ignores comments, docstrings and layout.

    Args:
        files: files of Python code. Their order changes the checksum.
    """
    checksums = [_hash_code(file.read_text(encoding="utf-8")) for file in files]
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()


@cache
def _hash_code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):  # a clone and a wheel share what they cache
            node.module = (node.module or "").removeprefix(PACKAGE)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_docstring(part)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_docstring(statement: ast.stmt) -> bool:
    """Tell whether a statement is a docstring, of a definition or below an attribute."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


NEXT_COMMANDS = {
    "regenerate": ("train/eagle.py", "train a head on these answers"),
    "capture": ("train/eagle.py", "train a head on these hidden states"),
    "train": ("eval/acceptance.py", "measure how many drafts the target accepts"),
    "acceptance": ("eval/speedup.py", "measure the seconds that these drafts save"),
    "tree_search": ("eval/speedup.py", "measure the seconds that this tree saves"),
    "speedup": ("scripts/export.py", "write the head for the engine that serves it"),
    "export": ("eval/serve.py", "once the server answers, check its drafts and measure it"),
    "acceptance again": ("eval/acceptance.py", "measure more prompts, 50 or more"),
    "speedup again": ("eval/speedup.py", "measure more prompts, 50 or more"),
    "speedup chain": ("eval/speedup.py", "measure the chain, which all engines run"),
    "serve again": ("eval/serve.py", "measure more prompts, 50 or more"),
    "serve alone": (
        "eval/serve.py", "start the same server without drafts, and measure it beside this one"
    ),
    "serve": ("scripts/push.py", "look at what would be published under your name"),
    "weak head": ("scripts/regenerate.py", "let the target answer more conversations to train on"),
    "dry run": ("scripts/push.py", "look at these files, then upload them"),
}  # fmt: skip
"""Script of the next command, and what it does, by the name of the one that has ended: `train` for
all trainings, `dry run` for that of push, and for what `eval/measure/verdict.py` concludes."""


def print_next_command(ended: str, settings: Mapping[str, Any]) -> None:
    """Print the command after one that has ended, unless another command has started it.

    Args:
        ended: name of the command that has ended, a key of `NEXT_COMMANDS`.
        settings: settings of the next command, by dotted key.
    """
    if PARENT_COMMAND_VARIABLE not in os.environ:
        script, words = NEXT_COMMANDS[ended]
        typed_line = format_command(script, settings)
        yours = [name for name in (PROMPTS_PLACEHOLDER, CHATS_PLACEHOLDER) if name in typed_line]
        words += f" (your file in place of {yours[0]})" if yours else ""
        print(f"\nnext, {words}:\n  {typed_line}", flush=True)  # noqa: T201


def format_command(script: str, settings: Mapping[str, Any]) -> str:
    """Format a command as it is typed.

    Settings that the script does not take, and paths of the embedded default, are skipped.
    """
    skipped = () if script in SERVER_SCRIPTS else SERVER_SETTINGS
    place = script if PACKAGE else list_arguments(script)[0]
    given = [
        format_setting(key, value)
        for key, value in settings.items()
        if key not in skipped and not is_embedded_path(value)
    ]
    start = "accelerate launch" if script.startswith("train/") else "python"
    return name_commands(" ".join([start, place, *given]))


def format_setting(key: str, value: Any) -> str:
    """Format a setting as `key=value`, quoted for a shell and for Hydra."""
    text = _quote_value(value)
    return f"{key}={text}" if PLAIN.fullmatch(text) else shlex.quote(f"{key}={text}")


def _quote_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_quote_value(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_quote_value, value))}]"
    text = format_value(value)
    if isinstance(value, str | Path) and not (text and PLAIN.fullmatch(text)):
        quoted = text.replace('"', '\\"')
        return f'"{quoted}"'
    return text


def format_value(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    return str(value)


def collect_changed_settings(config: Any, *names: str) -> dict[str, Any]:
    """Collect the settings of a run that differ from the defaults, by dotted key.

    Args:
        config: settings of the run, a dataclass.
        names: fields of `config` to look at; none means all.
    """
    changed: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if names and field.name not in names:
            continue
        if is_dataclass(value):
            changed |= {
                f"{field.name}.{key}": each for key, each in collect_changed_settings(value).items()
            }
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value != default:
            changed[field.name] = value
    return changed


def is_embedded_path(value: Any) -> bool:
    """Tell whether a value is a path of the embedded target or its data."""
    return isinstance(value, str | Path) and Path(value).is_relative_to(EMBEDDED)


def recipe_for(target: str) -> str:
    """Return the recipe of EAGLE heads that the engine of a target serves.

    llama.cpp, which serves GGUF files, has no place for the norms of EAGLE-3.1.
    """
    return "eagle3" if split_gguf_path(target) else "eagle3_1"


def prompts_for(target: str) -> dict[str, str]:
    """Return the setting of prompts for a next command that measures a target.

    The setting names a placeholder for the user's own prompts. The embedded target needs no
    setting, as it has prompts.
    """
    return {} if is_embedded_path(target) else {"data.path": PROMPTS_PLACEHOLDER}
