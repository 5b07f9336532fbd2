"""Which draft tokens the target keeps: greedily, or so that sampling keeps its distribution.

A rule judges every node of every tree at once, as if the walk from the root had come to it: does
it pass, given that its parent was kept and its earlier siblings were refused? The walk down is
then the same for all rules, and so is the bonus token, which is drawn from what is left of the
target's distribution where the walk ends.

Letters: B texts, N tree nodes (root included), P nodes with children, D depth, V vocab; p the
target's distribution, q the drafter's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.drafting import Draft, Layout, Siblings
from heads.sampling import Generators, Sampling, Typical, sample_tokens
from heads.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """What a step keeps.

    Attributes:
        nodes: [B, N] int64, the accepted node of each depth, the root first; filled up with
            the root.
        num_accepted: [B] int64, draft tokens kept.
        bonus: [B] int64, the token after them.
    """

    nodes: Tensor
    num_accepted: Tensor
    bonus: Tensor


def judge(
    draft: Draft, tokens: Tensor, logits: Tensor, sampling: Sampling, generators: Generators
) -> Verdict:
    """The accepted path of each tree and the bonus token, without waiting for the device.

    Args:
        draft: the trees.
        tokens: [B, N] int64, those of `draft` behind the root.
        logits: [B, N, V], the target's after each node.
        sampling: how the target chooses.
        generators: used if anything is drawn.
    """
    if tokens.shape[1] == 1 and sampling.greedy:
        nothing = torch.zeros_like(tokens)
        return Verdict(nothing, nothing[:, 0], sample_tokens(logits[:, 0], sampling, generators))
    layout = draft.layout()
    if sampling.greedy:
        choices = logits.argmax(-1)
        passes = choices.gather(1, _rows(layout.parents, tokens)) == tokens
        nodes, end = _descend(layout, _first(layout, passes))
        return Verdict(nodes, _at(layout.depths, end), _at(choices, end))
    probs = sampling.probabilities(logits)
    if sampling.typical is not None:
        passes, liking = _typical(layout, tokens, probs, sampling.typical)
        nodes, end = _descend(layout, passes, liking)
        return Verdict(nodes, _at(layout.depths, end), generators.sample(_at(probs, end)))
    hurdles = generators.uniform(tokens.shape[1])
    if draft.siblings is Siblings.ranked:
        passes = ranked_pass(layout, tokens, probs, hurdles)
        nodes, end = _descend(layout, _first(layout, passes))
        rest = _without_children(layout, tokens, _at(probs, end), end)
    else:
        passes, probs = drawn_pass(draft, layout, tokens, probs, hurdles)
        nodes, end = _descend(layout, _first(layout, passes))
        rest = _at(probs, end)
    return Verdict(nodes, _at(layout.depths, end), generators.sample(rest))


def ranked_pass(layout: Layout, tokens: Tensor, probs: Tensor, hurdles: Tensor) -> Tensor:
    """[B, N] bool for tokens that were not drawn: q is 1 for each.

    Accepted with p(x); refusing it sets p(x) to 0. Putting the drafter's own probability in
    place of the 1 would not keep the distribution.

    Args:
        layout: of the trees.
        tokens: [B, N] int64.
        probs: [B, N, V] float32, p after each node.
        hurdles: [B, N] uniform.

    Source: SafeAILab/EAGLE `eagle/model/utils.py`, `evaluate_posterior`.
    """
    before = _earlier_siblings(layout)
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    repeated = (before & same).any(-1)
    offered = _offered(layout, tokens, probs).masked_fill(repeated, 0)
    left = 1 - (before.float() @ offered.unsqueeze(2)).squeeze(2)
    return hurdles * left < offered


def drawn_pass(
    draft: Draft, layout: Layout, tokens: Tensor, probs: Tensor, hurdles: Tensor
) -> tuple[Tensor, Tensor]:
    """[B, N] bool for tokens drawn from q, and [B, N, V] what is left of p after the children.

    Accepted with min(1, p(x) / q(x)); refusing it makes p norm(max(0, p - q)), and, if siblings
    are drawn without replacement, q(x) 0 for the next.

    Source: chains, Leviathan et al., arXiv 2211.17192, algorithm 1; distinct siblings,
    Sequoia, arXiv 2402.12374, algorithm 2; independent ones, SpecInfer, arXiv 2305.09781,
    algorithm 2.
    """
    assert draft.probs is not None
    assert isinstance(draft.tree, Tree)
    q = draft.probs
    num_inner = q.shape[1]
    p, leaves = probs[:, :num_inner], probs[:, num_inner:]
    passes = torch.zeros_like(tokens, dtype=torch.bool)
    ranks = _earlier_siblings(layout).sum(-1).expand_as(tokens)
    parents = _rows(layout.parents, tokens)
    inner = torch.arange(num_inner, device=tokens.device)
    there = tokens >= 0
    there[:, 0] = False
    for rank in range(max(map(len, draft.tree.children))):
        # [B, P, N]: which node is the child of that rank; a node has one or none.
        child = (parents.unsqueeze(1) == inner[:, None]) & (there & (ranks == rank)).unsqueeze(1)
        has, node = child.max(-1)
        token = tokens.gather(1, node).clamp_min(0).unsqueeze(2)
        hurdle = hurdles.gather(1, node).unsqueeze(2) * q.gather(2, token)
        passes = passes | (child & (hurdle < p.gather(2, token))).any(1)
        p = torch.where(has.unsqueeze(2), _normed((p - q).clamp_min(0), p), p)
        if draft.siblings is Siblings.distinct:
            left = q.scatter(2, token, 0.0)
            q = torch.where(has.unsqueeze(2), _normed(left, q), q)
    return passes, torch.cat([p, leaves], dim=1)


def _normed(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divided by their sum; rounding can leave nothing although something was refused."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def _typical(layout: Layout, tokens: Tensor, probs: Tensor, rule: Typical) -> tuple[Tensor, Tensor]:
    """[B, N] which nodes are typical, and log p of the path to each."""
    entropy = -(probs * (probs + 1e-5).log()).sum(-1)
    bar = (rule.alpha * (-entropy).exp()).clamp_max(rule.threshold)
    offered = _offered(layout, tokens, probs)
    passes = offered > bar.gather(1, _rows(layout.parents, tokens))
    logs = offered.clamp_min(1e-30).log()
    return passes, (layout.mask.float() @ logs.unsqueeze(2)).squeeze(2)


def _offered(layout: Layout, tokens: Tensor, probs: Tensor) -> Tensor:
    """[B, N] p(x) at each node's parent; 0 where there is no node."""
    places = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    offered = probs[places, _rows(layout.parents, tokens), tokens.clamp_min(0)]
    return offered.masked_fill(tokens < 0, 0)


