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

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.command.clock import label_part
from conf.errors import InputError
from conf.settings.eagle import OutputHead, StepNormalizer, TokenNormalizer, UnrolledConfig
from data.features.store_format import HIDDEN_STATES
from heads.eagle.eagle import EagleHead
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.batch.batch import (
    DOCUMENTS,
    NOISE_SEEDS,
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    StepTargets,
    collect_states,
    gather_labels,
)
from train.loop import command, memory
from train.loss.divergences import (
    LossGrad,
    Softmax,
    compute_divergence,
    is_top1_match,
    text_cross_entropy,
    top_k_cross_entropy,
)
from train.loss.fused_linear import (
    LossSums,
    RowLosses,
    Student,
    Teacher,
    compute_fused_loss,
    sum_steps,
)
from train.loss.teachers import TextTeacher, build_target_teacher
from train.objective import DIVISORS, DRAFT_METRICS, LaunchSpec, MemoryEstimate, Objective
from train.parallel.checkpoint import collect_resume_settings, collect_vocab_checksum


class EagleObjective(Objective):
    """Loss of EAGLE's training-time test: divergence from the target, features, top tokens.

    Step d (from 1) of the training-time test predicts x_{t+1+d} from token t. Like Medusa's head d,
    it is compared with the target's prediction at t + d. Sums are over supervised tokens, as in
    `train.loss.fused_linear`.

    Letters: B sequences, T tokens, N anchors, M supervised rows of all steps, P rows of the
    teacher, H hidden, V vocabulary, W draft vocabulary, J steps, L metrics.
    """

    metric_names = DRAFT_METRICS

    def __init__(self, head: Any, target: EmbeddingsAndOutputHead, config: Any) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.config, self.learns_prompts = config, config.learn_prompts
        self.term_weights = compute_step_weights(config)
        self.criterion = EagleCriterion(config, head.vocab)
        self.loss_logits_per_token = len(self.term_weights) * len(head.vocab.ids)
        self.resume_settings = collect_resume_settings("head", config)
        self.resume_settings |= collect_vocab_checksum(head.vocab)
        if config.path is not None:
            self._prepare_saved_head()
        self.description = self._describe_head()

    def _prepare_saved_head(self) -> None:
        """Check that a saved head has the recipe's form, and set which parameters it trains.

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

    def estimate_memory(self, setting: LaunchSpec) -> MemoryEstimate:
        """Estimate the bytes of training, counted with `torch.autograd.graph.saved_tensors_hooks`.

        Per token: 4 I e in the MLP; 2 Q e and 6 K e in the attention (width Q of queries, K of keys
        and of values); 33 bytes of width H in bfloat16 and float32: inputs of three projections,
        float32 norms, residual stream. The text adds the input of `fc` before and after its cast,
        and the layer's float32 input, 2 H, while steps are made.
        """
        head, num_steps = self.head, len(self.term_weights)
        llama, tokens, e = head.config.llama, setting.tokens, setting.dtype.itemsize
        hidden, inner = llama.hidden_size, llama.intermediate_size
        attention = head.layer.self_attn
        query, keys = attention.q_proj.out_features, attention.k_proj.out_features
        a_step = e * (4 * inner + 2 * query + 6 * keys) + 33 * hidden
        text = (memory.FLOAT32_BYTES + e) * head.fc.in_features + memory.FLOAT32_BYTES * 2 * hidden
        kept = tokens * (num_steps * a_step + text)
        grads = memory.FLOAT32_BYTES * num_steps * tokens * hidden
        students = num_steps * tokens
        one = head.make_projection().weight.shape[0], hidden
        loss = (
            grads
            + memory.estimate_loss_bytes(setting, students, one, memory.PIECES_OF_TEACHER)
            + memory.estimate_teacher_bytes(setting, tokens, self.target, one[0])
        )
        copies, backward = (
            memory.estimate_copied_bytes(head, setting),
            2 * grads + 3 * tokens * inner * e,
        )
        return MemoryEstimate(copies, kept, loss, backward)

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

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared batch; `scale` [J] is the weight of each step."""
        with label_part("head"):
            steps = self._iter_step_outputs(batch)
            outputs = [next(steps) for _ in range(self.config.num_steps)]
        with label_part("loss"):
            supervised = torch.cat(outputs).index_select(
                0, batch[STEP_TARGETS].matched_rows.output_indices
            )
            student, teacher = self._pair_with_teacher(supervised, batch, scale)
            if self.config.text_weight:
                teacher = TextTeacher(gather_labels(batch), teacher)
            return compute_eagle_loss(self.criterion, student, supervised, batch, teacher)

    def _pair_with_teacher(
        self, supervised: Tensor, batch: Batch, scale: Tensor
    ) -> tuple[Student, Teacher]:
        """Pair the supervised rows [M, H] as students with the target as teacher."""
        step_targets: StepTargets = batch[STEP_TARGETS]
        scales = scale[step_targets.row_steps]
        student = Student(
            self.head.apply_final_norm(supervised),
            self.head.make_projection(),
            step_targets.matched_rows.teacher_rows,
            scales,
        )
        temperature = self.distillation_temperature(self.config.teacher_temperature)
        return student, build_target_teacher(self.target, self.head.vocab, batch, temperature)

    def _iter_step_outputs(self, batch: Batch) -> Iterator[Tensor]:
        """Yield the outputs [N, H] of each step at the anchors, all sequences flattened."""
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
        return head.unroll(text, ids, anchors, branches, config.detach_features, config.own_tokens)

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


