"""Frozen target: passes over documents, prompts and drafts, with taps of hidden states.

Letters: B batch, Q query tokens, S key tokens (cache + query), T tokens, n new tokens, the last of
P pending ones, D hidden, V vocab.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.command.environment import hide_hints
from conf.errors import InputError
from heads.decoding.cache import DocumentSlots, KeptNodes, RecurrentStates, TreeCache, move_slots
from heads.devices import to_device
from heads.layers.documents import Documents
from heads.target_model.architecture import AttentionPattern, Masks
from heads.target_model.attention import (
    CachedPass,
    DocumentPass,
    build_dense_mask,
    current_pass,
    open_attention_pass,
    open_traced_pass,
    pause_masks,
)
from heads.target_model.decoder import (
    LongRope,
    call_decoder,
    count_layer_outputs,
    find_decoder,
    find_decoder_layers,
    pause_layer,
    record_hidden_state,
    scale_by_position,
)
from heads.target_model.embeddings_and_output_head import (
    EmbeddingsAndOutputHead,
    move_to_embedding_device,
)
from heads.target_model.recurrent import MIXERS, wrap_mixers

MOST_GRAPHS = 64  # per target
ROW_TOKENS = 2048
"""Tokens of prompts that are read in one row: more are multiplied no faster, and take memory."""


@dataclass(frozen=True)
class FeatureLayers:
    """Hidden states of the target that a draft head reads.

    Layer indices follow `output_hidden_states`: 0 is the input of the first decoder layer, i the
    output of layer i - 1, before the final norm. Exporters translate to each engine's convention.
    """

    layers: tuple[int, ...] = ()
    """Layer indices. The last layer's output after the final norm is always included."""


@dataclass
class TargetOutput:
    """Hidden states of one pass."""

    hidden_states: Tensor
    """[B, Q, D] of the last layer, after the final norm."""
    layers: dict[int, Tensor] = field(default_factory=dict)
    """[B, Q, D] per index of `FeatureLayers.layers`."""
    switch_length: int | None = None
    """Length above which the text was read differently; see `Target.long_rope`."""

    def select_tokens(self, tokens: Tensor) -> "TargetOutput":
        """Select the hidden states [B, n, D] at tokens [B, n] int64."""
        texts = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        return self._map_states(lambda states: states[texts, tokens])

    def select_rows(self, texts: Tensor) -> "TargetOutput":
        """Select the hidden states [b, Q, D] of texts [b] int64."""
        return self._map_states(lambda states: states[texts])

    def insert_row(self, row: int, other: "TargetOutput") -> None:
        """Insert the hidden states [1, 1, D] of another text into a row."""
        self.hidden_states[row, 0] = other.hidden_states[0, 0]
        for index, states in self.layers.items():
            states[row, 0] = other.layers[index][0, 0]

    def copy_from(self, new: "TargetOutput") -> None:
        """Copy hidden states of the same shapes in place."""
        self.hidden_states.copy_(new.hidden_states)
        for index, states in self.layers.items():
            states.copy_(new.layers[index])

    @classmethod
    def concat(cls, parts: "Sequence[TargetOutput]") -> "TargetOutput":
        """Join the hidden states of consecutive passes."""
        if len(parts) == 1:
            return parts[0]
        states = torch.cat([part.hidden_states for part in parts], dim=1)
        indices = parts[0].layers
        layers = {n: torch.cat([part.layers[n] for part in parts], dim=1) for n in indices}
        return cls(states, layers)

    def to(self, device: torch.device) -> "TargetOutput":
        """Move to a device; a target over several devices leaves states at its layers."""
        return self._map_states(lambda states: states.to(device))

    def _map_states(self, change: Callable[[Tensor], Tensor]) -> "TargetOutput":
        layers = {index: change(states) for index, states in self.layers.items()}
        return TargetOutput(change(self.hidden_states), layers)


