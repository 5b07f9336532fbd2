"""Drafting with P-EAGLE heads: chains, and trees of its rows' candidates, in one pass.

Tokens committed since the last draft and the rows after them pass the layers together.

Letters: B texts, n new tokens, D draft tokens, H hidden, W draft vocabulary.
"""

import torch
from torch import Tensor

from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.dynamic_trees import ExpandedTree, Frontier, expand_tree
from heads.decoding.head_drafter import HeadChain, HeadTree
from heads.eagle.branches import Stretch
from heads.eagle.drafter import EagleMemory, last_rows
from heads.peagle.network import KeysValues, PEagleNetwork


class _PEagleDrafter(EagleMemory):
    """Drafts all tokens in one pass."""

    head: PEagleNetwork

    def _read(self, seen: Committed, following: Tensor) -> None:
        """Read tokens without a draft."""
        self._pass(seen, following, 0)

    def _pass(self, seen: Committed, following: Tensor, num_masks: int) -> list[Tensor]:
        """Outputs [B * n, H] of tokens, each with the next, and [B, H] of each row after them."""
        head, (fused, ids, places) = self.head, self._taken(seen, following)
        flat, end = places.flatten(), self.cache.opened.committed[:, 0] + seen.counts
        text = head.text_rows(fused, ids, self._known(flat), Stretch.up_to(flat + 1))
        steps = torch.arange(num_masks, device=end.device).unsqueeze(1)
        positions = self._known((end + steps).flatten())
        masks = head.mask_rows(positions, [Stretch.up_to(end)] * num_masks)

        def text_of(layer: int, new: KeysValues | None) -> KeysValues:
            assert new is not None
            return self._remember(layer, *new, places, seen)

        found = head.through(text, masks, text_of)
        self.cache.opened.advance(seen.counts, seen.token_ids)
        return found

    def _logits(self, roots: Roots) -> Tensor:
        """[B, D, W] logits of all rows that draft."""
        assert self.seen is not None
        seen, self.seen = self.seen, None
        text, *masks = self._pass(seen, roots.tokens, self.shape.depth - 1)
        return self.head.logits(torch.stack([text[last_rows(seen)], *masks], 1))

    def _readable(self, tokens: Tensor, level: int) -> Tensor:
        """Tokens [B, n] of a row, with PAD beyond the head's window."""
        return self._drafted(tokens, self.cache.opened.committed - 1 + level)


class PEagleChain(HeadChain, _PEagleDrafter):
    """Drafts the rows' tokens as a chain."""

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of `depth` tokens."""
        draws = self.sampler()
        tokens = [draws.token(each).unsqueeze(1) for each in self._logits(roots).unbind(1)]
        readable = [self._readable(each, level) for level, each in enumerate(tokens)]
        return draws.chains(self.tree, torch.cat(readable, 1))


class PEagleTree(HeadTree, _PEagleDrafter):
    """Drafts the likeliest paths through the rows' candidates."""

    def expand(self, roots: Roots) -> ExpandedTree:
        """See `heads.decoding.drafting.DynamicDrafter`."""
        logits = self._logits(roots)

        def after(grown: Frontier) -> Tensor:
            number = len(grown.rows) // len(roots)
            return logits[:, grown.level].repeat_interleave(number, 0)

        return expand_tree(self.shape, self.head.vocab, logits[:, 0], after, self._readable)
