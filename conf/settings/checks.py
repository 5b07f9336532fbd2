"""Checks of single settings, and the setting that all commands share.

The checks name the setting, its value and what is allowed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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


def check_positive(prefix: str, config: object, *names: str) -> None:
    """Refuse numbers of 0 and below in some fields of settings. None passes.

    Args:
        prefix: section of the settings, for the message.
        config: settings, a dataclass.
        names: fields to check.

    Raises:
        InputError: the message has the key, the value and what is allowed.
    """
    _check_values(prefix, config, names, lambda value: value <= 0, "above 0")


def check_not_negative(prefix: str, config: object, *names: str) -> None:
    """Refuse numbers below 0 in some fields of settings. None passes.

    Args:
        prefix: section of the settings, for the message.
        config: settings, a dataclass.
        names: fields to check.

    Raises:
        InputError: the message has the key, the value and what is allowed.
    """
    _check_values(prefix, config, names, lambda value: value < 0, "at least 0")


def check_below_one(prefix: str, config: object, name: str) -> None:
    """Refuse a number outside [0, 1) in a field of settings. None passes.

    Args:
        prefix: section of the settings, for the message.
        config: settings, a dataclass.
        name: field to check.

    Raises:
        InputError: the message has the key, the value and what is allowed.
    """
    _check_values(prefix, config, (name,), lambda value: not 0 <= value < 1, "from 0 to below 1")


def check_fraction(prefix: str, config: object, *names: str) -> None:
    """Refuse numbers outside [0, 1] in some fields of settings. None passes.

    Args:
        prefix: section of the settings, for the message.
        config: settings, a dataclass.
        names: fields to check.

    Raises:
        InputError: the message has the key, the value and what is allowed.
    """
    _check_values(prefix, config, names, lambda value: not 0 <= value <= 1, "from 0 to 1")


def _check_values(
    prefix: str, config: object, names: Iterable[str], bad: Callable[[Any], bool], allowed: str
) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and bad(value):
            key = f"{prefix}.{name}".lstrip(".")
            raise InputError(f"{key}={value}: must be {allowed}")
