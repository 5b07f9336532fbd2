"""The objective and the loss of heads that draft step by step: EAGLE, P-EAGLE, MTP, block drafters.

Step d (from 1) of a draft from token t predicts x_{t+1+d}. Like Medusa's head d, it is compared
with the target's prediction at t + d. Slots of a block are its steps. Sums are over supervised
tokens, as in `train.loss.fused_linear`.

Letters: B sequences, T tokens, N anchors, J steps, M supervised rows of all steps, P rows of the
teacher, H hidden, L metrics.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from conf.command.clock import label_part
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.batch.batch import STEP_TARGETS, Batch, StepTargets, gather_labels
from train.loss.divergences import (
    LossGrad,
    Softmax,
    compute_divergence,
    text_cross_entropy,
    top_k_cross_entropy,
)
from train.loss.fused_linear import (
    LossSums,
    LowRank,
    RowLosses,
    Student,
    compute_fused_loss,
    scale_off_path_rows,
    sum_steps,
)
from train.loss.teachers import build_target_teacher, build_text_teacher
from train.objective import Objective
from train.parallel.checkpoint import collect_resume_settings, collect_vocab_checksum

DRAFT_METRICS = ("top1", "alpha")
"""Metrics of a row: whether the first choices of head and target agree; and alpha, the sum of
min(p, q) over the whole vocabulary, which is the probability of acceptance at temperature 1."""


class StepObjective(Objective):
    """Loss of all steps: divergence from the target, text, likeliest tokens, and a head's own."""

    metric_names = DRAFT_METRICS

    def __init__(
        self, head: Any, target: EmbeddingsAndOutputHead, config: Any, term_weights: Tensor
    ) -> None:
        super().__init__()
        self.head, self.target, self.config = head, target, config
        self.learns_prompts, self.term_weights = config.learn_prompts, term_weights
        self.criterion = StepCriterion(config, head.vocab)
        self.resume_settings = collect_resume_settings("head", config)
        self.resume_settings |= collect_vocab_checksum(head.vocab)

    def compute_outputs(self, batch: Batch) -> Any:
        """Compute the outputs of all steps, of all sequences flattened."""
        raise NotImplementedError

    @staticmethod
    def select_supervised_rows(outputs: Any, step_targets: StepTargets) -> Tensor:
        """Select the supervised rows [M, H] of the outputs."""
        raise NotImplementedError

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared batch; `scale` [J] is the weight of each step.

        Returns:
            Sums with `DRAFT_METRICS`.
        """
        step_targets: StepTargets = batch[STEP_TARGETS]
        with label_part("head"):
            outputs = self.compute_outputs(batch)
        with label_part("loss"):
            added = self.compute_added_logits(outputs, batch)
            rows = self.select_supervised_rows(outputs, step_targets)
            student = self.build_student(rows, added, batch, scale[step_targets.row_steps])
            temperature = self.distillation_temperature(self.config.teacher_temperature)
            teacher = build_target_teacher(self.target, self.head.vocab, batch, temperature)
            weight = self.config.off_path_weight if self.training else 1.0
            student, teacher = scale_off_path_rows(student, teacher, batch, weight)
            if self.config.text_weight:
                teacher = build_text_teacher(gather_labels(batch), teacher)
            total, (values,) = compute_fused_loss([student], teacher, self.criterion, self.compiled)
            extra = self.compute_extra_loss(outputs, rows, batch, values)
            if extra is not None:
                total = total + (extra * student.scales[:]).sum()
                values[0] += extra.detach()
            return LossSums(total, sum_steps(values, student, step_targets))

    def compute_added_logits(self, outputs: Any, batch: Batch) -> LowRank | None:
        """Compute what is added to the logits of the supervised rows; None if nothing is."""
        del outputs, batch
        return None

    def build_student(
        self, rows: Tensor, added: LowRank | None, batch: Batch, scales: Tensor
    ) -> Student:
        """Build the student of the supervised rows, sorted by teacher row.

        Args:
            rows: [M, H] supervised rows of the outputs.
            added: logits to add.
            batch: indexed batch.
            scales: [M] float32 weights of the rows.
        """
        teacher_rows = batch[STEP_TARGETS].matched_rows.teacher_rows
        return Student(rows, self.head.make_projection(), teacher_rows, scales, added)

    def compute_extra_loss(
        self, outputs: Any, rows: Tensor, batch: Batch, row_values: Tensor
    ) -> Tensor | None:
        """Compute a further loss [M] of the supervised rows; None without one.

        Args:
            outputs: outputs of all steps.
            rows: [M, H] supervised rows of the outputs.
            batch: prepared batch.
            row_values: [1 + L, M] losses and metrics of the rows.
        """
        del outputs, rows, batch, row_values
        return None


class StepCriterion:
    """Weighted losses of a row.

    Rows whose likeliest continuation is outside the draft vocabulary add only a text loss if
    `config.skips_undrafted` is set.
    """

    num_metrics = len(DRAFT_METRICS)

    def __init__(self, config: Any, vocab: DraftVocab) -> None:
        self.config, self.vocab = config, vocab

    def __call__(
        self, chunk: Any, chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        """Compare rows with the teacher, see `train.loss.fused_linear.Criterion`.

        With a text loss, `chunk` is of `build_text_teacher`.
        """
        config = self.config
        labels, chunk = chunk if config.text_weight else (None, chunk)
        top1_ids = chunk.top1_ids[chunk_rows]
        best = student.top1_columns
        top1 = (best if self.vocab.is_full else self.vocab.to_target_ids(best)) == top1_ids
        pair = chunk.pair_with(chunk_rows, student)
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        terms: list[LossGrad] = []
        if config.divergence_weight:
            divergence = compute_divergence(config.divergence, pair, config.lk_eta, needs_grad)
            terms.append(divergence.scale(config.divergence_weight))
        if config.top_k_weight:
            top_k = top_k_cross_entropy(pair, config.top_k, needs_grad)
            terms.append(top_k.scale(config.top_k_weight))
        if terms and config.skips_undrafted and not self.vocab.is_full:
            known = self.vocab.to_draft_ids(top1_ids) >= 0
            terms = [reduce(LossGrad.add, terms).mask_rows(known)]
        if labels is not None:
            # The last, as it overwrites q.
            columns = labels[chunk_rows]
            if not self.vocab.is_full:
                columns = self.vocab.to_draft_ids(columns)
            text = text_cross_entropy(student, columns, needs_grad)
            terms.append(text.scale(config.text_weight))
        if not terms:  # only a further loss is trained
            terms.append(LossGrad(pair.q.new_zeros(len(pair.q)), torch.zeros_like(pair.q)))
        loss, grad = reduce(LossGrad.add, terms)
        return RowLosses(torch.stack([loss, top1.to(alpha), alpha]), grad)
