"""Statements of what an artefact was made of, as flat JSON: stored with it, and compared here.

A statement holds values by dotted key: `target.*` of `heads.target_model.identity`, `data.*`, and
the settings. Checkpoints, heads, feature stores, answers and results keep one; whoever goes on from
them, or measures them, states anew and asks here what has changed.
"""

import ast
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conf.errors import InputError

_SECRET = re.compile(r"\b(hf_|sk-|wandb_v1_)[\w-]{8,}")
_CHECKSUM = re.compile(r"[0-9a-f]{32,}")
_UNKNOWN = ("target.revision", "target.weights", "target.adapter_weights")
"""Nothing is known of them where a model is not on this machine, or not from the Hub."""
_NAMES = {
    "target.name": ("target.weights", "target.revision"),
    "target.adapter": ("target.adapter_weights",),
}
"""Where a model lies, which says nothing once one of the others is known."""


def to_json(value: Any) -> Any:
    """Makes JSON of dataclasses, enums and paths; masks anything that looks like a secret key."""
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
    """Lays out nested settings by dotted keys."""
    if not isinstance(value, Mapping):
        return {key: value}
    settings: dict[str, Any] = {}
    for name, item in value.items():
        settings |= flatten_settings(item, f"{key}.{name}" if key else name)
    return settings


def make_fingerprint(**parts: Any) -> dict[str, Any]:
    """States some parts, e.g. `target` and `data`, each a dataclass or a mapping."""
    return flatten_settings(to_json(parts))


def find_changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists the keys whose values differ in two statements, in their order.

    Args:
        before: of what was made.
        now: of what would be made.
    """
    keys = dict.fromkeys([*before, *now])
    differing = [key for key in keys if before.get(key) != now.get(key)]
    unknown = [k for k in keys if k in _UNKNOWN and None in (before.get(k), now.get(k))]
    known = {key for key in keys if key in _UNKNOWN} - set(unknown)
    for name, better in _NAMES.items():
        if known & set(better) and before.get(name) and now.get(name):
            unknown.append(name)
    return [key for key in differing if key not in unknown]


def format_changes(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Words the values of two statements under some keys, for people."""
    return "; ".join(
        f"{k} was {_format_changed_value(before.get(k))}, is {_format_changed_value(now.get(k))}"
        for k in keys
    )


def check_unchanged(
    holds: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    remedy: str = "type another out_dir",
) -> None:
    """Refuses to go on with what was made in another way.

    Args:
        holds: which folder holds what, the beginning of the message.
        before: what decided the content so far.
        now: what would decide the rest.
        remedy: what to type to begin anew.

    Raises:
        InputError: naming each value that differs.
    """
    keys = find_changed_keys(before, now)
    if keys:
        raise InputError(
            f"{holds} made in another way: {format_changes(before, now, keys)}; {remedy}, "
            "or the setting as it was to continue"
        )


def _format_changed_value(value: Any) -> str:
    """Shortens a checksum to what can be compared by eye."""
    return value[:12] if isinstance(value, str) and _CHECKSUM.fullmatch(value) else repr(value)


