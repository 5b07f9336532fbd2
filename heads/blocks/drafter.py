"""Decoding with block drafters: chains, and trees of the slots' candidates.

Hidden states of committed tokens become keys and values at once, and nothing else is stored: each
step computes the rows of a block anew.

Letters: B texts, D slots, H hidden, W draft vocabulary, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heads.decoding.drafting import CommittedTokens, Roots
from heads.decoding.head_drafter import FeatureDrafter, Frontier


class BlockDrafter(FeatureDrafter):
    """Drafts a block as a chain, or the likeliest paths through its slots, in one pass."""

    has_nested_trees = False
    """Rows see later rows, so a shorter block drafts other tokens."""

    def observe(self, seen: CommittedTokens) -> None:
        """Encode the hidden states of committed tokens, and store their keys and values."""
        features = self.head.collect_features(seen.output)
        num_texts, length, _ = features.shape
        slots = self.cache.prepare_slots(num_texts, features.device, seen.cache.slots)
        places, width = slots.compute_pending_slots(length, length), slots.count_used_slots(length)
        positions = places.flatten().clamp_max(self.head.max_positions - 1)
        context = self.head.encode_context(features.flatten(0, 1), positions)
        for buffer, both in zip(self.cache.buffers, context, strict=True):
            keys, values = (each[0].unflatten(0, (num_texts, length)) for each in both)
            new = keys.transpose(1, 2), values.transpose(1, 2)
            buffer.write(*new, places, width, seen.cache.num_needed_slots)
        slots.advance(seen.counts, seen.token_ids)

    def _compute_slots(self, roots: Roots) -> tuple[Tensor, Tensor]:
        """Run the head; return logits [B, D, W] and outputs [B, D, H] of the slots."""
        ends = self.cache.prepared_slots.committed[:, 0]
        width = self.cache.prepared_slots.count_used_slots(0)
        host = torch.tensor([0]), torch.tensor([width])
        block_range = self.head.make_block_range(
            torch.zeros_like(ends), ends, self.shape.depth, host
        )
        context = [
            (_view_buffer(buffer.keys, width), _view_buffer(buffer.values, width))
            for buffer in self.cache.buffers
        ]
        outputs = self.head.draft(roots.tokens, ends, context, block_range)
        return self.head.compute_logits(outputs), outputs

    def start_draft(self, roots: Roots) -> tuple[Tensor, Callable[[Frontier], Tensor]]:
        """Run the head after the last known tokens. See `FeatureDrafter.start_draft`."""
        slots = self._compute_slots(roots)
        state: Tensor | None = None

        def compute_next_logits(frontier: Frontier) -> Tensor:
            nonlocal state
            base, slot_outputs = (each[:, frontier.depth] for each in slots)
            if frontier.rows is not None:
                number = len(frontier.tokens) // len(roots)
                base, slot_outputs = (
                    each.repeat_interleave(number, 0) for each in (base, slot_outputs)
                )
                state = None if state is None else state[frontier.rows]
            logits, state = self.head.compute_slot_logits(
                base, slot_outputs, frontier.tokens, state
            )
            return logits

        return compute_next_logits(Frontier(0, None, roots.tokens)), compute_next_logits


def _view_buffer(buffer: Tensor | None, width: int) -> Tensor:
    """View the first S slots of a buffer [B, K, ., d] as [B, S, K, d]."""
    assert buffer is not None
    return buffer.narrow(2, 0, width).transpose(1, 2)
