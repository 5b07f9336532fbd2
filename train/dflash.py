"""Trains DFlash heads: `accelerate launch train/dflash.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.blocks import DFlashRun
from train.loop.refusals import check_training

COMMAND = Command(__doc__, DFlashRun, "dflash", ("dflash",), check=check_training)
if __name__ == "__main__":
    COMMAND.begin()

from torch import Tensor

from conf.command import entry
from conf.settings.blocks import DFlashConfig
from data.features.reader import TrainingData
from heads.dflash.formats import load_dflash
from heads.dflash.head import DFlashHead
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from train.batch.supervision import UNROLLED, Batch, Unrolled
from train.blocks.objective import (
    BlockObjective,
    architecture,
    chosen_vocab,
    described,
)
from train.loop import command
from train.loss.fused import Student
from train.objective import check_output_head


class DFlashObjective(BlockObjective):
    """Each slot by itself."""

    def slots(self, outputs: Tensor, batch: Batch, scales: Tensor) -> Student:
        """Through the output head alone."""
        unrolled: Unrolled = batch[UNROLLED]
        rows = self.rows(outputs, unrolled)
        return Student(rows, self.head.projection(), unrolled.rows.answers, scales)


def main(config: DFlashRun) -> None:
    """Trains to `out_dir/head`."""

    def build(target: EmbeddingsAndHead, train: TrainingData) -> tuple[DFlashObjective, list[str]]:
        head, lines = make_head(config.head, target, train, config.seed)
        return DFlashObjective(head, target, config.head), lines

    command.train(config, build)


def make_head(
    config: DFlashConfig, target: EmbeddingsAndHead, train: TrainingData, seed: int
) -> tuple[DFlashHead, list[str]]:
    """An untrained head, or a saved one that fits the target; and what to say about it.

    Raises:
        InputError: it does not fit.
    """
    if config.path is not None:
        head, lines = load_dflash(config.path, config.revision, config.layers), list[str]()
        head.attach(target)
    else:
        vocab, lines = chosen_vocab(config, target, train)
        head = DFlashHead(architecture(config, target, train, sample_from_anchor=False), vocab)
        head.begin(target, seed)
    check_output_head(head, target)
    return head, [*lines, described(head, "DFlash")]


def default_objective(head: DFlashHead, target: EmbeddingsAndHead) -> DFlashObjective:
    """With the settings of the recipe, for benchmarks."""
    return DFlashObjective(head, target, entry.head_recipe(DFlashConfig, "dflash"))


if __name__ == "__main__":
    COMMAND.run(main)
