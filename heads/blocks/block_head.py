"""Block drafters: one pass drafts a whole block after a known token. See `heads/draft_head.py`.

At token t of a text, the target's hidden states up to t and the token x_{t+1} are known. A block of
rows holds that token and then masks, at positions t + 1, t + 2, ... The hidden states give its
layers the keys and values of the text. Depth d of a draft (from 1) is x_{t+1+d}.

Two conventions are translated here only. Layers: `layers` are indices of `output_hidden_states`;
the authors' `target_layer_ids` name the layer whose output is read, one less. Rows: a block has
`block_size` rows, and the first holds the last known token. Either row j drafts the token at its
own place and the first row drafts nothing (fill-in), or row j drafts the next token
(`sample_from_anchor`), which gives one more draft token.

Source: DFlash, arXiv 2602.06036; z-lab/dflash `model.py`. Letters: T texts, S tokens of a text, A
blocks, R rows, D depths, H hidden, F width of the hidden states, W draft vocabulary, V vocabulary,
L layers of the target, K key-value heads, d head size.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from conf.errors import InputError
from conf.settings.blocks import BlockConfig
from conf.settings.export import ExportFormat
from heads.blocks.checkpoint import BlockCheckpoint
from heads.blocks.layouts import (
    BlockHeadConfig,
    BlockLayout,
    build_dflash_keys,
    build_engine_files,
    build_qwen3_keys,
    find_export_problem,
    format_serve_command,
)
from heads.decoding.drafting import CommittedTokens, FeatureDrafter, Frontier, Roots
from heads.draft_head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits, check_fits
from heads.feature_head import (
    ConfigVariants,
    FeatureHead,
    choose_mask_token,
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
from heads.layers.block_attention import BlockRange, block_attention
from heads.layers.llama import LlamaAttention, RmsNorm, make_llama_config
from heads.target_model.embeddings_and_output_head import (
    EmbeddingsAndOutputHead,
    copy_output_rows,
    project_in_float32,
)
from heads.target_model.model import Target, TargetOutput
from heads.vocab import DraftVocab

TOKENS_PER_CHUNK = 1024
"""Number of tokens that draft at once in `compute_candidates`, with all rows in memory."""
ContextKeysValues = list[tuple[Tensor, Tensor]]
"""For each layer, rotated keys and values of T texts, [T, S, K, d] each."""


class BlockLayer(nn.Module):
    """Decoder layer of a block drafter: Qwen3's, with keys and values from the hidden states.

    Args:
        config: sizes, norms and RoPE.
        make_conv: maker of a module that runs a sublayer between convolutions; None for none.
    """

    def __init__(
        self, config: LlamaConfig, make_conv: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = LlamaAttention(config, hidden, qk_norm=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = LlamaMLP(config)
        self.attention_conv = make_conv and make_conv()
        self.mlp_conv = make_conv and make_conv()

    def forward(
        self,
        states: Tensor,
        rotation: Tensor,
        context: tuple[Tensor, Tensor],
        block_range: BlockRange,
    ) -> Tensor:
        """Compute the outputs [A, R, H] of the layer.

        Args:
            states: [A, R, H] states of the rows.
            rotation: [A * R, 2, d] rotation of the rows' positions.
            context: keys and values of the texts in this layer, [T, S, K, d] each.
            block_range: range of context and rows that each block sees.
        """

        def attend(inputs: Tensor) -> Tensor:
            rows, shape = inputs.flatten(0, 1), inputs.shape[:2]
            query = self.self_attn.compute_query(rows, rotation).unflatten(0, shape)
            keys, values = self.self_attn.keys_values(rows, rotation)
            block = keys.unflatten(0, shape), values.unflatten(0, shape)
            attended = block_attention(query, context, block, block_range)
            return self.self_attn.o_proj(attended.flatten(2))

        inputs, conv, mlp_conv = self.input_layernorm(states), self.attention_conv, self.mlp_conv
        states = states + (attend(inputs) if conv is None else conv(inputs, attend))
        inputs = self.post_attention_layernorm(states)
        return states + (self.mlp(inputs) if mlp_conv is None else mlp_conv(inputs, self.mlp))


def iter_block_variants(head: Any) -> ConfigVariants:
    """Yield variants of settings that files of any block drafter may have wrong."""
    if head.is_anchored:
        yield flip_setting(head, "sample_from_anchor")
    yield from iter_layer_variants(head, partial(default_layers, number=len(head.config.layers)))
    yield from iter_order_variants(head)
    yield flip_setting(head, "causal")
    for window in dict.fromkeys((None, getattr(head.target.config, "sliding_window", None))):
        if window != head.config.window:
            words = "no sliding window" if window is None else f"a sliding window of {window}"
            yield words, make_config_variant(head, window=window)
    yield from iter_mask_token_variants(head)
    yield from iter_rope_variants(head)
    yield from iter_vocab_variants(head)


class BlockDrafter(FeatureDrafter):
    """Drafts a block as a chain, or the likeliest paths through its slots, in one pass.

    Hidden states of committed tokens become keys and values at once, and nothing else is stored:
    each step computes the rows of a block anew.
    """

    has_nested_trees = False
    """Rows see later rows, so a shorter block drafts other tokens."""

    def observe(self, seen: CommittedTokens) -> None:
        """Encode the hidden states of committed tokens, and store their keys and values."""
        features = self.head.collect_features(seen.output)
        num_texts, length, _ = features.shape
        slots = self.cache.prepare_slots(num_texts, features.device, seen.cache.slots)
        places, width = slots.compute_pending_slots(length, length), slots.count_used_slots(length)
        positions = places.flatten().clamp_max(self.head.max_positions - 1)
        context = self.head.encode_context(features.flatten(0, 1), positions)
        for buffer, both in zip(self.cache.buffers, context, strict=True):
            keys, values = (each[0].unflatten(0, (num_texts, length)) for each in both)
            new = keys.transpose(1, 2), values.transpose(1, 2)
            buffer.write(*new, places, width, seen.cache.num_needed_slots)
        slots.advance(seen.counts, seen.token_ids)

    def _compute_slots(self, roots: Roots) -> tuple[Tensor, Tensor]:
        """Run the head; return logits [B, D, W] and outputs [B, D, H] of the slots."""
        ends = self.cache.prepared_slots.committed[:, 0]
        width = self.cache.prepared_slots.count_used_slots(0)
        host = torch.tensor([0]), torch.tensor([width])
        block_range = self.head.make_block_range(
            torch.zeros_like(ends), ends, self.shape.depth, host
        )
        context = [
            (_view_buffer(buffer.keys, width), _view_buffer(buffer.values, width))
            for buffer in self.cache.buffers
        ]
        outputs = self.head.draft(roots.tokens, ends, context, block_range)
        return self.head.compute_logits(outputs), outputs

    def start_draft(self, roots: Roots) -> tuple[Tensor, Callable[[Frontier], Tensor]]:
        """Run the head after the last known tokens. See `FeatureDrafter.start_draft`."""
        slots = self._compute_slots(roots)
        state: Tensor | None = None

        def compute_next_logits(frontier: Frontier) -> Tensor:
            nonlocal state
            base, slot_outputs = (each[:, frontier.depth] for each in slots)
            if frontier.rows is not None:
                number = len(frontier.tokens) // len(roots)
                base, slot_outputs = (
                    each.repeat_interleave(number, 0) for each in (base, slot_outputs)
                )
                state = None if state is None else state[frontier.rows]
            logits, state = self.head.compute_slot_logits(
                base, slot_outputs, frontier.tokens, state
            )
            return logits

        return compute_next_logits(Frontier(0, None, roots.tokens)), compute_next_logits


def _view_buffer(buffer: Tensor | None, width: int) -> Tensor:
    """View the first S slots of a buffer [B, K, ., d] as [B, S, K, d]."""
    assert buffer is not None
    return buffer.narrow(2, 0, width).transpose(1, 2)


class BlockHead(FeatureHead):
    """Head that drafts blocks. `attach` it to its target before use.

    Args:
        config: architecture.
        vocab: draft vocabulary.

    Attributes:
        architectures: values of `architectures` by which files of this kind are recognised.
        layout: names that engines use for this kind of head.
        method: name of the method.
        paper: arXiv number of the method; empty without one.
        slot_description: words about the slots in a model card.
        is_anchored: whether new heads of this kind sample from the anchor.
        implemented: keys of `REQUIRED_VALUES` of the checkpoint that this kind implements.
    """

    config: BlockHeadConfig
    config_type = BlockHeadConfig
    architectures: ClassVar[tuple[str, ...]]
    layout: ClassVar[BlockLayout]
    method: ClassVar[str]
    paper: ClassVar[str]
    slot_description: ClassVar[str] = ""
    is_anchored: ClassVar[bool] = False
    implemented: ClassVar[Collection[str]] = ()
    drafter = BlockDrafter
    drawn_modules = (nn.Linear, nn.Embedding)
    ambiguities = (iter_block_variants,)
    pruning_hint = "heads trained with head.own_output_head=true"

    def __init__(self, config: BlockHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        llama = config.llama
        hidden, eps = llama.hidden_size, llama.rms_norm_eps
        read = len(config.layers) * config.target_hidden_size
        self.fc = nn.Linear(read, hidden, bias=False)
        self.hidden_norm = RmsNorm(hidden, eps)
        self.layers = nn.ModuleList(self.make_layer() for _ in range(llama.num_hidden_layers))
        self.norm = RmsNorm(hidden, eps)
        self._make_embeddings_and_head(config.own_output_head)

    def initialise(self, target: EmbeddingsAndOutputHead, seed: int) -> Self:
        """Draw weights by a seed, copy rows of the target's embedding and output head, and attach.

        Raises:
            InputError: the head starts from rows of the target's output head, which is quantised.
        """
        self.draw_and_attach(target, seed)
        if self.lm_head is not None:
            if target.head_is_quantized:
                raise InputError(
                    "head.own_output_head=true: starts from rows of the target's output head, but "
                    f"that of target.path={target.name} is quantised; leave head.own_output_head "
                    "unset"
                )
            rows = target.output_head.weight.detach()[self.vocab.ids]
            self.lm_head.weight.data.copy_(rows)
        return self

    def make_layer(self) -> BlockLayer:
        """Make one layer of the network."""
        return BlockLayer(self.config.llama)

    def complete_config(self, target: EmbeddingsAndOutputHead) -> BlockHeadConfig:
        """See `FeatureHead.complete_config`. Fills in the number of the target's layers."""
        config = self.config
        check_fits(self, target, config.target_hidden_size, "feature_size")
        if config.llama.hidden_size != target.hidden_size and not config.own_embedding:
            check_fits(self, target, config.llama.hidden_size)
        check_layers(config.layers, target)
        return replace(config, num_target_layers=target.num_layers)

    def encode_context(self, features: Tensor, position_ids: Tensor) -> ContextKeysValues:
        """Encode hidden states as keys and values of one text of S tokens, for each layer.

        Args:
            features: [S, F] hidden states of the target.
            position_ids: [S] int64 positions.
        """
        context = self.hidden_norm(self.fc(features))
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        rotation = attentions[0].compute_rotation(context, position_ids)
        keys_values = [attention.keys_values(context, rotation) for attention in attentions]
        return [(keys[None], values[None]) for keys, values in keys_values]

    def draft(
        self, roots: Tensor, places: Tensor, context: ContextKeysValues, block_range: BlockRange
    ) -> Tensor:
        """Compute normalised outputs [A, D, H] of the rows that draft.

        Args:
            roots: [A] int64 last known tokens.
            places: [A] int64 positions of these tokens.
            context: keys and values of the texts.
            block_range: range that each block sees, except in `full_layers`.
        """
        rows = torch.arange(block_range.num_rows, device=roots.device)
        ids = torch.where(rows == 0, roots.unsqueeze(1), self.config.mask_token_id)
        positions = (places.unsqueeze(1) + rows).clamp_max(self.max_positions - 1)
        states = self.embed(ids)
        # In the dtype of the text's keys; under autocast, embeddings have another.
        attention: Any = self.layers[0].self_attn
        rotation = attention.compute_rotation(context[0][0], positions.flatten())
        full_range, full = replace(block_range, causal=False, window=None), self.config.full_layers
        for number, layer in enumerate(self.layers):
            layer_range = full_range if number in full else block_range
            states = layer(states, rotation, context[number], layer_range)
        return self.norm(states[:, self.config.first_row :])

    def make_block_range(
        self, first: Tensor, end: Tensor, depth: int, host: tuple[Tensor, Tensor] | None = None
    ) -> BlockRange:
        """Make the range of blocks that draft `depth` tokens; arguments as in `BlockRange`."""
        num_rows = depth + self.config.first_row
        return BlockRange(first, end, num_rows, self.config.causal, self.config.window, host)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Scale logits [..., W] of the output head's rows as the head's file says.

        Engines omit the target's own scalings.
        """
        return logits

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, previous_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits [N, W] of a slot from the previous tokens; by default `base`.

        Args:
            base: [N, W] logits of the output head, not changed in place.
            outputs: [N, H] outputs of the slot.
            previous_ids: [N] int64 target ids of the previous tokens.
            state: [N, .] state of the previous slots; None for the first slot or without a state.

        Returns:
            The logits, and the state for the next slot.
        """
        del outputs, previous_ids
        return base, state

    def iter_slot_logits(
        self,
        outputs: Tensor,
        ids: Tensor,
        ends: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> Iterator[Tensor]:
        """Yield the logits [N, W] of each slot of blocks along a text's own tokens.

        Args:
            outputs: [N, D, H] outputs of the slots.
            ids: [S] int64 tokens of the text.
            ends: [N] int64 last known token of each block.
            compute_logits: function from outputs [N, H] of a slot to logits of the output head.
        """
        state: Tensor | None = None
        for slot, each in enumerate(outputs.unbind(1)):
            # Drafts after the end of a text are not used.
            previous_ids = ids[(ends + slot).clamp_max(len(ids) - 1)]
            logits, state = self.compute_slot_logits(
                compute_logits(each), each, previous_ids, state
            )
            yield logits

    @property
    def draft_offset(self) -> int:
        """Return the positions from a known token to the row that drafts first after it."""
        return 1 + self.config.first_row

    def rank_drafts(
        self, features: Tensor, ids: Tensor, first: int, depth: int, width: int
    ) -> Tensor:
        """See `FeatureHead.rank_drafts`."""
        places = torch.arange(len(features), device=ids.device)
        context, parts = self.encode_context(features, places), []
        for rows in places[first:].split(TOKENS_PER_CHUNK):
            nothing, end = torch.zeros_like(rows), rows + 1
            block_range = self.make_block_range(nothing, end, depth, (nothing.cpu(), end.cpu()))
            outputs = self.draft(ids[end], end, context, block_range)
            slots = self.iter_slot_logits(outputs, ids, end, self.compute_logits)
            parts.append(torch.stack([logits.topk(width).indices for logits in slots]))
        return self.vocab.to_target_ids(torch.cat(parts, dim=1))

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load the head of a folder whose config names this kind; None for other folders."""
        if not has_architecture(folder, cls.architectures, cls.layout.speculators_method):
            return None
        file = BlockCheckpoint.from_folder(folder, path, cls.implemented)
        if file.settings.get("sample_from_anchor") and not cls.is_anchored:
            raise file.make_error(
                f"config.json says sample_from_anchor=True, but a {cls.method} head fills in "
                "masks, and no engine serves the other kind; must be false"
            )
        # speculators filled in masks before it wrote the key, and vLLM reads such files so.
        anchored = cls.is_anchored and "speculators_model_type" not in file.settings
        config, own = file.build_head_config(layers, anchored), cls.parse_own_settings(file)
        return file.load_into(cls(cls.config_type(**vars(config), **own), file.vocab))

    @classmethod
    def parse_own_settings(cls, file: BlockCheckpoint) -> dict[str, Any]:
        """Parse the fields of the config that only this kind has, from a folder.

        Raises:
            InputError: a value is missing or not implemented.
        """
        del file
        return {}

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: Any, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new head; it drafts all ids unless it has its own output head."""
        block_config = build_block_config(settings, target, cls.is_anchored)
        own = cls.choose_own_settings(settings, target)
        config = cls.config_type(**vars(block_config), **own)
        if not config.own_output_head:
            vocab = DraftVocab.make_full(vocab.size)
        return cls(config, vocab).initialise(target, seed)

    @classmethod
    def choose_own_settings(cls, settings: Any, target: EmbeddingsAndOutputHead) -> dict[str, Any]:
        """Choose the fields of the config that only this kind has, for a new head.

        Raises:
            InputError: the settings do not fit the target.
        """
        del settings, target
        return {}

    def build_files(self) -> HeadFiles:
        """Build files with the authors' names and keys."""
        config = build_qwen3_keys(self.config, len(self.vocab.ids)) | self.build_own_keys()
        return replace(
            super().build_files(), config={"architectures": [self.architectures[0]], **config}
        )

    def build_own_keys(self) -> dict[str, Any]:
        """Build the keys of `config.json` beyond Qwen3's, in the authors' layout."""
        return {"dflash_config": build_dflash_keys(self.config)}

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
        return find_export_problem(self, engine)

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

        def project(slot_outputs: Tensor) -> Tensor:
            if rows is None:
                return cpu_head.compute_logits(slot_outputs)
            return cpu_head.scale_logits(project_in_float32(slot_outputs, rows))

        draft_logits = torch.stack([*cpu_head.iter_slot_logits(outputs, token_ids, ends, project)])
        if rows is None:
            beside["logsumexp"] = draft_logits.logsumexp(-1)
        return ReferenceLogits(self.vocab.spread_logits(draft_logits), beside, rows)

    def build_card_facts(self, provenance: dict[str, Any]) -> HeadFacts:
        """Collect the facts of the head's model card: layers, hidden states and slots."""
        del provenance
        config, problem = self.config, self.find_export_problem(ExportFormat.vllm)
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
            num_draft_tokens=self.num_engine_tokens,
            vllm_method=None if problem else self.layout.vllm_method,
            vllm_problem=f"vLLM {problem}." if problem else "",
            copied=self.list_copied_parts(),
        )


