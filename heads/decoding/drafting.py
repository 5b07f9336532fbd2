"""The interface of drafters: committed tokens go in, a tree of draft tokens per text comes out.

Letters: B texts, N tree nodes (root included), P nodes that have children, D hidden, V vocab.
"""

from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Protocol, Self

import torch
from torch import Tensor

from heads.decoding.cache import TreeCache
from heads.decoding.tree import Tree
from heads.target_model.model import Taps, TargetOutput
from heads.upload import upload

PAD = -1
"""A node that is not there: trees of a batch are filled up with it to the same size."""


@dataclass(frozen=True)
class Roots:
    """The tokens that the target has chosen but not read yet, one per text.

    Attributes:
        tokens: [B] int64, on the target's device.
        ids: the same on the host; empty in a step that it does not wait for.
    """

    tokens: Tensor
    ids: list[int]

    @classmethod
    def of(cls, ids: list[int], device: torch.device | str = "cpu") -> "Roots":
        """Root tokens that the host knows."""
        return cls(upload(ids, device), ids)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Draft:
    """Proposed trees.

    Attributes:
        tree: the shape of all of them; or the parents [B, N - 1] int64 of their nodes without
            the root, parents before children, for shapes that differ.
        tokens: [B, N - 1] int64 on the target's device, the nodes without the root, or PAD.
        depth: of the deepest node, or more.
        draft_probs: [B, P, V] float32, row n is the very distribution that the children of node
            n were sampled from, without replacement and by randomness other than `decode`'s seed
            gives, and no node beyond P has children. A token of probability 0 there was not
            sampled: PAD must stand in its place. None if the tokens were not sampled: they are
            the drafter's best, or copied from somewhere.
        confidence: [B, N - 1] float32 logits, how sure the drafter was of each node before it
            drew the token; None if it does not say.
    """

    tree: Tree | Tensor
    tokens: Tensor
    depth: int
    draft_probs: Tensor | None = None
    confidence: Tensor | None = None

    @classmethod
    def of(cls, tree: Tree, tokens: Tensor, draft_probs: Tensor | None = None) -> "Draft":
        """A tree that all texts share."""
        return cls(tree, tokens, tree.depth, draft_probs)

    @classmethod
    def chains(cls, rows: list[list[int]], device: torch.device) -> "Draft":
        """Chains of different lengths, perhaps none, that were not sampled."""
        longest = max(map(len, rows))
        filled = [row + [PAD] * (longest - len(row)) for row in rows]
        # Where there is nothing at all, numbers come as floats.
        tokens = upload(filled, device).reshape(len(rows), longest).long()
        return cls.of(Tree.chain(longest), tokens)

    @property
    def is_chain(self) -> bool:
        """True where accepted nodes lie where they belong already."""
        return isinstance(self.tree, Tree) and self.tree.width <= 1

    def layout(self) -> "TreeLayout":
        """The shape of the trees as tensors."""
        if isinstance(self.tree, Tree):
            return tree_layout(self.tree, self.tokens.device)
        return TreeLayout.of(self.tree, self.depth)


@dataclass(frozen=True)
class TreeLayout:
    """Shapes of trees as tensors; their batch is B, or 1 if all are the same.

    Attributes:
        parents: [B, N] int64; the root is its own.
        mask: [B, N, N] bool, a node sees itself and its ancestors.
        depths: [B, N] int64.
    """

    parents: Tensor
    mask: Tensor
    depths: Tensor

    @classmethod
    def of(cls, parents: Tensor, depth: int) -> "TreeLayout":
        """Make the layout of trees no deeper than `depth` from the nodes' parents [B, N - 1]."""
        parents = torch.nn.functional.pad(parents, (1, 0))
        num_nodes = parents.shape[1]
        own = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
        mask, upwards = own.expand(len(parents), -1, -1), parents.unsqueeze(2)
        for _ in range(depth):
            mask = own | mask.gather(1, upwards.expand(-1, -1, num_nodes))
        return cls(parents, mask, mask.sum(-1) - 1)


@cache
@torch.inference_mode(mode=False)
def tree_layout(tree: Tree, device: torch.device) -> TreeLayout:
    """The layout [1, N] of a tree, which stays where it is: captured graphs read it there.

    No tensors of inference mode, wherever it is asked for first: a compiled pass, which would be
    compiled once more for those, sees one kind.
    """
    if tree.width <= 1:
        # Chains that are copied from a text have another length in every step.
        parents = torch.arange(tree.depth, device=device)
    else:
        parents = upload(list(tree.parents[1:]), device)
    return TreeLayout.of(parents.unsqueeze(0), tree.depth)


