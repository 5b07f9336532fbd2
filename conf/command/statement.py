"""Statements of what an artefact was made of, as flat JSON: stored with it, and compared here.

A statement holds values by dotted key: `target.*` of `heads.target_model.identity`, `data.*`, and
the settings. Checkpoints, heads, feature stores, answers and results keep one; whoever goes on from
them, or measures them, states anew and asks here what has changed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
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
