import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from heads.eagle.network import EagleLayer
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.layers.llama import LlamaAttention, RmsNorm


def test_the_layer_is_llamas_own_where_the_input_is_the_normed_residual() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LlamaDecoderLayer(config, 0)
    ours = EagleLayer(config, two_inputs=False, qk_norm=False)
    state = theirs.state_dict()
    norm = state.pop("input_layernorm.weight")
    ours.load_state_dict(state)
    residual, positions = torch.randn(9, 64), torch.arange(9)
    rotary = LlamaRotaryEmbedding(config)(residual[None], positions[None])
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    expected = theirs(residual[None], causal, positions[None], position_embeddings=rotary)
    inputs = theirs.input_layernorm(residual)
    assert norm.equal(torch.ones(64))
    rotation = ours.self_attn.compute_rotation(inputs, positions)
    keys, values = ours.self_attn.keys_values(inputs, rotation)
    branches = BranchCache(
        keys[None],
        values[None],
        build_causal_range(Documents.from_length(len(positions), torch.device("cpu")), positions),
    )
    torch.testing.assert_close(
        ours(inputs, residual, rotation, branches), expected[0], rtol=1e-5, atol=1e-5
    )


def test_mixed_precision_gives_queries_keys_and_values_of_one_dtype() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    attention = LlamaAttention(config, 64, qk_norm=True)
    norm = RmsNorm(64, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = norm(torch.randn(5, 64))
        rotation = attention.compute_rotation(inputs, torch.arange(5))
        found = [
            attention.compute_query(inputs, rotation),
            *attention.keys_values(inputs, rotation),
        ]
    assert [each.dtype for each in found] == [torch.bfloat16] * 3
