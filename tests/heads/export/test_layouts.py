from pathlib import Path
from typing import Any

import pytest
from exports import EAGLE31, config_of, exported, make, stored, toy_target

from heads.target_model.model import Target


def named(prefix: str, shapes: dict[str, str]) -> dict[str, str]:
    return {prefix + name: f"float32 {shape}" for name, shape in shapes.items()}


LAYER = {
    "self_attn.o_proj.weight": "[64, 64]",
    "mlp.gate_proj.weight": "[96, 64]",
    "mlp.up_proj.weight": "[96, 64]",
    "mlp.down_proj.weight": "[64, 96]",
    "post_attention_layernorm.weight": "[64]",
}
LAYER1 = LAYER | {
    "self_attn.q_proj.weight": "[64, 64]",
    "self_attn.k_proj.weight": "[32, 64]",
    "self_attn.v_proj.weight": "[32, 64]",
}
LAYER3 = LAYER | {
    "self_attn.q_proj.weight": "[64, 128]",
    "self_attn.k_proj.weight": "[32, 128]",
    "self_attn.v_proj.weight": "[32, 128]",
    "input_layernorm.weight": "[64]",
    "hidden_norm.weight": "[64]",
}
OUTER1 = named("", {"fc.weight": "[64, 128]"})
OUTER3 = named("", {"fc.weight": "[64, 192]", "norm.weight": "[64]", "lm_head.weight": "[24, 64]"})
FC_NORM = named("fc_norm.", {"0.weight": "[64]", "1.weight": "[64]", "2.weight": "[64]"})
EMBEDDING = named("", {"embed_tokens.weight": "[96, 64]"})
VOCAB = {"d2t": "int64 [24]", "t2d": "bool [96]"}
AUTHORS_MEDUSA = named(
    "",
    {
        "0.0.linear.weight": "[64, 64]",
        "0.0.linear.bias": "[64]",
        "0.1.weight": "[96, 64]",
        "1.0.linear.weight": "[64, 64]",
        "1.0.linear.bias": "[64]",
        "1.1.weight": "[96, 64]",
    },
)
VLLM_MEDUSA = named(
    "",
    {
        "blocks.0.layers.0.weight": "[64, 64]",
        "blocks.0.layers.0.bias": "[64]",
        "lm_heads.0.weight": "[96, 64]",
        "blocks.1.layers.0.weight": "[64, 64]",
        "blocks.1.layers.0.bias": "[64]",
        "lm_heads.1.weight": "[96, 64]",
    },
)
EAGLE1 = named("layers.0.", LAYER1) | OUTER1
EAGLE3 = named("midlayer.", LAYER3) | OUTER3
TENSORS = {
    ("vllm", "medusa"): VLLM_MEDUSA,
    ("vllm", "eagle1"): EAGLE1,
    ("vllm", "eagle3"): EAGLE3 | VOCAB,
    ("vllm", "eagle3.1"): EAGLE3 | VOCAB | FC_NORM,
    ("sglang", "eagle1"): EAGLE1 | {"fc.bias": "float32 [64]"},
    ("sglang", "eagle3"): EAGLE3 | VOCAB,
    ("sglang", "eagle3.1"): EAGLE3 | VOCAB | FC_NORM,
    ("trtllm", "medusa"): AUTHORS_MEDUSA,
    ("trtllm", "eagle3"): EAGLE3 | {"d2t": "int32 [24]"},
    ("trtllm", "eagle3.1"): EAGLE3 | {"d2t": "int32 [24]"} | FC_NORM,
    ("speculators", "eagle3"): named("layers.0.", LAYER3) | OUTER3 | VOCAB,
    ("speculators", "eagle3.1"): named("layers.0.", LAYER3) | OUTER3 | VOCAB | FC_NORM,
    ("original", "medusa"): AUTHORS_MEDUSA,
    ("original", "eagle1"): EAGLE1 | EMBEDDING,
    ("original", "eagle3"): EAGLE3 | VOCAB | EMBEDDING,
}
DTYPES = {"dtype": "float32", "torch_dtype": "float32"}
MEDUSA_KEYS = {
    "model_type": "medusa",
    "base_model_name_or_path": "me/toy",
    "hidden_size": 64,
    "vocab_size": 96,
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "medusa_fc_bias": True,
} | DTYPES
LLAMA_KEYS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 256,
    "vocab_size": 96,
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
} | DTYPES
NORMS = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": False,
}


