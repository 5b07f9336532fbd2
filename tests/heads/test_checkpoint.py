"""Heads as others publish them: what is read of their files, and what is refused."""

from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from exports import build, made, toy_target
from feature_heads import fresh, settings_of
from layouts import change, embedding, write_published
from torch import Tensor
from toys import noisy_head

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat
from heads.blocks.block_head import BlockHead
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleHeadConfig
from heads.kinds import load_head
from heads.target_model.model import Target

TEXT = [5, 17, 3, 88, 41, 2, 60, 9, 33, 71, 12, 4]
MUSE = {"final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404}
OF_DSPARK = ("markov_head.", "confidence_head.")


@cache
def target() -> Target:
    return toy_target()


@torch.no_grad()
def candidates(head: Any) -> Tensor:
    """The likeliest ids of three depths behind each token of a text."""
    output = head.attach(target()).target.encode_text(TEXT[:-1], head.taps)
    return head.compute_candidates(output, TEXT, 2, 3, 8)


def noisy(kind: str, published: dict[str, Any] | None = None, **settings: Any) -> BlockHead:
    """A head none of whose weights is a one or a zero, `published` what no recipe makes."""
    head = fresh(target(), settings_of(kind, **settings))
    head.config = replace(head.config, **(published or {}))
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def ends() -> dict[str, Tensor]:
    """Copies of the target's."""
    return {
        "embed_tokens.weight": target().embedding.weight.detach().clone(),
        "lm_head.weight": target().output_head.weight.detach().clone(),
    }


def put(name: str, folder: Path) -> Path:
    """A folder of `heads/published` with tensors that fit, or of our own P-EAGLE head."""
    if name == "peagle":
        made(name).save(folder)
        return folder
    is_eagle = name in layouts.EAGLES
    tensors = None if is_eagle else noisy(name.partition("-")[0]).collect_tensors()
    return write_published(name, folder, tensors)


# --- Every writer.


FLAGS: dict[str, dict[str, Any]] = {
    "eagle1": {"fc_bias": True, "own_embedding": True},
    "eagle1-qwen2": {"fc_bias": True, "own_embedding": True},
    "eagle1-vllm": {},
    "eagle1-vllm-first": {"own_embedding": True},
    "eagle3": {},
    "eagle3-specforge": {"own_embedding": True},
    "eagle3-sglang": {"fc_norm": True, "norm_output": True},
    "eagle3-modelopt": {
        "norm_before_fc": True, "norm_before_residual": True, "norm_output": True,
    },
    "eagle3-speculators": {"own_embedding": True, "layers": (1, 2, 3), "target": "meta/toy"},
}  # fmt: skip


@pytest.mark.parametrize("name", layouts.EAGLES)
def test_every_layout_of_eagle_is_read_and_saved(tmp_path: Path, name: str) -> None:
    head = load_head(str(put(name, tmp_path / "head")))
    assert isinstance(head, EagleHead)
    form = EagleForm(name[:6])
    config = EagleHeadConfig(
        form=form, llama=head.config.llama, target="unknown", target_hidden_size=64
    )
    assert vars(head.config) == vars(config) | FLAGS[name]
    assert head.config.llama.attention_bias == (name == "eagle1-qwen2")
    ids = range(96) if form is EagleForm.eagle1 else range(1, 96, 4)
    assert head.vocab.ids.tolist() == list(ids)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    if name == "eagle3-sglang":
        low, mid, high = layouts.random(layouts.AUX_NORMS, seed=6).values()
        for norm, stored in zip(head.fc_norm, (low, mid, high), strict=True):
            assert norm.weight.equal(stored.bfloat16().float())
    head.save(tmp_path / "ours")
    ours = load_head(str(tmp_path / "ours"))
    assert ours.config == head.config
    assert candidates(ours).equal(candidates(head))


def test_the_same_weights_draft_the_same_in_every_layout(tmp_path: Path) -> None:
    embed = {"embed_tokens.weight": ends()["embed_tokens.weight"]}
    drafts = []
    for name in ("eagle3", "eagle3-specforge", "eagle3-speculators"):
        folder = write_published(name, tmp_path / name, layouts.EAGLES[name][1]() | embed)
        drafts.append(candidates(load_head(str(folder), layers=[1, 2, 3])))
    assert drafts[0].equal(drafts[1])
    assert drafts[0].equal(drafts[2])


CAUSAL, AROUND = {"causal": True, "window": 9}, {"window": 9}
BLOCKS: dict[str, dict[str, Any]] = {
    # z-lab/dflash `tests/fixtures/dflash2-config.json`, of a head on the Hub.
    "dflash2-z-lab": AROUND,
    # z-lab/Muse-Glimmer-30B-DFlash2, of a target that scales.
    "dflash2-z-lab-scaled": AROUND | {"published": MUSE},
    # z-lab/Qwen3.6-35B-A3B-DFlash: its last layer sees all of the text.
    "dflash-z-lab-mixed": CAUSAL | {"published": {"full_layers": (1,)}},
    # sgl-project/SpecForge `configs/qwen3-8b-{dflash,dspark}.json`, and what training adds.
    "dflash-specforge": {},
    "dspark-specforge": {},
    # deepseek-ai/DeepSpec `modeling/dspark/qwen3/config.py`: a copy of the target's, and more.
    "dspark-deepspec": {},
    # What `save_pretrained` of speculators 0.9.0 wrote for each of its models.
    "dflash-speculators": CAUSAL,
    "dspark-speculators": CAUSAL,
    "dflash2-speculators": AROUND,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_published_block_head_is_the_one_it_was_written_from(tmp_path: Path, name: str) -> None:
    head = noisy(name.partition("-")[0], **BLOCKS[name])
    tensors = head.collect_tensors() | (ends() if name == "dspark-deepspec" else {})
    found = load_head(str(write_published(name, tmp_path / "head", tensors)))
    assert type(found) is type(head)
    for key in ("layers", "block_size", "mask_token_id", "sample_from_anchor", "causal", "window",
                "full_layers"):  # fmt: skip
        assert getattr(found.config, key) == getattr(head.config, key), key
    assert candidates(found).equal(candidates(head))
    assert found.plan_export(ExportFormat.vllm).problem is None


@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_speculators_keeps_of_the_target_is_read_or_left_out(
    tmp_path: Path, prefix: str
) -> None:
    head = noisy("dflash", own_output_head=True, draft_vocab_size=24, **CAUSAL)
    more = {"verifier_norm.weight": torch.ones(64), "verifier_lm_head.weight": torch.ones(96, 64)}
    tensors = head.collect_tensors() | {"embed_tokens.weight": ends()["embed_tokens.weight"]}
    tensors = {prefix + name: each for name, each in tensors.items()} | more
    folder = write_published("dflash-speculators", tmp_path / "head", tensors)
    found = load_head(change(folder, {"draft_vocab_size": 24}))
    config = found.config
    assert (config.target, config.own_embedding, config.own_output_head) == ("meta/toy", True, True)
    assert candidates(found).equal(candidates(head))


def test_a_head_that_scales_its_logits_does_so_in_place_of_the_target(tmp_path: Path) -> None:
    """Its keys repeat the target's own."""
    tensors = noisy("dflash2", MUSE, window=9).collect_tensors()
    found = load_head(str(write_published("dflash2-z-lab-scaled", tmp_path / "head", tensors)))
    drafts = candidates(found)
    assert found.make_projection()[2:] == (MUSE["output_multiplier"], 20.0)
    scaled = toy_target()
    scaled.model.config.update(MUSE)
    assert scaled.projection.cap == 20.0
    output = scaled.encode_text(TEXT[:-1], found.attach(scaled).taps)
    assert found.compute_candidates(output, TEXT, 2, 3, 8).equal(drafts)
    assert found.make_projection() == scaled.projection


def test_deepspec_calls_a_dspark_head_without_a_markov_head_dflash(tmp_path: Path) -> None:
    head = noisy("dspark")
    head.markov_head.markov_w2.weight.data.zero_()  # type: ignore[union-attr, operator]
    own = head.collect_tensors().items()
    tensors = {name: tensor for name, tensor in own if not name.startswith(OF_DSPARK)}
    found = load_head(str(write_published("dflash-deepspec", tmp_path / "head", tensors | ends())))
    assert found.config.sample_from_anchor
    assert candidates(found).equal(candidates(head))
    # vLLM takes it for DSpark, and so takes this.
    assert found.build_card_facts({}).vllm_method == "dspark"


def test_specforge_first_put_the_heads_of_dspark_into_a_part_of_their_own(tmp_path: Path) -> None:
    head = noisy("dspark")
    tensors = {
        f"logit_head.{name}" if name.startswith(OF_DSPARK) else name: tensor
        for name, tensor in head.collect_tensors().items()
    }
    found = load_head(str(write_published("dspark-specforge", tmp_path / "head", tensors)))
    assert candidates(found).equal(candidates(head))


# --- What a config says.


IDS = "eagle_aux_hidden_state_layer_ids"
SHORT = {"rope_type": "default", "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
OLD_LINEAR, MROPE = {"type": "linear", "factor": 2.0}, {"type": "mrope", "mrope_section": [16, 24]}
TWICE = {"type": "linear", "rope_type": "linear", "factor": 2}
BY_KIND = {"full_attention": PLAIN, "sliding_attention": SHORT}
INNER = "dflash_config."
NARROW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
OF_LAYER = "transformer_layer_config."
UNWINDOWED = {
    f"{OF_LAYER}layer_types": ["full_attention"] * 2, f"{OF_LAYER}sliding_window": None,
    f"{OF_LAYER}use_sliding_window": False,
}  # fmt: skip


def rope(expected: dict[str, Any]) -> dict[str, Any]:
    return {"llama.rope_parameters": expected}


def rows(window: int | None, causal: bool) -> dict[str, Any]:
    return {"window": window, "causal": causal}


READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eagle3-speculators", {"norm_before_residual": None}, {"norm_before_residual": False}),
    ("eagle3-speculators", {"norm_before_residual": True}, {"norm_before_residual": True}),
    ("eagle3", {"eagle_config": {IDS: [0, 1, 2]}}, {"layers": (0, 1, 2)}),
    # Old and new spellings of RoPE.
    ("eagle3", {}, rope(SHORT)),
    ("eagle3", {"rope_theta": 5e5, "rope_scaling": None}, rope(PLAIN)),
    ("eagle3", {"rope_theta": 5e5, "rope_parameters": PLAIN}, rope(PLAIN)),
    ("eagle3", {"rope_theta": 5e5, "rope_scaling": OLD_LINEAR}, rope(LINEAR)),
    ("eagle3", {"rope_scaling": MROPE}, rope(SHORT)),
    ("eagle3", {"rope_theta": 500000, "rope_parameters": LINEAR, "rope_scaling": TWICE},
     rope(LINEAR)),
    ("eagle3", {"rope_scaling": MROPE, "rope_parameters": PLAIN}, rope(PLAIN)),
    ("eagle3", {"rope_scaling": OLD_LINEAR, "rope_parameters": {"rope_theta": 5e5}}, rope(LINEAR)),
    ("eagle3", {"rope_parameters": BY_KIND}, rope(PLAIN)),
    # A theta that is not stated is the engines'.
    ("dflash-specforge", {}, rope(SHORT)),
    ("dflash-specforge", {"rope_theta": None}, rope({"rope_type": "default", "rope_theta": 1e6})),
    # What rows see.
    ("dflash-specforge", {}, rows(None, causal=False)),
    ("dflash-specforge", NARROW, rows(3, causal=True)),
    ("dflash-specforge", NARROW | {f"{INNER}causal": False}, rows(3, causal=False)),
    ("dflash-specforge", NARROW | {"is_causal": False, f"{INNER}causal": True},
     rows(3, causal=False)),
    # As XiaomiMiMo publishes them: a window in layers that are not called sliding.
    ("dflash-specforge", {f"{INNER}use_swa": True, f"{INNER}swa_window_size": 5},
     rows(5, causal=False)),
    ("dflash-specforge", NARROW | {f"{INNER}swa_window_size": 5}, rows(5, causal=True)),
    ("dflash-specforge", {"sliding_window": 3}, rows(None, causal=False)),
    ("dflash-speculators", {"sliding_window_non_causal": True}, rows(9, causal=False)),
    ("dflash-speculators", {"sliding_window_non_causal": None}, rows(9, causal=False)),
    # The class's default, which says nothing of layers without a window.
    ("dflash-speculators", UNWINDOWED, rows(None, causal=False)),
    # The inner part comes first.
    ("dflash-specforge", {"mask_token_id": 9}, {"mask_token_id": 3}),
    ("dflash-specforge", {"mask_token_id": 9, f"{INNER}mask_token_id": None}, {"mask_token_id": 9}),
    ("dflash-specforge", {IDS: [1, 2]}, {"layers": (1, 2)}),
    # speculators filled in masks before it said so; vLLM reads a file without the key so.
    ("dspark-speculators", {"sample_from_anchor": None},
     {"sample_from_anchor": False, "num_draft_tokens": 4}),
    # As speculators trains EAGLE-3 unless told otherwise.
    ("eagle3-speculators",
     {f"{OF_LAYER}layer_types": ["sliding_attention"], f"{OF_LAYER}sliding_window": 2048},
     {"window": 2048}),
    ("eagle3-speculators",
     {f"{OF_LAYER}layer_types": ["full_attention"], f"{OF_LAYER}sliding_window": 2048},
     {"window": None}),
    ("peagle", NARROW, {"window": 3}),
    # What a file of P-EAGLE does not say is as others train it.
    ("peagle", {"num_depths": None}, {"num_draft_tokens": 8}),
    ("peagle", {"num_depths": None, "speculators_config": {"proposal_methods": []}},
     {"num_draft_tokens": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "expected"), READ)
def test_a_config_is_read_as_its_writer_means_it(
    tmp_path: Path, name: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = load_head(change(put(name, tmp_path / "head"), keys)).config
    assert {path: attrgetter(path)(config) for path in expected} == expected


def test_given_layers_replace_those_of_the_config(tmp_path: Path) -> None:
    for name, layers in (("eagle3-speculators", [2, 3, 4]), ("dflash-specforge", [3, 4])):
        folder = str(put(name, tmp_path / name))
        assert load_head(folder, layers=layers).taps.layers == tuple(layers)
        said = rf"reads {len(layers)} hidden states of 64, but .* names \[1\]"
        with pytest.raises(InputError, match=said):
            load_head(folder, layers=[1])
    unset = load_head(str(put("eagle3", tmp_path / "unset")))
    assert unset.taps.layers == ()
    assert unset.attach(target()).taps.layers == (2, 4, 5)
    noisy_head(target()).save(tmp_path / "medusa")
    put("eagle1", tmp_path / "eagle1")
    for name, said in (("eagle1", "an EAGLE-1 head reads"), ("medusa", "a Medusa head reads")):
        with pytest.raises(InputError, match=rf"{said} .* leave head\.layers unset"):
            load_head(str(tmp_path / name), layers=[1])


def test_a_full_vocabulary_may_be_spelled_out(tmp_path: Path) -> None:
    all_ids = {
        "lm_head.weight": torch.randn(96, 64), "d2t": torch.zeros(96, dtype=torch.int64),
        "t2d": torch.ones(96, dtype=torch.bool),
    }  # fmt: skip
    folder = put("eagle3-specforge", tmp_path / "head")
    head = load_head(change(folder, {"draft_vocab_size": 96}, all_ids))
    assert head.vocab.is_full
    assert not {"d2t", "t2d"} & set(head.collect_tensors())


@pytest.mark.parametrize("tied", [True, False])
def test_without_an_output_head_the_target_s_drafts_or_the_tied_embedding(
    tmp_path: Path, tied: bool
) -> None:
    tensors = dict.fromkeys(("lm_head.weight", "d2t", "t2d")) | embedding()
    keys = {"draft_vocab_size": None, "tie_word_embeddings": tied}
    head = load_head(change(put("eagle3", tmp_path / "head"), keys, tensors))
    own = embedding()["embed_tokens.weight"]
    assert head.embed_tokens.weight.equal(own)
    assert head.config.own_output_head is tied
    projected = head.attach(target()).make_projection().weight
    assert projected.equal(own if tied else target().output_head.weight)


def test_the_feature_of_a_peagle_head_may_have_any_shape(tmp_path: Path) -> None:
    flat = {"mask_hidden": made("peagle").mask_hidden.detach().flatten()}
    found = load_head(change(put("peagle", tmp_path / "head"), {}, flat))
    assert found.mask_hidden.equal(made("peagle").mask_hidden)


# --- What is refused.


WIDE = {"full_attention": PLAIN, "sliding_attention": {}}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
FEW = {"d2t": torch.zeros(24, dtype=torch.int64), "lm_head.weight": torch.zeros(24, 64)}
FOREIGN = {
    "model.layers.0.mlp.up_proj.weight": None, "model.layers.0.mlp.router.weight": torch.zeros(4),
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], dict[str, Tensor | None], str]] = [
    ("eagle3", {"num_hidden_layers": 2}, {}, r"num_hidden_layers=2, .* must be 1"),
    ("eagle3", {"hidden_act": "gelu"}, {}, r"hidden_act=gelu, .* must be silu"),
    ("eagle3", {"mlp_bias": True}, {}, r"mlp_bias=True, .* must be False"),
    ("eagle3", {"speculators_model_type": "mtp"}, {}, r"_type=mtp, .* must be eagle3"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, {}, "sliding_window=None: must be a number"),
    ("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 0}, {},
     "sliding_window=0: must be a number of tokens, 1 or more"),
    ("peagle", TWO_KINDS, {}, "windows in some layers are not implemented; must be 2 of sliding_a"),
    ("eagle3", {"fc_norm": True}, {}, r"fc_norm=True, but the file has no fc_norm\.0\.weight"),
    ("eagle3", {"eagle_config": {"norm_before_fc": True}}, {},
     r"norm_before_fc=True, but the file has no input_norm\.weight"),
    ("eagle3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {},
     r"RoPE is dynamic over 1\.0 of"),
    ("eagle3", {"rope_scaling": OLD_LINEAR | {"partial_rotary_factor": 0.5}}, {},
     r"RoPE is linear over 0\.5 of"),
    ("eagle3", {"partial_rotary_factor": 0.5}, {}, r"partial_rotary_factor=0\.5, .* must be 1\.0"),
    ("eagle3", {"rope_scaling": {"rope_type": "yarn"}}, {}, r"config\.json: .*factor"),
    ("eagle3", {"rope_theta": 1e4, "rope_parameters": PLAIN}, {},
     r"rope_theta=10000\.0, but rope_parameters\.rope_theta=500000\.0, and readers differ"),
    ("eagle3", {"rope_theta": 1e4, "rope_scaling": OLD_LINEAR | {"rope_theta": 5e5}}, {},
     r"rope_theta=10000\.0, but rope_scaling\.rope_theta=500000\.0"),
    ("eagle3", {"rope_theta": 5e5, "rope_parameters": PLAIN, "rope_scaling": OLD_LINEAR}, {},
     r"rope_parameters\.rope_type=default, but rope_scaling\.type=linear"),
    ("eagle3", {"rope_parameters": LINEAR | {"factor": 4.0}, "rope_scaling": OLD_LINEAR}, {},
     r"rope_parameters\.factor=4\.0, but rope_scaling\.factor=2\.0"),
    ("eagle3", {"rope_scaling": TWICE | {"type": "yarn"}}, {},
     r"rope_scaling\.type=yarn, but rope_scaling\.rope_type=linear"),
    ("eagle3", {"rope_scaling": {"factor": 8.0}}, {},
     r"has rope_scaling\.factor=8\.0, but no rope_type; add rope_type, one of linear, "),
    ("eagle3", {"rope_parameters": {"factor": 8.0, "rope_theta": 5e5}}, {},
     r"has rope_parameters\.factor=8\.0, but no rope_type"),
    ("eagle3", {"vocab_size": None}, {}, r"config\.json lacks \['vocab_size'\]"),
    ("eagle3", {"draft_vocab_size": 32}, {},
     r"24 of 96 ids by d2t, \[32\] by config\.json, \[24\] by lm_h"),
    ("eagle3", {"target_hidden_size": 32}, {},
     r"\['embed_tokens.weight'\] missing, and the target's do not"),
    ("eagle3", {"num_key_value_heads": 2}, {},
     r"misshapen: \['midlayer\.self_attn\.k_proj\.weight \[32, 12"),
    ("eagle3", {"eagle_config": {IDS: [0, 1, 2]}, IDS: [1, 2, 3]}, {},
     r"ids=\[1, 2, 3\], but eagle_config\.eagle_.*=\[0, 1, 2\]"),
    ("eagle1", {"hot_vocab_size": 32}, {}, r"EAGLE-1 head with a draft voc.*, .* \[32\] by con"),
    ("eagle1", {"hot_vocab_size": 24}, FEW, r"EAGLE-1 head with a draft voc.*, .* 24 of 96 ids"),
    ("peagle", {"mask_token_id": None}, {}, "mask_token_id=None: must be from 0 to 95"),
    ("peagle", {"mask_token_id": 96}, {}, "mask_token_id=96: must be from 0 to 95"),
    ("peagle", {"norm_output": True, "eagle_config": {}}, {}, "norm_output=True, .* must be False"),
    ("peagle", {"num_hidden_layers": 3}, {}, "missing: .'layers.2"),
    ("dflash-specforge", {f"{INNER}sample_from_anchor": True}, {}, "fills in masks.*must be fals"),
    ("dflash-speculators", {"sample_from_anchor": True}, {}, "says sample_from_anchor=True"),
    ("dflash-specforge", {"attention_bias": True}, {}, "attention_bias=True, .* must be False"),
    ("dflash-specforge", {f"{INNER}attention_value_scale": 0.5}, {}, "value_scale=0.5"),
    ("dflash-specforge", {"add_swa_attention_sink_bias": True}, {}, "bias=True, .* must be False"),
    ("dflash-specforge", {"is_neox_style": False}, {}, "is_neox_style=False, .* must be True"),
    ("dflash-specforge", TWO_KINDS | {"rope_parameters": WIDE}, {},
     "another RoPE for each kind of layer, which is not implemented"),
    ("dflash-specforge", {"block_size": None}, {}, "None for block_size: must be a whole number"),
    ("dflash-specforge", {f"{INNER}mask_token_id": None}, {}, "None for mask_token_id"),
    ("dflash-specforge", {f"{INNER}target_layer_ids": None}, {}, r"2 hidden states.*names \[\]"),
    ("dflash-specforge", {IDS: [2, 4]}, {},
     r"target_layer_ids \+ 1=\[1, 2\], but eagle_aux_hidden_state_layer_ids=\[2, 4\]"),
    ("dflash-specforge", {"draft_vocab_size": 24}, {},
     r"96 of 96 ids by d2t, \[24\] by config.json, \[\] by lm_h"),
    ("dflash-specforge", NARROW | {"layer_types": ["sliding_attention"]}, {},
     "layer_types .*: must be 2 of sliding_att"),
    ("dflash-specforge", {"layer_types": ["linear_attention"] * 2}, {},
     "must be 2 of sliding_attention and fu"),
    ("dflash-specforge", TWO_KINDS | {"is_causal": True}, {},
     r"causal in all layers, but layers \[1\] see all"),
    ("dflash-specforge", NARROW | {"sliding_window": None}, {}, "but has no sliding_window"),
    ("dflash-specforge", {"layer_types": None, "num_hidden_layers": 1}, {},
     r"foreign: \['layers.1.input_layernorm.weight'"),
    # Every tensor is accounted for, by the name of the file.
    ("eagle3", {}, {"midlayer.hidden_norm.weight": None},
     r"missing: \['midlayer\.hidden_norm\.weight'\]$"),
    ("eagle3", {}, {"midlayer.mlp.up_proj.bias": torch.zeros(96)},
     r"foreign: \['midlayer\.mlp\.up_proj\.bias'\]$"),
    ("eagle3", {}, {"midlayer.self_attn.o_proj.bias": torch.zeros(64)},
     r"foreign: \['midlayer\.self_attn\.o_proj\.bias"),
    ("eagle3", {}, {"norm.weight": torch.zeros(65)},
     r"misshapen: \['norm\.weight \[65\], not \[64\]'\]$"),
    ("eagle3", {}, {"fc.weight": torch.zeros(64, 128)},
     r"fc\.weight \[64, 128\] reads 2 hidden states of 64, .* which is 3"),
    ("eagle3", {}, {"lm_head.weight": None}, r"lm_head\.weight is missing.* 24 of 96 ids"),
    ("eagle3", {}, {"d2t": None}, r"draft voc.* disagree: 96 of 96 ids by d2t, \[24\] by"),
    ("eagle3", {}, {"fc_norm.0.weight": torch.zeros(64)},
     r"missing: \['fc_norm\.1\.weight', 'fc_norm\.2\.weight'\]$"),
    ("eagle3", {}, {"model.fc.weight": torch.zeros(64, 192)},
     r"the same tensor appears twice, as model\.fc\.weight and fc\."),
    ("eagle3", {}, {"fc.weight": torch.zeros(64, 192).to(torch.float8_e4m3fn)},
     r"fc\.weight is torch.float8_e4m3fn, but a quantised head cannot be"),
    ("eagle3", {}, {"fc.weight": torch.zeros(64, 192).to(torch.int8)}, r"fc\.weight is torch.int8"),
    ("eagle3-modelopt", {}, FOREIGN,
     r"missing: \['model\.layers\.0\.mlp\.up_.*foreign: \['model\.layers\.0\.mlp\.router"),
    ("dflash-specforge", {}, {"mask_hidden": torch.zeros(1, 192)}, "belongs to a P-EAGLE head"),
    ("dflash-specforge", {}, {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 64)},
     r"foreign: \['layers.0.attention_c"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "tensors", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    name: str,
    keys: dict[str, Any],
    tensors: dict[str, Tensor | None],
    message: str,
) -> None:
    folder = change(put(name, tmp_path / "head"), keys, tensors)
    with pytest.raises(InputError, match=message) as caught:
        load_head(folder)
    assert str(caught.value).startswith(f"head.path={folder}: ")


def test_a_peagle_head_that_names_no_layers_is_not_read(tmp_path: Path) -> None:
    build(target(), "peagle", layers=[0, 1, 2]).save(tmp_path / "head")
    with pytest.raises(InputError, match=r"config\.json names no layers"):
        load_head(change(tmp_path / "head", {IDS: None, "eagle_config": {}}))


def test_pickles_are_never_opened_and_broken_files_are_named(tmp_path: Path) -> None:
    (put("dflash-specforge", tmp_path / "blocks") / "mask_embedding.pt").touch()
    with pytest.raises(InputError, match=r"mask_embedding.pt: a separate pick"):
        load_head(str(tmp_path / "blocks"))
    folder = put("eagle3", tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = r"no \*\.safetensors there; .*never opened; .*head\.revision=refs/pr/1, or convert"
    with pytest.raises(InputError, match=message):
        load_head(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"head\.path=.*: config\.json is not JSON"):
        load_head(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json there"):
        load_head(str(folder))
    with pytest.raises(InputError, match=r"head\.path=.*no such folder"):
        load_head(str(tmp_path / "nope"))


def test_a_hub_id_is_resolved_once_and_named_in_errors(tmp_path: Path, monkeypatch) -> None:
    folder, asked = put("eagle3-speculators", tmp_path / "snapshot"), []

    def download(path: str, revision: str | None, **_: Any) -> str:
        asked.append((path, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_head("me/head", "refs/pr/1", [1, 2, 4]).taps.layers == (1, 2, 4)
    assert asked == [("me/head", "refs/pr/1")]
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"head\.path=me/head: no \*\.safetensors"):
        load_head("me/head")
