"""DFlash heads as others publish them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import toy_target
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from conf.settings.blocks import DFlashConfig
from heads.blocks.block_head import build_block_config
from heads.blocks.dflash import DFlashHead
from heads.kinds import load_head
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from tests.heads.eagle.test_checkpoint import ROPES_THAT_CONTRADICT


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


TEXT = [5, 17, 3, 88, 41, 2, 60, 9, 33, 71, 12, 4]
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 256,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
# As z-lab's files have it; `auto_map` and the like left out.
ZLAB = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": 8,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 5]},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 3, 6],
    "block_size": 4,
    "draft_vocab_size": 96,
    "mask_token_id": 7,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    "transformer_layer_config": SIZES
    | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True},
    "speculators_config": {"verifier": {"name_or_path": "meta/toy"}},
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
    copies = {
        "embed_tokens.weight": target.embedding.weight.detach().clone(),
        "lm_head.weight": target.output_head.weight.detach().clone(),
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


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
NESTED = ZLAB["dflash_config"]
WIDE = {"rope_type": "default", "rope_theta": 5e5}
UNNAMED = without(ZLAB, "layer_types")
FULL = {"transformer_layer_config": SIZES}


@pytest.mark.parametrize(
    ("config", "window", "causal"),
    [
        (ZLAB, None, False),
        (ZLAB | SLIDING, 3, True),
        (ZLAB | SLIDING | {"dflash_config": NESTED | {"causal": False}}, 3, False),
        (ZLAB | SLIDING | {"is_causal": False, "dflash_config": NESTED | {"causal": True}}, 3,
         False),
        # As XiaomiMiMo publishes them: a window in layers that are not called sliding.
        (ZLAB | {"dflash_config": NESTED | {"use_swa": True, "swa_window_size": 5}}, 5, False),
        (ZLAB | SLIDING | {"dflash_config": NESTED | {"swa_window_size": 5}}, 5, True),
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


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": None}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
        ({"rope_parameters": {"full_attention": WIDE}, "rope_theta": None}, WIDE),
        (
            MIXED
            | {"rope_parameters": {"full_attention": WIDE, "sliding_attention": WIDE}}
            | {"rope_theta": 5e5},
            WIDE,
        ),
    ],
)
def test_old_and_new_spellings_of_rope(target: Target, tmp_path: Path, keys, expected) -> None:
    head = load_head(write(tmp_path / "head", ZLAB | keys, dflash(target).collect_tensors()))
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
        (ZLAB | {"hidden_act": "gelu"}, "hidden_act=gelu, .* must be silu"),
        (ZLAB | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE is dynamic over 1.0"),
        *((ZLAB | {"rope_theta": None} | keys, message) for keys, message in ROPES_THAT_CONTRADICT),
        (
            ZLAB | MIXED | {"rope_parameters": {"full_attention": WIDE, "sliding_attention": {}}},
            "another RoPE for each kind of layer, which is not implemented",
        ),
        (without(ZLAB, "block_size"), "has None for block_size: must be a whole number"),
        (ZLAB | {"dflash_config": without(NESTED, "mask_token_id")}, "None for mask_token_id"),
        (
            ZLAB | {"dflash_config": without(NESTED, "target_layer_ids")},
            r"3 hidden states.*names \[\]",
        ),
        (without(ZLAB, "vocab_size"), r"config.json lacks \['vocab_size'\]"),
        (
            ZLAB | {"draft_vocab_size": 24},
            r"96 of 96 ids by d2t, \[24\] by config.json, \[\] by lm_h",
        ),
        (
            ZLAB | MIXED | {"layer_types": ["sliding_attention"]},
            "layer_types .*: must be 2 of sliding_att",
        ),
        (ZLAB | {"layer_types": ["linear_attention"] * 2}, "must be 2 of sliding_attention and fu"),
        (ZLAB | MIXED | {"is_causal": True}, r"causal in all layers, but layers \[1\] see all"),
        (ZLAB | {"layer_types": ["sliding_attention"] * 2}, "but has no sliding_window"),
        (UNNAMED | {"num_hidden_layers": 1}, r"foreign: \['layers.1.input_layernorm.weight'"),
        (UNNAMED | {"num_hidden_layers": 3}, r"missing: \['layers.2.input_layernorm.weight'"),
        (ZLAB | {"intermediate_size": 64}, r"misshapen: \['layers.0.mlp.down_proj.weight \[64, 9"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    target: Target, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "head", config, dflash(target).collect_tensors())
    with pytest.raises(InputError, match=message) as caught:
        load_head(folder)
    assert str(caught.value).startswith(f"head.path={folder}: ")


def test_an_output_head_that_is_tied_is_the_heads_own_embedding(
    target: Target, tmp_path: Path
) -> None:
    tensors = dflash(target).collect_tensors() | {"embed_tokens.weight": torch.rand(96, 64)}
    own = tensors["embed_tokens.weight"]
    for tied, expected in ((True, own), (False, target.output_head.weight)):
        config = ZLAB | {"tie_word_embeddings": tied}
        head = load_head(write(tmp_path / f"{tied}", config, tensors)).attach(target)
        assert head.make_projection().weight.equal(expected)
        assert head.embed_tokens.weight.equal(own)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"fc\.weight is torch\.float8_e4m3fn, but a quantised he"):
        load_head(write(tmp_path / "narrow", ZLAB, tensors))


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


def test_pickles_are_never_opened(target: Target, tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "head", ZLAB, dflash(target).collect_tensors()))
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(InputError, match=r"mask_embedding.pt: a separate pick"):
        load_head(str(folder))
    (folder / "mask_embedding.pt").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no \*\.safetensors there; .*never opened"):
        load_head(str(folder))
