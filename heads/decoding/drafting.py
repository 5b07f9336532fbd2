"""Interface of drafters: they read committed tokens and propose a tree of draft tokens per text.

Letters: B texts, N tree nodes (root included), P nodes with children, D hidden, V vocab.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from heads.decoding.cache import TreeCache
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.model import FeatureLayers, TargetOutput

PAD = -1
"""Missing node: pads the trees of a batch to the same size."""


@dataclass(frozen=True)
class Roots:
    """Tokens that the target has chosen but not read yet, one per text.

    Attributes:
        tokens: [B] int64, on the target's device.
        ids: the tokens on the host; empty in steps that the host does not wait for.
    """

    tokens: Tensor
    ids: list[int]

    @classmethod
    def from_ids(cls, ids: list[int], device: torch.device | str = "cpu") -> "Roots":
        """Make roots from tokens on the host."""
        return cls(to_device(ids, device), ids)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Draft:
    """Proposed trees.

    Attributes:
        tree: shape of all trees; or, for different shapes, the parents [B, N - 1] int64 of their
            nodes without the root, parents before children.
        tokens: [B, N - 1] int64 on the target's device, the nodes without the root; PAD for missing
            nodes.
        depth: depth of the deepest node, or more.
        draft_probs: [B, P, V] float32; row n is the distribution from which the children of node n
            were sampled, without replacement and independently of the target's own draws.
            No node beyond P has children. PAD must replace tokens of probability 0. None if tokens
            were not sampled but are the drafter's best or copied.
    """

    tree: Tree | Tensor
    tokens: Tensor
    depth: int
    draft_probs: Tensor | None = None

    @classmethod
    def from_tree(cls, tree: Tree, tokens: Tensor, draft_probs: Tensor | None = None) -> "Draft":
        """Make a draft of one tree for all texts."""
        return cls(tree, tokens, tree.depth, draft_probs)

    @classmethod
    def from_chains(cls, rows: list[list[int]], device: torch.device) -> "Draft":
        """Make a draft of chains of different lengths (some may be empty) that were not sampled."""
        longest = max(map(len, rows))
        filled = [row + [PAD] * (longest - len(row)) for row in rows]
        # An empty list would give floats.
        tokens = to_device(filled, device).reshape(len(rows), longest).long()
        return cls.from_tree(Tree.make_chain(longest), tokens)

    @property
    def is_chain(self) -> bool:
        """Tell whether accepted nodes already lie at their positions."""
        return isinstance(self.tree, Tree) and self.tree.width <= 1

    def build_layout(self) -> "TreeLayout":
        """Build the shape of the trees as tensors."""
        if isinstance(self.tree, Tree):
            return build_tree_layout(self.tree, self.tokens.device)
        return TreeLayout.from_parents(self.tree, self.depth)


@dataclass(frozen=True)
class TreeLayout:
    """Shapes of trees as tensors; their batch size is B, or 1 for equal trees.

    Attributes:
        parents: [B, N] int64; the root is its own parent.
        mask: [B, N, N] bool; a node sees itself and its ancestors.
        depths: [B, N] int64.
    """

    parents: Tensor
    mask: Tensor
    depths: Tensor

    @classmethod
    def from_parents(cls, parents: Tensor, depth: int) -> "TreeLayout":
        """Make the layout of trees of at most `depth` from the nodes' parents [B, N - 1]."""
        parents = torch.nn.functional.pad(parents, (1, 0))
        num_nodes = parents.shape[1]
        own = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
        mask, upwards = own.expand(len(parents), -1, -1), parents.unsqueeze(2)
        for _ in range(depth):
            mask = own | mask.gather(1, upwards.expand(-1, -1, num_nodes))
        return cls(parents, mask, mask.sum(-1) - 1)


@cache
@torch.inference_mode(mode=False)
def build_tree_layout(tree: Tree, device: torch.device) -> TreeLayout:
    """Build the layout [1, N] of a tree, cached because captured graphs read it at its address.

    Made outside of inference mode, so that compiled passes always get the same kind of tensor and
    are not recompiled.
    """
    if tree.width <= 1:
        # Chains copied from a text have a new length in every step.
        parents = torch.arange(tree.depth, device=device)
    else:
        parents = to_device(list(tree.parents[1:]), device)
    return TreeLayout.from_parents(parents.unsqueeze(0), tree.depth)


