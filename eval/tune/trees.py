"""Acceptance of any draft shape on some texts, and the best static trees for them.

A node's value is the share of places of the target's own text at which the whole path to it
holds what the target wrote. The expected number of accepted draft tokens of a tree is the sum
of the values of its nodes, and a child is never worth more than its parent.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from eval.decode.engine import NoDraft, Step, decode
from eval.measure.answers import greedy_answers
from eval.measure.prompts import Prompt
from eval.measure.replay import Replayable, ranked_drafts, steps_along, verify_steps
from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.dynamic_trees import DynamicDrafter
from heads.decoding.tree import DynamicShape, Tree
from heads.target_model.model import Target

WIDTH = 10
"""Candidates per depth that a static tree may use."""
Path = tuple[int, ...]


def widest(depth: int) -> Tree:
    """A tree that asks a head for all candidates of so many depths."""
    return Tree.from_paths([[0] * d + [rank] for d in range(depth) for rank in range(WIDTH)])


@dataclass(frozen=True)
class StaticTexts:
    """The target's own texts, with the candidates of a head whose drafts depend on them alone.

    Attributes:
        responses: [n] tokens per text.
        ranked: per text, [n][depth][width] candidates, see `eval.measure.replay.ranked_drafts`.
    """

    responses: list[list[int]]
    ranked: list[list[list[list[int]]]]

    @classmethod
    def read(
        cls,
        target: Target,
        head: Replayable,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        tree: Tree,
    ) -> "StaticTexts":
        """Texts after some prompts, and candidates enough for a tree."""
        asked = [prompt.token_ids for prompt in prompts]
        responses, ranked = greedy_answers(target, asked, max_new_tokens), []
        for prompt, response in zip(prompts, responses, strict=True):
            output = target.read_response(prompt.token_ids, response, head.taps)
            ranked.append(ranked_drafts(head, tree, output, prompt.token_ids, response))
        return cls(responses, ranked)

    def steps(self, tree: Tree) -> list[list[Step]]:
        """The verify passes that decoding each text with a tree would take, exactly."""
        return [
            steps_along(tree, ranked, response)
            for ranked, response in zip(self.ranked, self.responses, strict=True)
        ]


def node_values(texts: StaticTexts) -> dict[Path, float]:
    """Value per path of candidate ranks, for every path that was right at least once."""
    counts: Counter[Path] = Counter()
    num_places = 0
    for ranked, response in zip(texts.ranked, texts.responses, strict=True):
        num_places += len(response) - 1
        for place, levels in enumerate(ranked[:-1]):
            path: Path = ()
            for candidates, token in zip(levels, response[place + 1 :], strict=False):
                if token not in candidates:
                    break
                path = (*path, candidates.index(token))
                counts[path] += 1
    return {path: count / num_places for path, count in counts.items()}


def best_trees(values: dict[Path, float], depth: int, max_nodes: int) -> list[Tree]:
    """The best tree of every size up to `max_nodes` draft tokens, no deeper than `depth`.

    As values are known per node and never rise along a path, the best tree of m + 1 nodes is
    that of m with the best node left, whose parent is in it. (Sequoia, arXiv 2402.12374,
    section 4.1, knows one acceptance rate per rank only and needs dynamic programming.)
    """
    order = sorted(
        (path for path in values if len(path) <= depth),
        key=lambda path: (-values[path], len(path), path),
    )
    paths = [list(path) for path in order[:max_nodes]]
    return [Tree.from_paths(paths[:size]) for size in range(1, len(paths) + 1)]


@dataclass(frozen=True)
class DrawnTree:
    """A tree that an EAGLE head drew from a place of a text, as far as the text followed it.

    Whatever limits a dynamic tree has, it keeps the likeliest of the nodes above its depth.

    Attributes:
        ahead: [depth limit - 1][node of the path that the text took] nodes within the depth
            limit that are kept before this one.
    """

    ahead: list[list[int]]

    @classmethod
    def of(
        cls, tokens: list[int], scores: list[float], parents: list[int], future: list[int]
    ) -> "DrawnTree":
        """Follows a text from a place on in what `EagleTree.expand` drew there."""
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        by_token = {edge: n for n, edge in enumerate(zip(parents, tokens, strict=True), start=1)}
        path, node = [], 0
        for token in future:
            node = by_token.get((node, token), -1)
            if node < 0:
                break
            path.append(node)
        # Nodes equal in score stand in the order in which they were drawn.
        order = np.argsort(-np.array(scores), kind="stable") + 1
        levels = np.array(depths)[order]
        places = [int(np.flatnonzero(order == node)[0]) for node in path]
        limits = range(1, max(depths) + 1)
        return cls([[int((levels[:place] <= d).sum()) for place in places[:d]] for d in limits])

    def accepted(self, depth: int, num_tokens: int) -> int:
        """Draft tokens kept of the tree that such limits would have made of it."""
        return sum(ahead < num_tokens for ahead in self.ahead[depth - 1])


class TreeRecorder:
    """Draws trees at every token of the target's own text, and proposes nothing."""

    static_nodes = None

    def __init__(self, drafters: Sequence[DynamicDrafter]) -> None:
        self.drafters, self.plain, self.taps = drafters, NoDraft(), drafters[0].taps
        self.drawn: list[list[tuple[list[int], list[float], list[int]]]] = [[] for _ in drafters]

    def observe(self, seen: Committed) -> None:
        """All remember."""
        for drafter in self.drafters:
            drafter.observe(seen)
        self.plain.observe(seen)

    def propose(self, roots: Roots) -> Draft:
        """Keeps what was drawn."""
        for drafter, drawn in zip(self.drafters, self.drawn, strict=True):
            tokens, scores, parents = drafter.expand(roots)
            drawn.append((tokens[0].tolist(), scores[0].tolist(), parents[0].tolist()))
        return self.plain.propose(roots)

    def keep(self, rows: list[int]) -> None:
        """One text, whose end is the end."""
        for drafter in self.drafters:
            drafter.keep(rows)

    def take(self, row: int, other: "TreeRecorder") -> None:
        """Nobody waits for its place."""
        for mine, theirs in zip(self.drafters, other.drafters, strict=True):
            mine.take(row, theirs)


