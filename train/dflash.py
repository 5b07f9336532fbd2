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

from heads.blocks.dflash import DFlashHead
from train.block_objective import BlockObjective
from train.loop import command

main = command.TrainingCommand(DFlashHead, BlockObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