@dataclass(frozen=True)
class CommittedTokens:
    """Tokens that a pass of the target added to the texts, with its hidden states.

    Attributes:
        token_ids: committed tokens per text: the prompt, or a root and the accepted draft tokens;
            empty in steps that the host does not wait for.
        output: the target's hidden states at these tokens, [B, n, D]; shorter rows are padded.
        cache: the target's cache, these tokens included.
        logits: [B, N, V] after every drafted node; None after prompts.
        on_device: `token_ids` on the device if available: padded [B, n] int64 and their numbers [B]
            int64.
        paths: accepted nodes of the last draft per text, root first.
        nodes: the accepted nodes on the device, [B, n] int64, padded with the root.
    """

    token_ids: list[list[int]]
    output: TargetOutput
    cache: TreeCache
    _: KW_ONLY
    logits: Tensor | None = None
    on_device: tuple[Tensor, Tensor] | None = None
    paths: list[list[int]] = field(default_factory=list)
    nodes: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """Return `token_ids` on the device, [B, n] int64; shorter rows are padded."""
        if self.on_device is not None:
            return self.on_device[0]
        longest = max(map(len, self.token_ids))
        rows = [row + [0] * (longest - len(row)) for row in self.token_ids]
        return to_device(rows, self.output.hidden_states.device)

    @property
    def counts(self) -> Tensor:
        """Return the number of tokens of each text, [B] int64."""
        if self.on_device is not None:
            return self.on_device[1]
        return to_device(list(map(len, self.token_ids)), self.output.hidden_states.device)

    @property
    def last_output(self) -> TargetOutput:
        """Return the hidden states [B, 1, D] at the last committed token."""
        return self.output.select_tokens(self.counts.unsqueeze(1) - 1)

    def concat(self, later: "CommittedTokens") -> "CommittedTokens":
        """Join two passes into one."""
        token_ids = [a + b for a, b in zip(self.token_ids, later.token_ids, strict=True)]
        output, width = TargetOutput.concat([self.output, later.output]), self.tokens.shape[1]
        tokens, first = torch.cat([self.tokens, later.tokens], dim=1), self.counts.unsqueeze(1)
        places = torch.arange(max(map(len, token_ids)), device=tokens.device)
        index = torch.where(places < first, places, places + width - first)
        index = index.clamp_max(tokens.shape[1] - 1)
        on_device = tokens.gather(1, index), self.counts + later.counts
        return CommittedTokens(
            token_ids,
            output.select_tokens(index),
            later.cache,
            logits=later.logits,
            on_device=on_device,
        )

    def carry_last_tokens(
        self, later: "CommittedTokens"
    ) -> tuple["CommittedTokens", "CommittedTokens"]:
        """Move the last token of every text that ends in this part of the prompts to the next part.

        After all parts, the very last part holds the last token of every text.
        """
        tokens_here, tokens_later = list(self.token_ids), list(later.token_ids)
        last = self.last_output
        for row, tokens in enumerate(self.token_ids):
            if tokens and not tokens_later[row]:
                tokens_here[row], tokens_later[row] = tokens[:-1], tokens[-1:]
                later.output.insert_row(
                    row, last.select_rows(to_device([row], last.hidden_states.device))
                )
        return replace(self, token_ids=tokens_here), replace(later, token_ids=tokens_later)

    def insert_row(self, row: int, other: "CommittedTokens") -> "CommittedTokens":
        """Replace a row by the last token of another text."""
        last = other.token_ids[0][-1:]
        self.output.insert_row(row, other.last_output)
        tokens, counts = self.tokens, self.counts
        tokens[row, 0], counts[row] = last[0], 1
        token_ids = list(self.token_ids)
        if token_ids:
            token_ids[row] = last
        return CommittedTokens(
            token_ids, self.output, self.cache, logits=self.logits, on_device=(tokens, counts)
        )

    def copy_from(self, new: "CommittedTokens") -> None:
        """Copy the tensors of a later step of the same shapes in place."""
        self.output.copy_from(new.output)
        for own, other in zip((self.tokens, self.counts), (new.tokens, new.counts), strict=True):
            own.copy_(other)

    def select_rows(self, rows: list[int]) -> "CommittedTokens":
        """Return the tokens of some texts only; the cache does not change."""
        index = to_device(rows, self.output.hidden_states.device)
        on_device = self.on_device
        return CommittedTokens(
            token_ids=[self.token_ids[row] for row in rows] if self.token_ids else [],
            output=self.output.select_rows(index),
            cache=self.cache,
            logits=None if self.logits is None else self.logits[index],
            on_device=None if on_device is None else (on_device[0][index], on_device[1][index]),
            paths=[self.paths[row] for row in rows] if self.paths else [],
            nodes=None if self.nodes is None else self.nodes[index],
        )


class Drafter(ABC):
    """Proposes trees for a batch. Define `observe` and `propose` to add a way to draft.

    Attributes:
        taps: hidden states of the target that the drafter needs.
        num_static_nodes: nodes of the largest tree, root included, if a step can be captured whole,
            as all trees have one size and need nothing from the host; None for other drafters.
        row_attributes: names of the attributes with one entry per text: lists, tensors [B, ...], or
            objects with `select_rows` and `insert_row`, like `Generators`, caches and drafters;
            None or empty before the first tokens.
    """

    taps = FeatureLayers()
    num_static_nodes: int | None = None
    row_attributes: tuple[str, ...] = ()

    @abstractmethod
    def observe(self, seen: CommittedTokens) -> None:
        """Read the committed tokens, first the prompts.

        Long prompts arrive in parts. A text may have no token in a part, except in the last.
        """

    @abstractmethod
    def propose(self, roots: Roots) -> Draft:
        """Propose trees below `roots`, the tokens that the target has chosen but not read yet."""

    def select_rows(self, rows: list[int]) -> None:
        """Select the texts that stay, in place, as others have ended; may precede `observe`."""
        for name in self.row_attributes:
            value: Any = getattr(self, name)
            if isinstance(value, Tensor):
                value = value[to_device(rows, value.device)]
            elif isinstance(value, list):
                value = [value[row] for row in rows] if value else value
            elif value is not None:
                # Some objects change in place.
                value = value.select_rows(rows) or value
            setattr(self, name, value)

    def insert_row(self, row: int, other: Self) -> None:
        """Insert the single text of another drafter, which has seen only a prompt, into a row.

        What the other drafter has not set yet stays as it is.
        """
        self._prepare_insert(other)
        for name in self.row_attributes:
            value, new = getattr(self, name), getattr(other, name)
            if isinstance(new, Tensor) or (isinstance(new, list) and new):
                value[row] = new[0]
            elif new is not None and not isinstance(new, list):
                setattr(self, name, value.insert_row(row, new) or value)

    def _prepare_insert(self, other: Self) -> None:  # noqa: B027
        """Prepare both drafters for moving a text."""
