"""Block drafters per engine: support, tensors, `config.json` and serve command.

Read from the loaders: vLLM 0.33 `models/qwen3_{dflash,dspark}.py` and `configs/speculators/`;
SGLang 0.5.23 `models/{dflash,dspark}.py`, `speculative/dflash_utils.py`; speculators 0.9
`models/{dflash,dflash2,dspark}`; z-lab/dflash `model.py`; deepseek-ai/DeepSpec `modeling/dspark`;
llama.cpp b11434 `src/models/dflash.cpp`. All but speculators read the authors' layout, in which
heads are saved.

GGUF files have llama.cpp's architecture `dflash`. Rows of queries and keys keep their order, layers
count as here, and `d2t` holds ids. Kinds beyond DFlash are recognised by keys and tensors.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from conf.settings.export import ExportFormat
from heads.draft_head import WEIGHTS, HeadFiles
from heads.export import gguf
from heads.export.gguf import LAYER, GgufFile, Value, build_head_file, rope_problem
from heads.export.writer import (
    build_speculators_section,
    format_dtype,
    format_engine_command,
)
from heads.feature_head import FeatureArchitecture
from heads.layers.llama import LLAMA_KEYS, format_legacy_rope
from heads.target_model.architecture import FULL, SLIDING

DFLASH_KEYS = ("mask_token_id", "target_layer_ids", "causal", "use_swa", "swa_window_size")
"""Keys of DFlash in `dflash_config`, which speculators names differently."""
EMBEDDING, OUTPUT_HEAD = "embed_tokens.weight", "lm_head.weight"
ARCH = "dflash"
"""llama.cpp's architecture of these heads."""
MASK = "tokenizer.ggml.mask_token_id"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
"""GGUF keys of the mask token, of the window, and of the layers that have one."""
MARKOV, CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
"""GGUF tensors of the Markov head and of the confidence head."""
GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
"""GGUF names of tensors outside the layers, by their names in the head."""
GGUF_LAYER_NAMES = LAYER | {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
"""GGUF names of tensors inside a layer, by their names in the layer."""
GGUF_KEYS = {
    **{key: key for key in ("block_size", "sample_from_anchor", "final_logit_softcapping")},
    **{f"conv_{name}_size": f"conv_{name}_size" for name in ("kernel", "group")},
    **{f"selector_{name}": f"selector_{name}" for name in ("rank", "top_k")},
    "enable_confidence_head": "has_confidence_head",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
}
"""llama.cpp's keys by the keys of `config.json` with the same values."""


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(FeatureArchitecture):
    """Architecture of a block drafter.

    Attributes:
        num_target_layers: number of the target's decoder layers; 0 while unknown.
        block_size: number of rows of a block in training.
        mask_token_id: token id of rows whose token is unknown.
        sample_from_anchor: whether row j drafts the next token instead of its own.
        causal: whether a row sees no later rows of its block.
        window: number of tokens of text and block that a row sees; None for all.
        full_layers: layers whose rows see the whole text and block, despite `causal` and `window`.
    """

    num_target_layers: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    causal: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()

    @property
    def first_row(self) -> int:
        """Number of the first row that drafts, counted from 0."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens of a full block."""
        return self.block_size - self.first_row


@dataclass(frozen=True)
class BlockLayout:
    """Names that engines use for a kind of block drafter.

    Attributes:
        speculators_method: name of the method in speculators.
        vllm_method: name of the method in vLLM and llama.cpp, and in capitals in SGLang.
        speculators_class: class name in speculators.
        with_embeddings_and_head: whether the authors' files hold the target's embedding and output
            head.
    """

    speculators_method: str
    vllm_method: str
    speculators_class: str
    with_embeddings_and_head: bool = False


def find_export_problem(head: Any, engine: ExportFormat) -> str | None:
    """Find the reason why an engine cannot serve a head.

    Returns:
        The end of a sentence whose subject is the engine; None if the engine can serve the head.
    """
    config = head.config
    if engine is ExportFormat.vllm:
        return None
    if engine is ExportFormat.speculators:
        limited = config.causal and (config.window is None or config.full_layers)
        problem = "lets rows see later rows wherever they see all of the text (head.causal=true)"
        return problem if limited else None
    if engine is ExportFormat.llamacpp:
        return _find_llamacpp_problem(head)
    if engine not in (ExportFormat.sglang, ExportFormat.original):
        return f"loads {head.title} in its main branch alone, for which there is no export"
    if head.lm_head is not None or head.embed_tokens is not None:
        return "drafts with the target's embedding and output head, and this head has its own"
    limited = engine is ExportFormat.original and (config.causal or config.window is not None)
    return "lets rows see all of the text and of their block" if limited else None


def _find_llamacpp_problem(head: Any) -> str | None:
    config = head.config
    hidden, width = config.llama.hidden_size, config.target_hidden_size
    if config.causal and config.full_layers:
        return (
            f"needs causal rows in all layers or in none, and layers {list(config.full_layers)} of "
            "this head see all of the text"
        )
    if width != hidden:
        return (
            f"fuses hidden states as wide as the head, and this head has {hidden} for hidden "
            f"states of {width}"
        )
    return rope_problem(config.llama.rope_parameters)


def build_engine_files(head: Any, engine: ExportFormat, layout: BlockLayout) -> HeadFiles:
    """Build the files of a head for an engine that can serve it."""
    if engine is ExportFormat.llamacpp:
        return _build_gguf_files(head, layout.vllm_method)
    added: dict[str, Tensor] = {}
    if engine is ExportFormat.original and layout.with_embeddings_and_head:
        added[EMBEDDING] = head.target.embedding.weight.to(head.dtype)
        # A copy, as a file cannot hold two tensors that share memory.
        added[OUTPUT_HEAD] = head.target.output_head.weight.to(head.dtype, copy=True)
    files, dtype = head.build_files(), format_dtype(head)
    settings = files.config | {"dtype": dtype, "torch_dtype": dtype}
    if engine is ExportFormat.sglang:
        # Its name for `causal` of `dflash_config`, which it does not read.
        settings |= build_causal_key(head.config, "is_causal")
    if engine is ExportFormat.speculators:
        settings = _build_speculators_config(head, settings, layout)
    layers = list(head.config.layers)
    return HeadFiles(settings, WEIGHTS, files.tensors | added, sorted(added), layers)


def _build_speculators_config(
    head: Any, flat: dict[str, Any], layout: BlockLayout
) -> dict[str, Any]:
    """Build the config of speculators, with the layers' keys in a section."""
    config = head.config
    layer_keys = (
        *LLAMA_KEYS, "model_type", "rope_theta", "rope_scaling", "num_hidden_layers", "layer_types",
        "sliding_window", "use_sliding_window", "tie_word_embeddings",
    )  # fmt: skip
    renamed_keys = {"dflash_config", "target_layer_ids", "is_causal", "num_target_layers"}
    root = {n: value for n, value in flat.items() if n not in {*layer_keys, *renamed_keys}}
    # Keys beyond DFlash's; the rest is renamed below.
    inner = flat.get("dflash_config", {})
    root |= {name: value for name, value in inner.items() if name not in DFLASH_KEYS}
    return root | {
        "architectures": [layout.speculators_class],
        "speculators_model_type": layout.speculators_method,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": list(config.layers),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.causal,
        "tie_word_embeddings": False,
        "transformer_layer_config": {name: flat[name] for name in layer_keys},
        "speculators_config": build_speculators_section(head, layout.speculators_method),
    }


def build_qwen3_keys(config: BlockHeadConfig, num_draft_ids: int) -> dict[str, Any]:
    """Build the keys of `config.json` that every layout has, as in Qwen3."""
    llama = config.llama
    rope: Any = llama.rope_parameters
    sliding = config.window is not None
    layer_types = [SLIDING if sliding else FULL] * llama.num_hidden_layers
    for number in config.full_layers:
        layer_types[number] = FULL
    return {
        "model_type": "qwen3",
        **{name: getattr(llama, name) for name in LLAMA_KEYS},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": format_legacy_rope(rope),
        "num_hidden_layers": llama.num_hidden_layers,
        "layer_types": layer_types,
        "sliding_window": config.window,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "draft_vocab_size": num_draft_ids,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "base_model_name_or_path": config.target,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def build_dflash_keys(config: BlockHeadConfig) -> dict[str, Any]:
    """Build the keys of `dflash_config`, with layers as the authors count them."""
    window = {"use_swa": True, "swa_window_size": config.window} if config.window else {}
    return {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.layers],
        **build_causal_key(config, "causal"),
        **window,
    }


def build_causal_key(config: BlockHeadConfig, name: str) -> dict[str, bool]:
    """Build the key `name` that makes the rows of all layers causal or not.

    Without the key, engines make rows causal in layers with a window; so it is left out for heads
    with `full_layers`.
    """
    return {} if config.causal and config.full_layers else {name: config.causal}


def _build_gguf_files(head: Any, prefix: str) -> HeadFiles:
    config, llama, files = head.config, head.config.llama, head.build_files()
    settings = files.config | files.config.get("dflash_config", {})
    values = {name: settings[key] for key, name in GGUF_KEYS.items() if key in settings}
    values |= {"target_layers": list(config.layers), "attention.causal": config.causal}
    if config.window is not None:
        windows = [number not in config.full_layers for number in range(llama.num_hidden_layers)]
        values |= {WINDOW: config.window, PATTERN: windows}
    names = _map_tensor_names(llama.num_hidden_layers)
    tensors = {names[name]: each for name, each in files.tensors.items() if name in names}
    added: dict[str, Tensor] = {}
    if head.embed_tokens is not None and head.lm_head is None:
        # llama.cpp would otherwise draft with the embedding as output head.
        added["output.weight"] = head.target.output_head.weight.to(head.dtype, copy=True)
    if MARKOV in tensors and CONFIDENCE in tensors:
        # A confidence head that does not read the previous token gets a weight of zero for it.
        width = llama.hidden_size + tensors[MARKOV].shape[1]
        read = tensors[CONFIDENCE]
        tensors[CONFIDENCE] = functional.pad(read, (0, width - read.shape[1]))
    made = build_head_file(head, ARCH, prefix, values, tensors | added)
    made[0][MASK] = Value.from_content(config.mask_token_id)
    return HeadFiles(*made, sorted(added), list(config.layers))


def _map_tensor_names(num_layers: int) -> dict[str, str]:
    return GGUF_NAMES | {
        f"layers.{number}.{name}": f"blk.{number}.{gguf_name}"
        for number in range(num_layers)
        for name, gguf_name in GGUF_LAYER_NAMES.items()
    }


def load_gguf_tensors(
    file: GgufFile, added: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load the config and the tensors of a file of `ARCH`, under the authors' names.

    Arguments and errors as in `gguf.load_head`.
    """
    config, tensors = gguf.load_head(file, added)
    values = {key: file.get_content(name) for key, name in GGUF_KEYS.items()}
    kind = "DFlash2DraftModel" if "selector_hidden.weight" in tensors else "DFlashDraftModel"
    if MARKOV in tensors:
        kind, hidden = "Qwen3DSparkModel", config["hidden_size"]
        values["markov_rank"] = tensors[MARKOV].shape[1]
        read = tensors.get(CONFIDENCE)
        if read is not None and not read[:, hidden:].any():
            tensors[CONFIDENCE] = read[:, :hidden].contiguous()
    if "d2t" in tensors:
        values["draft_vocab_size"] = len(tensors["d2t"])
    number, window = config["num_hidden_layers"], file.get_content(WINDOW)
    pattern = file.get_content(PATTERN, [True] * number) if window else [False] * number
    mask = file.metadata.get(MASK)
    own_names = {gguf_name: name for name, gguf_name in _map_tensor_names(number).items()}
    present = {key: value for key, value in values.items() if value is not None}
    return config | present | {
        "architectures": [kind],
        "block_size": file.get_content("block_size", 16),
        "mask_token_id": None if mask is None else mask.content,
        "target_layer_ids": [index - 1 for index in file.require_content("target_layers")],
        "layer_types": [SLIDING if windowed else FULL for windowed in pattern],
        "sliding_window": window,
        "is_causal": file.get_content("attention.causal", False),
    }, {own_names.get(name, name): tensor for name, tensor in tensors.items()}


def format_serve_command(head: Any, engine: ExportFormat, folder: str, layout: BlockLayout) -> str:
    """Format the command that starts an engine, for a shell; for the authors' code, Python."""
    if engine is not ExportFormat.original:
        tokens = head.num_engine_tokens
        return format_engine_command(head, engine, folder, layout.vllm_method, tokens)
    if layout.with_embeddings_and_head:
        return (
            "from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel\n"
            f'draft = Qwen3DSparkModel.from_pretrained("{folder}")'
        )
    return (
        "from dflash.model import DFlashDraftModel\n"
        f'draft = DFlashDraftModel.from_pretrained("{folder}")'
    )
