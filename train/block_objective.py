"""The objective of every block drafter.

Blocks draft after anchor tokens. Anchors are drawn per sequence and step on the CPU, so any number
of processes and any restart draws the same.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial, reduce
from zlib import crc32

import torch
from torch import Tensor
from torch.profiler import record_function

from conf.settings.blocks import BlockConfig, SlotWeights
from data.features.store_format import HIDDEN_STATES, TEACHER_IDS, TEACHER_LOG_PROBS
from heads.blocks.block_head import BlockHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.batch.batch import (
    DOCUMENTS,
    NOISE_SEEDS,
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    SortedIndices,
    StepTargets,
    collect_states,
    gather_labels,
)
from train.loop import memory as sizes
from train.loss.divergences import (
    Distribution,
    LossGrad,
    Softmax,
    compute_divergence,
    is_top1_match,
)
from train.loss.fused_linear import (
    LossSums,
    RowLosses,
    Student,
    Teacher,
    compute_fused_loss,
    scale_off_path_rows,
    sum_steps,
)
from train.loss.teachers import HiddenTeacher, TextTeacher, TopKTeacher
from train.objective import DIVISORS, DRAFT_METRICS, LaunchSpec, MemoryEstimate, Objective
from train.parallel import checkpoint as resume


def compute_slot_weights(config: BlockConfig, num_draft_tokens: int) -> Tensor:
    """[D] float32 weights exp(-(d - 1) / gamma) for d = 1..D, or ones for D-PACE.

    Source: DFlash, arXiv 2602.06036, eq. 4.
    """
    if config.slot_weights is SlotWeights.dpace:
        return torch.ones(num_draft_tokens)
    return torch.exp(-torch.arange(num_draft_tokens) / config.slot_gamma)


@torch.no_grad()
def scale_by_dpace(slots: Student, batch: Batch, criterion: "BlockCriterion") -> Student:
    """Multiply the scales of slots by D-PACE's weights."""
    surprise = _Surprise(criterion.vocab)
    _, (values,) = compute_fused_loss([slots], TextTeacher(gather_labels(batch)), surprise)
    weights = compute_dpace_weights(
        -values[0], batch[STEP_TARGETS], criterion.config.slot_smoothing
    )
    return slots._replace(scales=slots.scales[:] * weights)


def compute_dpace_weights(log_q: Tensor, unrolled: StepTargets, smoothing: float) -> Tensor:
    """[M] expected number of tokens that a block yields from each of its draft tokens on.

    Args:
        log_q: [M] log-probabilities of the text's tokens, in the order of the answers.
        unrolled: rows of blocks with D draft tokens each.
        smoothing: share by which each probability is moved towards 1.

    Source: D-PACE, arXiv 2605.18810; vllm-project/speculators `losses/utils.py`.
    """
    shape, places = (
        (len(unrolled.step_sizes), len(unrolled.anchors)),
        unrolled.matched_rows.output_indices,
    )
    smooth, learnt = log_q.new_ones(shape), log_q.new_zeros(shape)
    smooth.view(-1)[places] = smoothing + (1 - smoothing) * log_q.exp()
    learnt.view(-1)[places] = 1.0
    reached = smooth.cumprod(0) * learnt
    return reached.flip(0).cumsum(0).flip(0).view(-1)[places]


def compute_block_loss(
    criterion: "BlockCriterion",
    slots: Student,
    batch: Batch,
    teacher: Teacher,
    off_path_weight: float,
    beside: Callable[[Tensor], Tensor | None],
) -> LossSums:
    """Sum the losses of all slots of a batch.

    Args:
        criterion: weights and formulas.
        slots: the learnt rows in the order of the answers, scaled by slot.
        batch: an indexed batch.
        teacher: the target's distributions after its P answered places.
        off_path_weight: factor on a draft token's loss for each token before it that is not the
            teacher's first choice.
        beside: function that gives a further loss [M], given the values [1 + L, M] of all rows.

    Returns:
        `terms` with `MEASURES`.
    """
    if criterion.config.slot_weights is SlotWeights.dpace and torch.is_grad_enabled():
        slots = scale_by_dpace(slots, batch, criterion)
    slots, teacher = scale_off_path_rows(slots, teacher, batch, off_path_weight)
    text = TextTeacher(gather_labels(batch), teacher)
    total, (values,) = compute_fused_loss([slots], text, criterion, criterion.compiled)
    more = beside(values)
    if more is not None:
        total = total + (more * slots.scales[:]).sum()
        values[0] += more.detach()
    return LossSums(total, sum_steps(values, slots, batch[STEP_TARGETS]))


