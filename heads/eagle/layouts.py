"""Layouts of EAGLE heads that serving engines load, and the heads that each can serve.

Read from the loaders:
- vLLM 0.33 `models/{llama_eagle,llama_eagle3}.py`, `configs/speculators/`;
- SGLang 0.5.23 `models/{llama_eagle,llama_eagle3,llama}.py`, `speculative/eagle_utils.py`;
- TensorRT-LLM `_torch/models/modeling_speculative.py`, `llm_args.py` (1.3);
- speculators 0.9 `models/eagle3/{config,core}.py`;
- SafeAILab/EAGLE `model/{cnets,cnets1,configs,ea_model}.py`;
- llama.cpp b11434 `src/models/eagle3.cpp`.

The loaders do not check for missing tensors: most initialise them randomly and serve nonsense.

GGUF files have llama.cpp's architecture `eagle3`. llama.cpp rotates neighbouring rows of queries
and keys, names layers as here, and takes `d2t` as ids. Letters: L layers of the target, W draft
vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat
from heads.draft_head import WEIGHTS, HeadFiles
from heads.eagle.network import EagleHeadConfig
from heads.export import gguf
from heads.export.gguf import (
    LAYER,
    GgufFile,
    build_head_file,
    deinterleave_rows,
    interleave_rows,
    rope_problem,
)
from heads.export.writer import (
    ENGINE_NAMES,
    build_speculators_section,
    format_dtype,
    format_engine_command,
)
from heads.layers.llama import LLAMA_KEYS, format_legacy_rope
from heads.target_model.architecture import SLIDING, find_max_positions

TITLES = {EagleForm.eagle1: "EAGLE-1/2 heads", EagleForm.eagle3: "EAGLE-3 heads"}
# Parts that the paper's head lacks, by field of `EagleHeadConfig`.
PARTS = {
    "fc_bias": "a bias of the fusion layer (fc.bias)",
    "fc_norm": "a norm per feature (fc_norm)",
    "norm_before_fc": "a norm over all features (input_norm)",
    "norm_output": "its normed output fed back (norm_output)",
    "norm_before_residual": "the normed feature as residual (norm_before_residual; heads of "
    "head=eagle3_1 have none)",
    "qk_norm": "norms on queries and keys (q_norm, k_norm)",
    "window": "a sliding window (sliding_window)",
}
NORMS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
EMBEDDING, OUTPUT_HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"
QUANTISED_HINT = (
    "vLLM 0.33 on a GPU can draft with a quantised copy of the target's output head, which this "
    'head shares: add "draft_lm_head_quantization": "fp8" (or "nvfp4") to the speculative config. '
    "Texts stay the target's own; measure whether the drafts lose less than the time they gain."
)
"""Source: vLLM 0.33 `config/speculative.py`, `v1/worker/gpu/spec_decode/eagle/utils.py`."""
ARCH = "eagle3"
"""llama.cpp's architecture of these heads."""
GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
} | {f"midlayer.{name}": f"blk.0.{gguf_name}" for name, gguf_name in LAYER.items()}
"""GGUF names of tensors, by their names in EAGLE-3 files."""
INTERLEAVED = {
    "blk.0.attn_q.weight": "num_attention_heads",
    "blk.0.attn_k.weight": "num_key_value_heads",
}
"""Tensors whose rows llama.cpp orders differently, with the config's key for their heads."""
GGUF_FLAGS = ("norm_before_residual", "norm_before_fc")
"""Fields of `EagleHeadConfig` that are GGUF keys of the same name."""


