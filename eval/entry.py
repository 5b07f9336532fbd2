"""The door between Hydra and the code: command line in, checked dataclass out."""

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, errors

from conf.schema import InputError

CONF = str(Path(__file__).resolve().parents[1] / "conf")
HYDRA = {
    "run": {"dir": "."},
    "sweep": {"dir": "${out_dir}", "subdir": "."},
    "output_subdir": None,
}
"""It writes nothing of its own: rank 0 saves the resolved configuration beside the results."""
Config = TypeVar("Config")


def run(
    main: Callable[[Config], None], schema: type[Config], name: str, recipe: str | None = None
) -> None:
    """Runs `main` with the configuration composed from its schema, a recipe and argv.

    A sweep (`--multirun`) gives job n the folder `out_dir/n`, the same on every process.

    Args:
        main: the command.
        schema: the dataclass from `conf.schema` that `main` takes.
        name: of the command.
        recipe: of `conf/head/`, unless argv names another; None for a command without.
    """
    register(schema, name, recipe)

    def job(composed: DictConfig) -> None:
        try:
            main(_checked(composed))
        except InputError as error:
            # On every node: what is wrong may be wrong on one of them only.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr)  # noqa: T201
            sys.exit(2)

    hydra.main(version_base=None, config_path=CONF, config_name=name)(job)()


def register(schema: type[Any], name: str, recipe: str | None) -> None:
    """Tells Hydra what a command's configuration is composed from; arguments as of `run`."""
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema)
    head = [] if recipe is None else [{"head": recipe}]
    silent = [{f"override hydra/{each}": "disabled"} for each in ("job_logging", "hydra_logging")]
    defaults = [f"{name}_schema", "_self_", *head, *silent]
    store.store(name=name, node={"defaults": defaults, "hydra": HYDRA | {"job": {"name": name}}})


def head_recipe(schema: type[Config], name: str) -> Config:
    """The head's settings in `conf/head/{name}.yaml`, a recipe that builds on no other.

    Args:
        schema: the dataclass that they fill.
        name: of the recipe; one that is not there is an OSError.
    """
    given = OmegaConf.load(Path(CONF) / "head" / f"{name}.yaml")
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(schema, given.head)))


def _checked(composed: DictConfig) -> Any:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        composed.out_dir = str(Path(composed.out_dir) / str(HydraConfig.get().job.num))
    try:
        return OmegaConf.to_object(composed)
    except errors.MissingMandatoryValue as error:
        raise InputError(f"{error.full_key} is unset{_allowed(error)}") from error


def _allowed(error: errors.MissingMandatoryValue) -> str:
    kind = get_type_hints(error.object_type)[str(error.key)]
    if issubclass(kind, Enum):
        return f"; allowed: {', '.join(each.value for each in kind)}"
    return ": set it on the command line"
