"""The entry script: an objective, and what makes it."""

from dataclasses import dataclass, field
from typing import Any

from toy_head.kind import ToyHead

from conf.settings.drafting import HeadRef
from conf.settings.training import TrainRun
from data.features.format import HIDDEN
from train.batch.supervision import Batch
from train.loop import command
from train.loss.medusa import medusa_loss, medusa_weights
from train.loss.sums import Sums
from train.objective import Objective


@dataclass
class ToyRun(TrainRun):
    head: HeadRef = field(default_factory=HeadRef)


class ToyObjective(Objective):
    """Against the text: Medusa's loss of a single head."""

    measures = ("top1", "top5")

    def __init__(self, head: ToyHead, target: Any) -> None:
        super().__init__()
        self.head, self.target, self.weights = head, target, medusa_weights(1, 1.0)

    def forward(self, batch: Batch, scale: Any) -> Sums:
        return medusa_loss(self.head, batch[HIDDEN], batch, scale)


def main(config: ToyRun) -> None:
    command.train(
        config, lambda target, _: (ToyObjective(ToyHead.from_target(target), target), ["a toy"])
    )


def default_objective(head: ToyHead, target: Any) -> ToyObjective:
    return ToyObjective(head, target)
