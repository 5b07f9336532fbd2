"""Write and read checkpoints, whole or not at all: `out_dir/checkpoints/step-000200/`.

A folder is written under a temporary name, synced and renamed. `state.json` comes last and holds
the size and CRC-32 of every other file, so damage is noticed. Tensors are safetensors, the rest is
JSON; nothing is unpickled.

Tensors are whole and named after parameters, so a checkpoint fits any number of processes and any
strategy. Learning rate, order of sequences and random draws follow from the step and are not
stored.

Settings that decide a run's result must not change when it continues. Every setting is compared
except those listed here, so new settings are compared too.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conf.command.run_record import (
    find_changed_keys,
    format_changes,
    format_setting,
    to_json,
)
from conf.errors import InputError
from conf.settings.training import Schedule, TrainConfig
from heads.folders import write_folder
from heads.vocab import DraftVocab
from train.parallel.optimizers import compute_rate_fraction

_FORMAT = 2
_FILES = ("head.safetensors", "optimizer.safetensors")
_KEPT = "kept.safetensors"
ONLY_WATCHED = (
    "eval_steps", "num_eval_sequences", "num_replay_prompts", "save_steps", "num_checkpoints",
    "resume", "log_steps", "keep",
)  # fmt: skip
"""Settings of `train.*` that only observe or save a run."""
SETTLED = ("num_epochs",)
"""Settings that other compared ones say again: `max_steps` is settled from the epochs."""
ONLY_ROUNDED = ("micro_batch_size", "dtype", "compile")
"""Settings that only change the order or width of the arithmetic, like the number of processes.
Weights and optimizer state stay float32."""
NOT_COMPARED = {
    "train": (*ONLY_WATCHED, *ONLY_ROUNDED, *SETTLED),
    "head": ("path", "revision"),
    "rollout": ("endpoint",),
}
"""Fields that are not compared, by prefix. The checkpoint holds the head, wherever it came from; a
target gives the same hidden states wherever it is served."""
SCHEDULE = ("max_steps", "warmup_steps", "schedule", "decay_fraction")
"""Settings that may change if every step so far keeps its rate. A constant rate may start to decay
at any step."""
KIND = "kind of head"
TYPED = ("seed", "train.", "head.", "rollout.", "adapter.", "joint.", "data.max_length")
"""Beginnings of the compared keys that are settings of the command line."""
TOKENS = ("input_ids", "loss_mask", "document_ids")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: optimizer steps done.
        tokens: tokens read, padding not counted.
        run: settings by key that must not change when the run continues.
        skipped: indices of skipped sequences.
        kept: fields of `train.loop.evaluation.KeptHead` before this step's evaluation, if any.
    """

    step: int
    tokens: int
    run: dict[str, Any]
    skipped: list[int] = field(default_factory=list)
    kept: dict[str, Any] | None = None


@dataclass(frozen=True)
class CheckpointTensors:
    """Whole tensors of a head and its optimizers, on the CPU.

    Attributes:
        head: parameters by name, frozen ones too.
        state: optimizer state, by `<parameter>.<name>`.
        kept: tensors of the kept head by their names in its file; none without `Progress.kept`.
    """

    head: dict[str, Tensor]
    state: dict[str, Tensor]
    kept: dict[str, Tensor] = field(default_factory=dict)


def save_checkpoint(
    folder: Path, tensors: CheckpointTensors, progress: Progress, keep: int
) -> Path:
    """Write a checkpoint and remove all but the newest `keep`.

    Checkpoints of later steps are removed, too. They belong to a run that was given up when this
    one resumed from an earlier step, and `find_latest_checkpoint` must not return them.

    Args:
        folder: `out_dir/checkpoints`.
        tensors: tensors of the head and its optimizers.
        progress: progress of the run.
        keep: number of checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        InputError: the disk is full. Earlier checkpoints stay intact.
    """
    final = folder / f"step-{progress.step:06d}"

    def fill(staging: Path) -> None:
        files = dict(zip(_FILES, (tensors.head, tensors.state), strict=True))
        files |= {_KEPT: tensors.kept} if tensors.kept else {}
        for name, content in files.items():
            save_file(content, staging / name)
        state = {
            "format": _FORMAT,
            **asdict(progress),
            # Earlier versions read this key.
            "position": progress.step * progress.run.get("train.batch_size", 0),
            "files": {name: _compute_file_checksum(staging / name) for name in files},
        }
        (staging / "state.json").write_text(json.dumps(state, indent=1))

    write_folder(final, fill)
    saved = _list_newest_first(folder)
    abandoned = [path for path in saved if int(path.name[5:]) > progress.step]
    leftovers = [*folder.glob(".writing-*"), *folder.glob(".old-*")]
    for path in (*abandoned, *saved[len(abandoned) :][keep:], *leftovers):
        shutil.rmtree(path, ignore_errors=True)
    return final


def find_latest_checkpoint(folder: Path, say: Say) -> Path | None:
    """Find the newest whole checkpoint; None without checkpoints.

    Args:
        folder: `out_dir/checkpoints`.
        say: function that prints which damaged checkpoints are passed over.

    Raises:
        InputError: all checkpoints are damaged.
    """
    saved = _list_newest_first(folder)
    for path in saved:
        damage = describe_damage(path)
        if damage is None:
            return path
        say(f"checkpoint {path} is damaged ({damage}); trying the one before")
    if saved:
        raise InputError(
            f"train.resume: every checkpoint in {folder} is damaged; restore one of them, or start "
            "again in another out_dir"
        )
    return None