def compute_eagle_loss(
    criterion: "EagleCriterion", steps: Student, outputs: Tensor, batch: Batch, teacher: Teacher
) -> LossSums:
    """Sum the losses of all steps of a batch.

    Args:
        criterion: weights and formulas.
        steps: the supervised rows sorted by teacher row, scaled by step.
        outputs: [M, H] outputs of these rows before the last norm.
        batch: an indexed batch, with `hidden_states` [B, T, H] for the regression loss.
        teacher: the target's distributions, P rows.

    Returns:
        Sums with `DRAFT_METRICS`. Tokens whose likeliest continuation is outside the draft
        vocabulary add nothing to the loss.
    """
    total, (values,) = compute_fused_loss([steps], teacher, criterion, criterion.compiled)
    weight = criterion.config.regression_weight
    if weight:
        target_states = (
            batch[HIDDEN_STATES]
            .flatten(0, 1)[batch[SUPERVISION].token_indices[steps.teacher_rows.device]]
            .float()
        )
        regression = weight * F.smooth_l1_loss(
            outputs.float(), target_states, reduction="none"
        ).mean(-1)
        total = total + (regression * steps.scales[:]).sum()
        values[0] += regression.detach()
    return LossSums(total, sum_steps(values, steps, batch[STEP_TARGETS]))


class EagleCriterion:
    """Weighted divergence and top-k loss of a row, compiled on first use if asked for."""

    num_metrics = len(DRAFT_METRICS)

    def __init__(self, config: UnrolledConfig, vocab: DraftVocab, compiled: bool = False) -> None:
        self.config, self.vocab, self.compiled = config, vocab, compiled

    def __call__(
        self, chunk: Any, chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        """Compare rows with the teacher, see `train.loss.fused_linear.Criterion`.

        With a text loss, `chunk` is of a `TextTeacher`.
        """
        config, columns = self.config, None
        if config.text_weight:
            labels, chunk = chunk
            columns = self.vocab.to_draft_ids(labels[chunk_rows])
        top1_ids = chunk.top1_ids[chunk_rows]
        top1 = is_top1_match(self.vocab, student, top1_ids)
        pair = chunk.pair_with(chunk_rows, student)
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        terms: list[LossGrad] = []
        if config.divergence_weight:
            divergence = compute_divergence(config.divergence, pair, config.lk_eta, needs_grad)
            terms.append(divergence.scale(config.divergence_weight))
        if config.top_k_weight:
            terms.append(
                top_k_cross_entropy(pair, config.top_k, needs_grad).scale(config.top_k_weight)
            )
        if not terms:  # only the regression loss is trained
            terms.append(LossGrad(pair.q.new_zeros(len(pair.q)), torch.zeros_like(pair.q)))
        losses = reduce(LossGrad.add, terms)
        if not self.vocab.is_full:
            losses = losses.mask_rows(self.vocab.to_draft_ids(top1_ids) >= 0)
        if columns is not None:
            losses = (
                text_cross_entropy(student, columns, needs_grad)
                .scale(config.text_weight)
                .add(losses)
            )
        return RowLosses(torch.stack([losses.loss, top1.to(alpha), alpha]), losses.grad)


def compute_step_weights(config: UnrolledConfig) -> Tensor:
    """Compute [J] float32 weights decay ** j for j = 0..J-1, divided by their sum for a mean."""
    weights = torch.tensor([config.step_decay**j for j in range(config.num_steps)])
    return weights / weights.sum() if config.step_normalizer is StepNormalizer.mean else weights


main = command.TrainingCommand(EagleHead, EagleObjective, COMMAND)


if __name__ == "__main__":
    COMMAND.run(main)
