"""Acceptance of draft tokens: greedily, or so that sampling keeps the target's distribution.

A rule decides on every node of every tree at once, as if the walk from the root had come to it:
is it accepted, given that its parent was and its earlier siblings were rejected? The walk down is
then the same for all rules, and so is the bonus token, which is sampled from what is left of the
target's distribution where the walk ends.

Letters: B texts, N tree nodes (root included), P nodes with children, D depth, V vocab; p the
target's distribution, q the drafter's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.decoding.drafting import Draft, TreeLayout
from heads.decoding.sampling import Generators, Sampling, Typical
from heads.decoding.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each tree.

    Attributes:
        nodes: [B, N] int64, the accepted node of each depth, the root first; filled up with
            the root.
        num_accepted: [B] int64, accepted draft tokens.
        bonus: [B] int64, the token after them.
    """

    nodes: Tensor
    num_accepted: Tensor
    bonus: Tensor


def verify(
    draft: Draft, tokens: Tensor, logits: Tensor, sampling: Sampling, generators: Generators
) -> Accepted:
    """The accepted path of each tree and the bonus token, without waiting for the device.

    Args:
        draft: the trees.
        tokens: [B, N] int64, those of `draft` behind the root.
        logits: [B, N, V], the target's after each node.
        sampling: how the target chooses.
        generators: used if anything is sampled.
    """
    if tokens.shape[1] == 1 and sampling.greedy:
        root = torch.zeros_like(tokens)
        return Accepted(root, root[:, 0], logits[:, 0].argmax(-1))
    layout = draft.layout()
    if sampling.greedy:
        choices = logits.argmax(-1)
        passes = choices.gather(1, layout.parents.expand_as(tokens)) == tokens
        nodes, end = _deepest_path(layout, _first_sibling(layout, passes))
        return Accepted(nodes, _at(layout.depths, end), _at(choices, end))
    probs = sampling.probabilities(logits)
    if sampling.typical is not None:
        passes, log_probs = typical_acceptance(layout, tokens, probs, sampling.typical)
        nodes, end = _deepest_path(layout, passes, log_probs)
        return Accepted(nodes, _at(layout.depths, end), generators.sample(_at(probs, end)))
    uniforms = generators.uniform(tokens.shape[1])
    if draft.draft_probs is None:
        passes = accept_ranked(layout, tokens, probs, uniforms)
        nodes, end = _deepest_path(layout, _first_sibling(layout, passes))
        rest = _without_children(layout, tokens, _at(probs, end), end)
    else:
        passes, probs = accept_sampled(draft, layout, tokens, probs, uniforms)
        nodes, end = _deepest_path(layout, _first_sibling(layout, passes))
        rest = _at(probs, end)
    return Accepted(nodes, _at(layout.depths, end), generators.sample(rest))


def accept_ranked(layout: TreeLayout, tokens: Tensor, probs: Tensor, uniforms: Tensor) -> Tensor:
    """[B, N] bool for tokens that were not sampled: q is 1 for each.

    A token x is accepted with p(x); rejecting it sets p(x) to 0. Putting the drafter's own
    probability in place of the 1 would not keep the distribution.

    Args:
        layout: of the trees.
        tokens: [B, N] int64.
        probs: [B, N, V] float32, p after each node.
        uniforms: [B, N].

    Source: SafeAILab/EAGLE `eagle/model/utils.py`, `evaluate_posterior`.
    """
    before = _earlier_siblings(layout)
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    repeated = (before & same).any(-1)
    p = _token_probs(layout, tokens, probs).masked_fill(repeated, 0)
    left = 1 - (before.float() @ p.unsqueeze(2)).squeeze(2)
    return uniforms * left < p


