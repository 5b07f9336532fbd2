"""Small heads exactly as others publish them: a config of `heads/published`, and its tensors.

Names, shapes and keys are those of the published files; hidden 64, 2 heads and 1 key-value head of
32, intermediate 96, 96 ids of which an EAGLE-3 head drafts 24. A file's name begins with the kind.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, INNER, KV_WIDTH, VOCAB, DRAFT = 64, 96, 32, 96, 24
PUBLISHED = Path(__file__).parent / "heads/published"


def layer(inputs: int = HIDDEN, bias: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """The tensors that every layout of EAGLE has in its layer, by their last names."""
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


def modelopt_tensors() -> dict[str, Tensor]:
    tensors = eagle3_tensors("layers.0.") | random({"input_norm.weight": [3 * HIDDEN]}, seed=6)
    named = {f"model.{name}": tensors.pop(name) for name in list(tensors) if "lm_head" not in name}
    return named | tensors


def embedding() -> dict[str, Tensor]:
    return random({"embed_tokens.weight": [VOCAB, HIDDEN]}, 4)


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
AUX_NORMS = {f"aux_norm_{part}.weight": [HIDDEN] for part in ("low", "mid", "high")}
LM_HEAD = {"lm_head.weight": [VOCAB, HIDDEN]}
EAGLES: dict[str, tuple[torch.dtype, Callable[[], dict[str, Tensor]]]] = {
    # `yuhuili/EAGLE-llama2-chat-7B`: a biased fc, its own copy of the embedding. No head_dim.
    "eagle1": (FLOAT16, lambda: eagle1_tensors() | embedding()),
    # `yuhuili/EAGLE-Qwen2-7B-Instruct`: biases in the attention.
    "eagle1-qwen2": (FLOAT16, lambda: eagle1_tensors(qkv_bias=True) | embedding()),
    # An EAGLE-1 head for vLLM: no bias, the embedding is the target's.
    "eagle1-vllm": (FLOAT16, lambda: eagle1_tensors(fc_bias=False)),
    # `abhigoyal/EAGLE-LLaMA3-Instruct-8B-vllm`: settings one level down, the target's lm_head.
    "eagle1-vllm-first": (
        FLOAT16, lambda: eagle1_tensors(fc_bias=False) | embedding() | random(LM_HEAD, seed=5),
    ),
    # `yuhuili/EAGLE3-LLaMA3.1-Instruct-8B`: no embedding, no ids.
    "eagle3": (FLOAT16, eagle3_tensors),
    # The same with an embedding; attention_bias is the target's, none is there.
    "eagle3-specforge": (BFLOAT16, lambda: eagle3_tensors() | embedding()),
    # EAGLE-3.1 with SGLang's names.
    "eagle3-sglang": (BFLOAT16, lambda: eagle3_tensors() | random(AUX_NORMS, seed=6)),
    # For TensorRT-LLM: flags in `eagle_config`, names as in a whole model.
    "eagle3-modelopt": (BFLOAT16, modelopt_tensors),
    # Of version 0.6.
    "eagle3-speculators": (BFLOAT16, lambda: eagle3_tensors("layers.0.") | embedding()),
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def write_published(name: str, folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """Writes a config of `heads/published`, beside these tensors or an EAGLE head's own."""
    if tensors is None:
        dtype, make = EAGLES[name]
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in make().items()}
    return write(folder, json.loads((PUBLISHED / f"{name}.json").read_text()), tensors)


def change(
    folder: Path, keys: dict[str, Any], tensors: dict[str, Tensor | None] | None = None
) -> str:
    """Changes settings, `a.b` one level down, and tensors of a folder; None takes one away."""
    config, held = json.loads((folder / "config.json").read_text()), tensors or {}
    for path, value in keys.items():
        section, _, key = path.rpartition(".")
        (config[section] if section else config)[key] = value
    held = load_file(folder / "model.safetensors") | held
    return str(write(folder, config, {n: t for n, t in held.items() if t is not None}))
