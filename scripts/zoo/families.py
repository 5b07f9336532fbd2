"""What has to be said by hand: settings of some families, and who is no target at all."""

from typing import Any

MAMBA_2 = {"mamba_d_head": 16, "mamba_n_heads": 8}
HEAD_DIM = {"head_dim": 16}
QWEN_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [2.0 + place for place in range(8)],
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"

_SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("its default has recurrent layers only", "bamba", {"attn_layer_indices": [1, 3], **MAMBA_2}),
    (
        "its default has recurrent layers only",
        "granitemoehybrid",
        {"layer_types": ["linear_attention", FULL] * 2, **MAMBA_2},
    ),
    (
        "a period instead of a list",
        "jamba zamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    (
        "its default has attention only",
        "lfm2 lfm2_moe",
        {"layer_types": ["conv", "conv", FULL, "conv"], "full_attn_idxs": [2]},
    ),
    (
        "its default has full attention only",
        "laguna",
        {"layer_types": [FULL, SLIDING] * 2, "num_attention_heads_per_layer": [4, 8, 4, 8]},
    ),
    (
        "its default has full attention only",
        "mellum",
        {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    ),
    (
        "the window of its default is longer than any text here",
        "mistral mixtral starcoder2",
        {"sliding_window": 12},
    ),
    ("LongRoPE is not its default", "phi3 phimoe", {"rope_parameters": LONG_ROPE}),
    ("heads times their size is the width of the state", "mamba2", {"num_heads": 8}),
    ("unset by default, but needed", "hunyuan_v1_dense hunyuan_v1_moe ministral", HEAD_DIM),
    ("unset by default, but needed", "nemotron", {"head_dim": 16, "num_key_value_heads": 2}),
    ("unset by default, but needed", "deepseek_v2", {"num_experts_per_tok": 2}),
    (
        "unset by default, but needed",
        "dots1",
        {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_routed_experts": 4},
    ),
    ("unset by default, but needed", "step3p7_text", {"sliding_window": 12}),
    (
        "sections of M-RoPE, which its class has for heads of 128",
        "qwen2_vl_text qwen2_5_vl_text glm4v_text glm_ocr_text paddleocr_vl_text glm46v_text",
        {"rope_parameters": QWEN_MROPE},
    ),
]
BY_HAND: dict[str, dict[str, Any]] = {}
for _why, _names, _settings in _SETTINGS:
    for _name in _names.split():
        BY_HAND[_name] = _settings

_NO_TARGET: list[tuple[str, str]] = [
    (
        "an encoder: its checkpoints read the tokens to come as well",
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod xlm",
    ),
    (
        "the decoder of an encoder-decoder: its text answers what the encoder reads",
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet "
        "whisper t5gemma2 udop vision-encoder-decoder pix2struct florence2 pp_formulanet trocr",
    ),
    ("gives sound, several codes at a time", "moshi musicgen musicgen_melody"),
    ("gives the motion of a robot", "pi0"),
    ("predicts in permuted order, in two streams", "xlnet"),
    ("hashes its own queries: what a token sees depends on the length", "reformer"),
    ("fills blocks by diffusion: no token comes after another", "diffusion_gemma"),
    ("drafts for another model, whose hidden states it reads", "gemma4_assistant gemma4_unified_assistant"),
    (
        "answers pictures only: its forward pass asks for one",
        "blip blip-2 instructblip instructblipvideo idefics kosmos-2",
    ),
    ("reads bytes in patches that an entropy model cuts", "blt"),
]
NO_TARGET = {name: why for why, names in _NO_TARGET for name in names.split()}
