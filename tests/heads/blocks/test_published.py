"""Block drafters as others publish them: their keys and names, literally, at a toy's sizes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import toy_target
from feature_heads import fresh, settings_of
from torch import Tensor

from conf.settings.export import ExportFormat
from heads.blocks.block_head import BlockHead
from heads.kinds import load_head
from heads.target_model.model import Target
from tests.heads.blocks.test_checkpoint import candidates, write

QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 96,
}
OLD_ROPE = {"rope_scaling": None, "rope_theta": 10000, "rope_parameters": None}
SLIDING = {
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 9,
    "use_sliding_window": True,
}
DSPARK = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2 = {"conv_group_size": 8, "conv_kernel_size": 3, "selector_rank": 4, "selector_top_k": 9}
INNER = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
# z-lab/dflash `tests/fixtures/dflash2-config.json`, of a head on the Hub.
ZLAB_DFLASH2 = {
    **QWEN3, **SLIDING, "architectures": ["DFlash2DraftModel"], "dtype": "bfloat16",
    "is_causal": False, "num_target_layers": 8, "pad_token_id": 0, "use_cache": False,
    "dflash_config": {"block_size": 5, **DFLASH2, **INNER}, "transformers_version": "5.15.0",
}  # fmt: skip
MUSE = {"final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404}
ZLAB_MUSE = ZLAB_DFLASH2 | {"dflash_config": {"block_size": 5, **DFLASH2, **MUSE, **INNER}}
# As z-lab/Qwen3.6-35B-A3B-DFlash: its last layer sees all of the text.
ZLAB_MIXED = {
    **QWEN3, **SLIDING, "architectures": ["DFlashDraftModel"], "dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"], "num_target_layers": 8,
    "dflash_config": {"block_size": 5, **INNER},
}  # fmt: skip
# sgl-project/SpecForge `configs/qwen3-8b-{dflash,dspark}.json`, and what training adds.
SPECFORGE = {
    **QWEN3, **OLD_ROPE, "architectures": ["DFlashDraftModel"], "block_size": 5,
    "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"}, "dtype": "bfloat16",
    "num_target_layers": 8, "dflash_config": INNER,
}  # fmt: skip
SPECFORGE_DSPARK = SPECFORGE | {
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "dflash_config": {**INNER, **DSPARK, "projector_type": "dspark", "confidence_head_alpha": 1.0},
}
# deepseek-ai/DeepSpec `modeling/dspark/qwen3/config.py`: a copy of the target's, and more.
DEEPSPEC = {
    **QWEN3, **DSPARK, "architectures": ["Qwen3DSparkModel"], "block_size": 5, "num_anchors": 512,
    "mask_token_id": 3, "target_layer_ids": [0, 1], "num_target_layers": 8, "dtype": "bfloat16",
}  # fmt: skip
DEEPSPEC_DFLASH = {n: v for n, v in DEEPSPEC.items() if n not in DSPARK} | {
    "enable_confidence_head": False,
    "markov_rank": 0,
}


def speculators(kind: str, tokens: int, **keys: Any) -> dict[str, Any]:
    """The config that `save_pretrained` of speculators 0.9.0 wrote for each of its models."""
    names = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [f"{names[kind]}DraftModel"],
        "auto_map": {"": f"config.{names[kind]}SpeculatorConfig"},
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": 5,
        "draft_vocab_size": 96,
        "dtype": "float32",
        "mask_token_id": 3,
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": kind == "dflash2",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta/toy"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**QWEN3, **SLIDING, "max_window_layers": 0},
        "transformers_version": "5.19.0",
        **keys,
    }


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def noisy(
    target: Target, kind: str, published: dict[str, Any] | None = None, **settings: Any
) -> BlockHead:
    """A head none of whose weights is a one or a zero, `published` what no recipe makes."""
    head = fresh(target, settings_of(kind, **settings))
    head.config = replace(head.config, **(published or {}))
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def ends(target: Target) -> dict[str, Tensor]:
    return {
        "embed_tokens.weight": target.embedding.weight.detach().clone(),
        "lm_head.weight": target.output_head.weight.detach().clone(),
    }


CAUSAL, AROUND, PLAIN = {"causal": True, "window": 9}, {"window": 9}, dict[str, Any]()
MIXED, SCALED = CAUSAL | {"published": {"full_layers": (1,)}}, AROUND | {"published": MUSE}
REDUCED = {"own_output_head": True, "draft_vocab_size": 24}


@pytest.mark.parametrize(
    ("kind", "settings", "config"),
    [
        pytest.param("dflash2", AROUND, ZLAB_DFLASH2, id="z-lab, DFlash-2"),
        pytest.param("dflash2", SCALED, ZLAB_MUSE, id="z-lab, DFlash-2 for a target that scales"),
        pytest.param("dflash", PLAIN, SPECFORGE, id="SpecForge, DFlash"),
        pytest.param("dflash", MIXED, ZLAB_MIXED, id="z-lab, DFlash, a layer without a window"),
        pytest.param("dspark", PLAIN, SPECFORGE_DSPARK, id="SpecForge, DSpark"),
        pytest.param("dspark", PLAIN, DEEPSPEC, id="DeepSpec, DSpark"),
        pytest.param("dflash", CAUSAL, speculators("dflash", 4), id="speculators, DFlash"),
        pytest.param(
            "dflash", CAUSAL | REDUCED, speculators("dflash", 4, draft_vocab_size=24),
            id="speculators, DFlash, 24 ids",
        ),
        pytest.param(
            "dspark", CAUSAL, speculators("dspark", 5, **DSPARK), id="speculators, DSpark"
        ),
        pytest.param(
            "dflash2", AROUND, speculators("dflash2", 4, **DFLASH2), id="speculators, DFlash-2"
        ),
    ],
)  # fmt: skip
def test_a_published_head_is_the_one_it_was_written_from(
    target: Target, tmp_path: Path, kind: str, settings: dict[str, Any], config: dict[str, Any]
) -> None:
    head = noisy(target, kind, **settings)
    tensors = head.collect_tensors() | (ends(target) if config is DEEPSPEC else {})
    found = load_head(write(tmp_path / "head", config, tensors))
    assert type(found) is type(head)
    names = ["layers", "block_size", "mask_token_id", "sample_from_anchor"]
    names += ["causal", "window", "full_layers"]
    for name in names:
        assert getattr(found.config, name) == getattr(head.config, name), name
    assert candidates(found, target).equal(candidates(head, target))
    assert found.plan_export(ExportFormat.vllm).problem is None


def test_a_head_that_scales_its_logits_does_so_in_place_of_the_target(tmp_path: Path) -> None:
    """Its keys repeat the target's own, as in z-lab/Muse-Glimmer-30B-DFlash2."""
    target = toy_target()
    head = noisy(target, "dflash2", MUSE, window=9)
    found = load_head(write(tmp_path / "head", ZLAB_MUSE, head.collect_tensors()))
    drafts = candidates(found, target)
    assert found.make_projection()[2:] == (MUSE["output_multiplier"], 20.0)
    scaled = toy_target()
    scaled.model.config.update(MUSE)
    assert scaled.projection.cap == 20.0
    assert candidates(found, scaled).equal(drafts)
    assert found.make_projection() == scaled.projection


