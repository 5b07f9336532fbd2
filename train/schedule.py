"""Sequences and learning rate of an optimizer step. Pure functions."""

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

from conf.settings.training import Schedule, TrainConfig


def sequences(step: int, batch_size: int, num_sequences: int, seed: int) -> list[int]:
    """Global batch of a step, the same for any number of processes.

    Batches are cut from an endless row of per-epoch permutations, so a batch may end one epoch
    and begin the next, and a position in the row is all that resuming needs.

    Args:
        step: optimizer step, from 0.
        batch_size: sequences per step.
        num_sequences: sequences in the dataset.
        seed: the run's seed.

    Returns:
        `batch_size` indices into the dataset.
    """
    batch: list[int] = []
    position = step * batch_size
    while len(batch) < batch_size:
        epoch, offset = divmod(position + len(batch), num_sequences)
        end = offset + batch_size - len(batch)
        batch += _permutation(epoch, num_sequences, seed)[offset:end].tolist()
    return batch


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _permutation(epoch: int, num_sequences: int, seed: int) -> Tensor:
    """[num_sequences] int64."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_sequences, generator=generator)


def draw_seed(*numbers: int) -> int:
    """Seed, from 0 to 2^63 - 1, made of numbers that decide it; alike everywhere."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def micro_batches(batch: list[int], rank: int, num_processes: int, size: int) -> list[list[int]]:
    """Share of a process in a global batch, in forward passes of `size` sequences."""
    share = len(batch) // num_processes
    own = batch[rank * share : (rank + 1) * share]
    return [own[start : start + size] for start in range(0, share, size)]


def late_warmup(config: TrainConfig, step: int, first_step: int) -> float:
    """Share of `rate` for parameters that are trained from a later step on.

    AdamW's first steps are as long as any, whatever little the gradient has to say, so parameters
    that join a run warm up like those that began it.
    """
    if first_step == 0 or not config.warmup_steps:
        return 1.0
    return min(1.0, max(0, step - first_step + 1) / config.warmup_steps)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, from 0, once `auto` is settled."""
    return float(config.learning_rate) * rate(config, step)


def rate(config: TrainConfig, step: int) -> float:
    """Share of `learning_rate` that optimizer step `step` (from 0) uses.

    Linear warm-up that starts above 0, so no step is wasted; then cosine to 0, constant, or
    constant with a linear decay to 0 over the last `decay_fraction` of the steps (wsd).
    """
    assert config.schedule is not Schedule.auto, "not settled"
    warmup_steps = config.warmup_steps or 0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = max(config.max_steps - step, 0)
    if config.schedule is Schedule.cosine:
        return 0.5 * (1 - math.cos(math.pi * left / (config.max_steps - warmup_steps)))
    if config.schedule is Schedule.wsd:
        return min(1.0, left / max(1.0, config.decay_fraction * config.max_steps))
    return 1.0
