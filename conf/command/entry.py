"""The door of every command: command line in, checked dataclass out, before heavy imports."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

import hydra
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, errors

from conf import errors as terminal
from conf.command import help_pages as words
from conf.command.environment import set_passive_wait_policy
from conf.errors import InputError

MERGED = re.compile(r"Error merging override (.+)")
SEVERAL = re.compile(r"Ambiguous value for argument '(.+?)=(.+)'")


def convert_hydra_error(
    error: HydraException, schema: type[Any], recipes: Sequence[str]
) -> InputError:
    """Word Hydra's refusal of a command line in our own pattern.

    Args:
        error: of Hydra.
        schema: the dataclass of the command's settings.
        recipes: that `head=` may name.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).partition("/")
        return InputError(
            f"{group}={name}: no such recipe; allowed: {', '.join(recipes)} (conf/{group})"
        )
    known = {s.name: s.allowed for s in words.list_settings(schema, OmegaConf.structured(schema))}
    said = str(error).strip().splitlines()
    if several := SEVERAL.match(said[0]):
        key, value = several.groups()
        takes_list = known.get(key, "").startswith(("list", "anything"))
        as_list = f"type '{key}=[{value}]' for a list, or " if takes_list else ""
        return InputError(
            f"{key}={value}: several values; allowed: one; {as_list}add --multirun to run the "
            "command for each"
        )
    merged = MERGED.match(said[0])
    given = error.override if isinstance(error, OverrideParseException) else merged and merged[1]
    if not given:
        return InputError("; ".join(filter(None, map(str.strip, said))))
    key, equals, value = given.partition("=")
    if not equals:
        return InputError(f"{given}: not a setting; type KEY=VALUE, --help lists all of them")
    if isinstance(error, OverrideParseException):
        return InputError(
            f"{given}: the value cannot be read; allowed: words and numbers, [a,b] for a list; "
            f"put a text with other signs in two kinds of quotes: '{key}=\"...\"'"
        )
    name = key.lstrip("+~")
    allowed = known.get(name, "see --help")
    return InputError(f"{name}={value}: not allowed here; allowed: {allowed}; try --help {name}")


RECIPES = Path(__file__).resolve().parents[1] / "head"
HYDRA = {
    "run": {"dir": "."},
    "sweep": {"dir": "${out_dir}", "subdir": "."},
    "output_subdir": None,
}
"""It writes nothing of its own: rank 0 saves the resolved configuration beside the results."""
FULL_ERROR = "HYDRA_FULL_ERROR"
HELP, SWEEP = {"--help", "-h"}, {"--multirun", "-m"}
KEY = re.compile(r"(?:\+\+)?([a-z_]+(?:\.\w+)*)=")
"""Of what is typed to set a setting."""
Config = TypeVar("Config")


