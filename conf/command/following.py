"""The step after a command: a line to paste, with the paths of the run that has ended."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from conf.command.help import format_value

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
