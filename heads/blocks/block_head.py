"""Answers shared by all kinds of block drafters. See `heads/draft_head.py`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from conf.settings.export import ExportFormat
from heads.blocks import layouts as export
from heads.blocks.drafter import BlockChain, BlockTree
from heads.blocks.layouts import BlockLayout
from heads.blocks.network import BlockNetwork, default_layers
from heads.draft_head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits
from heads.feature_head import (
    ConfigVariants,
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
    select_embedding_rows,
)
from heads.target_model.model import Target, TargetOutput


def iter_block_variants(head: BlockNetwork) -> ConfigVariants:
    """Readings for any block drafter."""
    yield from iter_layer_variants(head, partial(default_layers, number=len(head.config.layers)))
    yield from iter_order_variants(head)
    yield flip_setting(head, "causal")
    yield from iter_window_variants(head)
    yield from iter_mask_token_variants(head)
    yield from iter_rope_variants(head)
    yield from iter_vocab_variants(head)


def iter_window_variants(head: BlockNetwork) -> ConfigVariants:
    """No sliding window, or the target's."""
    stated, theirs = head.config.window, getattr(head.target.config, "sliding_window", None)
    for window in dict.fromkeys((None, theirs)):
        if window != stated:
            words = "no sliding window" if window is None else f"a sliding window of {window}"
            yield words, make_config_variant(head, window=window)


def compute_reference_logits(
    head: BlockNetwork,
    target: Target,
    states: list[Tensor],
    token_ids: Tensor,
    position_ids: Tensor,
) -> ReferenceLogits:
    """Compute logits whose row t of slot d drafts in a block after token t, from known token t + 1.

    These are an engine's logits while every draft token is accepted, so tokens before a slot are
    the text's own. Arguments as in `DraftHead.golden`.

    Raises:
        InputError: the target's output head is quantised or has a bias.
    """
    num_rows, mask = len(position_ids), head.config.mask_token_id
    wanted = torch.cat([token_ids, torch.tensor([mask])])
    copy = _on_cpu(head, _select_embeddings(head, target, wanted))
    output = TargetOutput(states[-1], dict(enumerate(states)))
    text = copy.encode_context(copy.collect_features(output), position_ids)
    ends = torch.arange(1, num_rows + 1)
    nothing, depth = torch.zeros_like(ends), len(token_ids) - num_rows - 1
    sight = copy.make_block_range(nothing, ends, depth, (nothing, ends))
    outputs = copy.draft(ends, position_ids + 1, text, sight)
    rows = None if head.lm_head is not None else copy_output_rows(target, head.dtype)
    beside = {"token_embeddings": _select_embeddings(head, target, token_ids[1:], of_target=True)}
    beside["mask_token_id"] = torch.tensor([mask])
    beside["mask_embedding"] = _select_embeddings(
        head, target, torch.tensor([mask]), of_target=True
    )
    found, state = [], None
    for slot in range(depth):
        mine = outputs[:, slot]
        base = (
            copy.compute_logits(mine)
            if rows is None
            else copy.scale_logits(project_in_float32(mine, rows))
        )
        before = token_ids[1 + slot : 1 + slot + num_rows]
        logits, state = copy.compute_slot_logits(base, mine, before, state)
        found.append(logits)
    drawn = torch.stack(found)
    logits = torch.full((*drawn.shape[:2], head.vocab.size), float("-inf"))
    logits[..., head.vocab.ids.cpu()] = drawn
    if rows is None:
        beside["logsumexp"] = drawn.logsumexp(-1)
    return ReferenceLogits(logits, beside, rows)


def _select_embeddings(
    head: BlockNetwork, target: Target, token_ids: Tensor, of_target: bool = False
) -> Tensor:
    """[n, H] rows of the head's own embedding, or of the target's."""
    own = None if of_target else head.embed_tokens
    weight = target.embedding.weight if own is None else own.weight
    return select_embedding_rows(weight, token_ids, head.dtype)


def _on_cpu(head: BlockNetwork, embeddings: Tensor) -> BlockNetwork:
    """Float32 copy whose embedding holds the text's tokens in order, then the mask."""
    config = replace(head.config, mask_token_id=len(embeddings) - 1)
    copy = type(head)(config, head.vocab.to("cpu"))
    copy.embed_tokens = None
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("embed_tokens.")}
    copy.load_state_dict(tensors)
    copy.embed_tokens = nn.Embedding.from_pretrained(embeddings.float())
    return copy.eval()


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
        """See `heads/blocks/layouts.py`."""
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
        """See `heads/blocks/block_head.py`."""
        return compute_reference_logits(self, target, states, token_ids, places)

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
