"""vLLM on a CPU drafts with a stitched MTP layer as we do."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import toys
from environments import VLLM, counts_of_vllm, drafted, needs, opened
from mtp_targets import TARGETS, uneven
from safetensors.torch import load_file, save_file
from toys import save_target, texts, trained

from conf.settings.eagle import MtpConfig
from heads.eagle.network import EagleDrafter
from heads.kinds import load_head
from heads.mtp.mtp import MtpHead, build_mtp_config
from heads.mtp.stitch import stitch_layer
from heads.vocab import DraftVocab
from train.mtp import MtpObjective

NUM_TOKENS = 60
# Of latent attention, a CPU knows one size.
LATENT = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
ROUTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
RUNNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "MiMoForCausalLM": ({}, {}),
    "Glm4MoeForCausalLM": ({}, {}),
    "ExaoneMoeForCausalLM": (
        {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "sliding_window": 12}, {}
    ),
    "DeepseekV3ForCausalLM": (LATENT, ROUTED),
    "Glm4MoeLiteForCausalLM": (LATENT, ROUTED),
    "HYV3ForCausalLM": (
        {},
        {
            "first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True,
            "qk_norm": True,
        },
    ),
    # vLLM's window counts what transformers adds one to.
    "MiMoV2FlashForCausalLM": (
        {"v_head_dim": 32},
        {
            "sliding_window_size": 6, "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 1, 1], "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 32,
            "add_swa_attention_sink_bias": True, "layernorm_epsilon": 1e-5, "rope_theta": 5e6,
            "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334,
        },
    ),
}  # fmt: skip
"""The families whose toys vLLM runs: changes of the toy, and keys that only vLLM reads."""

pytestmark = pytest.mark.engine


@needs(VLLM)
@pytest.mark.parametrize("architecture", RUNNING)
def test_vllm_drafts_and_accepts_what_we_do(architecture: str, tmp_path: Path) -> None:
    """Layers that read their own output: texts token for token, counts to the unit."""
    model_type, settings, sparse = TARGETS[architecture]
    changes, more = RUNNING[architecture]
    with patch.dict(toys.FAMILIES, {model_type: settings | changes}):
        plain = save_target(tmp_path / "plain", model_type, num_hidden_layers=4)
    told(plain, {"architectures": [architecture]})
    weights = load_file(plain / "model.safetensors")
    uneven(weights["model.norm.weight"])
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    target = opened(plain)
    shape = build_mtp_config(target.config, architecture, "toy", sparse)
    layer = MtpHead(shape, DraftVocab.make_full(target.vocab_size)).initialise(target, seed=0)
    objective = MtpObjective(layer, target, MtpConfig(num_steps=3))
    stitch_layer(plain, trained(objective, texts(target, 6, 40), 60), tmp_path / "whole")

    whole = opened(tmp_path / "whole")
    head = load_head(str(tmp_path / "whole")).attach(whole)
    # Six that the layer has learnt from, and two that it has not.
    prompts = [text[:4] for text in texts(target, 8, 1)]
    ours = [
        [
            asdict(drafted(whole, EagleDrafter(head, depth), prompt, NUM_TOKENS, depth))
            for prompt in prompts
        ]
        for depth in (1, 3)
    ]
    told(tmp_path / "whole", more)
    ways = [{"method": "mtp", "num_speculative_tokens": depth} for depth in (1, 3)]
    assert ours == counts_of_vllm(tmp_path, whole, prompts, NUM_TOKENS, ways)
    accepted = [[each["accepted"] for each in way] for way in ours]
    assert min(sum(column) for way in accepted for column in zip(*way, strict=True)) > 20


def told(folder: Path, more: dict[str, Any]) -> None:
    """Adds keys to a model's `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
