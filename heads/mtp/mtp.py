"""MTP heads: a decoder layer of the target's own kind after its last hidden state.

The family of the target (`heads/mtp/families.py`) says what the layer reads; transformers has its
classes. Drafts are EAGLE's chains and trees.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; FastMTP (2509.18362) for the layer that reads
its own output. Letters: S tokens of a text, N rows, H hidden, Q heads, K key-value heads, d head
size.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from conf.errors import InputError
from conf.settings.eagle import MtpConfig
from conf.settings.export import ExportFormat
from heads.decoding.drafting import FeatureDrafter
from heads.draft_head import (
    ExportPlan,
    HeadFacts,
    HeadFiles,
    ReferenceLogits,
    Variant,
    check_fits,
)
from heads.eagle.network import AutoregressiveHead, EagleDrafter
from heads.feature_head import ConfigVariants, flip_setting
from heads.folders import load_model_config
from heads.layers.branch_attention import BranchCache, branch_attention
from heads.mtp import checkpoint
from heads.mtp.families import FAMILIES, KNOWN, OTHER, MtpFamily
from heads.target_model.architecture import count_layers
from heads.target_model.attention import ATTENTION_NAME, open_attention_pass
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.kernels import ScoreRule
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from heads.vocab import DraftVocab

EXPORT_PROBLEM = (
    "loads an MTP layer only from the target's own folder; write it there with `scripts/mtp.py "
    "action=stitch`"
)
MODEL_KEYS = {
    "_name_or_path", "architectures", "auto_map", "dtype", "mtp_num_hidden_layers",
    "num_nextn_predict_layers", "quantization_config", "torch_dtype", "transformers_version",
}  # fmt: skip
"""Keys of a model's config that a decoder layer does not read."""
FLAGS = ("state_first", "zeroes_first", "state_before_norm", "feeds_back_normed")
"""Fields of `MtpFamily` that a head's config repeats."""


@dataclass(frozen=True)
class MtpHeadConfig:
    """Architecture of an MTP head. The fields are keys of its `config.json`.

    Attributes:
        family: key of `FAMILIES`.
        layer: settings of a transformers model with this decoder layer alone.
        target: Hub id or folder of the target.
        hidden_size: width of the target's last hidden state.
        vocab_size: the target's vocabulary size.
        num_positions: number of positions that the head knows.
        state_first, zeroes_first, state_before_norm, feeds_back_normed: see `MtpFamily`.
        num_target_layers: number of the target's decoder layers.
        num_draft_tokens: None, as a head drafts from its own outputs to any depth.
    """

    family: str
    layer: dict[str, Any]
    target: str
    hidden_size: int
    vocab_size: int
    num_positions: int
    state_first: bool = False
    zeroes_first: bool = False
    state_before_norm: bool = False
    feeds_back_normed: bool = True
    num_target_layers: int = 0
    num_draft_tokens: None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Index of the target's last hidden state, if the head reads it before the final norm."""
        return (self.num_target_layers,) if self.state_before_norm else ()

    @property
    def family_entry(self) -> MtpFamily:
        """Entry of the family in the table."""
        return FAMILIES[self.family]


@dataclass(frozen=True)
class MtpContextStates:
    """Text that the head has encoded with the target's hidden states.

    Attributes:
        inputs: [S, H] inputs of the decoder layer.
        position_ids: [S] int64 positions.
        keys: [S, K, d] keys.
        values: [S, K, d] values, padded to the width of the keys.
    """

    inputs: Tensor
    position_ids: Tensor
    keys: Tensor
    values: Tensor


def iter_layer_variants(head: Any) -> ConfigVariants:
    """Yield variants of the settings of MTP layers that readers get wrong most often."""
    for name in ("state_first", "feeds_back_normed", "zeroes_first"):
        yield flip_setting(head, name)


