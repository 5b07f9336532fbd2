"""Block drafters as others publish them: their keys and names, literally, at a toy's sizes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import toy_target
from feature_heads import fresh, settings_of
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from conf.settings.blocks import DFlashConfig
from conf.settings.export import ExportFormat
from heads.blocks.block_head import BlockHead, build_block_config
from heads.blocks.dflash import DFlashHead
from heads.kinds import load_head
from heads.target_model.model import Target
from heads.vocab import DraftVocab

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


TEXT = [5, 17, 3, 88, 41, 2, 60, 9, 33, 71, 12, 4]
NARROW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
# As z-lab's files have it; `auto_map` and the like left out.
ZLAB = {
    **QWEN3, **OLD_ROPE, "architectures": ["DFlashDraftModel"], "block_size": 4,
    "num_target_layers": 8, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 5]},
}  # fmt: skip
SPECULATORS = speculators(
    "dflash", 3, architectures=["DFlashSpeculator"], aux_hidden_state_layer_ids=[2, 3, 6],
    block_size=4, mask_token_id=7,
    transformer_layer_config={**QWEN3, **NARROW, "use_sliding_window": True},
)  # fmt: skip


def dflash(target: Target, **settings: Any) -> DFlashHead:
    """An untrained head of two layers and three drafts with noise in its norms."""
    sizes = {"num_layers": 2, "block_size": 4, "layers": [2, 3, 6], "mask_token_id": 7}
    config = build_block_config(
        DFlashConfig(**{**sizes, **settings}), target, sample_from_anchor=False
    )
    head = DFlashHead(config, DraftVocab.make_full(target.vocab_size)).initialise(target, seed=0)
    torch.manual_seed(0)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return head.eval()


def ends(target: Target) -> dict[str, Tensor]:
    return {
        "embed_tokens.weight": target.embedding.weight.detach().clone(),
        "lm_head.weight": target.output_head.weight.detach().clone(),
    }


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], prefix: str = ""
) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    named = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return str(folder)


@torch.no_grad()
def candidates(head: Any, target: Target) -> Tensor:
    head.attach(target)
    return head.compute_candidates(target.encode_text(TEXT[:-1], head.taps), TEXT, 2, 3, 4)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def test_a_head_of_the_authors(target: Target, tmp_path: Path) -> None:
    head = dflash(target)
    found = load_head(write(tmp_path / "head", ZLAB, head.collect_tensors()))
    assert isinstance(found, DFlashHead)
    assert vars(found.config) | {"target": "me/toy"} == vars(head.config)
    assert candidates(found, target).equal(candidates(head, target))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_head_of_speculators_with_what_it_keeps_of_the_target(
    target: Target, tmp_path: Path, prefix: str
) -> None:
    head = dflash(target, window=3, causal=True)
    copies = ends(target) | {
        "verifier_norm.weight": torch.ones(64),
        "verifier_lm_head.weight": torch.ones(96, 64),
    }
    if prefix:
        copies = {name: each for name, each in copies.items() if "verifier" not in name}
    found = load_head(
        write(tmp_path / "head", SPECULATORS, head.collect_tensors() | copies, prefix)
    )
    config = found.config
    assert (config.layers, config.window, config.causal) == ((2, 3, 6), 3, True)
    assert (config.target, config.own_embedding, config.own_output_head) == ("meta/toy", True, True)
    assert candidates(found, target).equal(candidates(head, target))


TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
NESTED = ZLAB["dflash_config"]
WIDE = {"rope_type": "default", "rope_theta": 5e5}
UNNAMED = without(ZLAB, "layer_types")
FULL = {"transformer_layer_config": QWEN3}


@pytest.mark.parametrize(
    ("config", "window", "causal"),
    [
        (ZLAB, None, False),
        (ZLAB | NARROW, 3, True),
        (ZLAB | NARROW | {"dflash_config": NESTED | {"causal": False}}, 3, False),
        (ZLAB | NARROW | {"is_causal": False, "dflash_config": NESTED | {"causal": True}}, 3,
         False),
        # As XiaomiMiMo publishes them: a window in layers that are not called sliding.
        (ZLAB | {"dflash_config": NESTED | {"use_swa": True, "swa_window_size": 5}}, 5, False),
        (ZLAB | NARROW | {"dflash_config": NESTED | {"swa_window_size": 5}}, 5, True),
        (ZLAB | {"sliding_window": 3}, None, False),
        (SPECULATORS, 3, True),
        (SPECULATORS | {"sliding_window_non_causal": True}, 3, False),
        (without(SPECULATORS, "sliding_window_non_causal"), 3, False),
        # The class's default, which says nothing of layers without a window.
        (SPECULATORS | FULL, None, False),
    ],
)  # fmt: skip
def test_what_rows_see(
    target: Target, tmp_path: Path, config: dict[str, Any], window: int | None, causal: bool
) -> None:
    found = load_head(write(tmp_path / "head", config, dflash(target).collect_tensors())).config
    assert (found.window, found.causal) == (window, causal)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mask_token_id": 9}, 7),
        ({"mask_token_id": 9, "dflash_config": without(NESTED, "mask_token_id")}, 9),
    ],
)
def test_the_mask_token_is_that_of_the_inner_part(
    target: Target, tmp_path: Path, changes: dict[str, Any], expected: int
) -> None:
    head = load_head(write(tmp_path / "head", ZLAB | changes, dflash(target).collect_tensors()))
    assert head.config.mask_token_id == expected


def test_layers_may_be_told_and_have_several_names(target: Target, tmp_path: Path) -> None:
    tensors = dflash(target).collect_tensors()
    folder = write(tmp_path / "head", ZLAB, tensors)
    assert load_head(folder, layers=[1, 2, 3]).config.layers == (1, 2, 3)
    with pytest.raises(InputError, match=r"reads 3 hidden states of 64, .* names \[1, 2\]"):
        load_head(folder, layers=[1, 2])
    both = ZLAB | {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}
    assert load_head(write(tmp_path / "both", both, tensors)).config.layers == (2, 3, 6)
    other = ZLAB | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    said = r"target_layer_ids \+ 1=\[2, 3, 6\], but eagle_aux_hidden_state_layer_ids=\[2, 4, 6\]"
    with pytest.raises(InputError, match=said):
        load_head(write(tmp_path / "other", other, tensors))


def test_a_theta_that_is_not_stated_is_the_engines(target: Target, tmp_path: Path) -> None:
    tensors = dflash(target).collect_tensors()
    for keys, theta in (({}, 1e4), ({"rope_theta": None}, 1e6)):
        head = load_head(write(tmp_path / f"{theta}", ZLAB | keys, tensors))
        expected = {"rope_type": "default", "rope_theta": theta}
        assert head.config.llama.rope_parameters == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ZLAB | {"dflash_config": NESTED | {"sample_from_anchor": True}},
            "fills in masks.*must be fals",
        ),
        (SPECULATORS | {"sample_from_anchor": True}, "says sample_from_anchor=True"),
        (ZLAB | {"attention_bias": True}, "attention_bias=True, .* must be False"),
        (ZLAB | {"dflash_config": NESTED | {"attention_value_scale": 0.5}}, "value_scale=0.5"),
        (ZLAB | {"add_swa_attention_sink_bias": True}, "sink_bias=True, .* must be False"),
        (ZLAB | {"is_neox_style": False}, "is_neox_style=False, .* must be True"),
        (
            ZLAB
            | TWO_KINDS
            | {"rope_parameters": {"full_attention": WIDE, "sliding_attention": {}}},
            "another RoPE for each kind of layer, which is not implemented",
        ),
        (without(ZLAB, "block_size"), "has None for block_size: must be a whole number"),
        (ZLAB | {"dflash_config": without(NESTED, "mask_token_id")}, "None for mask_token_id"),
        (
            ZLAB | {"dflash_config": without(NESTED, "target_layer_ids")},
            r"3 hidden states.*names \[\]",
        ),
        (
            ZLAB | {"draft_vocab_size": 24},
            r"96 of 96 ids by d2t, \[24\] by config.json, \[\] by lm_h",
        ),
        (
            ZLAB | TWO_KINDS | {"layer_types": ["sliding_attention"]},
            "layer_types .*: must be 2 of sliding_att",
        ),
        (ZLAB | {"layer_types": ["linear_attention"] * 2}, "must be 2 of sliding_attention and fu"),
        (
            ZLAB | TWO_KINDS | {"is_causal": True},
            r"causal in all layers, but layers \[1\] see all",
        ),
        (ZLAB | {"layer_types": ["sliding_attention"] * 2}, "but has no sliding_window"),
        (UNNAMED | {"num_hidden_layers": 1}, r"foreign: \['layers.1.input_layernorm.weight'"),
        (UNNAMED | {"num_hidden_layers": 3}, r"missing: \['layers.2.input_layernorm.weight'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    target: Target, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "head", config, dflash(target).collect_tensors())
    with pytest.raises(InputError, match=message) as caught:
        load_head(folder)
    assert str(caught.value).startswith(f"head.path={folder}: ")


def put(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"missing: \['norm.weight'\]$"),
        (put("mask_hidden", 1, 192), "mask_hidden: belongs to a P-EAGLE head"),
        (put("layers.0.attention_conv.base_kernel", 2, 2, 64), r"foreign: \['layers.0.attention_c"),
        (put("fc.weight", 64, 128), "reads 2 hidden states of 64, but .* names"),
    ],
)
def test_every_tensor_is_accounted_for(target: Target, tmp_path: Path, edit, message: str) -> None:
    tensors = dflash(target).collect_tensors()
    edit(tensors)
    with pytest.raises(InputError, match=message):
        load_head(write(tmp_path / "head", ZLAB, tensors))


def test_a_pickle_beside_the_weights_is_never_opened(target: Target, tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "head", ZLAB, dflash(target).collect_tensors()))
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(InputError, match=r"mask_embedding.pt: a separate pick"):
        load_head(str(folder))


# --- Every writer.


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