def _earlier_siblings(layout: Layout) -> Tensor:
    """[B, N, N] bool: row n has the nodes before n under the same parent; the root has none."""
    same = layout.parents.unsqueeze(2) == layout.parents.unsqueeze(1)
    earlier = same & torch.ones_like(same).tril(-1)
    earlier[:, :, 0] = False
    return earlier


def _first(layout: Layout, passes: Tensor) -> Tensor:
    """Of the siblings that pass, the first."""
    beaten = (_earlier_siblings(layout) & passes.unsqueeze(1)).any(-1)
    return passes & ~beaten


def _descend(layout: Layout, passes: Tensor, liking: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The deepest node whose path passes: the nodes of the path [B, D + 1], and the node [B].

    Args:
        layout: of the trees.
        passes: [B, N] bool; the root always does.
        liking: [B, N], decides between nodes equally deep.
    """
    refused = ~passes
    refused[:, 0] = False
    alive = ~(layout.mask & refused.unsqueeze(1)).any(-1)
    depths = layout.depths.expand_as(alive)
    reached = depths.masked_fill(~alive, -1)
    if liking is not None:
        deepest = reached == reached.max(1, keepdim=True).values
        end = liking.masked_fill(~deepest, -torch.inf).argmax(1)
    else:
        end = reached.argmax(1)
    mask = layout.mask.expand(len(alive), -1, -1)
    on_path = mask.gather(1, end[:, None, None].expand(-1, 1, mask.shape[2])).squeeze(1)
    nodes = torch.arange(mask.shape[2], device=mask.device).expand_as(depths)
    path = torch.zeros_like(depths).scatter_add(1, depths, nodes * on_path)
    return path, end


def _without_children(layout: Layout, tokens: Tensor, probs: Tensor, end: Tensor) -> Tensor:
    """[B, V] p at node `end` without the tokens of its children, which were refused."""
    refused = (_rows(layout.parents, tokens) == end.unsqueeze(1)) & (tokens >= 0)
    refused[:, 0] = False
    kept = torch.ones_like(probs).scatter_reduce(
        1, tokens.clamp_min(0), (~refused).to(probs.dtype), "amin"
    )
    rest = probs * kept
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)


def _rows(shared: Tensor, like: Tensor) -> Tensor:
    return shared.expand_as(like)


def _at(values: Tensor, node: Tensor) -> Tensor:
    """[B, ...] the values of [B or 1, N, ...] at node [B]."""
    return values.expand(len(node), *values.shape[1:])[
        torch.arange(len(node), device=node.device), node
    ]
