"""Decoding with block drafters: chains, and trees of the slots' candidates.

Hidden states of committed tokens become keys and values at once, and nothing else is stored: each
step computes the rows of a block anew.

Letters: B texts, D slots, H hidden, W draft vocabulary, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, CommittedTokens, Draft, Roots
from heads.decoding.head_drafter import (
    ChainDrafter,
    DynamicTreeDrafter,
    ExpandedTree,
    Frontier,
    HeadCache,
    HeadDrafter,
    expand_tree,
)
from heads.decoding.tree import DraftShape


class _BlockDrafter(HeadDrafter):
    """Keeps keys and values of the committed texts in each of a head's layers."""

    row_attributes = ("cache",)

    def __init__(self, head: Any, shape: DraftShape, *how: Any) -> None:
        super().__init__(head, shape, *how)
        self.cache = HeadCache(len(head.layers))

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

    def _compute_slots(self, roots: Roots) -> tuple[Tensor, Tensor, Tensor]:
        """Run the head after the last known tokens.

        Returns:
            The last known tokens [B], then outputs [B, D, H] and logits [B, D, W] of the slots.
        """
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
        return roots.tokens, outputs, self.head.compute_logits(outputs)

    def _pad_beyond_window(self, tokens: Tensor, slot: int) -> Tensor:
        """Replace tokens [B, n] that a slot drafts beyond the head's window by PAD."""
        place = self.cache.prepared_slots.committed + self.head.config.first_row + slot
        return tokens.masked_fill(place >= self.head.max_positions, PAD)


class BlockChain(ChainDrafter, _BlockDrafter):
    """Drafts a block as a chain."""

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of `depth` tokens."""
        previous_ids, outputs, base = self._compute_slots(roots)
        draws = self.make_sampler()
        tokens: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(self.shape.depth):
            logits, state = self.head.compute_slot_logits(
                base[:, slot], outputs[:, slot], previous_ids, state
            )
            previous_ids = draws.choose_token(logits)
            tokens.append(self._pad_beyond_window(previous_ids.unsqueeze(1), slot))
        return draws.make_draft(self.tree, torch.cat(tokens, 1))


class BlockTree(DynamicTreeDrafter, _BlockDrafter):
    """Drafts the likeliest paths through the slots, best first, in one pass of the head."""

    has_nested_trees = False
    """Rows see later rows, so a shorter block drafts other tokens."""

    def expand_trees(self, roots: Roots) -> ExpandedTree:
        """Expand trees through the slots' candidates. See `DynamicTreeDrafter`."""
        root_ids, outputs, base = self._compute_slots(roots)
        first, state = self.head.compute_slot_logits(base[:, 0], outputs[:, 0], root_ids, None)

        def compute_next_logits(frontier: Frontier) -> Tensor:
            nonlocal state
            number = len(frontier.tokens) // len(roots)
            slot_logits, slot_outputs = (
                each[:, frontier.depth].repeat_interleave(number, 0) for each in (base, outputs)
            )
            previous_state = None if state is None else state[frontier.rows]
            logits, state = self.head.compute_slot_logits(
                slot_logits, slot_outputs, frontier.tokens, previous_state
            )
            return logits

        return expand_tree(
            self.shape, self.head.vocab, first, compute_next_logits, self._pad_beyond_window
        )


def _view_buffer(buffer: Tensor | None, width: int) -> Tensor:
    """View the first S slots of a buffer [B, K, ., d] as [B, S, K, d]."""
    assert buffer is not None
    return buffer.narrow(2, 0, width).transpose(1, 2)
