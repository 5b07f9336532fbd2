"""Block drafters per engine: support, tensors, `config.json` and serve command.

Read from the loaders: vLLM 0.32 `models/qwen3_{dflash,dspark}.py` and `configs/speculators/`;
SGLang 0.5 `models/{dflash,dspark}.py`; speculators 0.9 `models/{dflash,dflash2,dspark}`;
z-lab/dflash `model.py`; deepseek-ai/DeepSpec `modeling/dspark`; llama.cpp b11434
`src/models/dflash.cpp`. All but speculators read the authors' layout, in which heads are saved.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conf.settings.export import ExportFormat
from heads.blocks import gguf
from heads.blocks.config import build_dflash_keys
from heads.blocks.network import BlockNetwork
from heads.export.engines import format_dtype, format_vllm_command
from heads.export.llamacpp import rope_problem, weights_name
from heads.export.llamacpp import serve_command as serve_llamacpp
from heads.head import WEIGHTS, HeadFiles
from heads.layers.llama import LLAMA_KEYS

EMBEDDING, OUTPUT_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class BlockLayout:
    """Names that loaders use for a kind of block drafter.

    Attributes:
        speculators_method: name of the method in speculators.
        vllm_method: name of the method in vLLM and llama.cpp, and in capitals in SGLang.
        title: name of the heads in sentences.
        speculators_class: class name in speculators.
        with_embeddings_and_head: whether the authors' files hold the target's embedding and output
            head.
    """

    speculators_method: str
    vllm_method: str
    title: str
    speculators_class: str
    with_embeddings_and_head: bool = False


def find_export_problem(
    head: BlockNetwork, engine: ExportFormat, layout: BlockLayout
) -> str | None:
    """Reason why an engine cannot serve a head, as the end of a sentence; None if it can."""
    config = head.config
    if engine is ExportFormat.vllm:
        return None
    if engine is ExportFormat.speculators:
        limited = config.causal and (config.window is None or config.full_layers)
        every = "lets rows see later rows wherever they see all of the text (head.causal=true)"
        return every if limited else None
    if engine is ExportFormat.llamacpp:
        return _llamacpp_problem(head)
    if engine not in (ExportFormat.sglang, ExportFormat.original):
        return f"has no layout for {layout.title} in this version"
    own = head.lm_head is not None or head.embed_tokens is not None
    if own:
        return "drafts with the target's embedding and output head, and this head has its own"
    limited = config.causal or config.window is not None
    return "lets rows see all of the text and of their block" if limited else None


def _llamacpp_problem(head: BlockNetwork) -> str | None:
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


def build_engine_files(head: BlockNetwork, engine: ExportFormat, layout: BlockLayout) -> HeadFiles:
    """Files of a head for an engine that can serve it."""
    if engine is ExportFormat.llamacpp:
        return gguf.build_gguf_files(head, layout.vllm_method)
    added = (
        _copy_target_weights(head)
        if engine is ExportFormat.original and layout.with_embeddings_and_head
        else {}
    )
    own, dtype = head.build_files(), format_dtype(head)
    settings = own.config | {"dtype": dtype, "torch_dtype": dtype}
    if engine is ExportFormat.speculators:
        settings = _speculators_config(head, settings, layout)
    layers = list(head.config.layers)
    return HeadFiles(settings, WEIGHTS, own.tensors | added, sorted(added), layers)


def _copy_target_weights(head: BlockNetwork) -> dict[str, Tensor]:
    """The target's embedding and output head, unless the head has its own."""
    ends, target = {}, head.target
    if head.embed_tokens is None:
        ends[EMBEDDING] = target.embedding.weight.to(head.dtype)
    if head.lm_head is None:
        # A copy, as a file cannot hold two tensors that share memory.
        ends[OUTPUT_HEAD] = target.output_head.weight.to(head.dtype, copy=True)
    return ends


def _speculators_config(
    head: BlockNetwork, flat: dict[str, Any], layout: BlockLayout
) -> dict[str, Any]:
    """Config of speculators, with the layers' keys in a section."""
    config = head.config
    of_layers = (
        *LLAMA_KEYS, "model_type", "rope_theta", "rope_scaling", "num_hidden_layers", "layer_types",
        "sliding_window", "use_sliding_window", "tie_word_embeddings",
    )  # fmt: skip
    elsewhere = {"dflash_config", "target_layer_ids", "is_causal", "num_target_layers"}
    kept = {n: value for n, value in flat.items() if n not in {*of_layers, *elsewhere}}
    # Keys beyond DFlash's; the rest is renamed below.
    inner, common = flat.get("dflash_config", {}), build_dflash_keys(config)
    kept |= {name: value for name, value in inner.items() if name not in common}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return kept | {
        "architectures": [layout.speculators_class],
        "speculators_model_type": layout.speculators_method,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": list(config.layers),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.causal,
        "tie_word_embeddings": False,
        "transformer_layer_config": {name: flat[name] for name in of_layers},
        "speculators_config": {
            "algorithm": layout.speculators_method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": head.target_name,
                "architectures": head.target.architectures,
            },
        },
    }


def serve_command(
    head: BlockNetwork, engine: ExportFormat, folder: str, layout: BlockLayout
) -> str:
    """Command that starts an engine, as lines for a shell (the authors': for Python)."""
    target, tokens = head.target_name, head.config.num_draft_tokens
    if engine is ExportFormat.vllm:
        return format_vllm_command(layout.vllm_method, tokens, target, folder)
    if engine is ExportFormat.speculators:
        return f"vllm serve {folder}"
    if engine is ExportFormat.sglang:
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {layout.vllm_method.upper()} "
            f"--speculative-draft-model-path {folder} "
            f"--speculative-num-draft-tokens {tokens + 1}"
        )
    if engine is ExportFormat.llamacpp:
        file = f"{folder}/{weights_name(layout.vllm_method, target, head.dtype)}"
        return serve_llamacpp(target, file, f"draft-{layout.vllm_method}", tokens)
    if layout.with_embeddings_and_head:
        return (
            "from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel\n"
            f'draft = Qwen3DSparkModel.from_pretrained("{folder}")'
        )
    return (
        "from dflash.model import DFlashDraftModel\n"
        f'draft = DFlashDraftModel.from_pretrained("{folder}")'
    )
