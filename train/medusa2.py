"""Trains Medusa heads and an adapter of the target: `accelerate launch train/medusa2.py ...`.

Heads are trained first, then heads and adapter. `head.path=outputs/medusa/head` starts from trained
heads; otherwise the first `joint.heads_only_steps` train them. Writes `out_dir/head` and
`out_dir/adapter`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.medusa import Medusa2Run
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, Medusa2Run, "medusa2", check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.command.clock import label_part
from conf.errors import InputError
from conf.settings.medusa import HeadsSchedule, JointConfig, Labels, TargetLoss
from conf.settings.training import Optimizer, TrainRun
from data.features.store_format import HIDDEN_STATES
from eval.measure.target_answers import LocalAnswerSource
from heads.medusa import MedusaHead
from heads.target_model.adapter import WEIGHTS, Adapter
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, Target
from heads.vocab import DraftVocab
from train.batch.batch import (
    NOISE_SEEDS,
    SUPERVISION,
    Batch,
    MatchedRows,
    add_supervision,
    add_target_states,
)
from train.batch.data_loader import Dataset, batch_to_device, stack_sequences
from train.loop import command
from train.loop.evaluation import (
    HeldoutFigures,
    make_heldout_replay,
    select_heldout_prompts,
)
from train.loop.loop import Evaluate
from train.loop.sources import TrainingSource
from train.loss.fused_linear import LossSums, Student, Teacher
from train.loss.teachers import build_hidden_teacher
from train.medusa import compute_head_weights, compute_medusa_loss, sum_text_losses
from train.objective import Objective, ParameterGroup
from train.parallel import processes
from train.parallel.checkpoint import collect_resume_settings


class AdaptedMedusa(nn.Module):
    """Medusa heads with the adapter of the target that they read; Medusa-2 trains both.

    What this module lacks, such as `plan_export`, is that of the heads.
    """

    def __init__(self, heads: MedusaHead, adapter: Adapter) -> None:
        super().__init__()
        self.heads = heads
        self.adapter = adapter

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("heads"), name)

    def save(
        self,
        folder: Path,
        provenance: dict[str, object],
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Write the heads to `folder`, as `DraftHead.save` does, and the adapter beside it.

        The heads' `headsmith.json` names their adapter and its checksum.

        Raises:
            InputError: the disk is full or not writable.
        """
        beside = folder.parent / "adapter"
        self.adapter.save(beside, provenance)
        with (beside / WEIGHTS).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        belongs = {"adapter": {"path": str(beside), "sha256": checksum}}
        self.heads.save(folder, {**provenance, **belongs}, more)