@dataclass(frozen=True)
class Committed:
    """Tokens that a pass of the target added to the texts, and its states at them.

    Attributes:
        token_ids: per text the tokens committed: its prompt, or a root and the draft tokens
            that were kept; empty in a step that the host does not wait for.
        output: the target's states at them, [B, n, D]; a shorter row is filled up.
        cache: the target's own, these tokens included.
        logits: [B, N, V], after every node that was drafted; None after the prompts.
        on_device: `token_ids` on the device, if they are there already: [B, n] int64, filled up,
            and how many, [B] int64.
        paths: per text the nodes of the last draft that were kept, the root first.
        nodes: the same on the device, [B, n] int64, filled up with the root.
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
        """[B, n] int64, `token_ids` on the device; a shorter row is filled up."""
        if self.on_device is not None:
            return self.on_device[0]
        longest = max(map(len, self.token_ids))
        rows = [row + [0] * (longest - len(row)) for row in self.token_ids]
        return upload(rows, self.output.hidden_states.device)

    @property
    def counts(self) -> Tensor:
        """[B] int64, how many tokens each text got."""
        if self.on_device is not None:
            return self.on_device[1]
        return upload(list(map(len, self.token_ids)), self.output.hidden_states.device)

    @property
    def last(self) -> TargetOutput:
        """The states [B, 1, D] at the last token committed."""
        return self.output.at(self.counts.unsqueeze(1) - 1)

    def then(self, later: "Committed") -> "Committed":
        """Both passes as one."""
        token_ids = [a + b for a, b in zip(self.token_ids, later.token_ids, strict=True)]
        output, width = TargetOutput.joined([self.output, later.output]), self.tokens.shape[1]
        tokens, first = torch.cat([self.tokens, later.tokens], dim=1), self.counts.unsqueeze(1)
        places = torch.arange(max(map(len, token_ids)), device=tokens.device)
        index = torch.where(places < first, places, places + width - first)
        index = index.clamp_max(tokens.shape[1] - 1)
        on_device = tokens.gather(1, index), self.counts + later.counts
        return Committed(
            token_ids, output.at(index), later.cache, logits=later.logits, on_device=on_device
        )

    def hand_on(self, later: "Committed") -> tuple["Committed", "Committed"]:
        """Two parts of prompts, this and the next, which gets the last token of texts ending here.

        So the very last part has the last token of every text.
        """
        mine, after, last = list(self.token_ids), list(later.token_ids), self.last
        for row, tokens in enumerate(self.token_ids):
            if tokens and not after[row]:
                mine[row], after[row] = tokens[:-1], tokens[-1:]
                later.output.put(row, last.rows(upload([row], last.hidden_states.device)))
        return replace(self, token_ids=mine), replace(later, token_ids=after)

    def put(self, row: int, other: "Committed") -> "Committed":
        """Writes over a row, which then holds nothing but the last token of another text."""
        last = other.token_ids[0][-1:]
        self.output.put(row, other.last)
        tokens, counts = self.tokens, self.counts
        tokens[row, 0], counts[row] = last[0], 1
        kept = list(self.token_ids)
        if kept:
            kept[row] = last
        return Committed(
            kept, self.output, self.cache, logits=self.logits, on_device=(tokens, counts)
        )

    def fill(self, new: "Committed") -> None:
        """Takes the tensors of a later step of the same shapes, each in its place."""
        self.output.fill(new.output)
        for own, other in zip((self.tokens, self.counts), (new.tokens, new.counts), strict=True):
            own.copy_(other)

    def rows(self, rows: list[int]) -> "Committed":
        """Drops all but some texts; the cache is left as it is."""
        index = upload(rows, self.output.hidden_states.device)
        on_device = self.on_device
        return Committed(
            token_ids=[self.token_ids[row] for row in rows] if self.token_ids else [],
            output=self.output.rows(index),
            cache=self.cache,
            logits=None if self.logits is None else self.logits[index],
            on_device=None if on_device is None else (on_device[0][index], on_device[1][index]),
            paths=[self.paths[row] for row in rows] if self.paths else [],
            nodes=None if self.nodes is None else self.nodes[index],
        )


class Drafter(Protocol):
    """Proposes trees for a batch. A new way to draft is a new class with these members.

    Attributes:
        taps: the target's states that it needs.
    """

    taps: Taps

    @property
    def static_nodes(self) -> int | None:
        """Nodes of the drafter's largest tree, the root included, if a step can be captured whole.

        Its drafts are then of one size and need nothing from the host; None elsewhere.
        """

    def observe(self, seen: Committed) -> None:
        """Takes the tokens that were committed, first the prompts.

        Long prompts come in parts, of which a text may have nothing; of the last all have some.
        """

    def propose(self, roots: Roots) -> Draft:
        """Trees below `roots`, the tokens that the target has chosen but not read yet."""

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only, the others have ended; perhaps before any was seen."""

    def take(self, row: int, other: Self) -> None:
        """A row goes on with the one text of another drafter, which has seen its prompt alone."""
