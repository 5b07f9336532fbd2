"""Small random EAGLE checkpoints, exactly as others write them; a function for each writer.

Names, shapes and keys of `config.json` are those of the published files; hidden 64, 2 heads and
1 key-value head of 32, intermediate 96, 96 ids of which 24 are drafted.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, KV_WIDTH, VOCAB, DRAFT = 64, 96, 32, 96, 24
PUBLISHED = Path(__file__).parent / "heads/eagle/published"
# The keys of yuhuili's configs. No head_dim: it is hidden_size / num_attention_heads.
LLAMA: dict[str, Any] = json.loads((PUBLISHED / "llama.json").read_text())
SPECULATORS: dict[str, Any] = json.loads((PUBLISHED / "speculators.json").read_text())
EAGLE3 = LLAMA | {"draft_vocab_size": DRAFT}
FORGED = {"architectures": ["LlamaForCausalLMEagle3"]}


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


def write_published(
    config: dict[str, Any],
    usual: torch.dtype,
    make: Callable[[], dict[str, Tensor]],
    folder: Path,
    dtype: torch.dtype | None = None,
    embed: Tensor | None = None,
) -> Path:
    """Writes a checkpoint, perhaps in another dtype, or with an embedding."""
    more = {} if embed is None else {"embed_tokens.weight": embed}
    return write(folder, config, make() | more, dtype or usual)


def modelopt_tensors() -> dict[str, Tensor]:
    tensors = eagle3_tensors("layers.0.") | random({"input_norm.weight": [3 * HIDDEN]}, seed=6)
    named = {f"model.{name}": tensors.pop(name) for name in list(tensors) if "lm_head" not in name}
    return named | tensors


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
AUX_NORMS = {f"aux_norm_{part}.weight": [HIDDEN] for part in ("low", "mid", "high")}
LM_HEAD = {"lm_head.weight": [VOCAB, HIDDEN]}
WRITERS: dict[str, tuple[dict[str, Any], torch.dtype, Callable[[], dict[str, Tensor]]]] = {
    # `yuhuili/EAGLE-llama2-chat-7B`: a biased fc, its own copy of the embedding.
    "eagle1": (LLAMA, FLOAT16, lambda: eagle1_tensors() | embedding()),
    # `yuhuili/EAGLE-Qwen2-7B-Instruct`: biases in the attention.
    "eagle1_qwen2": (
        LLAMA | {"architectures": ["Qwen2ForCausalLM"], "bias": True, "qkv_bias": True},
        FLOAT16, lambda: eagle1_tensors(qkv_bias=True) | embedding(),
    ),
    # An EAGLE-1 head for vLLM: no bias, the embedding is the target's.
    "eagle1_vllm": (
        LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "bias": False},
        FLOAT16, lambda: eagle1_tensors(fc_bias=False),
    ),
    # `abhigoyal/EAGLE-LLaMA3-Instruct-8B-vllm`: settings one level down, the target's lm_head.
    "eagle1_vllm_first": (
        {"model_type": "eagle", "model": LLAMA, "truncated_vocab_size": VOCAB},
        FLOAT16, lambda: eagle1_tensors(fc_bias=False) | embedding() | random(LM_HEAD, seed=5),
    ),
    # `yuhuili/EAGLE3-LLaMA3.1-Instruct-8B`: no embedding, no ids.
    "eagle3": (EAGLE3, FLOAT16, eagle3_tensors),
    # The same with an embedding; attention_bias is the target's, none is there.
    "specforge": (
        EAGLE3 | FORGED | {
            "attention_bias": True, "head_dim": 32, "rope_scaling": None, "rope_theta": 10000,
            "sliding_window": None, "target_model_type": None,
        },
        BFLOAT16, lambda: eagle3_tensors() | embedding(),
    ),
    # EAGLE-3.1 with SGLang's names.
    "sglang_eagle31": (
        EAGLE3 | FORGED | {"use_aux_norm": True, "norm_output": True},
        BFLOAT16, lambda: eagle3_tensors() | random(AUX_NORMS, seed=6),
    ),
    # For TensorRT-LLM: flags in `eagle_config`, names as in a whole model.
    "modelopt": (
        EAGLE3 | FORGED | {"eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [], "norm_before_fc": True,
            "norm_before_residual": True, "return_hidden_post_norm": True,
            "use_aux_hidden_state": True,
        }},
        BFLOAT16, modelopt_tensors,
    ),
    # Of version 0.6.
    "speculators": (SPECULATORS, BFLOAT16, lambda: eagle3_tensors("layers.0.") | embedding()),
}  # fmt: skip
eagle1, eagle3, specforge, modelopt, speculators = (
    partial(write_published, *WRITERS[name])
    for name in ("eagle1", "eagle3", "specforge", "modelopt", "speculators")
)
