"""What all kinds of block drafters answer alike; see `heads/kind.py`."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from conf.settings.export import ExportFormat
from heads.blocks import export, golden
from heads.blocks.drafter import BlockChain, BlockTree
from heads.blocks.export import BlockLayout
from heads.blocks.head import BlockHead
from heads.blocks.readings import readings
from heads.decoding.chains import Calibration
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Shape, usual_dynamic_shape
from heads.kind import Drafted, Files, HeadFacts, Kind
from heads.target_model.model import Target

Head = TypeVar("Head", bound=BlockHead)


class BlockKind(Kind[Head]):
    """A kind of block drafter.

    Attributes:
        layout: what engines call it.
        method, paper: of the method.
        words: what a card says of its slots beyond their number.
    """

    static = False
    layout: ClassVar[BlockLayout]
    method: ClassVar[str]
    paper: ClassVar[str]
    words: ClassVar[str] = ""

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
        self,
        head: Head,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> BlockChain | BlockTree:
        """Chains draw when the target does; trees are ranked."""
        if isinstance(shape, DynamicShape):
            return BlockTree(head, shape)
        return BlockChain(head, shape.depth, sampling, drafter_seeds(seeds), calibration)

    def readings(self, head: Head) -> Iterator[tuple[str, Head]]:
        """See `heads/blocks/readings.py`."""
        return readings(head)

    def pruning_problem(self, head: Head) -> str | None:
        """A head without an output head of its own has no rows to lose."""
        if head.lm_head is not None:
            return None
        return (
            "this head drafts through the target's output head, of which no row can go; allowed: "
            "heads trained with head.own_output_head=true"
        )

    def export_problem(self, head: Head, engine: ExportFormat) -> str | None:
        """See `heads/blocks/export.py`."""
        return export.problem(head, engine, self.layout)

    def files(self, head: Head, engine: ExportFormat) -> Files:
        """See `heads/blocks/export.py`."""
        return export.files(head, engine, self.layout)

    def serve_command(self, head: Head, engine: ExportFormat, folder: str) -> str:
        """See `heads/blocks/export.py`."""
        return export.serve_command(head, engine, folder, self.layout)

    def drafted(
        self, head: Head, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> Drafted:
        """See `heads/blocks/golden.py`."""
        return golden.drafted(head, target, states, token_ids, places)

    def facts(
        self, head: Head, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Layers, features and slots."""
        config, problem = head.config, self.export_problem(head, ExportFormat.vllm)
        return HeadFacts(
            tag=self.layout.name,
            name=f"{self.method} head",
            method=self.method,
            paper=self.paper,
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {head.vocab.described()}) that read the target's "
                f"hidden states {', '.join(map(str, config.layers))} (as `output_hidden_states` "
                f"counts them). It drafts {config.num_draft_tokens} tokens in one pass{self.words}"
            ),
            num_draft_tokens=config.num_draft_tokens,
            vllm_method=None if problem else self.layout.vllm,
            vllm_problem=f"vLLM {problem}." if problem else "",
        )

    def copied(self, head: Head, provenance: dict[str, Any]) -> list[str]:
        """What a head has of the target's ends."""
        found = []
        if head.lm_head is not None:
            found.append("an output head that started as rows of its own")
        if head.embed_tokens is not None:
            found.append("its token embedding")
        return found
