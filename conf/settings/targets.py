"""Settings of `scripts/zoo/check.py`."""

from dataclasses import dataclass, field

from conf.settings.checks import positive


@dataclass
class TargetsRun:
    """`scripts/zoo/check.py`."""

    model_types: list[str] = field(default_factory=list)
    """Of transformers, e.g. [llama,qwen3_next]; empty takes all."""
    timeout: float = 300.0
    """Seconds after which an architecture's process is ended, and its check failed."""
    out_dir: str = "outputs/targets"
    """What was checked there is not checked again."""

    def __post_init__(self) -> None:
        positive("", self, "timeout")
