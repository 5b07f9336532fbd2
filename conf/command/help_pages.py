"""Pages of `--help`: every setting of a command, with the words of its dataclass."""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

import conf.settings
from conf.command.run_record import format_value
from conf.errors import InputError

FIRST, LAST = ("target", "data", "prompts", "head"), ("out_dir", "seed")
"""What is needed first, behind what must be set, and last; the rest as its dataclass has it."""
UNSET = "???"
COLUMN = 34
"""Where words begin."""
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
END = (
    "KEY=VALUE sets a setting; lists are [1,2], nothing is null. `--help KEY` and `--help SECTION` "
    "tell more. Of Hydra: --multirun (a sweep over KEY=1,2), --cfg job (the settings as they would "
    "be), --hydra-help (everything)."
)


@dataclass(frozen=True)
class Setting:
    """One setting of a command.

    Attributes:
        section: the dataclass that it stands in, as a dotted name; empty for the command itself.
        name: dotted, as it is set.
        value: unless it is set, as it is typed.
        allowed: what may be given.
        description: about it, from its dataclass.
        choices: the values of an enum, with the words that some have.
        section_description: its section, from that dataclass.
    """

    section: str
    name: str
    value: str
    allowed: str
    description: str
    choices: dict[str, str]
    section_description: str


def list_settings(schema: type[Any], composed: DictConfig) -> list[Setting]:
    """Lists all settings of a command, in the order in which people need them.

    Args:
        schema: its dataclass.
        composed: the values to show.
    """
    return list(_iter_settings(schema, composed, "", ""))


def format_help_page(doc: str, settings: list[Setting], recipes: tuple[str, ...]) -> str:
    """Explains what a command does, all its settings, and how they are set.

    Args:
        doc: the script's docstring.
        settings: of the command.
        recipes: that `head=` may name; the first is taken unless it is set.
    """
    lines = [inspect.cleandoc(doc)]
    for number, setting in enumerate(settings):
        if number == 0 or setting.section != settings[number - 1].section:
            lines += ["", *_wrap_heading(setting)]
            if setting.section == "head" and recipes:
                others = ", ".join(recipes[1:]) or "there is no other"
                lines += _wrap_beside_key(
                    f"  head={recipes[0]}", f"Recipe in conf/head; others: {others}."
                )
        key = f"{setting.name}={setting.value}"
        lines += _wrap_beside_key(f"  {key}" if setting.section else key, setting.description)
        choices = setting.choices
        if choices:
            lines += _wrap_beside_key("", f"One of {', '.join(choices)}.")
        for value, words in choices.items():
            lines += _wrap_beside_key("", f"{value}: {words}") if words else []
    return "\n".join([*lines, "", *textwrap.wrap(END, _compute_text_width())])


def format_setting_help(settings: list[Setting], name: str) -> str:
    """Explains a setting, or all of a section, with what may be given.

    Raises:
        InputError: there is none of this name.
    """
    chosen = [setting for setting in settings if name in (setting.name, setting.section)]
    if not chosen:
        names = {word for s in settings for word in (s.name, s.section) if word}
        raise InputError(
            f"{name}: no setting and no section has this name{_format_close_names(name, names)}"
        )
    lines = _wrap_heading(chosen[0]) if chosen[0].section == name else []
    for setting in chosen:
        lines.append(f"{setting.name}={setting.value}")
        lines += [*_wrap_indented(f"{setting.allowed}."), *_wrap_indented(setting.description)]
        for value, words in setting.choices.items():
            lines += textwrap.wrap(f"{value}: {words}" if words else value, _compute_text_width(),
                                   initial_indent=" " * 4, subsequent_indent=" " * 6)  # fmt: skip
    return "\n".join(lines)


def check_setting_exists(schema: type[Any], key: str) -> None:
    """Refuses a setting that a command lacks.

    Args:
        schema: of the command.
        key: as it is typed; below a setting that may hold anything, anything.

    Raises:
        InputError: with the settings that are near, or the commands that have this one.
    """
    names = {*_iter_setting_names(schema)}
    if any(f"{key}.".startswith(f"{n}.") or f"{n}.".startswith(f"{key}.") for n in names):
        return
    having = [
        script for script, other in _iter_command_schemas() if key in _iter_setting_names(other)
    ]
    told = f"; {', '.join(having)} have it" if having else _format_close_names(key, names)
    raise InputError(f"{key}: this command has no such setting{told}")


