"""Settings of the target: the frozen language model."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from conf.errors import InputError
from conf.files import split_gguf_path
from conf.settings.checks import check_positive


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


@dataclass
class TargetConfig:
    """The frozen language model to draft for."""

    path: str | None = None
    """Hub id, folder or GGUF file. Unset: the embedded default."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    gguf_file: str | None = None
    """Name of a GGUF file in the folder or Hub repository `path`. Same as `path/gguf_file`."""
    dtype: Dtype = Dtype.auto
    quantization: Quantization = Quantization.none
    adapter: str | None = None
    """LoRA adapter (peft) to apply to the target: Hub id or folder."""
    device_map: str | None = None
    """Placement of a target over several devices, e.g. `auto`. Passed to transformers."""
    trust_remote_code: bool = False
    """Run model code that the Hub repository ships."""
    attention: str | None = None
    """Attention implementation of transformers for verify passes: `sdpa`, `eager` or
    `flex_attention` (GPU only). Unset: the first that gives the target's own results."""
    engine: list[str] = field(default_factory=list)
    """Base URLs of vLLM servers that run this target's layers, e.g. [http://localhost:8000/v1]. A
    URL that is named twice gets twice the requests. This process then loads only embedding, final
    norm and output head. For training, capture and `eval/acceptance.py`."""
    adapter_name: str | None = None
    """Name of a LoRA adapter that the servers of `target.engine` serve (`vllm serve ...
    --enable-lora --lora-modules NAME=PATH`). Target and adapter together are then the target."""
    relay: list[str] = field(default_factory=list)
    """Base URLs of `scripts/relay.py`, one per server of `target.engine`, in the same order. Unset:
    read files from the server's folder."""
    prefill_chunk: int = 512
    """Prompt tokens per forward pass. Recurrent targets read a prompt in one pass."""

    def __post_init__(self) -> None:
        check_positive("target", self, "prefill_chunk")
        if self.adapter_name is not None and not self.engine:
            raise InputError(
                f"target.adapter_name={self.adapter_name}: names an adapter of a server, but "
                "target.engine is empty; set target.engine=[URL], or target.adapter=PATH for a "
                "local adapter"
            )
        if self.relay and len(self.relay) != len(self.engine):
            raise InputError(
                f"target.relay={self.relay}: must have one URL per server of "
                f"target.engine={self.engine}, in the same order; or leave it unset if this "
                "machine sees the servers' folders"
            )
        for name in ("path", "adapter"):  # transformers knows no ~
            if (path := getattr(self, name)) is not None and path.startswith("~"):
                setattr(self, name, str(Path(path).expanduser()))
        if self.gguf_file is not None:
            self._join_gguf_file(self.gguf_file)
        if (
            self.path is not None
            and split_gguf_path(self.path)
            and self.quantization.value != "none"
        ):
            raise InputError(
                f"target.quantization={self.quantization.value}: target.path={self.path} is "
                "quantised as llama.cpp serves it; leave target.quantization unset"
            )

    def _join_gguf_file(self, name: str) -> None:
        """Join `path` and the file name into one path."""
        if self.path is None or split_gguf_path(self.path):
            raise InputError(
                f"target.gguf_file={name}: target.path={self.path} must be the folder or Hub id "
                "that holds the file"
            )
        if not name.endswith(".gguf"):
            raise InputError(f"target.gguf_file={name}: must end with .gguf")
        self.path, self.gguf_file = f"{self.path.rstrip('/')}/{name}", None
