"""EAGLE-2's trees: expand the likeliest nodes, then keep the likeliest of all that was drawn.

A node's score is the log-probability of its path, so a child never scores above its parent and
what is kept is a tree. Source: EAGLE-2, arXiv 2406.16858, section 4; SafeAILab/EAGLE
`model/cnets.py`, `topK_genrate`. Letters: B texts, w nodes of a level, M nodes that are drawn, W
draft vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, Draft, Drafter, Roots
from heads.decoding.tree import DynamicShape
from heads.vocab import DraftVocab


class ExpandedTree(NamedTuple):
    """Everything that is drawn of trees, level by level.

    Attributes:
        tokens, scores: [B, M].
        parents: [B, M], numbered from 1 in this order; 0 is the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


class Frontier(NamedTuple):
    """The nodes of a level that are expanded.

    Attributes:
        level: of their children, from 1.
        rows: [B * w] int64, which rows of the level before they were drawn from.
        tokens: [B * w] int64 target ids.
    """

    level: int
    rows: Tensor
    tokens: Tensor


def expand_tree(
    shape: DynamicShape,
    vocab: DraftVocab,
    first: Tensor,
    after: Callable[[Frontier], Tensor],
    known: Callable[[Tensor, int], Tensor],
) -> ExpandedTree:
    """Draws trees below roots.

    Args:
        shape: their limits.
        vocab: of the logits.
        first: [B, W] logits of the roots' children.
        after: [B * w, W] logits of the children of nodes.
        known: tokens [B, n] of a level, with PAD for those that cannot be drafted.
    """
    num_texts, device = len(first), first.device
    width = min(shape.top_k, first.shape[1])
    texts = torch.arange(num_texts, device=device).unsqueeze(1)
    scores = torch.zeros(num_texts, 1, device=device)  # of the nodes expanded now
    nodes = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)  # their numbers
    drawn: list[ExpandedTree] = []
    logits, num_nodes = first, 1
    for level in range(shape.depth):
        best = logits.float().log_softmax(-1).topk(width)
        tokens = vocab.to_target(best.indices).view(num_texts, -1)
        all_scores = (scores.unsqueeze(2) + best.values.view(num_texts, -1, width)).flatten(1)
        drafted = known(tokens, level)
        sure = all_scores.masked_fill(drafted == PAD, -torch.inf)
        drawn.append(ExpandedTree(drafted, sure, nodes.repeat_interleave(width, 1)))
        if level + 1 == shape.depth:
            break
        num_rows = nodes.shape[1]
        scores, chosen = all_scores.topk(min(shape.top_k, all_scores.shape[1]))
        rows = (texts * num_rows + chosen // width).flatten()
        logits = after(Frontier(level + 1, rows, tokens.gather(1, chosen).flatten()))
        nodes = num_nodes + chosen
        num_nodes += all_scores.shape[1]
    return ExpandedTree(*(torch.cat(column, 1) for column in zip(*drawn, strict=True)))


def rerank(drawn: ExpandedTree, shape: DynamicShape) -> Draft:
    """Trees of at most `num_tokens` nodes."""
    tokens, scores, parents = drawn
    kept = min(shape.num_tokens, tokens.shape[1])
    # A stable sort puts a parent before an equal child, the sort by number before any.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
    number = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=order.device)
    new = torch.arange(1, kept + 1, device=order.device).expand_as(order)
    number.scatter_(1, order + 1, new)
    return Draft(number.gather(1, parents.gather(1, order)), tokens.gather(1, order), shape.depth)


class DynamicDrafter(Drafter, Protocol):
    """A drafter whose trees have another shape for every text.

    Attributes:
        nested: what is drawn to a depth begins with what is drawn to a smaller one.
    """

    nested: bool

    def expand(self, roots: Roots) -> tuple[Tensor, Tensor, Tensor]:
        """Everything that is drawn: tokens, scores and parents [B, M], level by level.

        Parents are numbered from 1 in this order; 0 is the root.
        """
