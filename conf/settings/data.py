"""Settings of the data, and of every run over them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.errors import InputError
from conf.settings.checks import ABSENT, positive
from conf.settings.target import TargetConfig


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
    """Answers to a malformed row."""

    error = "error"
    skip = "skip"


class StateFormat(Enum):
    """Formats of stored hidden states."""

    bf16 = "bf16"
    fp8 = "fp8"
    """e4m3, with a scale per token."""
    int8 = "int8"
    """With a scale per token."""


class TeacherKind(Enum):
    """Stored forms of the target's last word on each token."""

    hidden = "hidden"
    """The last hidden state: any head trains from it, any loss."""
    top_k = "top_k"
    """The likeliest tokens and their log-probabilities: a fraction of the bytes, for heads that
    do not read the last hidden state themselves (EAGLE-3)."""


@dataclass
class RowsConfig:
    """Conversations to measure on."""

    eval_path = features = ABSENT

    path: str | None = None
    """A file (JSON lines, JSON, CSV, Parquet, Arrow), a folder of them, or a Hub dataset id; unset
    means the embedded default."""
    subset: str | None = None
    """Configuration of a Hub dataset, e.g. `main` of openai/gsm8k, or its folder or file in a copy
    of it, e.g. `qualitative` of SPEED-Bench; unset means its default, in a copy all."""
    split: str = "train"
    """Split of a Hub dataset, or of a folder with files that are named for splits."""
    streaming: bool = False
    """Read the rows of a Hub dataset as they arrive, and keep only what is tokenised of them."""
    form: Form = Form.auto
    columns: Any = None
    """Fields of other names, e.g. `{messages: my_chat}` or `{prompt: ask, response: reply}`."""
    on_bad_row: OnBadRow = OnBadRow.error
    chat_template_kwargs: Any = None
    """What the target's chat template is told besides messages, as at serving, e.g.
    `{enable_thinking: false}`; a row's own come before."""
    num_prompts: int | None = None
    """Use only the first so many prompts (measuring) or conversations (training)."""

    def __post_init__(self) -> None:
        positive("data", self, "num_prompts")
        _check_columns(self.columns)
        # Hydra adds nothing to a typed dict, so types of both are looked at here.
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise InputError(
                f"data.chat_template_kwargs={self.chat_template_kwargs}: must be like "
                "{enable_thinking: false}"
            )


@dataclass
class PackedConfig(RowsConfig):
    """Conversations to learn from, packed to sequences."""

    eval_path: str | None = None
    """Held-out conversations; unset takes `eval_fraction` of `path`."""
    eval_fraction: float = 0.02
    """Share of conversations held out when `eval_path` is unset."""
    max_length: int = 1024
    """Tokens of a packed sequence; longer conversations are truncated and counted."""
    num_proc: int | None = None
    """Processes that tokenise data at their first use; unset means the cores of this one."""
    prepared_dir: str | None = None
    """Where tokenised data are kept for every later start and read by all processes; unset means
    `prepared` in `~/.cache/headsmith`. On several nodes name a folder that all of them see."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("data", self, "max_length", "num_proc")
        if not 0 < self.eval_fraction < 1:
            raise InputError(f"data.eval_fraction={self.eval_fraction}: must be between 0 and 1")


@dataclass
class DataConfig(PackedConfig):
    """Conversations to train on, or features of them."""

    features: str | None = None
    """Train from this folder of `scripts/capture.py`, without the target; it settles `path` and
    every other setting here."""


def _check_columns(columns: object) -> None:
    if columns is None:
        return
    if not isinstance(columns, dict) or not all(isinstance(v, str) for v in columns.values()):
        raise InputError(f"data.columns={columns}: must be like {{prompt: ask, response: reply}}")
    for name in columns:
        if name not in COLUMNS:
            raise InputError(f"data.columns={columns}: '{name}' is none of {', '.join(COLUMNS)}")


@dataclass
class DataRun:
    """A run over data: with them a target that they are prepared for."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: RowsConfig = field(default_factory=RowsConfig)


@dataclass
class PackedRun(DataRun):
    """A run over packed sequences."""

    data: PackedConfig = field(default_factory=PackedConfig)
