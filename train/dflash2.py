"""Trains DFlash-2 heads: `accelerate launch train/dflash2.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.blocks import DFlash2Run
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, DFlash2Run, "dflash2", ("dflash2",), check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.settings.blocks import DFlash2Config
from heads.blocks.dflash2 import DFlash2Head
from train.batch.batch import STEP_TARGETS, Batch, StepTargets, gather_labels
from train.block_objective import BlockObjective
from train.loop import command
from train.objective import LaunchSpec, SavedRows

ROWS_PER_CHUNK = 1024


class DFlash2Objective(BlockObjective):
    """Loss of each slot, and of the selector that follows the text's own tokens."""

    head: DFlash2Head
    config: DFlash2Config

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows:
        """Count the rows that training holds, with those of the convolutions and the selector.

        Each block keeps 2 t R + t (t - 1) / 2 states in each of the four mixtures of a layer, for t
        taps and R rows. Each draft token keeps its candidates' rows and its own.
        """
        saved, config = super().count_saved_rows(setting), self.head.config
        taps, blocks = config.conv_kernel_size, saved.compared // config.num_draft_tokens
        block_rows = 2 * taps * config.block_size + taps * (taps - 1) // 2
        saved.kept["state"] += 4 * len(self.head.layers) * blocks * block_rows
        saved.kept["number"] += saved.compared * (config.selector_top_k + 2) * config.selector_rank
        return saved

    def compute_extra_loss(
        self, outputs: Tensor, rows: Tensor, batch: Batch, row_values: Tensor
    ) -> Tensor | None:
        """Compute the selector's cross-entropy [M] of each supervised row among its candidates."""
        del outputs, row_values
        step_targets: StepTargets = batch[STEP_TARGETS]
        labels = gather_labels(batch)
        matched = step_targets.matched_rows
        anchors = step_targets.anchors[matched.output_indices % len(step_targets.anchors)]
        previous_tokens = batch["input_ids"].flatten()[anchors + 1 + step_targets.row_steps]
        values, candidates = self._select_candidates(rows.detach())
        is_label = candidates == labels[matched.teacher_rows.device].unsqueeze(1)
        scores = values + self.head.candidate_selector(rows, previous_tokens, candidates)
        loss = F.cross_entropy(scores.float(), is_label.int().argmax(1), reduction="none")
        # The selector cannot choose a label outside the candidates.
        return self.config.selector_weight * loss.where(is_label.any(1), 0.0)

    @torch.no_grad()
    def _select_candidates(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Select the likeliest tokens of rows [M, H]: their logits and ids, both [M, k]."""
        k = min(self.head.config.selector_top_k, len(self.head.vocab.ids))
        parts = [self.head.compute_logits(part).topk(k) for part in rows.split(ROWS_PER_CHUNK)]
        values, ids = (torch.cat(each) for each in zip(*parts, strict=True))
        return values, ids


main = command.TrainingCommand(DFlash2Head, DFlash2Objective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
