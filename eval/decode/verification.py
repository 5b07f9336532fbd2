"""One pass of the target over draft trees, and the rules that accept a path of each tree.

Acceptance is greedy, or by sampling that keeps the target's distribution. A rule decides on every
node of every tree at once, as if the walk from the root had reached the node: is the node accepted,
given that its parent was accepted and its earlier siblings were rejected? The walk down and the
bonus token are then the same for all rules. The bonus token is sampled from the rest of the
target's distribution at the node where the walk ends.

Letters: B texts, N tree nodes (root included), P nodes with children, D hidden size in states and
depth in paths, V vocab; p the target's distribution, q the drafter's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, CommittedTokens, Draft, TreeLayout
from heads.decoding.sampling import Generators, Sampling, Typical
from heads.decoding.tree import Tree
from heads.target_model.model import FeatureLayers, Target, TargetOutput, prefill_last_states


class ContextLimits:
    """Lengths from which a target reads texts with other frequencies, or not at all.

    Up to the switch a text uses the short frequencies of LongRoPE, above it the long ones for all
    tokens, so its keys are then recomputed, as in transformers' `generate`. A draft is not accepted
    across the switch, as its later tokens were read with the wrong frequencies.

    Args:
        target: target that reads the texts.
        prompts: token ids of each prompt.
    """

    def __init__(self, target: Target, prompts: Sequence[list[int]]) -> None:
        self.target, self.window = target, target.max_positions
        self.switch = switch = target.long_rope.switch
        self.long = {n for n, ids in enumerate(prompts) if switch is not None and len(ids) > switch}

    def recompute_long_keys(
        self, cache: TreeCache, numbers: list[int], texts: list[list[int]]
    ) -> None:
        """Recompute the keys of texts that are long from now on.

        Args:
            cache: cache of the running texts.
            numbers: index of the text in each row.
            texts: all tokens of each text, prompt and root included.
        """
        if self.switch is None:
            return
        for row, (number, length) in enumerate(zip(numbers, cache.slots.lengths, strict=True)):
            if length >= self.switch and number not in self.long:
                self.long.add(number)
                recomputed = self.target.new_cache(1)
                prefill_last_states(self.target, recomputed, [texts[row][: length + 1]])
                cache.overwrite_row(row, recomputed)

    def mask_beyond_limits(self, tokens: Tensor, depths: Tensor, cache: TreeCache) -> Tensor:
        """Replace tokens [B, N] of trees beyond the window or a short text's switch by PAD.

        Args:
            tokens: [B, N] int64.
            depths: [B or 1, N] int64.
            cache: cache of the texts.
        """
        committed = cache.slots.committed
        positions = committed + depths
        if self.window is not None:
            tokens = tokens.masked_fill(positions >= self.window, PAD)
        if self.switch is None:
            return tokens
        beyond = (committed < self.switch) & (positions >= self.switch)
        return tokens.masked_fill(beyond, PAD)


@dataclass(frozen=True)
class TreeOutputs:
    """Draft trees that the target has read.

    Attributes:
        layout: layout of the trees.
        tokens: [B, N] int64 tokens, roots included; PAD for missing nodes.
        output: hidden states [B, N, D] of the target.
        logits: [B, N, V].
    """

    layout: TreeLayout
    tokens: Tensor
    output: TargetOutput
    logits: Tensor


def run_verify_pass(
    limits: ContextLimits, draft: Draft, roots: Tensor, cache: TreeCache, taps: FeatureLayers
) -> TreeOutputs:
    """Run the target once over all trees.

    Args:
        limits: limits of the batch.
        draft: draft trees.
        roots: [B] int64 root token of each tree.
        cache: cache of the texts.
        taps: hidden states that the drafter needs.
    """
    layout, target = draft.build_layout(), limits.target
    tokens = torch.cat([roots.unsqueeze(1), draft.tokens], dim=1)
    tokens = limits.mask_beyond_limits(tokens, layout.depths, cache)
    mask = None if draft.is_chain else layout.mask
    output = target.run_pending(cache, tokens.clamp_min(0), mask, layout.depths, taps)
    return TreeOutputs(layout, tokens, output, target.compute_logits(output.hidden_states))


@dataclass(frozen=True)
class AcceptedPaths:
    """Accepted path of each tree.

    Attributes:
        outputs: the trees, as the target has read them.
        nodes: [B, N] int64 accepted node of each depth, root first; padded with the root.
        tokens: [B, N] int64 tokens of these nodes.
        num_accepted: [B] int64 number of accepted draft tokens.
        bonus: [B] int64 token after the accepted draft tokens.
    """

    outputs: TreeOutputs
    nodes: Tensor
    tokens: Tensor
    num_accepted: Tensor
    bonus: Tensor

    @property
    def counts(self) -> Tensor:
        """Count the accepted nodes, root included: [B] int64."""
        return self.num_accepted + 1

    def pack_for_host(self, draft: Draft) -> Tensor:
        """Pack what the host reads, see `HostStep.from_records`: [B, 3 + 2 N] int64."""
        num_drafted = (draft.tokens != PAD).sum(1)
        numbers = torch.stack([self.num_accepted, self.bonus, num_drafted], dim=1)
        return torch.cat([numbers, self.nodes, self.tokens], dim=1)

    def build_committed_tokens(
        self, steps: "Sequence[HostStep]", cache: TreeCache
    ) -> CommittedTokens:
        """Build the committed tokens that drafters observe, once the host knows the steps."""
        paths = [step.path for step in steps]
        longest = max(map(len, paths))
        path = self.nodes[:, :longest]
        return CommittedTokens(
            token_ids=[step.tokens for step in steps],
            output=self.outputs.output.select_tokens(path),
            cache=cache,
            logits=self.outputs.logits,
            on_device=(self.tokens[:, :longest], self.counts),
            paths=paths,
            nodes=path,
        )


class HostStep(NamedTuple):
    """Accepted path of one text, on the host.

    Attributes:
        path: accepted nodes, root first.
        tokens: tokens of the accepted nodes.
        bonus: token after the accepted nodes.
        num_drafted: number of draft tokens verified.
    """

    path: list[int]
    tokens: list[int]
    bonus: int
    num_drafted: int

    @classmethod
    def from_records(cls, records: list[list[int]]) -> "list[HostStep]":
        """Read the rows that `AcceptedPaths.pack_for_host` packed."""
        steps = []
        for num_accepted, bonus, num_drafted, *rest in records:
            length, width = num_accepted + 1, len(rest) // 2
            steps.append(cls(rest[:length], rest[width : width + length], bonus, num_drafted))
        return steps


def accept_paths(
    draft: Draft, outputs: TreeOutputs, sampling: Sampling, generators: Generators
) -> AcceptedPaths:
    """Find the accepted path and the bonus token of each tree, without waiting for the device.

    Args:
        draft: draft trees of all texts.
        outputs: the trees, as the target has read them.
        sampling: how the target chooses.
        generators: random generators of the texts, for sampling.
    """
    layout, tokens, logits = outputs.layout, outputs.tokens, outputs.logits
    if sampling.is_greedy:
        choices = logits.argmax(-1)
        if tokens.shape[1] == 1:
            root = torch.zeros_like(tokens)
            return AcceptedPaths(outputs, root, tokens, root[:, 0], choices[:, 0])
        passes = choices.gather(1, layout.parents.expand_as(tokens)) == tokens
        nodes, end = _find_deepest_path(layout, _select_first_siblings(layout, passes))
        bonus = _select_node_values(choices, end)
    else:
        probs = sampling.compute_probabilities(logits)
        if sampling.typical is not None:
            passes, scores = accept_typical(layout, tokens, probs, sampling.typical)
            nodes, end = _find_deepest_path(layout, passes, scores)
            rest = _select_node_values(probs, end)
        else:
            uniforms = generators.draw_uniform(tokens.shape[1])
            if draft.draft_probs is None:
                passes = accept_ranked(layout, tokens, probs, uniforms)
            else:
                passes, probs = accept_sampled(draft, layout, tokens, probs, uniforms)
            nodes, end = _find_deepest_path(layout, _select_first_siblings(layout, passes))
            rest = _select_node_values(probs, end)
            if draft.draft_probs is None:
                rest = _remove_children(layout, tokens, rest, end)
        bonus = generators.sample_indices(rest)
    num_accepted = _select_node_values(layout.depths, end)
    return AcceptedPaths(outputs, nodes, tokens.gather(1, nodes), num_accepted, bonus)


def accept_ranked(layout: TreeLayout, tokens: Tensor, probs: Tensor, uniforms: Tensor) -> Tensor:
    """Accept tokens that were not sampled, so that q is 1 for each token: [B, N] bool.

    A token x is accepted with probability p(x); rejecting it sets p(x) to 0. Using the drafter's
    own probability instead of 1 would change the distribution.

    Args:
        layout: layout of the trees.
        tokens: [B, N] int64.
        probs: [B, N, V] float32 p after each node.
        uniforms: [B, N] uniform random numbers.

    Source: SafeAILab/EAGLE `eagle/model/utils.py`, `evaluate_posterior`.
    """
    before = _mark_earlier_siblings(layout)
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    repeated = (before & same).any(-1)
    p = _look_up_token_probs(layout, tokens, probs).masked_fill(repeated, 0)
    left = 1 - (before.float() @ p.unsqueeze(2)).squeeze(2)
    return uniforms * left < p


def accept_sampled(
    draft: Draft, layout: TreeLayout, tokens: Tensor, probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept tokens sampled from q: [B, N] bool, and the rest of p after the children, [B, N, V].

    A token x is accepted with probability min(1, p(x) / q(x)). Rejecting it replaces p by
    norm(max(0, p - q)) and sets q(x) to 0 for the next sibling, as siblings are sampled without
    replacement.

    Source: chains, Leviathan et al., arXiv 2211.17192, algorithm 1; trees, Sequoia, arXiv
        2402.12374, algorithm 2.
    """
    assert draft.draft_probs is not None
    assert isinstance(draft.tree, Tree)
    q = draft.draft_probs
    num_inner = q.shape[1]
    p, leaves = probs[:, :num_inner], probs[:, num_inner:]
    passes = torch.zeros_like(tokens, dtype=torch.bool)
    ranks = _mark_earlier_siblings(layout).sum(-1).expand_as(tokens)
    parents = layout.parents.expand_as(tokens)
    inner = torch.arange(num_inner, device=tokens.device)
    exists = tokens >= 0
    exists[:, 0] = False
    for rank in range(max(map(len, draft.tree.children))):
        # [B, P, N]: the child of this rank; each node has at most one.
        child = (parents.unsqueeze(1) == inner[:, None]) & (exists & (ranks == rank)).unsqueeze(1)
        has, node = child.max(-1)
        token = tokens.gather(1, node).clamp_min(0).unsqueeze(2)
        threshold = uniforms.gather(1, node).unsqueeze(2) * q.gather(2, token)
        passes = passes | (child & (threshold < p.gather(2, token))).any(1)
        p = torch.where(has.unsqueeze(2), _normalise_weights((p - q).clamp_min(0), p), p)
        q = torch.where(has.unsqueeze(2), _normalise_weights(q.scatter(2, token, 0.0), q), q)
    return passes, torch.cat([p, leaves], dim=1)


