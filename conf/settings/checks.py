"""Checks of single settings, and the setting that all commands share.

The checks name the setting, its value and what is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conf.errors import InputError

AUTO = "auto"
"""Marks a setting that is chosen once the target is known."""
ABSENT: Any = None
"""Marks a setting that only some subclasses have. It has no type, so it is no dataclass field."""


@dataclass
class ComputingRun:
    """A command that computes with torch."""

    num_threads: int | str = field(default=AUTO, kw_only=True)
    """Processor threads of a process. `auto`: under a launcher that leaves one, the cores divided
    among the processes of the machine; otherwise what OMP_NUM_THREADS says, or all cores."""


def _check_values(
    is_wrong: Callable[[Any], bool], allowed: str, prefix: str, config: object, *names: str
) -> None:
    """Refuse wrong numbers in some fields of settings. None passes.

    Args:
        is_wrong: function that tells whether a number is wrong.
        allowed: numbers that are not, for the message.
        prefix: section of the settings, for the message.
        config: settings, a dataclass.
        names: fields to check.

    Raises:
        InputError: the message has the key, the value and what is allowed.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and is_wrong(value):
            key = f"{prefix}.{name}".lstrip(".")
            raise InputError(f"{key}={value}: must be {allowed}")


check_positive = partial(_check_values, lambda value: value <= 0, "above 0")
check_not_negative = partial(_check_values, lambda value: value < 0, "at least 0")
check_below_one = partial(_check_values, lambda value: not 0 <= value < 1, "from 0 to below 1")
check_fraction = partial(_check_values, lambda value: not 0 <= value <= 1, "from 0 to 1")
