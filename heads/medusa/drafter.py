"""Medusa as a drafter: one forward of all heads, a static tree of their best candidates.

Or a chain of them, cut where it becomes unlikely, of which no further head runs.
"""

import torch
from torch import Tensor

from heads.decoding.cache import upload
from heads.decoding.chains import Calibration, ChainSampler
from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.sampling import GREEDY, Generators
from heads.decoding.tree import Tree
from heads.medusa.head import MedusaHead


class MedusaDrafter:
    """Drafts from the hidden state of the last committed token.

    Args:
        head: the trained heads, on the target's device.
        tree: static tree, no deeper than there are heads.
    """

    def __init__(self, head: MedusaHead, tree: Tree) -> None:
        self.head = head
        self.tree = tree
        self.taps = head.taps
        self.static_nodes: int | None = tree.num_nodes
        levels = [depth - 1 for depth in tree.depths[1:]]
        self.slots = torch.tensor(
            [level * tree.width + rank for level, rank in zip(levels, tree.ranks[1:], strict=True)]
        )
        self.hidden: Tensor | None = None

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

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        if self.hidden is not None:
            self.hidden = self.hidden[upload(rows, self.hidden.device)]

    def take(self, row: int, other: "MedusaDrafter") -> None:
        """A row goes on with the one text of another drafter."""
        assert self.hidden is not None
        assert other.hidden is not None
        self.hidden[row] = other.hidden[0]


class MedusaCut(MedusaDrafter):
    """Drafts a chain of the best candidates, until no text's goes on.

    Args:
        head: the trained heads, on the target's device.
        depth: draft tokens at most.
        calibration: cuts the chains.
    """

    def __init__(self, head: MedusaHead, depth: int, calibration: Calibration) -> None:
        super().__init__(head, Tree.chain(depth))
        self.calibration = calibration
        self.static_nodes = None

    def propose(self, roots: Roots) -> Draft:  # noqa: ARG002
        """Chains of at most `depth` tokens."""
        assert self.hidden is not None
        hidden = self.hidden.to(next(self.head.parameters()).dtype)
        draws = ChainSampler(self.head.vocab, GREEDY, Generators([], []), self.calibration)
        tokens: list[Tensor] = []
        while len(tokens) < self.tree.depth and not draws.ended:
            tokens.append(draws.token(self.head.head_logits(len(tokens), hidden)))
        return draws.chains(self.tree, torch.stack(tokens, 1))
