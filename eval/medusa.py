"""Medusa as a drafter: one forward of all heads, a static tree of their best candidates."""

import torch
from torch import Tensor

from eval.engine import Draft
from heads.medusa import MedusaHead
from heads.target import TargetOutput
from heads.tree import Tree


class MedusaDrafter:
    """Drafts from the hidden state of the last committed token.

    Args:
        head: the trained heads, on the target's device.
        tree: static tree, no deeper than there are heads.
    """

    def __init__(self, head: MedusaHead, tree: Tree) -> None:
        self.head = head
        self.tree = tree
        self.reads = head.reads
        levels = [depth - 1 for depth in tree.depths[1:]]
        self.slots = torch.tensor(
            [level * tree.width + rank for level, rank in zip(levels, tree.ranks[1:], strict=True)]
        )
        self.hidden: Tensor | None = None

    def observe(self, token_ids: list[int], output: TargetOutput) -> None:  # noqa: ARG002
        """Keeps the state of the last committed token."""
        self.hidden = output.hidden_states[0, -1]

    def propose(self, root: int) -> Draft:  # noqa: ARG002
        """The tree's candidates: head k fills the nodes of depth k."""
        assert self.hidden is not None
        candidates = self.head.best(self.hidden, self.tree.depth, self.tree.width)
        return Draft(self.tree, candidates.flatten()[self.slots.to(candidates.device)])
