"""Trains EAGLE heads: `accelerate launch train/eagle.py head=eagle3 target.path=... ...`.

`head=` names a recipe of `conf/head/`: eagle1, eagle3, eagle3_1 or hass.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.eagle import EagleRun
from eval.preflight_checks import check_training

COMMAND = Command(
    __doc__, EagleRun, "eagle", ("eagle3", "eagle1", "eagle3_1", "hass"), check=check_training
)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.errors import InputError
from conf.settings.eagle import OutputHead, StepNormalizer, TokenNormalizer, UnrolledConfig
from data.features.store_format import HIDDEN_STATES
from heads.eagle.eagle import EagleHead, choose_output_head
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from train.batch.batch import (
    DOCUMENTS,
    NOISE_SEEDS,
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    StepTargets,
    collect_states,
)
from train.loop import command
from train.loss.fused_linear import LowRank, Student
from train.objective import DIVISORS, LaunchSpec, SavedRows
from train.step_objective import StepObjective


class EagleObjective(StepObjective):
    """Loss of EAGLE's training-time test: divergence from the target, features, top tokens.

    Letters as in `train.step_objective`.
    """

    def __init__(self, head: Any, target: EmbeddingsAndOutputHead, config: Any) -> None:
        # Settled in place, so that the head's record and its checkpoints say what was done.
        config.output_head = settle_output_head(config, head, target)
        super().__init__(head, target, config, compute_step_weights(config))
        self.loss_logits_per_token = len(self.term_weights) * len(head.vocab.ids)
        if config.path is not None:
            self._prepare_saved_head()
        self.description = self._describe_head()

    def _prepare_saved_head(self) -> None:
        """Check that a saved head has the recipe's form, and set whether its output head learns.

        Raises:
            InputError: the head has another form than the recipe.
        """
        head, config = self.head, self.config
        if head.config.form is not config.form:
            raise InputError(
                f"head.path={config.path}: an {head.config.form.value} head, but the recipe has "
                f"head.form={config.form.value}; choose another recipe with head=..."
            )
        if head.lm_head is not None:
            head.lm_head.requires_grad_(config.output_head is not OutputHead.frozen)

    def _describe_head(self) -> str:
        name = "eagle3_1" if self.head.is_eagle31 else self.head.variant
        return f"{name}, {self.config.num_steps} steps"

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows | None:
        """Count the rows that training holds, those of the text while its steps are made."""
        tokens, compared = setting.tokens, len(self.term_weights) * setting.tokens
        kept: dict[str, float] = {
            "layer": compared, "features": tokens, "float32 features": tokens,
            "float32 state": 2 * tokens,
        }  # fmt: skip
        return SavedRows(kept, compared, compared, 2 * compared, tokens)

    def index_batch(self, batch: Batch) -> Batch:
        """Add documents and the supervision of each step to a batch on the CPU."""
        batch = super().index_batch(batch)
        counts = batch[DIVISORS]
        if self.config.token_normalizer is TokenNormalizer.all:
            counts = (float((batch["document_ids"] >= 0).sum()),) * self.config.num_steps
        return {
            **batch,
            STEP_TARGETS: StepTargets.from_supervision(batch[SUPERVISION]),
            DIVISORS: counts,
        }

    @staticmethod
    def select_supervised_rows(outputs: Sequence[Tensor], step_targets: StepTargets) -> Tensor:
        """Select the supervised rows [M, H] of the outputs [N, H] of all steps."""
        return torch.cat([*outputs]).index_select(0, step_targets.matched_rows.output_indices)

    def build_student(
        self, rows: Tensor, added: LowRank | None, batch: Batch, scales: Tensor
    ) -> Student:
        """Build the student of the supervised rows behind the last norm."""
        return super().build_student(self.head.apply_final_norm(rows), added, batch, scales)

    def compute_extra_loss(
        self, outputs: Any, rows: Tensor, batch: Batch, row_values: Tensor
    ) -> Tensor | None:
        """Compute the regression loss [M] of rows [M, H] before the last norm."""
        del outputs, row_values
        weight = self.config.regression_weight
        if not weight:
            return None
        teacher_rows = batch[STEP_TARGETS].matched_rows.teacher_rows.device
        indices = batch[SUPERVISION].token_indices[teacher_rows]
        states = batch[HIDDEN_STATES].flatten(0, 1)[indices].float()
        return weight * F.smooth_l1_loss(rows.float(), states, reduction="none").mean(-1)

    def compute_outputs(self, batch: Batch) -> list[Tensor]:
        """Compute the outputs [N, H] of each step at the anchors, all sequences flattened."""
        head, ids = self.head, batch["input_ids"].flatten()
        features = self._add_noise(
            head.collect_features(collect_states(batch)).flatten(0, 1), batch
        )
        positions = batch["position_ids"].flatten()
        text = head.encode_context(head.fuse(features), ids.roll(-1), positions)
        anchors = batch[STEP_TARGETS].anchors
        causal_range = build_causal_range(batch[DOCUMENTS], anchors)
        branches = BranchCache(text.keys[None], text.values[None], causal_range)
        config = self.config
        steps = head.unroll(text, ids, anchors, branches, config.detach_features, config.own_tokens)
        return list(islice(steps, config.num_steps))

    def _add_noise(self, features: Tensor, batch: Batch) -> Tensor:
        """Add U(-noise / 2, noise / 2) * 512 / T in training, with T the document's length.

        Source: SafeAILab/EAGLE `train/main.py`, which trains on one document at a time.
        """
        if not self.training or not self.config.noise:
            return features
        # Drawn per sequence, so that the number of processes does not matter.
        generators = [
            torch.Generator(features.device).manual_seed(seed) for seed in batch[NOISE_SEEDS]
        ]
        shape = (len(features) // len(generators), features.shape[1])
        draws = [torch.rand(shape, generator=g, device=features.device) for g in generators]
        lengths = batch[DOCUMENTS].cu_seqlens.diff()
        lengths = lengths.repeat_interleave(lengths, output_size=len(features)).unsqueeze(1)
        width = self.config.noise * 512 / lengths
        return features + ((torch.cat(draws) - 0.5) * width).to(features)


def settle_output_head(config: Any, head: Any, target: EmbeddingsAndOutputHead) -> OutputHead:
    """Settle how the output head starts, and so whether it learns.

    Where settings leave it open, the output head of a saved head learns if it has learnt before.

    Args:
        config: settings `head` of the run.
        head: the new or saved head, attached to the target.
        target: the target whose rows an output head may hold.
    """
    if config.output_head is not OutputHead.auto:
        return config.output_head
    usual = choose_output_head(config.output_head, target)
    if config.path is None or usual is not OutputHead.frozen:
        return usual
    return usual if head.keeps_target_output_head(target) else OutputHead.copy


def compute_step_weights(config: UnrolledConfig) -> Tensor:
    """Compute [J] float32 weights decay ** j for j = 0..J-1, divided by their sum for a mean."""
    weights = torch.tensor([config.step_decay**j for j in range(config.num_steps)])
    return weights / weights.sum() if config.step_normalizer is StepNormalizer.mean else weights


main = command.TrainingCommand(EagleHead, EagleObjective, COMMAND)


if __name__ == "__main__":
    COMMAND.run(main)
