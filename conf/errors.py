"""Errors that commands print without a traceback, and how a terminal shows them.

All messages have one pattern: setting=value: what is wrong; what is allowed; what to type. This
module needs neither hydra nor rich.
"""

import os
import re
import shutil
import textwrap
from typing import TextIO

from conf.command.forms import name_commands


class InputError(ValueError):
    """The user's input or settings are wrong."""


BOLD, PLAIN = "\033[1m", "\033[0m"
KEY = r"[a-z_]+(?:\.\w+)*"
SETTING = re.compile(
    rf"^{KEY}(?=:)|(?<![\w./=\-]){KEY}=(?:\[[^\]]*\]|\{{[^}}]*\}}|\S*?(?=[:;,.)]*(?:\s|$)))"
)
"""Setting with its value anywhere in a message, or setting alone at the message's start."""


def format_error(error: InputError, stream: TextIO) -> str:
    """Format an error as the text that is printed to a stream.

    On a terminal, lines are wrapped to its width and settings are bold. Elsewhere every line stays
    whole, for logs and `grep`.
    """
    prefix, text = "error: ", name_commands(str(error))
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return prefix + text
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * len(prefix)
        lines += textwrap.wrap(
            line, width, initial_indent=indent, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
        )  # fmt: skip
    wrapped = "\n".join(lines)[len(prefix) :]
    return prefix + SETTING.sub(lambda match: f"{BOLD}{match[0]}{PLAIN}", wrapped)
