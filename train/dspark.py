"""Trains DSpark heads: `accelerate launch train/dspark.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.blocks import DSparkRun
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, DSparkRun, "dspark", ("dspark",), check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.settings.blocks import DSparkConfig, Markov
from heads.blocks.dspark import DSparkHead
from train.batch.batch import STEP_TARGETS, Batch
from train.block_objective import BlockObjective
from train.loop import command
from train.loss.fused_linear import LowRank
from train.objective import LaunchSpec, SavedRows


class DSparkObjective(BlockObjective):
    """Loss of slots that read the text's previous tokens, and of their confidence."""

    head: DSparkHead
    config: DSparkConfig

    def compute_added_logits(self, outputs: Tensor, batch: Batch) -> LowRank | None:
        """Compute the Markov head's logits of the supervised slots."""
        states = self.head.compute_markov_states(outputs, self._gather_previous_tokens(batch))
        rows = self.select_supervised_rows(states, batch[STEP_TARGETS])
        return LowRank(rows, self.head.markov_head.markov_w2.weight)

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows:
        """Count the rows that training holds, with Markov states and the inputs of both parts.

        Per draft token: H + 3 r numbers with a gate, H + 7 r with a recurrent state, for rank r.
        """
        saved, config = super().count_saved_rows(setting), self.head.config
        hidden, rank = config.llama.hidden_size, config.markov_rank
        made = {Markov.vanilla: 0, Markov.gated: hidden + 3 * rank, Markov.rnn: hidden + 7 * rank}
        confident = hidden + rank * config.confidence_with_markov if config.confidence else 0
        saved.kept["number"] += saved.compared * (made[config.markov_head_type] + 3 * rank)
        saved.kept["float32 number"] = saved.compared * confident
        return saved

    def _gather_previous_tokens(self, batch: Batch) -> Tensor:
        """Gather the [A, D] int64 tokens directly before the drafted tokens."""
        ids, anchors = batch["input_ids"].flatten(), batch[STEP_TARGETS].anchors
        slots = torch.arange(len(self.term_weights), device=ids.device)
        # Nothing is supervised after the end of the text.
        return ids[(anchors.unsqueeze(1) + 1 + slots).clamp_max(len(ids) - 1)]

    def compute_extra_loss(
        self, outputs: Tensor, rows: Tensor, batch: Batch, row_values: Tensor
    ) -> Tensor | None:
        """Compute the [M] cross-entropy of each supervised row's confidence against alpha."""
        del rows
        if self.head.confidence_head is None or not self.config.confidence_weight:
            return None
        confidence = self.select_supervised_rows(
            self.head.compute_confidence(outputs, self._gather_previous_tokens(batch)),
            batch[STEP_TARGETS],
        )
        alpha = row_values[2].clamp(0, 1)
        loss = F.binary_cross_entropy_with_logits(confidence, alpha, reduction="none")
        return self.config.confidence_weight * loss


main = command.TrainingCommand(DSparkHead, DSparkObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
