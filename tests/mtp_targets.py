"""Small random targets with an MTP layer of their own, in the layouts of their families."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import toys
from safetensors.torch import save_file
from torch import Tensor
from toys import endless_target, tokenizer

from heads.mtp.checkpoint import split_experts
from heads.mtp.mtp import MtpHead, build_mtp_config
from heads.target_model.load import find_final_norm
from heads.target_model.model import Target
from heads.target_model.weight_files import load_tensor_table
from heads.vocab import DraftVocab

ROUTED = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 2,
    "head_dim": 16,
    # By which scores are scaled by more than the size of a head.
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
HYBRID = {
    name: value
    for name, value in toys.FAMILIES["qwen3_next"].items()
    if name.startswith(("layer_types", "linear"))
}
INDEXED = {**ROUTED, **LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 32}
TARGETS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**ROUTED, **LATENT}, True),
    # Within `index_topk` tokens these are models of the older kind.
    "DeepseekV32ForCausalLM": ("deepseek_v3", INDEXED, True),
    "GlmMoeDsaForCausalLM": ("deepseek_v3", INDEXED, True),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {**ROUTED, **LATENT}, True),
    "HYV3ForCausalLM": ("hy_v3", toys.EXPERTS, True),
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6,
            "num_attention_heads": 4, "v_head_dim": 16,
        },
        False,
    ),
    "NemotronHForCausalLM": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 4,
            "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16,
        },
        True,
    ),
    "Exaone4_5_ForConditionalGeneration": (
        "exaone4",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        False,
    ),
    "Glm4MoeForCausalLM": ("glm4_moe", {**ROUTED, "use_qk_norm": True}, True),
    "Qwen3NextForCausalLM": ("qwen3_next", toys.FAMILIES["qwen3_next"], True),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", HYBRID, False),
    "Qwen3_5MoeForCausalLM": (
        "qwen3_5_moe_text",
        {**HYBRID, **toys.EXPERTS, "shared_expert_intermediate_size": 32},
        True,
    ),
    "ExaoneMoeForCausalLM": (
        "exaone_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
            "topk_group": 1, "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"], "mtp_layer_types": ["full_attention"],
            "mtp_sliding_windows": [0],
        },
        False,
    ),
    "MiMoForCausalLM": ("qwen2", {}, False),
    "Ernie4_5_MoeForCausalLM": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
        },
        False,
    ),
}  # fmt: skip
"""By architecture: the model type, its settings, and whether the layer is a mixture."""


def uneven(norm: Tensor) -> None:
    """Has the state before a norm, of these weights, be another one than the state behind it."""
    norm.data.add_(torch.randn(norm.shape, generator=torch.Generator().manual_seed(2)))


@cache
def target_with_layer(architecture: str) -> tuple[Target, MtpHead]:
    """A target whose texts no token ends, and its layer with weights that count."""
    model_type, settings, sparse = TARGETS[architecture]
    with patch.dict(toys.FAMILIES, {model_type: settings}):
        target = endless_target(model_type, vocab_size=300)
    target.tokenizer = tokenizer()
    uneven(find_final_norm(target.model).weight)
    shape = build_mtp_config(target.config, architecture, "toy", sparse)
    head = MtpHead(shape, DraftVocab.make_full(target.vocab_size)).initialise(target, seed=0)
    generator = torch.Generator().manual_seed(1)
    for tensor in [*head.parameters(), *head.buffers()]:
        if tensor.dim() > 1:
            tensor.data.mul_(12.0)
        else:  # of a norm, else one that is applied twice would be one applied once
            tensor.data.add_(torch.randn(tensor.shape, generator=generator))
    return target, head.eval()


def saved(
    folder: Path, architecture: str, changed: dict[str, Any] | None = None, joined: bool = False
) -> Path:
    """The target in a folder, with its layer's tensors in a shard of their own.

    Args:
        folder: to write.
        architecture: a key of `TARGETS`.
        changed: tensors by their names in the file, in place of or besides the layer's; None for
            one takes it away.
        joined: the experts in one tensor.
    """
    target, head = target_with_layer(architecture)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    family, num_layers = head.config.family_entry, target.num_layers
    held = head.build_files().tensors
    own = {
        family.to_stored_name(name, num_layers): tensor.contiguous().clone()
        for name, tensor in (held if joined else split_experts(held)).items()
    }
    ends = [target.embedding.weight, target.output_head.weight]
    own |= {
        name: t.detach().clone()
        for name, t in zip(family.list_copies(num_layers), ends, strict=False)
    }
    own = {name: t for name, t in (own | (changed or {})).items() if t is not None}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / shards[0])
    save_file(own, folder / shards[1], metadata={"format": "pt"})
    places = dict.fromkeys(load_tensor_table(folder / shards[0]), shards[0]) | dict.fromkeys(
        own, shards[1]
    )
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], family.counts[0]: 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
