"""Settings of `eval/calibrate.py`."""

from dataclasses import dataclass

from conf.settings.checks import positive, unset
from conf.settings.measure import MeasureRun, tree_settings


@dataclass
class CalibrateRun(MeasureRun):
    """`eval/calibrate.py`."""

    num_repeats: int = 3
    """Timed passes over the checking half of the prompts."""
    num_turns: int = 1
    out_dir: str = "outputs/calibrate"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("", self, "num_repeats")
        unset(tree_settings(self), "chains are calibrated")
