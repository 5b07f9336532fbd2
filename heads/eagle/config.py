"""Architecture of an EAGLE head: fields, defaults from a target, and `config.json`."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.eagle import EagleForm, FeatureHeadConfig
from heads.layers.llama import LLAMA_KEYS, make_llama_config
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead

CHOSEN_PARTS = ("fc_bias", "fc_norm", "norm_output", "norm_before_residual")
"""Parts of a head that recipes turn on or off."""


@dataclass(frozen=True)
class EagleHeadConfig:
    """Architecture of a head.

    Attributes:
        form: EAGLE-1 or EAGLE-3.
        llama: sizes, RoPE and norms of the layer; `vocab_size` is the target's.
        target: Hub id or folder of the target.
        target_hidden_size: width of one hidden state of the target.
        layers: hidden states that are read, as indices of `output_hidden_states`; empty for the
            default of the attached target.
        own_output_head, own_embedding: whether the head has its own.
        qk_norm: whether queries and keys are normalised, as in Qwen3.
        norm_before_fc: whether one norm covers all fused hidden states.
        fc_bias, fc_norm, norm_output, norm_before_residual: see `conf.settings.eagle`.
    """

    form: EagleForm
    llama: LlamaConfig
    target: str
    target_hidden_size: int
    layers: tuple[int, ...] = ()
    own_output_head: bool = True
    own_embedding: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @property
    def num_draft_tokens(self) -> int | None:
        """None: a head drafts from its own outputs to any depth."""
        return None


def default_layers(num_layers: int, key: str = "head.layers") -> tuple[int, ...]:
    """Low, middle and high hidden states of a target, as in EAGLE-3.

    These are 2, L/2 and L-3 of `output_hidden_states`, the outputs of layers 1, L/2-1 and L-4
    counted from 0. For 4 to 6 layers, where these coincide: 1, L/2 and L-1.

    Args:
        num_layers: L.
        key: setting that is unset, for the message.

    Raises:
        InputError: fewer than 4 layers.
    """
    if num_layers < 4:
        raise InputError(
            f"{key} is unset: no default for a target of {num_layers} layers; set {key} to hidden "
            f"states of 0..{num_layers}"
        )
    if num_layers < 7:
        return 1, num_layers // 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3


def build_eagle_config(
    settings: FeatureHeadConfig, target: EmbeddingsAndOutputHead
) -> EagleHeadConfig:
    """Architecture of a new head, with a layer of the target's sizes.

    Raises:
        InputError: the target has too few layers for the default hidden states.
    """
    eagle3 = settings.form is EagleForm.eagle3
    width = target.feature_size if eagle3 else target.hidden_size
    return EagleHeadConfig(
        form=settings.form,
        llama=make_llama_config(target.config, target.vocab_size),
        target=target.name,
        target_hidden_size=width,
        layers=tuple(settings.layers or default_layers(target.num_layers)) if eagle3 else (),
        # In the file, one width says that a target's embedding fits.
        own_embedding=width != target.hidden_size,
        **{name: getattr(settings, name) for name in CHOSEN_PARTS},
    )


def build_config_json(config: EagleHeadConfig, num_draft_ids: int) -> dict[str, Any]:
    """Keys that vLLM and SGLang read, with layer indices as in vLLM.

    Args:
        config: architecture.
        num_draft_ids: size W of the draft vocabulary.
    """
    llama, eagle3 = config.llama, config.form is EagleForm.eagle3
    rope: Any = llama.rope_parameters
    kind = "LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLM"
    shared = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else kind],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{name: getattr(llama, name) for name in LLAMA_KEYS},
        "rope_theta": rope["rope_theta"],
        "num_hidden_layers": llama.num_hidden_layers,
        "tie_word_embeddings": False,
        "bias": config.fc_bias,
        "base_model_name_or_path": config.target,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    if not eagle3:
        return shared
    layers = {"eagle_aux_hidden_state_layer_ids": list(config.layers)} if config.layers else {}
    return shared | {
        # If unset, SGLang takes the target's output head, as this head does.
        "draft_vocab_size": num_draft_ids if config.own_output_head else None,
        "target_hidden_size": config.target_hidden_size,
        **layers,
        "eagle_config": {"use_aux_hidden_state": True, **layers},
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
    }