@dataclass(frozen=True)
class Command(Generic[Config]):
    """A command, as its script declares it.

    Attributes:
        doc: the script's docstring, which `--help` begins with.
        schema: the dataclass of `conf.settings` that its `main` takes.
        name: of the command.
        recipes: of `conf/head/` that its heads may have, first the one that argv need not name.
        check: refuses, without heavy imports, what the settings name and is not there.
    """

    doc: str | None
    schema: type[Config]
    name: str
    recipes: tuple[str, ...] = ()
    check: Callable[[Config], None] | None = None

    def parse_command_line(self) -> None:
        """Answers `--help`, or looks at the settings; returns where there is something to run.

        Scripts call it before they import what takes seconds. Settings are looked at for all jobs
        of a sweep; a wrong one ends the process.
        """
        set_passive_wait_policy()
        argv = sys.argv[1:]
        if HELP & set(argv):
            _exit_on_input_error(partial(self._print_help, argv))
            sys.exit(0)
        looked = []
        jobs = _split_sweep(argv)
        for number, job in enumerate(jobs):
            _exit_on_input_error(partial(self._check_keys, job))

            def look(composed: DictConfig, number: int | None = number) -> None:
                looked.append(_convert_settings(composed, number if SWEEP & set(argv) else None))
                if self.check is not None:
                    self.check(looked[-1])

            with _hydra_raises():
                _exit_on_input_error(partial(self._looked_at, look, job))
        if not looked:  # Hydra had something to show, such as `--cfg job`
            sys.exit(0)

    def run(self, main: Callable[[Config], None]) -> None:
        """Runs `main` with the settings composed from its schema, a recipe and argv.

        A sweep (`--multirun`) gives job n the folder `out_dir/n`, the same on every process.
        """

        def job(composed: DictConfig) -> None:
            of_hydra = HydraConfig.get()
            number = of_hydra.job.num if of_hydra.mode == RunMode.MULTIRUN else None
            main(_convert_settings(composed, number))

        self._run_hydra(job, sys.argv[1:])

    def _looked_at(self, look: Callable[[DictConfig], None], job: list[str]) -> None:
        """Shows the settings of a job to `look`.

        Raises:
            InputError: Hydra refuses the command line.
        """
        try:
            self._run_hydra(look, job)
        except HydraException as error:
            raise convert_hydra_error(error, self.schema, self.recipes) from error

    def compose_settings(self, overrides: list[str]) -> DictConfig:
        """The settings before they are checked, with the recipe's and these."""
        self._register_settings()
        with initialize(version_base=None, config_path=None):
            return compose(self._config_name, overrides)

    def _run_hydra(self, task: Callable[[DictConfig], None], argv: list[str]) -> None:
        self._register_settings()
        before = sys.argv
        sys.argv = [before[0], *argv]

        def refusing(composed: DictConfig) -> None:
            _exit_on_input_error(partial(task, composed))

        try:
            hydra.main(version_base=None, config_path=str(RECIPES), config_name=self._config_name)(
                refusing
            )()
        finally:
            sys.argv = before

    @property
    def _config_name(self) -> str:
        """Hydra's name of the settings; some commands are called like a recipe."""
        return f"{self.name}_command"

    def _register_settings(self) -> None:
        """Tells Hydra what the settings are composed from."""
        store = ConfigStore.instance()
        store.store(name=f"{self.name}_schema", node=self.schema)
        for recipe in self.recipes:
            node = OmegaConf.load(RECIPES / f"{recipe}.yaml")
            store.store(group="head", name=recipe, node=node, package="_global_")
        head = [{"head": recipe} for recipe in self.recipes[:1]]
        loggings = ("job_logging", "hydra_logging")
        silent = [{f"override hydra/{logging}": "disabled"} for logging in loggings]
        defaults = [f"{self.name}_schema", "_self_", *head, *silent]
        settings = {"defaults": defaults, "hydra": HYDRA | {"job": {"name": self.name}}}
        store.store(name=self._config_name, node=settings)

    def _check_keys(self, job: list[str]) -> None:
        """Refuses settings that the command lacks, and tells which commands have them."""
        for key in filter(None, (KEY.match(override) for override in job)):
            if key[1] != "head" and not key[1].startswith("hydra"):
                words.check_setting_exists(self.schema, key[1])

    def _print_help(self, argv: list[str]) -> None:
        """Prints all settings, or those that argv names; overrides beside them show in values."""
        given = [word for word in argv if not word.startswith("-")]
        overrides = [word for word in given if "=" in word]
        try:
            composed = self.compose_settings(overrides)
        except HydraException as error:
            raise convert_hydra_error(error, self.schema, self.recipes) from error
        settings = words.list_settings(self.schema, composed)
        asked = [word for word in given if "=" not in word]
        if asked:
            text = "\n\n".join(words.format_setting_help(settings, name) for name in asked)
        else:
            text = words.format_help_page(self.doc or "", settings, self.recipes)
        try:
            print(text, flush=True)  # noqa: T201
        except BrokenPipeError:  # `| head` has seen enough, and Python would flush again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def head_recipe(schema: type[Config], name: str) -> Config:
    """The head's settings in `conf/head/{name}.yaml`, a recipe that builds on no other.

    Args:
        schema: the dataclass that they fill.
        name: of the recipe; one that is not there is an OSError.
    """
    given = OmegaConf.load(RECIPES / f"{name}.yaml")
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(schema, given.head)))


def _split_sweep(argv: list[str]) -> list[list[str]]:
    """The command lines of a sweep; otherwise the one that there is."""
    if not SWEEP & set(argv):
        return [argv]
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    given = [word for word in argv if not word.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(given)
        return BasicSweeper.split_arguments(parsed, None)[0]
    except HydraException:  # is told about in Hydra's own words
        return [given]


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Has Hydra raise its errors in place of printing them and ending the process."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


def _exit_on_input_error(task: Callable[[], None]) -> None:
    """Runs something; ends the process with the message where it refuses the user's input."""
    try:
        task()
    except InputError as error:
        # On every node: what is wrong may be wrong on one of them only.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(terminal.format_error(error, sys.stderr), file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _convert_settings(composed: DictConfig, number: int | None) -> Any:
    """The settings as dataclasses; of job `number` of a sweep with a folder of its own."""
    if number is not None:
        composed.out_dir = str(Path(composed.out_dir) / str(number))
    try:
        return OmegaConf.to_object(composed)
    except errors.MissingMandatoryValue as error:
        kind, told = (
            get_type_hints(error.object_type)[str(error.key)],
            f"; it has no default: type {error.full_key}=VALUE",
        )
        if issubclass(kind, Enum):
            told = f"; allowed: {', '.join(choice.value for choice in kind)}"
        raise InputError(f"{error.full_key} is unset{told}") from error
