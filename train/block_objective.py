"""The objective and the loss of every block drafter.

Blocks draft after anchors. Anchors are drawn per sequence and step on the CPU, so any number of
processes and any restart draws the same.

Letters: A blocks (anchors), D draft tokens of a block, M supervised rows of all slots, H hidden.
"""

import torch
from torch import Tensor

from conf.settings.blocks import BlockConfig
from heads.blocks.block_head import BlockHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from train.batch.batch import (
    DOCUMENTS,
    NOISE_SEEDS,
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    SortedIndices,
    StepTargets,
    collect_states,
)
from train.objective import DIVISORS, PIECES_OF_TEACHER, LaunchSpec, SavedRows
from train.step_objective import StepObjective

CONTEXT_STARTS, CONTEXT_ENDS = "first_tokens", "block_places"
"""Keys of a batch: first token that each block sees, and the token after the last one."""


class BlockObjective(StepObjective):
    """Loss of the drawn blocks; slots draft independently unless a subclass says otherwise."""

    def __init__(
        self, head: BlockHead, target: EmbeddingsAndOutputHead, config: BlockConfig
    ) -> None:
        weights = compute_slot_weights(config, head.config.num_draft_tokens)
        super().__init__(head, target, config, weights)
        shape = head.config
        self.description = (
            f"{head.method}, {shape.llama.num_hidden_layers} layers over hidden states "
            f"{list(shape.layers)}, blocks of {shape.block_size} rows ({shape.num_draft_tokens} "
            f"draft tokens), mask token {shape.mask_token_id}"
        )

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows:
        """Count the rows that training holds, with the mask of block rows by tokens."""
        head, tokens, micro = self.head, setting.tokens, setting.train.micro_batch_size
        blocks = min(tokens, self.config.num_anchors * micro)
        rows, drafts = (blocks * n for n in (head.config.block_size, head.config.num_draft_tokens))
        kept: dict[str, float] = {
            "normed layer": len(head.layers) * rows, "normed keys": len(head.layers) * tokens,
            "features": tokens, "state": tokens + 3 * drafts, "float32 state": 2 * tokens + drafts,
            "number": rows * tokens // micro,
        }  # fmt: skip
        # The gradient of a text loss overwrites q.
        pieces = PIECES_OF_TEACHER - (self.config.text_weight > 0)
        return SavedRows(kept, drafts, 0, 2 * rows, rows, pieces, is_teacher_widest=True)

    def index_batch(self, batch: Batch) -> Batch:
        """Add documents, anchors and the supervision of their blocks to a batch on the CPU."""
        batch = super().index_batch(batch)
        depths, shape = batch[SUPERVISION].depths[1:], batch["input_ids"].shape
        seeds = batch.get(NOISE_SEEDS, (0,) * shape[0])
        candidates = depths[0].output_indices
        anchors = draw_anchors(candidates, shape[1], self.config.num_anchors, seeds)
        step_targets = StepTargets.from_supervision(batch[SUPERVISION], [anchors] * len(depths))
        bounds = batch[DOCUMENTS].cu_seqlens.long()
        first = bounds[torch.searchsorted(bounds, step_targets.anchors, right=True) - 1]
        end = step_targets.anchors + 1
        counts = tuple(map(float, step_targets.step_sizes))
        return {
            **batch, STEP_TARGETS: step_targets, DIVISORS: counts,
            CONTEXT_STARTS: SortedIndices(first, first), CONTEXT_ENDS: SortedIndices(end, end),
        }  # fmt: skip

    @staticmethod
    def select_supervised_rows(outputs: Tensor, step_targets: StepTargets) -> Tensor:
        """Select the supervised rows [M, ...] of slots [A, D, ...]."""
        indices = step_targets.matched_rows.output_indices
        return outputs.transpose(0, 1).flatten(0, 1).index_select(0, indices)

    def compute_outputs(self, batch: Batch) -> Tensor:
        """Compute the outputs [A, D, H] of the drawn blocks, of all sequences flattened."""
        head, ids = self.head, batch["input_ids"].flatten()
        positions = batch["position_ids"].flatten()
        features = head.collect_features(collect_states(batch)).flatten(0, 1)
        text, anchors = head.encode_context(features, positions), batch[STEP_TARGETS].anchors
        first, end = batch[CONTEXT_STARTS], batch[CONTEXT_ENDS]
        host, depth = (first.host, end.host), head.config.num_draft_tokens
        block_range = head.make_block_range(first.device, end.device, depth, host)
        return head.draft(ids.roll(-1)[anchors], positions[anchors] + 1, text, block_range)


def draw_anchors(
    candidates: Tensor, num_tokens: int, max_anchors: int, seeds: tuple[int, ...]
) -> Tensor:
    """Draw at most `max_anchors` tokens of each sequence by its seed; [A] int64 rising.

    Args:
        candidates: [n] int64 rising, tokens to draw from, over all sequences flattened.
        num_tokens: tokens per sequence.
        max_anchors: largest number of anchors per sequence.
        seeds: one seed per sequence.
    """
    ends = torch.arange(1, len(seeds)) * num_tokens
    parts = candidates.tensor_split(torch.searchsorted(candidates, ends))
    drafts = zip(parts, seeds, strict=True)
    return torch.cat([draw_rows(part, max_anchors, seed) for part, seed in drafts])


def draw_rows(rows: Tensor, max_rows: int, seed: int) -> Tensor:
    """Draw at most `max_rows` of rising rows [n] int64, in their order."""
    if len(rows) <= max_rows:
        return rows
    generator = torch.Generator().manual_seed(seed)
    return rows[torch.randperm(len(rows), generator=generator)[:max_rows].sort().values]


def compute_slot_weights(config: BlockConfig, num_draft_tokens: int) -> Tensor:
    """Compute the [D] float32 weights exp(-(d - 1) / gamma) for d = 1..D.

    Source: DFlash, arXiv 2602.06036, eq. 4.
    """
    return torch.exp(-torch.arange(num_draft_tokens) / config.slot_gamma)
