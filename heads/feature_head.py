"""Shared part of EAGLE, P-EAGLE and block heads, which read the target's hidden states.

Letters: F width of a hidden state, H hidden, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

from heads.decoding.chains import Calibration
from heads.decoding.drafting import Drafter
from heads.decoding.head_drafter import ChainDrafter, DynamicTreeDrafter
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DraftShape, DynamicShape
from heads.head import UNKNOWN, DraftHead
from heads.layers.projection import Projection
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, Target, TargetOutput


class FeatureHead(DraftHead):
    """Head over hidden states, with an embedding and an output head of its own or the target's.

    Attributes:
        chain_drafter, tree_drafter: classes of its drafters.
        fc: fusion layer; its weight has the head's dtype.
        lm_head: [W, H]; None drafts with the target's output head.
        embed_tokens: [V, H] frozen; None uses the target's embedding.
    """

    chain_drafter: ClassVar[type[ChainDrafter]]
    tree_drafter: ClassVar[type[DynamicTreeDrafter]]
    output_head_patterns: ClassVar[tuple[str, ...]] = (r"lm_head\.weight",)
    compiled_modules: ClassVar[tuple[type[nn.Module], ...]] = (LlamaMLP,)
    max_positions: int
    fc: nn.Linear
    lm_head: nn.Linear | None
    embed_tokens: nn.Embedding | None

    def _make_embeddings_and_head(self, own_output_head: bool) -> None:
        config, llama = self.config, self.config.llama
        sizes = llama.hidden_size, len(self.vocab.ids)
        self.lm_head = nn.Linear(*sizes, bias=False) if own_output_head else None
        self.embed_tokens = None
        if config.own_embedding:
            embedding = nn.Embedding(llama.vocab_size, llama.hidden_size)
            self.embed_tokens = embedding.requires_grad_(False)
        self.taps, self.max_positions = FeatureLayers(config.layers), llama.max_position_embeddings

    def attach(self, target: EmbeddingsAndOutputHead, dtype: torch.dtype | None = None) -> Self:
        """See `DraftHead.attach`. Uses the target's ends unless the head has its own."""
        config = self.complete_config(target)
        name = target.name if config.target == UNKNOWN else config.target
        self.config = replace(config, target=name)
        self.taps = FeatureLayers(config.layers)
        if self.taps.layers and isinstance(target, Target):
            assert target.decoder_layers  # checked before any work
        self._target = (target,)
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

    @abstractmethod
    def complete_config(self, target: EmbeddingsAndOutputHead) -> Any:
        """Complete the config with facts of a target that fits.

        Raises:
            InputError: the head does not fit.
        """

    def make_drafter(
        self,
        shape: DraftShape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> Drafter:
        """Make a drafter. Chains sample like the target; trees are ranked."""
        if isinstance(shape, DynamicShape):
            return self.tree_drafter(self, shape)
        return self.chain_drafter(self, shape.depth, sampling, drafter_seeds(seeds), calibration)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.fc.weight.dtype

    def collect_features(self, output: TargetOutput) -> Tensor:
        """[..., F] hidden states of a target pass, in the head's dtype."""
        layers = [output.layers[index] for index in self.config.layers]
        return torch.cat(layers, dim=-1).to(self.fc.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., H] embeddings: the head's own, or the target's."""
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        return functional.embedding(token_ids, self.target.embedding.weight).to(self.dtype)

    def make_projection(self) -> Projection:
        """Projection from normalised outputs to draft logits: the head's own, or the target's."""
        if self.lm_head is not None:
            return Projection(self.lm_head.weight)
        return self.target.projection

    def compute_logits(self, outputs: Tensor) -> Tensor:
        """[..., W] draft logits of normalised outputs [..., H]."""
        if self.lm_head is not None:
            return self.lm_head(outputs)
        weight = self.target.output_head.weight
        return self.target.compute_logits(outputs.to(weight.dtype)).to(outputs.dtype)
