"""Medusa as a drafter: one forward of all heads, a static tree of their best candidates.

Or a chain of them, cut where it becomes unlikely, of which no further head runs.
"""

import torch
from torch import Tensor

from heads.decoding.chains import Calibration, ChainSampler
from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.head_drafter import HeadDrafter
from heads.decoding.tree import Tree
from heads.medusa.network import MedusaNetwork


class MedusaDrafter(HeadDrafter):
    """Drafts from the hidden state of the last committed token.

    Args:
        head: the trained heads, on the target's device.
        tree: static tree, no deeper than there are heads.
    """

    state = ("hidden",)
    hidden: Tensor | None = None

    def __init__(self, head: MedusaNetwork, tree: Tree) -> None:
        super().__init__(head, tree)
        self.tree = tree
        self.static_nodes = tree.num_nodes
        levels = [depth - 1 for depth in tree.depths[1:]]
        self.slots = torch.tensor(
            [level * tree.width + rank for level, rank in zip(levels, tree.ranks[1:], strict=True)]
        )

    def observe(self, seen: Committed) -> None:
        """Keeps the states [B, D] of the last committed tokens."""
        hidden = seen.last.hidden_states[:, 0]
        # In its place, which a captured step knows.
        self.hidden = hidden if self.hidden is None else self.hidden.copy_(hidden)

    def propose(self, roots: Roots) -> Draft:  # noqa: ARG002
        """The tree's candidates: head k fills the nodes of depth k."""
        assert self.hidden is not None
        self.slots = self.slots.to(self.hidden.device)
        candidates = self.head.best(self.hidden, self.tree.depth, self.tree.width)
        return Draft.of(self.tree, candidates.transpose(0, 1).flatten(1)[:, self.slots])


class MedusaCut(MedusaDrafter):
    """Drafts a chain of the best candidates, until no text's goes on.

    Args:
        head: the trained heads, on the target's device.
        depth: draft tokens at most.
        calibration: cuts the chains.
    """

    def __init__(self, head: MedusaNetwork, depth: int, calibration: Calibration) -> None:
        super().__init__(head, Tree.chain(depth))
        self.calibration, self.static_nodes = calibration, None

    def propose(self, roots: Roots) -> Draft:  # noqa: ARG002
        """Chains of at most `depth` tokens."""
        assert self.hidden is not None
        hidden = self.hidden.to(next(self.head.parameters()).dtype)
        draws = ChainSampler(self.head.vocab, calibration=self.calibration)
        tokens: list[Tensor] = []
        while len(tokens) < self.tree.depth and not draws.ended:
            tokens.append(draws.token(self.head.head_logits(len(tokens), hidden)))
        return draws.chains(self.tree, torch.stack(tokens, 1))
