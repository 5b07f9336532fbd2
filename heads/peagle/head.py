"""Answers of P-EAGLE heads. See `heads/head.py`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from conf.settings.eagle import EagleForm, FeatureHeadConfig, PEagleConfig
from conf.settings.export import ExportFormat
from heads.blocks.readings import masks
from heads.eagle import export
from heads.eagle.formats import filled
from heads.eagle.head import EagleHead, feature_doubts
from heads.eagle.layouts import LAYOUTS, EagleLayout
from heads.export.engines import vllm_command
from heads.head import Export, Files, Golden, HeadFacts, Variant
from heads.peagle import formats, golden
from heads.peagle.drafter import PEagleChain, PEagleTree
from heads.peagle.network import PEagleNetwork, peagle_config
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

VLLM = replace(LAYOUTS[ExportFormat.vllm][EagleForm.eagle3], layer_prefix="layers.0.")
SPECULATORS = replace(
    LAYOUTS[ExportFormat.speculators][EagleForm.eagle3],
    architecture="PEagleSpeculator",
    method="peagle",
    # vLLM drops `fc_norm` when it converts such a config.
    parts=("norm_before_fc", "norm_before_residual", "qk_norm", "mlp_bias"),
)


class PEagleHead(PEagleNetwork, EagleHead):
    """A P-EAGLE head."""

    variants: ClassVar = {"peagle": Variant("P-EAGLE heads", PEagleConfig)}
    phrase = "a P-EAGLE head"
    chain = PEagleChain
    tree = PEagleTree
    doubts = (feature_doubts, masks)
    layouts: ClassVar = {
        ExportFormat.vllm: {EagleForm.eagle3: VLLM},
        ExportFormat.speculators: {EagleForm.eagle3: SPECULATORS},
    }

    @classmethod
    def load(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load a P-EAGLE head, recognised by its learnt hidden state; None for other folders."""
        if not formats.holds(folder):
            return None
        found, config, vocab = formats.opened(folder, path, layers)
        return filled(cls(config, vocab), found)

    @classmethod
    def untrained(
        cls, target: EmbeddingsAndHead, settings: FeatureHeadConfig, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new head with layers of the target's sizes."""
        config = peagle_config(settings, target)
        return cls(config, vocab).begin(target, settings.output_head, seed)

    def files(self) -> Files:
        """Files with EAGLE-3's keys, and further keys of speculators and vLLM."""
        files, config = super().files(), self.config
        more = {"mask_token_id": config.mask_token_id, "num_depths": config.num_draft_tokens}
        return replace(files, config=files.config | more)

    def _exported(self, engine: ExportFormat, layout: EagleLayout, folder: str) -> Export:
        """Export whose command makes vLLM draft all tokens in one pass."""
        tokens = self.config.num_draft_tokens
        command = f"vllm serve {folder}"
        if engine is ExportFormat.vllm:
            target = self.target_name
            command = vllm_command("eagle3", tokens, target, folder, parallel_drafting=True)

        def files() -> Files:
            made = export.files(self, engine, layout, tokens)
            made.config["mask_token_id"] = self.config.mask_token_id
            return made

        return Export(None, files, command, export.hint(self, engine))

    def golden(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> Golden:
        """See `heads/peagle/golden.py`."""
        return golden.golden(self, target, states, token_ids, places)

    def card(self, provenance: dict[str, Any], acceptance: dict[str, Any] | None) -> HeadFacts:
        """Layers, hidden states and rows."""
        config = self.config
        return replace(
            super().card(provenance, acceptance),
            tag="peagle",
            name="P-EAGLE head",
            method="P-EAGLE",
            paper="2602.01469",
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {self.vocab.described()}) on the target's hidden "
                f"states {', '.join(map(str, config.layers))} (as `output_hidden_states` counts "
                f"them), fused. It drafts {config.num_draft_tokens} tokens in one pass"
            ),
            num_draft_tokens=config.num_draft_tokens,
            vllm_settings={"parallel_drafting": True},
        )
