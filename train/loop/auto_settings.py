"""Numbers for settings that are `auto`, in epochs or in tokens."""

import math
from dataclasses import replace

from conf.settings.checks import AUTO
from conf.settings.training import Optimizer, Schedule, TrainConfig
from train.objective import Objective

WARMUP_FRACTION = 0.04
RATES_OF_TRAINED = 0.2
"""Share of the usual learning rate for a head that was trained before. At the full rate an
EAGLE-3.1 head of 2.5 million tokens fell from tau 3.18 to 3.01 in 100 steps; at a fifth it rose to
3.24."""


def resolve_length(
    config: TrainConfig, num_sequences: int, length: int, num_processes: int
) -> TrainConfig:
    """Put numbers for `batch_tokens`, `num_epochs` and an unset warm-up.

    Args:
        config: the run's; its `batch_size`, if that is what counts, divides among the processes.
        num_sequences: packed sequences to train on.
        length: tokens of one.
        num_processes: of the launch.

    Raises:
        InputError: a warm-up longer than the run.
    """
    if config.batch_tokens is not None:
        share = num_processes * config.micro_batch_size
        number = share * round(config.batch_tokens / length / share)
        config = replace(config, batch_size=max(share, number), batch_tokens=None)
    if config.num_epochs is not None:
        max_steps = math.ceil(config.num_epochs * num_sequences / config.batch_size)
        config = replace(config, max_steps=max_steps, num_epochs=None)
    if config.warmup_steps is None:
        config = replace(config, warmup_steps=round(WARMUP_FRACTION * config.max_steps))
    return config


def resolve_optimizer(
    config: TrainConfig, objective: Objective, deepspeed: bool, trained: bool = False
) -> tuple[TrainConfig, str]:
    """Put an optimizer, rates and schedule for `auto`.

    Args:
        config: the run's.
        objective: knows what suits its head.
        deepspeed: whether it lays out the parameters, flat, which Muon cannot read.
        trained: whether the head was trained before.

    Returns:
        The settings, rates as numbers; and a line for the user.
    """
    optimizer = config.optimizer
    if optimizer is Optimizer.auto:
        optimizer = Optimizer.adamw if deepspeed else objective.default_optimizer
    share = RATES_OF_TRAINED if trained else 1.0
    given = config.learning_rate, config.adam_learning_rate
    usual = objective.compute_default_rates(optimizer)
    rate, adam = (
        share * usual_rate if value == AUTO else float(value)
        for value, usual_rate in zip(given, usual, strict=True)
    )
    said, said_adam = (
        f"{number:.2g} (auto)" if value == AUTO else f"{number:.2g}"
        for value, number in zip(given, (rate, adam), strict=True)
    )
    line = f"optimizer: AdamW at {said}"
    if optimizer is Optimizer.muon:
        line = f"optimizer: Muon at {said} for hidden matrices, AdamW at {said_adam} for the rest"
    config = replace(config, optimizer=optimizer, learning_rate=rate, adam_learning_rate=adam)
    if config.schedule is Schedule.auto:
        config = replace(config, schedule=objective.default_schedule)
    return config, f"{line}; schedule: {config.schedule.value}"


def format_run_length(config: TrainConfig, num_sequences: int, length: int) -> str:
    """Length of a run for people: `290 steps of 4 x 512 = 2,048 tokens, 1.0 epochs`."""
    epochs = config.max_steps * config.batch_size / max(1, num_sequences)
    tokens = config.batch_size * length
    return (
        f"{config.max_steps} steps of {config.batch_size} x {length} = {tokens:,} tokens, "
        f"{epochs:.1f} epochs"
    )
