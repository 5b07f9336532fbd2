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
from heads.blocks.formats import names_kind
from heads.blocks.network import BlockNetwork
from heads.blocks.readings import readings
from heads.head import Export, Files, Golden, HeadFacts
from heads.readings import Readings
from heads.target_model.model import Target


class BlockHead(BlockNetwork):
    """Drafter of blocks.

    Attributes:
        architectures: names in its files by which it is recognised.
        layout: names that engines use.
        method, paper: name and paper of the method.
        words: words of a model card about its slots.
    """

    architectures: ClassVar[tuple[str, ...]]
    layout: ClassVar[BlockLayout]
    method: ClassVar[str]
    paper: ClassVar[str]
    words: ClassVar[str] = ""
    chain = BlockChain
    tree = BlockTree
    doubts: ClassVar[tuple[Callable[[Any], Readings], ...]] = (readings,)
    prunable = "heads trained with head.own_output_head=true"

    @classmethod
    def load(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load a head whose config names this architecture; None for other folders."""
        if not names_kind(folder, cls.architectures, cls.layout.name):
            return None
        return cls.opened(folder, path, layers)

    @classmethod
    @abstractmethod
    def opened(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self:
        """Load a folder known to hold such a head."""

    def files(self) -> Files:
        """Files with the authors' names and keys."""
        return replace(super().files(), config=self.config_json())

    @abstractmethod
    def config_json(self) -> dict[str, Any]:
        """Content of `config.json` in the authors' layout."""

    def export(self, engine: ExportFormat, folder: str = "DIR") -> Export:
        """See `heads/blocks/export.py`."""
        problem = self.export_problem(engine)
        if problem is not None:
            return Export(problem)
        files = partial(export.files, self, engine, self.layout)
        command = export.serve_command(self, engine, folder, self.layout)
        return Export(None, files, command)

    def export_problem(self, engine: ExportFormat) -> str | None:
        """Reason why an engine cannot serve the head, as the end of a sentence, or None."""
        return export.problem(self, engine, self.layout)

    def golden(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> Golden:
        """See `heads/blocks/golden.py`."""
        return golden.golden(self, target, states, token_ids, places)

    def card(self, provenance: dict[str, Any], acceptance: dict[str, Any] | None) -> HeadFacts:
        """Layers, hidden states and slots."""
        del provenance, acceptance
        config, problem = self.config, self.export_problem(ExportFormat.vllm)
        copied = []
        if self.lm_head is not None:
            copied.append("an output head that started as rows of its own")
        if self.embed_tokens is not None:
            copied.append("its token embedding")
        return HeadFacts(
            tag=self.layout.name,
            name=f"{self.method} head",
            method=self.method,
            paper=self.paper,
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {self.vocab.described()}) that read the target's "
                f"hidden states {', '.join(map(str, config.layers))} (as `output_hidden_states` "
                f"counts them). It drafts {config.num_draft_tokens} tokens in one pass{self.words}"
            ),
            num_draft_tokens=config.num_draft_tokens,
            vllm_method=None if problem else self.layout.vllm,
            vllm_problem=f"vLLM {problem}." if problem else "",
            copied=copied,
        )
