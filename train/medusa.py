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

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from conf.settings.medusa import Labels, MedusaConfig
from conf.settings.training import Schedule
from data.features.store_format import HIDDEN_STATES
from heads.medusa import MedusaHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead, Projection
from heads.vocab import DraftVocab
from train.batch.batch import (
    SUPERVISION,
    Batch,
    MatchedRows,
    gather_labels,
)
from train.loop import command
from train.loop import memory as sizes
from train.loss.divergences import Softmax, kl, text_cross_entropy
from train.loss.fused_linear import (
    LossSums,
    OffPathScales,
    OffPathTeacher,
    OffPathTokens,
    RowLosses,
    Scales,
    Student,
    Teacher,
    build_counted_mask,
    compute_fused_loss,
    sum_term,
)
from train.loss.teachers import HiddenTeacher, TextTeacher
from train.loss.topk import mark_top1_and_top5
from train.objective import LaunchSpec, MemoryEstimate, Objective
from train.parallel import checkpoint as resume


class SoftLabels(NamedTuple):
    """The target's own distributions, learnt instead of the text.

    Attributes:
        teacher: distributions after the answered places.
        off_path_weight: factor on a draft token's loss for each token before it that is not the
            teacher's first choice.
    """

    teacher: Teacher
    off_path_weight: float = 1.0


class MedusaHeads(Protocol):
    """Heads that the Medusa loss can train."""

    @property
    def num_heads(self) -> int:
        """K."""

    def head_states(self, k: int, hidden_states: Tensor, /) -> Tensor:
        """Input [N, D] of the projection of head k (from 0), for last hidden states [N, D]."""

    def make_projection(self, k: int, /) -> Projection:
        """Projection of head k, from 0."""


def compute_head_weights(num_heads: int, decay: float) -> Tensor:
    """[K] float32 lambda_k = decay ** k for k = 1..K."""
    return torch.tensor([decay**k for k in range(1, num_heads + 1)], dtype=torch.float32)


def compute_medusa_loss(
    heads: MedusaHeads,
    hidden: Tensor,
    batch: Batch,
    scale: Tensor,
    soft: SoftLabels | None = None,
    compiled: bool = False,
) -> LossSums:
    """Sum the cross-entropy of every head against the text, or KL from the target.

    Args:
        heads: heads to train.
        hidden: [B, T, D], the target's last hidden states.
        batch: indexed batch with `input_ids` [B, T].
        scale: [K] float32 weight of each head's sum in the total.
        soft: the target's distributions. Head k at t then learns the one at t + k, which predicts
            x_{t+1+k}. Accuracies are against the text in either case.
        compiled: compile the loss on first use.

    Returns:
        Sums whose measures are: the token was the head's first choice, or among its first five.

    Source: "Medusa", arXiv:2401.10774, section 2.2.1, eq. 1.
    """
    flat, labels = hidden.flatten(0, 1), gather_labels(batch)
    path, teacher = None, None
    if soft is not None:
        path = OffPathTokens(batch, soft.off_path_weight)
        teacher = OffPathTeacher(soft.teacher, labels, path)
    students = []
    with record_function("head"):
        for k in range(heads.num_heads):
            rows: MatchedRows = batch[SUPERVISION].depths[1 + k]
            states = heads.head_states(k, flat[rows.output_indices])
            scales: Scales = scale[k].expand(len(states))
            if path is not None:
                depths = rows.output_indices.new_full((), 1 + k).expand(len(states))
                scales = OffPathScales(path, rows.output_indices, depths, scales[:])
            students.append(Student(states, heads.make_projection(k), rows.teacher_rows, scales))
    with record_function("loss"):
        text = TextTeacher(labels, teacher)
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
        measures = mark_top1_and_top5(student.logits, labels)
        if soft is not None:
            loss, grad = kl(soft.pair_with(chunk_rows, student), needs_grad)
            return RowLosses(torch.stack([loss, *measures]), grad)
        loss, grad = text_cross_entropy(student, labels, needs_grad)
        return RowLosses(torch.stack([loss, *measures]), grad)


text_criterion = _TextCriterion()


class MedusaObjective(Objective):
    """Medusa loss of a batch."""

    metric_names = ("top1", "top5")
    default_schedule = Schedule.cosine
    muon_rate = 8.4e-2
    adam_rate_times_width = 2.1

    def __init__(
        self, head: MedusaHead, target: EmbeddingsAndOutputHead, config: MedusaConfig
    ) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.soft, self.temperature = config.labels is Labels.soft, config.teacher_temperature
        self.off_path_weight = config.off_path_weight
        self.term_weights = compute_head_weights(head.num_heads, config.loss_decay)
        self.resume_settings = resume.collect_resume_settings("head", config)
        self.description = f"{head.num_heads} Medusa heads"
        self.vocab = DraftVocab.make_full(target.vocab_size).to(target.device)

    def estimate_memory(self, setting: LaunchSpec) -> MemoryEstimate:
        """N H float32 of states; per head and token 2 H e in blocks, H float32 in the loss."""
        head, hidden = self.head, self.target.hidden_size
        tokens, e = setting.tokens, setting.dtype.itemsize
        rows = tokens * hidden
        of_a_head = 2 * head.config.num_layers * e + sizes.FLOAT32_BYTES
        kept = sizes.FLOAT32_BYTES * rows + head.num_heads * rows * of_a_head
        grads = head.num_heads * rows * sizes.FLOAT32_BYTES
        one = len(head.vocab.ids), hidden
        pieces = sizes.PIECES_OF_TEACHER if self.soft else sizes.PIECES_OF_TEXT
        loss = sizes.estimate_loss_bytes(setting, tokens, one, pieces)
        if self.soft:
            loss += sizes.teacher_bytes(setting, tokens, self.target, one[0])
        # With hard labels heads run one after another, and one projection at a time is cast.
        spared = 0 if self.soft else (head.num_heads - 1) * one[0] * hidden
        copies = max(0, sizes.copied_bytes(head, setting) - e * spared)
        return MemoryEstimate(copies, kept, loss + grads, grads + 3 * rows * sizes.FLOAT32_BYTES)

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared batch; `scale` [K] is the weight of each head."""
        hidden = batch[HIDDEN_STATES].to(next(self.head.parameters()).dtype)
        soft = None
        if self.soft:
            states = hidden.flatten(0, 1)[batch[SUPERVISION].token_indices]
            temperature = self.distillation_temperature(self.temperature)
            teacher = HiddenTeacher(self.target, self.vocab, states, temperature)
            soft = SoftLabels(teacher, self.off_path_weight)
        return compute_medusa_loss(self.head, hidden, batch, scale, soft, self.compiled)


main = command.TrainingCommand(MedusaHead, MedusaObjective, COMMAND)


if __name__ == "__main__":
    COMMAND.run(main)
