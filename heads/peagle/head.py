"""Answers of P-EAGLE heads. See `heads/head.py`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from conf.settings.eagle import EagleForm, FeatureHeadConfig, PEagleConfig
from conf.settings.export import ExportFormat
from heads.blocks.readings import iter_mask_token_variants
from heads.eagle import export
from heads.eagle.formats import load_into
from heads.eagle.head import EagleHead, iter_feature_variants
from heads.eagle.layouts import LAYOUTS, EagleLayout
from heads.export.engines import format_vllm_command
from heads.head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits, Variant
from heads.peagle import formats, golden
from heads.peagle.drafter import PEagleChain, PEagleTree
from heads.peagle.network import PEagleNetwork, build_peagle_config
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

VLLM = replace(LAYOUTS[ExportFormat.vllm][EagleForm.eagle3], layer_prefix="layers.0.")
SPECULATORS = replace(
    LAYOUTS[ExportFormat.speculators][EagleForm.eagle3],
    architecture="PEagleSpeculator",
    speculators_method="peagle",
    # vLLM drops `fc_norm` when it converts such a config.
    parts=("norm_before_fc", "norm_before_residual", "qk_norm", "mlp_bias"),
)


class PEagleHead(PEagleNetwork, EagleHead):
    """A P-EAGLE head."""

    variants: ClassVar = {"peagle": Variant("P-EAGLE heads", PEagleConfig)}
    name_with_article = "a P-EAGLE head"
    chain_drafter = PEagleChain
    tree_drafter = PEagleTree
    ambiguities = (iter_feature_variants, iter_mask_token_variants)
    layouts: ClassVar = {
        ExportFormat.vllm: {EagleForm.eagle3: VLLM},
        ExportFormat.speculators: {EagleForm.eagle3: SPECULATORS},
    }

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load a P-EAGLE head, recognised by its learnt hidden state; None for other folders."""
        if not formats.is_peagle_folder(folder):
            return None
        found, config, vocab = formats.load_peagle_checkpoint(folder, path, layers)
        return load_into(cls(config, vocab), found)

    @classmethod
    def from_settings(
        cls,
        target: EmbeddingsAndOutputHead,
        settings: FeatureHeadConfig,
        vocab: DraftVocab,
        seed: int,
    ) -> Self:
        """Make a new head with layers of the target's sizes."""
        config = build_peagle_config(settings, target)
        return cls(config, vocab).initialise(target, settings.output_head, seed)

    def build_files(self) -> HeadFiles:
        """Files with EAGLE-3's keys, and further keys of speculators and vLLM."""
        files, config = super().build_files(), self.config
        more = {"mask_token_id": config.mask_token_id, "num_depths": config.num_draft_tokens}
        return replace(files, config=files.config | more)

    def _plan_engine_export(
        self, engine: ExportFormat, layout: EagleLayout, folder: str
    ) -> ExportPlan:
        """Export whose command makes vLLM draft all tokens in one pass."""
        tokens = self.config.num_draft_tokens
        command = f"vllm serve {folder}"
        if engine is ExportFormat.vllm:
            target = self.target_name
            command = format_vllm_command("eagle3", tokens, target, folder, parallel_drafting=True)

        def files() -> HeadFiles:
            made = export.build_engine_files(self, engine, layout, tokens)
            made.config["mask_token_id"] = self.config.mask_token_id
            return made

        return ExportPlan(None, files, command, export.format_engine_hint(self, engine))

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """See `heads/peagle/golden.py`."""
        return golden.compute_reference_logits(self, target, states, token_ids, places)

    def build_card_facts(
        self, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Layers, hidden states and rows."""
        config = self.config
        return replace(
            super().build_card_facts(provenance, acceptance),
            tag="peagle",
            name="P-EAGLE head",
            method="P-EAGLE",
            paper="2602.01469",
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {self.vocab.describe_size()}) on the target's hidden "
                f"states {', '.join(map(str, config.layers))} (as `output_hidden_states` counts "
                f"them), fused. It drafts {config.num_draft_tokens} tokens in one pass"
            ),
            num_draft_tokens=config.num_draft_tokens,
            vllm_settings={"parallel_drafting": True},
        )
