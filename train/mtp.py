"""Trains MTP layers: `accelerate launch train/mtp.py target.path=... data.path=...`.

A target that has such a layer starts from its own, another of such a family from a fresh one; a
folder of such a layer is named by `head.path`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.eagle import MtpRun
from train.loop.refusals import check_training


def check(config: MtpRun) -> None:
    """Refusals of every training; then a target's own layer is what is trained."""
    check_training(config)
    target = config.target
    if config.head.path is None and target.path is not None:
        from heads.mtp.checkpoint import has_layer  # with torch, which no refusal waits for

        if has_layer(target.path, target.revision):
            config.head.path, config.head.revision = target.path, target.revision


COMMAND = Command(__doc__, MtpRun, "mtp", check=check)
if __name__ == "__main__":
    COMMAND.begin()

from heads.mtp.head import MtpHead
from train.eagle import EagleObjective
from train.loop import command
from train.loss import sizes


class MtpObjective(EagleObjective):
    """The layer's own output read again, step after step."""

    head: MtpHead

    def _go_on(self) -> None:
        """Nothing to choose: the layer is what its files say."""

    def _about(self) -> str:
        return f"MTP layer of {self.head.config.family}, {self.config.num_steps} steps"

    def memory(self, setting: sizes.LaunchSizes) -> sizes.Counted | None:  # type: ignore[override]
        """No formula: layers of all kinds."""
        del setting
        return None


main = command.Training(MtpHead, MtpObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
