"""DFlash-2: DFlash with convolutions in its layers and a path through the slots' candidates.

Source: inco.ai/dflash2 (2026); vLLM `models/qwen3_dflash.py`. Letters: N rows, H hidden, r rank,
k candidates, V vocabulary, A blocks, R rows of a block, G groups of H.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.errors import InputError
from conf.settings.blocks import DFlash2Config
from conf.settings.export import ExportFormat
from heads.blocks.block_head import BlockHead, BlockLayer
from heads.blocks.checkpoint import BlockCheckpoint
from heads.blocks.layouts import BlockHeadConfig, BlockLayout, build_dflash_keys
from heads.draft_head import Variant
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


@dataclass(frozen=True, kw_only=True)
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
    config_type = DFlash2HeadConfig
    implemented = DEFAULT_SCALES
    variants: ClassVar = {"dflash2": Variant("DFlash-2 heads", DFlash2Config)}
    name_with_article = "a DFlash-2 head"
    architectures = ("DFlash2DraftModel", "DFlash2Speculator")
    layout = BlockLayout("dflash2", "dflash", "DFlash2DraftModel")
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
    def parse_own_settings(cls, file: BlockCheckpoint) -> dict[str, Any]:
        """See `BlockHead.parse_own_settings`."""
        if not file.vocab.is_full or "lm_head.weight" in file.tensors:
            raise file.make_error(
                "an output head of its own, but a DFlash-2 head drafts with the target's; name "
                "another head"
            )
        scales = {
            name: file.settings.get(name, default) for name, default in DEFAULT_SCALES.items()
        }
        if not all(isinstance(each, int | float) for each in scales.values()):
            raise file.make_error(f"config.json has {scales}: must be numbers")
        return scales | {name: file.get_integer(name) for name in SIZES}

    @classmethod
    def choose_own_settings(cls, settings: Any, target: EmbeddingsAndOutputHead) -> dict[str, Any]:
        """See `BlockHead.choose_own_settings`."""
        hidden, group, projection = target.hidden_size, settings.conv_group_size, target.projection
        if hidden % group:
            raise InputError(
                f"head.conv_group_size={group}: must divide the hidden size {hidden} of "
                f"target.path={target.name}"
            )
        # The target's own scalings, which engines omit.
        scales = {
            "output_multiplier": projection.scale,
            "final_logit_softcapping": projection.cap or 0.0,
        }
        return scales | {name: getattr(settings, name) for name in SIZES}

    def make_layer(self) -> BlockLayer:
        """Make one layer with its convolutions."""
        llama, config = self.config.llama, self.config
        sizes = llama.hidden_size, config.conv_kernel_size, config.conv_group_size
        return BlockLayer(llama, partial(BlockConvolution, *sizes))

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

    def build_own_keys(self) -> dict[str, Any]:
        """See `BlockHead.build_own_keys`."""
        names = [*SIZES, *self.changed_scales]
        own = {name: getattr(self.config, name) for name in names}
        return {"dflash_config": build_dflash_keys(self.config) | own}

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
