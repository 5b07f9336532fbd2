"""Settings that decide the result of a run, and so must not change when it continues.

Every setting is compared but what is listed here, so one that is added later is too.
"""

import zlib
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.command.statement import changed, differences, plain
from conf.errors import InputError
from conf.settings.training import Schedule, TrainConfig
from train.schedule import rate

ONLY_WATCHED = (
    "eval_steps", "num_eval_sequences", "num_replay_prompts", "save_steps", "num_checkpoints",
    "resume", "log_steps",
)  # fmt: skip
"""Settings of `train.*` that look at a run, or keep it."""
ONLY_ROUNDED = ("micro_batch_size", "dtype", "compile")
"""Settings that change the order or the width of the same arithmetic, as the number of processes
does; weights and the optimizer's state are float32 under all of them."""
NOT_COMPARED = {
    "train": (*ONLY_WATCHED, *ONLY_ROUNDED),
    "head": ("path", "revision"),
    "rollout": ("endpoint",),
}
"""Ignored fields by prefix. A head comes from the checkpoint, wherever it came from at first; a
target says the same wherever it is served."""
SCHEDULE = ("max_steps", "warmup_steps", "schedule", "decay_fraction")
"""Settings that may change as long as every step done so far keeps its rate: a constant rate may
begin to decay at any step."""
KIND = "kind of head"
TOKENS = ("input_ids", "loss_mask", "document_ids")


def settings(prefix: str, config: Any) -> dict[str, Any]:
    """Compared fields of a dataclass by configuration key, as JSON holds them."""
    ignored = NOT_COMPARED.get(prefix, ())
    names = [field.name for field in fields(config) if field.name not in ignored]
    return {f"{prefix}.{name}": plain(getattr(config, name)) for name in names}


def checksum(sequence: Mapping[str, Tensor]) -> int:
    """CRC-32 of a sequence's tokens; states, if a store has them, may come in any format."""
    names = [name for name in TOKENS if name in sequence]
    return sum(zlib.crc32(sequence[name].numpy().tobytes()) for name in names)


def check(
    path: Path, then: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, step: int
) -> list[str]:
    """Compare a run with the checkpoint that it continues from.

    Args:
        path: the checkpoint.
        then: settings of the run that made it, by key.
        now: settings of this run.
        config: this run's.
        step: optimizer steps done.

    Returns:
        Keys that the checkpoint, of an earlier version, says nothing about.

    Raises:
        InputError: naming each key that differs.
    """
    unknown = [key for key in now if key not in then]
    before = copy(config)
    for name in SCHEDULE:
        value = then.get(f"train.{name}", plain(getattr(config, name)))
        setattr(before, name, Schedule(value) if name == "schedule" else value)
    same_rates = all(rate(before, done) == rate(config, done) for done in range(step))
    keys = [
        key
        for key in changed(then, now)
        if key in then and key in now
        and not (key.removeprefix("train.") in SCHEDULE and same_rates)
    ]  # fmt: skip
    if KIND in keys:  # the rest differs for that reason
        keys = [KIND]
    if keys:
        raise InputError(
            f"train.resume: {path} was made in another way: {differences(then, now, keys)}. "
            "Continue with what it was made with, or begin another run in another out_dir, from "
            "the head of this one if you like (head.path)"
        )
    return unknown
