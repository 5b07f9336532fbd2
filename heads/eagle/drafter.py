"""Drafting with EAGLE heads: chains, and EAGLE-2's dynamic trees.

Both encode committed tokens with the target's true hidden states, store only their keys and values,
and draft on with the head's own outputs.

Letters: B texts, H hidden, W draft vocabulary, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from heads.decoding.cache import round_up_slots
from heads.decoding.drafting import CommittedTokens, Roots
from heads.decoding.head_drafter import FeatureDrafter, Frontier
from heads.devices import to_device
from heads.eagle.network import AutoregressiveHead
from heads.layers.branch_attention import BranchCache, CausalRange


class EagleDrafter(FeatureDrafter):
    """Drafts token by token, or level by level, from the head's own outputs."""

    head: AutoregressiveHead
    row_attributes = ("pending", *FeatureDrafter.row_attributes)
    pending: CommittedTokens | None = None

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
        assert other.pending is not None
        (tokens,), states = other.pending.token_ids, other.pending.output.hidden_states
        if len(tokens) > 1:
            places = torch.arange(len(tokens) - 1, device=states.device).unsqueeze(0)
            output = other.pending.output.select_tokens(places)
            before = CommittedTokens([tokens[:-1]], output, other.pending.cache)
            other._encode_tokens(before, to_device(tokens[-1:], states.device))
        states = self.pending.output.hidden_states
        self.cache.prepare_slots(len(states), states.device, self.pending.cache.slots)

    def _encode_tokens(self, seen: CommittedTokens, following: Tensor) -> Any:
        """Encode tokens, each with the next one, and store their keys and values.

        Args:
            seen: committed tokens of B texts.
            following: [B] int64 token after the last one of each text.

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

    def start_draft(self, roots: Roots) -> tuple[Tensor, Callable[[Frontier], Tensor]]:
        """Encode all pending tokens, before `roots`. See `FeatureDrafter.start_draft`."""
        assert self.pending is not None
        seen, self.pending = self.pending, None
        context, branches = self._encode_tokens(seen, roots.tokens)
        outputs = self.head.draft(context, find_last_rows(seen), branches)
        first = self.cache.prepared_slots.committed[:, 0] - 1

        def compute_next_logits(frontier: Frontier) -> Tensor:
            nonlocal outputs, branches
            positions = first + frontier.depth
            if frontier.rows is not None:
                branches, outputs = branches.select_rows(frontier.rows), outputs[frontier.rows]
                positions = positions.repeat_interleave(len(frontier.rows) // len(roots))
            outputs = self.head.advance(
                outputs, frontier.tokens, self._clamp_positions(positions), branches
            )
            return self.head.compute_logits(outputs)

        return self.head.compute_logits(outputs), compute_next_logits


def find_last_rows(seen: CommittedTokens) -> Tensor:
    """Find the rows [B] of the last token of each text among all B * n rows."""
    places, length = seen.counts - 1, seen.output.hidden_states.shape[1]
    return places + torch.arange(len(places), device=places.device) * length
