"""EAGLE heads: what an EAGLE-1/2 or EAGLE-3 head answers. See `heads/draft_head.py`.

Reference logits are computed depth by depth, in float32 on the CPU. Letters: S rows, D depths, H
hidden, V vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.eagle import EagleConfig, EagleForm, FeatureHeadConfig, OutputHead
from conf.settings.export import ExportFormat
from heads.decoding.drafting import FeatureDrafter
from heads.draft_head import (
    ExportPlan,
    HeadFacts,
    HeadFiles,
    ReferenceLogits,
    Variant,
    check_fits,
    get_head_settings,
)
from heads.eagle.checkpoint import REQUIRED_VALUES, EagleCheckpoint
from heads.eagle.layouts import (
    LAYOUTS,
    TITLES,
    EagleLayout,
    build_config_json,
    build_engine_files,
    find_layout_problem,
    format_engine_hint,
    format_serve_command,
)
from heads.eagle.network import (
    EAGLE31_TITLE,
    LAYER_NAMES,
    AutoregressiveHead,
    ContextStates,
    EagleDrafter,
    EagleHeadConfig,
    EagleLayer,
    build_eagle_config,
    default_layers,
)
from heads.feature_head import (
    ConfigVariants,
    copy_to_cpu,
    flip_setting,
    iter_layer_variants,
    iter_order_variants,
    iter_rope_variants,
    iter_vocab_variants,
    make_config_variant,
    reorder_parts,
)
from heads.layers.branch_attention import BranchCache
from heads.layers.llama import RmsNorm
from heads.target_model.embeddings_and_output_head import (
    EmbeddingsAndOutputHead,
    copy_output_rows,
    project_in_float32,
)
from heads.target_model.model import Target, TargetOutput
from heads.vocab import DraftVocab

BIAS_PROBLEM = (
    "its fusion layer has a bias (`fc.bias`), which vLLM cannot load. A head trained with "
    "head.fc_bias=false loads."
)
MIN_FROZEN_SIZE = 768
"""Hidden size of the target from which on `auto` freezes the output head."""


def choose_output_head(start: OutputHead, target: EmbeddingsAndOutputHead) -> OutputHead:
    """Choose how a new output head starts, if settings leave it open.

    A frozen one was ahead at a hidden size of 896, level at 576 and behind at 256
    (docs/results/rates.md). No head can freeze rows of an output head that has a bias.

    Args:
        start: the setting `head.output_head`.
        target: the target whose rows are copied.
    """
    if start is not OutputHead.auto:
        return start
    is_frozen = target.hidden_size >= MIN_FROZEN_SIZE and target.has_plain_head
    return OutputHead.frozen if is_frozen else OutputHead.copy


def iter_feature_variants(head: Any) -> ConfigVariants:
    """Yield variants of settings that files of any head with EAGLE's layers may have wrong."""
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
    """Yield the variant that feeds back its outputs on the other side of the norm."""
    if head.config.form is EagleForm.eagle3:
        yield flip_setting(head, "norm_output")


