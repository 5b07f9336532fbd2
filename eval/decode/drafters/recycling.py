"""Token recycling: the target's own best candidates after each token, kept for the next time.

A table holds for each token what the target ranked best when it last read it, in whatever draft
that was, rejected ones included. A draft is a static tree that is filled by looking up.

Source: Luo et al., arXiv 2408.08696; hemingkx/Spec-Bench `model/recycling`. Differs: a token that
nobody has read yet has no successors, and a tree of any number of nodes.
Letters: B texts, N tree nodes (root included), V vocabulary.
"""

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, Committed, Draft, Roots
from heads.decoding.tree import Tree
from heads.target_model.model import Taps
from heads.upload import upload

NUM_SUCCESSORS = 8
CPU_NODES, GPU_NODES = 8, 80
"""Nodes of the usual tree: as many as pay on a core, and the paper's."""
DEPTH = 6
ACCURACY = [0.6, 0.1, 0.04, 0.02, 0.015, 0.01, 0.01, 0.01]
"""Rates at which each successor was right below a right token, for a small chat model; the same
at every depth."""


def recycling_tree(num_tokens: int) -> Tree:
    """The likeliest nodes."""
    return Tree.best([ACCURACY] * DEPTH, num_tokens)


class Successors:
    """The best candidates after each token, shared by drafters of one target."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """Takes the target's logits [B, N, V] after tokens [B, N]; PAD stays without."""
        if self.table is None:
            size = (logits.shape[-1] + 1, NUM_SUCCESSORS)
            self.table = torch.full(size, PAD, device=logits.device)
        # PAD is the last row.
        self.table[tokens] = logits.topk(NUM_SUCCESSORS).indices
        self.table[PAD] = PAD

    def of(self, tokens: Tensor) -> Tensor:
        """[..., 8] int64, the best first; PAD if nobody has read the token."""
        if self.table is None:
            return tokens.new_full((*tokens.shape, NUM_SUCCESSORS), PAD)
        return self.table[tokens]


class Recycling:
    """Fills a static tree from a table of successors, on the device.

    Args:
        successors: shared with the drafters before and after.
        tree: with ranks below 8.
    """

    taps = Taps()

    def __init__(self, successors: Successors, tree: Tree) -> None:
        self.successors, self.tree = successors, tree
        self.static_nodes = tree.num_nodes
        self.drafted: Tensor | None = None

    def observe(self, seen: Committed) -> None:
        """Learns from every node of the last draft."""
        if seen.logits is not None:
            assert self.drafted is not None
            self.successors.learn(self.drafted, seen.logits)

    def propose(self, roots: Roots) -> Draft:
        """Successors of successors."""
        nodes = [roots.tokens]
        successors: dict[int, Tensor] = {}
        for parent, rank in zip(self.tree.parents[1:], self.tree.ranks[1:], strict=True):
            if parent not in successors:
                successors[parent] = self.successors.of(nodes[parent])
            nodes.append(successors[parent][:, rank])
        self.drafted = torch.stack(nodes, 1)
        return Draft.of(self.tree, self.drafted[:, 1:])

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        if self.drafted is not None:
            self.drafted = self.drafted[upload(rows, self.drafted.device)]

    def take(self, row: int, other: "Recycling") -> None:
        """Texts share all there is to know."""
