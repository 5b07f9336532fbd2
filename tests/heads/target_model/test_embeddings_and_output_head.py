"""The step from the final hidden states of a target to its logits."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead, _find_scaling
from heads.target_model.model import Target

# Family, settings, scale and cap.
STATED: list[tuple[str, dict[str, Any], float, float | None]] = [
    ("llama", {}, 1.0, None),
    ("cohere", {"logit_scale": 0.25}, 0.25, None),
    ("cohere2_moe", {"logit_scale": 0.25}, 0.25, None),
    ("granite", {"logits_scaling": 8.0}, 0.125, None),
    ("minicpm3", {"hidden_size": 2560, "dim_model_base": 256}, 0.1, None),
    ("inkling_text", {"logits_mup_width_multiplier": 4.0}, 0.25, None),
    ("hyperclovax", {"logits_scaling": 8.0}, 8.0, None),
    ("falcon_h1", {"lm_head_multiplier": 0.5}, 0.5, None),
    ("muse_spark_text", {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}, 0.5, 20.0),
    ("gemma2", {"final_logit_softcapping": 30.0}, 1.0, 30.0),
    ("recurrent_gemma", {"logits_soft_cap": 30.0}, 1.0, 30.0),
    ("xlstm", {"output_logit_soft_cap": 15.0}, 1.0, 15.0),
    # transformers reads neither.
    ("mpt", {"logit_scale": 2.0}, 1.0, None),
    ("cohere2_vision", {"text_config": {"model_type": "cohere2", "logit_scale": 2.0}}, 1.0, None),
]


@pytest.mark.parametrize(("family", "settings", "scale", "cap"), STATED, ids=str)
def test_every_scale_and_cap_is_known_by_its_name(family: str, settings, scale, cap) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    found = _find_scaling(AutoConfig.for_model(family, **settings))
    assert found == (pytest.approx(scale), cap)


SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "hyperclovax": {"logits_scaling": 8.0},
    "nanochat": {"final_logit_softcapping": 2.0},
    "falcon_h1": {"lm_head_multiplier": 3.0, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "minicpm3": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "phi": {},
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_logits_are_those_of_the_model(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **MODELS[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_output_embeddings().weight.data.mul_(20.0)  # so that caps are felt
    target, ids = Target(model, None, family), torch.arange(3, 20)[None]
    states = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(target.compute_logits(states), model(input_ids=ids).logits)


def test_rows_that_pad_a_vocabulary_are_no_part_of_it() -> None:
    """As Inkling's model cuts its logits."""
    config = AutoConfig.for_model("llama", **SMALL, unpadded_vocab_size=90)
    model = AutoModelForCausalLM.from_config(config).eval()
    target = Target(model, None, "padded")
    assert target.vocab_size == 90
    assert target.compute_logits(torch.randn(3, 64)).shape == (3, 90)
    assert target.output_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    # Beside towers for images, the size is a setting of the text alone.
    model.config = AutoConfig.for_model("llava", text_config=config.to_dict())
    assert EmbeddingsAndOutputHead(model, None, "padded").vocab_size == 90
