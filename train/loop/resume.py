"""Settings that decide a run's result and so must not change when it continues.

Every setting is compared except those listed here, so new settings are compared too.
"""

import zlib
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.command.run_record import find_changed_keys, format_changes, to_json
from conf.errors import InputError
from conf.settings.training import Schedule, TrainConfig
from train.schedule import compute_rate_fraction

ONLY_WATCHED = (
    "eval_steps", "num_eval_sequences", "num_replay_prompts", "save_steps", "num_checkpoints",
    "resume", "log_steps",
)  # fmt: skip
"""Settings of `train.*` that only observe or save a run."""
ONLY_ROUNDED = ("micro_batch_size", "dtype", "compile")
"""Settings that only change the order or width of the arithmetic, like the number of processes.
Weights and optimizer state stay float32."""
NOT_COMPARED = {
    "train": (*ONLY_WATCHED, *ONLY_ROUNDED),
    "head": ("path", "revision"),
    "rollout": ("endpoint",),
}
"""Ignored fields by prefix. The checkpoint holds the head, wherever it came from; a target gives
the same hidden states wherever it is served."""
SCHEDULE = ("max_steps", "warmup_steps", "schedule", "decay_fraction")
"""Settings that may change if every step so far keeps its rate. A constant rate may start to decay
at any step."""
KIND = "kind of head"
TOKENS = ("input_ids", "loss_mask", "document_ids")


def collect_resume_settings(prefix: str, config: Any) -> dict[str, Any]:
    """Compared fields of a dataclass by configuration key, as JSON values."""
    ignored = NOT_COMPARED.get(prefix, ())
    names = [field.name for field in fields(config) if field.name not in ignored]
    return {f"{prefix}.{name}": to_json(getattr(config, name)) for name in names}


def compute_token_checksum(sequence: Mapping[str, Tensor]) -> int:
    """CRC-32 of a sequence's tokens. Hidden states are left out, as their format may change."""
    names = [name for name in TOKENS if name in sequence]
    return sum(zlib.crc32(sequence[name].numpy().tobytes()) for name in names)


def check_resume_settings(
    path: Path, then: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, step: int
) -> list[str]:
    """Compare a run with the checkpoint that it continues from.

    Args:
        path: the checkpoint.
        then: settings of the checkpoint's run, by key.
        now: settings of this run, by key.
        config: training settings of this run.
        step: optimizer steps done.

    Returns:
        Keys that the checkpoint's earlier version did not record.

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
        raise InputError(
            f"train.resume={path}: made with other settings: {format_changes(then, now, keys)}. "
            "Continue with the checkpoint's settings, or start a new run in another out_dir, from "
            "this head if you like (head.path)"
        )
    return unknown
