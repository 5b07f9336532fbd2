"""The architecture of an EAGLE head: its fields, defaults from a target, and `config.json`."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.eagle import EagleForm, FeatureHeadConfig
from heads.layers.llama import LLAMA_KEYS, llama_like
from heads.target_model.embeddings_and_head import EmbeddingsAndHead

CHOSEN_PARTS = ("fc_bias", "fc_norm", "norm_output", "norm_before_residual")
"""Parts of a head that a recipe turns on or off."""


@dataclass(frozen=True)
class EagleHeadConfig:
    """Architecture of a head.

    Attributes:
        form: which of the two families.
        llama: sizes, RoPE and norms of the layer; its `vocab_size` is the target's.
        target: Hub id or folder of the target.
        target_hidden_size: width of one target feature.
        layers: target features that are read, as indices of `output_hidden_states`; empty for
            the default of the target that the head is attached to.
        own_output_head, own_embedding: whether the head brings its own.
        qk_norm: norms on queries and keys, as Qwen3 has them.
        norm_before_fc: one norm over all fused features.
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
        """The longest path, which has no end: a head goes on from its own outputs to any depth."""
        return None


def default_layers(num_layers: int, key: str = "head.layers") -> tuple[int, ...]:
    """Low, middle and high features of a target, as EAGLE-3 takes them.

    2, L/2 and L-3 of `output_hidden_states`, the outputs of layers 1, L/2-1 and L-4 counted
    from 0; a target of 4 to 6 layers, where these meet, gives 1, L/2 and L-1.

    Args:
        num_layers: L.
        key: the setting that is unset.

    Raises:
        InputError: fewer than 4 layers.
    """
    if num_layers < 4:
        raise InputError(
            f"{key} is unset and the target has {num_layers} layers: name the features to "
            f"fuse, of 0..{num_layers}"
        )
    if num_layers < 7:
        return 1, num_layers // 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3


def eagle_config(settings: FeatureHeadConfig, target: EmbeddingsAndHead) -> EagleHeadConfig:
    """The architecture of a fresh head, with a layer of the target's sizes.

    Raises:
        InputError: the target has too few layers to tell which features are read.
    """
    eagle3 = settings.form is EagleForm.eagle3
    width = target.feature_size if eagle3 else target.hidden_size
    return EagleHeadConfig(
        form=settings.form,
        llama=llama_like(target.config, target.vocab_size),
        target=target.name,
        target_hidden_size=width,
        layers=tuple(settings.layers or default_layers(target.num_layers)) if eagle3 else (),
        # A file says that a target's embedding fits by one width for all.
        own_embedding=width != target.hidden_size,
        **{name: getattr(settings, name) for name in CHOSEN_PARTS},
    )


def config_json(config: EagleHeadConfig, num_draft_ids: int) -> dict[str, Any]:
    """The keys that vLLM and SGLang read; layer indices as vLLM counts them.

    Args:
        config: the architecture.
        num_draft_ids: W, ids in the draft vocabulary.
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
        # Unset makes SGLang take the target's output head, as such a head does.
        "draft_vocab_size": num_draft_ids if config.own_output_head else None,
        "target_hidden_size": config.target_hidden_size,
        **layers,
        "eagle_config": {"use_aux_hidden_state": True, **layers},
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
    }
