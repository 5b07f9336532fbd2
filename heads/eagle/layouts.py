"""Layouts of EAGLE heads that serving engines load, and the heads that each can serve.

Read from the loaders:
- vLLM 0.32 `models/{llama_eagle,llama_eagle3}.py`, `configs/speculators/`;
- SGLang `models/{llama_eagle,llama_eagle3,llama}.py` (2026), `model_runner.py`;
- TensorRT-LLM `_torch/models/modeling_speculative.py`, `llm_args.py` (1.3);
- speculators 0.9 `models/eagle3/{config,core}.py`;
- SafeAILab/EAGLE `model/{cnets,cnets1,configs,ea_model}.py`;
- llama.cpp b11434 `src/models/eagle3.cpp`.

The loaders do not check for missing tensors: most initialise them randomly and serve nonsense.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat
from heads.eagle.network import EagleNetwork
from heads.export.engines import ENGINE_NAMES
from heads.export.llamacpp import rope_problem

TITLES = {EagleForm.eagle1: "EAGLE-1/2 heads", EagleForm.eagle3: "EAGLE-3 heads"}
# Parts beyond the paper's, by field of `EagleHeadConfig`.
PARTS = {
    "fc_bias": "a bias of the fusion layer (fc.bias)",
    "fc_norm": "a norm per feature (fc_norm)",
    "norm_before_fc": "a norm over all features (input_norm)",
    "norm_output": "its normed output fed back (norm_output)",
    "norm_before_residual": "the normed feature as residual (norm_before_residual; heads of "
    "head=eagle3_1 have none)",
    "qk_norm": "norms on queries and keys (q_norm, k_norm)",
}

NORMS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


@dataclass(frozen=True)
class EagleLayout:
    """Layout in which a loader reads an EAGLE head.

    Attributes:
        architecture: value of `architectures`.
        parts: `PARTS` that its layer implements, and `mlp_bias` if its MLP may have biases.
        layer_prefix: prefix of the layer's tensors.
        layer_offset: its layer ids minus those of `output_hidden_states`; None if it always reads
            2, L/2 and L-3.
        min_layers: least number of hidden states that it fuses.
        num_layers: number of hidden states that it fuses; None for any.
        any_order: whether it takes hidden states in the head's order.
        zero_fc_bias: whether it builds `fc` with a bias, which other heads must set to zero.
        needs_embedding: whether it needs `embed_tokens.weight`, even if that is the target's.
        prefers_own_embedding: whether it uses a head's own embedding if the target's would fit.
        needs_output_head: whether it needs `lm_head.weight`, even if that is the target's.
        d2t_dtype: dtype of `d2t`.
        t2d: whether it has a place for `t2d`.
        exclusive_norms: whether it takes `fc_norm` or `norm_before_fc`, but not both.
        equal_widths: whether hidden states must be as wide as the head.
        old_rope: whether RoPE may only be scaled linearly, with a theta of 10000, and the head size
            must be hidden / heads.
        unread_rope: RoPE settings that it does not read.
        gguf: whether it is a GGUF file, which has its own RoPE keys.
        speculators_method: kind of head in speculators.
    """

    architecture: str
    parts: tuple[str, ...]
    layer_prefix: str = "midlayer."
    layer_offset: int | None = 0
    min_layers: int = 1
    num_layers: int | None = None
    any_order: bool = False
    zero_fc_bias: bool = False
    needs_embedding: bool = False
    prefers_own_embedding: bool = True
    needs_output_head: bool = False
    d2t_dtype: torch.dtype = torch.int64
    t2d: bool = True
    exclusive_norms: bool = False
    equal_widths: bool = False
    old_rope: bool = False
    unread_rope: tuple[str, ...] = ()
    gguf: bool = False
    speculators_method: str = "eagle3"


LAYOUTS: dict[ExportFormat, dict[EagleForm, EagleLayout]] = {
    ExportFormat.vllm: {
        EagleForm.eagle1: EagleLayout("LlamaForCausalLM", ("mlp_bias",), "layers.0."),
        EagleForm.eagle3: EagleLayout(
            "LlamaForCausalLMEagle3",
            (*NORMS, "qk_norm", "mlp_bias"),
        ),
    },
    ExportFormat.sglang: {
        EagleForm.eagle1: EagleLayout(
            "LlamaForCausalLMEagle",
            ("fc_bias",),
            "layers.0.",
            zero_fc_bias=True,
            prefers_own_embedding=False,
        ),
        # `fc` could have a bias, but its key gives the attention one as well.
        EagleForm.eagle3: EagleLayout(
            "LlamaForCausalLMEagle3",
            ("fc_norm", "norm_output"),
            layer_offset=-1,
            min_layers=2,
            prefers_own_embedding=False,
            needs_output_head=True,
        ),
    },
    ExportFormat.trtllm: {
        # `EAGLE3` is put before the name.
        EagleForm.eagle3: EagleLayout(
            "LlamaForCausalLM",
            ("fc_bias", "fc_norm", "norm_before_fc", "norm_output", "mlp_bias"),
            layer_offset=-1,
            min_layers=2,
            prefers_own_embedding=False,
            d2t_dtype=torch.int32,
            t2d=False,
            exclusive_norms=True,
            unread_rope=("attention_factor", "truncate"),
        ),
    },
    ExportFormat.speculators: {
        EagleForm.eagle3: EagleLayout(
            "Eagle3Speculator",
            (*NORMS, "qk_norm", "mlp_bias"),
            "layers.0.",
            needs_output_head=True,
            exclusive_norms=True,
            equal_widths=True,
        ),
    },
    ExportFormat.original: {
        EagleForm.eagle1: EagleLayout(
            "LlamaForCausalLM", ("fc_bias",), "layers.0.", needs_embedding=True, old_rope=True
        ),
        EagleForm.eagle3: EagleLayout(
            "LlamaForCausalLM",
            (),
            layer_offset=None,
            needs_embedding=True,
            needs_output_head=True,
            old_rope=True,
        ),
    },
    ExportFormat.llamacpp: {
        EagleForm.eagle3: EagleLayout(
            "eagle3",
            ("norm_before_fc", "norm_before_residual"),
            num_layers=3,
            any_order=True,
            t2d=False,
            gguf=True,
        ),
    },
}


def find_layout_problem(head: EagleNetwork, layout: EagleLayout) -> str | None:
    """Reason why an engine with this layout cannot serve a head, as the end of a sentence."""
    return (
        _part_problem(head, layout)
        or _order_problem(head.config.layers, layout)
        or _rope_problem(head, layout)
    )


def _part_problem(head: EagleNetwork, layout: EagleLayout) -> str | None:
    config = head.config
    for part, words in PARTS.items():
        if getattr(config, part) and part not in layout.parts:
            return f"has no place for {words}"
    if config.llama.mlp_bias and "mlp_bias" not in layout.parts:
        return "has no place for biases of the MLP (up_proj.bias)"
    if config.llama.attention_bias:
        return "has no place for biases of queries, keys and values alone (q_proj.bias)"
    if layout.exclusive_norms and config.fc_norm and config.norm_before_fc:
        return "takes one of fc_norm and norm_before_fc"
    if layout.equal_widths and config.target_hidden_size != config.llama.hidden_size:
        return (
            "fuses hidden states as wide as the head, and this head has "
            f"{config.llama.hidden_size} for hidden states of {config.target_hidden_size}"
        )
    return None


def _order_problem(layers: Sequence[int], layout: EagleLayout) -> str | None:
    if not layout.any_order and list(layers) != sorted(set(layers)):
        return f"fuses hidden states in rising order, and this head reads {list(layers)}"
    if 0 < len(layers) < layout.min_layers:
        return (
            f"fuses at least {layout.min_layers} hidden states, and this head reads {list(layers)}"
        )
    if layers and layout.num_layers not in (None, len(layers)):
        return f"fuses {layout.num_layers} hidden states, and this head reads {list(layers)}"
    return None


def _rope_problem(head: EagleNetwork, layout: EagleLayout) -> str | None:
    llama = head.config.llama
    rope: dict = llama.rope_parameters
    for key in layout.unread_rope:
        if rope.get(key) is not None:
            return f"does not read {key} of RoPE's settings, and this head has {key}={rope[key]}"
    if layout.gguf:
        return rope_problem(rope)
    if not layout.old_rope:
        return None
    kind, theta = rope["rope_type"], rope["rope_theta"]
    if kind != "default" and (kind != "linear" or theta != 10000):
        return (
            "supports plain RoPE, and linearly scaled RoPE with a theta of 10000; this head has "
            f"{kind} with {theta:g}"
        )
    if llama.head_dim != llama.hidden_size // llama.num_attention_heads:
        return (
            f"needs head_dim = hidden_size / heads, and this head has {llama.head_dim} * "
            f"{llama.num_attention_heads} for {llama.hidden_size}"
        )
    return None


def check_layers_and_embedding(
    head: EagleNetwork, engine: ExportFormat, layout: EagleLayout
) -> None:
    """Refuse a target from which the engine would read something else than the head does.

    Raises:
        InputError: naming the head's layers and the allowed ones, or the tensor.
    """
    _check_embedding(head, engine, layout)
    if head.config.layers:
        _check_layers(head.config.layers, engine, layout, head.target.num_layers)


def _check_embedding(head: EagleNetwork, engine: ExportFormat, layout: EagleLayout) -> None:
    own = head.embed_tokens
    if own is None or can_use_own_embedding(head, layout):
        return
    if not torch.equal(own.weight, head.target.embedding.weight.to(own.weight)):
        raise InputError(
            f"format={engine.value}: {ENGINE_NAMES[engine]} drafts with the target's embedding, "
            "but "
            "this head has another embed_tokens.weight; formats that keep it: vllm, original, "
            "llamacpp"
        )


def _check_layers(
    layers: Sequence[int], engine: ExportFormat, layout: EagleLayout, num_layers: int
) -> None:
    start = f"format={engine.value}: the head reads hidden states {list(layers)} of {num_layers}"
    if layout.layer_offset is None:
        fixed = [2, num_layers // 2, num_layers - 3]
        if list(layers) != fixed:
            raise InputError(
                f"{start}, but {ENGINE_NAMES[engine]} always {fixed}; train with "
                f"head.layers={fixed}, "
                "or choose another format"
            )
    elif min(layers) < -layout.layer_offset or max(layers) >= num_layers:
        raise InputError(
            f"{start}, but for {ENGINE_NAMES[engine]} they must lie in "
            f"{-layout.layer_offset}..{num_layers - 1}, as the last one has passed the final norm; "
            "train with other head.layers"
        )


def can_use_own_embedding(head: EagleNetwork, layout: EagleLayout) -> bool:
    """Tell whether an engine uses the head's own embedding."""
    return (
        layout.prefers_own_embedding
        or head.config.target_hidden_size != head.config.llama.hidden_size
    )