def accept_sampled(
    draft: Draft, layout: TreeLayout, tokens: Tensor, probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """[B, N] bool for tokens sampled from q, and [B, N, V] the rest of p after the children.

    A token x is accepted with min(1, p(x) / q(x)); rejecting it makes p norm(max(0, p - q)), and,
    as siblings are sampled without replacement, q(x) 0 for the next.

    Source: chains, Leviathan et al., arXiv 2211.17192, algorithm 1; trees, Sequoia, arXiv
    2402.12374, algorithm 2.
    """
    assert draft.draft_probs is not None
    assert isinstance(draft.tree, Tree)
    q = draft.draft_probs
    num_inner = q.shape[1]
    p, leaves = probs[:, :num_inner], probs[:, num_inner:]
    passes = torch.zeros_like(tokens, dtype=torch.bool)
    ranks = _earlier_siblings(layout).sum(-1).expand_as(tokens)
    parents = layout.parents.expand_as(tokens)
    inner = torch.arange(num_inner, device=tokens.device)
    there = tokens >= 0
    there[:, 0] = False
    for rank in range(max(map(len, draft.tree.children))):
        # [B, P, N]: the child of that rank; a node has one or none.
        child = (parents.unsqueeze(1) == inner[:, None]) & (there & (ranks == rank)).unsqueeze(1)
        has, node = child.max(-1)
        token = tokens.gather(1, node).clamp_min(0).unsqueeze(2)
        threshold = uniforms.gather(1, node).unsqueeze(2) * q.gather(2, token)
        passes = passes | (child & (threshold < p.gather(2, token))).any(1)
        p = torch.where(has.unsqueeze(2), _normed((p - q).clamp_min(0), p), p)
        q = torch.where(has.unsqueeze(2), _normed(q.scatter(2, token, 0.0), q), q)
    return passes, torch.cat([p, leaves], dim=1)


def _normed(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divided by their sum; rounding can leave nothing although something was rejected."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def typical_acceptance(
    layout: TreeLayout, tokens: Tensor, probs: Tensor, rule: Typical
) -> tuple[Tensor, Tensor]:
    """[B, N] bool of typical nodes, and [B, N] log p of the path to each."""
    entropy = -(probs * (probs + 1e-5).log()).sum(-1)
    threshold = (rule.alpha * (-entropy).exp()).clamp_max(rule.threshold)
    p = _token_probs(layout, tokens, probs)
    passes = p > threshold.gather(1, layout.parents.expand_as(tokens))
    logs = p.clamp_min(1e-30).log()
    return passes, (layout.mask.float() @ logs.unsqueeze(2)).squeeze(2)


def _token_probs(layout: TreeLayout, tokens: Tensor, probs: Tensor) -> Tensor:
    """[B, N] p(x) at each node's parent; 0 where there is no node."""
    places = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    p = probs[places, layout.parents.expand_as(tokens), tokens.clamp_min(0)]
    return p.masked_fill(tokens < 0, 0)


def _earlier_siblings(layout: TreeLayout) -> Tensor:
    """[B, N, N] bool: row n has the nodes before n under the same parent; the root has none."""
    same = layout.parents.unsqueeze(2) == layout.parents.unsqueeze(1)
    earlier = same & torch.ones_like(same).tril(-1)
    earlier[:, :, 0] = False
    return earlier


def _first_sibling(layout: TreeLayout, passes: Tensor) -> Tensor:
    """[B, N] bool of the first sibling that passes under each parent."""
    later = (_earlier_siblings(layout) & passes.unsqueeze(1)).any(-1)
    return passes & ~later


def _deepest_path(
    layout: TreeLayout, passes: Tensor, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The deepest node whose path passes: the nodes of the path [B, D + 1], and the node [B].

    Args:
        layout: of the trees.
        passes: [B, N] bool; the root always does.
        scores: [B, N], decide between nodes equally deep.
    """
    rejected = ~passes
    rejected[:, 0] = False
    alive = ~(layout.mask & rejected.unsqueeze(1)).any(-1)
    depths = layout.depths.expand_as(alive)
    reached = depths.masked_fill(~alive, -1)
    if scores is not None:
        deepest = reached == reached.max(1, keepdim=True).values
        end = scores.masked_fill(~deepest, -torch.inf).argmax(1)
    else:
        end = reached.argmax(1)
    mask = layout.mask.expand(len(alive), -1, -1)
    on_path = mask.gather(1, end[:, None, None].expand(-1, 1, mask.shape[2])).squeeze(1)
    nodes = torch.arange(mask.shape[2], device=mask.device).expand_as(depths)
    path = torch.zeros_like(depths).scatter_add(1, depths, nodes * on_path)
    return path, end


def _without_children(layout: TreeLayout, tokens: Tensor, probs: Tensor, end: Tensor) -> Tensor:
    """[B, V] p at node `end` without the tokens of its children, which were rejected."""
    rejected = (layout.parents.expand_as(tokens) == end.unsqueeze(1)) & (tokens >= 0)
    rejected[:, 0] = False
    kept = torch.ones_like(probs).scatter_reduce(
        1, tokens.clamp_min(0), (~rejected).to(probs.dtype), "amin"
    )
    rest = probs * kept
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)


def _at(values: Tensor, node: Tensor) -> Tensor:
    """[B, ...] the values of [B or 1, N, ...] at node [B]."""
    return values.expand(len(node), *values.shape[1:])[
        torch.arange(len(node), device=node.device), node
    ]
