"""Entry of every command: parses the command line into a checked dataclass, before heavy imports.

Errors have one pattern: setting=value: what is wrong; what is allowed; what to type.
"""

import logging.config
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors

from conf.command.environment import (
    count_threads,
    hide_loading_bars,
    set_num_threads,
    set_passive_wait_policy,
)
from conf.command.forms import name_commands
from conf.command.help_pages import (
    check_setting_exists,
    check_typed_form,
    format_help_page,
    format_setting_help,
    list_settings,
)
from conf.errors import InputError, format_error
from conf.settings.checks import AUTO

RECIPES = Path(__file__).resolve().parents[1] / "head"
HYDRA = {
    "run": {"dir": "."},
    "sweep": {"dir": "${out_dir}", "subdir": "."},
    "output_subdir": None,
}
"""Settings of Hydra, which writes no files: rank 0 saves the settings of a run beside its
results."""
SILENT = {"version": 1, "root": {"level": "ERROR"}, "disable_existing_loggers": True}
"""Settings of logging, as of Hydra's `disabled`."""
HELP, SWEEP = {"--help", "-h"}, {"--multirun", "-m"}
KEY = re.compile(r"\+{0,2}([\w-]+(?:\.[\w-]+)*)=(.*)", re.DOTALL)
"""Name and value of the setting in an override that is typed."""
MERGE_ERROR = re.compile(r"Error merging override (.+)")
SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '(.+?)=(.+)'")
"""Messages of Hydra."""
Config = TypeVar("Config")


@dataclass(frozen=True)
class Command(Generic[Config]):
    """Command, as its script declares it.

    Attributes:
        doc: docstring of the script, with which `--help` begins.
        schema: dataclass of `conf.settings` that `main` takes.
        name: name of the command.
        recipes: recipes of `conf/head/` that the command allows; the first is the default.
        check: function that refuses settings, without heavy imports, that name what is not there.
    """

    doc: str | None
    schema: type[Config]
    name: str
    recipes: tuple[str, ...] = ()
    check: Callable[[Config], None] | None = None
    _jobs: list[Config] = field(default_factory=list, init=False, repr=False, compare=False)

    def parse_command_line(self) -> None:
        """Parse the command line. Scripts call this before imports that take seconds.

        Prints the help page and exits if `--help` is given. Otherwise checks the settings of the
        command, or of every job of a sweep; a wrong setting prints its error and exits with
        status 2.
        """
        set_passive_wait_policy()
        hide_loading_bars()
        argv = sys.argv[1:]
        self._jobs.clear()
        if HELP & set(argv):
            _exit_on_input_error(partial(self._print_help, argv))
            sys.exit(0)
        _exit_on_input_error(partial(self._compose_jobs, argv))
        if not self._jobs:  # Hydra had something to show, such as `--cfg job`
            sys.exit(0)

    def run(self, main: Callable[[Config], None]) -> None:
        """Run `main` with the settings of `parse_command_line`.

        In a sweep (`--multirun`), job n gets the folder `out_dir/n`, the same in every process. A
        job that fails does not keep the others from running.
        """
        if not self._jobs:  # the script is imported
            self.parse_command_line()
        logging.config.dictConfig(SILENT)  # the loggers of all that is imported by now
        failures = []
        for settings in self._jobs:
            set_num_threads(_count_threads(settings))
            try:
                _exit_on_input_error(partial(main, settings))
            except Exception as error:  # noqa: BLE001  raised after the others
                failures.append(error)
        if failures:
            raise failures[0]

    def compose_settings(self, overrides: list[str]) -> DictConfig:
        """Compose unchecked settings from the schema's defaults, the recipe and overrides."""
        _register_settings(self)
        # `initialize` would read the source of every caller.
        with initialize_config_dir(str(RECIPES), version_base=None):
            return compose(self._config_name, overrides)

    def _compose_jobs(self, argv: list[str]) -> None:
        """Compose and check the settings of the command, or of every job of a sweep.

        Raises:
            InputError: a setting is wrong, or Hydra refuses the command line.
        """

        def add_job(composed: DictConfig) -> None:
            settings = _convert_settings(composed, len(self._jobs) if SWEEP & set(argv) else None)
            if self.check is not None:
                self.check(deepcopy(settings))
            self._jobs.append(settings)

        self._check_typed_forms(argv)
        self._check_keys(argv)
        _register_settings(self)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors and prints none
        start = hydra.main(
            version_base=None, config_path=str(RECIPES), config_name=self._config_name
        )
        with self._convert_hydra_errors():
            start(lambda composed: _exit_on_input_error(partial(add_job, composed)))()

    @contextmanager
    def _convert_hydra_errors(self) -> Iterator[None]:
        try:
            yield
        except HydraException as error:
            raise convert_hydra_error(error, self.schema, self.recipes) from error

    @property
    def _config_name(self) -> str:
        """Name of the settings in Hydra's store. The bare name may be that of a recipe."""
        return f"{self.name}_command"

    def _check_keys(self, argv: list[str]) -> None:
        """Refuse settings that the command lacks, naming the commands that have them."""
        for key in filter(None, (KEY.match(word) for word in argv)):
            if key[1] == "head" and not self.recipes and (found := _find_recipe_script(key[2])):
                raise InputError(f"head={key[2]}: {found}")
            if not (key[1] == "head" and self.recipes) and not key[1].startswith("hydra"):
                check_setting_exists(self.schema, key[1], key[2])

    def _check_typed_forms(self, argv: list[str]) -> None:
        """Refuse settings that are typed as in other toolkits: as options, or without `=`."""
        options = {
            word for word in get_args_parser().parse_known_args(argv)[1] if word.startswith("-")
        }
        for word, following in pairwise([*argv, ""]):
            bare = "=" not in word and not word.startswith(("-", "~"))
            if bare or word in options:
                is_value = bool(following) and following[0] != "-" and "=" not in following
                check_typed_form(self.schema, word, following if is_value else None)

    def _print_help(self, argv: list[str]) -> None:
        """Print all settings, or those that argv names, with the values that argv sets."""
        given = [word for word in argv if not word.startswith("-")]
        overrides = [word for word in given if "=" in word]
        with self._convert_hydra_errors():
            composed = self.compose_settings(overrides)
        settings = list_settings(self.schema, composed)
        names = [word for word in given if "=" not in word]
        if names:
            text = "\n\n".join(format_setting_help(settings, name) for name in names)
        else:
            text = format_help_page(self.doc or "", settings, self.recipes)
        try:
            print(name_commands(text), flush=True)  # noqa: T201
        except BrokenPipeError:  # `| head` has seen enough, and Python would flush again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@cache
