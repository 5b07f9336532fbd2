"""Vision-language models, tiny and random, each with towers of its own kind."""

from pathlib import Path
from typing import Any

import torch
from toys import CHATML, SMALL, tokenizer
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig

from heads.target_model.decoder import skip_missing_towers

TEXT = SMALL | {"vocab_size": 300, "num_hidden_layers": 4}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
}  # fmt: skip
GEMMA = {"sliding_window": 12, "head_dim": 32, "query_pre_attn_scalar": 32}
M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
LINEAR = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}  # fmt: skip

WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": 12},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **TOWER},
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": M_ROPE},
        "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [1]},
    },
    "qwen3_5": {
        "text_config": {**LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2},
        "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16},
    },
    "gemma3n": {
        "text_config": {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "laurel_rank": 4,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
        },
        "vision_config": {"vocab_size": 8, "vocab_offset": 300},
        "audio_config": {
            "vocab_size": 8, "vocab_offset": 308, "hidden_size": 32, "conf_num_hidden_layers": 1,
        },
    },
    "llama4": {
        "text_config": {
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
        },
        "vision_config": {
            **TOWER, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        },
    },
}  # fmt: skip


def whole_model(family: str, seed: int = 3) -> Any:
    """A wrapper with its towers, its weights large enough that its text is not constant."""
    torch.manual_seed(seed)
    parts = WRAPPERS[family]
    config = AutoConfig.for_model(family, **parts | {"text_config": TEXT | parts["text_config"]})
    config.image_token_id = 299
    # Gemma 3n's tower is of a library that is not needed for text.
    with skip_missing_towers(config.get_text_config()):
        model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    model.generation_config.eos_token_id = 2
    return model.eval()


def save_wrapper(folder: Path, family: str, template: str | None = CHATML) -> Any:
    """A loadable folder of a wrapper; returns the model with its towers."""
    model = whole_model(family)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model
