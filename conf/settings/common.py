"""Every setting of every command: name, type, default, unit and check.

YAML files under `conf/` only select and override; a key that is not here fails at the
command line. Entry scripts receive these dataclasses, never a `DictConfig`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from conf.errors import InputError

AUTO = "auto"
"""A setting that is chosen once the target is known."""


class Dtype(Enum):
    """Parameter dtype; `auto` is bfloat16 on CUDA and float32 on CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantization(Enum):
    """Weight quantisation of the frozen target (needs bitsandbytes)."""

    none = "none"
    int8 = "int8"
    nf4 = "nf4"


class Form(Enum):
    """The shape of a data row."""

    auto = "auto"
    messages = "messages"
    conversations = "conversations"
    turns = "turns"
    preference = "preference"
    alpaca = "alpaca"
    prompt = "prompt"
    tokens = "tokens"
    text = "text"
    question = "question"


COLUMNS = (
    "messages", "system", "tools", "chat_template_kwargs", "turns", "prompt", "response",
    "reasoning_content", "chosen", "instruction", "input", "output", "history", "text", "input_ids",
    "loss_mask", "labels", "category",
)  # fmt: skip
"""What fields of other names may be given as in `data.columns`."""


class OnBadRow(Enum):
    """What a malformed row does."""

    error = "error"
    skip = "skip"


class Optimizer(Enum):
    """What updates a head."""

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
    """Where metrics go besides `metrics.jsonl`."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"


def positive(prefix: str, config: object, *names: str) -> None:
    """Refuses numbers of 0 and below; unset ones pass.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, names, lambda value: value <= 0, "above 0")


def not_negative(prefix: str, config: object, *names: str) -> None:
    """Refuses numbers below 0; unset ones pass.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, names, lambda value: value < 0, "at least 0")


def below_one(prefix: str, config: object, name: str) -> None:
    """Refuses a number below 0 or from 1 on; an unset one passes.

    Raises:
        InputError: with the key, the value and what is allowed.
    """
    _refuse(prefix, config, (name,), lambda value: not 0 <= value < 1, "from 0 to below 1")


def _refuse(
    prefix: str, config: object, names: Iterable[str], bad: Callable[[Any], bool], allowed: str
) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and bad(value):
            key = f"{prefix}.{name}".lstrip(".")
            raise InputError(f"{key}={value}: must be {allowed}")


@dataclass
class TargetConfig:
    """The frozen language model that drafts are made for."""

    path: str | None = None
    """Hub id or folder; unset means the embedded default."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Dtype = Dtype.auto
    quantization: Quantization = Quantization.none
    adapter: str | None = None
    """Hub id or folder of a LoRA adapter (peft) applied to the target."""
    device_map: str | None = None
    """Passed to transformers, e.g. `auto`, for targets that need several devices."""
    trust_remote_code: bool = False
    """Run model code that the Hub repository ships."""
    attention: str | None = None
    """transformers' name of how its layers attend to drafts: `sdpa`, `eager` or `flex_attention`;
    the last on GPUs alone; unset takes the first of these that changes nothing."""
    prefill_chunk: int = 512
    """Tokens of a prompt that are read at a time; recurrent targets read all of it at once."""

    def __post_init__(self) -> None:
        positive("target", self, "prefill_chunk")
        for name in ("path", "adapter"):  # transformers knows no ~
            if (path := getattr(self, name)) is not None and path.startswith("~"):
                setattr(self, name, str(Path(path).expanduser()))


@dataclass
class DataConfig:
    """Conversations to train or measure on."""

    path: str | None = None
    """A file (JSON lines, JSON, CSV, Parquet, Arrow), a folder of them, or a Hub dataset id; unset
    means the embedded default."""
    subset: str | None = None
    """Configuration of a Hub dataset, e.g. `main` of openai/gsm8k, or its folder in a clone; unset
    means its default, in a clone all."""
    split: str = "train"
    """Split of a Hub dataset, or of a folder with files that are named for splits."""
    streaming: bool = False
    """Read the rows of a Hub dataset as they arrive, and keep only what is tokenised of them."""
    form: Form = Form.auto
    columns: Any = None
    """Fields of other names, e.g. `{messages: my_chat}` or `{prompt: ask, response: reply}`."""
    eval_path: str | None = None
    """Held-out conversations; unset takes `eval_fraction` of `path`."""
    eval_fraction: float = 0.02
    """Share of conversations held out when `eval_path` is unset."""
    max_length: int = 1024
    """Tokens of a packed sequence; longer conversations are truncated and counted."""
    on_bad_row: OnBadRow = OnBadRow.error
    chat_template_kwargs: Any = None
    """What the target's chat template is told besides messages, as at serving, e.g.
    `{enable_thinking: false}`; a row's own come before."""
    num_prompts: int | None = None
    """Use only the first so many prompts (measuring) or conversations (training)."""
    num_proc: int | None = None
    """Processes that tokenise data at their first use; unset means the cores of this one."""
    prepared_dir: str | None = None
    """Where tokenised data are kept for every later start and read by all processes; unset means
    `prepared` in `~/.cache/headsmith`. On several nodes name a folder that all of them see."""
    features: str | None = None
    """Train from this folder of `scripts/capture.py`, without the target; it settles `path` and
    every other setting here."""

    def __post_init__(self) -> None:
        positive("data", self, "max_length", "num_prompts", "num_proc")
        if not 0 < self.eval_fraction < 1:
            raise InputError(f"data.eval_fraction={self.eval_fraction}: must be between 0 and 1")
        _check_columns(self.columns)
        # Hydra adds nothing to a typed dict, so types of both are looked at here.
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise InputError(
                f"data.chat_template_kwargs={self.chat_template_kwargs}: must be like "
                "{enable_thinking: false}"
            )


def _check_columns(columns: object) -> None:
    if columns is None:
        return
    if not isinstance(columns, dict) or not all(isinstance(v, str) for v in columns.values()):
        raise InputError(f"data.columns={columns}: must be like {{prompt: ask, response: reply}}")
    for name in columns:
        if name not in COLUMNS:
            raise InputError(f"data.columns={columns}: '{name}' is none of {', '.join(COLUMNS)}")


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
class HeadRef:
    """A trained head to load."""

    path: str | None = None
    """Folder or Hub id."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[int] | None = None
    """Target features that an EAGLE-3 head reads, as indices of `output_hidden_states`, for a
    published head whose config counts them otherwise (SGLang's are one less)."""


@dataclass
class DataRun:
    """What every run over data takes."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)


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
    its key, if it needs one, is OPENAI_API_KEY's."""

    def __post_init__(self) -> None:
        positive("rollout", self, "steps", "max_new_tokens", "batch_size")
        not_negative("rollout", self, "temperature")


@dataclass
class TrainRun(DataRun):
    """What every training command is told; beside it comes `head`, of its own kind."""

    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    log: LogConfig = field(default_factory=LogConfig)
    out_dir: str = "outputs/head"
    """Folder for the head, its checkpoints and metrics."""
    seed: int = 0
    """Of new weights, the order of data, noise and draws."""

    def __post_init__(self) -> None:
        if self.rollout.steps is not None and self.data.features is not None:
            raise InputError(
                f"rollout.steps={self.rollout.steps}: the target answers while training, so it is "
                f"needed itself; unset data.features={self.data.features} and name the data"
            )


@dataclass
class ShowMaskRun(DataRun):
    """`scripts/show_mask.py`."""

    num_samples: int = 3
    """Conversations that are shown."""
