"""Settings of some families that need values set by hand, and model types that are no targets."""

from typing import Any

MAMBA_2 = {"mamba_d_head": 16, "mamba_n_heads": 8}
SET_HEAD_DIM = {"head_dim": 16}
QWEN_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [2.0 + place for place in range(8)],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64, "max_position_embeddings": 512, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3,
}  # fmt: skip
VISION_START = {"vision_start_token_id": 310}
SMALL_VQ = {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1]}
FULL, SLIDING = "full_attention", "sliding_attention"

_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "recurrent layers only by default": {
        "bamba": {"attn_layer_indices": [1, 3], **MAMBA_2},
        "granitemoehybrid": {"layer_types": ["linear_attention", FULL] * 2, **MAMBA_2},
    },
    "a period, not a list": {
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    },
    "shared blocks, whose kinds and sizes depend on each other": {
        "zamba": {
            "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
            "num_key_value_heads": 4, "n_mamba_heads": 2,
        },
        "zamba2": {
            "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
            "n_mamba_heads": 8, "num_key_value_heads": 4, "num_query_groups": 4,
            "attention_hidden_size": 128, "attention_head_dim": 32,
        },
    },
    "attention only by default": {
        "lfm2 lfm2_moe": {
            "layer_types": ["conv", "conv", FULL, "conv"], "full_attn_idxs": [2],
            "num_hidden_layers": 4,
        },
    },
    "full attention only by default": {
        "laguna": {
            "layer_types": [FULL, SLIDING] * 2, "num_attention_heads_per_layer": [4, 8, 4, 8],
        },
        "mellum": {"layer_types": [SLIDING] * 3 + [FULL]},
        "minimax_m3_vl_text": {"layer_types": [FULL, "minimax_m3_sparse"] * 2},
    },
    "full attention only by default, and needs a window": {
        "step3p5": {"layer_types": [SLIDING] * 3 + [FULL], "sliding_window": 12},
    },
    "no window by default": {
        "mistral mixtral starcoder2": {"sliding_window": 12},
    },
    "transformers raises time steps to the minimum in a pass, but not in decoding": {
        "nemotron_h zamba2": {"time_step_min": 1e-6},
    },
    "not LongRoPE by default": {
        "phi3 phi4_multimodal": {"rope_parameters": LONG_ROPE},
        "phimoe": {"rope_parameters": {**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.3}},
    },
    "the last layers share the cache of one earlier layer of each kind": {
        "gemma3n_text gemma4_text": {
            "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
        },
    },
    "one layer of each kind by default, through which little is remembered": {
        "nemotron_h": {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", FULL, "mlp", FULL],
            "num_hidden_layers": 6,
        },
    },
    "two layers by default, and EAGLE-3 reads three": {
        "bloom": {"n_layer": 4},
    },
    "heads times their size is the width of the state": {
        "mamba2": {"num_heads": 8},
    },
    "widths are rounded up to 64": {
        "xlstm": {"qk_dim_factor": 1.0, "chunk_size": 8, "num_heads": 4},
    },
    "unset by default, but needed": {
        "hunyuan_v1_dense hunyuan_v1_moe ministral": SET_HEAD_DIM,
        "hunyuan_vl_text": {
            "head_dim": 16, "rope_parameters": {**QWEN_MROPE, "mrope_section": [2, 2, 2, 2]},
        },
        "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
        "deepseek_v2": {"num_experts_per_tok": 2},
        "dots1": {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_routed_experts": 4},
        "deepseek_ocr2_text": {
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2,
        },
        "cohere_compass_text": {"rope_parameters": {kind: QWEN_MROPE for kind in (FULL, SLIDING)}},
        "qwen4_exp_text": {
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
            "indexer_budget": 16, "indexer_compress_ratio": 4, "ple_layer_ids": [1],
            "ple_embed_dim": 64, "eos_token_id": 5, "ngram_vocab_size_base": 400,
            "split_ngram_parts": 2,
        },
        "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
        "granite4_vision": {"deepstack_layer_map": [[1, 1]], "downsample_rate": "2/4"},
        "perception_lm": {"vision_config": {"model_args": {"embed_dim": 64}}},
        "qwen2_5_omni_thinker qwen3_omni_moe_thinker": VISION_START,
        "chameleon": {"vocabulary_map": {"<image>": 300}},
        "emu3": {"vocabulary_map": {"<image>": 300, "<|extra_200|>": 301}},
    },
    "sizes of windowed layers, which differ from the others'": {
        "dots3_note_text": {
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 24,
        },
    },
    "keys and values with as many heads as queries": {
        "glm5_next_text": {"num_key_value_heads": 4},
    },
    "a share of the head that is turned": {
        "mistral4": {"rope_parameters": YARN},
    },
    "sections of M-RoPE, which its class has for heads of 128": {
        "qwen2_vl_text qwen2_5_vl_text glm4v_text glm_ocr_text": {"rope_parameters": QWEN_MROPE},
        "paddleocr_vl_text qwen2_5_omni_text": {"rope_parameters": QWEN_MROPE},
        "glm4v_moe_text": {
            "rope_parameters": QWEN_MROPE
            | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        "ernie4_5_vl_moe_text": {
            "rope_parameters": {**QWEN_MROPE, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [32, 16],
        },
    },
    "some layers take keys and values of others, with RoPE or without": {
        "mistral_large4_text": {"kv_source_layers": [0, 1, 1, 0], "no_rope_layers": [1, 0, 0, 1]},
    },
    "follows from another size": {
        "dots3_note_audio": {"conv_output_size": 1024},
    },
    "with fewer layers its tower needs scipy": {
        "inkling_vision": {"n_layers": 8, "patch_size": 4},
    },
    "indices of layers of its tower": {
        "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    },
    "said twice, and lost on the way": {
        "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    },
    "towers that are large whatever else is small": {
        "janus_vqgan emu3_vqgan chameleon_vqgan": SMALL_VQ,
        "muse_spark_audio": {"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]},
        "phi4_multimodal_audio": {
            "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 16,
        },
    },
}  # fmt: skip
MANUAL_SETTINGS: dict[str, dict[str, Any]] = {}
for _families in _SETTINGS.values():
    for _names, _settings in _families.items():
        for _name in _names.split():
            MANUAL_SETTINGS[_name] = MANUAL_SETTINGS.get(_name, {}) | _settings

_NO_TARGET = {
    "an encoder: its checkpoints read the tokens to come as well":
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod xlm",
    "the decoder of an encoder-decoder: its text depends on the encoder's input":
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
        "prophetnet whisper t5gemma2 udop vision-encoder-decoder pix2struct florence2 "
        "pp_formulanet trocr",
    "gives sound, several codes at a time": "moshi musicgen musicgen_melody",
    "gives the motion of a robot": "pi0",
    "predicts in permuted order, in two streams": "xlnet",
    "hashes its own queries: the tokens that it sees depend on the length": "reformer",
    "fills blocks by diffusion: no token comes after another": "diffusion_gemma",
    "drafts for another model, whose hidden states it reads":
        "gemma4_assistant gemma4_unified_assistant",
    "answers pictures only: its forward pass asks for one":
        "blip blip-2 instructblip instructblipvideo idefics kosmos-2",
    "reads bytes in patches that an entropy model cuts": "blt",
}  # fmt: skip
NO_TARGET = {name: why for why, names in _NO_TARGET.items() for name in names.split()}
