"""Settings of the target: the frozen language model."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from conf.errors import InputError
from conf.files import gguf_parts
from conf.settings.checks import positive


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
    """The frozen language model that drafts are made for."""

    path: str | None = None
    """Hub id, folder or GGUF file; unset means the embedded default."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    gguf_file: str | None = None
    """Name of a GGUF file in the folder or Hub repository `path`; the same as `path/gguf_file`."""
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
    engine: list[str] = field(default_factory=list)
    """Base URLs of vLLM servers that run this target's layers, e.g.
    [http://localhost:8000/v1]; a URL that is named twice gets twice the requests. Of the target
    only embedding, final norm and output head are then loaded. Of training, of capture and of
    `eval/acceptance.py`."""
    adapter_name: str | None = None
    """Name under which the servers of `target.engine` serve a LoRA adapter of this target
    (`vllm serve ... --enable-lora --lora-modules NAME=PATH`), which is then the target."""
    relay: list[str] = field(default_factory=list)
    """Base URLs of `scripts/relay.py` beside each server of `target.engine`, in the same order;
    unset reads files from the folder itself."""
    prefill_chunk: int = 512
    """Tokens of a prompt that are read at a time; recurrent targets read all of it at once."""

    def __post_init__(self) -> None:
        positive("target", self, "prefill_chunk")
        if self.adapter_name is not None and not self.engine:
            raise InputError(
                f"target.adapter_name={self.adapter_name}: names an adapter of the servers of "
                "target.engine, which is empty; an adapter that is here is target.adapter=PATH"
            )
        if self.relay and len(self.relay) != len(self.engine):
            raise InputError(
                f"target.relay={self.relay}: name one beside each server of "
                f"target.engine={self.engine}, in the same order; or none, where trainers see "
                "the servers' folders"
            )
        for name in ("path", "adapter"):  # transformers knows no ~
            if (path := getattr(self, name)) is not None and path.startswith("~"):
                setattr(self, name, str(Path(path).expanduser()))
        if self.gguf_file is not None:
            self._join_gguf_file(self.gguf_file)
        if self.path is not None and gguf_parts(self.path) and self.quantization.value != "none":
            raise InputError(
                f"target.quantization={self.quantization.value}: the weights of target.path="
                f"{self.path} are what llama.cpp serves, quantised as they are; leave it unset"
            )

    def _join_gguf_file(self, name: str) -> None:
        """Makes one path of both, by which everything names the target from here on."""
        if self.path is None or gguf_parts(self.path):
            raise InputError(
                f"target.gguf_file={name}: target.path={self.path} must be the folder or Hub id "
                "that holds the file"
            )
        if not name.endswith(".gguf"):
            raise InputError(f"target.gguf_file={name}: must end with .gguf")
        self.path, self.gguf_file = f"{self.path.rstrip('/')}/{name}", None