class Target(EmbeddingsAndOutputHead):
    """Frozen causal language model with explicit masks and positions.

    If the layers lie on several devices, results lie on `device`, like embedding and output head.

    Attributes:
        model: transformers model in eval mode, with its own parameters frozen.
        decoder: the model without its output head.
        attention_pattern: what each layer sees of a text.
        is_recurrent: whether layers carry states along the text.
        state_bytes: bytes of these states per draft token of a text, as measured by the check.
        long_rope: rotary embeddings, which may read longer texts differently.
        attention_calls: window and kernel of each attention layer in the last `encode_documents`.
        numerical_difference: description of how decoding differs from reading, if a recurrent layer
            treats one token and many differently; replay then differs too.
        capacity: slots given to `compile`; None before.
        needs_masks: why `encode_documents` builds masks of tokens by tokens; empty if none are
            built.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder = find_decoder(model)
        embedding = self.decoder.get_input_embeddings()
        output_head = move_to_embedding_device(embedding, model.get_output_embeddings())
        super().__init__(model, tokenizer, name, embedding, output_head)
        self.capacity: int | None = None
        self._compiled: CompiledPasses | None = None
        self._tapped: dict[int, Tensor] = {}
        self._taps: set[int] = set()
        self.attention_pattern = AttentionPattern.from_config(self.config, name)
        self.is_recurrent, self.state_bytes = self.attention_pattern.is_recurrent, 0
        if self.is_recurrent:
            wrap_mixers(self.decoder, name)
        self.long_rope = LongRope(self.decoder)
        scale_by_position(self.decoder)
        self.attention_calls: list[tuple[int | None, str]] = []
        self.needs_masks = self.numerical_difference = ""

    @cached_property
    def decoder_layers(self) -> nn.ModuleList:
        """Return the decoder layers, in order.

        Raises:
            InputError: the model has no such list.
        """
        return find_decoder_layers(self.decoder, self.num_layers, self.name)

    @cached_property
    def _num_outputs(self) -> list[int]:
        return count_layer_outputs(self.decoder_layers, lambda: self.encode_text([0]), self.name)

    def compile(self, capacity: int, backend: str = "inductor") -> None:
        """Compile passes over drafts from now on; other passes run as before.

        On a GPU caches have `capacity` slots and every shape is compiled; on a CPU one compilation
        serves all shapes except a single text or a single token.

        Raises:
            InputError: recurrent layers, which need one pass per depth.
        """
        if self.is_recurrent:
            raise InputError(
                f"compile=true: {self.name} has recurrent layers, which run depth by depth; set "
                "compile=false"
            )
        self.capacity = capacity
        self._compiled = CompiledPasses(self, capacity, backend)

    def recompute_layers(self) -> None:
        """Keep only the input of each decoder layer in passes with gradients.

        The backward pass runs the layer again. The model stays in eval mode, in which transformers'
        own checkpointing has no effect.
        """
        for layer in self.decoder_layers:
            layer.forward = partial(_run_with_recompute, layer.forward)

    def new_cache(self, num_texts: int) -> TreeCache:
        """Make an empty cache, which grows unless `compile` fixed its size."""
        # Layers with two attentions (LongCat) need more entries than there are blocks.
        num_layers = self.config.num_hidden_layers
        if (compiled := self._compiled) is not None:
            capacity, mover = compiled.capacity, compiled.mover
            return TreeCache(num_texts, self.device, num_layers, capacity, mover=mover)
        states = RecurrentStates(self.decoder.config, num_texts) if self.is_recurrent else None
        return TreeCache(num_texts, self.device, num_layers, states=states)

    @torch.no_grad()
    def run_pending(
        self,
        cache: TreeCache,
        input_ids: Tensor,
        mask: Tensor | None = None,
        depths: Tensor | None = None,
        taps: FeatureLayers | None = None,
        skip: Sequence[int] = (),
    ) -> TargetOutput:
        """Run new tokens after the committed ones. They are pending until `cache.commit`.

        Args:
            cache: cache of B texts.
            input_ids: [B, n] int64, the last n of P pending tokens; earlier ones have been run.
            mask: [B or 1, n, P] bool, pending tokens that each new token sees, itself included;
                committed tokens of its text are always seen. None for all earlier tokens.
            depths: [B or 1, P] int64 positions after the last committed token, from 0; None for
                tokens announced as certain.
            taps: layers to tap.
            skip: decoder layers, from 0, to leave out.
        """
        in_order, num_new = mask is None, input_ids.shape[1]
        if mask is None and depths is not None:
            places = torch.arange(depths.shape[1], device=depths.device)
            mask = (places[-num_new:].unsqueeze(1) >= places).unsqueeze(0)
        draft = None if mask is None or depths is None else (mask, depths)
        with ExitStack() as undo:
            if self.long_rope.switch is not None:
                lengths = cache.slots.committed + 1
                if cache.num_certain:
                    lengths = to_device(cache.certain_lengths, self.device).unsqueeze(1)
                undo.enter_context(self.long_rope.mark_long_texts(lengths > self.long_rope.switch))
            if self._compiled is not None and draft is not None and not skip:
                return self._compiled.run_pending(cache, input_ids, draft, taps or FeatureLayers())
            cache.start_pass(num_new, num_new if mask is None else mask.shape[2])
            if cache.states is not None:
                cache.states.start_pass(cache.num_certain, draft, in_order)
            for layer in skip:
                undo.enter_context(
                    pause_layer(self.decoder_layers[layer], self._num_outputs[layer])
                )
            cached_pass = CachedPass(
                self.decoder.config,
                cache,
                num_new=num_new,
                draft=draft,
                chunks=self.attention_pattern.chunks,
                in_order=in_order,
            )
            if not self.needs_masks:
                undo.enter_context(open_attention_pass(cached_pass))
            return self.run_pass(cached_pass, input_ids, taps)

    def run_pass(
        self, cached_pass: CachedPass, input_ids: Tensor, taps: FeatureLayers | None
    ) -> TargetOutput:
        """Run new tokens [B, n] of a pass, which must be open if the target needs no masks."""
        positions, cache = cached_pass.positions, cached_pass.cache
        if self.max_positions is not None and cache.read_width > self.max_positions:
            # Nodes beyond the window are in no draft, but run along in a batch.
            positions = positions.clamp_max(self.max_positions - 1)
        if self.needs_masks:
            masks = cached_pass.allowed, cached_pass.key_positions
            return self.forward(input_ids, positions, *masks, cache, taps)
        return self._run_decoder(input_ids, positions, None, cache, taps)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        allowed: Tensor,
        key_positions: Tensor,
        cache: TreeCache | None = None,
        taps: FeatureLayers | None = None,
    ) -> TargetOutput:
        """Run the decoder with an explicit attention mask.

        Gradients reach a trained adapter if enabled.

        Args:
            input_ids: [B, Q] int64.
            position_ids: [B, Q] int64.
            allowed: [B, Q, S] bool, True for visible tokens; sliding windows are added.
            key_positions: [B, S] int64 positions of the cached and new tokens.
            cache: cache whose `start_pass` has set where the new tokens go.
            taps: layers to tap.
        """
        masks = self.attention_pattern.build_masks(allowed, position_ids, key_positions, self.dtype)
        return self._run_decoder(input_ids, position_ids, masks, cache, taps)

    def _run_decoder(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        masks: Masks | None,
        cache: TreeCache | None,
        taps: FeatureLayers | None,
    ) -> TargetOutput:
        indices = (taps or FeatureLayers()).layers
        for index in indices:
            self.keep_state(index)
        output = call_decoder(self.decoder, input_ids, position_ids, masks, cache)
        missing = sorted(set(indices) - set(self._tapped))
        if missing:
            raise InputError(
                f"hidden states {missing}: not available, as these layers of "
                f"target.path={self.name} only read images; name others in head.layers"
            )
        layers = {index: self._tapped[index] for index in indices}
        self._tapped.clear()
        return TargetOutput(output.last_hidden_state, layers).to(self.device)

    def encode_documents(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        documents: Documents,
        taps: FeatureLayers | None = None,
    ) -> TargetOutput:
        """Encode packed sequences as hidden states [B, T, D]; documents do not see each other.

        Gradients as in `forward`.

        Args:
            input_ids: [B, T] int64.
            position_ids: [B, T] int64, restarting in each document.
            documents: documents of the B * T tokens, with `cu_seqlens` on the target's device.
            taps: layers to tap.
        """
        assert sum(documents.lengths) == input_ids.numel()
        with ExitStack() as undo:
            if self.long_rope.switch is not None:
                long = documents.longer_than(self.long_rope.switch).view(input_ids.shape)
                undo.enter_context(self.long_rope.mark_long_texts(long))
            if self.needs_masks:
                undo.enter_context(open_attention_pass(DocumentPass(documents)))
                allowed = build_dense_mask(documents, len(input_ids))
                return self.forward(input_ids, position_ids, allowed, position_ids, taps=taps)
            document_pass = DocumentPass(
                documents, self.decoder.config, self.attention_pattern.chunks
            )
            undo.enter_context(open_attention_pass(document_pass))
            output = self._run_decoder(input_ids, position_ids, None, None, taps)
        self.attention_calls = document_pass.calls
        return output

    @torch.no_grad()
    def read_prompts(
        self, cache: TreeCache, rows: list[list[int]], taps: FeatureLayers | None = None
    ) -> TargetOutput:
        """Read the first tokens of texts as rows of documents, in which nothing is padded.

        The tokens are pending until `cache.commit`.

        Args:
            cache: empty cache of B texts, whose `set_certain_tokens` has announced the tokens.
            rows: tokens of each text, at least one.
            taps: layers to tap.

        Returns:
            Hidden states [B, n, D]; those of shorter rows are followed by others.
        """
        parts, first = [], 0
        while first < len(rows):
            last, num_tokens = first + 1, len(rows[first])
            while last < len(rows) and num_tokens + len(rows[last]) <= ROW_TOKENS:
                num_tokens += len(rows[last])
                last += 1
            parts.append(self._read_row(cache, rows, range(first, last), taps))
            first = last
        lengths = list(map(len, rows))
        starts = to_device([*accumulate(lengths[:-1], initial=0)], self.device).unsqueeze(1)
        places = starts + torch.arange(max(lengths), device=self.device)
        states = TargetOutput.concat(parts)
        return states.select_tokens(places.clamp_max(sum(lengths) - 1).view(1, -1))._map_states(
            lambda found: found.view(*places.shape, -1)
        )

    def _read_row(
        self, cache: TreeCache, rows: list[list[int]], texts: range, taps: FeatureLayers | None
    ) -> TargetOutput:
        """Read the first tokens of some texts as one row of documents [1, S, D]."""
        lengths = [len(rows[text]) for text in texts]
        ids, places = chain.from_iterable(map(rows.__getitem__, texts)), map(range, lengths)
        owners = chain.from_iterable(map(repeat, texts, lengths))
        columns = [[*ids], [*chain.from_iterable(places)], [*owners]]
        input_ids, positions, numbers = to_device(columns, self.device)
        cache.start_document_pass(DocumentSlots(numbers, positions))
        documents = Documents.from_lengths(lengths, self.device)
        document_pass = DocumentPass(documents, self.decoder.config, self.attention_pattern.chunks)
        with ExitStack() as undo:
            if (switch := self.long_rope.switch) is not None:
                long = [end > switch for end in cache.certain_lengths]
                undo.enter_context(
                    self.long_rope.mark_long_texts(to_device(long, self.device)[numbers][None])
                )
            undo.enter_context(open_attention_pass(document_pass))
            return self._run_decoder(input_ids[None], positions[None], None, cache, taps)

    @property
    def attention_description(self) -> str:
        """Describe how `encode_documents` attends, or last attended."""
        if self.needs_masks:
            return f"masks of tokens by tokens, as {self.needs_masks}"
        kernels = {kernel for _, kernel in self.attention_calls}
        names = ", ".join(sorted(kernels | ({MIXERS} if self.is_recurrent else set())))
        difference = self.numerical_difference
        return f"{names}; transformers' decoding of it {difference}" if difference else names

    def encode_text(self, token_ids: list[int], taps: FeatureLayers | None = None) -> TargetOutput:
        """Encode one text of S tokens as hidden states [1, S, D]."""
        ids = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(ids.shape[1], device=self.device).unsqueeze(0)
        return self.encode_documents(
            ids, positions, Documents.from_lengths([ids.shape[1]], self.device), taps
        )

    def encode_response(
        self, prompt_ids: list[int], response_ids: list[int], taps: FeatureLayers | None = None
    ) -> TargetOutput:
        """Encode a prompt and a response except its last token, as in decoding; [1, S, D]."""
        token_ids, switch = prompt_ids + response_ids[:-1], self.long_rope.switch
        whole = self.encode_text(token_ids, taps)
        if switch is None or not len(prompt_ids) <= switch < len(token_ids):
            return whole
        before = self.encode_text(token_ids[:switch], taps)
        behind = whole._map_states(lambda states: states[:, switch:])
        output = TargetOutput.concat([before, behind])
        output.switch_length = switch
        return output

    def keep_state(self, index: int) -> None:
        """Keep a hidden state of every pass, permanently, as compiled passes need it."""
        if index in self._taps:
            return
        if not 0 <= index <= self.num_layers:
            raise InputError(f"hidden state {index}: {self.name} has 0..{self.num_layers}")
        active = getattr(self.config, "altup_active_idx", None)
        record_hidden_state(self.decoder_layers, index, active, self._tapped)
        self._taps.add(index)


def _run_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    attention_pass = current_pass()

    def make_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), (
            nullcontext() if attention_pass is None else open_attention_pass(attention_pass)
        )

    return checkpoint(forward, *args, use_reentrant=False, context_fn=make_contexts, **kwargs)


class CompiledPasses:
    """Compiled passes of a target over drafts: layers, masks and cache together.

    The output head, whose product has nothing to fuse, and the drafter stay outside. On a GPU all
    `capacity` slots of a cache are read, so shapes stay the same. On a CPU caches grow, as code for
    any shape is as fast there, and fewer slots are faster.
    """

    def __init__(self, target: Target, capacity: int, backend: str) -> None:
        self.target = target
        self.capacity = capacity if target.device.type == "cuda" else None
        hide_hints()
        # The caches are rebuilt inside the trace, which is right.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a .functools.lru_cache")
        # Every set of tapped layers is a graph; on a GPU, every shape too.
        limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
        torch._dynamo.config.recompile_limit = limit
        self._run: Any = torch.compile(
            self._run_pass, dynamic=self.capacity is None, backend=backend
        )
        self.mover: Any = torch.compile(move_slots, dynamic=True, backend=backend)

    def run_pending(
        self, cache: TreeCache, input_ids: Tensor, draft: tuple[Tensor, Tensor], taps: FeatureLayers
    ) -> TargetOutput:
        """Run draft tokens as `Target.run_pending` does.

        Args:
            cache: cache of B texts.
            input_ids: [B, n] int64, the last n of P pending tokens.
            draft: mask [B or 1, n, P] bool and depths [B or 1, P] int64 of the draft tokens.
            taps: layers to tap.
        """
        for index in taps.layers:
            # Before tracing, as later hooks do not become part of the trace.
            self.target.keep_state(index)
        width = cache.slots.count_used_slots(draft[0].shape[2])
        cache.reserve_slots(width)
        with pause_masks(None if self.target.needs_masks else self.target.decoder.config):
            output: TargetOutput = self._run(cache, input_ids, draft, taps, self.capacity or width)
        return output

    def _run_pass(
        self,
        cache: TreeCache,
        input_ids: Tensor,
        draft: tuple[Tensor, Tensor],
        taps: FeatureLayers,
        width: int,
    ) -> TargetOutput:
        """Run the compiled region; arguments other than tensors are constants of a graph."""
        num_new, target = input_ids.shape[1], self.target
        cache.start_traced_pass(num_new, draft[0].shape[2], width)
        cached_pass = CachedPass(
            target.decoder.config,
            cache,
            num_new=num_new,
            draft=draft,
            chunks=target.attention_pattern.chunks,
        )
        with open_traced_pass(cached_pass):
            return target.run_pass(cached_pass, input_ids, taps)


def prefill(
    target: Target, cache: TreeCache, rows: list[list[int]], taps: FeatureLayers | None = None
) -> TargetOutput:
    """Read certain tokens, at least one per text, and commit them.

    Returns:
        Hidden states [B, n, D]; shorter rows are padded.
    """
    parts = iter_prefill(target, cache, rows, taps)
    return TargetOutput.concat([output for _, output in parts])


def prefill_last_states(target: Target, cache: TreeCache, rows: list[list[int]]) -> Tensor:
    """Run `prefill`, but keep only the last hidden states [B, 1, D] of each text."""
    last: Tensor | None = None
    before = cache.slots.committed
    for _, output in iter_prefill(target, cache, rows):
        counts, before = cache.slots.committed - before, cache.slots.committed
        states = output.select_tokens(counts - 1).hidden_states
        last = states if last is None else torch.where(counts.unsqueeze(2) > 0, states, last)
    assert last is not None
    return last


def iter_prefill(
    target: Target, cache: TreeCache, rows: list[list[int]], taps: FeatureLayers | None = None
) -> Iterator[tuple[list[list[int]], TargetOutput]]:
    """Run `prefill` in parts; yield tokens and states of each. Recurrent targets run one part.

    The first part of several texts is a row of documents where the target needs no masks for it.
    """
    longest = max(map(len, rows))
    by_row = len(rows) > 1 and not (target.is_recurrent or target.needs_masks)
    by_row &= not any(cache.slots.lengths) and min(map(len, rows)) > 0
    ends = [old + len(row) for old, row in zip(cache.slots.lengths, rows, strict=True)]
    # Some recurrent layers of transformers continue a state with one token only.
    size = longest if target.is_recurrent else target.prefill_chunk
    for start in range(0, longest, size):
        chunk_rows = [row[start : start + size] for row in rows]
        counts = list(map(len, chunk_rows))
        width = max(counts)
        cache.set_certain_tokens(counts, ends)
        if by_row and start == 0:
            output = target.read_prompts(cache, chunk_rows, taps)
            num_kept = to_device(counts, target.device)
        else:
            # Padding comes after a row's tokens, which cannot see it. One copy holds all numbers.
            padded = chain.from_iterable(row + [0] * (width - len(row)) for row in chunk_rows)
            ids_and_counts = to_device([*padded, *counts], target.device)
            num_kept = ids_and_counts[-len(counts) :]
            ids = ids_and_counts[: -len(counts)].view(len(counts), width)
            output = target.run_pending(cache, ids, taps=taps)
        places = torch.arange(width, device=target.device).expand(len(counts), -1)
        kept_nodes = KeptNodes(places, num_kept)
        cache.commit([list(range(count)) for count in counts], kept_nodes)
        yield chunk_rows, output
