"""Small random EAGLE checkpoints, exactly as others write them.

Names, shapes and keys of `config.json` are those of the published files; hidden 64, 2 heads and
1 key-value head of 32, intermediate 96, 96 ids of which 24 are drafted.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, KV_WIDTH, VOCAB, DRAFT = 64, 96, 32, 96, 24
# The keys of yuhuili's configs. No head_dim: it is hidden_size / num_attention_heads.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCAB,
}


def layer(inputs: int = HIDDEN, bias: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """The tensors that every layout has in its layer, by their last names."""
    shapes = {
        "self_attn.q_proj.weight": [HIDDEN, inputs],
        "self_attn.k_proj.weight": [KV_WIDTH, inputs],
        "self_attn.v_proj.weight": [KV_WIDTH, inputs],
        "self_attn.o_proj.weight": [HIDDEN, HIDDEN],
        "mlp.gate_proj.weight": [INNER, HIDDEN],
        "mlp.up_proj.weight": [INNER, HIDDEN],
        "mlp.down_proj.weight": [HIDDEN, INNER],
        "post_attention_layernorm.weight": [HIDDEN],
    }
    biases = {f"self_attn.{name}_proj.bias": HIDDEN if name == "q" else KV_WIDTH for name in "qkv"}
    return random(shapes | ({name: [size] for name, size in biases.items()} if bias else {}), seed)


def random(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def eagle1_tensors(fc_bias: bool = True, qkv_bias: bool = False) -> dict[str, Tensor]:
    named = {f"layers.0.{name}": tensor for name, tensor in layer(bias=qkv_bias).items()}
    fc = {"fc.weight": [HIDDEN, 2 * HIDDEN]} | ({"fc.bias": [HIDDEN]} if fc_bias else {})
    return named | random(fc, seed=1)


def eagle3_tensors(prefix: str = "midlayer.") -> dict[str, Tensor]:
    norms = random({"input_layernorm.weight": [HIDDEN], "hidden_norm.weight": [HIDDEN]}, seed=2)
    named = {prefix + name: tensor for name, tensor in (layer(2 * HIDDEN) | norms).items()}
    outer = {
        "fc.weight": [HIDDEN, 3 * HIDDEN],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [DRAFT, HIDDEN],
    }
    ids = torch.arange(DRAFT) * 4 + 1
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return named | random(outer, seed=3) | {"d2t": ids - torch.arange(DRAFT), "t2d": t2d}


def embedding(seed: int = 4) -> dict[str, Tensor]:
    return random({"embed_tokens.weight": [VOCAB, HIDDEN]}, seed)


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    file: str = "model.safetensors",
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / file)
    return folder


def eagle1(folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """`yuhuili/EAGLE-llama2-chat-7B`: a biased fc, its own copy of the embedding."""
    return write(folder, LLAMA, eagle1_tensors() | embedding(), dtype)


def eagle1_qwen2(folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """`yuhuili/EAGLE-Qwen2-7B-Instruct`: biases in the attention."""
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "bias": True, "qkv_bias": True}
    return write(folder, config, eagle1_tensors(qkv_bias=True) | embedding(), dtype)


def eagle1_vllm(folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """An EAGLE-1 head for vLLM: no bias, the embedding is the target's."""
    config = LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "bias": False}
    return write(folder, config, eagle1_tensors(fc_bias=False), dtype)


def eagle1_vllm_first(folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """`abhigoyal/EAGLE-LLaMA3-Instruct-8B-vllm`: settings one level down, the target's lm_head."""
    config = {"model_type": "eagle", "model": LLAMA, "truncated_vocab_size": VOCAB}
    lm_head = random({"lm_head.weight": [VOCAB, HIDDEN]}, seed=5)
    return write(folder, config, eagle1_tensors(fc_bias=False) | embedding() | lm_head, dtype)


def eagle3(folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """`yuhuili/EAGLE3-LLaMA3.1-Instruct-8B`: no embedding, no ids."""
    return write(folder, LLAMA | {"draft_vocab_size": DRAFT}, eagle3_tensors(), dtype)


def specforge(
    folder: Path, dtype: torch.dtype = torch.bfloat16, embed: Tensor | None = None
) -> Path:
    """SpecForge: the same with an embedding; attention_bias is the target's, none is there."""
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": True,
        "draft_vocab_size": DRAFT,
        "head_dim": 32,
        "rope_scaling": None,
        "rope_theta": 10000,
        "sliding_window": None,
        "target_model_type": None,
    }
    own = embedding() if embed is None else {"embed_tokens.weight": embed}
    return write(folder, config, eagle3_tensors() | own, dtype)


def sglang_eagle31(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """EAGLE-3.1 with SGLang's names."""
    parts = ("low", "mid", "high")
    norms = random({f"aux_norm_{part}.weight": [HIDDEN] for part in parts}, seed=6)
    more = {"draft_vocab_size": DRAFT, "use_aux_norm": True, "norm_output": True}
    config = LLAMA | more | {"architectures": ["LlamaForCausalLMEagle3"]}
    return write(folder, config, eagle3_tensors() | norms, dtype)


def modelopt(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """ModelOpt for TensorRT-LLM: flags in `eagle_config`, names as in a whole model."""
    tensors = eagle3_tensors("layers.0.") | random({"input_norm.weight": [3 * HIDDEN]}, seed=6)
    named = {f"model.{name}": tensors.pop(name) for name in list(tensors) if "lm_head" not in name}
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [],
            "norm_before_fc": True,
            "norm_before_residual": True,
            "return_hidden_post_norm": True,
            "use_aux_hidden_state": True,
        },
    }
    return write(folder, config, named | tensors, dtype)


def speculators(
    folder: Path, dtype: torch.dtype = torch.bfloat16, embed: Tensor | None = None
) -> Path:
    """speculators 0.6."""
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    transformer = {name: LLAMA[name] for name in (*sizes, "hidden_size", "rms_norm_eps")} | {
        "attention_bias": False,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta/toy"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.6.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": transformer,
    }
    own = embedding() if embed is None else {"embed_tokens.weight": embed}
    return write(folder, config, eagle3_tensors("layers.0.") | own, dtype)
