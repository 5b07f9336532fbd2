"""Checkpoints that are whole or absent: `out_dir/checkpoints/step-000200/`.

A folder is written under a temporary name, synced and renamed. `state.json` comes last and
holds size and CRC-32 of every other file, so a truncated or altered file is noticed. Tensors
are safetensors, the rest is JSON; nothing is ever unpickled.

Tensors are whole and named after parameters, so a checkpoint fits any number of processes and
any way the head lies on them. Learning rate, order of sequences and random draws follow from
the step alone, so nothing of them is kept.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conf.errors import InputError
from heads.storage import write_folder

_FORMAT = 2
_FILES = ("head.safetensors", "optimizer.safetensors")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: optimizer steps done.
        tokens: tokens seen, padding not counted.
        run: settings that must be the same when the run continues, by configuration key.
        skipped: numbers of the sequences that are left out.
    """

    step: int
    tokens: int
    run: dict[str, Any]
    skipped: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Tensors:
    """A head and its optimizers, whole, on the CPU.

    Attributes:
        head: parameters by name, frozen ones too.
        state: of the optimizers, by `<parameter>.<name>`.
    """

    head: dict[str, Tensor]
    state: dict[str, Tensor]


def save(folder: Path, tensors: Tensors, progress: Progress, keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`.

    Checkpoints of later steps go too: they are of a run that was given up when this one
    continued from an earlier step, and `latest` must not return to it.

    Args:
        folder: `out_dir/checkpoints`.
        tensors: of the head and its optimizers.
        progress: of the run.
        keep: checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        InputError: the disk is full; earlier checkpoints are intact.
    """
    final = folder / f"step-{progress.step:06d}"

    def fill(staging: Path) -> None:
        for name, content in zip(_FILES, (tensors.head, tensors.state), strict=True):
            save_file(content, staging / name)
        state = {
            "format": _FORMAT,
            **asdict(progress),
            # For earlier versions, which read it.
            "position": progress.step * progress.run.get("train.batch_size", 0),
            "files": {name: _fingerprint(staging / name) for name in _FILES},
        }
        (staging / "state.json").write_text(json.dumps(state, indent=1))

    write_folder(final, fill)
    saved = _newest_first(folder)
    abandoned = [path for path in saved if int(path.name[5:]) > progress.step]
    leftovers = [*folder.glob(".writing-*"), *folder.glob(".old-*")]
    for path in (*abandoned, *saved[len(abandoned) :][keep:], *leftovers):
        shutil.rmtree(path, ignore_errors=True)
    return final


def latest(folder: Path, say: Say) -> Path | None:
    """Find the newest whole checkpoint; None if there is none at all.

    Args:
        folder: `out_dir/checkpoints`.
        say: told of every checkpoint that is passed over.

    Raises:
        InputError: there are checkpoints and all are damaged.
    """
    saved = _newest_first(folder)
    for path in saved:
        damage = damage_of(path)
        if damage is None:
            return path
        say(f"checkpoint {path} is damaged ({damage}): trying the one before")
    if saved:
        raise InputError(
            f"every checkpoint in {folder} is damaged: start again in another out_dir, or "
            "restore one of them"
        )
    return None


def damage_of(path: Path) -> str | None:
    """Say why a checkpoint is damaged; None if it is whole."""
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


def read(path: Path) -> tuple[Progress, Tensors]:
    """Read a checkpoint; its tensors are mapped, and come from the disk as they are used.

    Args:
        path: the checkpoint's folder.

    Raises:
        InputError: it is damaged, or of another format.
    """
    damage = damage_of(path)
    if damage is not None:
        raise InputError(f"checkpoint {path} is damaged: {damage}")
    state = json.loads((path / "state.json").read_text())
    tensors = Tensors(*(load_file(path / name) for name in _FILES))
    skipped = state.get("skipped", [])  # of an earlier version: none
    return Progress(state["step"], state["tokens"], state["run"], skipped), tensors


def check_fits(
    path: Path, tensors: Tensors, head: nn.Module, state_keys: Mapping[str, Iterable[str]]
) -> None:
    """Refuse a checkpoint of another head.

    Args:
        path: of the checkpoint.
        tensors: of the checkpoint.
        head: with whole parameters.
        state_keys: names of the optimizers' states of each parameter, by the parameter's name.

    Raises:
        InputError: naming a tensor that differs.
    """
    expected = {name: parameter.shape for name, parameter in head.named_parameters()}
    states = ((name, key) for name, keys in state_keys.items() for key in keys)
    expected |= {f"{name}.{key}": expected[name] for name, key in states}
    saved = {name: value.shape for name, value in (tensors.head | tensors.state).items()}
    wrong = [n for n in {**expected, **saved} if expected.get(n) != saved.get(n)]
    if wrong:
        name = wrong[0]
        there, here = (
            "none" if shape is None else str(list(shape))
            for shape in (saved.get(name), expected.get(name))
        )
        raise InputError(
            f"checkpoint {path} is of another head: {name} has shape {there} there and {here} "
            f"here, and so {len(wrong)} tensors differ; use the settings head.* of the run it is "
            "of, and its train.optimizer (adamw, if it is of a version that had no other)"
        )


def _newest_first(folder: Path) -> list[Path]:
    saved = [p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(saved, key=lambda p: int(p.name[5:]), reverse=True)


def _fingerprint(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}