@dataclass(frozen=True)
class EagleLayout:
    """Layout in which a loader reads an EAGLE head.

    Attributes:
        architecture: value of `architectures`.
        parts: `PARTS` that the engine implements, and `mlp_bias` if its MLP may have biases.
        layer_prefix: prefix of the layer's tensors.
        layer_offset: the engine's layer ids minus those of `output_hidden_states`; None if the
            engine always reads 2, L/2 and L-3.
        min_layers: least number of hidden states that the engine fuses.
        zero_fc_bias: whether the engine builds `fc` with a bias. A head without one gets a bias of
            zero.
        needs_embedding: whether the file must hold `embed_tokens.weight`, even the target's.
        prefers_own_embedding: whether the engine uses `embed_tokens` of the head's file even if the
            target's embedding has the same width; if not, the engine drafts with the target's
            embedding.
        needs_output_head: whether the file must hold `lm_head.weight`, even the target's.
        d2t_dtype: dtype of the tensor `d2t` in the file.
        t2d: whether the engine reads a tensor `t2d`.
        exclusive_norms: whether the engine takes `fc_norm` or `norm_before_fc`, but not both.
        equal_widths: whether hidden states must be as wide as the head.
        old_rope: whether RoPE may only be scaled linearly, with a theta of 10000, and the head size
            must be hidden / heads.
        unread_rope: RoPE settings that the engine does not read.
        gguf: whether the layout is a GGUF file, which has its own RoPE keys, and three hidden
            states in the head's order.
        speculators_method: name of the kind of head in speculators.
    """

    architecture: str
    parts: tuple[str, ...]
    layer_prefix: str = "midlayer."
    layer_offset: int | None = 0
    min_layers: int = 1
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
            (*NORMS, "qk_norm", "window", "mlp_bias"),
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
            ("fc_norm", "norm_before_fc", "norm_output"),
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
            (*NORMS, "qk_norm", "window", "mlp_bias"),
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
            t2d=False,
            gguf=True,
        ),
    },
}


def find_layout_problem(head: Any, layout: EagleLayout) -> str | None:
    """Find the reason why an engine with this layout cannot serve a head.

    Returns:
        The end of a sentence whose subject is the engine; None if the engine can serve the head.
    """
    return (
        _find_part_problem(head, layout)
        or _find_order_problem(head.config.layers, layout)
        or _find_rope_problem(head, layout)
    )


def _find_part_problem(head: Any, layout: EagleLayout) -> str | None:
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


def _find_order_problem(layers: Sequence[int], layout: EagleLayout) -> str | None:
    if not layout.gguf and list(layers) != sorted(set(layers)):
        return f"fuses hidden states in rising order, and this head reads {list(layers)}"
    if 0 < len(layers) < layout.min_layers:
        return (
            f"fuses at least {layout.min_layers} hidden states, and this head reads {list(layers)}"
        )
    if layout.gguf and len(layers) not in (0, 3):
        return f"fuses 3 hidden states, and this head reads {list(layers)}"
    return None


def _find_rope_problem(head: Any, layout: EagleLayout) -> str | None:
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


