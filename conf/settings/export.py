"""Settings of export, push and merge: commands that hand on heads and targets."""

from dataclasses import dataclass, field
from enum import Enum

from conf.settings.checks import ComputingRun
from conf.settings.drafting import HeadRef
from conf.settings.target import TargetConfig


class ExportFormat(Enum):
    """Engine or library that will load the head."""

    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    """TensorRT-LLM."""
    speculators = "speculators"
    """vllm-project/speculators. vLLM opens the folder without further settings."""
    original = "original"
    """The authors' code: FasterDecoding/Medusa, SafeAILab/EAGLE."""
    llamacpp = "llamacpp"
    """llama.cpp, as a GGUF file."""


class ExportDtype(Enum):
    """Dtype of the exported weights."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@dataclass
class ExportRun(ComputingRun):
    """`scripts/export.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """Unset `path`: the target that the head names."""
    head: HeadRef = field(default_factory=HeadRef)
    format: ExportFormat = "???"  # type: ignore[assignment]
    dtype: ExportDtype = ExportDtype.float32
    tokenizer_gguf: str | None = None
    """GGUF file of the target, whose vocabulary `format=llamacpp` copies. Unset: `target.path` if
    it is a GGUF file, else a placeholder; llama.cpp reads text with the target's vocabulary."""
    curve: str | None = None
    """`serve.json` of `eval/serve.py` on the serving machine, or its folder: `format=vllm` prints
    its schedule, which turns drafts off from a number of requests in flight on."""
    out_dir: str = "outputs/export"
    """Folder to write. An earlier export of the same head and format there is replaced; anything
    else is an error."""


class HubLayout(Enum):
    """Where a head's exports lie on the Hub."""

    one = "one"
    """In subfolders of the head's repository, named after their formats."""
    each = "each"
    """In separate repositories, `{repo_id}-{format}`."""


@dataclass
class PushRun:
    """`scripts/push.py`."""

    head: HeadRef = field(default_factory=HeadRef)
    repo_id: str = "???"
    """`user/name` on the Hub."""
    base_model: str | None = None
    """Hub id of the target, `owner/name`, or a GGUF file in such a repository, if the head was
    trained for a local folder. The card and the files name this model in its place."""
    exports: list[str] = field(default_factory=list)
    """Folders that `scripts/export.py` wrote for this head, to push with it."""
    layout: HubLayout = HubLayout.one
    private: bool = True
    """Make a new repository private."""
    publish_private_target: bool = False
    """Allow `private=false` for a head whose target is a private repository."""
    dry_run: bool = False
    """Write the files to `out_dir` without uploading them."""
    license: str | None = None
    """SPDX id of the licence for the model card."""
    measured: str | None = None
    """Folder with the `acceptance.json` and `speedup.json` to quote. Unset: look beside the
    head."""
    comparisons: list[str] = field(default_factory=list)
    """Folders that `scripts/compare.py` wrote. The card shows their tables, e.g. an MTP layer
    before and after training."""
    out_dir: str = "outputs/push"
    """Folder for the files to upload."""


class MtpAction(Enum):
    """What to do with the MTP layer in a target's files."""

    check = "check"
    """Say whether the layer is there and complete."""
    extract = "extract"
    """Write the layer as a head."""
    stitch = "stitch"
    """Write a copy of the target's folder with the layer of `head.path`."""


@dataclass
class MtpFilesRun(ComputingRun):
    """`scripts/mtp.py`."""

    action: MtpAction = MtpAction.check
    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadRef = field(default_factory=HeadRef)
    """For `stitch`: a trained layer, or a model that has the layer."""
    out_dir: str = "outputs/mtp-files"
    """Folder to write the layer or the target to."""


@dataclass
class MergeAdapterRun(ComputingRun):
    """`scripts/merge_adapter.py`; `target.dtype=auto` keeps the dtype of the target's files."""

    target: TargetConfig = field(default_factory=TargetConfig)
    out_dir: str = "outputs/merged"
    """Folder for the merged model and its tokenizer."""
