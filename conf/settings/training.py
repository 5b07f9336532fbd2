"""Settings of training, the same for every head."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import AUTO, check_below_one, check_not_negative, check_positive
from conf.settings.data import DataConfig, PackedRun
from conf.settings.target import Dtype


class Optimizer(Enum):
    """Optimizer of the head."""

    auto = "auto"
    """The better one for the kind of head; AdamW under DeepSpeed."""
    adamw = "adamw"
    muon = "muon"
    """Muon for matrices between hidden states; AdamW for output heads, norms and biases."""


class Schedule(Enum):
    """Learning-rate schedule after the warm-up."""

    auto = "auto"
    """`wsd` for EAGLE heads, `cosine` for Medusa heads."""
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


class Keep(Enum):
    """Step whose head a run leaves."""

    best = "best"
    """The latest step whose held-out tau is not below the best one's, by the 95% interval of their
    difference over the held-out texts."""
    last = "last"


class Tracker(Enum):
    """Tracker of metrics, besides `metrics.jsonl`."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"


@dataclass
class TrainConfig:
    """The training loop, the same for every head."""

    max_steps: int | None = None
    """Optimizer steps, instead of `num_epochs`. Unset: `num_epochs` over the data."""
    num_epochs: float | None = None
    """Passes over the packed sequences, where `max_steps` is unset. Unset: as many as read 30
    million tokens, at least 3 and at most 10."""
    batch_size: int = 8
    """Packed sequences per optimizer step, over all processes."""
    batch_tokens: int | None = None
    """Tokens per optimizer step, instead of `batch_size`. Rounded to a batch that divides."""
    micro_batch_size: int = 1
    """Packed sequences per forward pass of one process."""
    optimizer: Optimizer = Optimizer.auto
    learning_rate: float | int | str = AUTO
    """Peak learning rate. `auto` depends on the kind of head, optimizer and width, and is five
    times smaller for a trained head."""
    adam_learning_rate: float | int | str = AUTO
    """Peak learning rate of the weights that AdamW updates beside Muon."""
    weight_decay: float = 0.0
    """Weight decay: each step subtracts this share of a weight, times the learning rate."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment. The first moment's is 0.9."""
    max_grad_norm: float | None = 1.0
    """Largest norm of the gradient; larger gradients are scaled down. Unset: no limit."""
    max_grad_value: float | None = None
    """Largest absolute value in the gradient; larger values are clipped. Unset: no limit."""
    schedule: Schedule = Schedule.auto
    warmup_steps: int | None = None
    """Optimizer steps of linear warm-up. Unset: 4% of `max_steps`."""
    decay_fraction: float = 0.2
    """Share of the steps in which the `wsd` schedule decays to zero."""
    average_decay: float | None = None
    """Decay per step of the exponential moving average of the weights, which is then evaluated and
    saved. Unset: no average."""
    dtype: Dtype = Dtype.auto
    """Autocast dtype of the head. Parameters and optimizer state stay float32."""
    compile: bool | None = None
    """Compile the loss and the head's layers (torch.compile). Unset: on CUDA, and on a CPU for long
    EAGLE runs if a compiler and Python.h are installed."""
    eval_steps: int = 200
    """Optimizer steps between evaluations."""
    num_eval_sequences: int = 32
    """Packed held-out sequences per evaluation."""
    num_replay_prompts: int = 16
    """Held-out prompts on which each evaluation replays tau, over 64 tokens of the target's own
    text each. 0: none."""
    keep: Keep = Keep.best
    """Step whose head lies in `head` at the end."""
    save_steps: int = 200
    """Optimizer steps between checkpoints."""
    num_checkpoints: int = 2
    """Number of checkpoints to keep, the newest ones."""
    resume: str | None = None
    """Checkpoint to continue from: a folder, or `auto` for the newest in `out_dir`. Unset: start
    anew."""
    log_steps: int = 10
    """Optimizer steps between metric lines."""

    def __post_init__(self) -> None:
        check_positive(
            "train", self, "max_steps", "num_epochs", "batch_size", "batch_tokens",
            "micro_batch_size", "max_grad_norm", "max_grad_value", "eval_steps",
            "num_eval_sequences", "save_steps", "num_checkpoints", "log_steps",
        )  # fmt: skip
        if not 0 < self.adam_beta2 < 1:
            raise InputError(f"train.adam_beta2={self.adam_beta2}: must be between 0 and 1")
        check_below_one("train", self, "average_decay")
        check_not_negative("train", self, "num_replay_prompts", "weight_decay")
        for name in ("learning_rate", "adam_learning_rate"):
            rate = getattr(self, name)
            if rate != AUTO and (isinstance(rate, str) or rate <= 0):
                raise InputError(f"train.{name}={rate}: must be above 0, or {AUTO}")
        check_not_negative("train", self, "warmup_steps")
        # Without max_steps, looked at when the data are known.
        if self.max_steps is not None and (self.warmup_steps or 0) >= self.max_steps:
            raise InputError(
                f"train.warmup_steps={self.warmup_steps}: must be below "
                f"train.max_steps={self.max_steps}"
            )

    @property
    def num_steps(self) -> int:
        """Return `max_steps`, once the data have settled it."""
        assert self.max_steps is not None, "not settled"
        return self.max_steps


@dataclass
class LogConfig:
    """Experiment tracking. A failing tracker does not stop a run."""

    tracker: Tracker = Tracker.none
    project: str = "headsmith"
    """Project name in the tracker."""
    run_name: str | None = None
    """Run name in the tracker. Unset: the tracker chooses."""


@dataclass
class RolloutConfig:
    """Answers that the target writes during training, which replace the data's answers."""

    steps: int | None = None
    """Optimizer steps per round of answers. Unset: learn the data's answers."""
    max_new_tokens: int = 256
    """Largest number of tokens per answer. Prompt and answer are cut to `data.max_length`."""
    temperature: float = 0.0
    """Sampling temperature. 0 takes the likeliest token."""
    batch_size: int = 16
    """Answers per process to write, or to request, at once."""
    endpoint: str | None = None
    """URL of a vLLM server that writes the answers, e.g. http://localhost:8000/v1. Its key, if
    needed, is in OPENAI_API_KEY. Unset: the servers of `target.engine`, if any, else this
    process."""

    def __post_init__(self) -> None:
        check_positive("rollout", self, "steps", "max_new_tokens", "batch_size")
        check_not_negative("rollout", self, "temperature")


@dataclass
class TrainRun(PackedRun):
    """Training of a head. Subclasses add the settings `head`."""

    # For a target that changes in training: its answers and stored states would go stale.
    rollout = RolloutConfig()

    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    out_dir: str = "outputs/head"
    """Folder for the head, its checkpoints and metrics."""
    seed: int = 0
    """Seed of new weights, data order, noise and sampling."""

    def __post_init__(self) -> None:
        if self.target.engine and not isinstance(self, FrozenTargetRun):
            raise InputError(
                f"target.engine={self.target.engine}: this command trains the target's layers, so "
                "it must load them; leave target.engine unset"
            )


@dataclass
class FrozenTargetRun(TrainRun):
    """Training of a head on a frozen target."""

    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target.engine and self.data.features is not None:
            raise InputError(
                f"target.engine={self.target.engine}: data.features={self.data.features} already "
                "holds the states that the engine would give; unset one of them"
            )
        if self.rollout.steps is not None and self.data.features is not None:
            raise InputError(
                f"rollout.steps={self.rollout.steps}: the target must answer during training; "
                f"unset data.features={self.data.features} and set data.path"
            )
