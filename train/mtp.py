"""Trains MTP layers: `accelerate launch train/mtp.py target.path=... data.path=...`.

Training starts from the target's own MTP layer; without one, from a new layer of its family.
`head.path` names the folder of another layer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.eagle import MtpRun
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, MtpRun, "mtp", check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from dataclasses import dataclass

from conf.errors import InputError
from heads.mtp.checkpoint import find_mtp_layers, format_dropped_layers
from heads.mtp.mtp import MtpHead
from train.eagle import EagleObjective
from train.loop import command
from train.objective import LaunchSpec


class MtpObjective(EagleObjective):
    """Loss of a layer that reads its own output, step by step."""

    head: MtpHead

    def _prepare_saved_head(self) -> None:
        """Do nothing: the layer's files decide."""

    def _describe_head(self) -> str:
        start = "a fresh one" if self.config.path is None else f"from {self.config.path}"
        return f"MTP layer of {self.head.config.family}, {start}, {self.config.num_steps} steps"

    def count_saved_rows(self, setting: LaunchSpec) -> None:
        """Return None: the layers of all families have no common count."""
        del setting


@dataclass(frozen=True)
class MtpTraining(command.TrainingCommand):
    """Training that continues the target's own MTP layer, unless `head.path` names another."""

    def __call__(self, config: MtpRun) -> None:  # type: ignore[override]
        """Train a layer with a command's settings.

        Raises:
            InputError: the target's files lack the layer that its config promises.
        """
        head, target = config.head, config.target
        if head.path is None and target.path is not None:
            promised, held = find_mtp_layers(target.path, target.revision)
            if promised and not held:
                raise InputError(
                    f"target.path={target.path}: {format_dropped_layers(promised)}; set head.path "
                    "to the original model, or that count to 0 for a new layer"
                )
            if held:
                head.path, head.revision = target.path, target.revision
        super().__call__(config)


main = MtpTraining(MtpHead, MtpObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
