"""Network of EAGLE heads, a decoder layer that continues the target's hidden states, and drafting.

At token t the head reads the hidden state f_t and the token x_{t+1}, and predicts x_{t+2}. With its
own output instead of f_{t+1} it continues to x_{t+3}, and so on.

Sources: EAGLE (arXiv 2401.15077), HASS (2408.15766) and EAGLE-3 (2503.01840); file layout of
SafeAILab/EAGLE and SpecForge, which vLLM and SGLang read. Letters: B texts, S tokens of a text, N
rows, H hidden, F width of the fused hidden states, I input of the layer, Q heads, K key-value
heads, d head size, V vocabulary, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from conf.errors import InputError
from conf.settings.eagle import EagleForm, FeatureHeadConfig
from heads.decoding.cache import round_up_slots
from heads.decoding.drafting import CommittedTokens, FeatureDrafter, Frontier, Roots
from heads.devices import to_device
from heads.feature_head import FeatureArchitecture, FeatureHead
from heads.layers.branch_attention import (
    BranchCache,
    CausalRange,
    branch_attention,
    build_causal_range,
)
from heads.layers.documents import Documents
from heads.layers.llama import LlamaAttention, RmsNorm, make_llama_config
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead

ROWS_PER_CHUNK = 256
"""Number of outputs whose logits are in memory at once."""
CHOSEN_PARTS = ("fc_bias", "fc_norm", "norm_output", "norm_before_residual")
"""Parts of a head that recipes turn on or off."""
LAYER_NAMES = {EagleForm.eagle1: "layers.0.", EagleForm.eagle3: "midlayer."}
"""Prefixes of the layer's tensors in the original files."""
EAGLE31_TITLE = "EAGLE-3.1 heads"


@dataclass(frozen=True, kw_only=True)
class EagleHeadConfig(FeatureArchitecture):
    """Architecture of an EAGLE head.

    Attributes:
        form: EAGLE-1 or EAGLE-3.
        qk_norm: whether queries and keys are normalised, as in Qwen3.
        norm_before_fc: whether one norm covers all fused hidden states.
        window: tokens that a row sees, its own included; None for all before it.
        fc_bias, fc_norm, norm_output, norm_before_residual: see `conf.settings.eagle`.
    """

    form: EagleForm
    own_output_head: bool = True
    qk_norm: bool = False
    norm_before_fc: bool = False
    window: int | None = None
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @property
    def num_draft_tokens(self) -> int | None:
        """None, as a head drafts from its own outputs to any depth."""
        return None


