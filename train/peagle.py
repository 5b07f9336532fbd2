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

from collections.abc import Iterator, Sequence
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
from train.block_objective import draw_anchors
from train.eagle import EagleObjective
from train.loop import command
from train.loop import memory as sizes
from train.loss.fused_linear import Student, Teacher, scale_off_path_rows
from train.objective import DIVISORS, LaunchSpec, MemoryEstimate, Objective

SEGMENTS = "segments"


@dataclass(frozen=True)
class MaskRows:
    """Rows equally far from the text.

    Attributes:
        tokens: [N] int64 rising among all flattened tokens, the last text token that each row sees.
        parent_rows: [N] int64, the row one step nearer to the text that each row follows.
    """

    tokens: Tensor
    parent_rows: Tensor


class PEagleObjective(EagleObjective):
    """Loss of one pass over a batch, with rows drawn after its tokens."""

    head: PEagleHead
    config: PEagleConfig

    def _prepare_saved_head(self) -> None:
        """Set up a saved head to draft as many tokens as it now learns."""
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
        """Add documents and drawn rows to a batch on the CPU."""
        batch = Objective.index_batch(self, batch)
        learnt, shape = batch[SUPERVISION], batch["input_ids"].shape
        seeds = batch.get(NOISE_SEEDS, (0,) * shape[0])
        drafts = draw_step_anchors(learnt, shape[1], self.config, seeds)
        segments = split_segments(drafts[1:], self.config.num_segments)
        unrolled = StepTargets.from_supervision(learnt, drafts)
        # All learnt rows, of any step.
        counts = (float(sum(unrolled.step_sizes)),) * self.config.num_steps
        return {**batch, STEP_TARGETS: unrolled, SEGMENTS: segments, DIVISORS: counts}

    def estimate_memory(self, setting: LaunchSpec) -> MemoryEstimate:
        """Bytes that autograd keeps, as counted with `torch.autograd.graph.saved_tensors_hooks`.

        Per row and layer as for EAGLE, plus the keys and values of the text and of the rows before
        it. The rows of one segment are kept at a time.
        """
        settings, head = self.config, self.head
        llama, tokens, e = head.config.llama, setting.tokens, setting.dtype.itemsize
        hidden, inner = llama.hidden_size, llama.intermediate_size
        attention = head.layer.self_attn
        query, keys = attention.q_proj.out_features, attention.k_proj.out_features
        anchors = min(tokens, settings.num_anchors * setting.train.micro_batch_size)
        shares = [compute_kept_fraction(settings, step) for step in range(1, settings.num_steps)]
        masks = round(anchors * sum(shares))
        followed = sum(step * part for step, part in enumerate(shares)) * anchors
        a_row = e * (4 * inner + 2 * query + 6 * keys) + 33 * hidden
        layers = llama.num_hidden_layers
        rows = tokens + masks / settings.num_segments
        kept = layers * (rows * a_row + followed / settings.num_segments * 2 * e * keys)
        kept += tokens * (sizes.FLOAT32_BYTES + e) * head.fc.in_features
        kept += (tokens + masks) * sizes.FLOAT32_BYTES * 2 * hidden
        students = tokens + masks
        grads = sizes.FLOAT32_BYTES * students * hidden
        one = head.make_projection().weight.shape[0], hidden
        loss = grads + sizes.estimate_loss_bytes(setting, students, one, sizes.PIECES_OF_TEACHER)
        loss += sizes.teacher_bytes(setting, tokens, self.target, one[0])
        backward = 2 * grads + 3 * students * inner * e
        return MemoryEstimate(sizes.copied_bytes(head, setting), int(kept), loss, backward)

    def _pair_with_teacher(
        self, learnt: Tensor, batch: Batch, scale: Tensor
    ) -> tuple[Student, Teacher]:
        """Pair the learnt rows [M, H], which see no token between, with the target."""
        weight = self.config.off_path_weight if self.training else 1.0
        return scale_off_path_rows(*super()._pair_with_teacher(learnt, batch, scale), batch, weight)

    def _iter_step_outputs(self, batch: Batch) -> Iterator[Tensor]:
        """[N, H] outputs of each step's rows, all sequences flattened."""
        head, ids, documents = self.head, batch["input_ids"].flatten(), batch[DOCUMENTS]
        features = self._add_noise(
            head.collect_features(collect_states(batch)).flatten(0, 1), batch
        )
        positions = batch["position_ids"].flatten()
        known: list[KeysValues] = []
        every = build_causal_range(documents, torch.arange(len(ids), device=ids.device))
        text = head.build_context_rows(head.fuse(features), ids.roll(-1), positions, every)
        (outputs,) = head.run_layers(text, [], make_list_store(known))
        yield outputs[batch[STEP_TARGETS].anchors]

        def drafted(groups: Sequence[MaskRows]) -> list[Tensor]:
            steps = enumerate((group.tokens for group in groups), 1)
            places = torch.cat([positions[tokens] + step for step, tokens in steps])
            seen = [build_causal_range(documents, group.tokens) for group in groups]
            masks = head.build_mask_rows(places, seen, [group.parent_rows for group in groups])
            return head.run_layers(None, masks, make_list_store(known))

        segments = batch[SEGMENTS]
        if len(segments) == 1:
            found = [drafted(segments[0])]
        else:
            found = [checkpoint(drafted, each, use_reentrant=False) for each in segments]
        for parts in zip_longest(*found):
            yield torch.cat([each for each in parts if each is not None])