def format_value(value: Any) -> str:
    """Words a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    return str(value)


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


ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "data/embedded"
"""Holds what is taken where `target.path` and `data.path` are unset."""
PARENT_COMMAND_VARIABLE = "HEADSMITH_PART_OF"
"""Environment variable of a command that another one starts, which knows what comes next."""
PROMPTS_PLACEHOLDER = "PROMPTS.jsonl"
"""In place of a path that only the user knows."""
OF_SERVERS = ("target.engine", "target.adapter_name", "target.relay")
"""Settings of a target whose layers a server runs."""
SERVED = ("eval/acceptance.py", "train/eagle.py")
"""Scripts of `NEXT` that take such a target."""
PLAIN = re.compile(r"[\w./:@%+-]*")


@dataclass(frozen=True)
class NextCommand:
    """A command that comes after another one.

    Attributes:
        script: of the command.
        words: what it does, as an order.
    """

    script: str
    words: str


NEXT_COMMANDS = {
    "regenerate": NextCommand("train/eagle.py", "train a head on these answers"),
    "capture": NextCommand("train/eagle.py", "train a head on these hidden states"),
    "train": NextCommand("eval/acceptance.py", "measure how many drafts the target accepts"),
    "acceptance": NextCommand("eval/speedup.py", "measure the seconds that these drafts save"),
    "tree_search": NextCommand("eval/speedup.py", "measure the seconds that this tree saves"),
    "calibrate": NextCommand("eval/speedup.py", "measure the seconds that cut chains save"),
    "speedup": NextCommand("scripts/export.py", "write the head for the engine that serves it"),
    "export": NextCommand(
        "eval/serve.py", "once the server answers, check its drafts and measure it"
    ),
    "dry run": NextCommand("scripts/push.py", "look at these files, then upload them"),
}
"""By what has ended: the name of a command, `train` for all trainings, or a dry run of push."""


def print_next_command(ended: str, settings: Mapping[str, Any]) -> None:
    """Print the step after a command, unless another command has started this one.

    Args:
        ended: a key of `NEXT`.
        settings: of the next command, by dotted key.
    """
    if PARENT_COMMAND_VARIABLE not in os.environ:
        typed_line = format_command(NEXT_COMMANDS[ended].script, settings)
        yours = (
            f" (your file in place of {PROMPTS_PLACEHOLDER})"
            if PROMPTS_PLACEHOLDER in typed_line
            else ""
        )
        print(f"\nnext, {NEXT_COMMANDS[ended].words}{yours}:\n  {typed_line}", flush=True)  # noqa: T201


def format_command(script: str, settings: Mapping[str, Any]) -> str:
    """Write a command as it is typed, without what it does not take or would take anyway."""
    left_out = () if script in SERVED else OF_SERVERS
    path = ROOT / script
    place = os.path.relpath(path) if Path.cwd().is_relative_to(ROOT) else str(path)
    given = [
        format_setting(key, value)
        for key, value in settings.items()
        if key not in left_out and not is_embedded_path(value)
    ]
    start = "accelerate launch" if script.startswith("train/") else "python"
    return " ".join([start, place, *given])


def collect_changed_settings(config: Any, *names: str) -> dict[str, Any]:
    """Collect the settings of a run that are not the defaults, by dotted key.

    Args:
        config: the run's settings.
        names: of its settings, or of groups of them; none means all.
    """
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if names and field.name not in names:
            continue
        if is_dataclass(value):
            found |= {
                f"{field.name}.{key}": each for key, each in collect_changed_settings(value).items()
            }
            continue
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if value != usual:
            found[field.name] = value
    return found


def format_setting(key: str, value: Any) -> str:
    """Write a setting as a shell and Hydra take it."""
    if isinstance(value, dict):
        text = f"{{{', '.join(f'{name}: {_quote_value(each)}' for name, each in value.items())}}}"
    elif isinstance(value, list):
        text = f"[{','.join(map(_quote_value, value))}]"
    else:
        text = _quote_value(value)
    return f"{key}={text}" if PLAIN.fullmatch(text) else shlex.quote(f"{key}={text}")


def _quote_value(value: Any) -> str:
    if isinstance(value, list | dict):
        return format_setting("", value).strip("'=")
    text = format_value(value)
    if isinstance(value, str | Path) and not PLAIN.fullmatch(text):
        quoted = text.replace('"', '\\"')
        return f'"{quoted}"'
    return text


def is_embedded_path(value: Any) -> bool:
    """Tell whether a value is the place of the embedded target, or of its data."""
    return isinstance(value, str | Path) and Path(value).is_relative_to(EMBEDDED)


def prompts_for(target: str) -> dict[str, str]:
    """Name prompts to measure on: the user's own, unless the target is the embedded one."""
    return {} if is_embedded_path(target) else {"data.path": PROMPTS_PLACEHOLDER}
