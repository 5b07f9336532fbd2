"""Drafting with heads: base classes of drafters, chains, dynamic trees, and the cache of a head.

Texts of a batch end and are replaced, so every drafter can select and insert rows.

Dynamic trees are EAGLE-2's: expand the likeliest nodes, then keep the likeliest of all. A node's
score is the log-probability of its path. A child never scores above its parent, so the kept nodes
form a tree. Source: EAGLE-2, arXiv 2406.16858, section 4; SafeAILab/EAGLE `model/cnets.py`,
`topK_genrate`.

Letters: B texts, D depth, w nodes of a depth, M expanded nodes, V vocabulary, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from heads.decoding.cache import CacheSlots, SlotBuffer
from heads.decoding.drafting import PAD, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import DraftShape, DynamicShape, Tree
from heads.vocab import DraftVocab


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


def expand_tree(
    shape: DynamicShape,
    vocab: DraftVocab,
    root_logits: Tensor,
    compute_logits: Callable[[Frontier], Tensor],
    room: Tensor,
) -> ExpandedTree:
    """Expand trees below roots.

    Args:
        shape: limits of the trees.
        vocab: draft vocabulary of the logits.
        root_logits: [B, W] logits of the roots' children.
        compute_logits: function from a frontier to logits [B * w, W] of the children of its nodes.
        room: [B, 1] int64 levels that can be drafted.
    """
    num_texts, device = len(root_logits), root_logits.device
    width = min(shape.top_k, root_logits.shape[1])
    texts = torch.arange(num_texts, device=device).unsqueeze(1)
    scores = torch.zeros(num_texts, 1, device=device)  # of the nodes to expand now
    nodes = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)  # their numbers
    expanded: list[ExpandedTree] = []
    logits, num_nodes = root_logits, 1
    for level in range(shape.depth):
        best = logits.float().log_softmax(-1).topk(width)
        tokens = vocab.to_target_ids(best.indices).view(num_texts, -1)
        all_scores = (scores.unsqueeze(2) + best.values.view(num_texts, -1, width)).flatten(1)
        beyond, parents = level >= room, nodes.repeat_interleave(width, 1)
        known_scores = all_scores.masked_fill(beyond, -torch.inf)
        expanded.append(ExpandedTree(tokens.masked_fill(beyond, PAD), known_scores, parents))
        if level + 1 == shape.depth:
            break
        num_rows = nodes.shape[1]
        scores, chosen = all_scores.topk(min(shape.top_k, all_scores.shape[1]))
        rows = (texts * num_rows + chosen // width).flatten()
        logits = compute_logits(Frontier(level + 1, rows, tokens.gather(1, chosen).flatten()))
        nodes = num_nodes + chosen
        num_nodes += all_scores.shape[1]
    return ExpandedTree(*(torch.cat(column, 1) for column in zip(*expanded, strict=True)))


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
        return expand_tree(self.shape, self.head.vocab, logits, compute_next_logits, self._room)

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
