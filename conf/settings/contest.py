"""Settings of `scripts/contest/run.py`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import positive
from conf.settings.data import DataConfig, DataRun


class ContestPart(Enum):
    """What a contest does, in this order."""

    plan = "plan"
    """Probe every recipe, and settle how many steps it gets."""
    train = "train"
    measure = "measure"
    report = "report"


@dataclass
class ContestTrainConfig:
    """What all trainings have alike."""

    batch_size: int = 8
    """Packed sequences per optimizer step, over all processes."""
    micro_batch_size: int = 1
    """Packed sequences per forward pass of one process."""

    def __post_init__(self) -> None:
        positive("train", self, "batch_size", "micro_batch_size")


@dataclass
class ContestRun(DataRun):
    """`scripts/contest/run.py`; `data` is what is learnt, `prompts` what is measured on."""

    prompts: DataConfig = field(default_factory=DataConfig)
    """Unset `prompts.path` means the embedded default's."""
    recipes: list[str] = field(default_factory=lambda: ["medusa", "eagle3_1", "dspark"])
    """Heads to train: `medusa`, or a recipe of `conf/head`; settings may follow, as in
    `dspark head.num_layers=2`."""
    tokens: int | None = None
    """Tokens that each recipe learns, padding included; either this or `minutes`."""
    minutes: float | None = None
    """Of optimizer steps on this machine, in all; recipes have equal shares."""
    train: ContestTrainConfig = field(default_factory=ContestTrainConfig)
    launch: list[str] = field(default_factory=list)
    """Arguments of `accelerate launch` for trainings, e.g.
    [--config_file,conf/accelerate/ddp.yaml]; empty starts them by plain python."""
    untrained: list[str] = field(
        default_factory=lambda: ["prompt_lookup", "ngram", "suffix", "recycling"]
    )
    """Methods of `eval/speedup.py` without a head that compete."""
    concurrency: list[int] = field(default_factory=lambda: [1, 4])
    """Batch sizes at which tokens/s are predicted and measured."""
    max_new_tokens: int = 128
    """Tokens of an answer at most."""
    num_turns: int = 2
    """Questions of a dialogue that are asked."""
    num_repeats: int = 3
    """Timed passes over the prompts."""
    probe_steps: int = 8
    """Optimizer steps of the run that tells what a step takes."""
    parts: list[ContestPart] = field(default_factory=lambda: list(ContestPart))
    """What this start does; what is there is not made again."""
    out_dir: str = "outputs/contest"
    """A second start goes on."""
    seed: int = 0
    """Of weights, data and draws."""

    def __post_init__(self) -> None:
        positive("", self, "tokens", "minutes", "max_new_tokens", "num_turns", "num_repeats")
        if self.probe_steps < 4:
            raise InputError(f"probe_steps={self.probe_steps}: must be at least 4")
        if not self.recipes:
            raise InputError("recipes=[]: name at least one")
        if not self.concurrency or min(self.concurrency) < 1:
            raise InputError(f"concurrency={self.concurrency}: must be numbers above 0")
        if self.data.features is not None:
            raise InputError(f"data.features={self.data.features}: unset it and set data.path")
