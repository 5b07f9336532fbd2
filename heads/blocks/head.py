"""Answers shared by all kinds of block drafters. See `heads/head.py`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from conf.settings.export import ExportFormat
from heads.blocks import export, golden
from heads.blocks.drafter import BlockChain, BlockTree
from heads.blocks.export import BlockLayout
from heads.blocks.formats import has_architecture
from heads.blocks.network import BlockNetwork
from heads.blocks.readings import iter_block_variants
from heads.head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits
from heads.readings import ConfigVariants
from heads.target_model.model import Target


class BlockHead(BlockNetwork):
    """Drafter of blocks.

    Attributes:
        architectures: names in its files by which it is recognised.
        layout: names that engines use.
        method, paper: name and paper of the method.
        slot_description: words of a model card about its slots.
    """

    architectures: ClassVar[tuple[str, ...]]
    layout: ClassVar[BlockLayout]
    method: ClassVar[str]
    paper: ClassVar[str]
    slot_description: ClassVar[str] = ""
    chain_drafter = BlockChain
    tree_drafter = BlockTree
    ambiguities: ClassVar[tuple[Callable[[Any], ConfigVariants], ...]] = (iter_block_variants,)
    pruning_hint = "heads trained with head.own_output_head=true"

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load a head whose config names this architecture; None for other folders."""
        if not has_architecture(folder, cls.architectures, cls.layout.speculators_method):
            return None
        return cls.load_known_folder(folder, path, layers)

    @classmethod
    @abstractmethod
    def load_known_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self:
        """Load a folder known to hold such a head."""

    def build_files(self) -> HeadFiles:
        """Files with the authors' names and keys."""
        return replace(super().build_files(), config=self.build_config_json())

    @abstractmethod
    def build_config_json(self) -> dict[str, Any]:
        """Content of `config.json` in the authors' layout."""

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """See `heads/blocks/export.py`."""
        problem = self.find_export_problem(engine)
        if problem is not None:
            return ExportPlan(problem)
        files = partial(export.build_engine_files, self, engine, self.layout)
        command = export.serve_command(self, engine, folder, self.layout)
        return ExportPlan(None, files, command)

    def find_export_problem(self, engine: ExportFormat) -> str | None:
        """Reason why an engine cannot serve the head, as the end of a sentence, or None."""
        return export.find_export_problem(self, engine, self.layout)

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """See `heads/blocks/golden.py`."""
        return golden.compute_reference_logits(self, target, states, token_ids, places)

    def build_card_facts(
        self, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Layers, hidden states and slots."""
        del provenance, acceptance
        config, problem = self.config, self.find_export_problem(ExportFormat.vllm)
        copied = []
        if self.lm_head is not None:
            copied.append("an output head that started as rows of its own")
        if self.embed_tokens is not None:
            copied.append("its token embedding")
        return HeadFacts(
            tag=self.layout.speculators_method,
            name=f"{self.method} head",
            method=self.method,
            paper=self.paper,
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {self.vocab.describe_size()}) that read the target's "
                f"hidden states {', '.join(map(str, config.layers))} (as `output_hidden_states` "
                f"counts them). It drafts {config.num_draft_tokens} tokens in one "
                f"pass{self.slot_description}"
            ),
            num_draft_tokens=config.num_draft_tokens,
            vllm_method=None if problem else self.layout.vllm_method,
            vllm_problem=f"vLLM {problem}." if problem else "",
            copied=copied,
        )
