"""A head's layer is sized from what a target's config has, whatever it calls it."""

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from conf.errors import InputError
from heads.layers.llama import make_llama_config
from heads.target_model import architecture as sizes

# Of published models: hidden size, inner width, heads, key-value heads, head size, epsilon,
# positions. What a row leaves out of a config is as in transformers' default.
FALCON_40B = {
    "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
DBRX = {
    "d_model": 6144, "n_heads": 48, "max_seq_len": 32768, "attn_config": {"kv_n_heads": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
STARCODER = {"n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_positions": 8192}
GLM45 = {
    "hidden_size": 4096, "intermediate_size": 10944, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SEED_OSS = {"hidden_size": 5120, "num_attention_heads": 80, "num_key_value_heads": 8}
OPT_350M = {
    "hidden_size": 1024, "word_embed_proj_dim": 512, "ffn_dim": 4096, "num_attention_heads": 16,
}  # fmt: skip
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4}
OLMOE = {"hidden_size": 2048, "intermediate_size": 1024, "num_experts_per_tok": 8}
GEMMA_3N = {"intermediate_size": [8192] * 10 + [16384] * 25}
WITHOUT_LIMIT = 131072
LAYERS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "gpt2": ("gpt2", {}, (768, 3072, 12, 12, 64, 1e-5, 1024)),
    "gpt2, inner width set": ("gpt2", {"n_inner": 2048}, (768, 2048, 12, 12, 64, 1e-5, 1024)),
    "opt-125m": ("opt", {}, (768, 3072, 12, 12, 64, 1e-5, 2048)),
    "opt-350m": ("opt", OPT_350M, (512, 4096, 16, 16, 64, 1e-5, 2048)),
    "falcon-7b": ("falcon", {}, (4544, 18176, 71, 1, 64, 1e-5, 2048)),
    "falcon-40b": ("falcon", FALCON_40B, (8192, 32768, 128, 8, 64, 1e-5, 2048)),
    "dbrx": ("dbrx", DBRX, (6144, 43008, 48, 8, 128, 1e-5, 32768)),
    "starcoder": ("gpt_bigcode", STARCODER, (6144, 24576, 48, 1, 128, 1e-5, 8192)),
    "solar-open": ("solar_open", {}, (4096, 10240, 64, 8, 128, 1e-5, 131072)),
    "gemma 4, head sizes 256 and 512": ("gemma4_text", {}, (2304, 9216, 8, 4, 256, 1e-6, 131072)),
    "gemma 3n, widths 8192 and 16384": (
        "gemma3n_text", GEMMA_3N, (2048, 16384, 8, 2, 256, 1e-6, 32768),
    ),
    "cohere 2 moe": ("cohere2_moe", {}, (8192, 22528, 64, 64, 128, 1e-5, 8192)),
    "longcat": ("longcat_flash", {}, (6144, 12288, 64, 64, 64, 1e-5, 131072)),
    "gpt-oss, four experts": ("gpt_oss", GPT_OSS, (2880, 11520, 64, 8, 64, 1e-5, 131072)),
    "olmoe, eight experts": ("olmoe", OLMOE, (2048, 8192, 16, 16, 128, 1e-5, 4096)),
    "mixtral, experts wide enough": ("mixtral", {}, (4096, 14336, 32, 8, 128, 1e-5, 131072)),
    "glm 4.5, 96 heads for 4096": ("glm4_moe", GLM45, (4096, 10944, 64, 8, 128, 1e-5, 131072)),
    "seed-oss": ("seed_oss", SEED_OSS, (5120, 27648, 80, 8, 128, 1e-6, 524288)),
    "deepseek v4, latent heads": ("deepseek_v4", {}, (4096, 12288, 64, 1, 64, 1e-6, 1048576)),
    "mamba": ("mamba", {}, (768, 1536, 12, 12, 64, 1e-5, WITHOUT_LIMIT)),
    "mamba 2": ("mamba2", {}, (4096, 16384, 64, 64, 64, 1e-5, WITHOUT_LIMIT)),
    "rwkv": ("rwkv", {}, (4096, 16384, 64, 64, 64, 1e-5, 1024)),
    "nemotron-h": ("nemotron_h", {}, (4096, 21504, 32, 8, 128, 1e-5, 4096)),
    "bloom": ("bloom", {"hidden_size": 1024, "n_head": 16}, (
        1024, 4096, 16, 16, 64, 1e-5, WITHOUT_LIMIT,
    )),
    "gpt-j": ("gptj", {}, (4096, 16384, 16, 16, 256, 1e-5, 2048)),
    "starcoder 2": ("starcoder2", {}, (3072, 12288, 24, 2, 128, 1e-5, 4096)),
    "lfm 2": ("lfm2", {}, (2560, 12288, 32, 8, 80, 1e-5, 128000)),
    "an odd head size": ("gpt2", {"n_embd": 100, "n_head": 4}, (
        100, 400, 4, 4, 26, 1e-5, 1024,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_has_the_target_s_sizes(name: str) -> None:
    family, changes, expected = LAYERS[name]
    layer = make_llama_config(AutoConfig.for_model(family, **changes), 100)
    found = (
        layer.hidden_size, layer.intermediate_size, layer.num_attention_heads,
        layer.num_key_value_heads, layer.head_dim, layer.rms_norm_eps,
        layer.max_position_embeddings,
    )  # fmt: skip
    assert found == expected
    assert (layer.vocab_size, layer.hidden_act, layer.num_hidden_layers) == (100, "silu", 1)


def test_names_of_a_repository_s_own_code() -> None:
    """As ChatGLM's, which transformers does not map."""
    config = PretrainedConfig(
        hidden_size=4096, num_layers=28, num_attention_heads=32, kv_channels=128,
        multi_query_group_num=2, ffn_hidden_size=13696, layernorm_epsilon=1.5e-5, seq_length=8192,
    )  # fmt: skip
    layer = make_llama_config(config, 65024)
    assert (layer.intermediate_size, layer.num_key_value_heads, layer.head_dim) == (13696, 2, 128)
    assert (layer.rms_norm_eps, layer.max_position_embeddings) == (1.5e-5, 8192)
    assert sizes.count_layers(config) == 28


def test_longcat_has_half_as_many_layers_as_attentions() -> None:
    config = AutoConfig.for_model("longcat_flash")
    assert (sizes.count_layers(config), config.num_hidden_layers) == (28, 56)


SLOW, FAST = (
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "default", "rope_theta": 1e4},
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (SLOW, SLOW),
        (None, FAST),
        ({}, FAST),
        ({"rope_type": "longrope", "rope_theta": 1e6, "long_factor": [1.0]}, SLOW),
        ({"full_attention": SLOW, "sliding_attention": FAST}, SLOW),
        # Command A and its like: layers that see everything have no positions.
        ({"full_attention": None, "sliding_attention": FAST}, FAST),
        ({"main": FAST, "compress": SLOW}, SLOW),
        ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, SLOW),
        ({**YARN, "rope_theta": 1e6, "mrope_section": [4, 6, 6]}, {**YARN, "rope_theta": 1e6}),
        ({**YARN, "partial_rotary_factor": 0.5}, {**YARN, "rope_theta": 1e4}),
    ],
)
def test_rope_is_that_of_layers_that_see_everything(stated, expected: dict[str, Any]) -> None:
    config = PretrainedConfig()
    config.rope_parameters = stated
    assert sizes.find_rope(config) == expected


def test_what_is_no_size_is_named_with_the_key_to_set() -> None:
    config = PretrainedConfig(num_attention_heads=8)
    with pytest.raises(InputError, match=r"None for hidden_size .*: set hidden_size there"):
        make_llama_config(config, 100)
    config = PretrainedConfig(hidden_size=64, num_attention_heads=4, intermediate_size="wide")
    with pytest.raises(InputError, match=r"'wide' for intermediate_size .*ffn_dim.*whole number"):
        make_llama_config(config, 100)