class MtpHead(AutoregressiveHead):
    """Layer for multi-token prediction of a target: the target's own, or a new one.

    Args:
        config: architecture.
        vocab: all ids of the target.
    """

    output_head_patterns = ()
    compiled_modules = ()
    config: MtpHeadConfig
    config_type = MtpHeadConfig
    variants: ClassVar = {"mtp": Variant("MTP layers", MtpConfig)}
    name_with_article = "an MTP layer"
    drafter: ClassVar[type[FeatureDrafter]] = EagleDrafter
    ambiguities = (iter_layer_variants,)

    def __init__(self, config: MtpHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        hidden, (model, layer, norm, rotary) = config.hidden_size, find_layer_classes(config.layer)
        names = ("rms_norm_eps", "layer_norm_epsilon")
        epsilon = next(getattr(model, name) for name in names if hasattr(model, name))
        self.enorm, self.hnorm = norm(hidden, epsilon), norm(hidden, epsilon)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer: Any = layer(model, 0)
        if config.family_entry.has_indexer:
            # Chooses keys of long texts; its weights are stored, never run.
            size, num_heads = model.index_head_dim, model.index_n_heads
            parts = {
                "wq_b": nn.Linear(model.q_lora_rank, num_heads * size, bias=False),
                "wk": nn.Linear(model.hidden_size, size, bias=False),
                "k_norm": nn.LayerNorm(size),
                "weights_proj": nn.Linear(model.hidden_size, num_heads, bias=False),
            }
            self.layer.self_attn.indexer = nn.ModuleDict(parts).requires_grad_(False)
        self.norm = norm(hidden, epsilon) if "norm" in config.family_entry.names else None
        self.lm_head = self.embed_tokens = None
        self.taps, self.max_positions = FeatureLayers(config.layers), config.num_positions
        # Not a submodule, as its float32 frequencies must survive a cast of the head.
        self._rotary: Any = rotary and (rotary(config=model),)
        rules = getattr(model, "rope_parameters", None) or {}
        # With several kinds of rotation, the module asks for the kind.
        self._kind = [kind for kind in getattr(model, "layer_types", ()) if kind in rules]

    @property
    def num_layers(self) -> int:
        """Return the number 1 of layers: the same layer drafts at every depth."""
        return 1

    def initialise(self, target: EmbeddingsAndOutputHead, seed: int) -> Self:
        """Draw new weights by a seed, and attach the head to the target."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02, generator=generator)
            elif not name.endswith("weight"):  # biases, and sinks that nobody filled
                parameter.data.zero_()
        return self.attach(target)

    def complete_config(self, target: EmbeddingsAndOutputHead) -> MtpHeadConfig:
        """See `FeatureHead.complete_config`."""
        check_fits(self, target, self.config.hidden_size)
        return self.config

    def collect_features(self, output: TargetOutput) -> Tensor:
        """Collect the last hidden states [..., H], after or before the target's final norm."""
        layers = self.config.layers
        states = output.layers[layers[0]] if layers else output.hidden_states
        return states.to(self.fc.weight)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the hidden states unchanged."""
        return features

    def build_layer_inputs(self, states: Tensor, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Build inputs [N, H] of the decoder layer from states [N, H] and the next tokens [N]."""
        config, embeds = self.config, self.embed(token_ids)
        if config.zeroes_first:
            embeds = embeds.masked_fill(position_ids.unsqueeze(-1) == 0, 0.0)
        both = [self.enorm(embeds), self.hnorm(states)]
        return self.fc(torch.cat(both[::-1] if config.state_first else both, dim=-1))

    def encode_context(
        self, fused: Tensor, token_ids: Tensor, position_ids: Tensor
    ) -> MtpContextStates:
        """See `AutoregressiveHead.encode_context`."""
        inputs = self.build_layer_inputs(fused, token_ids, position_ids)
        capture, rows = _KeyValueCapture(), inputs.unsqueeze(0)
        norm = getattr(self.layer, "input_layernorm", nn.Identity())
        with open_attention_pass(capture):
            self.layer.self_attn(
                hidden_states=norm(rows), **self._build_layer_arguments(rows, position_ids)
            )
        return MtpContextStates(inputs, position_ids, capture.keys, capture.values)

    def draft(self, context: MtpContextStates, rows: Tensor, branches: BranchCache) -> Tensor:
        """See `AutoregressiveHead.draft`."""
        positions = context.position_ids[rows]
        return self._run_layer(
            context.inputs[rows], positions, _DraftAttention(branches, remembered=False)
        )

    def advance(
        self, outputs: Tensor, token_ids: Tensor, position_ids: Tensor, branches: BranchCache
    ) -> Tensor:
        """See `AutoregressiveHead.advance`."""
        fed = self.apply_final_norm(outputs) if self.config.feeds_back_normed else outputs
        inputs = self.build_layer_inputs(fed, token_ids, position_ids)
        return self._run_layer(inputs, position_ids, _DraftAttention(branches, remembered=True))

    def _run_layer(
        self, inputs: Tensor, position_ids: Tensor, drafting: "_DraftAttention"
    ) -> Tensor:
        """Run the layer on inputs [N, H] at positions [N]; return outputs [N, H]."""
        rows = inputs.unsqueeze(0)
        with open_attention_pass(drafting):
            output = self.layer(rows, **self._build_layer_arguments(rows, position_ids))
        return (output[0] if isinstance(output, tuple) else output).squeeze(0)

    def _build_layer_arguments(self, rows: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """Build the arguments of the layer for positions [N], without a mask."""
        places = position_ids.unsqueeze(0)
        arguments: dict[str, Any] = {"position_ids": places, "attention_mask": None}
        if self._rotary is not None:
            rotary = self._rotary[0].to(rows.device)
            arguments["position_embeddings"] = rotary(rows, places, *self._kind)
        return arguments

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load a head's folder, or the layer in the files of a whole model that has one."""
        settings = load_model_config(folder)
        is_own_folder = settings.get("architectures") == [cls.__name__]
        if settings.get("architectures") and (
            reason := checkpoint.find_unsupported_reason(settings)
        ):
            raise InputError(
                f"head.path={path}: the MTP layer of this model cannot be read yet, as {reason}; "
                f"allowed: {KNOWN}. Name a draft head, such as one of train/eagle.py"
            )
        if not is_own_folder and checkpoint.find_family(settings) is None:
            return None
        if layers is not None:
            raise InputError(
                f"head.path={path}: an MTP layer reads the last hidden state; leave head.layers "
                "unset"
            )
        return (
            super().from_folder(folder, path, None)
            if is_own_folder
            else cls._from_model_files(folder, path, settings)
        )

    @classmethod
    def _from_model_files(cls, folder: Path, path: str, settings: dict[str, Any]) -> Self:
        label = f"head.path={path}"
        tensors = checkpoint.load_mtp_tensors(folder, settings, label)
        if not tensors:
            raise InputError(
                f"{label}: a whole model without MTP layers; give it as target.path, and name a "
                "draft head"
            )
        config = AutoConfig.from_pretrained(folder).get_text_config()
        family = str(checkpoint.find_family(settings))
        sparse = any(".experts." in name for name in tensors)
        head = cls(
            build_mtp_config(config, family, path, sparse), DraftVocab.make_full(config.vocab_size)
        )
        shapes = {name: tensor.shape for name, tensor in head.build_files().tensors.items()}
        mismatched = sorted(dict({n: t.shape for n, t in tensors.items()}.items() ^ shapes.items()))
        if mismatched:
            number = checkpoint.count_decoder_layers(settings)
            names = [head.config.family_entry.to_stored_name(name, number) for name in mismatched]
            raise InputError(f"{label}: MTP tensors missing, unknown or of another shape: {names}")
        head.load_state_dict(tensors)
        return head

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: MtpConfig, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new layer of the target's own kind, with experts if the target has them."""
        del settings, vocab
        family = next((name for name in target.architectures if name in FAMILIES), OTHER)
        sparse = not FAMILIES[family].is_dense and any(
            getattr(target.config, name, None)
            for name in ("num_experts", "n_routed_experts", "moe_num_experts")
        )
        config = build_mtp_config(target.config, family, target.name, sparse)
        return cls(config, DraftVocab.make_full(target.vocab_size)).initialise(target, seed)

    def build_files(self) -> HeadFiles:
        """Build files with the fields of `config`, the parameters and the buffers."""
        files = super().build_files()
        buffers = {name: buffer.detach() for name, buffer in self.named_buffers()}
        return HeadFiles(files.config, files.weights, files.tensors | buffers)

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """Return no files: engines read the layer from the target's folder."""
        del engine, folder
        return ExportPlan(EXPORT_PROBLEM)

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Raise AssertionError: no engine has an export, so nobody asks for reference logits."""
        raise AssertionError(target, states, token_ids, places)

    def build_card_facts(self, provenance: dict[str, Any]) -> HeadFacts:
        """Collect the facts of the head's model card."""
        del provenance
        return HeadFacts(
            tag="mtp",
            name="MTP layer",
            method="multi-token prediction",
            paper="2412.19437",
            description=(
                f"the decoder layer for multi-token prediction of {self.config.family} (hidden "
                f"size {self.config.hidden_size}) on the target's last hidden state. It drafts "
                "token by token, to any depth, each from its own last output"
            ),
            num_draft_tokens=self.num_engine_tokens,
            vllm_method=None,
            vllm_problem=f"vLLM {EXPORT_PROBLEM}.",
        )


def build_mtp_config(config: Any, family: str, name: str, sparse: bool) -> MtpHeadConfig:
    """Build the architecture of an MTP layer of a target.

    Args:
        config: config of the target's text part.
        family: key of `FAMILIES`.
        name: name of the target.
        sparse: whether the layer is a mixture of experts.
    """
    entry = FAMILIES[family]
    positions = config.max_position_embeddings
    return MtpHeadConfig(
        family=family,
        layer=build_layer_settings(config, entry, sparse),
        target=name,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_positions=min(positions, config.index_topk) if entry.has_indexer else positions,
        num_target_layers=count_layers(config),
        **{name: getattr(entry, name) for name in FLAGS},
    )


def build_layer_settings(config: Any, family: MtpFamily, sparse: bool) -> dict[str, Any]:
    """Build the settings of one decoder layer like the target's last; see `build_mtp_config`."""
    settings = {k: v for k, v in config.to_dict().items() if k not in MODEL_KEYS}
    single_layer = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "layers_block_type": ["full_attention", "moe"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if sparse else 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_end_index": 0,
    }
    if family.is_sliding is not False:
        window = config.sliding_window
        if family.is_sliding is None:
            names = ("mtp_sliding_windows", "sliding_windows")
            windows = next((w for n in names if (w := getattr(config, n, None))), None)
            kind = (getattr(config, "mtp_layer_types", None) or config.layer_types)[0]
            # A window of 0 means full attention.
            window = 0 if kind == "full_attention" else (windows or [window])[0]
        single_layer |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    settings |= {key: value for key, value in single_layer.items() if key in settings}
    return settings | ({"model_type": family.model_type} if family.model_type else {})


def find_layer_classes(settings: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Find the config of a model with these settings, and the classes of its parts.

    Returns:
        The config, and the classes of layers, norms and rotary embeddings; None for the last
        without rotation.

    Raises:
        InputError: the model's layers do not have the usual parts.
    """
    rest = dict(settings)
    model_type = rest.pop("model_type")
    config = AutoConfig.for_model(model_type, **rest)
    config._attn_implementation = ATTENTION_NAME
    config._experts_implementation = "eager"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module = vars(sys.modules[model.__module__])
    prefix = model.__name__.removesuffix("ForCausalLM")
    rotary = module.get(f"{prefix}RotaryEmbedding", module.get(f"{prefix}TextRotaryEmbedding"))
    layer, norm = (module.get(prefix + name) for name in ("DecoderLayer", "RMSNorm"))
    if hasattr(config, "mtp_layers_block_type"):
        layer = partial(SubLayers, module[f"{prefix}Block"])
    elif rotary is None:
        layer = None
    if layer is None or norm is None:
        raise InputError(
            "target.path: an MTP layer is built from the target's own layer, but those of "
            f"{model_type} have other parts; train another head, such as EAGLE-3.1"
        )
    return config, layer, norm, rotary


class SubLayers(nn.ModuleList):
    """Decoder layer in parts, attention and experts, each with a norm and a residual."""

    def __init__(self, block: type[nn.Module], config: PretrainedConfig, first: int) -> None:
        numbers = range(first, first + config.num_hidden_layers)
        super().__init__(block(config, number) for number in numbers)

    @property
    def input_layernorm(self) -> Any:
        """Norm before the attention."""
        return self[0].norm

    @property
    def self_attn(self) -> Any:
        """Attention of the first part."""
        return self[0].mixer

    def forward(self, rows: Tensor, **places: Any) -> Tensor:
        """Run all parts on rows [B, T, H]."""
        for part in self:
            rows = part(rows, **places)
        return rows


class _KeyValueCapture:
    """Pass of the layer's attention that only stores the keys and values of a text."""

    config = None

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Store keys and values, and return zeros, which nobody reads."""
        del layer, scores
        # Under autocast only values come from a product, and keys have the wider dtype.
        self.keys = _view_rows(key).to(value.dtype)
        self.values = _pad_values(_view_rows(value), key.shape[-1])
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2)


class _DraftAttention:
    """Pass of the layer's attention over rows that draft.

    Args:
        branches: keys and values that the rows see.
        remembered: whether the rows are draft tokens, not the text's, so that their own keys and
            values are appended to `branches`.
    """

    config = None

    def __init__(self, branches: BranchCache, remembered: bool) -> None:
        self.branches, self.remembered = branches, remembered

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Attend with queries [1, Q, N, d], keys and values [1, K, N, d]; return [1, N, Q, d]."""
        del layer
        if scores.cap:
            raise NotImplementedError("an MTP layer with a soft cap")
        width, query, key = query.shape[-1], query.to(value.dtype), key.to(value.dtype)
        if self.remembered:
            self.branches.draft_keys.append(_view_rows(key))
            self.branches.draft_values.append(_pad_values(_view_rows(value), width))
        if scores.scale is not None and scores.scale != width**-0.5:
            query = query * (scores.scale * width**0.5)
        attended = branch_attention(
            _view_rows(query), self.branches, scores.window or None, scores.sinks
        )
        return attended[..., : value.shape[-1]].unsqueeze(0)


def _view_rows(heads: Tensor) -> Tensor:
    """View [1, K, N, d] as [N, K, d]."""
    return heads.squeeze(0).transpose(0, 1)


def _pad_values(values: Tensor, width: int) -> Tensor:
    """Pad values to the width of keys, which are wider in latent attention."""
    return pad(values, (0, width - values.shape[-1])) if values.shape[-1] < width else values
