"""Drafting: what drafters see and propose, and how heads draft.

Drafters read committed tokens and propose a tree of draft tokens per text. Texts of a batch end and
are replaced, so every drafter can select and insert rows.

Dynamic trees are EAGLE-2's: expand the likeliest nodes, then keep the likeliest of all. A node's
score is the log-probability of its path. A child never scores above its parent, so the kept nodes
form a tree. Source: EAGLE-2, arXiv 2406.16858, section 4; SafeAILab/EAGLE `model/cnets.py`,
`topK_genrate`.

Letters: B texts, N tree nodes (root included), P nodes with children, D hidden (of drafts: depth),
w nodes of a depth, M expanded nodes, V vocabulary, W draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from heads.decoding.cache import CacheSlots, SlotBuffer, TreeCache
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import DraftShape, DynamicShape, Tree
from heads.devices import to_device
from heads.target_model.model import FeatureLayers, TargetOutput
from heads.vocab import DraftVocab

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


class HeadDrafter(Drafter):
    """Drafter with an attached head. Subclasses define `observe` and `propose`.

    Args:
        head: head that drafts.
        shape: shape of the drafts.
    """

    def __init__(self, head: Any, shape: DraftShape | None = None) -> None:
        self.head, self.taps = head, head.taps
        self.shape: Any = shape


@dataclass
class ChainSampler:
    """Sampler of the tokens of chains: the best ones, or drawn ones when sampling.

    Attributes:
        vocab: draft vocabulary of the logits.
        sampling: the target's sampling, also used for draft tokens.
        generators: one generator per text.
        probs: [B, V] float32 distribution of each drawn token.
    """

    vocab: DraftVocab
    sampling: Sampling
    generators: Generators
    probs: list[Tensor] = field(default_factory=list)

    def choose_token(self, logits: Tensor) -> Tensor:
        """Choose [B] target ids from logits [B, W] of the next token, given the previous ones."""
        if self.sampling.is_greedy:
            return self.vocab.to_target_ids(logits.argmax(-1))
        q = self.sampling.compute_probabilities(logits)
        self.probs.append(q.new_zeros(len(q), self.vocab.size).index_copy(1, self.vocab.ids, q))
        return self.vocab.to_target_ids(self.generators.sample_indices(q))

    def make_draft(self, tree: Tree, tokens: Tensor) -> Draft:
        """Make drafts of the chosen tokens [B, D]."""
        probs = torch.stack(self.probs, 1) if self.probs else None
        return Draft.from_tree(tree, tokens, probs)


class ExpandedTree(NamedTuple):
    """All expanded nodes, depth by depth.

    Attributes:
        tokens: [B, M] int64 target ids, PAD for nodes that cannot be drafted.
        scores: [B, M] float32 log-probabilities of the nodes' paths.
        parents: [B, M] numbers of the parents in this order from 1; 0 is the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


class Frontier(NamedTuple):
    """Nodes of one depth to expand, w of each text.

    Attributes:
        depth: depth of the nodes, from 1.
        rows: [B * w] int64 rows of the previous depth that they came from; None for all in order.
        tokens: [B * w] int64 target ids.
    """

    depth: int
    rows: Tensor | None
    tokens: Tensor


def rerank_nodes(expanded: ExpandedTree, shape: DynamicShape) -> Draft:
    """Keep the likeliest nodes, at most `num_tokens`, as trees."""
    tokens, scores, parents = expanded
    num_kept = min(shape.num_tokens, tokens.shape[1])
    # A stable sort puts parents before equal children; the sort by number restores the order.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept].sort(1).values
    number = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=order.device)
    new = torch.arange(1, num_kept + 1, device=order.device).expand_as(order)
    number.scatter_(1, order + 1, new)
    return Draft(number.gather(1, parents.gather(1, order)), tokens.gather(1, order), shape.depth)


class HeadCache:
    """Keys and values of the committed texts in each layer of a head.

    Args:
        num_layers: layers of the head.
    """

    def __init__(self, num_layers: int) -> None:
        self.buffers = [SlotBuffer() for _ in range(num_layers)]
        self.slots: CacheSlots | None = None

    def prepare_slots(self, num_texts: int, device: torch.device, target: CacheSlots) -> CacheSlots:
        """Return the slots of the texts, made if needed, with the fixed width of the target's."""
        if self.slots is None:
            self.slots = CacheSlots(num_texts, device)
        self.slots.copy_fixed_width(target)
        return self.slots

    @property
    def prepared_slots(self) -> CacheSlots:
        """Return the slots of the texts, after `prepare_slots`."""
        assert self.slots is not None
        return self.slots

    def select_rows(self, rows: list[int]) -> Self:
        """Select the texts that stay, in place; return the cache."""
        if self.slots is not None:
            self.slots.select_rows(rows, *self.buffers)
        return self

    def insert_row(self, row: int, other: "HeadCache") -> None:
        """Insert the single text of another cache into a row."""
        length = 0 if other.slots is None else other.slots.lengths[0]
        self.prepared_slots.insert_row(row, length)
        for buffer, new in zip(self.buffers, other.buffers, strict=True):
            buffer.insert_row(row, new, length, len(self.prepared_slots.lengths))


