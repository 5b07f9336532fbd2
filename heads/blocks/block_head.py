"""Block drafters: what all of them answer. See `heads/draft_head.py`.

Reference logits are computed slot by slot, in float32 on the CPU. Letters: S rows, D slots, H
hidden, V vocabulary, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from conf.settings.export import ExportFormat
from heads.blocks.drafter import BlockChain, BlockTree
from heads.blocks.layouts import (
    BlockLayout,
    build_engine_files,
    find_export_problem,
    format_serve_command,
)
from heads.blocks.network import BlockNetwork, default_layers
from heads.draft_head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits
from heads.feature_head import (
    ConfigVariants,
    copy_to_cpu,
    flip_setting,
    iter_layer_variants,
    iter_mask_token_variants,
    iter_order_variants,
    iter_rope_variants,
    iter_vocab_variants,
    make_config_variant,
)
from heads.folders import has_architecture
from heads.target_model.embeddings_and_output_head import (
    copy_output_rows,
    project_in_float32,
)
from heads.target_model.model import Target, TargetOutput


def iter_block_variants(head: BlockNetwork) -> ConfigVariants:
    """Yield variants of settings that files of any block drafter may have wrong."""
    yield from iter_layer_variants(head, partial(default_layers, number=len(head.config.layers)))
    yield from iter_order_variants(head)
    yield flip_setting(head, "causal")
    yield from iter_window_variants(head)
    yield from iter_mask_token_variants(head)
    yield from iter_rope_variants(head)
    yield from iter_vocab_variants(head)


def iter_window_variants(head: BlockNetwork) -> ConfigVariants:
    """Yield variants without a sliding window, or with the target's."""
    head_window = head.config.window
    target_window = getattr(head.target.config, "sliding_window", None)
    for window in dict.fromkeys((None, target_window)):
        if window != head_window:
            words = "no sliding window" if window is None else f"a sliding window of {window}"
            yield words, make_config_variant(head, window=window)


class BlockHead(BlockNetwork):
    """Head that drafts blocks.

    Attributes:
        architectures: values of `architectures` by which files of this kind are recognised.
        layout: names that engines use for this kind of head.
        method: name of the method.
        paper: arXiv number of the method; empty without one.
        slot_description: words about the slots in a model card.
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
        """Load the head of a folder whose config names this kind; None for other folders."""
        if not has_architecture(folder, cls.architectures, cls.layout.speculators_method):
            return None
        return cls.load_known_folder(folder, path, layers)

    @classmethod
    @abstractmethod
    def load_known_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self:
        """Load the head of a folder that is known to hold one of this kind."""

    def build_files(self) -> HeadFiles:
        """Build files with the authors' names and keys."""
        return replace(super().build_files(), config=self.build_config_json())

    @abstractmethod
    def build_config_json(self) -> dict[str, Any]:
        """Build the content of `config.json` in the authors' layout."""

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """Plan the files and the command for an engine. See `heads/blocks/layouts.py`."""
        problem = self.find_export_problem(engine)
        if problem is not None:
            return ExportPlan(problem)
        files = partial(build_engine_files, self, engine, self.layout)
        command = format_serve_command(self, engine, folder, self.layout)
        return ExportPlan(None, files, command)

    def find_export_problem(self, engine: ExportFormat) -> str | None:
        """Find the reason why an engine cannot serve the head: end of a sentence, or None."""
        return find_export_problem(self, engine, self.layout)

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Compute logits whose row t of slot d drafts in a block after token t.

        Token t + 1 is known. These are an engine's logits while every draft token is accepted, so
        tokens before a slot are the text's own. Arguments as in
        `DraftHead.compute_reference_logits`.

        Raises:
            InputError: the target's output head is quantised or has a bias.
        """
        num_rows = len(places)
        cpu_head, beside = copy_to_cpu(self, target, token_ids)
        output = TargetOutput(states[-1], dict(enumerate(states)))
        context = cpu_head.encode_context(cpu_head.collect_features(output), places)
        ends = torch.arange(1, num_rows + 1)
        nothing, depth = torch.zeros_like(ends), len(token_ids) - num_rows - 1
        block_range = cpu_head.make_block_range(nothing, ends, depth, (nothing, ends))
        outputs = cpu_head.draft(ends, places + 1, context, block_range)
        rows = None if self.lm_head is not None else copy_output_rows(target, self.dtype)
        slot_logits, state = [], None
        for slot in range(depth):
            slot_outputs = outputs[:, slot]
            base = (
                cpu_head.compute_logits(slot_outputs)
                if rows is None
                else cpu_head.scale_logits(project_in_float32(slot_outputs, rows))
            )
            previous_ids = token_ids[1 + slot : 1 + slot + num_rows]
            logits, state = cpu_head.compute_slot_logits(base, slot_outputs, previous_ids, state)
            slot_logits.append(logits)
        draft_logits = torch.stack(slot_logits)
        if rows is None:
            beside["logsumexp"] = draft_logits.logsumexp(-1)
        return ReferenceLogits(self.vocab.spread_logits(draft_logits), beside, rows)

    def build_card_facts(
        self, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Collect the facts of the head's model card: layers, hidden states and slots."""
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