class Medusa2Objective(Objective):
    """Losses of the target and of the heads that read it.

    The terms are depth 0, the target, to depth K, the last head. Shapes as in `train.medusa`.

    Source: "Medusa", arXiv:2401.10774, section 2.2.2, eq. 2; self-distillation: section 2.3.2. The
        authors' fork of axolotl trains the heads first, with the same weight.
    """

    metric_names = ("top1", "top5")
    first_depth = 0
    trains_target = True
    default_optimizer = Optimizer.adamw  # as the authors; Muon on an adapter was not measured

    def __init__(self, head: AdaptedMedusa, target: Target, config: Medusa2Run) -> None:
        super().__init__()
        self.head, self.target, self.config = head, target, config.head
        self.joint, self.num_steps = config.joint, config.train.num_steps
        assert config.joint.heads_only_steps is not None, "the run's settings fill it in"
        self.first_step = config.joint.heads_only_steps  # the first joint one
        self.distilled = config.joint.target_loss is TargetLoss.self
        self.soft = config.head.labels is Labels.soft
        self.decays = compute_head_weights(head.heads.num_heads, config.head.loss_decay)
        self.term_weights = self._build_term_weights(1.0, config.joint.heads_weight)
        self.resume_settings = self._collect_resume_settings(config)
        self.adapting = False
        self.own_parameter_groups = [
            ParameterGroup(list(head.heads.parameters()), rate=self.joint.heads_lr_multiplier),
            ParameterGroup(list(head.adapter.parameters()), first_step=self.first_step),
        ]
        self.vocab = DraftVocab.make_full(target.vocab_size).to(target.device)

    def _collect_resume_settings(self, config: Medusa2Run) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for section in ("head", "adapter", "joint"):
            settings |= collect_resume_settings(section, getattr(config, section))
        if self.joint.heads_schedule is HeadsSchedule.sine:
            settings["joint steps"] = self.num_steps - self.first_step
        if config.adapter.dropout:
            # Dropout is drawn once per micro batch.
            settings["train.micro_batch_size"] = config.train.micro_batch_size
        return settings

    def _build_term_weights(self, target: float, heads: float) -> Tensor:
        return torch.cat([torch.tensor([target]), heads * self.decays])

    def start_step(self, step: int) -> Tensor:
        """Start an optimizer step; return the weights [1 + K] float32 of its terms."""
        self.adapting = step >= self.first_step
        joint_steps = self.num_steps - self.first_step
        weight = compute_heads_weight(self.joint, step - self.first_step, joint_steps)
        return self._build_term_weights(float(self.adapting), weight)

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of target and heads; `scale` [1 + K] is the weight of each term."""
        bare = None
        if self.distilled or self.soft or not self.adapting:
            with torch.no_grad(), self.head.adapter.pause_adapter():
                bare = self._compute_hidden_states(batch)
        if self.adapting or bare is None:
            if self.training:
                # Dropout is drawn from the sequences' seeds, the same for any number of processes.
                torch.manual_seed(batch[NOISE_SEEDS][0])
            hidden = self._compute_hidden_states(batch)
        else:
            hidden = bare
        target_teacher = self._build_teacher(batch, bare) if self.distilled else None
        soft = None
        if self.soft:
            teacher = self._build_teacher(batch, bare, self.config.teacher_temperature)
            soft = teacher, self.config.off_path_weight
        target_sums = compute_target_loss(
            self.target, hidden, batch, scale[:1], target_teacher, self.compiled
        )
        head_sums = compute_medusa_loss(
            self.head.heads, hidden, batch, scale[1:], soft, self.compiled
        )
        total = target_sums.total + head_sums.total
        if not self.adapting:
            # DDP waits for a gradient of every parameter.
            total = total + 0.0 * sum(each.sum() for each in self.head.adapter.parameters())
        return LossSums(total, torch.cat([target_sums.terms, head_sums.terms], dim=1))

    def _build_teacher(
        self, batch: Batch, bare: Tensor | None, temperature: float = 1.0
    ) -> Teacher:
        """Build the teacher: the target's distributions without its adapter."""
        assert bare is not None
        states = bare.flatten(0, 1)[batch[SUPERVISION].token_indices]
        temperature = self.distillation_temperature(temperature)
        return build_hidden_teacher(self.target, self.vocab, states, temperature)

    def _compute_hidden_states(self, batch: Batch) -> Tensor:
        """Compute the last hidden states [B, T, D], in the dtype of the heads."""
        with label_part("target"):
            return add_target_states(self.target, batch, self.head.taps)[HIDDEN_STATES].float()


def compute_target_loss(
    target: EmbeddingsAndOutputHead,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    teacher: Teacher | None = None,
    compiled: bool = False,
) -> LossSums:
    """Sum the target's cross-entropy against the text, or its KL from its earlier distributions.

    Args:
        target: the target, whose output head gets no gradient.
        hidden: [B, T, D], the target's last hidden states.
        batch: indexed batch with `input_ids` [B, T].
        scale: [1] float32, the weight of the sum in the total.
        teacher: distributions to learn instead of the text, P rows.
        compiled: whether to compile the loss on first use.

    Returns:
        One term, with the metrics of `compute_medusa_loss`.
    """
    rows: MatchedRows = batch[SUPERVISION].depths[0]
    states = hidden.flatten(0, 1)[rows.output_indices]
    student = Student(states, target.projection, rows.teacher_rows, scale.expand(len(states)))
    return sum_text_losses([student], batch, teacher, compiled)


