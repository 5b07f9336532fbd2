"""DFlash-2: DFlash with convolutions in its layers and a path through the slots' candidates.

Source: inco.ai/dflash2 (2026); vLLM `models/qwen3_dflash.py`. Letters: N rows, H hidden, r rank,
k candidates, V vocabulary, A blocks, R rows of a block, G groups of H.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.blocks import DFlash2Config
from conf.settings.export import ExportFormat
from heads.blocks.block_head import (
    BlockHead,
    BlockHeadConfig,
    BlockLayer,
    build_block_config,
    build_dflash_keys,
    build_qwen3_keys,
)
from heads.blocks.checkpoint import BlockCheckpoint
from heads.blocks.layouts import BlockLayout
from heads.draft_head import Variant
from heads.layers.block_attention import BlockRange
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead, Projection
from heads.vocab import DraftVocab

SIDES = 2
"""Number of convolutions of a sublayer: one before and one after."""
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DEFAULT_SCALES = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
"""Values that leave embeddings and logits unscaled, by key of `config.json`."""


@dataclass(frozen=True)
class DFlash2HeadConfig(BlockHeadConfig):
    """Architecture of a DFlash-2 head.

    Attributes:
        conv_kernel_size: number of rows that a convolution mixes.
        conv_group_size: number of neighbouring dimensions with one kernel.
        selector_rank: rank r of the selector.
        selector_top_k: number k of candidates.
        input_embedding_scale: factor of embeddings.
        output_multiplier: factor of logits.
        final_logit_softcapping: bound of the logits, by tanh; 0 for none.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0


class BlockConvolution(nn.Module):
    """Mixes neighbouring rows of a block, with kernels that depend on the row's state.

    Starts as the identity.

    Args:
        hidden_size: H.
        taps: number of rows to mix.
        group_size: number H / G of neighbouring dimensions with one kernel.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.groups = hidden_size // group_size
        kernel = torch.zeros(SIDES, taps, hidden_size)
        kernel[:, 0] = 1
        self.base_kernel = nn.Parameter(kernel)
        size = SIDES * taps * self.groups
        self.kernel_projection = nn.Linear(hidden_size, size, bias=False)

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a sublayer between both convolutions, on normalised inputs [A, R, H] to [A, R, H]."""
        _, taps, _ = self.base_kernel.shape
        change = self.kernel_projection(states).unflatten(-1, (SIDES, taps, self.groups))
        previous_ids, after = change.unbind(2)
        first, second = self.base_kernel.to(states).unbind(0)
        return _mix_rows(sublayer(_mix_rows(states, first, previous_ids)), second, after)


def _mix_rows(states: Tensor, base: Tensor, change: Tensor) -> Tensor:
    """Sum rows [A, R, H] over taps, with kernels [taps, H] + [A, R, taps, G], to [A, R, H]."""
    num_rows, (taps, groups) = states.shape[1], change.shape[2:]
    grouped = states.unflatten(-1, (groups, -1))
    kernel = base.unflatten(-1, (groups, -1)) + change.unsqueeze(-1)
    mixed = kernel[:, :, 0] * grouped
    for tap in range(1, taps):
        # A block's first row has no earlier rows.
        earlier = functional.pad(grouped, (0, 0, 0, 0, tap, 0))[:, :num_rows]
        mixed = mixed + kernel[:, :, tap] * earlier
    return mixed.flatten(-2)


class DFlash2Layer(BlockLayer):
    """Decoder layer with convolutions around its attention and its MLP.

    Args:
        config: sizes, norms and RoPE.
        taps: number of rows that a convolution mixes.
        group_size: number of neighbouring dimensions with one kernel.
    """

    def __init__(self, config: LlamaConfig, taps: int, group_size: int) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config.hidden_size, taps, group_size)
        self.mlp_conv = BlockConvolution(config.hidden_size, taps, group_size)

    def forward(
        self,
        states: Tensor,
        rotation: Tensor,
        context: tuple[Tensor, Tensor],
        block_range: BlockRange,
    ) -> Tensor:
        """Compute the outputs [A, R, H] of the layer. See `BlockLayer.forward`."""

        def attend(inputs: Tensor) -> Tensor:
            return self.compute_attention(inputs, rotation, context, block_range)

        states = states + self.attention_conv(self.input_layernorm(states), attend)
        return states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)


