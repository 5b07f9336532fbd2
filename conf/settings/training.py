"""Settings of training, the same for every head."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import AUTO, below_one, not_negative, positive
from conf.settings.data import DataConfig, PackedRun
from conf.settings.target import Dtype


class Optimizer(Enum):
    """Optimizers of a head."""

    auto = "auto"
    """What gives the better head of a kind; under DeepSpeed AdamW."""
    adamw = "adamw"
    muon = "muon"
    """Muon for matrices between hidden states, AdamW for output heads, norms and biases."""


class Schedule(Enum):
    """Learning-rate schedule after the warm-up."""

    auto = "auto"
    """`wsd` for EAGLE heads, `cosine` for Medusa's."""
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


class Tracker(Enum):
    """Trackers of metrics, besides `metrics.jsonl`."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"


@dataclass
class TrainConfig:
    """The optimisation loop, the same for every head."""

    max_steps: int = 1000
    """Optimizer steps."""
    num_epochs: float | None = None
    """In place of `max_steps`: how often each packed sequence is seen."""
    batch_size: int = 8
    """Packed sequences per optimizer step, over all processes."""
    batch_tokens: int | None = None
    """In place of `batch_size`: tokens per optimizer step, to the nearest batch that divides."""
    micro_batch_size: int = 1
    """Packed sequences per forward pass of one process."""
    optimizer: Optimizer = Optimizer.auto
    learning_rate: float | int | str = AUTO
    """Highest of the schedule; `auto` takes one by kind of head, optimizer and width, and a fifth
    of it for a head that was trained before."""
    adam_learning_rate: float | int | str = AUTO
    """The same for what AdamW updates beside Muon."""
    weight_decay: float = 0.0
    """Share of a weight, times the learning rate, that a step takes from it."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment; the first's is 0.9."""
    max_grad_norm: float | None = 1.0
    """A gradient whose norm is larger is scaled down to it; unset scales none."""
    max_grad_value: float | None = None
    """Each number of a gradient is clipped to it, either way; unset clips none."""
    schedule: Schedule = Schedule.auto
    warmup_steps: int | None = None
    """Optimizer steps of linear warm-up; unset takes 4% of `max_steps`."""
    decay_fraction: float = 0.2
    """Share of the steps in which the `wsd` schedule decays to zero."""
    average_decay: float | None = None
    """Of the exponential moving average of the weights, by step, which is then what is evaluated
    and saved; unset keeps none."""
    dtype: Dtype = Dtype.auto
    """Autocast dtype of the head; its parameters and optimizer state stay float32."""
    compile: bool | None = None
    """torch.compile the loss and the head's layers; unset means on CUDA, and on a CPU in an EAGLE
    run that is long enough to pay for it, where a compiler and Python.h are there."""
    eval_steps: int = 200
    """Optimizer steps between evaluations."""
    num_eval_sequences: int = 32
    """Packed held-out sequences per evaluation."""
    num_replay_prompts: int = 16
    """Held-out prompts on which each evaluation replays tau, from 64 tokens of the target's own
    text each; 0 for none."""
    save_steps: int = 200
    """Optimizer steps between checkpoints."""
    num_checkpoints: int = 2
    """Checkpoints kept, newest first."""
    resume: str | None = None
    """`auto` continues from the newest checkpoint in `out_dir`; or a checkpoint folder."""
    log_steps: int = 10
    """Optimizer steps between metric lines."""

    def __post_init__(self) -> None:
        positive(
            "train", self, "max_steps", "num_epochs", "batch_size", "batch_tokens",
            "micro_batch_size", "max_grad_norm", "max_grad_value", "eval_steps",
            "num_eval_sequences", "save_steps", "num_checkpoints", "log_steps",
        )  # fmt: skip
        if not 0 < self.adam_beta2 < 1:
            raise InputError(f"train.adam_beta2={self.adam_beta2}: must be between 0 and 1")
        below_one("train", self, "average_decay")
        not_negative("train", self, "num_replay_prompts", "weight_decay")
        for name in ("learning_rate", "adam_learning_rate"):
            rate = getattr(self, name)
            if rate != AUTO and (isinstance(rate, str) or rate <= 0):
                raise InputError(f"train.{name}={rate}: must be above 0, or {AUTO}")
        not_negative("train", self, "warmup_steps")
        counted = self.num_epochs is None  # otherwise looked at when the data are known
        if counted and (self.warmup_steps or 0) >= self.max_steps:
            raise InputError(
                f"train.warmup_steps={self.warmup_steps}: must be below "
                f"train.max_steps={self.max_steps}"
            )


@dataclass
class LogConfig:
    """Experiment tracking; never stops a run."""

    tracker: Tracker = Tracker.none
    project: str = "headsmith"
    """Name of the project there."""
    run_name: str | None = None
    """Name of the run there; unset means the tracker's choice."""


@dataclass
class RolloutConfig:
    """The target's own answers, written while a head is trained, in place of those of the data."""

    steps: int | None = None
    """Optimizer steps that learn from a round of answers; unset learns those of the data."""
    max_new_tokens: int = 256
    """Tokens of an answer at most; with its prompt it is cut to `data.max_length`."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    batch_size: int = 16
    """Answers that a process writes, or asks for, side by side."""
    endpoint: str | None = None
    """URL of a vLLM server of the target, e.g. http://localhost:8000/v1, that answers instead;
    its key, if it needs one, is OPENAI_API_KEY's. Unset: the servers of `target.engine`, if
    there are any."""

    def __post_init__(self) -> None:
        positive("rollout", self, "steps", "max_new_tokens", "batch_size")
        not_negative("rollout", self, "temperature")


@dataclass
class TrainRun(PackedRun):
    """A training; beside these settings comes `head`, of its own kind."""

    # Of a target that changes: neither its answers nor its stored states would last.
    rollout = RolloutConfig()

    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    out_dir: str = "outputs/head"
    """Folder for the head, its checkpoints and metrics."""
    seed: int = 0
    """Of new weights, the order of data, noise and draws."""

    def __post_init__(self) -> None:
        if self.target.engine and not isinstance(self, FrozenTargetRun):
            raise InputError(
                f"target.engine={self.target.engine}: this command trains the target itself, and "
                "needs its layers; unset it"
            )


@dataclass
class FrozenTargetRun(TrainRun):
    """A training beside a target that stays as it is."""

    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target.engine and self.data.features is not None:
            raise InputError(
                f"target.engine={self.target.engine}: data.features={self.data.features} holds the "
                "states that engines would give; unset one of them"
            )
        if self.rollout.steps is not None and self.data.features is not None:
            raise InputError(
                f"rollout.steps={self.rollout.steps}: the target answers while training, so it is "
                f"needed itself; unset data.features={self.data.features} and name the data"
            )
