"""Settings of `scripts/export.py`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.settings.head import HeadRef
from conf.settings.target import TargetConfig


class ExportFormat(Enum):
    """Whose loader the head is written for."""

    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    """TensorRT-LLM."""
    tgi = "tgi"
    """Text Generation Inference."""
    speculators = "speculators"
    """vllm-project/speculators, which vLLM opens without further settings."""
    original = "original"
    """The method's authors: FasterDecoding/Medusa, SafeAILab/EAGLE."""


class ExportDtype(Enum):
    """Of the exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class ExportRun:
    """`scripts/export.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """`path` unset means the target that the head names."""
    head: HeadRef = field(default_factory=HeadRef)
    format: ExportFormat = "???"  # type: ignore[assignment]
    dtype: ExportDtype = ExportDtype.float32
    out_dir: str = "outputs/export"
    """Replaced if it holds an export; otherwise it must be empty."""
