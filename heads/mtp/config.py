"""Architecture of an MTP head: its target's family, and a decoder layer of that kind."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from conf.errors import InputError
from heads.mtp.families import FAMILIES, MtpFamily
from heads.target_model.attention import ATTENTION_NAME

NOT_OF_A_LAYER = {
    "_name_or_path", "architectures", "auto_map", "dtype", "mtp_num_hidden_layers",
    "num_nextn_predict_layers", "quantization_config", "torch_dtype", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class MtpHeadConfig:
    """Architecture of a head.

    Attributes:
        family: a key of `FAMILIES`.
        layer: settings of a transformers model with one such decoder layer.
        target: Hub id or folder of the target.
        hidden_size: width of the target's last hidden state.
        vocab_size: the target's vocabulary size.
        num_positions: number of positions that the head knows.
        state_first, zeroes_first, state_before_norm, feeds_back_normed: see `Family`.
        num_target_layers: decoder layers of the target.
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
        """Output of the target's last layer, if the head reads it before the final norm."""
        return (self.num_target_layers,) if self.state_before_norm else ()

    @property
    def family_entry(self) -> MtpFamily:
        """The family's entry in the table."""
        return FAMILIES[self.family]


class SubLayers(nn.ModuleList):
    """Decoder layer in parts, attention and experts, each with a norm and a residual."""

    def __init__(self, block: type[nn.Module], config: PretrainedConfig, first: int) -> None:
        numbers = range(first, first + config.num_hidden_layers)
        super().__init__(block(config, number) for number in numbers)

    @property
    def input_layernorm(self) -> Any:
        """Norm before attention."""
        return self[0].norm

    @property
    def self_attn(self) -> Any:
        """Attention."""
        return self[0].mixer

    def forward(self, rows: Tensor, **places: Any) -> Tensor:
        """[B, T, H] of rows [B, T, H]."""
        for part in self:
            rows = part(rows, **places)
        return rows


class LayerClasses(NamedTuple):
    """Classes from which transformers builds a model's layers, and their config."""

    config: PretrainedConfig
    layer: Callable[[PretrainedConfig, int], Any]
    norm: type[nn.Module]
    rotary: type[nn.Module] | None
    """None for layers without rotation."""


def build_layer_settings(config: Any, family: MtpFamily, sparse: bool) -> dict[str, Any]:
    """Settings of a model with one decoder layer, like the target's last ones.

    Args:
        config: config of the target's text part.
        family: family of the target.
        sparse: whether the layer is a mixture of experts.
    """
    settings = {k: v for k, v in config.to_dict().items() if k not in NOT_OF_A_LAYER}
    one = {
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
        one |= _build_window_settings(config, family)
    settings |= {key: value for key, value in one.items() if key in settings}
    return settings | ({"model_type": family.model_type} if family.model_type else {})


def _build_window_settings(config: Any, family: MtpFamily) -> dict[str, Any]:
    """Window settings of a layer that rotates in a window; a window of 0 means full attention."""
    window = config.sliding_window
    if family.is_sliding is None:
        said = [getattr(config, name, None) for name in ("mtp_sliding_windows", "sliding_windows")]
        kind = (getattr(config, "mtp_layer_types", None) or config.layer_types)[0]
        window = 0 if kind == "full_attention" else (said[0] or said[1] or [window])[0]
    return {"layer_types": ["sliding_attention"], "sliding_window": window}


def find_layer_classes(settings: dict[str, Any]) -> LayerClasses:
    """Classes of a layer with these settings, and its config.

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
    return LayerClasses(config, layer, norm, rotary)
