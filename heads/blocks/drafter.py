"""Block drafters decoding: chains, and trees of the slots' candidates.

Features of what the target committed become keys and values at once, and nothing else is kept:
the rows of a block are made anew in every step. Nothing here waits for the device, but for chains
that are cut.

Letters: B texts, D slots, H hidden, W draft vocabulary, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.blocks.network import BlockNetwork
from heads.decoding.cache import SlotBuffer, Slots
from heads.decoding.chains import Calibration, ChainSampler, chain_nodes
from heads.decoding.drafting import PAD, Committed, Draft, Roots
from heads.decoding.dynamic_trees import ExpandedTree, Frontier, expand_tree, rerank
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import DynamicShape, Tree


class _BlockDrafter:
    """The head's memory of the committed texts.

    Args:
        head: attached to the target.
        depth: D.
    """

    def __init__(self, head: BlockNetwork, depth: int) -> None:
        self.head, self.depth = head, depth
        self.taps = head.taps
        self.buffers = [SlotBuffer() for _ in head.layers]
        self.slots: Slots | None = None

    def observe(self, seen: Committed) -> None:
        """Taps the features of what was committed."""
        features = self.head.features(seen.output)
        num_texts, length, _ = features.shape
        if self.slots is None:
            self.slots = Slots(num_texts, features.device)
        self.slots.hold_as(seen.cache.slots)
        places, width = self.slots.place(length, length), self.slots.width(length)
        positions = places.flatten().clamp_max(self.head.window - 1)
        text = self.head.read(features.flatten(0, 1), positions)
        for buffer, both in zip(self.buffers, text, strict=True):
            keys, values = (each[0].unflatten(0, (num_texts, length)) for each in both)
            new = keys.transpose(1, 2), values.transpose(1, 2)
            buffer.write(*new, places, width, seen.cache.needed)
        self.slots.advance(seen.counts, seen.token_ids)

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        if self.slots is not None:
            self.slots.keep(rows, *self.buffers)

    def take(self, row: int, other: "_BlockDrafter") -> None:
        """A row goes on with the one text of another drafter."""
        assert self.slots is not None
        assert other.slots is not None
        (length,) = other.slots.lengths
        self.slots.take(row, length)
        for own, new in zip(self.buffers, other.buffers, strict=True):
            own.replace(row, new, length, len(self.slots.lengths))

    def _slots(self, roots: Roots) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that are sure [B], outputs [B, D, H] and logits [B, D, W] of the slots."""
        assert self.slots is not None
        ends, width = self.slots.committed[:, 0], self.slots.width(0)
        host = torch.tensor([0]), torch.tensor([width])
        sight = self.head.sight(torch.zeros_like(ends), ends, self.depth, host)
        text = [
            (_first(buffer.keys, width), _first(buffer.values, width)) for buffer in self.buffers
        ]
        outputs = self.head.draft(roots.tokens, ends, text, sight)
        return roots.tokens, outputs, self.head.logits(outputs)

    def _known(self, tokens: Tensor, slot: int) -> Tensor:
        """Tokens [B, n] of a slot, with PAD where its row lies beyond the head's window."""
        assert self.slots is not None
        place = self.slots.committed + self.head.config.first_row + slot
        return tokens.masked_fill(place >= self.head.window, PAD)


def _first(buffer: Tensor | None, width: int) -> Tensor:
    """[B, S, K, d] of a buffer [B, K, ., d]."""
    assert buffer is not None
    return buffer.narrow(2, 0, width).transpose(1, 2)


class BlockChain(_BlockDrafter):
    """Drafts a block as a chain, the best tokens or, when sampling, drawn from their distributions.

    Args:
        head: attached to the target.
        depth: draft tokens.
        sampling: the target's, applied to the drafts too.
        seeds: of the draws, one per text; others than the target's.
        calibration: cuts the chains; None leaves them whole.
    """

    def __init__(
        self,
        head: BlockNetwork,
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
        before, outputs, base = self._slots(roots)
        draws = ChainSampler(self.head.vocab, self.sampling, self.generators, self.calibration)
        tokens: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(self.depth):
            if draws.ended:
                break
            mine = outputs[:, slot]
            logits, state = self.head.step(base[:, slot], mine, before, state)
            sure = self.head.sure(mine, before) if self.calibration else None
            before = draws.token(logits, sure)
            tokens.append(self._known(before.unsqueeze(1), slot))
        return draws.chains(self.tree, torch.cat(tokens, 1))

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        super().keep(rows)
        self.generators = self.generators.rows(rows)

    def take(self, row: int, other: "_BlockDrafter") -> None:
        """A row goes on with the one text of another drafter."""
        assert isinstance(other, BlockChain)
        super().take(row, other)
        self.generators.take(row, other.generators)


class BlockTree(_BlockDrafter):
    """Drafts the likeliest paths through the slots, best first, in one pass of the head.

    Args:
        head: attached to the target.
        shape: its limits.
    """

    nested = False
    """Rows see later ones, so that a shorter block drafts other tokens."""

    def __init__(self, head: BlockNetwork, shape: DynamicShape) -> None:
        super().__init__(head, shape.depth)
        self.shape = shape
        self.static_nodes = 1 + shape.num_tokens

    def propose(self, roots: Roots) -> Draft:
        """Trees of at most `num_tokens` nodes below the roots."""
        return rerank(self.expand(roots), self.shape)

    def expand(self, roots: Roots) -> ExpandedTree:
        """See `heads.decoding.drafting.DynamicDrafter`."""
        sure, outputs, base = self._slots(roots)
        first, state = self.head.step(base[:, 0], outputs[:, 0], sure, None)

        def after(grown: Frontier) -> Tensor:
            nonlocal state
            number = len(grown.tokens) // len(roots)
            mine, slot = (
                each[:, grown.level].repeat_interleave(number, 0) for each in (base, outputs)
            )
            before = None if state is None else state[grown.rows]
            logits, state = self.head.step(mine, slot, grown.tokens, before)
            return logits

        return expand_tree(self.shape, self.head.vocab, first, after, self._known)
