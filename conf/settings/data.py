"""Settings of the data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.errors import InputError
from conf.settings.checks import ABSENT, ComputingRun, check_positive
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
    "loss_mask", "labels", "category", "unread",
)  # fmt: skip
"""Fields that `data.columns` can map. The field mapped to `unread` is left out."""


class OnBadRow(Enum):
    """What to do with a malformed row."""

    error = "error"
    skip = "skip"


class StateFormat(Enum):
    """Formats of stored hidden states."""

    bf16 = "bf16"
    fp8 = "fp8"
    """e4m3 with one scale per token."""
    int8 = "int8"
    """int8 with one scale per token."""


class TeacherKind(Enum):
    """Stored forms of the target's prediction for each token."""

    hidden = "hidden"
    """Last hidden state. Every head and every loss can train from it."""
    top_k = "top_k"
    """Likeliest tokens and their log-probabilities. Takes a fraction of the bytes, for heads that
    do not read the last hidden state (EAGLE-3)."""


@dataclass
class RowsConfig:
    """Conversations to measure on."""

    eval_path = features = ABSENT

    path: str | None = None
    """File (JSON lines, JSON, CSV, Parquet, Arrow), folder of files, or Hub dataset id. Unset: the
    embedded default, for its target alone."""
    subset: str | None = None
    """Configuration of a Hub dataset, e.g. `main` of openai/gsm8k. In a local copy: a folder or
    file, e.g. `qualitative` of SPEED-Bench. Unset: the default; in a local copy, everything."""
    split: str = "train"
    """Split of a Hub dataset, or of a folder whose files are named after splits."""
    streaming: bool = False
    """Read the rows of a Hub dataset as they arrive and keep only their tokens."""
    form: Form = Form.auto
    columns: Any = None
    """Your names of fields, e.g. `'data.columns={messages: my_chat}'` or
    `'data.columns={prompt: ask, response: reply}'`."""
    on_bad_row: OnBadRow = OnBadRow.error
    chat_template_kwargs: Any = None
    """Variables of the target's chat template, as given at serving, e.g.
    `'data.chat_template_kwargs={enable_thinking: false}'`. Variables of a row take precedence."""
    num_prompts: int | None = None
    """Number of prompts (measuring) or conversations (training) to use, from the first. Unset:
    all."""

    def __post_init__(self) -> None:
        check_positive("data", self, "num_prompts")
        _check_columns(self.columns)
        # Hydra cannot add keys to a typed dict, so both settings are untyped and checked here.
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise InputError(
                f"data.chat_template_kwargs={self.chat_template_kwargs}: not a mapping; type one "
                "like 'data.chat_template_kwargs={enable_thinking: false}'"
            )


@dataclass
class PackedConfig(RowsConfig):
    """Conversations to learn from, packed into sequences."""

    eval_path: str | None = None
    """Held-out conversations. Unset: the share `eval_fraction` of `path`."""
    eval_fraction: float = 0.02
    """Share of conversations to hold out when `eval_path` is unset."""
    max_length: int = 1024
    """Tokens per packed sequence. Longer conversations are truncated and counted."""
    num_proc: int | None = None
    """Processes that tokenise the data. Unset: the cores available to this process."""
    prepared_dir: str | None = None
    """Folder that keeps tokenised data for later starts and other processes. Unset: `prepared` in
    `~/.cache/headsmith`. On several nodes, name a folder that all of them see."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("data", self, "max_length", "num_proc")
        if not 0 < self.eval_fraction < 1:
            raise InputError(f"data.eval_fraction={self.eval_fraction}: must be between 0 and 1")


@dataclass
class DataConfig(PackedConfig):
    """Conversations to train on, or stored hidden states."""

    features: str | None = None
    """Folder of `scripts/capture.py` to train from, without the target. It replaces `path` and all
    other settings of this section."""


def _check_columns(columns: object) -> None:
    if columns is None:
        return
    if not isinstance(columns, dict) or not all(isinstance(v, str) for v in columns.values()):
        raise InputError(
            f"data.columns={columns}: not a mapping of names; type one like "
            "'data.columns={prompt: ask, response: reply}'"
        )
    for name in columns:
        if name not in COLUMNS:
            raise InputError(
                f"data.columns={columns}: no field is called '{name}'; allowed: "
                f"{', '.join(COLUMNS)}"
            )


@dataclass
class DataRun(ComputingRun):
    """A run over data that is prepared for a target."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: RowsConfig = field(default_factory=RowsConfig)


@dataclass
class PackedRun(DataRun):
    """A run over packed sequences."""

    data: PackedConfig = field(default_factory=PackedConfig)
