"""The architecture of an MTP head: the family of its target, and a decoder layer of that kind."""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from conf.errors import InputError
from heads.mtp.families import FAMILIES, Family
from heads.target_model.attention import NAME

NOT_OF_A_LAYER = {
    "_name_or_path", "architectures", "auto_map", "dtype", "mtp_num_hidden_layers",
    "num_nextn_predict_layers", "quantization_config", "torch_dtype", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class MtpHeadConfig:
    """Architecture of a head.

    Attributes:
        family: a key of `FAMILIES`.
        layer: settings of a model of one such decoder layer, as transformers takes them.
        target: Hub id or folder of the target.
        hidden_size: of the target's last hidden state.
        vocab_size: of the target.
        num_positions: that the target knows.
        state_first, zeroes_first, feeds_back_normed: of the family.
        num_draft_tokens: None, as a head goes on from its own outputs to any depth.
    """

    family: str
    layer: dict[str, Any]
    target: str
    hidden_size: int
    vocab_size: int
    num_positions: int
    state_first: bool = False
    zeroes_first: bool = False
    feeds_back_normed: bool = True
    num_draft_tokens: None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """No hidden states besides the last one."""
        return ()

    @property
    def row(self) -> Family:
        """The family's row of the table."""
        return FAMILIES[self.family]


class Parts(NamedTuple):
    """Classes of which transformers makes a model's layers, and their config."""

    config: PretrainedConfig
    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


def layer_settings(config: Any, family: Family, sparse: bool) -> dict[str, Any]:
    """Settings of a model of one decoder layer, which attends to all and is like the last ones.

    Args:
        config: of the target's text part.
        family: of the target.
        sparse: whether the layer is a mixture of experts.
    """
    settings = {k: v for k, v in config.to_dict().items() if k not in NOT_OF_A_LAYER}
    one = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if sparse else 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_end_index": 0,
    }
    settings |= {key: value for key, value in one.items() if key in settings}
    return settings | ({"model_type": family.model_type} if family.model_type else {})


def parts_of(settings: dict[str, Any]) -> Parts:
    """The classes of a layer with these settings, and its config.

    Raises:
        InputError: a model whose layers are not of the usual parts.
    """
    rest = dict(settings)
    model_type = rest.pop("model_type")
    config = AutoConfig.for_model(model_type, **rest)
    config._attn_implementation = NAME
    config._experts_implementation = "eager"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module = vars(sys.modules[model.__module__])
    prefix = model.__name__.removesuffix("ForCausalLM")
    rotary = module.get(f"{prefix}RotaryEmbedding", module.get(f"{prefix}TextRotaryEmbedding"))
    layer, norm = (module.get(prefix + name) for name in ("DecoderLayer", "RMSNorm"))
    if layer is None or norm is None or rotary is None:
        raise InputError(
            f"target.path: a layer for multi-token prediction is made of the target's own layer, "
            f"and those of {model_type} have other parts; train another head, such as EAGLE-3.1"
        )
    return Parts(config, layer, norm, rotary)
