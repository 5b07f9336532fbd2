"""What competes: recipes as users write them, and the commands that train and measure them."""

import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.command.statement import flat, plain
from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.scripts import ContestRun
from conf.settings.target import TargetConfig
from heads.kinds import KINDS, forms

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "conf" / "head"
SETTLED = ("max_steps", "num_epochs", "batch_size", "batch_tokens", "micro_batch_size", "resume")
"""Of `train.*`: what the contest decides for all."""
WAYS = ("chain", "tree")


@dataclass(frozen=True)
class Recipe:
    """A head to train.

    Attributes:
        label: its name in the contest.
        kind: of `heads/kinds.py`.
        overrides: for the training command.
    """

    label: str
    kind: str
    overrides: tuple[str, ...]


def read_recipes(entries: list[str]) -> list[Recipe]:
    """The entries of `recipes`.

    Raises:
        InputError: no such recipe, or a setting that is the same for all.
    """
    found: list[Recipe] = []
    counts: Counter[str] = Counter()
    for entry in entries:
        name, *overrides = shlex.split(entry) or [""]
        kind = name if name in KINDS else _kind_of_file(name)
        for each in overrides:
            key = each.partition("=")[0]
            group, _, rest = key.partition(".")
            if "=" not in each or group not in ("head", "train") or rest in ("", *SETTLED):
                raise InputError(
                    f"recipes: {entry!r}: {each} is not for one recipe alone; allowed: head.* and "
                    f"train.* but {', '.join(SETTLED)}"
                )
        counts[name] += 1
        label = name if counts[name] == 1 else f"{name}-{counts[name]}"
        chosen = [] if name in KINDS else [f"head={name}"]
        found.append(Recipe(label, kind, (*chosen, *overrides)))
    return found


def _kind_of_file(name: str) -> str:
    """Whose form a recipe of another name trains."""
    known = sorted({*KINDS, *(path.stem for path in RECIPES.glob("*.yaml"))})
    if name not in known:
        raise InputError(f"recipes: {name!r} is none; allowed: {', '.join(known)}")
    content: Any = {"defaults": [name]}
    while "form" not in content.get("head", {}):
        content = OmegaConf.load(RECIPES / f"{content['defaults'][0]}.yaml")
    return next(key for key, kind in KINDS.items() if kind is forms()[content.head.form])


def methods_of(recipes: list[Recipe]) -> dict[str, dict[str, str]]:
    """How `eval/speedup.py` calls the ways to draft with each head, by label and way."""
    counts: Counter[str] = Counter()
    found = {}
    for recipe in recipes:
        counts[recipe.kind] += 1
        number = f"_{counts[recipe.kind]}" if counts[recipe.kind] > 1 else ""
        found[recipe.label] = {way: f"{recipe.kind}_{way}{number}" for way in WAYS}
    return found


def overrides(prefix: str, config: TargetConfig | DataConfig) -> list[str]:
    """What of a group is not as the schema has it, for a command line."""
    usual = plain(type(config)())
    return [
        f"{prefix}.{key}={_written(value)}"
        for key, value in plain(config).items()
        if value != usual[key]
    ]


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower()


def training(config: ContestRun, recipe: Recipe, out_dir: Path, *more: str) -> list[str]:
    """The command that trains a recipe; it is evaluated once, at the end, and not by replay."""
    launcher = ["-m", "accelerate.commands.launch", *config.launch] if config.launch else []
    size = config.train
    return [
        sys.executable, *launcher, str(ROOT / "train" / f"{recipe.kind}.py"),
        *overrides("target", config.target), *overrides("data", config.data),
        f"train.batch_size={size.batch_size}", f"train.micro_batch_size={size.micro_batch_size}",
        "train.num_checkpoints=1", "train.num_replay_prompts=0", "train.resume=auto",
        f"seed={config.seed}", *recipe.overrides, *more, f"out_dir={_written(str(out_dir))}",
    ]  # fmt: skip


def measuring(
    config: ContestRun, script: str, heads: list[Path], out_dir: Path, *more: str
) -> list[str]:
    """A command that measures heads on the prompts."""
    first, *others = map(str, heads)
    return [
        sys.executable, str(ROOT / script),
        *overrides("target", config.target), *overrides("data", config.prompts),
        f"head.path={_written(first)}", *([f"heads={_written(others)}"] if others else []),
        f"max_new_tokens={config.max_new_tokens}", f"num_turns={config.num_turns}",
        f"seed={config.seed}", *more, f"out_dir={_written(str(out_dir))}",
    ]  # fmt: skip


def settings(config: ContestRun) -> dict[str, Any]:
    """What decides the result of a contest, by dotted keys."""
    free = {"out_dir", "parts", "launch"}
    return flat({key: value for key, value in plain(config).items() if key not in free})