@dataclass(frozen=True)
class DynamicTexts:
    """The target's own texts, with what a head's dynamic trees draw from each of their tokens.

    Attributes:
        responses: [n] tokens per text.
        drawn: by depth and top-k, per text, [n - 1].
        nested: whether shallower trees are the tops of those drawn.
    """

    responses: list[list[int]]
    drawn: dict[tuple[int, int], list[list[DrawnTree]]]
    nested: bool

    @classmethod
    @torch.no_grad()
    def read(
        cls,
        target: Target,
        make: Callable[[DynamicShape], DynamicDrafter],
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        depth: int,
        top_ks: Sequence[int],
    ) -> "DynamicTexts":
        """Texts after some prompts, drawn from as deep as `depth` by drafters that `make` makes."""
        nested = make(DynamicShape(1, 1, 1)).nested
        depths = [depth] if nested else range(1, depth + 1)
        limits = [(deep, top_k) for top_k in top_ks for deep in depths]
        drawn: dict[tuple[int, int], list[list[DrawnTree]]] = {limit: [] for limit in limits}
        responses = []
        for prompt in tqdm(prompts, desc="drafts", unit="prompt"):
            recorder = TreeRecorder([make(DynamicShape(*limit, 1)) for limit in limits])
            text = decode(target, recorder, prompt.token_ids, max_new_tokens).token_ids
            responses.append(text)
            for limit, trees in zip(limits, recorder.drawn, strict=True):
                drawn[limit].append(
                    [
                        DrawnTree.of(*tree, text[place : place + limit[0]])
                        for place, tree in enumerate(trees, start=1)
                    ]
                )
        return cls(responses, drawn, nested)

    @property
    def depth(self) -> int:
        """Depth of the deepest trees."""
        return max(depth for depth, _ in self.drawn)

    @property
    def top_ks(self) -> list[int]:
        """Every top-k that was drawn with, rising."""
        return sorted({top_k for _, top_k in self.drawn})

    def steps(self, shape: DynamicShape) -> list[list[Step]]:
        """The verify passes that decoding each text with a shape would take, exactly."""
        drawn = self.drawn[self.depth if self.nested else shape.depth, shape.top_k]
        return [
            verify_steps(
                [tree.accepted(shape.depth, shape.num_tokens) for tree in places], len(response)
            )
            for places, response in zip(drawn, self.responses, strict=True)
        ]
