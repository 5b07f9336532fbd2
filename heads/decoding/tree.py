"""Draft trees: static trees, and limits of dynamic ones.

Source: Medusa, arXiv 2401.10774, section 2.1.2 and figure 2. Letters: N nodes with the root.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from conf.errors import InputError


@dataclass(frozen=True)
class Tree:
    """Nodes in breadth-first order. Node 0 is the root, the last known token.

    Example: paths [[0], [1], [0, 0]] give parents (-1, 0, 0, 1) and ranks (-1, 0, 1, 0).

    Attributes:
        parents: parent index per node, -1 for the root.
        ranks: rank of a node's token among the head's candidates, 0 the best; -1 for the root.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: list[list[int]]) -> "Tree":
        """Make a tree from paths of candidate ranks, with every prefix of a path.

        Raises:
            InputError: a path is empty or repeated, has a negative rank, or lacks its prefix.
        """
        order = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [-1]
        for path in order:
            if not path or min(path) < 0 or path in nodes or path[:-1] not in nodes:
                raise InputError(
                    f"tree: path {list(path)} is empty, negative, repeated or without its prefix "
                    f"{list(path[:-1])}; type paths like [[0],[1],[0,0]]"
                )
            nodes[path] = len(nodes)
            parents.append(nodes[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def make_chain(cls, depth: int) -> "Tree":
        """Make a chain of `depth` tokens: a tree of width one with the best candidates."""
        return cls.from_paths([[0] * length for length in range(1, depth + 1)])

    @classmethod
    def from_accuracies(cls, accuracy: list[list[float]], num_nodes: int) -> "Tree":
        """Make the tree of the `num_nodes` likeliest accepted paths, root not counted.

        Args:
            accuracy: [K][R] probability that head k's candidate of rank r is right, falling in r.
            num_nodes: draft tokens of the tree.

        Source: FasterDecoding/Medusa `gen_results.py`, `explore_graph`; here by best-first search,
            which is exact as the product falls along every path.
        """
        heap: list[tuple[float, tuple[int, ...]]] = [(-accuracy[0][0], (0,))]
        paths: list[list[int]] = []
        while heap and len(paths) < num_nodes:
            value, path = heapq.heappop(heap)
            paths.append(list(path))
            level = accuracy[len(path) - 1]
            if path[-1] + 1 < len(level) and level[path[-1]] > 0:
                sibling = value / level[path[-1]] * level[path[-1] + 1]
                heapq.heappush(heap, (sibling, (*path[:-1], path[-1] + 1)))
            if len(path) < len(accuracy):
                heapq.heappush(heap, (value * accuracy[len(path)][0], (*path, 0)))
        return cls.from_paths(paths)

    def down_to(self, depth: int) -> "Tree":
        """Return the tree of the nodes up to `depth`."""
        num_nodes = sum(node_depth <= depth for node_depth in self.depths)
        return Tree(self.parents[:num_nodes], self.ranks[:num_nodes])

    @property
    def num_nodes(self) -> int:
        """Return the number N of nodes, root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Return the depth of the deepest node."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """Return the candidates needed per head: 1 + the largest rank."""
        return 1 + max(self.ranks)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Return the child indices of each node, best rank first."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    def build_mask(self) -> Tensor:
        """Build a mask [N, N] bool on the CPU: a node sees itself and its ancestors."""
        # In torch every row would launch a kernel.
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return torch.from_numpy(mask)


def make_static_tree(num_heads: int, num_nodes: int) -> Tree:
    """Make a tree for heads with unknown accuracies.

    Accuracies fall by rank and by head as published for Vicuna-7B (FasterDecoding/Medusa,
    `assets/medusa_acc.csv`: top-1 .56, .32, .20, .15, .12).
    """
    top1 = [0.56, 0.32, 0.20, 0.15, 0.12]
    ranks = [1.0, 0.22, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02]
    accuracy = [[top1[min(k, len(top1) - 1)] * share for share in ranks] for k in range(num_heads)]
    return Tree.from_accuracies(accuracy, num_nodes)


@dataclass(frozen=True)
class DynamicShape:
    """Limits of EAGLE-2's dynamic trees.

    Attributes:
        depth: draft tokens on the longest path.
        top_k: nodes expanded per depth, and children of each.
        num_tokens: draft tokens to keep, the likeliest ones.
    """

    depth: int
    top_k: int
    num_tokens: int


DraftShape = Tree | DynamicShape


def make_default_tree(depth: int, gpu: bool | None = None) -> Tree:
    """Make the default static tree, of 32 nodes on CUDA and 8 on a CPU.

    Nodes cost time on a CPU, but hardly any on CUDA.

    Args:
        depth: draft tokens on the longest path.
        gpu: whether the tree is for CUDA; None asks this machine.
    """
    return make_static_tree(depth, 32 if _is_gpu(gpu) else 8)


def make_dynamic_shape(gpu: bool | None = None) -> DynamicShape:
    """Make the default shape of dynamic trees: EAGLE-2's on CUDA, a smaller one on a CPU.

    On a CPU depth costs more than width: most heads need one pass per depth.

    Args:
        gpu: whether the trees are for CUDA; None asks this machine.
    """
    return DynamicShape(8, 10, 59) if _is_gpu(gpu) else DynamicShape(2, 4, 5)


def _is_gpu(gpu: bool | None) -> bool:
    return torch.cuda.is_available() if gpu is None else gpu
