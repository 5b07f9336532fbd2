"""A head's layer is sized from what a target's config has, whatever it calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from conf.errors import InputError
from heads.layers.llama import make_llama_config
from heads.target_model import architecture as sizes

LAYERS = json.loads((Path(__file__).parent / "sizes.json").read_text())
"""By published model: its type, keys of its config that are not transformers' defaults, and hidden
size, inner width, heads, key-value heads, head size, epsilon and positions."""


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_has_the_target_s_sizes(name: str) -> None:
    family, changes, expected = LAYERS[name]
    layer = make_llama_config(AutoConfig.for_model(family, **changes), 100)
    assert expected == [
        layer.hidden_size, layer.intermediate_size, layer.num_attention_heads,
        layer.num_key_value_heads, layer.head_dim, layer.rms_norm_eps,
        layer.max_position_embeddings,
    ]  # fmt: skip
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
