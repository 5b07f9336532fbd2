"""Checks of fields in results files. Each raises `MalformedRowError`."""

from collections.abc import Callable, Mapping
from typing import Any

from data.rows.field_checks import MalformedRowError, format_found_value

ROUNDING = 1e-6
MOST = 1e15
"""Upper bound of every count; larger values are errors."""


def parse_number(value: object, name: str, least: float = 0, most: float = MOST) -> float:
    """Check that a value is a number within limits."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        limits = f"of at least {least:g}" if most == MOST else f"from {least:g} to {most:g}"
        raise MalformedRowError(name, format_found_value(value), f"a number {limits}")
    return float(value)  # type: ignore[arg-type]


def parse_whole_number(value: object, name: str, least: int = 0, most: float = MOST) -> int:
    """Check that a value is an integer, which counters may write as 12.0."""
    number = parse_number(value, name, least, most)
    if number != int(number):
        raise MalformedRowError(name, format_found_value(value), "a whole number")
    return int(number)


def parse_fraction(value: object, name: str) -> float:
    """Check that a value is a number from 0 to 1."""
    return parse_number(value, name, 0, 1)


def parse_text(value: object, name: str) -> str:
    """Check that a value is a non-empty text."""
    if not isinstance(value, str) or not value.strip():
        raise MalformedRowError(name, format_found_value(value), "a text")
    return value


def parse_object(value: object, name: str, what: str = "an object") -> dict[str, Any]:
    """Check that a value is a JSON object."""
    if not isinstance(value, dict):
        raise MalformedRowError(name, format_found_value(value), what)
    return value


def parse_items(value: object, name: str, check: Callable[[object, str], Any]) -> list[Any]:
    """Check each item of a list."""
    if not isinstance(value, list):
        raise MalformedRowError(name, format_found_value(value), "a list")
    return [check(item, f"{name}[{place}]") for place, item in enumerate(value)]


def check_optional(row: Mapping[str, Any], path: str, check: Callable[..., Any], *how: Any) -> None:
    """Check a field named by a path, of which any part may be missing or null."""
    value: Any = row
    for name in path.split("."):
        value = None if value is None else value.get(name)
    if value is not None:
        check(value, path, *how)


def check_consistent(value: float, expected: float, name: str, of: str) -> None:
    """Refuse a figure that contradicts the figures it is computed from."""
    if abs(value - expected) > ROUNDING * max(1.0, abs(expected)):
        raise MalformedRowError(name, f"{value:g}", f"{expected:g}, as {of} give")