class EagleHead(AutoregressiveHead):
    """EAGLE-1/2 or EAGLE-3 head.

    Args:
        config: architecture.
        vocab: draft vocabulary; all ids for EAGLE-1.
    """

    variants: ClassVar = {
        form.value: Variant(title, partial(EagleConfig, form=form))
        for form, title in TITLES.items()
    }
    name_with_article = "an EAGLE head"
    drafter: ClassVar[type[FeatureDrafter]] = EagleDrafter
    default_layers = staticmethod(default_layers)
    ambiguities = (iter_feature_variants, iter_output_variants)
    pruning_hint = "heads with their own output weights"
    layouts: ClassVar[dict[ExportFormat, dict[EagleForm, EagleLayout]]] = LAYOUTS

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
        if config.fc_norm and config.norm_output:
            self.own_title = EAGLE31_TITLE

    def initialise(self, target: EmbeddingsAndOutputHead, start: OutputHead, seed: int) -> Self:
        """Draw weights by a seed, copy rows of the target's embedding and output head, and attach.

        Neither heads nor engines have a bias of logits: heads learn without the target's.

        Raises:
            InputError: the target's output head is quantised, or has a bias and must stay frozen.
        """
        self.draw_and_attach(target, seed)
        if self.lm_head is None or start is OutputHead.scratch:
            return self
        if target.head_is_quantized:
            raise InputError(
                f"head.output_head={start.value}: the output head of target.path={target.name} is "
                "quantised; set head.output_head=scratch"
            )
        if start is OutputHead.frozen and not target.has_plain_head:
            raise InputError(
                f"head.output_head=frozen: the output head of target.path={target.name} has a "
                "bias, which a head cannot use; set head.output_head=copy or scratch"
            )
        self.lm_head.weight.data.copy_(target.output_head.weight.detach()[self.vocab.ids])
        self.lm_head.requires_grad_(start is OutputHead.copy)
        return self

    def keeps_target_output_head(self, target: EmbeddingsAndOutputHead) -> bool:
        """Tell whether the head's own output head is frozen, or a copy of the target's rows."""
        if self.lm_head is None or target.head_is_quantized:
            return False
        if not self.lm_head.weight.requires_grad:
            return True
        rows = target.output_head.weight.detach()[self.vocab.ids]
        return torch.equal(self.lm_head.weight, rows.to(self.lm_head.weight))

    def complete_config(self, target: EmbeddingsAndOutputHead) -> EagleHeadConfig:
        """See `FeatureHead.complete_config`. Fills in the default layers."""
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
        """Collect the hidden states [..., F] to fuse; EAGLE-1 reads only the last one."""
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
            parts = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(features)

    def encode_context(
        self, fused: Tensor, token_ids: Tensor, position_ids: Tensor
    ) -> ContextStates:
        """See `AutoregressiveHead.encode_context`."""
        inputs, residual = self.build_layer_inputs(fused, token_ids)
        rotation = self.layer.self_attn.compute_rotation(inputs, position_ids)
        keys, values = self.layer.self_attn.keys_values(inputs, rotation)
        return ContextStates(inputs, residual, position_ids, rotation, keys, values)

    def build_layer_inputs(self, fused: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Build the inputs [S, I] and the residual [S, H] of the layer, see `encode_context`."""
        embeds, layer = self.embed(token_ids), self.layer
        if layer.input_layernorm is None or layer.hidden_norm is None:
            both = self.fc(torch.cat([embeds, fused], dim=-1))
            return both, both
        states = layer.hidden_norm(fused)
        inputs = torch.cat([layer.input_layernorm(embeds), states], dim=-1)
        return inputs, states if self.config.norm_before_residual else fused

    def draft(self, context: ContextStates, rows: Tensor, branches: BranchCache) -> Tensor:
        """See `AutoregressiveHead.draft`."""
        inputs, residual, rotation = (
            each[rows] for each in (context.inputs, context.residual, context.rotation)
        )
        return self.layer(inputs, residual, rotation, branches, self.config.window)

    def advance(
        self, outputs: Tensor, token_ids: Tensor, position_ids: Tensor, branches: BranchCache
    ) -> Tensor:
        """See `AutoregressiveHead.advance`."""
        fed = self.apply_final_norm(outputs) if self.config.norm_output else outputs
        context = self.encode_context(fed, token_ids, position_ids)
        branches.draft_keys.append(context.keys)
        branches.draft_values.append(context.values)
        return self.layer(
            context.inputs, context.residual, context.rotation, branches, self.config.window
        )

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load an EAGLE head. Folders of other heads are refused with the tensors that they lack.

        Without layer ids in `config.json`, the head takes the default ones when attached.
        """
        checkpoint = EagleCheckpoint.from_folder(folder, path)
        config = checkpoint.build_head_config(layers, REQUIRED_VALUES)
        return checkpoint.load_into(cls(config, checkpoint.pop_eagle_vocab()))

    @classmethod
    def from_settings(
        cls,
        target: EmbeddingsAndOutputHead,
        settings: FeatureHeadConfig,
        vocab: DraftVocab,
        seed: int,
    ) -> Self:
        """Make a new head with a layer of the target's sizes, attached; EAGLE-1 drafts all ids."""
        if settings.form is EagleForm.eagle1:
            vocab = DraftVocab.make_full(vocab.size)
        start = choose_output_head(settings.output_head, target)
        return cls(build_eagle_config(settings, target), vocab).initialise(target, start, seed)

    def build_files(self) -> HeadFiles:
        """Build files with the names of the original layout and the keys of vLLM and SGLang."""
        prefix, files = self.layer_prefix, super().build_files()
        tensors = {
            prefix + name.removeprefix("layer.") if name.startswith("layer.") else name: tensor
            for name, tensor in files.tensors.items()
        }
        return HeadFiles(
            build_config_json(self.config, len(self.vocab.ids)), files.weights, tensors
        )

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """Plan the files and the command for an engine. See `heads/eagle/layouts.py`."""
        layout = self.layouts.get(engine, {}).get(self.config.form)
        if layout is None:
            return ExportPlan(f"loads no {self.title}")
        if problem := find_layout_problem(self, layout):
            return ExportPlan(problem)
        command = format_serve_command(self, engine, folder)
        files = partial(build_engine_files, self, engine, layout)
        return ExportPlan(None, files, command, format_engine_hint(self, engine))

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Compute reference logits, depth by depth. See `DraftHead.compute_reference_logits`."""
        copy, beside = copy_to_cpu(self, target, token_ids)
        features = copy.collect_features(TargetOutput(states[-1], dict(enumerate(states))))
        ids = torch.arange(len(token_ids))  # as the copy knows them
        steps = copy.compute_text_outputs(features, ids, places, 0, len(ids) - len(places) - 1)
        outputs = torch.stack([copy.apply_final_norm(each) for each in steps])
        if self.lm_head is None:
            rows = copy_output_rows(target, self.dtype)
            return ReferenceLogits(project_in_float32(outputs, rows), beside, rows)
        draft_logits = project_in_float32(outputs, self.lm_head.weight.cpu())
        beside["logsumexp"] = draft_logits.logsumexp(-1)
        return ReferenceLogits(self.vocab.spread_logits(draft_logits), beside)

    def build_card_facts(self, provenance: dict[str, Any]) -> HeadFacts:
        """Collect the facts of the model card; training tells methods of one architecture apart."""
        settings, config = get_head_settings(provenance), self.config
        tag = "eagle3" if config.form is EagleForm.eagle3 else "eagle"
        method, paper = self._identify_method(settings)
        return HeadFacts(
            tag=tag,
            name=f"{method} head",
            method=method,
            paper=paper,
            description=(
                f"one decoder layer {self._describe_layer()}. It drafts token by token, to any "
                "depth, each from its own last output"
            ),
            num_draft_tokens=self.num_engine_tokens,
            # vLLM builds the fusion layer without a bias and fails on the tensor.
            vllm_method=None if config.fc_bias else tag,
            vllm_problem=BIAS_PROBLEM,
            vllm_settings=self.vllm_settings,
            copied=self.list_copied_parts(settings.get("output_head")),
        )

    @property
    def is_eagle31(self) -> bool:
        """Tell an EAGLE-3.1 head from an EAGLE-3 head, whose files have the same form."""
        return self.own_title == EAGLE31_TITLE

    def _identify_method(self, settings: dict[str, Any]) -> tuple[str, str]:
        """Return the name and the arXiv number of the method."""
        config = self.config
        if config.form is EagleForm.eagle1:
            # The same head: training tells HASS from EAGLE-1; EAGLE-2 only differs in use.
            hass = settings.get("top_k_weight") or settings.get("detach_features")
            return ("HASS", "2408.15766") if hass else ("EAGLE-1/2", "2401.15077")
        if self.is_eagle31:
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