def compute_heads_weight(config: JointConfig, step: int, num_steps: int) -> float:
    """Compute the weight of the heads' losses in a step.

    Args:
        config: weight and schedule.
        step: joint step, from 0; negative while only the heads are trained.
        num_steps: number of joint steps.
    """
    if config.heads_schedule is HeadsSchedule.constant or step < 0:
        return config.heads_weight
    return config.heads_weight * math.sin(math.pi / 2 * step / num_steps)


@dataclass
class HeldoutLoss:
    """Mean cross-entropy of a target on the answers of held-out sequences.

    Attributes:
        target: target with the adapter.
        adapter: adapter in training.
        heldout: packed sequences.
        num_sequences: largest number of sequences to use.
    """

    target: Target
    adapter: Adapter
    heldout: Dataset
    num_sequences: int

    def __call__(self) -> dict[str, float]:
        """Measure the loss, in nats per token, without and with the adapter, and the change."""
        adapted = self._compute_mean_loss()
        return {
            "target_loss_before": self.loss_without_adapter,
            "target_loss": adapted,
            "target_change_percent": 100 * (adapted / self.loss_without_adapter - 1),
        }

    @cached_property
    def loss_without_adapter(self) -> float:
        """Measure the loss without the adapter, once."""
        with self.adapter.pause_adapter():
            return self._compute_mean_loss()

    @torch.no_grad()
    def _compute_mean_loss(self) -> float:
        sums = torch.zeros(2, device=self.target.device)
        for index in range(min(len(self.heldout), self.num_sequences)):
            batch = batch_to_device(
                add_supervision(stack_sequences(self.heldout, [index]), 0), self.target.device
            )
            hidden = add_target_states(self.target, batch, FeatureLayers())[HIDDEN_STATES]
            sums += compute_target_loss(self.target, hidden, batch, sums.new_ones(1)).terms[:2, 0]
        return float(sums[0] / sums[1])


@dataclass(frozen=True)
class Medusa2Training(command.TrainingCommand):
    """Training of Medusa heads and an adapter, to `out_dir/head` and `out_dir/adapter`."""

    def __call__(self, config: TrainRun) -> None:
        """Train heads and adapter with a command's settings."""
        processes.check_not_sharded("train/medusa2.py")
        super().__call__(config)

    def build_objective(self, config: Any, target: Any, data: Any) -> tuple[Objective, list[str]]:
        """Build the objective of heads and adapter, and lines about both.

        Raises:
            InputError: the target's output head is quantised.
        """
        config.settle_joint_steps(config.train.num_steps)
        heads, _ = self.make_head(config, target, data)
        if not target.output_head.weight.is_floating_point():
            raise InputError(
                f"target.path={target.name}: its output head is quantised, but the adapter trains "
                "through it; name the model before quantisation"
            )
        adapter = Adapter(target, config.adapter, config.seed)
        millions = [sum(p.numel() for p in part.parameters()) / 1e6 for part in (heads, adapter)]
        lines = [
            f"head: {heads.num_heads} Medusa heads, {millions[0]:.1f} M parameters",
            f"adapter: rank {config.adapter.rank}, {millions[1]:.1f} M parameters, from step "
            f"{config.joint.heads_only_steps}",
        ]
        return self.objective(AdaptedMedusa(heads, adapter), target, config), lines

    def build_evaluation(
        self, config: Any, source: TrainingSource, objective: Objective
    ) -> Evaluate:
        """Build a function that measures the target's loss, and tau on its current answers."""
        target: Any = source.target
        heldout: Any = source.heldout
        prompts = select_heldout_prompts(heldout, config.train.num_replay_prompts)
        adapter, number = objective.head.adapter, config.train.num_eval_sequences
        loss = HeldoutLoss(target, adapter, heldout, number)

        def evaluate(head: AdaptedMedusa) -> HeldoutFigures:
            if not prompts:
                return HeldoutFigures(loss())
            texts = LocalAnswerSource(target)
            replay = make_heldout_replay(texts, prompts, objective.depth, head.taps)
            # The texts change with the target: their tau says nothing of another step's.
            return HeldoutFigures(loss() | replay(head.heads).figures)

        return evaluate


main = Medusa2Training(MedusaHead, Medusa2Objective, COMMAND)


if __name__ == "__main__":
    COMMAND.run(main)
