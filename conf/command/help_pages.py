"""Pages of `--help`: every setting of a command, with its docstring from the dataclass."""

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

from conf import settings as all_settings
from conf.command.forms import PACKAGE
from conf.command.run_record import format_value
from conf.errors import InputError

FIRST, LAST = ("target", "data", "prompts", "head"), ("out_dir", "seed", "num_threads")
"""Order of a help page: settings without a default, the sections of FIRST, the other settings, the
other sections, and the settings of LAST. Within a group the order of the dataclass holds."""
UNSET = "???"
COLUMN = 34
"""Column at which descriptions begin."""
OTHER_NAMES = {
    name: setting
    for setting, names in {
        "target.path": "model model_id model_name model_name_or_path model_path base_model "
        "base_model_name_or_path pretrained_model_name_or_path target_model target_model_path "
        "verifier verifier_name_or_path",
        "target.dtype": "torch_dtype model_dtype",
        "data.path": "dataset dataset_name dataset_path data_path data_files train_data "
        "train_data_path train_dataset train_file train_path",
        "data.eval_path": "eval_data eval_data_path eval_dataset eval_file eval_path val_path "
        "validation_file",
        "data.max_length": "max_seq_length max_seq_len max_sequence_length seq_length seq_len "
        "sequence_length total_seq_len model_max_length cutoff_len context_length block_size",
        "data.num_proc": "num_workers dataset_num_proc preprocessing_num_workers",
        "head.path": "draft draft_head draft_model draft_model_path draft_model_name_or_path "
        "ea_model_path head_path speculative_model speculator",
        "head.num_steps": "ttt_length ttt_steps",
        "train.learning_rate": "lr",
        "train.num_epochs": "epoch epochs num_train_epochs",
        "train.max_steps": "steps max_train_steps num_train_steps total_steps",
        "train.batch_size": "batch bs batch_size global_batch_size total_batch_size "
        "train_batch_size",
        "train.micro_batch_size": "per_device_batch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu",
        "train.optimizer": "optim",
        "train.schedule": "scheduler scheduler_type lr_scheduler lr_scheduler_type",
        "train.warmup_steps": "warmup num_warmup_steps",
        "train.max_grad_norm": "clip_grad grad_clip gradient_clipping max_norm",
        "train.dtype": "mixed_precision precision",
        "train.resume": "checkpoint resume_from resume_from_checkpoint",
        "train.log_steps": "log_interval logging_steps",
        "train.eval_steps": "eval_interval",
        "train.save_steps": "save_interval checkpoint_steps",
        "log.tracker": "logger report_to",
        "log.project": "wandb_project",
        "max_new_tokens": "max_tokens max_new_token max_output_tokens",
        "depth": "num_draft_tokens num_speculative_tokens spec_tokens",
        "endpoint": "api_base base_url server_url url",
        "out_dir": "output output_dir output_path save_dir save_path",
    }.items()
    for name in names.split()
}
"""Settings by the last part of their names in other toolkits, where values mean the same."""
MOST_SCRIPTS = 4
"""Commands that a message names at most."""
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
END = (
    "KEY=VALUE sets a setting; lists are [1,2], nothing is null. `--help KEY` and `--help SECTION` "
    "tell more. Of Hydra: --multirun (a sweep over KEY=1,2), --cfg job (the settings as they would "
    "be), --hydra-help (everything)."
)


@dataclass(frozen=True)
class Setting:
    """Setting of a command.

    Attributes:
        section: dotted name of the section that holds the setting; empty for the command itself.
        name: dotted name, as typed on the command line.
        value: value before any change, as typed on the command line.
        allowed: description of the allowed values.
        description: docstring of the setting.
        choices: values of an enum, each with its docstring or an empty text.
        section_description: docstring of the section.
    """

    section: str
    name: str
    value: str
    allowed: str
    description: str
    choices: dict[str, str]
    section_description: str