class BlockCriterion:
    """Weighted losses of a row, compiled on first use if asked for."""

    num_metrics = len(DRAFT_METRICS)

    def __init__(self, config: BlockConfig, vocab: DraftVocab, compiled: bool = False) -> None:
        self.config, self.vocab, self.compiled = config, vocab, compiled

    def __call__(
        self,
        chunk: tuple[Tensor, Distribution],
        chunk_rows: Tensor,
        student: Softmax,
        needs_grad: bool,
    ) -> RowLosses:
        """See `train.loss.fused_linear.Criterion`."""
        labels, soft = chunk[0][chunk_rows], chunk[1]
        top1 = is_top1_match(self.vocab, student, soft.top1_ids[chunk_rows])
        pair, config = soft.pair_with(chunk_rows, student), self.config
        alpha = torch.minimum(pair.p, pair.q).sum(-1)
        terms: list[LossGrad] = []
        if config.divergence_weight:
            of_target = compute_divergence(config.divergence, pair, config.lk_eta, needs_grad)
            terms.append(of_target.scale(config.divergence_weight))
        if config.text_weight:
            of_text = self._cross_entropy(labels, student, needs_grad)
            terms.append(of_text.scale(config.text_weight))
        loss, grad = reduce(LossGrad.add, terms)
        return RowLosses(torch.stack([loss, top1.to(alpha), alpha]), grad)

    def _cross_entropy(self, labels: Tensor, student: Softmax, needs_grad: bool) -> LossGrad:
        """Cross-entropy against the text; 0 for labels outside the draft vocabulary."""
        columns = labels if self.vocab.is_full else self.vocab.to_draft_ids(labels)
        inside = columns >= 0
        column = columns.clamp_min(0).unsqueeze(1)
        loss = -student.log_q_at(column).squeeze(1)
        grad = None
        if needs_grad:
            grad = student.q.scatter_add(1, column, student.q.new_full(column.shape, -1.0))
        return LossGrad(loss, grad).mask_rows(inside)