def eagle_keys(architecture: str, layers: list[int] | None = None, **norms: bool) -> dict[str, Any]:
    shared = LLAMA_KEYS | {"base_model_name_or_path": "me/toy", "bias": False}
    shared |= {"architectures": [architecture]}
    if layers is None and architecture != "LlamaForCausalLM":
        return shared
    flags = NORMS | norms
    ids = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
    inner = {
        "use_aux_hidden_state": True,
        "return_hidden_post_norm": flags["norm_output"],
        **flags,
        **ids,
    }
    more = {"draft_vocab_size": 24, "target_hidden_size": 64, "eagle_config": inner, **flags}
    return shared | more | ids | ({"num_aux_hidden_states": 3} if layers else {})


def speculators_keys(**norms: bool) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 24,
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        **NORMS,
        **norms,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "transformer_layer_config": LLAMA_KEYS | {"num_aux_hidden_states": 3},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": "me/toy", "architectures": ["LlamaForCausalLM"]},
        },
    }


EAGLE1_KEYS = LLAMA_KEYS | {"base_model_name_or_path": "me/toy", "bias": False}
VLLM3 = "LlamaForCausalLMEagle3"
CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    ("vllm", "medusa"): MEDUSA_KEYS | {"architectures": ["MedusaModel"]},
    ("vllm", "eagle1"): EAGLE1_KEYS | {"architectures": ["LlamaForCausalLM"]},
    ("vllm", "eagle3"): eagle_keys(VLLM3, [2, 4, 5]),
    ("vllm", "eagle3.1"): eagle_keys(VLLM3, [2, 4, 5], **EAGLE31),
    ("sglang", "eagle1"): EAGLE1_KEYS | {"architectures": ["LlamaForCausalLMEagle"]},
    ("sglang", "eagle3"): eagle_keys(VLLM3, [1, 3, 4]),
    ("sglang", "eagle3.1"): eagle_keys(VLLM3, [1, 3, 4], **EAGLE31),
    ("trtllm", "medusa"): MEDUSA_KEYS,
    ("trtllm", "eagle3"): eagle_keys("LlamaForCausalLM", [1, 3, 4]),
    ("trtllm", "eagle3.1"): eagle_keys("LlamaForCausalLM", [1, 3, 4], **EAGLE31),
    ("speculators", "eagle3"): speculators_keys(),
    ("speculators", "eagle3.1"): speculators_keys(**EAGLE31),
    ("original", "medusa"): MEDUSA_KEYS,
    ("original", "eagle1"): EAGLE1_KEYS | {"architectures": ["LlamaForCausalLM"]},
    ("original", "eagle3"): eagle_keys("LlamaForCausalLM"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.mark.parametrize(("engine", "kind"), CONFIGS)
def test_each_engine_finds_its_own_names_and_keys(
    target: Target, tmp_path: Path, engine: str, kind: str
) -> None:
    folder = exported(make(target, kind), target, engine, tmp_path / "out")
    theirs = kind == "medusa" and engine != "vllm"
    weights = "medusa_lm_head.safetensors" if theirs else "model.safetensors"
    assert stored(folder, weights) == TENSORS[engine, kind]
    assert config_of(folder) == CONFIGS[engine, kind]
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    own = ["README.md", "config.json", "headsmith.json", "parity/parity.safetensors"]
    assert files == sorted([*own, weights])
