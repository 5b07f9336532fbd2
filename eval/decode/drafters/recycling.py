"""Token recycling: the target's best candidates after each token, kept for later drafts.

A table holds for each token the target's best candidates when it last read that token in any draft,
accepted or rejected. A draft is a static tree filled from the table.

Source: Luo et al., arXiv 2408.08696; hemingkx/Spec-Bench `model/recycling`. Differs: a token not
read yet has no successors, and a tree may have any number of nodes.
Letters: B texts, N tree nodes (root included), V vocabulary.
"""

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, CommittedTokens, Draft, Roots
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.model import FeatureLayers

NUM_SUCCESSORS = 8
CPU_NODES, GPU_NODES = 8, 80
"""Nodes of the default tree: as many as pay on a core, and the paper's."""
DEPTH = 6
ACCURACY = [0.6, 0.1, 0.04, 0.02, 0.015, 0.01, 0.01, 0.01]
"""Rates at which each successor was right below a right token, for a small chat model; equal at
every depth."""


def recycling_tree(num_tokens: int) -> Tree:
    """Make the tree of the likeliest nodes."""
    return Tree.from_accuracies([ACCURACY] * DEPTH, num_tokens)


class SuccessorTable:
    """Best candidates after each token, shared by the drafters of a target."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def record_successors(self, tokens: Tensor, logits: Tensor) -> None:
        """Take the target's logits [B, N, V] after tokens [B, N]; PAD gets none."""
        if self.table is None:
            size = (logits.shape[-1] + 1, NUM_SUCCESSORS)
            self.table = torch.full(size, PAD, device=logits.device)
        # PAD is the last row.
        self.table[tokens] = logits.topk(NUM_SUCCESSORS).indices
        self.table[PAD] = PAD

    def look_up(self, tokens: Tensor) -> Tensor:
        """[..., 8] int64 successors, the best first; PAD for a token not read yet."""
        if self.table is None:
            return tokens.new_full((*tokens.shape, NUM_SUCCESSORS), PAD)
        return self.table[tokens]


class Recycling:
    """Fills a static tree from a table of successors, on the device.

    Args:
        successors: table shared with earlier and later drafters.
        tree: tree with ranks below 8.
    """

    taps = FeatureLayers()

    def __init__(self, successors: SuccessorTable, tree: Tree) -> None:
        self.successors, self.tree = successors, tree
        self.num_static_nodes = tree.num_nodes
        self.drafted: Tensor | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Learn from every node of the last draft."""
        if seen.logits is not None:
            assert self.drafted is not None
            self.successors.record_successors(self.drafted, seen.logits)

    def propose(self, roots: Roots) -> Draft:
        """Draft successors of successors."""
        nodes = [roots.tokens]
        successors: dict[int, Tensor] = {}
        for parent, rank in zip(self.tree.parents[1:], self.tree.ranks[1:], strict=True):
            if parent not in successors:
                successors[parent] = self.successors.look_up(nodes[parent])
            nodes.append(successors[parent][:, rank])
        self.drafted = torch.stack(nodes, 1)
        return Draft.from_tree(self.tree, self.drafted[:, 1:])

    def select_rows(self, rows: list[int]) -> None:
        """Keep some texts only."""
        if self.drafted is not None:
            self.drafted = self.drafted[to_device(rows, self.drafted.device)]

    def insert_row(self, row: int, other: "Recycling") -> None:
        """Do nothing, as texts share the table."""
