"""Network of EAGLE heads: one decoder layer that continues the target's hidden states.

At token t the head reads the hidden state f_t and the token x_{t+1}, and predicts x_{t+2}. With its
own output instead of f_{t+1} it continues to x_{t+3}, and so on.

Sources: EAGLE (arXiv 2401.15077), HASS (2408.15766) and EAGLE-3 (2503.01840); file layout of
SafeAILab/EAGLE and SpecForge, which vLLM and SGLang read. Letters: S tokens of a text, N rows, H
hidden, F width of a hidden state, V vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.eagle import EagleForm, OutputHead
from heads.eagle.branches import BranchCache
from heads.eagle.config import EagleHeadConfig, default_layers
from heads.eagle.continuing import AutoregressiveHead
from heads.eagle.layer import EagleLayer
from heads.head import check_fits
from heads.layers.llama import RmsNorm, normalise_parts
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import TargetOutput
from heads.vocab import DraftVocab

LAYER_NAMES = {EagleForm.eagle1: "layers.0.", EagleForm.eagle3: "midlayer."}


@dataclass(frozen=True)
class ContextStates:
    """Text that the head has read with true hidden states.

    Attributes:
        inputs: [S, I] inputs of the layer's attention.
        residual: [S, H].
        position_ids: [S] int64.
        rotation: [S, 2, d] rotation of the positions.
        keys, values: [S, K, d].
    """

    inputs: Tensor
    residual: Tensor
    position_ids: Tensor
    rotation: Tensor
    keys: Tensor
    values: Tensor


class EagleNetwork(AutoregressiveHead):
    """Network of an EAGLE-1/2 or EAGLE-3 head. `attach` it to its target before use.

    Args:
        config: architecture.
        vocab: draft vocabulary.
    """

    def __init__(self, config: EagleHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        assert config.form is EagleForm.eagle3 or vocab.is_full
        llama, eagle3 = config.llama, config.form is EagleForm.eagle3
        hidden, eps, width = llama.hidden_size, llama.rms_norm_eps, config.target_hidden_size
        num_features = (len(config.layers) or 3) if eagle3 else 2
        self.fc = nn.Linear(num_features * width, hidden, bias=config.fc_bias)
        self.layer = EagleLayer(llama, eagle3, config.qk_norm)
        self.norm = RmsNorm(hidden, eps) if eagle3 else None
        norms = [RmsNorm(width, eps) for _ in range(num_features)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        whole = num_features * width
        self.input_norm = RmsNorm(whole, eps) if config.norm_before_fc else None
        self._make_embeddings_and_head(eagle3 and config.own_output_head)
        self.variant, self.layer_prefix = config.form.value, LAYER_NAMES[config.form]

    def initialise(self, target: EmbeddingsAndOutputHead, start: OutputHead, seed: int) -> Self:
        """Draw weights by a seed, copy rows of the target's embedding and output head, and attach.

        Raises:
            InputError: a head cannot start from the target's output head.
        """
        self._draw_weights(seed)
        self.attach(target)
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(target.embedding.weight)
        if self.lm_head is not None and start is not OutputHead.scratch:
            _check_rows(target, start)
            rows = target.output_head.weight.detach()[self.vocab.ids.to(target.device)]
            self.lm_head.weight.data.copy_(rows)
            self.lm_head.requires_grad_(start is OutputHead.copy)
        return self

    def _draw_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def complete_config(self, target: EmbeddingsAndOutputHead) -> EagleHeadConfig:
        """See `FeatureHead.fitted`. Sizes must agree, and the target must have the layers."""
        config = self.config
        eagle3 = config.form is EagleForm.eagle3
        which = "feature_size" if eagle3 else "hidden_size"
        check_fits(self, target, config.target_hidden_size, which)
        if eagle3 and not config.layers:
            config = replace(config, layers=default_layers(target.num_layers))
        outside = [i for i in config.layers if not 0 <= i <= target.num_layers]
        if outside:
            raise InputError(
                f"head.layers={outside}: not in target.path={target.name}, which has hidden states "
                f"0..{target.num_layers}; name these"
            )
        return config

    def collect_features(self, output: TargetOutput) -> Tensor:
        """[..., F] hidden states to fuse; EAGLE-1 reads the last one."""
        if self.config.form is EagleForm.eagle1:
            return output.hidden_states.to(self.fc.weight)
        return super().collect_features(output)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse [..., F] into [..., H]. EAGLE-1 reads a single hidden state, returned unchanged."""
        if self.config.form is EagleForm.eagle1:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            features = normalise_parts(features, self.fc_norm)
        return self.fc(features)

    def encode_context(
        self, fused: Tensor, token_ids: Tensor, position_ids: Tensor
    ) -> ContextStates:
        """See `ContinuingHead.read`."""
        inputs, residual = self.build_layer_inputs(fused, token_ids)
        rotation = self.layer.self_attn.compute_rotation(inputs, position_ids)
        keys, values = self.layer.self_attn.keys_values(inputs, rotation)
        return ContextStates(inputs, residual, position_ids, rotation, keys, values)

    def build_layer_inputs(self, fused: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Input [S, I] of the layer, and its residual [S, H]; arguments as in `read`."""
        embeds, layer = self.embed(token_ids), self.layer
        if layer.input_layernorm is None or layer.hidden_norm is None:
            both = self.fc(torch.cat([embeds, fused], dim=-1))
            return both, both
        states = layer.hidden_norm(fused)
        inputs = torch.cat([layer.input_layernorm(embeds), states], dim=-1)
        return inputs, states if self.config.norm_before_residual else fused

    def draft(self, text: ContextStates, rows: Tensor, branches: BranchCache) -> Tensor:
        """See `ContinuingHead.draft`."""
        return self.layer(text.inputs[rows], text.residual[rows], text.rotation[rows], branches)

    def advance(
        self, outputs: Tensor, token_ids: Tensor, position_ids: Tensor, branches: BranchCache
    ) -> Tensor:
        """See `ContinuingHead.advance`."""
        fed = self.apply_final_norm(outputs) if self.config.norm_output else outputs
        text = self.encode_context(fed, token_ids, position_ids)
        branches.draft_keys.append(text.keys)
        branches.draft_values.append(text.values)
        return self.layer(text.inputs, text.residual, text.rotation, branches)


def _check_rows(target: EmbeddingsAndOutputHead, start: OutputHead) -> None:
    """Refuse a target's output head from which a head cannot start.

    Neither heads nor engines have a bias of logits: heads learn without the target's.
    """
    if target.head_is_quantized:
        raise InputError(
            f"head.output_head={start.value}: the output head of target.path={target.name} is "
            "quantised; set head.output_head=scratch"
        )
    if start is OutputHead.frozen and not target.has_plain_head:
        raise InputError(
            f"head.output_head=frozen: the output head of target.path={target.name} has a bias, "
            "which a head cannot use; set head.output_head=copy or scratch"
        )
