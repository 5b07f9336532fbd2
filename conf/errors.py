"""Errors that commands print without a traceback."""

import os
import re
import shutil
import textwrap
from typing import TextIO


class InputError(ValueError):
    """The user's input or settings are wrong."""


BOLD, PLAIN = "\033[1m", "\033[0m"
KEY = r"[a-z_]+(?:\.\w+)*"
SETTING = re.compile(
    rf"^{KEY}(?=:)|(?<![\w./=\-]){KEY}=(?:\[[^\]]*\]|\{{[^}}]*\}}|\S*?(?=[:;,.)]*(?:\s|$)))"
)
"""A setting with its value, or the one that a message begins with."""


def format_error(error: InputError, stream: TextIO) -> str:
    """Word an error for a stream.

    On a terminal lines are as wide as it is and settings are bold; elsewhere every line stays
    whole, for logs and `grep`.
    """
    begin, text = "error: ", str(error)
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return begin + text
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * len(begin)
        lines += textwrap.wrap(
            line, width, initial_indent=indent, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
        )  # fmt: skip
    wrapped = "\n".join(lines)[len(begin) :]
    return begin + SETTING.sub(lambda found: f"{BOLD}{found[0]}{PLAIN}", wrapped)
