"""EAGLE-3 heads as GGUF files (llama.cpp's architecture `eagle3`), written and read.

llama.cpp rotates neighbouring rows of queries and keys, names layers as here, and takes `d2t` as
ids.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from heads.eagle.network import EagleNetwork
from heads.export.gguf import GgufFile, Value
from heads.export.llamacpp import (
    LAYER,
    ROPE_FREQS,
    ArchMetadata,
    build_head_metadata,
    deinterleave_rows,
    interleave_rows,
    make_file_tensors,
    parse_metadata,
    weights_name,
)
from heads.head import HeadFiles
from heads.target_model.sizes import find_max_positions

ARCH = "eagle3"
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
} | {f"midlayer.{ours}": f"blk.0.{theirs}" for ours, theirs in LAYER.items()}
TURNED = {
    "blk.0.attn_q.weight": "num_attention_heads",
    "blk.0.attn_k.weight": "num_key_value_heads",
}
"""Tensors whose rows llama.cpp orders differently, with the config's key of their heads."""
FLAGS = ("norm_before_residual", "norm_before_fc")


def build_gguf_files(head: EagleNetwork) -> HeadFiles:
    """File of a head that llama.cpp can serve."""
    config, llama = head.config, head.config.llama
    title = head.variants[head.variant].title
    metadata = build_head_metadata(llama, ARCH, head.dtype, title, head.target_name)
    # As in every other layout: a head's own files may say less than its target supports.
    metadata[f"{ARCH}.context_length"] = Value.from_content(find_max_positions(head.target.config))
    metadata[f"{ARCH}.target_layers"] = Value.from_content(list(config.layers))
    metadata[f"{ARCH}.target_hidden_size"] = Value.from_content(config.target_hidden_size)
    metadata |= {f"{ARCH}.{flag}": Value.from_content(getattr(config, flag)) for flag in FLAGS}
    own = head.collect_tensors()
    tensors = {NAMES[name]: each for name, each in own.items() if name in NAMES}
    for name, heads in TURNED.items():
        tensors[name] = interleave_rows(tensors[name], getattr(llama, heads))
    name = weights_name("eagle3", head.target_name, head.dtype)
    whole = make_file_tensors(tensors, head.vocab, llama)
    return HeadFiles(metadata, name, whole, layers=list(config.layers))


def load_gguf_tensors(
    file: GgufFile, what: str, added: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a file, under the names of EAGLE's authors.

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
    for name, heads in TURNED.items():
        if name in tensors:
            tensors[name] = deinterleave_rows(tensors[name], config[heads])
    if "d2t" in tensors:
        tensors["d2t"] -= torch.arange(len(tensors["d2t"]))
    ours = {theirs: name for name, theirs in NAMES.items()}
    layers = facts.get_content("target_layers", facts.get_content("extract_layers", []))
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": facts.get_content("target_hidden_size", config["hidden_size"]),
        "eagle_aux_hidden_state_layer_ids": layers,
        **{flag: facts.get_content(flag, False) for flag in FLAGS},
    }, {ours.get(name, name): tensor for name, tensor in tensors.items()}