def test_deepspec_calls_a_dspark_head_without_a_markov_head_dflash(
    target: Target, tmp_path: Path
) -> None:
    head = noisy(target, "dspark")
    head.markov_head.markov_w2.weight.data.zero_()  # type: ignore[union-attr, operator]
    parts = ("markov_head.", "confidence_head.")
    tensors = {n: tensor for n, tensor in head.collect_tensors().items() if not n.startswith(parts)}
    found = load_head(write(tmp_path / "head", DEEPSPEC_DFLASH, tensors | ends(target)))
    assert found.config.sample_from_anchor
    assert candidates(found, target).equal(candidates(head, target))
    # vLLM takes it for DSpark, and so takes this.
    assert found.build_card_facts({}, None).vllm_method == "dspark"


def test_specforge_first_put_the_heads_of_dspark_into_a_part_of_their_own(
    target: Target, tmp_path: Path
) -> None:
    head = noisy(target, "dspark")
    parts = ("markov_head.", "confidence_head.")
    tensors = {
        f"logit_head.{name}" if name.startswith(parts) else name: tensor
        for name, tensor in head.collect_tensors().items()
    }
    found = load_head(write(tmp_path / "head", SPECFORGE_DSPARK, tensors))
    assert candidates(found, target).equal(candidates(head, target))


def test_speculators_filled_in_masks_before_it_said_so(target: Target, tmp_path: Path) -> None:
    """As vLLM reads a file of DSpark without the key."""
    config = speculators("dspark", 4, **DSPARK)
    del config["sample_from_anchor"]
    found = load_head(write(tmp_path / "head", config, noisy(target, "dspark").collect_tensors()))
    assert (found.config.sample_from_anchor, found.config.num_draft_tokens) == (False, 4)
    stated = config | {"sample_from_anchor": False}
    same = load_head(write(tmp_path / "same", stated, noisy(target, "dspark").collect_tensors()))
    assert candidates(found, target).equal(candidates(same, target))
