"""P-EAGLE as a drafter: chains, and trees of its rows' candidates, in one pass of the head.

What was committed since the last draft and the rows behind it go through the layers together.

Letters: B texts, n new tokens, D draft tokens, H hidden, W draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.decoding.chains import Calibration, ChainSampler, chain_nodes
from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.dynamic_trees import ExpandedTree, Frontier, expand_tree, rerank
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.branches import Stretch
from heads.eagle.drafter import EagleMemory, last_rows
from heads.peagle.network import KeysValues, PEagleNetwork


class _PEagleDrafter(EagleMemory):
    """The head's memory of the committed texts.

    Args:
        head: attached to the target.
        depth: D.
    """

    head: PEagleNetwork

    def __init__(self, head: PEagleNetwork, depth: int) -> None:
        super().__init__(head)
        self.depth = depth

    def _read(self, seen: Committed, following: Tensor) -> None:
        """Taps tokens without a draft."""
        self._pass(seen, following, 0)

    def _pass(self, seen: Committed, following: Tensor, num_masks: int) -> list[Tensor]:
        """[B * n, H] of tokens, each with the next, and [B, H] of the rows behind them in turn."""
        head, (fused, ids, places) = self.head, self._taken(seen, following)
        flat, end = places.flatten(), self._slots.committed[:, 0] + seen.counts
        text = head.text_rows(fused, ids, self._known(flat), Stretch.up_to(flat + 1))
        steps = torch.arange(num_masks, device=end.device).unsqueeze(1)
        positions = self._known((end + steps).flatten())
        masks = head.mask_rows(positions, [Stretch.up_to(end)] * num_masks)

        def text_of(layer: int, new: KeysValues | None) -> KeysValues:
            assert new is not None
            return self._remember(layer, *new, places, seen)

        found = head.through(text, masks, text_of)
        self._slots.advance(seen.counts, seen.token_ids)
        return found

    def _logits(self, roots: Roots) -> Tensor:
        """[B, D, W] of all rows that draft."""
        assert self.seen is not None
        seen, self.seen = self.seen, None
        text, *masks = self._pass(seen, roots.tokens, self.depth - 1)
        return self.head.logits(torch.stack([text[last_rows(seen)], *masks], 1))

    def _readable(self, tokens: Tensor, level: int) -> Tensor:
        """Tokens [B, n] of a row, with PAD if it lies beyond the head's window."""
        return self._drafted(tokens, self._slots.committed - 1 + level)


class PEagleChain(_PEagleDrafter):
    """Drafts a chain, the best tokens or, when sampling, drawn from their distributions.

    Args:
        head: attached to the target.
        depth: draft tokens.
        sampling: the target's, applied to the drafts too.
        seeds: of the draws, one per text; others than the target's.
        calibration: cuts the chains; None leaves them whole.
    """

    def __init__(
        self,
        head: PEagleNetwork,
        depth: int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] = (1,),
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(head, depth)
        self.tree, self.sampling = Tree.chain(depth), sampling
        self.calibration = calibration
        self.static_nodes = chain_nodes(depth, sampling, calibration)
        self.generators = Generators.seeded(seeds, head.fc.weight.device)

    def propose(self, roots: Roots) -> Draft:
        """Chains of `depth` tokens."""
        draws = ChainSampler(self.head.vocab, self.sampling, self.generators, self.calibration)
        tokens = [draws.token(each).unsqueeze(1) for each in self._logits(roots).unbind(1)]
        readable = [self._readable(each, level) for level, each in enumerate(tokens)]
        return draws.chains(self.tree, torch.cat(readable, 1))

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        super().keep(rows)
        self.generators = self.generators.rows(rows)

    def take(self, row: int, other: EagleMemory) -> None:
        """A row goes on with the one text of another drafter."""
        assert isinstance(other, PEagleChain)
        super().take(row, other)
        self.generators.take(row, other.generators)


class PEagleTree(_PEagleDrafter):
    """Drafts the likeliest paths through the rows' candidates.

    Args:
        head: attached to the target.
        shape: its limits.
    """

    nested = True

    def __init__(self, head: PEagleNetwork, shape: DynamicShape) -> None:
        super().__init__(head, shape.depth)
        self.shape = shape
        self.static_nodes = 1 + shape.num_tokens

    def propose(self, roots: Roots) -> Draft:
        """Trees of at most `num_tokens` nodes below the roots."""
        return rerank(self.expand(roots), self.shape)

    def expand(self, roots: Roots) -> ExpandedTree:
        """See `heads.decoding.drafting.DynamicDrafter`."""
        logits = self._logits(roots)

        def after(grown: Frontier) -> Tensor:
            number = len(grown.rows) // len(roots)
            return logits[:, grown.level].repeat_interleave(number, 0)

        return expand_tree(self.shape, self.head.vocab, logits[:, 0], after, self._readable)