class AutoregressiveHead(FeatureHead):
    """Head that drafts token by token, to any depth.

    Attributes:
        norm: norm of outputs before the output head; None without one.
    """

    norm: nn.Module | None

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Fuse the target's hidden states [..., F] into the state [..., H] that the head reads."""

    @abstractmethod
    def encode_context(self, fused: Tensor, token_ids: Tensor, position_ids: Tensor) -> Any:
        """Encode hidden states, each with the token after it, as context of drafts.

        Args:
            fused: [S, H] result of `fuse`, or an earlier output of the head.
            token_ids: [S] int64 tokens after the hidden states.
            position_ids: [S] int64 positions of the hidden states.

        Returns:
            The context states, with `keys` and `values` [S, K, d] and `position_ids` [S].
        """

    @abstractmethod
    def draft(self, context: Any, rows: Tensor, branches: BranchCache) -> Tensor:
        """Compute outputs [N, H] at rows [N] of a context that `branches` already holds."""

    @abstractmethod
    def advance(
        self, outputs: Tensor, token_ids: Tensor, position_ids: Tensor, branches: BranchCache
    ) -> Tensor:
        """Compute the next outputs [N, H] of rows that read their own last output.

        Args:
            outputs: [N, H] last outputs.
            token_ids: [N] int64 tokens drafted from them.
            position_ids: [N] int64 positions, each one after the row's last.
            branches: cache to which the rows' new keys and values are appended.
        """

    def unroll(
        self,
        context: Any,
        token_ids: Tensor,
        rows: Tensor,
        branches: BranchCache,
        detach: bool = False,
        own_tokens: bool = False,
    ) -> Iterator[Tensor]:
        """Yield outputs [N, H] of depth 1, 2, ... for drafts along the text's own tokens.

        Row t first gives the output after x_{t+1}, then, from its own output and x_{t+2}, the next
        one. This is the training-time test. It also gives greedy decoding's outputs, as a draft is
        only followed while it is accepted.

        Args:
            context: context states of the whole text.
            token_ids: [S + 1] int64 tokens of the text, then the next token.
            rows: [N] int64 tokens of the text from which rows draft.
            branches: branches of the rows, without keys and values of draft tokens.
            detach: whether to stop gradients into outputs that are fed back.
            own_tokens: whether to follow the likeliest draft tokens, not the text's.
        """
        outputs = self.draft(context, rows, branches)
        step = 0
        while True:
            yield outputs
            step += 1
            fed = outputs.detach() if detach else outputs
            if own_tokens:
                tokens = self._rank_token_ids(outputs.detach(), 1).squeeze(1)
            else:
                # Rows at the end of the text repeat its last token; their outputs are not used.
                tokens = token_ids[(rows + 1 + step).clamp_max(len(token_ids) - 1)]
            outputs = self.advance(fed, tokens, context.position_ids[rows] + step, branches)

    def apply_final_norm(self, outputs: Tensor) -> Tensor:
        """Normalise outputs [..., H] for the output head; unchanged without a norm."""
        return outputs if self.norm is None else self.norm(outputs)

    def compute_logits(self, outputs: Tensor) -> Tensor:
        """Compute the draft logits [..., W] of outputs [..., H]."""
        return super().compute_logits(self.apply_final_norm(outputs))

    def compute_text_outputs(
        self, features: Tensor, ids: Tensor, position_ids: Tensor, first: int, depth: int
    ) -> list[Tensor]:
        """Compute the outputs [n, H] of each depth, for the tokens of one text from `first` on.

        Row t reads states 0..t, then its own outputs. These are an engine's outputs while every
        draft token is accepted.

        Args:
            features: [S, F] hidden states of the target.
            ids: [S + 1] int64 or more, the text and its next token.
            position_ids: [S] int64 positions.
            first: first token to draft from.
            depth: draft tokens per row.
        """
        size = len(features)
        context = self.encode_context(self.fuse(features), ids[1 : size + 1], position_ids)
        rows = torch.arange(first, size, device=ids.device)
        seen = build_causal_range(Documents.from_lengths([size], ids.device), rows)
        branches = BranchCache(context.keys[None], context.values[None], seen)
        return list(islice(self.unroll(context, ids, rows, branches), depth))

    def rank_drafts(
        self, features: Tensor, ids: Tensor, first: int, depth: int, width: int
    ) -> Tensor:
        """See `FeatureHead.rank_drafts`."""
        places = torch.arange(len(features), device=ids.device)
        outputs = self.compute_text_outputs(features, ids, places, first, depth)
        return torch.stack([self._rank_token_ids(each, width) for each in outputs])

    def _rank_token_ids(self, outputs: Tensor, width: int) -> Tensor:
        """Rank target ids, and return the best [N, width] after outputs [N, H]."""
        parts = [
            self.compute_logits(part).topk(width).indices for part in outputs.split(ROWS_PER_CHUNK)
        ]
        return self.vocab.to_target_ids(torch.cat(parts))