def _iter_setting_names(schema: type[Any], section: str = "") -> Iterator[str]:
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from _iter_setting_names(kind, f"{section}{name}.")  # type: ignore[arg-type]
        else:
            yield section + name


def _iter_command_schemas() -> Iterator[tuple[str, type[Any]]]:
    """The scripts that have settings, by the first words of those."""
    for module in iter_modules(conf.settings.__path__, "conf.settings."):
        for schema in vars(import_module(module.name)).values():
            script = re.match(r"`(\w+/[\w/]+\.py)`", getattr(schema, "__doc__", None) or "")
            if script and schema.__module__ == module.name:
                yield script[1], schema


def _format_close_names(name: str, names: set[str]) -> str:
    parts = {known.rpartition(".")[2]: known for known in sorted(names)}
    near = get_close_matches(name, names, cutoff=0.7)
    near += [parts[part] for part in get_close_matches(name.rpartition(".")[2], parts)]
    return f": near are {', '.join(dict.fromkeys(near))}" if near else ", see --help"


def _iter_settings(schema: type[Any], composed: Any, section: str, about: str) -> Iterator[Setting]:
    hints, words = get_type_hints(schema), words_of(schema)  # type: ignore[arg-type]
    for name in _order_names(schema, composed, hints):
        kind, full = hints[name], f"{section}.{name}".lstrip(".")
        if is_dataclass(kind):
            own = " ".join(filter(None, (inspect.getdoc(kind), words.get(name))))
            yield from _iter_settings(kind, composed[name], full, own)  # type: ignore[arg-type]
            continue
        kinds = (kind, *get_args(kind))
        enum = next((k for k in kinds if isinstance(k, type) and issubclass(k, Enum)), None)
        own = words.get(name) or (inspect.getdoc(enum) if enum else None) or ""
        value = UNSET
        if not OmegaConf.is_missing(composed, name):
            given = composed[name]
            value = format_value(
                OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
            )
        choices = {e.value: words_of(enum).get(e.name, "") for e in enum} if enum else {}
        yield Setting(section, full, value, _format_type(kind), own, choices, about)


def _order_names(schema: type[Any], composed: Any, hints: dict[str, Any]) -> list[str]:
    names = [field.name for field in fields(schema)]

    def place(name: str) -> tuple[int, int]:
        if name in FIRST and is_dataclass(hints[name]):
            return 1, FIRST.index(name)
        if OmegaConf.is_missing(composed, name):
            return 0, names.index(name)
        if name in LAST:
            return 4, LAST.index(name)
        return (3 if is_dataclass(hints[name]) else 2), names.index(name)

    return sorted(names, key=place)


@cache
def words_of(schema: type[Any]) -> dict[str, str]:
    """Collects the docstring of each attribute of a class, its bases' where it has none."""
    words: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not base.__module__.startswith("conf."):
            continue
        for statement, following in pairwise(_parse_classes(base.__module__)[base.__name__].body):
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]  # type: ignore[assignment]
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                words[target.id] = " ".join(str(text.value).split())
    return words


@cache
def _parse_classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {part.name: part for part in tree.body if isinstance(part, ast.ClassDef)}


def _format_type(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(dict.fromkeys(map(_format_type, get_args(kind))))
    if kind is type(None):
        return "null"
    if get_origin(kind) is list:
        return f"list ({_format_type(get_args(kind)[0])})"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(choice.value for choice in kind)
    return KINDS.get(kind, "anything")


def _compute_text_width() -> int:
    return max(60, min(100, shutil.get_terminal_size((100, 24)).columns))


def _wrap_heading(setting: Setting) -> list[str]:
    if not setting.section:
        return []
    return textwrap.wrap(f"{setting.section}: {setting.section_description}", _compute_text_width())


def _wrap_indented(text: str) -> list[str]:
    return textwrap.wrap(text, _compute_text_width(), initial_indent="  ", subsequent_indent="  ")


def _wrap_beside_key(key: str, text: str) -> list[str]:
    """The key, and words in a column of their own."""
    lines = textwrap.wrap(text, _compute_text_width() - COLUMN) or [""]
    if len(key) + 2 > COLUMN:
        return [key, *(" " * COLUMN + line for line in lines)]
    rest = (" " * COLUMN + line for line in lines[1:])
    return [key.ljust(COLUMN) + lines[0], *rest]
