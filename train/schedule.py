"""Sequences and learning rate of each optimizer step, as pure functions."""

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

from conf.settings.training import Schedule, TrainConfig


def draw_global_batch(step: int, batch_size: int, num_sequences: int, seed: int) -> list[int]:
    """Global batch of a step, the same for any number of processes.

    Batches are cut from an endless row of per-epoch permutations. A batch may end one epoch and
    begin the next, and resuming needs only a position in the row.

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
        batch += _draw_permutation(epoch, num_sequences, seed)[offset:end].tolist()
    return batch


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _draw_permutation(epoch: int, num_sequences: int, seed: int) -> Tensor:
    """[num_sequences] int64."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_sequences, generator=generator)


def hash_seed(*numbers: int) -> int:
    """Seed from 0 to 2^63 - 1, hashed from numbers; the same on every machine."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def split_micro_batches(
    batch: list[int], rank: int, num_processes: int, size: int
) -> list[list[int]]:
    """Share of a process in a global batch, as forward passes of `size` sequences."""
    share = len(batch) // num_processes
    own = batch[rank * share : (rank + 1) * share]
    return [own[start : start + size] for start in range(0, share, size)]


def compute_late_warmup(config: TrainConfig, step: int, first_step: int) -> float:
    """Share of `rate` for parameters that a later step trains first.

    AdamW's first steps have full length even for tiny gradients, so parameters that join later get
    a warm-up too.
    """
    if first_step == 0 or not config.warmup_steps:
        return 1.0
    return min(1.0, max(0, step - first_step + 1) / config.warmup_steps)


def compute_learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, from 0, once `auto` is settled."""
    return float(config.learning_rate) * compute_rate_fraction(config, step)


def compute_rate_fraction(config: TrainConfig, step: int) -> float:
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