class CandidateSelector(nn.Module):
    """Scores a candidate c by the previous token p: <A[p] * P h, B[c]>.

    A is `predecessor_codebook`, B `successor_codebook`, P `hidden_projection`.

    Args:
        vocab_size: number V of target ids.
        hidden_size: width H of the outputs h.
        rank: width r of the codebooks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, outputs: Tensor, previous_ids: Tensor, candidates: Tensor) -> Tensor:
        """Score candidates [N, k] by outputs [N, H] and previous tokens [N] with scores [N, k]."""
        query = self.predecessor_codebook[previous_ids] * self.hidden_projection(outputs)
        return (self.successor_codebook[candidates] @ query.unsqueeze(-1)).squeeze(-1)


class DFlash2Head(BlockHead):
    """DFlash-2 head: a slot's logits choose candidates, the previous token scores them.

    Args:
        config: architecture.
        vocab: all ids of the target.
    """

    config: DFlash2HeadConfig
    variants: ClassVar = {"dflash2": Variant("DFlash-2 heads", DFlash2Config)}
    name_with_article = "a DFlash-2 head"
    architectures = ("DFlash2DraftModel", "DFlash2Speculator")
    layout = BlockLayout("dflash2", "dflash", "DFlash-2 heads", "DFlash2DraftModel")
    method, paper = "DFlash-2", ""
    slot_description = "; the previous token chooses among each slot's candidates"
    target_id_patterns = (r"candidate_selector\..*_codebook",)
    pruning_hint = "none of DFlash-2"

    def __init__(self, config: DFlash2HeadConfig, vocab: DraftVocab) -> None:
        assert vocab.is_full
        super().__init__(config, vocab)
        sizes = (vocab.size, config.llama.hidden_size, config.selector_rank)
        self.candidate_selector = CandidateSelector(*sizes)

    @classmethod
    def load_known_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self:
        """Load a DFlash-2 head, as `heads/blocks/checkpoint.py` reads the folder."""
        file = BlockCheckpoint.from_folder(folder, path, DEFAULT_SCALES)
        if not file.vocab.is_full or "lm_head.weight" in file.tensors:
            raise file.make_error(
                "an output head of its own, but a DFlash-2 head drafts with the target's; name "
                "another head"
            )
        block_config = file.build_head_config(layers, anchored=False)
        if block_config.sample_from_anchor:
            raise file.make_error(
                "config.json says sample_from_anchor=True, which no DFlash-2 head does; must be "
                "false"
            )
        scales = {
            name: file.settings.get(name, default) for name, default in DEFAULT_SCALES.items()
        }
        if not all(isinstance(each, int | float) for each in scales.values()):
            raise file.make_error(f"config.json has {scales}: must be numbers")
        sizes: Any = {name: file.get_integer(name) for name in SIZES}
        return file.load_into(
            cls(DFlash2HeadConfig(**vars(block_config), **scales, **sizes), file.vocab)
        )

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: DFlash2Config, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new head, which drafts all ids."""
        block_config = build_block_config(settings, target, sample_from_anchor=False)
        hidden, group = block_config.llama.hidden_size, settings.conv_group_size
        if hidden % group:
            raise InputError(
                f"head.conv_group_size={group}: must divide the hidden size {hidden} of "
                f"target.path={target.name}"
            )
        projection = target.projection
        config = DFlash2HeadConfig(
            **vars(block_config),
            **{name: getattr(settings, name) for name in SIZES},
            # The target's own scalings, which engines omit.
            output_multiplier=projection.scale,
            final_logit_softcapping=projection.cap or 0.0,
        )
        return cls(config, block_config.select_draft_vocab(vocab)).initialise(target, seed)

    def make_layer(self) -> BlockLayer:
        """Make one layer with its convolutions."""
        config = self.config
        return DFlash2Layer(config.llama, config.conv_kernel_size, config.conv_group_size)

    def draw_weights(self, seed: int) -> None:
        """Draw new weights by a seed, including the selector's codebooks."""
        super().draw_weights(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for each in self.find_embeddings():
            nn.init.normal_(each, std=0.02, generator=generator)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, previous_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits [N, V] of the k likeliest tokens, by the previous ones; -inf elsewhere."""
        best = base.topk(min(self.config.selector_top_k, base.shape[-1]))
        scores = best.values + self.candidate_selector(outputs, previous_ids, best.indices)
        return torch.full_like(base, -torch.inf).scatter(-1, best.indices, scores), state

    @property
    def changed_scales(self) -> list[str]:
        """Keys of `DEFAULT_SCALES` to which this head gives another value."""
        return [
            name
            for name, default in DEFAULT_SCALES.items()
            if getattr(self.config, name) != default
        ]

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `FeatureHead.embed`. Multiplies embeddings by `input_embedding_scale`."""
        return super().embed(token_ids) * self.config.input_embedding_scale

    def make_projection(self) -> Projection:
        """See `FeatureHead.make_projection`. Scales logits by the head's keys, if they are set."""
        projection, config = super().make_projection(), self.config
        if not self.changed_scales:
            return projection
        cap = config.final_logit_softcapping or None
        return projection._replace(scale=config.output_multiplier, cap=cap)

    def compute_logits(self, outputs: Tensor) -> Tensor:
        """See `FeatureHead.compute_logits`. Scales logits by the head's keys, if they are set."""
        if not self.changed_scales:
            return super().compute_logits(outputs)
        output_head = self.target.output_head
        logits = output_head(outputs.to(output_head.weight.dtype)).to(outputs.device)
        return self.scale_logits(logits).to(outputs.dtype)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """See `BlockHead.scale_logits`. Multiplies, then bounds the logits."""
        logits, cap = logits * self.config.output_multiplier, self.config.final_logit_softcapping
        return cap * (logits / cap).tanh() if cap > 0 else logits

    def build_config_json(self) -> dict[str, Any]:
        """Build the authors' keys, which vLLM and SGLang read."""
        config, names = self.config, [*SIZES, *self.changed_scales]
        return {
            "architectures": ["DFlash2DraftModel"],
            **build_qwen3_keys(config, len(self.vocab.ids)),
            "dflash_config": build_dflash_keys(config)
            | {name: getattr(config, name) for name in names},
        }

    def find_export_problem(self, engine: ExportFormat) -> str | None:
        """Find the reason why an engine cannot serve the head: end of a sentence, or None."""
        if self.config.causal:
            return "lets rows of DFlash-2 see later rows, and this head has head.causal=true"
        if self.changed_scales and engine is ExportFormat.speculators:
            return f"has no key for {' and '.join(self.changed_scales)} of this head"
        top_k, hidden = self.config.selector_top_k, self.config.llama.hidden_size
        if engine is ExportFormat.llamacpp and hidden < top_k * (top_k + 1):
            return (
                "needs a hidden size of k * (k + 1) or more for head.selector_top_k=k, and this "
                f"head has {hidden} for {top_k}"
            )
        return super().find_export_problem(engine)
