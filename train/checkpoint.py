"""Checkpoints that are whole or absent: `out_dir/checkpoints/step-000200/`.

A folder is written under a temporary name, synced and renamed. `state.json` comes last and
holds size and CRC-32 of every other file, so a truncated or altered file is noticed. Tensors
are safetensors, the rest is JSON; nothing is ever unpickled.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conf.schema import InputError
from heads.storage import atomic_folder

_FORMAT = 1
_FILES = ("head.safetensors", "optimizer.safetensors", "random.safetensors")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        tokens: tokens seen, padding not counted.
        position: sequences drawn from the row of epochs, see `schedule.sequences`.
        run: what must be the same when the run continues, by configuration key.
    """

    step: int
    tokens: int
    position: int
    run: dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """What a checkpoint saves and restores in place."""

    head: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def save(folder: Path, parts: Parts, progress: Progress, keep: int) -> Path:
    """Writes a checkpoint and removes all but the newest `keep`.

    Checkpoints of later steps go too: they are of a run that was given up when this one
    continued from an earlier step, and `latest` must not return to it.

    Args:
        folder: `out_dir/checkpoints`.
        parts: what to save.
        progress: where the run stands.
        keep: checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        InputError: the disk is full; earlier checkpoints are intact.
    """
    final = folder / f"step-{progress.step:06d}"
    tensors, groups = _flatten(parts.optimizer.state_dict())
    with atomic_folder(final) as temporary:
        head = {name: _stored(value) for name, value in parts.head.state_dict().items()}
        for name, content in zip(_FILES, (head, tensors, _random_state()), strict=True):
            save_file(content, temporary / name)
        state = {
            "format": _FORMAT,
            "step": progress.step,
            "tokens": progress.tokens,
            "position": progress.position,
            "run": progress.run,
            "param_groups": groups,
            "scheduler": _plain(parts.scheduler.state_dict()),
            "files": {name: _fingerprint(temporary / name) for name in _FILES},
        }
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
    found = _newest_first(folder)
    abandoned = [path for path in found if int(path.name[5:]) > progress.step]
    leftovers = [p for kind in (".writing-*", ".old-*") for p in folder.glob(kind)]
    for path in (*abandoned, *found[len(abandoned) :][keep:], *leftovers):
        shutil.rmtree(path, ignore_errors=True)
    return final


def latest(folder: Path, say: Say) -> Path | None:
    """The newest whole checkpoint, or None if there is none at all.

    Args:
        folder: `out_dir/checkpoints`.
        say: told of every checkpoint that is passed over.

    Raises:
        InputError: there are checkpoints and all are damaged.
    """
    found = _newest_first(folder)
    for path in found:
        damage = damage_of(path)
        if damage is None:
            return path
        say(f"checkpoint {path} is damaged ({damage}): trying the one before")
    if found:
        raise InputError(
            f"every checkpoint in {folder} is damaged: start again in another out_dir, or "
            "restore one of them"
        )
    return None


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    try:
        state = json.loads((path / "state.json").read_text())
        if state["format"] != _FORMAT:
            return f"format {state['format']}, this version reads {_FORMAT}"
        for name in _FILES:
            if _fingerprint(path / name) != state["files"][name]:
                return f"{name} is truncated or altered"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def restore(path: Path, parts: Parts) -> Progress:
    """Loads a checkpoint.

    Effects: overwrites the head's parameters, the optimizer's and the scheduler's state, and
    torch's random state.

    Raises:
        InputError: the checkpoint is damaged, or of another head.
    """
    damage = damage_of(path)
    if damage is not None:
        raise InputError(f"checkpoint {path} is damaged: {damage}")
    state = json.loads((path / "state.json").read_text())
    try:
        parts.head.load_state_dict(load_file(path / "head.safetensors"))
        parts.optimizer.load_state_dict(
            _unflatten(load_file(path / "optimizer.safetensors"), state["param_groups"])
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(f"checkpoint {path} is of another head: {error}") from error
    # The schedule's functions are the code's; None means keep them.
    lambdas = [None] * len(state["param_groups"])
    parts.scheduler.load_state_dict({**state["scheduler"], "lr_lambdas": lambdas})
    _set_random_state(load_file(path / "random.safetensors"))
    return Progress(state["step"], state["tokens"], state["position"], state["run"])


def _newest_first(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def _fingerprint(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}


def _stored(value: Tensor) -> Tensor:
    # A clone, because safetensors refuses tensors that share memory.
    return value.detach().to("cpu", copy=True).contiguous()


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """An optimizer's state as named tensors `<parameter>.<key>` and JSON groups."""
    tensors = {
        f"{index}.{key}": _stored(torch.as_tensor(value))
        for index, values in state["state"].items()
        for key, value in values.items()
    }
    return tensors, [_plain(group) for group in state["param_groups"]]


def _unflatten(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    tuples = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in groups
    ]
    return {"state": state, "param_groups": tuples}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Without what JSON cannot hold (the schedule's function, which the code supplies)."""
    return {key: value for key, value in values.items() if key != "lr_lambdas"}


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().cpu()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
