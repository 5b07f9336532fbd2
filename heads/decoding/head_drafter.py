"""Base class of drafters with a head, in batches whose texts end and are replaced.

Letters: B texts, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from heads.decoding.cache import CacheSlots, SlotBuffer
from heads.decoding.chains import Calibration, ChainSampler
from heads.decoding.drafting import CommittedTokens, Draft, Roots
from heads.decoding.dynamic_trees import ExpandedTree, rerank_nodes
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import DraftShape, DynamicShape, Tree
from heads.upload import to_device


class HeadDrafter(ABC):
    """Drafts with an attached head. Subclasses define `observe` and `propose`.

    Args:
        head: head that drafts.
        shape: shape of the drafts.
        calibration: cuts chains; None leaves them whole.

    Attributes:
        row_attributes: names of the attributes with one entry per text: tensors [B, ...],
            `Committed`, or
            objects with `rows` and `take` like `Generators`; None before the first tokens.
        taps, num_static_nodes: see `heads.decoding.drafting.Drafter`.
    """

    row_attributes: tuple[str, ...] = ()
    num_static_nodes: int | None = None

    def __init__(
        self, head: Any, shape: DraftShape | None = None, calibration: Calibration | None = None
    ) -> None:
        self.head, self.taps = head, head.taps
        self.shape: Any = shape
        self.calibration = calibration

    @abstractmethod
    def observe(self, seen: CommittedTokens) -> None:
        """See `heads.decoding.drafting.Drafter`."""

    @abstractmethod
    def propose(self, roots: Roots) -> Draft:
        """See `heads.decoding.drafting.Drafter`."""

    @final
    def select_rows(self, rows: list[int]) -> None:
        """Keep some texts only, as others have ended; may precede the first `observe`."""
        for name in self.row_attributes:
            held = getattr(self, name)
            if isinstance(held, Tensor):
                setattr(self, name, held[to_device(rows, held.device)])
            elif held is not None:
                setattr(self, name, held.select_rows(rows))

    @final
    def insert_row(self, row: int, other: Self) -> None:
        """Start the single text of another drafter, which has only seen its prompt, in a row."""
        self._prepare_insert(other)
        for name in self.row_attributes:
            held, new = getattr(self, name), getattr(other, name)
            if isinstance(held, Tensor):
                held[row] = new[0]
            elif isinstance(held, CommittedTokens):
                setattr(self, name, held.insert_row(row, new))
            else:
                held.insert_row(row, new)

    def _prepare_insert(self, other: Self) -> None:
        """Prepare both drafters for moving a text."""
        assert type(other) is type(self)


class ChainDrafter(HeadDrafter):
    """Drafts chains of the best tokens, or of drawn tokens when sampling.

    Args:
        head: head that drafts.
        depth: draft tokens per chain.
        sampling: the target's sampling, also used for draft tokens.
        seeds: seeds of the draws, one per text, other than the target's.
        calibration: cuts the chains; None leaves them whole.
    """

    def __init__(
        self,
        head: Any,
        depth: int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] = (1,),
        calibration: Calibration | None = None,
    ) -> None:
        self.tree, self.sampling = Tree.make_chain(depth), sampling
        super().__init__(head, self.tree, calibration)
        self.num_static_nodes = 1 + depth if calibration is None else None
        self.generators = Generators.from_seeds(seeds, next(head.parameters()).device)
        self.row_attributes = (*self.row_attributes, "generators")

    def make_sampler(self) -> ChainSampler:
        """Make the sampler for one draft."""
        return ChainSampler(self.head.vocab, self.sampling, self.generators, self.calibration)


class DynamicTreeDrafter(HeadDrafter):
    """Drafts the likeliest of all expanded nodes.

    Attributes:
        has_nested_trees: see `heads.decoding.drafting.DynamicDrafter`.
    """

    has_nested_trees: ClassVar[bool] = True

    def __init__(self, head: Any, shape: DynamicShape) -> None:
        super().__init__(head, shape)
        self.num_static_nodes = 1 + shape.num_tokens

    @abstractmethod
    def expand_trees(self, roots: Roots) -> ExpandedTree:
        """See `heads.decoding.drafting.DynamicDrafter`."""

    def propose(self, roots: Roots) -> Draft:
        """Draft trees of at most `num_tokens` nodes below the roots."""
        return rerank_nodes(self.expand_trees(roots), self.shape)


class HeadCache:
    """Keys and values of the committed texts in each layer of a head.

    Args:
        num_layers: layers of the head.
    """

    def __init__(self, num_layers: int) -> None:
        self.buffers = [SlotBuffer() for _ in range(num_layers)]
        self.slots: CacheSlots | None = None

    def prepare_slots(self, num_texts: int, device: torch.device, target: CacheSlots) -> CacheSlots:
        """Slots of the texts, made if needed, which hold as the target's do."""
        if self.slots is None:
            self.slots = CacheSlots(num_texts, device)
        self.slots.copy_fixed_width(target)
        return self.slots

    @property
    def prepared_slots(self) -> CacheSlots:
        """Slots of the texts, after `open`."""
        assert self.slots is not None
        return self.slots

    def select_rows(self, rows: list[int]) -> Self:
        """Keep some texts only."""
        if self.slots is not None:
            self.slots.select_rows(rows, *self.buffers)
        return self

    def insert_row(self, row: int, other: "HeadCache") -> None:
        """Start the single text of another cache in a row."""
        length = 0 if other.slots is None else other.slots.lengths[0]
        self.prepared_slots.insert_row(row, length)
        for own, new in zip(self.buffers, other.buffers, strict=True):
            own.insert_row(row, new, length, len(self.prepared_slots.lengths))