class _Surprise:
    """-log q of the text's token, infinite outside the draft vocabulary."""

    num_metrics = 0

    def __init__(self, vocab: DraftVocab) -> None:
        self.vocab = vocab

    def __call__(
        self, chunk: tuple[Tensor, None], chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        """See `train.loss.fused_linear.Criterion`. Without a gradient."""
        assert not needs_grad
        columns = self.vocab.to_draft_ids(chunk[0][chunk_rows]).unsqueeze(1)
        surprise = -student.log_q_at(columns.clamp_min(0)).masked_fill(columns < 0, -torch.inf)
        return RowLosses(surprise.T, None)


CONTEXT_STARTS, CONTEXT_ENDS = "first_tokens", "block_places"
"""Keys of a batch: first token that each block sees, and the token after the last one."""


class BlockObjective(Objective):
    """Loss of the drawn blocks. Subclasses define `slots`."""

    metric_names = DRAFT_METRICS

    def __init__(
        self, head: BlockHead, target: EmbeddingsAndOutputHead, config: BlockConfig
    ) -> None:
        super().__init__()
        self.head, self.target, self.config = head, target, config
        self.learns_prompts = config.learn_prompts
        self.term_weights = compute_slot_weights(config, head.config.num_draft_tokens)
        self.criterion = BlockCriterion(config, head.vocab)
        self.resume_settings = resume.collect_resume_settings("head", config)
        if not head.vocab.ids.is_meta:  # on `meta`, only memory is estimated
            ids = head.vocab.ids.cpu().numpy().tobytes()
            self.resume_settings["checksum of the draft vocabulary"] = crc32(ids)
        made = head.config
        self.description = (
            f"{head.method}, {made.llama.num_hidden_layers} layers over hidden states "
            f"{list(made.layers)}, blocks of {made.block_size} rows ({made.num_draft_tokens} "
            f"draft tokens), mask token {made.mask_token_id}"
        )

    def estimate_memory(self, setting: LaunchSpec) -> MemoryEstimate:
        """Bytes that autograd keeps, as counted with `torch.autograd.graph.saved_tensors_hooks`.

        Per row and layer: 4 I e in the MLP; 8 + 2 e bytes of each of Q and K in the attention
            (projected, normed, rotated); 16 + 2 e of width H for float32 norms, their output and
            the residual stream. Per text token and layer: (8 + 2 e) K, 8 + e of width H, and the
            input of `fc`. Per row and token of a sequence: e once, for the mask. Per draft token: H
            in float32 in the last norm, and 3 H e for the output, the loss's row and its gradient.
        """
        head, settings, tokens, e = self.head, self.config, setting.tokens, setting.dtype.itemsize
        llama, attention = head.config.llama, head.layers[0].self_attn
        hidden, inner = llama.hidden_size, llama.intermediate_size
        query, keys = attention.q_proj.out_features, attention.k_proj.out_features
        blocks = min(tokens, settings.num_anchors * setting.train.micro_batch_size)
        rows, drafts = (blocks * n for n in (head.config.block_size, head.config.num_draft_tokens))
        a_row = 4 * e * inner + (8 + 2 * e) * (query + keys) + (16 + 2 * e) * hidden
        a_token, text = (8 + 2 * e) * keys, (8 + e) * hidden + e * head.fc.in_features
        kept = len(head.layers) * (rows * a_row + tokens * a_token) + tokens * text
        kept += rows * tokens // setting.train.micro_batch_size * e
        kept += drafts * hidden * (sizes.FLOAT32_BYTES + 3 * e) + self.kept_beside(blocks, e)
        one = head.make_projection().weight.shape[0], hidden
        loss = sizes.estimate_loss_bytes(setting, drafts, one, sizes.PIECES_OF_TEACHER)
        loss += sizes.teacher_bytes(setting, tokens, self.target, one[0])
        loss = max(loss, sizes.making_bytes(setting, tokens, self.target, one[0]))
        backward = 2 * sizes.FLOAT32_BYTES * rows * hidden + 3 * rows * inner * e
        return MemoryEstimate(sizes.copied_bytes(head, setting), kept, loss, backward)

    def kept_beside(self, blocks: int, itemsize: int) -> int:
        """Further bytes that a kind of head keeps for a number of blocks and an item size."""
        del blocks, itemsize
        return 0

    def index_batch(self, batch: Batch) -> Batch:
        """Add documents and blocks to a batch on the CPU."""
        batch = super().index_batch(batch)
        learnt, documents = batch[SUPERVISION], batch[DOCUMENTS]
        shape = batch["input_ids"].shape
        seeds = batch.get(NOISE_SEEDS, (0,) * shape[0])
        anchors = draw_anchors(
            learnt.depths[1].output_indices, shape[1], self.config.num_anchors, seeds
        )
        unrolled = StepTargets.from_supervision(learnt, [anchors] * (len(learnt.depths) - 1))
        bounds = documents.cu_seqlens.long()
        first = bounds[torch.searchsorted(bounds, unrolled.anchors, right=True) - 1]
        end = unrolled.anchors + 1
        sight = {CONTEXT_STARTS: SortedIndices(first, first), CONTEXT_ENDS: SortedIndices(end, end)}
        counts = tuple(map(float, unrolled.step_sizes))
        return {**batch, STEP_TARGETS: unrolled, DIVISORS: counts, **sight}

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared batch; `scale` [D] is the weight of each slot."""
        with record_function("head"):
            outputs = self._compute_block_outputs(batch)
        with record_function("loss"):
            slots = self.build_student(outputs, batch, scale[batch[STEP_TARGETS].steps])
            weight = self.config.off_path_weight if self.training else 1.0
            beside = partial(self.compute_extra_loss, outputs, batch)
            return compute_block_loss(
                self.criterion, slots, batch, self._build_teacher(batch), weight, beside
            )

    @abstractmethod
    def build_student(self, outputs: Tensor, batch: Batch, scales: Tensor) -> Student:
        """Make students [M] of the learnt rows, from outputs [A, D, H] with scales [M]."""

    def compute_extra_loss(self, outputs: Tensor, batch: Batch, found: Tensor) -> Tensor | None:
        """Further loss [M] of the learnt rows, given their losses and measures [1 + L, M]."""
        del outputs, batch, found
        return None

    @staticmethod
    def select_supervised_rows(slots: Tensor, unrolled: StepTargets) -> Tensor:
        """Select the learnt rows [M, ...] of slots [A, D, ...]."""
        return (
            slots.transpose(0, 1)
            .flatten(0, 1)
            .index_select(0, unrolled.matched_rows.output_indices)
        )

    def _compute_block_outputs(self, batch: Batch) -> Tensor:
        """[A, D, H] outputs of the drawn blocks, of all sequences flattened."""
        head, ids = self.head, batch["input_ids"].flatten()
        positions = batch["position_ids"].flatten()
        features = head.collect_features(collect_states(batch)).flatten(0, 1)
        text, anchors = head.encode_context(features, positions), batch[STEP_TARGETS].anchors
        first, end = batch[CONTEXT_STARTS], batch[CONTEXT_ENDS]
        host, depth = (first.host, end.host), head.config.num_draft_tokens
        sight = head.make_block_range(first.device, end.device, depth, host)
        return head.draft(ids.roll(-1)[anchors], positions[anchors] + 1, text, sight)

    def _build_teacher(self, batch: Batch) -> Teacher:
        """The target's distributions after the answered places."""
        vocab, places = self.head.vocab, batch[SUPERVISION].token_indices
        temperature = self.distillation_temperature(self.config.teacher_temperature)
        if TEACHER_IDS in batch:
            names = (TEACHER_IDS, TEACHER_LOG_PROBS)
            ids, log_probs = (batch[name].flatten(0, 1)[places] for name in names)
            return TopKTeacher(vocab, ids, log_probs, temperature)
        states = batch[HIDDEN_STATES].flatten(0, 1)[places]
        return HiddenTeacher(self.target, vocab, states, temperature)


def draw_anchors(places: Tensor, num_tokens: int, most: int, seeds: tuple[int, ...]) -> Tensor:
    """Draw at most `most` places of each sequence by its seed; [A] int64 rising.

    Args:
        places: [n] int64 rising, over all sequences flattened.
        num_tokens: tokens per sequence.
        most: largest number of places per sequence.
        seeds: one seed per sequence.
    """
    found = []
    for number, seed in enumerate(seeds):
        mine = places[(places >= number * num_tokens) & (places < (number + 1) * num_tokens)]
        if len(mine) > most:
            generator = torch.Generator().manual_seed(seed)
            mine = mine[torch.randperm(len(mine), generator=generator)[:most].sort().values]
        found.append(mine)
    return torch.cat(found)
