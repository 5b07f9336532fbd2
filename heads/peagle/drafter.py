"""Drafting with P-EAGLE heads: chains, and trees of its rows' candidates, in one pass.

Tokens committed since the last draft and the rows after them pass the layers together.

Letters: B texts, n new tokens, D draft tokens, H hidden, W draft vocabulary.
"""

import torch
from torch import Tensor

from heads.decoding.drafting import CommittedTokens, Draft, Roots
from heads.decoding.dynamic_trees import ExpandedTree, Frontier, expand_tree
from heads.decoding.head_drafter import ChainDrafter, DynamicTreeDrafter
from heads.eagle.branches import CausalRange
from heads.eagle.drafter import EagleDrafter, find_last_rows
from heads.peagle.network import KeysValues, PEagleNetwork


class _PEagleDrafter(EagleDrafter):
    """Drafts all tokens in one pass."""

    head: PEagleNetwork

    def _encode_tokens(self, seen: CommittedTokens, following: Tensor) -> None:
        """Read tokens without a draft."""
        self._run_pass(seen, following, 0)

    def _run_pass(self, seen: CommittedTokens, following: Tensor, num_masks: int) -> list[Tensor]:
        """Outputs [B * n, H] of tokens, each with the next, and [B, H] of each row after them."""
        head, (fused, ids, places) = self.head, self._build_inputs(seen, following)
        flat, end = places.flatten(), self.cache.prepared_slots.committed[:, 0] + seen.counts
        text = head.build_context_rows(
            fused, ids, self._clamp_positions(flat), CausalRange.from_ends(flat + 1)
        )
        steps = torch.arange(num_masks, device=end.device).unsqueeze(1)
        positions = self._clamp_positions((end + steps).flatten())
        masks = head.build_mask_rows(positions, [CausalRange.from_ends(end)] * num_masks)

        def text_of(layer: int, new: KeysValues | None) -> KeysValues:
            assert new is not None
            return self._store_keys_values(layer, *new, places, seen)

        found = head.run_layers(text, masks, text_of)
        self.cache.prepared_slots.advance(seen.counts, seen.token_ids)
        return found

    def _compute_logits(self, roots: Roots) -> Tensor:
        """[B, D, W] logits of all rows that draft."""
        assert self.pending is not None
        seen, self.pending = self.pending, None
        text, *masks = self._run_pass(seen, roots.tokens, self.shape.depth - 1)
        return self.head.compute_logits(torch.stack([text[find_last_rows(seen)], *masks], 1))

    def _pad_row_tokens(self, tokens: Tensor, level: int) -> Tensor:
        """Tokens [B, n] of a row, with PAD beyond the head's window."""
        return self._pad_beyond_window(tokens, self.cache.prepared_slots.committed - 1 + level)


class PEagleChain(ChainDrafter, _PEagleDrafter):
    """Drafts the rows' tokens as a chain."""

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of `depth` tokens."""
        draws = self.make_sampler()
        tokens = [
            draws.choose_token(each).unsqueeze(1) for each in self._compute_logits(roots).unbind(1)
        ]
        readable = [self._pad_row_tokens(each, level) for level, each in enumerate(tokens)]
        return draws.make_draft(self.tree, torch.cat(readable, 1))


class PEagleTree(DynamicTreeDrafter, _PEagleDrafter):
    """Drafts the likeliest paths through the rows' candidates."""

    def expand_trees(self, roots: Roots) -> ExpandedTree:
        """See `heads.decoding.drafting.DynamicDrafter`."""
        logits = self._compute_logits(roots)

        def after(grown: Frontier) -> Tensor:
            number = len(grown.rows) // len(roots)
            return logits[:, grown.depth].repeat_interleave(number, 0)

        return expand_tree(self.shape, self.head.vocab, logits[:, 0], after, self._pad_row_tokens)
