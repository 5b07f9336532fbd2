"""Trains P-EAGLE heads: `accelerate launch train/peagle.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.eagle import PEagleRun
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, PEagleRun, "peagle", ("peagle",), check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conf.settings.eagle import PEagleConfig
from heads.eagle.peagle import KeysValues, PEagleHead, make_list_store
from heads.layers.branch_attention import build_causal_range
from train.batch.batch import (
    DOCUMENTS,
    NOISE_SEEDS,
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    StepTargets,
    Supervision,
    collect_states,
)
from train.block_objective import draw_anchors, draw_rows
from train.eagle import EagleObjective
from train.loop import command
from train.objective import DIVISORS, LaunchSpec, Objective, SavedRows

SEGMENTS = "segments"


@dataclass(frozen=True)
class MaskRows:
    """Mask-token rows that lie equally many steps after the text.

    Attributes:
        last_tokens: [N] int64 rising, last text token that each row sees, by index among all
            flattened tokens.
        parent_rows: [N] int64, for each row the number of the row of the step before that it
            follows; in the first step its own number.
    """

    last_tokens: Tensor
    parent_rows: Tensor


class PEagleObjective(EagleObjective):
    """Loss of one pass over a batch, with rows drawn after its tokens."""

    head: PEagleHead
    config: PEagleConfig

    def _prepare_saved_head(self) -> None:
        """Set up a saved head to draft as many tokens as the settings ask it to learn."""
        super()._prepare_saved_head()
        num_tokens = self.config.num_steps
        self.head.config = replace(self.head.config, num_draft_tokens=num_tokens)

    def _describe_head(self) -> str:
        config = self.head.config
        return (
            f"P-EAGLE, {config.llama.num_hidden_layers} layers over hidden states "
            f"{list(config.layers)}, {self.config.num_steps} draft tokens, mask token "
            f"{config.mask_token_id}"
        )

    def index_batch(self, batch: Batch) -> Batch:
        """Add documents, drawn anchors and their mask rows to a batch on the CPU."""
        batch = Objective.index_batch(self, batch)
        supervision, shape = batch[SUPERVISION], batch["input_ids"].shape
        seeds = batch.get(NOISE_SEEDS, (0,) * shape[0])
        step_anchors = draw_step_anchors(supervision, shape[1], self.config, seeds)
        segments = split_segments(step_anchors[1:], self.config.num_segments)
        step_targets = StepTargets.from_supervision(supervision, step_anchors)
        # All supervised rows, of any step.
        counts = (float(sum(step_targets.step_sizes)),) * self.config.num_steps
        return {**batch, STEP_TARGETS: step_targets, SEGMENTS: segments, DIVISORS: counts}

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows:
        """Count the rows that training holds; the layers keep one segment at a time."""
        settings, tokens = self.config, setting.tokens
        anchors = min(tokens, settings.num_anchors * setting.train.micro_batch_size)
        shares = [compute_kept_fraction(settings, step) for step in range(1, settings.num_steps)]
        masks = round(anchors * sum(shares))
        followed = sum(step * part for step, part in enumerate(shares)) * anchors
        layers, segments = self.head.config.llama.num_hidden_layers, settings.num_segments
        compared = tokens + masks
        kept = {
            "layer": layers * (tokens + masks / segments), "keys": layers * followed / segments,
            "features": tokens, "float32 features": tokens, "float32 state": 2 * compared,
        }  # fmt: skip
        return SavedRows(kept, compared, compared, 2 * compared, compared)

    def compute_outputs(self, batch: Batch) -> list[Tensor]:
        """Compute the outputs [N, H] of each step's rows, all sequences flattened."""
        head, ids, documents = self.head, batch["input_ids"].flatten(), batch[DOCUMENTS]
        features = self._add_noise(
            head.collect_features(collect_states(batch)).flatten(0, 1), batch
        )
        positions = batch["position_ids"].flatten()
        known: list[KeysValues] = []
        text_range = build_causal_range(documents, torch.arange(len(ids), device=ids.device))
        text = head.build_context_rows(head.fuse(features), ids.roll(-1), positions, text_range)
        (outputs,) = head.run_layers(text, [], make_list_store(known))

        def run_masks(groups: Sequence[MaskRows]) -> list[Tensor]:
            steps = enumerate((group.last_tokens for group in groups), 1)
            mask_positions = torch.cat([positions[tokens] + step for step, tokens in steps])
            ranges = [build_causal_range(documents, group.last_tokens) for group in groups]
            masks = head.build_mask_rows(
                mask_positions, ranges, [group.parent_rows for group in groups]
            )
            return head.run_layers(None, masks, make_list_store(known))

        segments = batch[SEGMENTS]
        if len(segments) == 1:
            outputs_by_segment = [run_masks(segments[0])]
        else:
            outputs_by_segment = [
                checkpoint(run_masks, each, use_reentrant=False) for each in segments
            ]
        steps = (filter(torch.is_tensor, parts) for parts in zip_longest(*outputs_by_segment))
        return [outputs[batch[STEP_TARGETS].anchors], *(torch.cat([*parts]) for parts in steps)]


