"""Settings of what hands heads and targets on: export, push and merge."""

from dataclasses import dataclass, field
from enum import Enum

from conf.settings.drafting import HeadRef
from conf.settings.target import TargetConfig


class ExportFormat(Enum):
    """Engines and libraries for whose loader a head is written."""

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
    llamacpp = "llamacpp"
    """llama.cpp: a GGUF file."""


class ExportDtype(Enum):
    """Dtypes of the exported weights."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@dataclass
class ExportRun:
    """`scripts/export.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """`path` unset means the target that the head names."""
    head: HeadRef = field(default_factory=HeadRef)
    format: ExportFormat = "???"  # type: ignore[assignment]
    dtype: ExportDtype = ExportDtype.float32
    tokenizer_gguf: str | None = None
    """GGUF file of the target whose vocabulary `format=llamacpp` copies; unset, that of a
    `target.path` which is one, or else a placeholder, as llama.cpp reads text by the target's."""
    out_dir: str = "outputs/export"
    """Replaced if it holds an export; otherwise it must be empty."""


class Layout(Enum):
    """Places of a head's exports on the Hub."""

    one = "one"
    """In subfolders of the head's repository, named after their formats."""
    each = "each"
    """In repositories of their own, `{repo_id}-{format}`."""


@dataclass
class PushRun:
    """`scripts/push.py`."""

    head: HeadRef = field(default_factory=HeadRef)
    repo_id: str = "???"
    """`user/name` on the Hub."""
    exports: list[str] = field(default_factory=list)
    """Folders that `scripts/export.py` wrote of this head, pushed with it."""
    layout: Layout = Layout.one
    private: bool = True
    """Make the repository private, if it is made."""
    publish_private_target: bool = False
    """Push a head with `private=false` although its target is a private repository."""
    dry_run: bool = False
    """Write what would be uploaded to `out_dir` and stop."""
    license: str | None = None
    """SPDX id for the model card."""
    measured: str | None = None
    """Folder with `acceptance.json` / `speedup.json` to quote; unset looks beside the head."""
    comparisons: list[str] = field(default_factory=list)
    """Folders that `scripts/compare.py` wrote: tables of the card, such as of an MTP layer before
    and after training, on prompts of its training's kind and on others."""
    out_dir: str = "outputs/push"
    """Folder for what would be uploaded."""


class MtpAction(Enum):
    """Things to do with the MTP layer of a target's files."""

    check = "check"
    """Say whether it is there and whole."""
    extract = "extract"
    """Write it as a head of its own."""
    stitch = "stitch"
    """Write the target's folder anew with the layer of `head.path`."""


@dataclass
class MtpFilesRun:
    """`scripts/mtp.py`."""

    action: MtpAction = MtpAction.check
    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadRef = field(default_factory=HeadRef)
    """Of `stitch`: a trained layer, or a model whose layer the target is to have."""
    out_dir: str = "outputs/mtp-files"
    """Folder that extract or stitch writes."""


@dataclass
class MergeAdapterRun:
    """`scripts/merge_adapter.py`; `target.dtype=auto` keeps the dtype of the target's files."""

    target: TargetConfig = field(default_factory=TargetConfig)
    out_dir: str = "outputs/merged"
    """Folder for the merged model and its tokenizer."""