def _register_settings(command: Command[Any]) -> None:
    """Store in Hydra, once, the parts that the settings of a command are composed from."""
    store = ConfigStore.instance()
    store.store(name=f"{command.name}_schema", node=command.schema)
    for recipe in command.recipes:
        node = OmegaConf.load(RECIPES / f"{recipe}.yaml")
        store.store(group="head", name=recipe, node=node, package="_global_")
    head = [{"head": recipe} for recipe in command.recipes[:1]]
    loggings = ("job_logging", "hydra_logging")
    silent = [{f"override hydra/{logging}": "disabled"} for logging in loggings]
    defaults = [f"{command.name}_schema", "_self_", *head, *silent]
    settings = {"defaults": defaults, "hydra": HYDRA | {"job": {"name": command.name}}}
    store.store(name=command._config_name, node=settings)


def convert_hydra_error(
    error: HydraException, schema: type[Any], recipes: Sequence[str]
) -> InputError:
    """Convert Hydra's error about a command line to an error in the pattern of this module.

    Args:
        error: Hydra's error.
        schema: dataclass of the command's settings.
        recipes: recipes that `head=` may name.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).partition("/")
        problem = _find_recipe_script(name) or (
            f"no such recipe; allowed: {', '.join(recipes)} (conf/{group}); a trained head is "
            "head.path=FOLDER"
        )
        return InputError(f"{group}={name}: {problem}")
    known = {s.name: s.allowed for s in list_settings(schema, OmegaConf.structured(schema))}
    lines = str(error).strip().splitlines()
    if several := SEVERAL_VALUES.match(lines[0]):
        key, value = several.groups()
        takes_list = known.get(key, "").startswith(("list", "anything"))
        as_list = f"type '{key}=[{value}]' for a list, or " if takes_list else ""
        return InputError(
            f"{key}={value}: several values; allowed: one; {as_list}add --multirun to run the "
            "command for each"
        )
    merged = MERGE_ERROR.match(lines[0])
    given = error.override if isinstance(error, OverrideParseException) else merged and merged[1]
    if not given:
        return InputError("; ".join(filter(None, map(str.strip, lines))))
    key, equals, value = given.partition("=")
    if not equals:
        return InputError(f"{given}: not a setting; type KEY=VALUE, --help lists all of them")
    if isinstance(error, OverrideParseException):
        quoted = f"put a text with other signs in two kinds of quotes: '{key}=\"...\"'"
        if value.startswith("{") and ":" in value:
            quoted = f"put a mapping in quotes: '{key}={{NAME: VALUE}}'"
        return InputError(
            f"{given}: the value cannot be read; allowed: words and numbers, [a,b] for a list; "
            f"{quoted}"
        )
    name = key.lstrip("+~")
    allowed = known.get(name, "see --help")
    return InputError(f"{name}={value}: not allowed here; allowed: {allowed}; try --help {name}")


def _find_recipe_script(name: str) -> str | None:
    """Say which training a recipe or a kind of head belongs to; None if there is none."""
    for script in sorted((RECIPES.parents[1] / "train").glob("*.py")):
        typed = f"train/{script.name}"
        if f'"{name}"' in script.read_text(encoding="utf-8").partition("\nif __name__")[0]:
            typed += f" head={name}" if (RECIPES / f"{name}.yaml").is_file() else ""
            return (
                f"another command trains it; type {typed}, or head.path=FOLDER for a trained head"
            )
    return None


def _exit_on_input_error(task: Callable[[], None]) -> None:
    """Run a task; print its InputError, if any, and exit with status 2."""
    try:
        task()
    except InputError as error:
        # Printed on every node, as the cause may be on one of them only.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(format_error(error, sys.stderr), file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _convert_settings(composed: DictConfig, number: int | None) -> Any:
    """Convert composed settings to dataclasses; give job `number` of a sweep its own folder."""
    if number is not None:
        composed.out_dir = str(Path(composed.out_dir) / str(number))
    try:
        settings = OmegaConf.to_object(composed)
    except errors.MissingMandatoryValue as error:
        kind = get_type_hints(error.object_type)[str(error.key)]
        remedy = f"it has no default: type {error.full_key}=VALUE"
        if issubclass(kind, Enum):
            remedy = f"allowed: {', '.join(choice.value for choice in kind)}"
        raise InputError(f"{error.full_key} is unset; {remedy}") from error
    _count_threads(settings)  # raises for a number that makes no sense
    return settings


def _count_threads(settings: Any) -> int | None:
    return count_threads(getattr(settings, "num_threads", AUTO), os.environ)