class EagleDrafter(FeatureDrafter):
    """Drafts token by token, or level by level, from the head's own outputs.

    Encodes committed tokens with the target's true hidden states, and stores only their keys and
    values.
    """

    head: AutoregressiveHead
    row_attributes = ("pending", *FeatureDrafter.row_attributes)
    pending: CommittedTokens | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Store committed tokens without encoding them.

        The head reads each token's hidden state beside the next token, and the token after the last
        one is known only when `propose` gets the roots.
        """
        if self.pending is None:
            self.pending = seen
        elif seen.logits is None:
            # Parts of a prompt are read as they arrive, which bounds the memory.
            before, self.pending = self.pending.carry_last_tokens(seen)
            first = [tokens[0] if tokens else 0 for tokens in self.pending.token_ids]
            self._encode_tokens(before, to_device(first, seen.output.hidden_states.device))
        else:
            self.pending = self.pending.concat(seen)

    def _prepare_insert(self, other: Self) -> None:
        """Prepare `insert_row`.

        The other drafter encodes its prompt except the last token, whose next token is not known
        yet. This drafter opens slots for all of its texts.
        """
        assert self.pending is not None
        assert other.pending is not None
        (tokens,), states = other.pending.token_ids, other.pending.output.hidden_states
        if len(tokens) > 1:
            places = torch.arange(len(tokens) - 1, device=states.device).unsqueeze(0)
            output = other.pending.output.select_tokens(places)
            before = CommittedTokens([tokens[:-1]], output, other.pending.cache)
            other._encode_tokens(before, to_device(tokens[-1:], states.device))
        states = self.pending.output.hidden_states
        self.cache.prepare_slots(len(states), states.device, self.pending.cache.slots)

    def _encode_tokens(self, seen: CommittedTokens, following: Tensor) -> Any:
        """Encode tokens, each with the next one, and store their keys and values.

        Args:
            seen: committed tokens of B texts.
            following: [B] int64 token after the last one of each text.

        Returns:
            The context states, and the branches that start after them.
        """
        fused, ids, places = self._build_inputs(seen, following)
        context = self.head.encode_context(fused, ids, self._clamp_positions(places.flatten()))
        keys, values = self._store_keys_values(0, context.keys, context.values, places, seen)
        self.cache.prepared_slots.advance(seen.counts, seen.token_ids)
        return context, BranchCache(
            keys, values, CausalRange.from_ends(self.cache.prepared_slots.committed[:, 0])
        )

    def _build_inputs(
        self, seen: CommittedTokens, following: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build the inputs of n new tokens per text.

        Returns:
            Fused states [B * n, H], the tokens after them [B * n], and their slots [B, n].
        """
        features = self.head.collect_features(seen.output)
        num_texts, length, _ = features.shape
        slots = self.cache.prepare_slots(num_texts, features.device, seen.cache.slots)
        # At least 0 for texts without tokens in this part, whose result is dropped.
        last = (seen.counts.unsqueeze(1) - 1).clamp_min(0)
        ids = seen.tokens.roll(-1, dims=1).scatter(1, last, following.unsqueeze(1))
        fused = self.head.fuse(features).flatten(0, 1)
        return fused, ids.flatten(), slots.compute_pending_slots(length, length)

    def _store_keys_values(
        self, layer: int, keys: Tensor, values: Tensor, places: Tensor, seen: CommittedTokens
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B * n, K, d] of a layer; return all, [B, S, K, d] each."""
        new_keys, new_values = (
            each.unflatten(0, places.shape).transpose(1, 2) for each in (keys, values)
        )
        width = round_up_slots(self.cache.prepared_slots.count_used_slots(places.shape[1]))
        needed = seen.cache.num_needed_slots
        stored = self.cache.buffers[layer].write(new_keys, new_values, places, width, needed)
        return stored[0].transpose(1, 2), stored[1].transpose(1, 2)

    def _clamp_positions(self, positions: Tensor) -> Tensor:
        """Clamp positions to the head's window, beyond which no token is drafted."""
        return positions.clamp_max(self.head.max_positions - 1)

    def start_draft(self, roots: Roots) -> tuple[Tensor, Callable[[Frontier], Tensor]]:
        """Encode all pending tokens, before `roots`. See `FeatureDrafter.start_draft`."""
        assert self.pending is not None
        seen, self.pending = self.pending, None
        context, branches = self._encode_tokens(seen, roots.tokens)
        outputs = self.head.draft(context, find_last_rows(seen), branches)
        first = self.cache.prepared_slots.committed[:, 0] - 1

        def compute_next_logits(frontier: Frontier) -> Tensor:
            nonlocal outputs, branches
            positions = first + frontier.depth
            if frontier.rows is not None:
                branches, outputs = branches.select_rows(frontier.rows), outputs[frontier.rows]
                positions = positions.repeat_interleave(len(frontier.rows) // len(roots))
            outputs = self.head.advance(
                outputs, frontier.tokens, self._clamp_positions(positions), branches
            )
            return self.head.compute_logits(outputs)

        return self.head.compute_logits(outputs), compute_next_logits


def find_last_rows(seen: CommittedTokens) -> Tensor:
    """Find the rows [B] of the last token of each text among all B * n rows."""
    places, length = seen.counts - 1, seen.output.hidden_states.shape[1]
    return places + torch.arange(len(places), device=places.device) * length


class EagleLayer(nn.Module):
    """Llama decoder layer whose input is not its residual stream.

    Args:
        config: sizes, norms and RoPE.
        two_inputs: EAGLE-3's input, a normalised embedding beside a normalised state (I = 2H);
            otherwise EAGLE-1's input, used as it is (I = H).
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
    """

    def __init__(self, config: LlamaConfig, two_inputs: bool, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(hidden, eps) if two_inputs else None
        self.hidden_norm = RmsNorm(hidden, eps) if two_inputs else None
        self.self_attn = LlamaAttention(config, 2 * hidden if two_inputs else hidden, qk_norm)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        inputs: Tensor,
        residual: Tensor,
        rotation: Tensor,
        branches: BranchCache,
        window: int | None = None,
    ) -> Tensor:
        """Compute the outputs [N, H] of the layer.

        Args:
            inputs: [N, I] inputs of the queries.
            residual: [N, H] residual stream before the layer.
            rotation: [N, 2, d] rotation of the rows' positions.
            branches: keys and values, including those of the rows themselves.
            window: tokens that a row sees, its own included; None for all before it.
        """
        query = self.self_attn.compute_query(inputs, rotation)
        attended = branch_attention(query, branches, window)
        return self.add_attention_and_mlp(residual, attended)

    def add_attention_and_mlp(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add attention [N, Q, d] and then the MLP to a residual [N, H]; return outputs [N, H]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass(frozen=True)
class ContextStates:
    """Text that the head has encoded with true hidden states.

    Attributes:
        inputs: [S, I] inputs of the layer's attention.
        residual: [S, H] residual stream before the layer.
        position_ids: [S] int64 positions.
        rotation: [S, 2, d] rotation of the positions.
        keys: [S, K, d] rotated keys.
        values: [S, K, d] values.
    """

    inputs: Tensor
    residual: Tensor
    position_ids: Tensor
    rotation: Tensor
    keys: Tensor
    values: Tensor


def build_eagle_config(
    settings: FeatureHeadConfig, target: EmbeddingsAndOutputHead
) -> EagleHeadConfig:
    """Build the architecture of a new head, with a layer of the target's sizes.

    Raises:
        InputError: the target has too few layers for the default hidden states.
    """
    eagle3 = settings.form is EagleForm.eagle3
    width = target.feature_size if eagle3 else target.hidden_size
    return EagleHeadConfig(
        form=settings.form,
        llama=make_llama_config(target.config, target.vocab_size),
        target=target.name,
        target_hidden_size=width,
        layers=tuple(settings.layers or default_layers(target.num_layers)) if eagle3 else (),
        # A reader of the file uses the target's embedding only if `target_hidden_size` equals
        # `hidden_size`. A head with two widths therefore stores its own embedding.
        own_embedding=width != target.hidden_size,
        **{name: getattr(settings, name) for name in CHOSEN_PARTS},
    )


def default_layers(num_layers: int, key: str = "head.layers") -> tuple[int, ...]:
    """Return the low, middle and high hidden states of a target, as EAGLE-3 fuses them.

    These are 2, L/2 and L-3 of `output_hidden_states`, the outputs of layers 1, L/2-1 and L-4
    counted from 0. For 4 to 6 layers, where these coincide: 1, L/2 and L-1.

    Args:
        num_layers: number L of the target's layers.
        key: name of the unset setting in the message.

    Raises:
        InputError: the target has fewer than 4 layers.
    """
    if num_layers < 4:
        raise InputError(
            f"{key} is unset: no default for a target of {num_layers} layers; set {key} to hidden "
            f"states of 0..{num_layers}"
        )
    if num_layers < 7:
        return 1, num_layers // 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3
