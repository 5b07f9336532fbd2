"""Settings of `scripts/repair.py`."""

from dataclasses import dataclass

from conf.errors import InputError
from conf.settings.checks import unset
from conf.settings.measure import MeasureRun, tree_settings


@dataclass
class RepairRun(MeasureRun):
    """`scripts/repair.py`."""

    num_turns: int = 1
    out_dir: str = "outputs/repair"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature:
            raise InputError(f"temperature={self.temperature}: greedy texts are replayed; set 0")
        unset({**tree_settings(self), "output_rank": self.output_rank}, "chains are replayed")