def build_block_config(
    settings: BlockConfig, target: EmbeddingsAndOutputHead, sample_from_anchor: bool
) -> BlockHeadConfig:
    """Build the architecture of a new head with layers of the target's sizes.

    Raises:
        InputError: the target lacks the layers or the mask token.
    """
    layers = tuple(settings.layers or default_layers(target.num_layers, settings.num_features))
    check_layers(layers, target)
    llama = make_llama_config(target.config, target.vocab_size)
    llama.num_hidden_layers = settings.num_layers
    return BlockHeadConfig(
        llama=llama,
        target=target.name,
        target_hidden_size=target.feature_size,
        num_target_layers=target.num_layers,
        layers=layers,
        block_size=settings.block_size,
        mask_token_id=choose_mask_token(target, settings.mask_token_id),
        sample_from_anchor=sample_from_anchor,
        causal=settings.causal,
        window=settings.window,
        own_output_head=settings.own_output_head,
        # A reader of the file uses the target's embedding only if `target_hidden_size` equals
        # `hidden_size`. A head with two widths therefore stores its own embedding.
        own_embedding=target.feature_size != target.hidden_size,
    )


def default_layers(num_layers: int, number: int) -> tuple[int, ...]:
    """Return hidden states in even steps from the output of layer 1 to that of layer L - 3.

    Args:
        num_layers: number L of the target's layers.
        number: number of hidden states to read; duplicates are merged.

    Raises:
        InputError: the target has fewer than 4 layers.

    Source: z-lab/dflash `model.py`, `build_target_layer_ids`, which counts layers from 0.
    """
    if num_layers < 4:
        raise InputError(
            f"head.layers is unset: no default for a target of {num_layers} layers; set "
            f"head.layers to hidden states of 0..{num_layers}"
        )
    if number == 1:
        return (num_layers // 2 + 1,)
    steps = [1 + index * (num_layers - 4) / (number - 1) for index in range(number)]
    return tuple(sorted({round(step) + 1 for step in steps}))


def check_layers(layers: tuple[int, ...], target: EmbeddingsAndOutputHead) -> None:
    """Refuse layers that the target lacks, repeated ones and ones out of order.

    Raises:
        InputError: `layers` are not rising, or the target lacks one of them.
    """
    # The output of the last layer passes the final norm, which engines do not apply here.
    known = range(target.num_layers)
    if list(layers) != sorted(set(layers)) or not set(layers) <= set(known):
        raise InputError(
            f"head.layers={list(layers)}: must be rising and of 0..{target.num_layers - 1}, the "
            f"hidden states of target.path={target.name} before its final norm"
        )
