"""Parts that GGUF files of a target and of a head share: vocabulary, RoPE, order of its rows.

Source: llama.cpp b11434 `src/llama-{model,vocab}.cpp`, `conversion/llama.py`.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.export.gguf import GgufFile, Kind, Value

ROPE_KINDS = ("default", "linear", "yarn", "llama3")
"""RoPE that a file can say."""


def vocabulary(size: int, source: Path | None = None, **more: int) -> dict[str, Value]:
    """The metadata of a vocabulary.

    Args:
        size: of the target's embedding.
        source: a GGUF file of the target, whose vocabulary is copied; without one, tokens are
            `<0>`, `<1>`, ..., which is enough for whoever sends and takes token ids.
        more: ids by their names, such as `eos_token_id` and `mask_token_id`. Without an
            `eos_token_id` placeholders end texts at id 11.

    Raises:
        InputError: `source` is no GGUF.
    """
    if source is None:
        found = {
            "tokenizer.ggml.model": Value.of("gpt2"),
            "tokenizer.ggml.pre": Value.of("default"),
            "tokenizer.ggml.tokens": Value.of([f"<{index}>" for index in range(size)]),
            "tokenizer.ggml.token_type": Value.of([1] * size),
            # One that never applies, as the list must be there and may not be empty.
            "tokenizer.ggml.merges": Value.of(["a b"]),
        }
    else:
        metadata = GgufFile(source, "tokenizer_gguf").metadata
        found = {key: each for key, each in metadata.items() if key.startswith("tokenizer.")}
    return found | {f"tokenizer.ggml.{name}": Value.of(index) for name, index in more.items()}


def rope_metadata(rope: dict[str, Any], arch: str) -> dict[str, Value]:
    """The metadata of RoPE, but for llama3's, which is a tensor: see `rope_divisors`.

    Args:
        rope: `rope_parameters` of a config, of a kind of `ROPE_KINDS`.
        arch: with which the keys begin.
    """
    found = {"freq_base": Value(Kind.f32, rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        found["scaling.type"] = Value.of(rope["rope_type"])
        found["scaling.factor"] = Value(Kind.f32, rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        found["scaling.original_context_length"] = Value.of(original)
    return {f"{arch}.rope.{key}": value for key, value in found.items()}


def rope_divisors(rope: dict[str, Any], head_dim: int) -> Tensor | None:
    """[head_dim / 2] float32 `rope_freqs.weight`, which divides the frequencies of llama3's RoPE.

    Args:
        rope: `rope_parameters` of a config.
        head_dim: of queries and keys.

    Returns:
        None for RoPE of another kind.
    """
    if rope["rope_type"] != "llama3":
        return None
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** powers)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - kept) / rope["factor"] + kept)).float()


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys for architectures that turn neighbours: `llama` and `eagle3`.

    Args:
        weight: [heads * d, ...], whose rows turn in pairs d / 2 apart.
        num_heads: of this weight.
    """
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def halved(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