def list_settings(
    schema: type[Any], composed: DictConfig, section: str = "", section_description: str = ""
) -> list[Setting]:
    """List all settings of a command, in the order of a help page.

    Args:
        schema: dataclass of the command's settings, or of a section.
        composed: values to show.
        section: dotted name of the section.
        section_description: docstring of the section.
    """
    settings: list[Setting] = []
    hints, docstrings = get_type_hints(schema), _parse_attribute_docstrings(schema)  # type: ignore[arg-type]
    for name in _order_names(schema, composed, hints):
        kind, full_name = hints[name], f"{section}.{name}".lstrip(".")
        if is_dataclass(kind):
            text = " ".join(filter(None, (inspect.getdoc(kind), docstrings.get(name))))
            settings += list_settings(kind, composed[name], full_name, text)  # type: ignore[arg-type]
            continue
        kinds = (kind, *get_args(kind))
        enum = next((k for k in kinds if isinstance(k, type) and issubclass(k, Enum)), None)
        text = docstrings.get(name) or (inspect.getdoc(enum) if enum else None) or ""
        given = UNSET if OmegaConf.is_missing(composed, name) else composed[name]
        value = format_value(OmegaConf.to_container(given) if OmegaConf.is_config(given) else given)
        documented = _parse_attribute_docstrings(enum) if enum else {}
        choices = {choice.value: documented.get(choice.name, "") for choice in enum or ()}
        allowed = _format_type(kind)
        settings.append(
            Setting(section, full_name, value, allowed, text, choices, section_description)
        )
    return settings


def _order_names(schema: type[Any], composed: Any, hints: dict[str, Any]) -> list[str]:
    names = [field.name for field in fields(schema)]

    def rank(name: str) -> tuple[int, int]:
        if name in FIRST and is_dataclass(hints[name]):
            return 1, FIRST.index(name)
        if OmegaConf.is_missing(composed, name):
            return 0, names.index(name)
        if name in LAST:
            return 4, LAST.index(name)
        return (3 if is_dataclass(hints[name]) else 2), names.index(name)

    return sorted(names, key=rank)


@cache
def _parse_attribute_docstrings(schema: type[Any]) -> dict[str, str]:
    """Parse the docstring below each attribute of a class or, where it has none, of its bases."""
    docstrings: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not base.__module__.startswith(f"{PACKAGE}conf."):
            continue
        for statement, following in pairwise(_parse_classes(base.__module__)[base.__name__].body):
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]  # type: ignore[assignment]
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                docstrings[target.id] = " ".join(str(text.value).split())
    return docstrings


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


def format_help_page(doc: str, settings: list[Setting], recipes: tuple[str, ...]) -> str:
    """Format the help page of a command: what it does, all its settings, how they are set.

    Args:
        doc: docstring of the script.
        settings: settings of the command.
        recipes: recipes that `head=` may name; the first is the default.
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
        if setting.choices:
            lines += _wrap_beside_key("", f"One of {', '.join(setting.choices)}.")
        for value, text in setting.choices.items():
            lines += _wrap_beside_key("", f"{value}: {text}") if text else []
    return "\n".join([*lines, "", *_wrap_text(END)])


def format_setting_help(settings: list[Setting], name: str) -> str:
    """Format the help of one setting, or of all settings of a section, with allowed values.

    Args:
        settings: settings of the command.
        name: dotted name of a setting or a section.

    Raises:
        InputError: the command has neither a setting nor a section of this name.
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
        for text in (f"{setting.allowed}.", setting.description):
            lines += _wrap_text(text, "  ", "  ")
        for value, text in setting.choices.items():
            lines += _wrap_text(f"{value}: {text}" if text else value, " " * 4, " " * 6)
    return "\n".join(lines)


def _wrap_text(text: str, first: str = "", rest: str = "") -> list[str]:
    """Wrap a text to the terminal's width, behind the indents of its first and other lines."""
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest)


def _wrap_heading(setting: Setting) -> list[str]:
    text = f"{setting.section}: {setting.section_description}"
    return _wrap_text(text) if setting.section else []


def _wrap_beside_key(key: str, text: str) -> list[str]:
    """Format a key, and a text beside it in the column of descriptions."""
    above = [key] if len(key) + 2 > COLUMN else []
    first = ("" if above else key).ljust(COLUMN)
    return [*above, *(_wrap_text(text, first, " " * COLUMN) or [first])]