def compute_kept_fraction(config: PEagleConfig, step: int) -> float:
    """Compute the fraction of the anchors that have a row `step` steps after the text."""
    return max(config.kept_share**step, config.least_share)


def draw_step_anchors(
    supervision: Supervision, num_tokens: int, config: PEagleConfig, seeds: tuple[int, ...]
) -> list[Tensor]:
    """Draw the anchors of each step, [N] int64 rising.

    An anchor of step d is also an anchor of all earlier steps. Each sequence keeps about the same
    fraction of its anchors from one step to the next (conditional-on-distribution sampling, COD).

    Args:
        supervision: supervised tokens of a batch.
        num_tokens: tokens per sequence.
        config: fractions to keep, and the number of anchors per sequence that draft more than one
            token.
        seeds: one seed per sequence.

    Source: arXiv 2602.01469; speculators `models/peagle/data.py`.
    """
    # One unsupervised row keeps every parameter in the graph.
    first = supervision.depths[1].output_indices
    anchors = [first if len(first) else torch.zeros(1, dtype=torch.int64)]
    drawn = draw_anchors(anchors[0], num_tokens, config.num_anchors, seeds)
    sequences = torch.arange(len(seeds) + 1) * num_tokens
    totals = torch.searchsorted(drawn, sequences).diff().tolist()
    for step in range(1, config.num_steps):
        rows = supervision.depths[step + 1].output_indices
        rows = rows[torch.isin(rows, drawn)]
        parts = rows.tensor_split(torch.searchsorted(rows, sequences[1:-1]))
        fraction = compute_kept_fraction(config, step)
        drawn = torch.cat(
            [
                draw_rows(part, int(max(0, total - step) * fraction), seed + step)
                for part, total, seed in zip(parts, totals, seeds, strict=True)
            ]
        )
        drawn = drawn if len(drawn) else anchors[-1][:1]
        anchors.append(drawn)
    return anchors


def split_segments(
    step_anchors: Sequence[Tensor], num_segments: int
) -> tuple[tuple[MaskRows, ...], ...]:
    """Split the mask rows after a text into segments, each with all rows of its anchors.

    Args:
        step_anchors: [N] int64 rising per step, each among those of the step before.
        num_segments: number of segments; empty segments are dropped.

    Returns:
        For each segment the rows of each step that has any.
    """
    if not step_anchors:
        return ((),)
    segments = []
    for part in step_anchors[0].tensor_split(min(num_segments, len(step_anchors[0]))):
        step_tokens = [each[(each >= part[0]) & (each <= part[-1])] for each in step_anchors]
        step_tokens = list(takewhile(len, step_tokens))
        pairs = zip([step_tokens[0], *step_tokens], step_tokens, strict=False)
        segments.append(tuple(MaskRows(new, torch.searchsorted(old, new)) for old, new in pairs))
    return tuple(segments)


main = command.TrainingCommand(PEagleHead, PEagleObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
