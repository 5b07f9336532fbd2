"""Block drafters as GGUF files (llama.cpp's architecture `dflash`), written and read.

Rows of queries and keys keep their order, layers count as here, and `d2t` holds ids. Kinds beyond
DFlash are recognised by keys of `config.json` and by tensors.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heads.blocks.network import BlockNetwork
from heads.export.gguf import GgufFile, Value
from heads.export.llamacpp import (
    LAYER,
    ROPE_FREQS,
    ArchMetadata,
    build_head_metadata,
    make_file_tensors,
    parse_metadata,
    weights_name,
)
from heads.head import HeadFiles

ARCH = "dflash"
MASK = "tokenizer.ggml.mask_token_id"
NAMES = {
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
LAYERS = LAYER | {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
KEYS = {
    **{key: key for key in ("block_size", "sample_from_anchor", "final_logit_softcapping")},
    **{f"conv_{name}_size": f"conv_{name}_size" for name in ("kernel", "group")},
    **{f"selector_{name}": f"selector_{name}" for name in ("rank", "top_k")},
    "enable_confidence_head": "has_confidence_head",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
}
"""Keys of `config.json` with llama.cpp's keys for the same values."""
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
MARKOV, CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
SLIDING, FULL = "sliding_attention", "full_attention"


def _map_tensor_names(num_layers: int) -> dict[str, str]:
    return NAMES | {
        f"layers.{number}.{ours}": f"blk.{number}.{theirs}"
        for number in range(num_layers)
        for ours, theirs in LAYERS.items()
    }


def build_gguf_files(head: BlockNetwork, prefix: str) -> HeadFiles:
    """File of a head that llama.cpp can serve.

    Args:
        head: attached head.
        prefix: prefix of the file's name.
    """
    config, llama, own = head.config, head.config.llama, head.build_files()
    settings = own.config | own.config.get("dflash_config", {})
    title = head.variants[head.variant].title
    metadata = build_head_metadata(llama, ARCH, head.dtype, title, head.target_name)
    about = {theirs: settings[ours] for ours, theirs in KEYS.items() if ours in settings}
    about |= {"target_layers": list(config.layers), "attention.causal": config.causal}
    if config.window is not None:
        windows = [number not in config.full_layers for number in range(llama.num_hidden_layers)]
        about |= {WINDOW: config.window, PATTERN: windows}
    metadata |= {f"{ARCH}.{key}": Value.from_content(value) for key, value in about.items()}
    metadata[MASK] = Value.from_content(config.mask_token_id)
    names = _map_tensor_names(llama.num_hidden_layers)
    tensors = {names[name]: each for name, each in own.tensors.items() if name in names}
    added = _copy_output_head(head)
    if MARKOV in tensors and CONFIDENCE in tensors:
        # A confidence head that does not read the previous token gets a weight of zero for it.
        width = llama.hidden_size + tensors[MARKOV].shape[1]
        read = tensors[CONFIDENCE]
        tensors[CONFIDENCE] = functional.pad(read, (0, width - read.shape[1]))
    name = weights_name(prefix, head.target_name, head.dtype)
    whole = make_file_tensors(tensors | added, head.vocab, llama)
    return HeadFiles(metadata, name, whole, sorted(added), list(config.layers))


def _copy_output_head(head: BlockNetwork) -> dict[str, Tensor]:
    """The target's output head, if the head has its own embedding, which llama.cpp would use."""
    if head.embed_tokens is None or head.lm_head is not None:
        return {}
    return {"output.weight": head.target.output_head.weight.to(head.dtype, copy=True)}


def load_gguf_tensors(
    file: GgufFile, what: str, added: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a file, under the authors' names.

    Args:
        file: file of this architecture.
        what: name of the file in messages.
        added: tensors that are not the head's own.

    Raises:
        InputError: metadata are missing.
    """
    tensors = {name: each for name, each in file.load_tensors().items() if name not in added}
    config = parse_metadata(file.metadata, tensors.pop(ROPE_FREQS, None), what)
    facts = ArchMetadata(file.metadata, ARCH, what)
    found = {ours: facts.get_content(theirs) for ours, theirs in KEYS.items()}
    kind = "DFlash2DraftModel" if "selector_hidden.weight" in tensors else "DFlashDraftModel"
    if MARKOV in tensors:
        kind, hidden = "Qwen3DSparkModel", config["hidden_size"]
        found["markov_rank"] = tensors[MARKOV].shape[1]
        read = tensors.get(CONFIDENCE)
        if read is not None and not read[:, hidden:].any():
            tensors[CONFIDENCE] = read[:, :hidden].contiguous()
    if "d2t" in tensors:
        found["draft_vocab_size"] = len(tensors["d2t"])
        tensors["d2t"] -= torch.arange(len(tensors["d2t"]))
    number, window = config["num_hidden_layers"], facts.get_content(WINDOW)
    pattern = facts.get_content(PATTERN, [True] * number) if window else [False] * number
    mask = file.metadata.get(MASK)
    ours = {theirs: name for name, theirs in _map_tensor_names(number).items()}
    given = {key: value for key, value in found.items() if value is not None}
    return config | given | {
        "architectures": [kind],
        "block_size": facts.get_content("block_size", 16),
        "mask_token_id": None if mask is None else mask.content,
        "target_layer_ids": [index - 1 for index in facts.require_content("target_layers")],
        "layer_types": [SLIDING if windowed else FULL for windowed in pattern],
        "sliding_window": window,
        "is_causal": facts.get_content("attention.causal", False),
    }, {ours.get(name, name): tensor for name, tensor in tensors.items()}