def check_setting_exists(schema: type[Any], key: str, value: str | None = None) -> None:
    """Refuse a setting that a command lacks, and a value for a section.

    Args:
        schema: dataclass of the command's settings.
        key: dotted name as typed. Any name below a setting of the command is allowed.
        value: value as typed; None looks at the key alone.

    Raises:
        InputError: the message names the setting that was meant, the commands that have this one,
            or similar settings.
    """
    names = {*_iter_setting_names(schema)}
    if any(name.startswith(f"{key}.") for name in names):
        if value is not None and not value.startswith(("{", "$")):
            remedy = f"type {key}.path={value}" if f"{key}.path" in names else f"try --help {key}"
            raise InputError(f"{key}={value}: {key} is a section of settings; {remedy}")
        return
    if any(f"{key}.".startswith(f"{name}.") for name in names):
        return
    scripts = [
        script for script, other in _iter_command_schemas() if key in _iter_setting_names(other)
    ]
    # This command may have the setting under another name.
    own = [name for name in names if OTHER_NAMES.get(name) == key]
    meant = own or _find_meant_names(key, names)
    if own or (meant and not ("." in key and scripts)):
        hint = "; type " + " or ".join(f"{name}={value or 'VALUE'}" for name in meant)
    elif scripts:
        others = f" and {len(scripts) - MOST_SCRIPTS} more" if scripts[MOST_SCRIPTS:] else ""
        hint = f"; {', '.join(scripts[:MOST_SCRIPTS])}{others} have it"
    else:
        hint = _format_close_names(key, names)
    raise InputError(f"{key}: this command has no such setting{hint}")


def check_typed_form(schema: type[Any], word: str, following: str | None) -> None:
    """Refuse a setting that is typed as an option or without `=`: `--target.path X`.

    Args:
        schema: dataclass of the command's settings.
        word: word of the command line that is neither KEY=VALUE nor an option of Hydra.
        following: word behind it; None at the end.

    Raises:
        InputError: the message says what to type. A word without dashes that names no setting
            passes.
    """
    name, equals, value = word.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value if equals else following or "VALUE"
    names = {*_iter_setting_names(schema)}
    wrong = f"{word}: settings are typed as KEY=VALUE, without dashes"
    if meant := [name] if name in names else _find_meant_names(name, names):
        raise InputError(f"{wrong}; type {' or '.join(f'{each}={value}' for each in meant)}")
    if word.startswith("-"):
        raise InputError(f"{wrong}{_format_close_names(name, names)}")


def _find_meant_names(key: str, names: set[str]) -> list[str]:
    """Find the settings that other toolkits name so, or else those whose last part is the same."""
    last = key.rpartition(".")[2].replace("-", "_").lower()
    if (other := OTHER_NAMES.get(last)) in names:
        return [str(other)]
    return sorted(name for name in names if name.rpartition(".")[2] == last)


def _iter_setting_names(schema: type[Any], section: str = "") -> Iterator[str]:
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from _iter_setting_names(kind, f"{section}{name}.")  # type: ignore[arg-type]
        else:
            yield section + name


def _iter_command_schemas() -> Iterator[tuple[str, type[Any]]]:
    """Yield each script with its dataclass of settings, whose docstring begins with the script."""
    for module in iter_modules(all_settings.__path__, f"{all_settings.__name__}."):
        for schema in vars(import_module(module.name)).values():
            script = re.match(r"`(\w+/[\w/]+\.py)`", getattr(schema, "__doc__", None) or "")
            if script and schema.__module__ == module.name:
                yield script[1], schema


def _format_close_names(name: str, names: set[str]) -> str:
    parts = {known.rpartition(".")[2]: known for known in sorted(names)}
    near = _find_meant_names(name, names) + get_close_matches(name, names, cutoff=0.7)
    near += [parts[part] for part in get_close_matches(name.rpartition(".")[2], parts)]
    return f": near are {', '.join(dict.fromkeys(near))}" if near else ", see --help"
