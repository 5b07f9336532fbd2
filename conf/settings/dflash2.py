"""Settings of `train/dflash2.py`; the recipe is `conf/head/dflash2.yaml`."""

from dataclasses import dataclass, field

from conf.errors import InputError
from conf.settings.blocks import BlockConfig
from conf.settings.checks import not_negative, positive
from conf.settings.training import TrainRun


@dataclass
class DFlash2Config(BlockConfig):
    """A DFlash-2 head (inco.ai/dflash2, vllm-project/vllm#52816)."""

    conv_kernel_size: int = 2
    """Rows of the block that a convolution mixes into each, its own included."""
    conv_group_size: int = 16
    """Channels that share the part of a convolution which depends on the row."""
    selector_rank: int = 256
    """Of the scores of two tokens that follow each other."""
    selector_top_k: int = 16
    """Tokens of a slot that the selector chooses from."""
    selector_weight: float = 1.0
    """Of the cross-entropy among those."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        positive("head", self, *sizes)
        not_negative("head", self, "selector_weight")
        if self.selector_top_k < 2:
            raise InputError(f"head.selector_top_k={self.selector_top_k}: must be at least 2")
        if self.own_output_head:
            raise InputError(
                "head.own_output_head=true: no engine has a place for one in DFlash-2; allowed: "
                "false"
            )


@dataclass
class DFlash2Run(TrainRun):
    """`train/dflash2.py`."""

    head: DFlash2Config = field(default_factory=DFlash2Config)
    out_dir: str = "outputs/dflash2"