class FeatureDrafter(HeadDrafter):
    """Drafter of chains or dynamic trees, with a head that keeps keys and values of the texts.

    Args:
        head: head that drafts.
        shape: limits of dynamic trees, or the draft tokens per chain.
        sampling: the target's sampling, also used for the tokens of chains; trees are ranked.
        seeds: seeds of the draws, one per text, other than the target's.

    Attributes:
        has_nested_trees: whether every tree begins with the tree of a smaller depth.
    """

    row_attributes: tuple[str, ...] = ("cache", "generators")
    has_nested_trees: ClassVar[bool] = True

    def __init__(
        self,
        head: Any,
        shape: DynamicShape | int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] = (1,),
    ) -> None:
        super().__init__(head, Tree.make_chain(shape) if isinstance(shape, int) else shape)
        self.num_static_nodes = 1 + (shape if isinstance(shape, int) else shape.num_tokens)
        self.cache, self.sampling = HeadCache(head.num_layers), sampling
        self.generators: Generators | None = None
        if isinstance(shape, int):
            self.generators = Generators.from_seeds(seeds, next(head.parameters()).device)

    @abstractmethod
    def start_draft(self, roots: Roots) -> tuple[Tensor, Callable[[Frontier], Tensor]]:
        """Start a draft after all committed tokens.

        Returns:
            Logits [B, W] of the roots' children, and a function from each next frontier to logits
            [B * w, W] of the children of its nodes.
        """

    @property
    def _room(self) -> Tensor:
        """Levels [B, 1] int64 that are drafted from rows inside the head's window."""
        committed = self.cache.prepared_slots.committed
        return self.head.max_positions + 1 - self.head.draft_offset - committed

    def expand_trees(self, roots: Roots) -> ExpandedTree:
        """Expand trees below the roots, level by level."""
        logits, compute_next_logits = self.start_draft(roots)
        shape, room, (num_texts, device) = self.shape, self._room, (len(logits), logits.device)
        width = min(shape.top_k, logits.shape[1])
        texts = torch.arange(num_texts, device=device).unsqueeze(1)
        scores = torch.zeros(num_texts, 1, device=device)  # of the nodes to expand now
        nodes = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)  # their numbers
        expanded: list[ExpandedTree] = []
        num_nodes = 1
        for level in range(shape.depth):
            best = logits.float().log_softmax(-1).topk(width)
            tokens = self.head.vocab.to_target_ids(best.indices).view(num_texts, -1)
            all_scores = (scores.unsqueeze(2) + best.values.view(num_texts, -1, width)).flatten(1)
            beyond, parents = level >= room, nodes.repeat_interleave(width, 1)
            known_scores = all_scores.masked_fill(beyond, -torch.inf)
            expanded.append(ExpandedTree(tokens.masked_fill(beyond, PAD), known_scores, parents))
            if level + 1 == shape.depth:
                break
            num_rows = nodes.shape[1]
            scores, chosen = all_scores.topk(min(shape.top_k, all_scores.shape[1]))
            rows = (texts * num_rows + chosen // width).flatten()
            frontier = Frontier(level + 1, rows, tokens.gather(1, chosen).flatten())
            logits, nodes = compute_next_logits(frontier), num_nodes + chosen
            num_nodes += all_scores.shape[1]
        return ExpandedTree(*(torch.cat(column, 1) for column in zip(*expanded, strict=True)))

    def propose(self, roots: Roots) -> Draft:
        """Draft chains, or trees of at most `num_tokens` nodes."""
        if self.generators is None:
            return rerank_nodes(self.expand_trees(roots), self.shape)
        logits, compute_next_logits = self.start_draft(roots)
        sampler = ChainSampler(self.head.vocab, self.sampling, self.generators)
        chosen = [sampler.choose_token(logits)]
        for depth in range(1, self.shape.depth):
            logits = compute_next_logits(Frontier(depth, None, chosen[-1]))
            chosen.append(sampler.choose_token(logits))
        beyond = torch.arange(len(chosen), device=logits.device) >= self._room
        return sampler.make_draft(self.shape, torch.stack(chosen, 1).masked_fill(beyond, PAD))
