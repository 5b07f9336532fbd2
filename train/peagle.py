"""Trains P-EAGLE heads: `accelerate launch train/peagle.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.eagle import PEagleRun
from train.loop.refusals import check_training

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
from heads.eagle.branches import build_causal_range
from heads.peagle.head import PEagleHead
from heads.peagle.network import KeysValues, make_list_store
from train.batch.states import states_of
from train.batch.supervision import (
    DOCUMENTS,
    NOISE_SEEDS,
    SUPERVISION,
    UNROLLED,
    Batch,
    Supervision,
    Unrolled,
)
from train.blocks.objective import drawn
from train.eagle import EagleObjective
from train.loop import command
from train.loss import sizes
from train.loss.fused import Student, Teacher
from train.loss.sums import on_path
from train.objective import COUNTS, Objective

SEGMENTS = "segments"


@dataclass(frozen=True)
class Behind:
    """Rows equally far from the text.

    Attributes:
        tokens: [N] int64 rising among all flattened tokens, the last text token that each row sees.
        kept: [N] int64, the row one step nearer to the text that each row follows.
    """

    tokens: Tensor
    kept: Tensor


class PEagleObjective(EagleObjective):
    """Loss of one pass over a batch, with rows drawn after its tokens."""

    head: PEagleHead
    config: PEagleConfig

    def _go_on(self) -> None:
        """Set up a saved head to draft as many tokens as it now learns."""
        super()._go_on()
        num_tokens = self.config.num_steps
        self.head.config = replace(self.head.config, num_draft_tokens=num_tokens)

    def _about(self) -> str:
        config = self.head.config
        return (
            f"P-EAGLE, {config.llama.num_hidden_layers} layers over hidden states "
            f"{list(config.layers)}, {self.config.num_steps} draft tokens, mask token "
            f"{config.mask_token_id}"
        )

    def indexed(self, batch: Batch) -> Batch:
        """Add documents and drawn rows to a batch on the CPU."""
        batch = Objective.indexed(self, batch)
        learnt, shape = batch[SUPERVISION], batch["input_ids"].shape
        seeds = batch.get(NOISE_SEEDS, (0,) * shape[0])
        drafts = lineages(learnt, shape[1], self.config, seeds)
        segments = segmented(drafts[1:], self.config.num_segments)
        unrolled = Unrolled.of(learnt, drafts)
        # All learnt rows, of any step.
        counts = (float(sum(unrolled.sizes)),) * self.config.num_steps
        return {**batch, UNROLLED: unrolled, SEGMENTS: segments, COUNTS: counts}

    def memory(self, setting: sizes.LaunchSizes) -> sizes.Counted:
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
        shares = [share(settings, step) for step in range(1, settings.num_steps)]
        masks = round(anchors * sum(shares))
        followed = sum(step * part for step, part in enumerate(shares)) * anchors
        a_row = e * (4 * inner + 2 * query + 6 * keys) + 33 * hidden
        layers = llama.num_hidden_layers
        rows = tokens + masks / settings.num_segments
        kept = layers * (rows * a_row + followed / settings.num_segments * 2 * e * keys)
        kept += tokens * (sizes.FLOAT32 + e) * head.fc.in_features
        kept += (tokens + masks) * sizes.FLOAT32 * 2 * hidden
        students = tokens + masks
        grads = sizes.FLOAT32 * students * hidden
        one = head.make_projection().weight.shape[0], hidden
        loss = grads + sizes.loss_bytes(setting, students, one, sizes.PIECES_OF_TEACHER)
        loss += sizes.teacher_bytes(setting, tokens, self.target, one[0])
        backward = 2 * grads + 3 * students * inner * e
        return sizes.Counted(sizes.copied_bytes(head, setting), int(kept), loss, backward)

    def _compared(self, learnt: Tensor, batch: Batch, scale: Tensor) -> tuple[Student, Teacher]:
        """Pair the learnt rows [M, H], which see no token between, with the target."""
        weight = self.config.off_path_weight if self.training else 1.0
        return on_path(*super()._compared(learnt, batch, scale), batch, weight)

    def _unrolled(self, batch: Batch) -> Iterator[Tensor]:
        """[N, H] outputs of each step's rows, all sequences flattened."""
        head, ids, documents = self.head, batch["input_ids"].flatten(), batch[DOCUMENTS]
        features = self._noisy(head.collect_features(states_of(batch)).flatten(0, 1), batch)
        positions = batch["position_ids"].flatten()
        known: list[KeysValues] = []
        every = build_causal_range(documents, torch.arange(len(ids), device=ids.device))
        text = head.build_context_rows(head.fuse(features), ids.roll(-1), positions, every)
        (outputs,) = head.run_layers(text, [], make_list_store(known))
        yield outputs[batch[UNROLLED].drafts]

        def drafted(groups: Sequence[Behind]) -> list[Tensor]:
            steps = enumerate((group.tokens for group in groups), 1)
            places = torch.cat([positions[tokens] + step for step, tokens in steps])
            seen = [build_causal_range(documents, group.tokens) for group in groups]
            masks = head.build_mask_rows(places, seen, [group.kept for group in groups])
            return head.run_layers(None, masks, make_list_store(known))

        segments = batch[SEGMENTS]
        if len(segments) == 1:
            found = [drafted(segments[0])]
        else:
            found = [checkpoint(drafted, each, use_reentrant=False) for each in segments]
        for parts in zip_longest(*found):
            yield torch.cat([each for each in parts if each is not None])


def share(config: PEagleConfig, step: int) -> float:
    """Share of the drafting tokens that have a row `step` steps after the text."""
    return max(config.kept_share**step, config.least_share)


def lineages(
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
    first = learnt.depths[1].places
    found = [first if len(first) else torch.zeros(1, dtype=torch.int64)]
    some = drawn(found[0], num_tokens, config.num_anchors, seeds)
    sequences = torch.arange(len(seeds) + 1) * num_tokens
    totals = torch.searchsorted(some, sequences).diff().tolist()
    for step in range(1, config.num_steps):
        rows = learnt.depths[step + 1].places
        rows = rows[torch.isin(rows, some)]
        parts = rows.tensor_split(torch.searchsorted(rows, sequences[1:-1]))
        drafts = zip(parts, totals, seeds, strict=True)
        some = torch.cat([_drawn(*each, step, share(config, step)) for each in drafts])
        some = some if len(some) else found[-1][:1]
        found.append(some)
    return found


def _drawn(rows: Tensor, total: int, seed: int, step: int, part: float) -> Tensor:
    most = int(max(0, total - step) * part)
    if len(rows) <= most:
        return rows
    generator = torch.Generator().manual_seed(seed + step)
    return rows[torch.randperm(len(rows), generator=generator)[:most].sort().values]


def segmented(drafts: Sequence[Tensor], number: int) -> tuple[tuple[Behind, ...], ...]:
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
        found.append(tuple(Behind(*each) for each in zip(mine, kept, strict=True)))
    return tuple(found)


main = command.Training(PEagleHead, PEagleObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
