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
from heads.decoding.head_drafter import HeadChain, HeadTree
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Shape
from heads.head import UNKNOWN, DraftHead
from heads.layers.projection import Projection
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, Target, TargetOutput


class FeatureHead(DraftHead):
    """Head over hidden states, with an embedding and an output head of its own or the target's.

    Attributes:
        chain, tree: classes of its drafters.
        fc: fusion layer; its weight has the head's dtype.
        lm_head: [W, H]; None drafts with the target's output head.
        embed_tokens: [V, H] frozen; None uses the target's embedding.
    """

    chain: ClassVar[type[HeadChain]]
    tree: ClassVar[type[HeadTree]]
    output_rows: ClassVar[tuple[str, ...]] = (r"lm_head\.weight",)
    compiled: ClassVar[tuple[type[nn.Module], ...]] = (LlamaMLP,)
    window: int
    fc: nn.Linear
    lm_head: nn.Linear | None
    embed_tokens: nn.Embedding | None

    def _make_ends(self, own_output_head: bool) -> None:
        config, llama = self.config, self.config.llama
        sizes = llama.hidden_size, len(self.vocab.ids)
        self.lm_head = nn.Linear(*sizes, bias=False) if own_output_head else None
        self.embed_tokens = None
        if config.own_embedding:
            embedding = nn.Embedding(llama.vocab_size, llama.hidden_size)
            self.embed_tokens = embedding.requires_grad_(False)
        self.taps, self.window = Taps(config.layers), llama.max_position_embeddings

    def attach(self, target: EmbeddingsAndHead, dtype: torch.dtype | None = None) -> Self:
        """See `DraftHead.attach`. Uses the target's ends unless the head has its own."""
        config = self.fitted(target)
        name = target.name if config.target == UNKNOWN else config.target
        self.config = replace(config, target=name)
        self.taps = Taps(config.layers)
        if self.taps.layers and isinstance(target, Target):
            assert target.blocks  # checked before any work
        self._target = (target,)
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

    @abstractmethod
    def fitted(self, target: EmbeddingsAndHead) -> Any:
        """Complete the config with facts of a target that fits.

        Raises:
            InputError: the head does not fit.
        """

    def drafter(
        self,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> Drafter:
        """Make a drafter. Chains sample like the target; trees are ranked."""
        if isinstance(shape, DynamicShape):
            return self.tree(self, shape)
        return self.chain(self, shape.depth, sampling, drafter_seeds(seeds), calibration)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.fc.weight.dtype

    def features(self, output: TargetOutput) -> Tensor:
        """[..., F] hidden states of a target pass, in the head's dtype."""
        layers = [output.layers[index] for index in self.config.layers]
        return torch.cat(layers, dim=-1).to(self.fc.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., H] embeddings: the head's own, or the target's."""
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        return functional.embedding(token_ids, self.target.embedding.weight).to(self.dtype)

    def projection(self) -> Projection:
        """Projection from normalised outputs to draft logits: the head's own, or the target's."""
        if self.lm_head is not None:
            return Projection(self.lm_head.weight)
        return self.target.projection

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., W] draft logits of normalised outputs [..., H]."""
        if self.lm_head is not None:
            return self.lm_head(outputs)
        weight = self.target.output_head.weight
        return self.target.logits(outputs.to(weight.dtype)).to(outputs.dtype)
