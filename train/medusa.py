"""Trains Medusa heads: `accelerate launch train/medusa.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.medusa import MedusaRun
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, MedusaRun, "medusa", check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from typing import Any

import torch
from torch import Tensor

from conf.command.clock import label_part
from conf.settings.medusa import Labels, MedusaConfig
from conf.settings.training import Schedule
from data.features.store_format import HIDDEN_STATES
from heads.medusa import MedusaHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.batch.batch import SUPERVISION, Batch, MatchedRows, gather_labels
from train.loop import command
from train.loss.divergences import Softmax, kl, mark_top1_and_top5, text_cross_entropy
from train.loss.fused_linear import (
    LossSums,
    OffPathScales,
    OffPathTokens,
    RowLosses,
    Student,
    Teacher,
    build_counted_mask,
    compute_fused_loss,
    mark_off_path,
    sum_term,
)
from train.loss.teachers import build_hidden_teacher, build_text_teacher
from train.objective import PIECES_OF_TEACHER, PIECES_OF_TEXT, LaunchSpec, Objective, SavedRows
from train.parallel.checkpoint import collect_resume_settings


class MedusaObjective(Objective):
    """Loss of Medusa heads on a batch: cross-entropy against the text, or KL from the target.

    Sums are over supervised tokens, as in `train.loss.fused_linear`.

    Letters: B batch, T tokens, D hidden, K heads, P rows of the teacher.
    """

    metric_names = ("top1", "top5")
    default_schedule = Schedule.cosine
    muon_rate = 8.4e-2
    adam_rate_times_width = 2.1

    def __init__(
        self, head: MedusaHead, target: EmbeddingsAndOutputHead, config: MedusaConfig
    ) -> None:
        super().__init__()
        self.head, self.target, self.config = head, target, config
        self.soft = config.labels is Labels.soft
        self.term_weights = compute_head_weights(head.num_heads, config.loss_decay)
        self.resume_settings = collect_resume_settings("head", config)
        self.description = f"{head.num_heads} Medusa heads"
        self.vocab = DraftVocab.make_full(target.vocab_size).to(target.device)

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows:
        """Count the rows that training holds: the states, and per head its blocks and its states.

        With hard labels heads run one after another, and one projection at a time is cast.
        """
        tokens, heads = setting.tokens, self.head.num_heads
        kept: dict[str, float] = {
            "state": 2 * heads * self.head.config.num_layers * tokens,
            "float32 state": (1 + heads) * tokens,
        }
        spared = (heads - 1) * len(self.head.vocab.ids) * self.target.hidden_size
        return SavedRows(
            kept, tokens, heads * tokens, (heads + 3) * tokens, 0,
            PIECES_OF_TEACHER if self.soft else PIECES_OF_TEXT,
            uncast=0 if self.soft else spared,
        )  # fmt: skip

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared batch; `scale` [K] is the weight of each head."""
        hidden = batch[HIDDEN_STATES].to(next(self.head.parameters()).dtype)
        soft = None
        if self.soft:
            states = hidden.flatten(0, 1)[batch[SUPERVISION].token_indices]
            temperature = self.distillation_temperature(self.config.teacher_temperature)
            teacher = build_hidden_teacher(self.target, self.vocab, states, temperature)
            soft = teacher, self.config.off_path_weight
        return compute_medusa_loss(self.head, hidden, batch, scale, soft, self.compiled)


def compute_medusa_loss(
    heads: MedusaHead,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    soft: tuple[Teacher, float] | None = None,
    compiled: bool = False,
) -> LossSums:
    """Sum the cross-entropy of every head against the text, or the KL divergence from the target.

    Args:
        heads: heads to train.
        hidden: [B, T, D], the target's last hidden states.
        batch: indexed batch with `input_ids` [B, T].
        scale: [K] float32 weight of each head's sum in the total.
        soft: the target's distributions, P rows, to learn instead of the text, and the factor on a
            draft token's loss for each token before it that is not their first choice. Head k at t
            learns the one at t + k, which predicts x_{t+1+k}. Accuracies are against the text in
            either case.
        compiled: whether to compile the loss on first use.

    Returns:
        Sums with two metrics: whether the text's token was the head's first choice, and whether it
        was among its first five.

    Source: "Medusa", arXiv:2401.10774, section 2.2.1, eq. 1.
    """
    flat, path, teacher = hidden.flatten(0, 1), None, None
    if soft is not None:
        path = OffPathTokens(batch, soft[1])
        teacher = mark_off_path(soft[0], gather_labels(batch), path)
    students = []
    with label_part("head"):
        for k in range(heads.num_heads):
            rows: MatchedRows = batch[SUPERVISION].depths[1 + k]
            states = heads.head_states(k, flat[rows.output_indices])
            scales: Tensor | OffPathScales = scale[k].expand(len(states))
            if path is not None:
                depths = rows.output_indices.new_full((), 1 + k).expand(len(states))
                scales = OffPathScales(path, rows.output_indices, depths, scales[:])
            students.append(Student(states, heads.make_projection(k), rows.teacher_rows, scales))
    return sum_text_losses(students, batch, teacher, compiled)


def sum_text_losses(
    students: list[Student], batch: Batch, teacher: Teacher | None, compiled: bool
) -> LossSums:
    """Sum the losses of students, a term each, as `compute_medusa_loss` does."""
    with label_part("loss"):
        text = build_text_teacher(gather_labels(batch), teacher)
        total, values = compute_fused_loss(students, text, text_criterion, compiled)
    terms = map(sum_term, values, map(build_counted_mask, students))
    return LossSums(total, torch.stack(list(terms), dim=1))


class _TextCriterion:
    """Cross-entropy against the text or KL from a teacher; top-1 and top-5 of the text."""

    num_metrics = 2

    def __call__(
        self, chunk: Any, chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        labels, soft = chunk[0][chunk_rows], chunk[1]
        hits = mark_top1_and_top5(student.logits, labels)
        if soft is None:
            loss, grad = text_cross_entropy(student, labels, needs_grad)
        else:
            loss, grad = kl(soft.pair_with(chunk_rows, student), needs_grad)
        return RowLosses(torch.stack([loss, *hits]), grad)


text_criterion = _TextCriterion()


def compute_head_weights(num_heads: int, decay: float) -> Tensor:
    """Compute the [K] float32 weights lambda_k = decay ** k for k = 1..K."""
    return torch.tensor([decay**k for k in range(1, num_heads + 1)], dtype=torch.float32)


main = command.TrainingCommand(MedusaHead, MedusaObjective, COMMAND)


if __name__ == "__main__":
    COMMAND.run(main)
