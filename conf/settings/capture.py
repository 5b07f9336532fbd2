"""Settings of `scripts/capture.py`, which writes a feature store."""

from dataclasses import dataclass
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import not_negative, positive
from conf.settings.data import DataRun


class StateFormat(Enum):
    """How hidden states are stored."""

    bf16 = "bf16"
    fp8 = "fp8"
    """e4m3, with a scale per token."""
    int8 = "int8"
    """With a scale per token."""


class TeacherKind(Enum):
    """What is stored of the target's last word on each token."""

    hidden = "hidden"
    """The last hidden state: any head trains from it, any loss."""
    top_k = "top_k"
    """The likeliest tokens and their log-probabilities: a fraction of the bytes, for heads that
    do not read the last hidden state themselves (EAGLE-3)."""


@dataclass
class CaptureRun(DataRun):
    """`scripts/capture.py`."""

    layers: list[int] | None = None
    """Features for EAGLE-3, as indices of `output_hidden_states`; unset takes 2, L/2 and L-3 of
    L layers, [] none (Medusa and EAGLE-1 need none)."""
    format: StateFormat = StateFormat.bf16
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64
    """Tokens of `teacher=top_k`; of a smaller vocabulary all."""
    micro_batch_size: int = 4
    """Packed sequences per forward pass of one process."""
    num_replay_prompts: int = 16
    """Held-out prompts that the target answers, so that training can measure tau."""
    engine: str | None = None
    """Base URL of a vLLM server that gives hidden states, e.g. http://localhost:8000/v1; unset
    runs the target in process. Of the target only embedding, final norm and output head are
    then loaded here, and no prompts are answered for tau."""
    out_dir: str = "outputs/features"
    """A second start continues it."""
    seed: int = 0
    """Of the packing, and of which conversations are held out."""

    def __post_init__(self) -> None:
        positive("", self, "top_k", "micro_batch_size")
        not_negative("", self, "num_replay_prompts")
        if self.data.features is not None:
            raise InputError(f"data.features={self.data.features}: a store is written; unset it")
        if self.teacher is TeacherKind.top_k and self.layers == []:
            raise InputError(
                "layers=[]: with teacher=top_k there would be nothing for a head to read; name "
                "layers, or set teacher=hidden"
            )
