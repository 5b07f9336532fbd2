"""The entry script: what a toy head learns, from the text itself."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional
from toy_head.head import ToyHead

from conf.command.entry import Command
from conf.settings.drafting import HeadRef
from conf.settings.training import FrozenTargetRun
from data.features.store_format import HIDDEN_STATES
from train.batch.batch import SUPERVISION, gather_labels
from train.loop import command
from train.loss.fused_linear import LossSums
from train.objective import Objective


@dataclass
class ToyRun(FrozenTargetRun):
    head: HeadRef = field(default_factory=HeadRef)


class ToyObjective(Objective):
    metric_names, description = ("top1",), "a toy"

    def __init__(self, head, target, config) -> None:
        super().__init__()
        self.head, self.target, self.term_weights = head, target, torch.ones(1)

    def forward(self, batch, scale) -> LossSums:
        rows = batch[SUPERVISION].depths[1]
        logits = self.head.out(batch[HIDDEN_STATES].flatten(0, 1)[rows.output_indices])
        labels = gather_labels(batch)[rows.teacher_rows.device]
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        hits = (logits.argmax(-1) == labels).sum()
        terms = torch.stack([loss.detach(), torch.tensor(float(len(labels))), hits])
        return LossSums(scale[0] * loss, terms[:, None])


main = command.TrainingCommand(ToyHead, ToyObjective, Command(__doc__, ToyRun, "toy"))
