"""What all kinds of block drafters answer alike; see `heads/kind.py`."""

from collections.abc import Sequence
from typing import TypeVar

from heads.blocks.config import default_layers
from heads.blocks.drafter import BlockChain, BlockTree
from heads.blocks.head import BlockHead
from heads.kind import Kind
from heads.sampling import Sampling, drafter_seeds
from heads.tree import DynamicShape, Shape, usual_dynamic_shape

Head = TypeVar("Head", bound=BlockHead)
NUM_FEATURES = 5


class BlockKind(Kind[Head]):
    """A kind of block drafter."""

    static = False

    def most_tokens(self, head: Head) -> int:
        """Those of a block as it was trained."""
        return head.config.num_draft_tokens

    def longest(self, head: Head) -> int:
        """The same."""
        return head.config.num_draft_tokens

    def usual_shape(self, head: Head, gpu: bool | None = None) -> DynamicShape:
        """EAGLE-2's, no deeper than a block."""
        usual = usual_dynamic_shape(gpu)
        depth = min(usual.depth, head.config.num_draft_tokens)
        return DynamicShape(depth, usual.top_k, usual.num_tokens)

    def drafter(
        self, head: Head, shape: Shape, sampling: Sampling, seeds: Sequence[int]
    ) -> BlockChain | BlockTree:
        """Chains draw when the target does; trees are ranked."""
        if isinstance(shape, DynamicShape):
            return BlockTree(head, shape)
        return BlockChain(head, shape.depth, sampling, drafter_seeds(seeds))

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Features in even steps."""
        return default_layers(num_layers, NUM_FEATURES, "layers")

    def pruning_problem(self, head: Head) -> str | None:
        """A head without an output head of its own has no rows to lose."""
        if head.lm_head is not None:
            return None
        return (
            "this head drafts through the target's output head, of which no row can go; allowed: "
            "heads trained with head.own_output_head=true"
        )
