"""Drafting with Medusa heads: one forward of all heads, then a static tree of candidates.

Or a chain, cut where it becomes unlikely; later heads then do not run.
"""

import torch
from torch import Tensor

from heads.decoding.chains import Calibration, ChainSampler
from heads.decoding.drafting import CommittedTokens, Draft, Roots
from heads.decoding.head_drafter import HeadDrafter
from heads.decoding.tree import Tree
from heads.medusa.network import MedusaNetwork


class MedusaDrafter(HeadDrafter):
    """Drafts from the hidden state of the last committed token.

    Args:
        head: trained heads on the target's device.
        tree: static tree, at most as deep as the number of heads.
    """

    row_attributes = ("hidden",)
    hidden: Tensor | None = None

    def __init__(self, head: MedusaNetwork, tree: Tree) -> None:
        super().__init__(head, tree)
        self.tree = tree
        self.num_static_nodes = tree.num_nodes
        levels = [depth - 1 for depth in tree.depths[1:]]
        self.slots = torch.tensor(
            [level * tree.width + rank for level, rank in zip(levels, tree.ranks[1:], strict=True)]
        )

    def observe(self, seen: CommittedTokens) -> None:
        """Keep the hidden states [B, D] of the last committed tokens."""
        hidden = seen.last_output.hidden_states[:, 0]
        # In place, as captured steps know the address.
        self.hidden = hidden if self.hidden is None else self.hidden.copy_(hidden)

    def propose(self, roots: Roots) -> Draft:  # noqa: ARG002
        """Draft the tree's candidates: head k fills the nodes of depth k."""
        assert self.hidden is not None
        self.slots = self.slots.to(self.hidden.device)
        candidates = self.head.rank_token_ids(self.hidden, self.tree.depth, self.tree.width)
        return Draft.from_tree(self.tree, candidates.transpose(0, 1).flatten(1)[:, self.slots])


class MedusaCut(MedusaDrafter):
    """Drafts a chain of the best candidates, until the chains of all texts are cut.

    Args:
        head: trained heads on the target's device.
        depth: largest number of draft tokens.
        calibration: cuts the chains.
    """

    def __init__(self, head: MedusaNetwork, depth: int, calibration: Calibration) -> None:
        super().__init__(head, Tree.make_chain(depth))
        self.calibration, self.num_static_nodes = calibration, None

    def propose(self, roots: Roots) -> Draft:  # noqa: ARG002
        """Draft chains of at most `depth` tokens."""
        assert self.hidden is not None
        hidden = self.hidden.to(next(self.head.parameters()).dtype)
        draws = ChainSampler(self.head.vocab, calibration=self.calibration)
        tokens: list[Tensor] = []
        while len(tokens) < self.tree.depth and not draws.has_ended:
            tokens.append(draws.choose_token(self.head.head_logits(len(tokens), hidden)))
        return draws.make_draft(self.tree, torch.stack(tokens, 1))
