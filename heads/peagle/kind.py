"""P-EAGLE heads as a kind of draft head."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from conf.settings.eagle import EagleForm, PEagleConfig
from conf.settings.export import ExportFormat
from heads.blocks.readings import masks
from heads.decoding.chains import Calibration
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Shape, usual_dynamic_shape
from heads.eagle import card, export
from heads.eagle.kind import EagleFamily
from heads.eagle.layouts import LAYOUTS, EagleLayout
from heads.export.engines import vllm_command
from heads.kind import Files, HeadFacts
from heads.peagle import golden
from heads.peagle.drafter import PEagleChain, PEagleTree
from heads.peagle.formats import holds, read_peagle
from heads.peagle.head import PEagleHead, peagle_config
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab

VLLM = replace(LAYOUTS[ExportFormat.vllm][EagleForm.eagle3], layer_prefix="layers.0.")
SPECULATORS = replace(
    LAYOUTS[ExportFormat.speculators][EagleForm.eagle3],
    architecture="PEagleSpeculator",
    method="peagle",
    # vLLM forgets `fc_norm` when it takes over such a config.
    parts=("norm_before_fc", "norm_before_residual", "qk_norm", "mlp_bias"),
)


class PEagleKind(EagleFamily[PEagleHead]):
    """See `heads/kind.py`."""

    head = PEagleHead
    forms: ClassVar = {"peagle": "P-EAGLE heads"}
    phrase = "a P-EAGLE head"

    def holds(self, folder: Path) -> bool:
        """By the feature that it learns."""
        return holds(folder)

    read = staticmethod(read_peagle)

    def most_tokens(self, head: PEagleHead) -> int:
        """Those of a pass as it was trained."""
        return head.config.num_draft_tokens

    def usual_depth(self, head: PEagleHead) -> int:
        """The same."""
        return head.config.num_draft_tokens

    def longest(self, head: PEagleHead) -> int:
        """The same."""
        return head.config.num_draft_tokens

    def usual_shape(self, head: PEagleHead, gpu: bool | None = None) -> DynamicShape:
        """EAGLE-2's, no deeper than it drafts."""
        usual = usual_dynamic_shape(gpu)
        return replace(usual, depth=min(usual.depth, head.config.num_draft_tokens))

    def drafter(
        self,
        head: PEagleHead,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> PEagleChain | PEagleTree:
        """Chains draw when the target does; trees are ranked."""
        if isinstance(shape, DynamicShape):
            return PEagleTree(head, shape)
        return PEagleChain(head, shape.depth, sampling, drafter_seeds(seeds), calibration)

    def readings(self, head: PEagleHead) -> Iterator[tuple[str, PEagleHead]]:
        """Also of the mask token."""
        yield from super().readings(head)
        yield from masks(head)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> PEagleHead:
        """With the recipe's sizes."""
        settings = PEagleConfig()
        head = PEagleHead(peagle_config(settings, target), vocab)
        return head.begin(target, settings.output_head, seed=0)

    def layout(self, head: PEagleHead, engine: ExportFormat) -> EagleLayout | None:
        """EAGLE-3's of two engines."""
        return {ExportFormat.vllm: VLLM, ExportFormat.speculators: SPECULATORS}.get(engine)

    def files(self, head: PEagleHead, engine: ExportFormat) -> Files:
        """EAGLE-3's, and the mask token where it is looked for."""
        found = export.files(head, engine, self._served(head, engine), self.most_tokens(head))
        found.config["mask_token_id"] = head.config.mask_token_id
        return found

    def serve_command(self, head: PEagleHead, engine: ExportFormat, folder: str) -> str:
        """vLLM has to be told that all tokens come of one pass."""
        if engine is ExportFormat.speculators:
            return f"vllm serve {folder}"
        tokens = head.config.num_draft_tokens
        return vllm_command("eagle3", tokens, head.target_name, folder, parallel_drafting=True)

    drafted = staticmethod(golden.drafted)

    def facts(
        self, head: PEagleHead, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Layers, features and rows."""
        found, config = card.facts(head, provenance, acceptance), head.config
        return replace(
            found,
            tag="peagle",
            name="P-EAGLE head",
            method="P-EAGLE",
            paper="2602.01469",
            description=(
                f"{config.llama.num_hidden_layers} decoder layers (hidden size "
                f"{config.llama.hidden_size}, {head.vocab.described()}) on the target's hidden "
                f"states {', '.join(map(str, config.layers))} (as `output_hidden_states` counts "
                f"them), fused. It drafts {config.num_draft_tokens} tokens in one pass"
            ),
            num_draft_tokens=config.num_draft_tokens,
            vllm_settings={"parallel_drafting": True},
        )