def accept_typical(
    layout: TreeLayout, tokens: Tensor, probs: Tensor, rule: Typical
) -> tuple[Tensor, Tensor]:
    """Accept typical nodes: [B, N] bool, and log p of the path to each node, [B, N]."""
    entropy = -(probs * (probs + 1e-5).log()).sum(-1)
    threshold = (rule.alpha * (-entropy).exp()).clamp_max(rule.threshold)
    p = _look_up_token_probs(layout, tokens, probs)
    passes = p > threshold.gather(1, layout.parents.expand_as(tokens))
    logs = p.clamp_min(1e-30).log()
    return passes, (layout.mask.float() @ logs.unsqueeze(2)).squeeze(2)


def _normalise_weights(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divide weights by their sum; take `otherwise` where rounding leaves nothing."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def _look_up_token_probs(layout: TreeLayout, tokens: Tensor, probs: Tensor) -> Tensor:
    """Look up p(x) of each node's token at its parent: [B, N]; 0 for missing nodes."""
    places = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    p = probs[places, layout.parents.expand_as(tokens), tokens.clamp_min(0)]
    return p.masked_fill(tokens < 0, 0)


def _mark_earlier_siblings(layout: TreeLayout) -> Tensor:
    """Mark in row n of [B, N, N] bool the earlier nodes with n's parent; the root has none."""
    same = layout.parents.unsqueeze(2) == layout.parents.unsqueeze(1)
    earlier = same & torch.ones_like(same).tril(-1)
    earlier[:, :, 0] = False
    return earlier


def _select_first_siblings(layout: TreeLayout, passes: Tensor) -> Tensor:
    """Mark the first sibling that passes under each parent: [B, N] bool."""
    later = (_mark_earlier_siblings(layout) & passes.unsqueeze(1)).any(-1)
    return passes & ~later


def _find_deepest_path(
    layout: TreeLayout, passes: Tensor, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find the deepest node whose path passes: the path's nodes [B, D + 1], and the node [B].

    Args:
        layout: layout of the trees.
        passes: [B, N] bool; always True for the root.
        scores: [B, N] scores that decide between equally deep nodes.
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


def _remove_children(layout: TreeLayout, tokens: Tensor, probs: Tensor, end: Tensor) -> Tensor:
    """Remove the rejected tokens of node `end`'s children from p there: [B, V]."""
    rejected = (layout.parents.expand_as(tokens) == end.unsqueeze(1)) & (tokens >= 0)
    rejected[:, 0] = False
    remaining = torch.ones_like(probs).scatter_reduce(
        1, tokens.clamp_min(0), (~rejected).to(probs.dtype), "amin"
    )
    rest = probs * remaining
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)


def _select_node_values(values: Tensor, node: Tensor) -> Tensor:
    """Select the values [B, ...] of [B or 1, N, ...] at node [B]."""
    return values.expand(len(node), *values.shape[1:])[
        torch.arange(len(node), device=node.device), node
    ]
