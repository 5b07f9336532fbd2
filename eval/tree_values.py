"""How often each node of a big tree would have been right, and the best trees made of them.

A node's value is the share of places of the target's own text at which the whole path to it
holds what the target wrote. The expected number of accepted draft tokens of a tree is the sum
of the values of its nodes, and a child is never worth more than its parent.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eval.draft import Draft
from eval.eagle import DynamicShape, EagleTree
from eval.engine import NoDraft, Seen, Step, decode
from eval.replay import accepted_lengths, walk
from heads.eagle import EagleHead
from heads.target import Target
from heads.tree import Tree

Path = tuple[int, ...]


def node_values(
    ranked: Sequence[Sequence[list[list[int]]]], responses: Sequence[list[int]]
) -> dict[Path, float]:
    """Value per path of candidate ranks, for every path that was right at least once.

    Args:
        ranked: per text, [n][depth][width] candidates at each response token, as
            `eval.replay.ranked_drafts` gives.
        responses: per text, its n tokens.
    """
    counts: Counter[Path] = Counter()
    num_places = 0
    for each, response in zip(ranked, responses, strict=True):
        num_places += len(response) - 1
        for place in range(len(response) - 1):
            path: Path = ()
            future = response[place + 1 : place + 1 + len(each[place])]
            for candidates, token in zip(each[place], future, strict=False):
                if token not in candidates:
                    break
                path = (*path, candidates.index(token))
                counts[path] += 1
    return {path: count / num_places for path, count in counts.items()}


def best_trees(values: dict[Path, float], depth: int, max_nodes: int) -> list[Tree]:
    """The best tree of every size up to `max_nodes` draft tokens, no deeper than `depth`.

    Dynamic programming over sizes: as values are known per node and never rise along a path,
    the best tree of m + 1 nodes is that of m and the best node left, whose parent is in it.
    Sequoia (arXiv 2402.12374, section 4.1) knows one acceptance rate per rank only and has to
    search over subtrees.
    """
    order = sorted(
        (path for path in values if len(path) <= depth),
        key=lambda path: (-values[path], len(path), path),
    )
    # A rank that was never right may stand between others: a tree asks for ranks, not for gaps.
    chosen: list[list[int]] = []
    trees = []
    for path in order[:max_nodes]:
        chosen.append(list(path))
        trees.append(Tree.from_paths(chosen))
    return trees


def static_steps(
    tree: Tree, ranked: Sequence[Sequence[list[list[int]]]], responses: Sequence[list[int]]
) -> list[list[Step]]:
    """The verify passes that decoding each text with a tree would take, exactly."""
    return [
        walk(accepted_lengths(tree, list(each), response), len(response))
        for each, response in zip(ranked, responses, strict=True)
    ]


@dataclass(frozen=True)
class Drawn:
    """All that an EAGLE head drew from one place of a text, level by level.

    Attributes:
        tokens, scores, parents: [M]; parents are counted from 1, 0 is the root.
        depths: [M], from 1.
    """

    tokens: list[int]
    scores: list[float]
    parents: list[int]
    depths: list[int]

    def accepted(self, future: Sequence[int], depth: int, num_tokens: int) -> int:
        """Draft tokens kept of the tree that such limits would have made of it."""
        inside = [node for node, level in enumerate(self.depths) if level <= depth]
        inside.sort(key=lambda node: -self.scores[node])
        kept = set(inside[:num_tokens])
        parent, length = 0, 0
        while length < len(future):
            child = next(
                (
                    node
                    for node in kept
                    if self.parents[node] == parent and self.tokens[node] == future[length]
                ),
                None,
            )
            if child is None:
                break
            parent, length = child + 1, length + 1
        return length


class _Recorder(EagleTree):
    """Draws trees at every token of the target's own text, and drafts nothing."""

    def __init__(self, head: EagleHead, shape: DynamicShape) -> None:
        super().__init__(head, shape)
        self.plain = NoDraft()
        self.drawn: list[Drawn] = []

    def observe(self, seen: Seen) -> None:
        """Both remember."""
        super().observe(seen)
        self.plain.observe(seen)

    def propose(self, roots: list[int]) -> Draft:
        """Draws, keeps what was drawn, proposes nothing."""
        tokens, scores, parents = self.expand(roots)
        depths: list[int] = []
        for parent in parents[0].tolist():
            depths.append(1 if parent == 0 else depths[parent - 1] + 1)
        self.drawn.append(
            Drawn(tokens[0].tolist(), scores[0].tolist(), parents[0].tolist(), depths)
        )
        return self.plain.propose(roots)


@torch.no_grad()
def draw_everywhere(
    target: Target,
    head: EagleHead,
    prompt_ids: list[int],
    max_new_tokens: int,
    depth: int,
    top_k: int,
) -> tuple[list[Drawn], list[int]]:
    """What a head draws from every token of the target's greedy text, and the text."""
    recorder = _Recorder(head, DynamicShape(depth, top_k, 1))
    response = decode(target, recorder, prompt_ids, max_new_tokens).token_ids
    return recorder.drawn, response


def dynamic_steps(
    drawn: list[Drawn], response: list[int], depth: int, num_tokens: int
) -> list[Step]:
    """The verify passes that decoding a text with such limits would take, exactly."""
    accepted = [
        each.accepted(response[place + 1 :], depth, num_tokens) for place, each in enumerate(drawn)
    ]
    return walk(accepted, len(response))