def check_layers_and_embedding(head: Any, engine: ExportFormat, layout: EagleLayout) -> None:
    """Refuse an engine that would read other hidden states or another embedding than the head.

    Raises:
        InputError: the engine has a fixed list of hidden states, cannot count the head's, or
            ignores the head's own embedding.
    """
    name, embedding, target = ENGINE_NAMES[engine], head.embed_tokens, head.target
    if (
        embedding is not None
        and not can_use_own_embedding(head, layout)
        and not torch.equal(embedding.weight, target.embedding.weight.to(embedding.weight))
    ):
        raise InputError(
            f"format={engine.value}: {name} drafts with the target's embedding, but this head has "
            "another embed_tokens.weight; formats that keep it: vllm, original, llamacpp"
        )
    layers, num_layers = head.config.layers, target.num_layers
    start = f"format={engine.value}: the head reads hidden states {list(layers)} of {num_layers}"
    if not layers:
        return
    if layout.layer_offset is None:
        fixed = [2, num_layers // 2, num_layers - 3]
        if list(layers) != fixed:
            raise InputError(
                f"{start}, but {name} always {fixed}; train with head.layers={fixed}, or choose "
                "another format"
            )
    elif min(layers) < -layout.layer_offset or max(layers) >= num_layers:
        raise InputError(
            f"{start}, but for {name} they must lie in {-layout.layer_offset}..{num_layers - 1}, "
            "as the last one has passed the final norm; train with other head.layers"
        )


def can_use_own_embedding(head: Any, layout: EagleLayout) -> bool:
    """Tell whether an engine uses the head's own embedding."""
    return (
        layout.prefers_own_embedding
        or head.config.target_hidden_size != head.config.llama.hidden_size
    )


def build_engine_files(head: Any, engine: ExportFormat, layout: EagleLayout) -> HeadFiles:
    """Build the files of a head in the layout of an engine that can serve it.

    Raises:
        InputError: see `check_layers_and_embedding`.
    """
    check_layers_and_embedding(head, engine, layout)
    if layout.gguf:
        return _build_gguf_files(head)
    tensors, added = _collect_engine_tensors(head, layout), _make_added_tensors(head, layout)
    settings = _build_config(head, layout, format_dtype(head))
    if engine is ExportFormat.speculators:
        settings = _build_speculators_config(head, settings, layout)
    return HeadFiles(settings, WEIGHTS, tensors | added, sorted(added), list(head.config.layers))


def _collect_engine_tensors(head: Any, layout: EagleLayout) -> dict[str, Tensor]:
    prefix = head.layer_prefix
    named = {
        layout.layer_prefix + name.removeprefix(prefix) if name.startswith(prefix) else name: each
        for name, each in head.collect_tensors().items()
    }
    if "d2t" in named:
        named["d2t"] = named["d2t"].to(layout.d2t_dtype)
    if not layout.t2d:
        named.pop("t2d", None)
    if not can_use_own_embedding(head, layout):
        named.pop(EMBEDDING, None)
    return named


def _make_added_tensors(head: Any, layout: EagleLayout) -> dict[str, Tensor]:
    """Make the tensors that the head lacks and the engine would initialise randomly."""
    added = {}
    if layout.needs_embedding and head.embed_tokens is None:
        added[EMBEDDING] = head.target.embedding.weight.to(head.dtype)
    if layout.needs_output_head and head.lm_head is None and head.config.form is EagleForm.eagle3:
        # A copy, as a file cannot hold two tensors that share memory.
        added[OUTPUT_HEAD] = head.target.output_head.weight.to(head.dtype, copy=True)
    if layout.zero_fc_bias and head.fc.bias is None:
        added[FC_BIAS] = torch.zeros(len(head.fc.weight), dtype=head.dtype)
    return added


def _build_config(head: Any, layout: EagleLayout, dtype: str) -> dict[str, Any]:
    """Build a Llama model's config with EAGLE's keys, each in every place where it is read."""
    config, eagle3 = head.config, head.config.form is EagleForm.eagle3
    settings = head.build_files().config
    if not config.qk_norm:
        settings["architectures"] = [layout.architecture]
    settings |= {
        "base_model_name_or_path": head.target_name,
        "max_position_embeddings": find_max_positions(head.target.config),
        "rope_scaling": format_legacy_rope(settings["rope_parameters"], short=layout.old_rope),
        "dtype": dtype,
        "torch_dtype": dtype,
        # SGLang's key for a bias of the attention; its `fc` always has one.
        "bias": config.fc_bias and not layout.zero_fc_bias,
    }
    if not eagle3:
        return settings
    # Null makes SGLang take the target's output head, and breaks the authors' code.
    settings["draft_vocab_size"] = len(head.vocab.ids)
    del settings["eagle_aux_hidden_state_layer_ids"]
    norms = {name: getattr(config, name) for name in NORMS}
    settings["eagle_config"] = {
        "use_aux_hidden_state": True,
        # TensorRT-LLM's name for `norm_output`.
        "return_hidden_post_norm": config.norm_output,
        **norms,
    }
    if layout.layer_offset is not None:
        ids = [index + layout.layer_offset for index in config.layers]
        settings |= {"num_aux_hidden_states": len(ids), "eagle_aux_hidden_state_layer_ids": ids}
        settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    return settings


def _build_speculators_config(
    head: Any, flat: dict[str, Any], layout: EagleLayout
) -> dict[str, Any]:
    """Build speculators' `Eagle3SpeculatorConfig`, with the layer's keys in a section."""
    config, method = head.config, layout.speculators_method
    outer = {"architectures", "draft_vocab_size", "eagle_config", "target_hidden_size", "bias"}
    outer |= {"eagle_aux_hidden_state_layer_ids", "base_model_name_or_path", *NORMS}
    layer = {name: value for name, value in flat.items() if name not in outer}
    return {
        "architectures": [layout.architecture],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "draft_vocab_size": flat["draft_vocab_size"],
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        **{name: getattr(config, name) for name in NORMS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": flat["dtype"],
        "transformer_layer_config": layer,
        "speculators_config": build_speculators_section(head, method),
        **{name: flat[name] for name in ("mask_token_id",) if name in flat},  # P-EAGLE's
    }


def build_config_json(config: EagleHeadConfig, num_draft_ids: int) -> dict[str, Any]:
    """Build the content of `config.json` for vLLM and SGLang, with layer indices as in vLLM.

    Args:
        config: architecture of the head.
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
    if config.window is not None:
        kinds = [SLIDING] * llama.num_hidden_layers
        shared |= {"layer_types": kinds, "sliding_window": config.window}
        shared["use_sliding_window"] = True
    if not eagle3:
        return shared
    layers = {"eagle_aux_hidden_state_layer_ids": list(config.layers)} if config.layers else {}
    return shared | {
        # If unset, SGLang takes the target's output head, as this head does.
        "draft_vocab_size": num_draft_ids if config.own_output_head else None,
        "target_hidden_size": config.target_hidden_size,
        **layers,
        "eagle_config": {"use_aux_hidden_state": True, **layers},
        **{name: getattr(config, name) for name in NORMS},
    }


def _build_gguf_files(head: Any) -> HeadFiles:
    config, tensors = head.config, head.collect_tensors()
    named = {GGUF_NAMES[name]: each for name, each in tensors.items() if name in GGUF_NAMES}
    for name, heads in INTERLEAVED.items():
        named[name] = interleave_rows(named[name], getattr(config.llama, heads))
    values = {
        # As in every other layout: a head's own files may say less than its target supports.
        "context_length": find_max_positions(head.target.config),
        "target_layers": list(config.layers),
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in GGUF_FLAGS},
    }
    made = build_head_file(head, ARCH, ARCH, values, named)
    return HeadFiles(*made, layers=list(config.layers))


def load_gguf_tensors(
    file: GgufFile, added: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load the config and the tensors of a file of `ARCH`, under the names of EAGLE's authors.

    Arguments and errors as in `gguf.load_head`.
    """
    config, tensors = gguf.load_head(file, added)
    for name, heads in INTERLEAVED.items():
        if name in tensors:
            tensors[name] = deinterleave_rows(tensors[name], config[heads])
    own_names = {gguf_name: name for name, gguf_name in GGUF_NAMES.items()}
    layers = file.get_content("target_layers", file.get_content("extract_layers", []))
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": file.get_content("target_hidden_size", config["hidden_size"]),
        "eagle_aux_hidden_state_layer_ids": layers,
        **{flag: file.get_content(flag, False) for flag in GGUF_FLAGS},
    }, {own_names.get(name, name): tensor for name, tensor in tensors.items()}


def format_serve_command(head: Any, engine: ExportFormat, folder: str) -> str:
    """Format the command that starts an engine, for a shell; for the authors' code, Python."""
    target, eagle3 = head.target_name, head.config.form is EagleForm.eagle3
    tokens = head.num_engine_tokens
    if engine is ExportFormat.trtllm:
        layers = [index - 1 for index in head.config.layers]
        return (
            "cat > speculative.yaml <<END\nspeculative_config:\n  decoding_type: Eagle3\n"
            f"  max_draft_len: {tokens}\n  speculative_model: {folder}\n"
            f"  eagle3_layers_to_capture: {layers}\nEND\n"
            f"trtllm-serve {target} --config speculative.yaml"
        )
    if engine is ExportFormat.original:
        return (
            "import torch\nfrom eagle.model.ea_model import EaModel\n"
            f'model = EaModel.from_pretrained(base_model_path="{target}", '
            f'ea_model_path="{folder}", use_eagle3={eagle3}, '
            f"torch_dtype=torch.{format_dtype(head)})"
        )
    method = "eagle3" if eagle3 else "eagle"
    steps = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 "
    return format_engine_command(head, engine, folder, method, tokens, steps)


def format_engine_hint(head: Any, engine: ExportFormat) -> str:
    """Format further advice for users of an engine: a sentence, or empty."""
    if engine is ExportFormat.original and head.config.form is EagleForm.eagle1:
        return (
            "The authors' loader searches the target's embedding in its "
            "`model.safetensors.index.json`, which a target in one file lacks."
        )
    if engine is ExportFormat.trtllm and format_dtype(head) == "float32":
        return (
            "TensorRT-LLM runs the head in the dtype of `config.json`, and its attention does not "
            "support float32: export with dtype=bfloat16."
        )
    if engine is ExportFormat.vllm and shares_output_head(head):
        return QUANTISED_HINT
    return ""


def shares_output_head(head: Any) -> bool:
    """Tell whether vLLM may draft with a quantised copy of the target's output head.

    It refuses heads with an output head of their own. P-EAGLE's heads, which draft in one pass,
    were not looked up. Beside a target whose output head is quantised there is no export.
    """
    return head.lm_head is None and head.max_draft_tokens is None
