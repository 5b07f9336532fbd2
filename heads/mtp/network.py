"""Network of an MTP head: a decoder layer of the target's own kind after its last hidden state.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; FastMTP (2509.18362) for the layer that reads
its own output. Letters: S tokens of a text, N rows, H hidden, Q heads, K key-value heads, d head
size.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.eagle.branch_attention import branch_attention
from heads.eagle.branches import BranchCache
from heads.eagle.continuing import AutoregressiveHead
from heads.head import check_fits
from heads.mtp.config import MtpHeadConfig, find_layer_classes
from heads.target_model.attention import open_attention_pass
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.kernels import ScoreRule
from heads.target_model.model import FeatureLayers, TargetOutput
from heads.vocab import DraftVocab


@dataclass(frozen=True)
class MtpContextStates:
    """Text that the head has read with the target's hidden states.

    Attributes:
        inputs: [S, H] inputs of the decoder layer.
        position_ids: [S] int64.
        keys, values: [S, K, d].
    """

    inputs: Tensor
    position_ids: Tensor
    keys: Tensor
    values: Tensor


class _KeyValueCapture:
    """Pass of the layer's attention that only takes the keys and values of a text."""

    config = None

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Keep keys and values; the returned attention is not used."""
        del layer, scores
        # Under autocast only values come from a product, and keys have the wider dtype.
        self.keys = _view_rows(key).to(value.dtype)
        self.values = _pad_values(_view_rows(value), key.shape[-1])
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2)


class _DraftAttention:
    """Pass of the layer over rows that draft.

    Args:
        branches: what the rows see; with `remembered`, gets their own keys and values.
        remembered: whether the rows are draft tokens, not the text's.
    """

    config = None

    def __init__(self, branches: BranchCache, remembered: bool) -> None:
        self.branches, self.remembered = branches, remembered

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """[1, N, Q, d] of queries [1, Q, N, d], keys and values [1, K, N, d]."""
        del layer
        if scores.cap:
            raise NotImplementedError("an MTP layer with a soft cap")
        width, query, key = query.shape[-1], query.to(value.dtype), key.to(value.dtype)
        if self.remembered:
            self.branches.draft_keys.append(_view_rows(key))
            self.branches.draft_values.append(_pad_values(_view_rows(value), width))
        if scores.scale is not None and scores.scale != width**-0.5:
            query = query * (scores.scale * width**0.5)
        attended = branch_attention(
            _view_rows(query), self.branches, scores.window or None, scores.sinks
        )
        return attended[..., : value.shape[-1]].unsqueeze(0)


def _view_rows(heads: Tensor) -> Tensor:
    """[N, K, d] view of [1, K, N, d]."""
    return heads.squeeze(0).transpose(0, 1)


def _pad_values(values: Tensor, width: int) -> Tensor:
    """Pad values to the width of keys, which latent attention has wider."""
    return pad(values, (0, width - values.shape[-1])) if values.shape[-1] < width else values


class MtpNetwork(AutoregressiveHead):
    """Network of an MTP head. `attach` it to its target before use.

    Args:
        config: architecture.
        vocab: all ids of the target.
    """

    output_head_patterns = ()
    compiled_modules = ()
    config: MtpHeadConfig

    def __init__(self, config: MtpHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        parts, hidden = find_layer_classes(config.layer), config.hidden_size
        names = ("rms_norm_eps", "layer_norm_epsilon")
        epsilon = next(getattr(parts.config, name) for name in names if hasattr(parts.config, name))
        self.enorm = parts.norm(hidden, epsilon)
        self.hnorm = parts.norm(hidden, epsilon)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer: Any = parts.layer(parts.config, 0)
        if config.family_entry.has_indexer:
            self.layer.self_attn.indexer = _build_indexer(parts.config)
        self.norm = parts.norm(hidden, epsilon) if "norm" in config.family_entry.names else None
        self.lm_head = self.embed_tokens = None
        self.taps, self.max_positions = FeatureLayers(config.layers), config.num_positions
        # Not a submodule, as its float32 frequencies must survive a cast of the head.
        self._rotary: Any = parts.rotary and (parts.rotary(config=parts.config),)
        rules = getattr(parts.config, "rope_parameters", None) or {}
        # With several kinds of rotation, the module asks for the kind.
        self._kind = [kind for kind in getattr(parts.config, "layer_types", ()) if kind in rules]

    @property
    def num_layers(self) -> int:
        """1: the layer is used again at every depth."""
        return 1

    def initialise(self, target: EmbeddingsAndOutputHead, seed: int) -> Self:
        """Draw new weights by a seed, and attach the head."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02, generator=generator)
            elif not name.endswith("weight"):  # biases, and sinks that nobody filled
                parameter.data.zero_()
        return self.attach(target)

    def complete_config(self, target: EmbeddingsAndOutputHead) -> MtpHeadConfig:
        """See `FeatureHead.fitted`."""
        check_fits(self, target, self.config.hidden_size)
        return self.config

    def collect_features(self, output: TargetOutput) -> Tensor:
        """[..., H] last hidden state, after or before the target's final norm."""
        layers = self.config.layers
        states = output.layers[layers[0]] if layers else output.hidden_states
        return states.to(self.fc.weight)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the hidden state unchanged."""
        return features

    def build_layer_inputs(self, states: Tensor, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[N, H] inputs of the decoder layer, from states [N, H] and the next tokens [N] int64."""
        config, embeds = self.config, self.embed(token_ids)
        if config.zeroes_first:
            embeds = embeds.masked_fill(position_ids.unsqueeze(-1) == 0, 0.0)
        both = [self.enorm(embeds), self.hnorm(states)]
        return self.fc(torch.cat(both[::-1] if config.state_first else both, dim=-1))

    def encode_context(
        self, fused: Tensor, token_ids: Tensor, position_ids: Tensor
    ) -> MtpContextStates:
        """See `ContinuingHead.read`."""
        inputs, reading = (
            self.build_layer_inputs(fused, token_ids, position_ids),
            _KeyValueCapture(),
        )
        norm, rows = getattr(self.layer, "input_layernorm", nn.Identity()), inputs.unsqueeze(0)
        with open_attention_pass(reading):
            self.layer.self_attn(
                hidden_states=norm(rows), **self._build_layer_arguments(rows, position_ids)
            )
        return MtpContextStates(inputs, position_ids, reading.keys, reading.values)

    def draft(self, text: MtpContextStates, rows: Tensor, branches: BranchCache) -> Tensor:
        """See `ContinuingHead.draft`."""
        positions = text.position_ids[rows]
        return self._run_layer(
            text.inputs[rows], positions, _DraftAttention(branches, remembered=False)
        )

    def advance(
        self, outputs: Tensor, token_ids: Tensor, position_ids: Tensor, branches: BranchCache
    ) -> Tensor:
        """See `ContinuingHead.advance`."""
        fed = self.apply_final_norm(outputs) if self.config.feeds_back_normed else outputs
        inputs = self.build_layer_inputs(fed, token_ids, position_ids)
        return self._run_layer(inputs, position_ids, _DraftAttention(branches, remembered=True))

    def _run_layer(self, inputs: Tensor, position_ids: Tensor, drafting: _DraftAttention) -> Tensor:
        """[N, H] outputs of the layer for inputs [N, H] at positions [N]."""
        rows = inputs.unsqueeze(0)
        with open_attention_pass(drafting):
            output = self.layer(rows, **self._build_layer_arguments(rows, position_ids))
        return (output[0] if isinstance(output, tuple) else output).squeeze(0)

    def _build_layer_arguments(self, rows: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """Arguments of a layer for positions [N], without a mask."""
        places = position_ids.unsqueeze(0)
        told: dict[str, Any] = {"position_ids": places, "attention_mask": None}
        if self._rotary is not None:
            rotary = self._rotary[0].to(rows.device)
            told["position_embeddings"] = rotary(rows, places, *self._kind)
        return told


def _build_indexer(config: Any) -> nn.Module:
    """Weights of the module that chooses keys of long texts; kept unchanged and not run here."""
    hidden, size, num_heads = config.hidden_size, config.index_head_dim, config.index_n_heads
    parts = {
        "wq_b": nn.Linear(config.q_lora_rank, num_heads * size, bias=False),
        "wk": nn.Linear(hidden, size, bias=False),
        "k_norm": nn.LayerNorm(size),
        "weights_proj": nn.Linear(hidden, num_heads, bias=False),
    }
    return nn.ModuleDict(parts).requires_grad_(False)
