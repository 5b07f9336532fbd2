"""Drafting with EAGLE heads: chains, and EAGLE-2's dynamic trees.

Both encode committed tokens with the target's true hidden states, store only their keys and values,
and draft on with the head's own outputs.

Letters: B texts, H hidden, W draft vocabulary, V vocabulary.
"""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from heads.decoding.cache import round_up_slots
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
from heads.devices import to_device
from heads.eagle.network import AutoregressiveHead
from heads.layers.branch_attention import BranchCache, CausalRange


class EagleDrafter(HeadDrafter):
    """Keeps keys and values of the committed texts in each of a head's layers."""

    head: AutoregressiveHead
    row_attributes = ("pending", "cache")

    def __init__(self, head: AutoregressiveHead, *how: Any) -> None:
        super().__init__(head, *how)
        self.cache = HeadCache(head.num_layers)
        self.pending: CommittedTokens | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Store committed tokens without encoding them.

        The head reads each token's hidden state beside the next token, and the token after the last
        one is known only when `propose` gets the roots.
        """
        if self.pending is None:
            self.pending = seen
        elif seen.logits is None:
            # Parts of a prompt are read as they arrive, which bounds the memory.
            before, self.pending = self.pending.carry_last_tokens(seen)
            first = [tokens[0] if tokens else 0 for tokens in self.pending.token_ids]
            self._encode_tokens(before, to_device(first, seen.output.hidden_states.device))
        else:
            self.pending = self.pending.concat(seen)

    def _prepare_insert(self, other: Self) -> None:
        """Prepare `insert_row`.

        The other drafter encodes its prompt except the last token, whose next token is not known
        yet. This drafter opens slots for all of its texts.
        """
        assert self.pending is not None
        other._encode_prompt()
        states = self.pending.output.hidden_states
        self.cache.prepare_slots(len(states), states.device, self.pending.cache.slots)

    def _encode_prompt(self) -> None:
        """Encode a prompt except its last token, whose next token is not known yet."""
        assert self.pending is not None
        (tokens,) = self.pending.token_ids
        if len(tokens) > 1:
            device = self.pending.output.hidden_states.device
            output = self.pending.output.select_tokens(
                torch.arange(len(tokens) - 1, device=device).unsqueeze(0)
            )
            before = CommittedTokens([tokens[:-1]], output, self.pending.cache)
            self._encode_tokens(before, to_device(tokens[-1:], device))

    @abstractmethod
    def _encode_tokens(self, seen: CommittedTokens, following: Tensor) -> Any:
        """Encode tokens, each with the next one, and store their keys and values.

        Args:
            seen: committed tokens of B texts.
            following: [B] int64 token after the last one of each text.
        """

    def _build_inputs(
        self, seen: CommittedTokens, following: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build the inputs of n new tokens per text.

        Returns:
            Fused states [B * n, H], the tokens after them [B * n], and their slots [B, n].
        """
        features = self.head.collect_features(seen.output)
        num_texts, length, _ = features.shape
        slots = self.cache.prepare_slots(num_texts, features.device, seen.cache.slots)
        last = seen.counts.unsqueeze(1) - 1
        if not all(seen.token_ids):
            # For texts without tokens in this part, whose result is dropped.
            last = last.clamp_min(0)
        ids = seen.tokens.roll(-1, dims=1).scatter(1, last, following.unsqueeze(1))
        fused = self.head.fuse(features).flatten(0, 1)
        return fused, ids.flatten(), slots.compute_pending_slots(length, length)

    def _store_keys_values(
        self, layer: int, keys: Tensor, values: Tensor, places: Tensor, seen: CommittedTokens
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B * n, K, d] of a layer; return all, [B, S, K, d] each."""
        new_keys, new_values = (
            each.unflatten(0, places.shape).transpose(1, 2) for each in (keys, values)
        )
        width = round_up_slots(self.cache.prepared_slots.count_used_slots(places.shape[1]))
        needed = seen.cache.num_needed_slots
        stored = self.cache.buffers[layer].write(new_keys, new_values, places, width, needed)
        return stored[0].transpose(1, 2), stored[1].transpose(1, 2)

    def _clamp_positions(self, positions: Tensor) -> Tensor:
        """Clamp positions to the head's window, beyond which no token is drafted."""
        return positions.clamp_max(self.head.max_positions - 1)

    def _pad_beyond_window(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Replace tokens [B, n] at positions [B, n or 1] beyond the window by PAD."""
        return tokens.masked_fill(positions >= self.head.max_positions, PAD)


class _AutoregressiveDrafter(EagleDrafter):
    """Drafts token by token from the head's own outputs."""

    def _start_draft(self, roots: Roots) -> tuple[Tensor, Tensor, BranchCache]:
        """Encode all pending tokens; `roots` come after the last one of each text.

        Returns:
            The head's outputs [B, H] at the last tokens, their positions [B], and the branches that
            start after them.
        """
        assert self.pending is not None
        seen, self.pending = self.pending, None
        context, branches = self._encode_tokens(seen, roots.tokens)
        outputs = self.head.draft(context, find_last_rows(seen), branches)
        return outputs, self.cache.prepared_slots.committed[:, 0] - 1, branches

    def _encode_tokens(self, seen: CommittedTokens, following: Tensor) -> tuple[Any, BranchCache]:
        """Encode committed tokens, each with its next token, and store their keys and values.

        Returns:
            The context states, and the branches that start after them.
        """
        fused, ids, places = self._build_inputs(seen, following)
        context = self.head.encode_context(fused, ids, self._clamp_positions(places.flatten()))
        keys, values = self._store_keys_values(0, context.keys, context.values, places, seen)
        self.cache.prepared_slots.advance(seen.counts, seen.token_ids)
        return context, BranchCache(
            keys, values, CausalRange.from_ends(self.cache.prepared_slots.committed[:, 0])
        )


class EagleChain(ChainDrafter, _AutoregressiveDrafter):
    """Drafts chains, each token from the head's output for the token before."""

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of `depth` tokens."""
        outputs, positions, branches = self._start_draft(roots)
        draws = self.make_sampler()
        tokens: list[Tensor] = []
        for step in range(self.tree.depth):
            if step:
                place = self._clamp_positions(positions + step)
                outputs = self.head.advance(outputs, tokens[-1], place, branches)
            tokens.append(draws.choose_token(self.head.compute_logits(outputs)))
        places = positions.unsqueeze(1) + torch.arange(len(tokens), device=positions.device)
        return draws.make_draft(self.tree, self._pad_beyond_window(torch.stack(tokens, 1), places))


class EagleTree(DynamicTreeDrafter, _AutoregressiveDrafter):
    """Drafts EAGLE-2's dynamic trees."""

    def expand_trees(self, roots: Roots) -> ExpandedTree:
        """Expand trees level by level from the head's own outputs. See `DynamicTreeDrafter`."""
        outputs, first, branches = self._start_draft(roots)

        def compute_next_logits(frontier: Frontier) -> Tensor:
            nonlocal outputs, branches
            branches = branches.select_rows(frontier.rows)
            number = len(frontier.rows) // len(roots)
            positions = self._clamp_positions((first + frontier.depth).repeat_interleave(number))
            fed = outputs[frontier.rows]
            outputs = self.head.advance(fed, frontier.tokens, positions, branches)
            return self.head.compute_logits(outputs)

        def pad_tokens(tokens: Tensor, level: int) -> Tensor:
            return self._pad_beyond_window(tokens, first.unsqueeze(1) + level)

        return expand_tree(
            self.shape,
            self.head.vocab,
            self.head.compute_logits(outputs),
            compute_next_logits,
            pad_tokens,
        )


def find_last_rows(seen: CommittedTokens) -> Tensor:
    """Find the rows [B] of the last token of each text among all B * n rows."""
    places, length = seen.counts - 1, seen.output.hidden_states.shape[1]
    return places + torch.arange(len(places), device=places.device) * length
