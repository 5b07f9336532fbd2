"""Answers of EAGLE heads. See `heads/head.py`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from conf.settings.eagle import EagleConfig, EagleForm, FeatureHeadConfig, OutputHead
from conf.settings.export import ExportFormat
from heads.decoding.head_drafter import ChainDrafter, DynamicTreeDrafter
from heads.eagle import export, golden, layouts
from heads.eagle.config import build_config_json, build_eagle_config, default_layers
from heads.eagle.drafter import EagleChain, EagleTree
from heads.eagle.formats import (
    REQUIRED_VALUES,
    EagleCheckpoint,
    build_head_config,
    load_into,
    pop_draft_vocab,
)
from heads.eagle.layouts import LAYOUTS, EagleLayout
from heads.eagle.network import EagleNetwork
from heads.head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits, Variant, get_head_settings
from heads.readings import (
    ConfigVariants,
    flip_setting,
    iter_layer_variants,
    iter_order_variants,
    iter_rope_variants,
    iter_vocab_variants,
    make_config_variant,
    reorder_parts,
)
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

BIAS_PROBLEM = (
    "its fusion layer has a bias (`fc.bias`), which vLLM cannot load. A head trained with "
    "head.fc_bias=false loads."
)


def iter_feature_variants(head: Any) -> ConfigVariants:
    """Settings that files of any head with EAGLE's layers may have wrong."""
    if head.config.form is EagleForm.eagle1:
        swapped = {"fc.weight": reorder_parts(head.fc.weight.detach(), (1, 0))}
        yield (
            "fc reads the hidden state before the embedding",
            make_config_variant(head, tensors=swapped),
        )
    else:
        yield from iter_layer_variants(head, default_layers)
        yield from iter_order_variants(head)
        yield flip_setting(head, "norm_before_residual")
    yield from iter_rope_variants(head)
    yield from iter_vocab_variants(head)


def iter_output_variants(head: Any) -> ConfigVariants:
    """Readings of the output that a head feeds back: before or after its norm."""
    if head.config.form is EagleForm.eagle3:
        yield flip_setting(head, "norm_output")


class EagleHead(EagleNetwork):
    """EAGLE-1/2 or EAGLE-3 head."""

    variants: ClassVar = {
        form.value: Variant(title, partial(EagleConfig, form=form))
        for form, title in layouts.TITLES.items()
    }
    name_with_article = "an EAGLE head"
    chain_drafter: ClassVar[type[ChainDrafter]] = EagleChain
    tree_drafter: ClassVar[type[DynamicTreeDrafter]] = EagleTree
    default_layers = staticmethod(default_layers)
    ambiguities = (iter_feature_variants, iter_output_variants)
    pruning_hint = "heads with their own output weights"
    layouts: ClassVar[dict[ExportFormat, dict[EagleForm, EagleLayout]]] = LAYOUTS

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load the head of any folder. The reader reports what another folder lacks.

        Without layer ids in `config.json`, the head takes the default ones when attached.
        """
        found = EagleCheckpoint.from_folder(folder, path)
        config = build_head_config(found, layers, REQUIRED_VALUES)
        return load_into(cls(config, pop_draft_vocab(found, config.form)), found)

    @classmethod
    def from_settings(
        cls,
        target: EmbeddingsAndOutputHead,
        settings: FeatureHeadConfig,
        vocab: DraftVocab,
        seed: int,
    ) -> Self:
        """Make a new head with a layer of the target's sizes. EAGLE-1 drafts all ids."""
        if settings.form is EagleForm.eagle1:
            vocab = DraftVocab.make_full(vocab.size)
        return cls(build_eagle_config(settings, target), vocab).initialise(
            target, settings.output_head, seed
        )

    def build_files(self) -> HeadFiles:
        """Files with the names of the original layout and the keys of vLLM and SGLang."""
        prefix, own = self.layer_prefix, super().build_files()
        tensors = {
            prefix + name.removeprefix("layer.") if name.startswith("layer.") else name: tensor
            for name, tensor in own.tensors.items()
        }
        return HeadFiles(build_config_json(self.config, len(self.vocab.ids)), own.weights, tensors)

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """See `heads/eagle/layouts.py`."""
        layout = self.layouts.get(engine, {}).get(self.config.form)
        if layout is None:
            return ExportPlan(f"loads no {self.variants[self.variant].title}")
        problem = layouts.find_layout_problem(self, layout)
        return ExportPlan(problem) if problem else self._plan_engine_export(engine, layout, folder)

    def _plan_engine_export(
        self, engine: ExportFormat, layout: EagleLayout, folder: str
    ) -> ExportPlan:
        command = export.format_serve_command(self, engine, folder)
        files = partial(export.build_engine_files, self, engine, layout)
        return ExportPlan(None, files, command, export.format_engine_hint(self, engine))

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """See `heads/eagle/golden.py`."""
        return golden.compute_reference_logits(self, target, states, token_ids, places)

    def build_card_facts(
        self, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Facts of a head. Its training tells methods with the same architecture apart."""
        settings, config = get_head_settings(provenance), self.config
        tag = "eagle3" if config.form is EagleForm.eagle3 else "eagle"
        method, paper = self._identify_method(settings)
        drafted = min(max(settings.get("num_steps", 3), 3), 5)
        return HeadFacts(
            tag=tag,
            name=f"{method} head",
            method=method,
            paper=paper,
            description=(
                f"one decoder layer {self._describe_layer()}. It drafts token by token, to any "
                "depth, each "
                "from its own last output"
            ),
            num_draft_tokens=len(acceptance["alpha"]) if acceptance else drafted,
            # vLLM builds the fusion layer without a bias and fails on the tensor.
            vllm_method=None if config.fc_bias else tag,
            vllm_problem=BIAS_PROBLEM,
            copied=self._list_copied_parts(settings),
        )

    def _identify_method(self, settings: dict[str, Any]) -> tuple[str, str]:
        """Name and arXiv number."""
        config = self.config
        if config.form is EagleForm.eagle1:
            # The same head: training tells HASS from EAGLE-1; EAGLE-2 only differs in use.
            hass = settings.get("top_k_weight") or settings.get("detach_features")
            return ("HASS", "2408.15766") if hass else ("EAGLE-1/2", "2401.15077")
        if config.fc_norm and config.norm_output:
            return "EAGLE-3.1", "2605.09992"
        return "EAGLE-3", "2503.01840"

    def _describe_layer(self) -> str:
        config = self.config
        size = f"(hidden size {config.llama.hidden_size}, {self.vocab.describe_size()})"
        if config.form is EagleForm.eagle1:
            return f"{size} on the target's last hidden state"
        *most, last = map(str, config.layers) if config.layers else ("low", "middle", "high")
        fused = f"{', '.join(most)} and {last}" if most else last
        counted = " (as `output_hidden_states` counts them)" if config.layers else ""
        return f"{size} on the target's hidden states {fused}{counted}, fused"

    def _list_copied_parts(self, settings: dict[str, Any]) -> list[str]:
        copied, start = [], settings.get("output_head")
        if self.lm_head is not None and start == OutputHead.frozen.value:
            copied.append("rows of its output head")
        if self.lm_head is not None and start == OutputHead.copy.value:
            copied.append("an output head that started as rows of its own")
        if self.embed_tokens is not None:
            copied.append("its token embedding")
        return copied
