"""What the loop is given, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.settings.training import LogConfig, TrainConfig
from train.batch.prefetch import Dataset
from train.loop.rounds import Rollouts
from train.objective import Objective

Evaluate = Callable[[Any], dict[str, float]]


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        config: the loop's settings.
        log: the tracker's.
        seed: orders sequences, and seeds whatever an objective draws.
        out_dir: gets `checkpoints/`, `metrics.jsonl` and at the end `head/`.
        objective: what is trained.
        train: packed sequences, each a dict of [T] tensors.
        heldout: the same, to evaluate on.
        provenance: written as `head/headsmith.json`.
        made_of: the statement of the target and of the training data.
        goes_on: the head was trained before, so it is evaluated before its first step too.
        rollouts: answers of the target that are learnt in place of those of `train`.
        evaluate: more figures at each evaluation, from the head in eval mode, on rank 0 only;
            their names get the prefix `eval/`.
    """

    config: TrainConfig
    log: LogConfig
    seed: int
    out_dir: Path
    objective: Objective
    train: Dataset
    heldout: Dataset
    provenance: dict[str, Any] = field(default_factory=dict)
    made_of: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    rollouts: Rollouts | None = None
    evaluate: Evaluate | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished` is false if a signal stopped it at `step`."""

    finished: bool
    step: int
    evaluation: dict[str, float]
