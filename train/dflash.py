"""Trains DFlash heads: `accelerate launch train/dflash.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.blocks import DFlashRun
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, DFlashRun, "dflash", ("dflash",), check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from torch import Tensor

from heads.blocks.dflash import DFlashHead
from train.batch.batch import STEP_TARGETS, Batch, StepTargets
from train.block_objective import BlockObjective
from train.loop import command
from train.loss.fused_linear import Student


class DFlashObjective(BlockObjective):
    """Loss of blocks whose slots draft independently."""

    def build_student(self, outputs: Tensor, batch: Batch, scales: Tensor) -> Student:
        """Build students of the supervised slots, through the output head alone."""
        step_targets: StepTargets = batch[STEP_TARGETS]
        rows = self.select_supervised_rows(outputs, step_targets)
        return Student(
            rows, self.head.make_projection(), step_targets.matched_rows.teacher_rows, scales
        )


main = command.TrainingCommand(DFlashHead, DFlashObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
