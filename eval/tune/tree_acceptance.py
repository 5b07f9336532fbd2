"""Acceptance of any draft tree on some texts, and the best static trees for them.

The value of a node is the share of positions in the target's own text at which the whole path to
the node is right. The expected accepted draft tokens of a tree are the sum of its nodes' values,
and a child never exceeds its parent.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from eval.decode.engine import NoDraft, Step, decode
from eval.measure.prompts import Prompt
from eval.measure.replay import build_steps, rank_candidates, replay_tree
from eval.measure.target_answers import generate_greedy_answers
from heads.decoding.drafting import CommittedTokens, Draft, FeatureDrafter, Roots
from heads.decoding.tree import DynamicShape, Tree
from heads.draft_head import DraftHead
from heads.target_model.model import Target

WIDTH = 10
"""Candidates per depth that a static tree may use."""
Path = tuple[int, ...]


def build_widest_tree(depth: int) -> Tree:
    """Build a tree that needs all candidates down to a depth."""
    return Tree.from_paths([[0] * d + [rank] for d in range(depth) for rank in range(WIDTH)])


@dataclass(frozen=True)
class StaticTreeReplay:
    """The target's own texts, with candidates of a head whose drafts depend only on the text.

    Attributes:
        responses: [n] tokens of each text.
        ranked: per text, [n][depth][width] candidates, see `eval.measure.replay.rank_candidates`.
    """

    responses: list[list[int]]
    ranked: list[list[list[list[int]]]]

    @classmethod
    def from_prompts(
        cls,
        target: Target,
        head: DraftHead,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        tree: Tree,
    ) -> "StaticTreeReplay":
        """Answer prompts with the target, and rank candidates for a tree along the answers."""
        token_ids = [prompt.token_ids for prompt in prompts]
        responses, ranked = generate_greedy_answers(target, token_ids, max_new_tokens), []
        for prompt, response in zip(prompts, responses, strict=True):
            output = target.encode_response(prompt.token_ids, response, head.taps)
            ranked.append(rank_candidates(head, tree, output, prompt.token_ids, response))
        return cls(responses, ranked)

    def replay_shape(self, tree: Tree) -> list[list[Step]]:
        """Replay, exactly, the verify passes that decoding each text with a tree would take."""
        return [
            replay_tree(tree, ranked, response)
            for ranked, response in zip(self.ranked, self.responses, strict=True)
        ]


def compute_node_values(texts: StaticTreeReplay) -> dict[Path, float]:
    """Compute the value of every path of candidate ranks that was right at least once."""
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


def build_best_trees(values: dict[Path, float], depth: int, max_nodes: int) -> list[Tree]:
    """Build the best tree of every size up to `max_nodes` draft tokens, at most `depth` deep.

    Values are known per node and never rise along a path. The best tree of m + 1 nodes is therefore
    that of m with the best remaining node, whose parent is in it. (Sequoia, arXiv 2402.12374,
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
    """Tree that an EAGLE head drew at a position of a text, as far as the text followed it.

    Whatever its limits, a dynamic tree keeps the likeliest nodes up to its depth.

    Attributes:
        ahead: for each depth limit d (at index d - 1) and each node of the text's path down to
            depth d, the number of nodes of depth d or less that the head ranks before this node. A
            tree of `num_tokens` draft tokens holds the node if that number is below `num_tokens`.
    """

    ahead: list[list[int]]

    @classmethod
    def from_expanded_tree(
        cls, tokens: list[int], scores: list[float], parents: list[int], future: list[int]
    ) -> "DrawnTree":
        """Follow a text from a position on through a tree of `FeatureDrafter.expand_trees`."""
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
        # Nodes of equal score keep their drawing order.
        order = np.argsort(-np.array(scores), kind="stable") + 1
        levels = np.array(depths)[order]
        places = [int(np.flatnonzero(order == node)[0]) for node in path]
        limits = range(1, max(depths) + 1)
        return cls([[int((levels[:place] <= d).sum()) for place in places[:d]] for d in limits])

    def count_accepted(self, depth: int, num_tokens: int) -> int:
        """Count the accepted draft tokens of the tree under these limits."""
        return sum(ahead < num_tokens for ahead in self.ahead[depth - 1])


class TreeRecorder(NoDraft):
    """Draws trees at every token of one text, the target's own, and proposes nothing."""

    num_static_nodes = None

    def __init__(self, drafters: Sequence[FeatureDrafter]) -> None:
        self.drafters, self.taps = drafters, drafters[0].taps
        self.drawn: list[list[tuple[list[int], list[float], list[int]]]] = [[] for _ in drafters]

    def observe(self, seen: CommittedTokens) -> None:
        """Let all drafters observe the committed tokens."""
        for drafter in self.drafters:
            drafter.observe(seen)

    def propose(self, roots: Roots) -> Draft:
        """Record the drawn trees, and propose nothing."""
        for drafter, drawn in zip(self.drafters, self.drawn, strict=True):
            tokens, scores, parents = drafter.expand_trees(roots)
            drawn.append((tokens[0].tolist(), scores[0].tolist(), parents[0].tolist()))
        return super().propose(roots)


@dataclass(frozen=True)
class DynamicTreeReplay:
    """The target's own texts, with a head's dynamic trees at each of their tokens.

    Attributes:
        responses: [n] tokens per text.
        drawn: drawn trees by depth and top-k, [n - 1] per text.
        has_nested_trees: whether shallower trees are the tops of deeper ones.
    """

    responses: list[list[int]]
    drawn: dict[tuple[int, int], list[list[DrawnTree]]]
    has_nested_trees: bool

    @classmethod
    @torch.no_grad()
    def from_prompts(
        cls,
        target: Target,
        make: Callable[[DynamicShape], FeatureDrafter],
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        depth: int,
        top_ks: Sequence[int],
    ) -> "DynamicTreeReplay":
        """Answer prompts with the target, and draw trees up to `depth` with `make`'s drafters."""
        nested = make(DynamicShape(1, 1, 1)).has_nested_trees
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
                        DrawnTree.from_expanded_tree(*tree, text[place : place + limit[0]])
                        for place, tree in enumerate(trees, start=1)
                    ]
                )
        return cls(responses, drawn, nested)

    @property
    def depth(self) -> int:
        """Return the depth of the deepest trees."""
        return max(depth for depth, _ in self.drawn)

    @property
    def top_ks(self) -> list[int]:
        """List the drawn values of top-k, rising."""
        return sorted({top_k for _, top_k in self.drawn})

    def replay_shape(self, shape: DynamicShape) -> list[list[Step]]:
        """Replay, exactly, the verify passes that decoding each text with a shape would take."""
        drawn = self.drawn[self.depth if self.has_nested_trees else shape.depth, shape.top_k]
        return [
            build_steps(
                [tree.count_accepted(shape.depth, shape.num_tokens) for tree in places],
                len(response),
            )
            for places, response in zip(drawn, self.responses, strict=True)
        ]
