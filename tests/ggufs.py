"""GGUF files of small Llamas, written by llama.cpp's own package, and the models in them.

Quantised weights are random blocks; their values are computed here, by the formulas of ggml's
`block_q4_0`, `block_q4_1` and `block_q8_0`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from toys import random_model, tokenizer

from heads.export.gguf import (
    Value,
    build_vocab_metadata,
    interleave_rows,
    rope_divisors,
    rope_metadata,
    write_gguf,
)
from heads.target_model.model import Target

VALUES = 32  # of a block
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def blocks(kind: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random blocks as bytes [rows, bytes of a row], and their values [rows, columns] float32."""
    scale = (torch.rand(rows, columns // VALUES, 1) * 0.02).half()
    low = (-torch.rand_like(scale) * 0.2).half()
    if kind == "Q8_0":
        numbers = torch.randint(-127, 128, (*scale.shape[:2], VALUES), dtype=torch.int8)
        parts, values = [numbers.view(torch.uint8)], numbers * (scale / 16).half().float()
        scale = (scale / 16).half()
    else:
        numbers = torch.randint(0, 16, (*scale.shape[:2], VALUES), dtype=torch.uint8)
        # The first half of a block lies in the low halves of the bytes.
        parts = [numbers[..., :16] | numbers[..., 16:] << 4]
        if kind == "Q4_0":
            values = (numbers.float() - 8) * scale.float()
        else:
            values = numbers * scale.float() + low.float()
            parts.insert(0, low.view(torch.uint8))
    packed = torch.cat([scale.view(torch.uint8), *parts], dim=-1)
    return packed.flatten(1), values.flatten(1)


def names(model: Any) -> Iterator[tuple[str, str, int | None]]:
    """The name of each tensor of a Llama, llama.cpp's, and the heads whose rows it reorders."""
    config = model.config
    yield from [("model.embed_tokens", "token_embd", None), ("model.norm", "output_norm", None)]
    if not config.tie_word_embeddings:
        yield "lm_head", "output", None
    for layer in range(config.num_hidden_layers):
        for ours, theirs, heads in (
            ("input_layernorm", "attn_norm", None),
            ("self_attn.q_proj", "attn_q", config.num_attention_heads),
            ("self_attn.k_proj", "attn_k", config.num_key_value_heads),
            ("self_attn.v_proj", "attn_v", None),
            ("self_attn.o_proj", "attn_output", None),
            ("post_attention_layernorm", "ffn_norm", None),
            ("mlp.gate_proj", "ffn_gate", None),
            ("mlp.up_proj", "ffn_up", None),
            ("mlp.down_proj", "ffn_down", None),
        ):
            yield f"model.layers.{layer}.{ours}", f"blk.{layer}.{theirs}", heads


def about(model: Any, kind: str) -> dict[str, Any]:
    """The metadata of a Llama with the tokenizer of `toys`."""
    config, rules = model.config, json.loads(tokenizer().backend_tokenizer.to_str())
    made = tokenizer()
    ids = range(len(made))
    special = {token["id"] for token in rules["added_tokens"]}
    return {
        "general.file_type": int(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}", 0)),
        "llama.context_length": config.max_position_embeddings,
        "llama.block_count": config.num_hidden_layers,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": made.convert_ids_to_tokens(list(ids)),
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in ids],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in rules["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": made.bos_token_id,
        "tokenizer.ggml.eos_token_id": made.eos_token_id,
        "tokenizer.ggml.padding_token_id": made.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": made.chat_template,
    }


def save_gguf(
    file: Path,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Any:
    """Writes a random Llama whose matrices are of a type; returns the model that the file holds.

    Args:
        file: to write.
        kind: `F32`, `F16`, `BF16`, `Q4_0`, `Q4_1` or `Q8_0`.
        metadata: besides or in place of `about`; None takes a key out.
        tensors: besides the model's.
        changes: of the model's config.
    """
    model = random_model("llama", vocab_size=300, **changes)
    arch = (metadata or {}).get("general.architecture", "llama")
    writer = gguf.GGUFWriter(str(file), arch)
    for key, value in (about(model, kind) | (metadata or {})).items():
        if value is None or key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_string)(key, value)
    number = gguf.GGMLQuantizationType[kind]
    for ours, theirs, num_heads in names(model):
        parameter = model.get_submodule(ours).weight
        if parameter.dim() == 1 or kind == "F32":
            stored, parameter.data = parameter.detach(), parameter.detach().clone()
        elif kind in FLOATS:
            stored = parameter.detach().to(FLOATS[kind])
            parameter.data = stored.float()
        else:
            stored, parameter.data = blocks(kind, *parameter.shape)
        if num_heads is not None:
            stored = interleave_rows(stored, num_heads)
        raw = gguf.GGMLQuantizationType.F32 if parameter.dim() == 1 else number
        if stored.dtype is torch.bfloat16:
            stored = stored.view(torch.uint8)
        writer.add_tensor(f"{theirs}.weight", stored.contiguous().numpy(), raw_dtype=raw)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file):
        step()
    writer.write_tensors_to_file()
    writer.close()
    return model


def save_target_gguf(target: Target, file: Path, eos_token_id: int) -> None:
    """Writes any Llama, Qwen2 or Qwen3 in float32, with placeholders for tokens, by our own writer.

    Args:
        target: whose weights are written.
        file: to write.
        eos_token_id: ends texts.
    """
    config, arch = target.config, target.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": head_dim,
        "vocab_size": target.vocab_size,
    }
    metadata = {
        "general.architecture": Value.from_content(arch),
        **{f"{arch}.{key}": Value.from_content(size) for key, size in sizes.items()},
        **rope_metadata(config.rope_parameters, arch),
        **build_vocab_metadata(target.vocab_size),
        "tokenizer.ggml.eos_token_id": Value.from_content(eos_token_id),
    }
    tensors = {}
    for ours, theirs, num_heads in names(target.model):
        for part, tensor in target.model.get_submodule(ours).named_parameters():
            value = tensor.detach().float()
            # The others rotate halves, as transformers does.
            turned = num_heads if arch == "llama" else None
            tensors[f"{theirs}.{part}"] = interleave_rows(value, turned) if turned else value
    for layer in range(config.num_hidden_layers if arch == "qwen3" else 0):
        for part in ("q_norm", "k_norm"):
            norm = target.model.get_submodule(f"model.layers.{layer}.self_attn.{part}")
            tensors[f"blk.{layer}.attn_{part}.weight"] = norm.weight.detach().float()
    divisors = rope_divisors(config.rope_parameters, head_dim)
    if divisors is not None:
        tensors["rope_freqs.weight"] = divisors
    write_gguf(file, metadata, tensors)
