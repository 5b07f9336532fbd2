"""Settings of `train/dflash.py`; the recipe is `conf/head/dflash.yaml`."""

from dataclasses import dataclass, field

from conf.settings.blocks import BlockConfig
from conf.settings.training import TrainRun


@dataclass
class DFlashConfig(BlockConfig):
    """A DFlash head."""


@dataclass
class DFlashRun(TrainRun):
    """`train/dflash.py`."""

    head: DFlashConfig = field(default_factory=DFlashConfig)
    out_dir: str = "outputs/dflash"
