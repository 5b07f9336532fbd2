"""Checks of single settings."""

from collections.abc import Callable, Iterable
from typing import Any

from conf.errors import InputError

AUTO = "auto"
"""A setting that is chosen once the target is known."""
ABSENT: Any = None
"""A setting that a class lacks and some of its children have; without a type it is no field."""


def positive(prefix: str, config: object, *names: str) -> None:
    """Refuses numbers of 0 and below; unset ones pass.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, names, lambda value: value <= 0, "above 0")


def not_negative(prefix: str, config: object, *names: str) -> None:
    """Refuses numbers below 0; unset ones pass.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, names, lambda value: value < 0, "at least 0")


def below_one(prefix: str, config: object, name: str) -> None:
    """Refuses a number below 0 or from 1 on; an unset one passes.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, (name,), lambda value: not 0 <= value < 1, "from 0 to below 1")


def share(prefix: str, config: object, *names: str) -> None:
    """Refuses numbers below 0 or above 1.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, names, lambda value: not 0 <= value <= 1, "from 0 to 1")


def _refuse(
    prefix: str, config: object, names: Iterable[str], bad: Callable[[Any], bool], allowed: str
) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and bad(value):
            key = f"{prefix}.{name}".lstrip(".")
            raise InputError(f"{key}={value}: must be {allowed}")
