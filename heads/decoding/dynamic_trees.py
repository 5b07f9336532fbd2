"""EAGLE-2's dynamic trees: expand the likeliest nodes, then keep the likeliest of all.

A node's score is the log-probability of its path. A child never scores above its parent, so the
kept nodes form a tree. Source: EAGLE-2, arXiv 2406.16858, section 4; SafeAILab/EAGLE
`model/cnets.py`, `topK_genrate`. Letters: B texts, w nodes of a depth, M expanded nodes, W draft
vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, Draft, Drafter, Roots
from heads.decoding.tree import DynamicShape
from heads.vocab import DraftVocab


class ExpandedTree(NamedTuple):
    """All expanded nodes, depth by depth.

    Attributes:
        tokens, scores: [B, M].
        parents: [B, M] numbers of the parents in this order from 1; 0 is the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


class Frontier(NamedTuple):
    """Nodes of one depth to expand.

    Attributes:
        depth: depth of the nodes, from 1.
        rows: [B * w] int64 rows of the previous depth that they came from.
        tokens: [B * w] int64 target ids.
    """

    depth: int
    rows: Tensor
    tokens: Tensor


class DynamicDrafter(Drafter, Protocol):
    """Drafter whose trees have another shape for every text.

    Attributes:
        has_nested_trees: whether a tree begins with the tree of a smaller depth.
    """

    has_nested_trees: bool

    def expand_trees(self, roots: Roots) -> ExpandedTree:
        """Expand all nodes below the roots."""


def expand_tree(
    shape: DynamicShape,
    vocab: DraftVocab,
    first: Tensor,
    after: Callable[[Frontier], Tensor],
    known: Callable[[Tensor, int], Tensor],
) -> ExpandedTree:
    """Expand trees below roots.

    Args:
        shape: limits of the trees.
        vocab: draft vocabulary of the logits.
        first: [B, W] logits of the roots' children.
        after: function that gives logits [B * w, W] of the children of nodes.
        known: function that replaces tokens [B, n] of a depth that cannot be drafted by PAD.
    """
    num_texts, device = len(first), first.device
    width = min(shape.top_k, first.shape[1])
    texts = torch.arange(num_texts, device=device).unsqueeze(1)
    scores = torch.zeros(num_texts, 1, device=device)  # of the nodes to expand now
    nodes = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)  # their numbers
    drawn: list[ExpandedTree] = []
    logits, num_nodes = first, 1
    for level in range(shape.depth):
        best = logits.float().log_softmax(-1).topk(width)
        tokens = vocab.to_target_ids(best.indices).view(num_texts, -1)
        all_scores = (scores.unsqueeze(2) + best.values.view(num_texts, -1, width)).flatten(1)
        drafted = known(tokens, level)
        known_scores = all_scores.masked_fill(drafted == PAD, -torch.inf)
        drawn.append(ExpandedTree(drafted, known_scores, nodes.repeat_interleave(width, 1)))
        if level + 1 == shape.depth:
            break
        num_rows = nodes.shape[1]
        scores, chosen = all_scores.topk(min(shape.top_k, all_scores.shape[1]))
        rows = (texts * num_rows + chosen // width).flatten()
        logits = after(Frontier(level + 1, rows, tokens.gather(1, chosen).flatten()))
        nodes = num_nodes + chosen
        num_nodes += all_scores.shape[1]
    return ExpandedTree(*(torch.cat(column, 1) for column in zip(*drawn, strict=True)))


def rerank_nodes(expanded: ExpandedTree, shape: DynamicShape) -> Draft:
    """Keep the likeliest nodes, at most `num_tokens`, as trees."""
    tokens, scores, parents = expanded
    kept = min(shape.num_tokens, tokens.shape[1])
    # A stable sort puts parents before equal children; the sort by number restores the order.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
    number = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=order.device)
    new = torch.arange(1, kept + 1, device=order.device).expand_as(order)
    number.scatter_(1, order + 1, new)
    return Draft(number.gather(1, parents.gather(1, order)), tokens.gather(1, order), shape.depth)