def describe_damage(path: Path) -> str | None:
    """Describe the damage of a checkpoint; None if it is whole."""
    try:
        state = json.loads((path / "state.json").read_text())
        if state["format"] != _FORMAT:
            return f"format {state['format']}, this version reads {_FORMAT}"
        for name in {*_FILES, *state["files"]}:
            if _compute_file_checksum(path / name) != state["files"][name]:
                return f"{name} is truncated or altered"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load_checkpoint(path: Path) -> tuple[Progress, CheckpointTensors]:
    """Load the progress of a checkpoint's run, and its tensors, mapped from the disk.

    Raises:
        InputError: the checkpoint is damaged or has another format.
    """
    damage = describe_damage(path)
    if damage is not None:
        raise InputError(
            f"train.resume={path}: the checkpoint is damaged: {damage}; name another one"
        )
    state = json.loads((path / "state.json").read_text())
    kept = state.get("kept")  # earlier versions lack these keys
    names = _FILES if kept is None else (*_FILES, _KEPT)
    tensors = CheckpointTensors(*(load_file(path / name) for name in names))
    skipped = state.get("skipped", [])
    return Progress(state["step"], state["tokens"], state["run"], skipped, kept), tensors


def check_checkpoint_fits(
    path: Path, tensors: CheckpointTensors, head: nn.Module, state_keys: Mapping[str, Iterable[str]]
) -> None:
    """Refuse a checkpoint of another head.

    Args:
        path: folder of the checkpoint.
        tensors: tensors of the checkpoint.
        head: head with whole parameters.
        state_keys: names of the optimizer states of each parameter, by the parameter's name.

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
        saved_shape, own_shape = (
            "none" if shape is None else str(list(shape))
            for shape in (saved.get(name), expected.get(name))
        )
        raise InputError(
            f"train.resume={path}: of another head: {name} has shape {saved_shape} there "
            f"and {own_shape} here, and {len(wrong)} tensors differ in all; set head.* and "
            "train.optimizer as in that run (adamw for early versions)"
        )


def check_resume_settings(
    path: Path, then: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, step: int
) -> list[str]:
    """Compare the settings of a run with those of the checkpoint from which it continues.

    Args:
        path: folder of the checkpoint.
        then: settings of the checkpoint's run, by key.
        now: settings of this run, by key.
        config: settings `train` of this run.
        step: optimizer steps done.

    Returns:
        Keys that the checkpoint does not record, as an earlier version wrote it.

    Raises:
        InputError: naming each key that differs.
    """
    unknown = [key for key in now if key not in then]
    before = copy(config)
    for name in SCHEDULE:
        value = then.get(f"train.{name}", to_json(getattr(config, name)))
        setattr(before, name, Schedule(value) if name == "schedule" else value)
    same_rates = all(
        compute_rate_fraction(before, done) == compute_rate_fraction(config, done)
        for done in range(step)
    )
    keys = [
        key
        for key in find_changed_keys(then, now)
        if key in then and key in now
        and not (key.removeprefix("train.") in SCHEDULE and same_rates)
    ]  # fmt: skip
    if KIND in keys:  # the other differences follow from it
        keys = [KIND]
    if keys:
        typed = [format_setting(key, then[key]) for key in keys if key.startswith(TYPED)]
        remedy = f" (type {' '.join(typed)})" if typed else ""
        raise InputError(
            f"train.resume={path}: made with other settings: {format_changes(then, now, keys)}. "
            f"Continue with the checkpoint's settings{remedy}, or start a new run in another "
            "out_dir, from this head if you like (head.path)"
        )
    return unknown


def collect_resume_settings(prefix: str, config: Any) -> dict[str, Any]:
    """Collect the compared fields of a settings dataclass, by configuration key, as JSON values."""
    ignored = NOT_COMPARED.get(prefix, ())
    names = [field.name for field in fields(config) if field.name not in ignored]
    return {f"{prefix}.{name}": to_json(getattr(config, name)) for name in names}


def collect_vocab_checksum(vocab: DraftVocab) -> dict[str, int]:
    """Collect the CRC-32 of a draft vocabulary's ids, by key; nothing on `meta`.

    On `meta`, only memory is estimated.
    """
    if vocab.ids.is_meta:
        return {}
    return {"checksum of the draft vocabulary": zlib.crc32(vocab.ids.cpu().numpy().tobytes())}


def compute_token_checksum(sequence: Mapping[str, Tensor]) -> int:
    """Compute the CRC-32 of a sequence's tokens.

    Hidden states do not count, as their format may change.
    """
    names = [name for name in TOKENS if name in sequence]
    return sum(zlib.crc32(sequence[name].numpy().tobytes()) for name in names)


def _list_newest_first(folder: Path) -> list[Path]:
    saved = [p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(saved, key=lambda p: int(p.name[5:]), reverse=True)


def _compute_file_checksum(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}
