"""How commands are named and started: by file in a clone, by module where Headsmith is installed.

All texts in the code name a command by its file, such as `scripts/export.py`. What an installed
Headsmith prints names the form that was typed: `python -m headsmith.scripts.export`, or
`headsmith export`.

This module needs neither hydra nor torch.
"""

import os
import re
from pathlib import Path

PACKAGE = __name__.removesuffix("conf.command.forms")
"""Start of the names of all modules: empty in a clone, `headsmith.` where it is installed."""
ROOT = Path(__file__).resolve().parents[2]
"""Folder of `conf`, `data`, `eval`, `heads`, `scripts` and `train`."""
CONSOLE_VARIABLE = "HEADSMITH_CONSOLE"
"""Environment variable of a command that the console script `headsmith` has started."""
_COMMAND = re.compile(
    r"(?P<start>accelerate launch (?P<options>(?:-\S+ )*)|python )?"
    r"(?<![\w/])(?P<script>(?:train|eval|scripts)/[\w/]+)\.py\b"
)
_LAUNCH_FILE = re.compile(r"(?<![\w/])conf/accelerate/\w+\.yaml\b")
_SHORT_NAMES = {"scripts/contest/run": "contest", "scripts/zoo/check": "zoo"}


def name_commands(text: str) -> str:
    """Name the commands of a text, which it names by file, in the form that was typed.

    Files of `conf/accelerate` get their whole path where Headsmith is installed.
    """
    if not PACKAGE:
        return text
    return _COMMAND.sub(_name_command, _LAUNCH_FILE.sub(lambda file: str(ROOT / file[0]), text))


def _name_command(match: re.Match[str]) -> str:
    start, options, script = match["start"] or "", match["options"], match["script"]
    if CONSOLE_VARIABLE in os.environ and not options:
        return f"headsmith {shorten_script(script)}"
    return f"{start}{'-m ' if start else ''}{PACKAGE}{script.replace('/', '.')}"


def shorten_script(script: str) -> str:
    """Shorten `train/eagle`, a script without its ending, to what follows `headsmith`."""
    folder, _, name = script.partition("/")
    short = _SHORT_NAMES.get(script, name)
    return f"train {short}" if folder == "train" else short


def list_arguments(script: str) -> list[str]:
    """List the arguments with which Python, or accelerate's launcher, starts a script.

    Args:
        script: path of the script in a clone, such as `train/eagle.py`.
    """
    if not PACKAGE:
        path = ROOT / script
        return [os.path.relpath(path) if Path.cwd().is_relative_to(ROOT) else str(path)]
    return ["-m", PACKAGE + script.removesuffix(".py").replace("/", ".")]