def compute_kept_fraction(config: PEagleConfig, step: int) -> float:
    """Share of the drafting tokens that have a row `step` steps after the text."""
    return max(config.kept_share**step, config.least_share)


def draw_step_anchors(
    learnt: Supervision, num_tokens: int, config: PEagleConfig, seeds: tuple[int, ...]
) -> list[Tensor]:
    """Draw the tokens that draft at each step; [N] int64 rising, fewer at each step.

    Conditional-on-distribution sampling: a token drafts d + 1 tokens only if it drafts d, and the
    share that does so is about the same everywhere.

    Args:
        learnt: supervision of a batch.
        num_tokens: tokens per sequence.
        config: shares, and the number of tokens per sequence that draft more than one.
        seeds: one seed per sequence.

    Source: arXiv 2602.01469; speculators `models/peagle/data.py`.
    """
    # One unsupervised row keeps every parameter in the graph.
    first = learnt.depths[1].output_indices
    found = [first if len(first) else torch.zeros(1, dtype=torch.int64)]
    some = draw_anchors(found[0], num_tokens, config.num_anchors, seeds)
    sequences = torch.arange(len(seeds) + 1) * num_tokens
    totals = torch.searchsorted(some, sequences).diff().tolist()
    for step in range(1, config.num_steps):
        rows = learnt.depths[step + 1].output_indices
        rows = rows[torch.isin(rows, some)]
        parts = rows.tensor_split(torch.searchsorted(rows, sequences[1:-1]))
        drafts = zip(parts, totals, seeds, strict=True)
        some = torch.cat(
            [_draw_rows(*each, step, compute_kept_fraction(config, step)) for each in drafts]
        )
        some = some if len(some) else found[-1][:1]
        found.append(some)
    return found


def _draw_rows(rows: Tensor, total: int, seed: int, step: int, part: float) -> Tensor:
    most = int(max(0, total - step) * part)
    if len(rows) <= most:
        return rows
    generator = torch.Generator().manual_seed(seed + step)
    return rows[torch.randperm(len(rows), generator=generator)[:most].sort().values]


def split_segments(drafts: Sequence[Tensor], number: int) -> tuple[tuple[MaskRows, ...], ...]:
    """Divide the rows after a text into parts, each with all rows of its tokens.

    Args:
        drafts: [N] int64 rising per step, each among those of the step before.
        number: number of parts; empty parts are dropped.
    """
    if not drafts:
        return ((),)
    found = []
    for part in drafts[0].tensor_split(min(number, len(drafts[0]))):
        mine = [each[(each >= part[0]) & (each <= part[-1])] for each in drafts]
        mine = list(takewhile(len, mine))
        before = [mine[0], *mine[:-1]]
        kept = [torch.searchsorted(old, new) for old, new in zip(before, mine, strict=True)]
        found.append(tuple(MaskRows(*each) for each in zip(mine, kept, strict=True)))
    return tuple(found)


main = command.TrainingCommand(PEagleHead, PEagleObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
