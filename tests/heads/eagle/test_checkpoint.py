import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from exports import build, made, toy_target
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import noisy_head, random_model, random_target

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleHeadConfig
from heads.eagle.peagle import PEagleHead
from heads.kinds import find_kind_name, load_head
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.layers.llama import make_llama_config
from heads.medusa import MedusaHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

TEXT = [5, 17, 3, 88, 41, 2, 60, 9, 33, 71]
IDS = "eagle_aux_hidden_state_layer_ids"
SHORT = {"rope_type": "default", "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
OLD_LINEAR, MROPE = {"type": "linear", "factor": 2.0}, {"type": "mrope", "mrope_section": [16, 24]}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(random_model("llama", num_hidden_layers=4), None, "toy")


@torch.no_grad()
def drafted(head: EagleHead, target: Target) -> Tensor:
    """[3, S, W] logits of three depths behind each token of a text."""
    head.attach(target)
    ids = torch.tensor(TEXT)
    places = torch.arange(len(ids) - 1)
    features = head.collect_features(target.encode_text(TEXT[:-1], head.taps))[0]
    text = head.encode_context(head.fuse(features), ids[1:], places)
    allowed = build_causal_range(Documents.from_length(len(places), torch.device("cpu")), places)
    unrolled = head.unroll(
        text, ids, places, BranchCache(text.keys[None], text.values[None], allowed)
    )
    return torch.stack([head.compute_logits(next(unrolled)) for _ in range(3)])


def change(
    folder: Path, edit: Callable[[dict[str, Tensor]], object] | None = None, **keys: Any
) -> str:
    """Changes the tensors and the settings of a folder."""
    config = json.loads((folder / "config.json").read_text()) | keys
    tensors = load_file(folder / "model.safetensors")
    if edit is not None:
        edit(tensors)
    return str(layouts.write(folder, config, tensors))


FLAGS: dict[str, dict[str, Any]] = {
    "eagle1": {"fc_bias": True, "own_embedding": True},
    "eagle1_qwen2": {"fc_bias": True, "own_embedding": True},
    "eagle1_vllm": {},
    "eagle1_vllm_first": {"own_embedding": True},
    "eagle3": {},
    "specforge": {"own_embedding": True},
    "sglang_eagle31": {"fc_norm": True, "norm_output": True},
    "modelopt": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "speculators": {"own_embedding": True, "layers": (1, 2, 3), "target": "meta/toy"},
}


@pytest.mark.parametrize("name", layouts.WRITERS)
def test_every_layout_loads(tmp_path: Path, target: Target, name: str) -> None:
    head = load_head(str(layouts.write_published(*layouts.WRITERS[name], tmp_path)))
    form = EagleForm.eagle1 if "eagle1" in name else EagleForm.eagle3
    config = EagleHeadConfig(
        form=form, llama=head.config.llama, target="unknown", target_hidden_size=64
    )
    assert vars(head.config) == vars(config) | FLAGS[name]
    assert head.config.llama.attention_bias == (name == "eagle1_qwen2")
    ids = range(96) if form is EagleForm.eagle1 else range(1, 96, 4)
    assert head.vocab.ids.tolist() == list(ids)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert drafted(head, target).isfinite().all()


def test_the_same_weights_draft_the_same_in_every_layout(tmp_path, target) -> None:
    embed = target.decoder.get_input_embeddings().weight
    folders = [
        layouts.eagle3(tmp_path / "original", torch.float32),
        layouts.specforge(tmp_path / "specforge", torch.float32, embed),
        layouts.speculators(tmp_path / "speculators", torch.float32, embed),
    ]
    # The default layers of a target of 4 are those that the speculators file names: 1, 2, 3.
    original, specforge, speculators = (
        drafted(load_head(str(folder)), target) for folder in folders
    )
    assert original.abs().max() > 0.1
    assert torch.equal(original, specforge)
    assert torch.equal(original, speculators)
    load_head(str(folders[0])).save(tmp_path / "ours")
    assert torch.equal(original, drafted(load_head(str(tmp_path / "ours")), target))


def test_what_only_published_heads_have_survives_a_round_trip(tmp_path, target) -> None:
    config = EagleHeadConfig(
        form=EagleForm.eagle3,
        llama=make_llama_config(target.config, 96),
        target="toy",
        target_hidden_size=64,
        own_output_head=False,
        own_embedding=True,
        qk_norm=True,
        norm_before_fc=True,
    )
    config.llama.attention_bias = True
    head = EagleHead(config, DraftVocab.make_full(96))
    head.save(tmp_path / "head")
    loaded = load_head(str(tmp_path / "head"))
    assert loaded.config == config
    assert torch.equal(drafted(head, target), drafted(loaded, target))


def test_weights_in_shards_load(tmp_path, target) -> None:
    whole = layouts.eagle3(tmp_path / "head", torch.float32)
    expected = drafted(load_head(str(whole)), target)
    tensors = load_file(whole / "model.safetensors")
    (whole / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:5], names[5:]), start=1):
        file = whole / f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file)
    assert torch.equal(expected, drafted(load_head(str(whole)), target))
    save_file({"model.fc.weight": tensors["fc.weight"]}, whole / "model-extra.safetensors")
    with pytest.raises(
        InputError, match=r"the same tensor appears twice, as fc\.weight and model\.fc\."
    ):
        load_head(str(whole))


def test_a_full_vocabulary_may_be_spelled_out(tmp_path) -> None:
    def spell_out(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.randn(96, 64)
        tensors["d2t"] = torch.zeros(96, dtype=torch.int64)
        tensors["t2d"] = torch.ones(96, dtype=torch.bool)

    folder = layouts.specforge(tmp_path / "head")
    head = load_head(change(folder, spell_out, draft_vocab_size=96))
    assert head.vocab.is_full
    assert not {"d2t", "t2d"} & set(head.collect_tensors())


def test_without_an_output_head_the_targets_drafts(tmp_path, target) -> None:
    def share(tensors: dict[str, Tensor]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]

    head = load_head(change(layouts.eagle3(tmp_path / "head"), share, draft_vocab_size=None))
    assert not head.config.own_output_head
    assert drafted(head, target).shape == (3, len(TEXT) - 1, 96)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_that_is_tied_is_the_heads_own_embedding(
    tmp_path: Path, target: Target, tied: bool
) -> None:
    def take_no_head(tensors: dict[str, Tensor]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
        tensors |= layouts.embedding()

    folder = layouts.eagle3(tmp_path / "head", torch.float32)
    path = change(folder, take_no_head, draft_vocab_size=None, tie_word_embeddings=tied)
    head = load_head(path)
    own = layouts.embedding()["embed_tokens.weight"]
    assert torch.equal(head.embed_tokens.weight, own)
    assert head.config.own_output_head is tied
    projected = head.attach(target).make_projection().weight
    assert torch.equal(projected, own if tied else target.output_head.weight)


@pytest.mark.parametrize(("stated", "expected"), [(None, False), (False, False), (True, True)])
def test_an_absent_norm_before_residual_is_false(tmp_path, stated, expected: bool) -> None:
    folder = change(layouts.speculators(tmp_path / "head"), norm_before_residual=stated)
    assert load_head(folder).config.norm_before_residual is expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, SHORT),
        ({"rope_theta": 5e5, "rope_scaling": None}, PLAIN),
        ({"rope_theta": 5e5, "rope_parameters": PLAIN}, PLAIN),
        ({"rope_theta": 5e5, "rope_scaling": OLD_LINEAR}, LINEAR),
        ({"rope_scaling": MROPE}, SHORT),
        ({"rope_theta": 500000, "rope_parameters": LINEAR,
          "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, LINEAR),
        ({"rope_scaling": MROPE, "rope_parameters": PLAIN}, PLAIN),
        ({"rope_scaling": OLD_LINEAR, "rope_parameters": {"rope_theta": 5e5}}, LINEAR),
        ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": SHORT}}, PLAIN),
    ],
)  # fmt: skip
def test_old_and_new_spellings_of_rope(tmp_path, keys: dict[str, Any], expected) -> None:
    head = load_head(change(layouts.eagle3(tmp_path / "head"), **keys))
    assert head.config.llama.rope_parameters == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_head_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = layouts.eagle3(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=rf"fc\.weight is {dtype}, but a quantised head cannot be"):
        load_head(str(folder))


def test_given_layers_replace_those_of_the_config(tmp_path, target) -> None:
    folder = str(layouts.speculators(tmp_path / "head"))
    assert load_head(folder).taps.layers == (1, 2, 3)
    assert load_head(folder, layers=[2, 3, 4]).taps.layers == (2, 3, 4)
    nested = layouts.eagle3(tmp_path / "nested")
    change(nested, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    assert load_head(str(nested)).taps.layers == (0, 1, 2)
    change(nested, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with pytest.raises(
        InputError, match=r"ids=\[1, 2, 3\], but eagle_config\.eagle_.*=\[0, 1, 2\]"
    ):
        load_head(str(nested))
    unset = load_head(str(layouts.eagle3(tmp_path / "unset")))
    assert unset.taps.layers == ()
    assert unset.attach(target).taps.layers == (1, 2, 3)
    with pytest.raises(InputError, match=r"reads 3 hidden states of 64, but .* names \[1, 2\]"):
        load_head(folder, layers=[1, 2])
    with pytest.raises(InputError, match=r"EAGLE-1 .* leave head\.layers unset"):
        load_head(str(layouts.eagle1(tmp_path / "eagle1")), layers=[1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 2}, r"num_hidden_layers=2, .* must be 1"),
        ({"hidden_act": "gelu"}, r"hidden_act=gelu, .* must be silu"),
        ({"mlp_bias": True}, r"mlp_bias=True, .* must be False"),
        ({"speculators_model_type": "mtp"}, r"speculators_model_type=mtp, .* must be eagle3"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types=\['sliding_attention'\]"),
        ({"fc_norm": True}, r"fc_norm=True, but the file has no fc_norm\.0\.weight"),
        (
            {"eagle_config": {"norm_before_fc": True}},
            r"norm_before_fc=True, but the file has no input_norm\.weight",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"RoPE is dynamic over 1\.0 of"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5, .* must be 1\.0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"config\.json: .*factor"),
        (
            {"rope_theta": 1e4, "rope_parameters": PLAIN},
            r"rope_theta=10000\.0, but rope_parameters\.rope_theta=500000\.0, and readers differ",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": OLD_LINEAR | {"rope_theta": 5e5}},
            r"rope_theta=10000\.0, but rope_scaling\.rope_theta=500000\.0",
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": PLAIN, "rope_scaling": OLD_LINEAR},
            r"rope_parameters\.rope_type=default, but rope_scaling\.type=linear",
        ),
        (
            {"rope_parameters": LINEAR | {"factor": 4.0}, "rope_scaling": OLD_LINEAR},
            r"rope_parameters\.factor=4\.0, but rope_scaling\.factor=2\.0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
            r"rope_scaling\.type=yarn, but rope_scaling\.rope_type=linear",
        ),
        (
            {"rope_scaling": {"factor": 8.0}},
            r"has rope_scaling\.factor=8\.0, but no rope_type; add rope_type, one of linear, ",
        ),
        (
            {"rope_parameters": {"factor": 8.0, "rope_theta": 5e5}},
            r"has rope_parameters\.factor=8\.0, but no rope_type",
        ),
        ({"vocab_size": None}, r"config\.json lacks \['vocab_size'\]"),
        ({"draft_vocab_size": 32}, r"24 of 96 ids by d2t, \[32\] by config\.json, \[24\] by lm_h"),
        ({"target_hidden_size": 32}, r"\['embed_tokens.weight'\] missing, and the target's do not"),
        ({"num_key_value_heads": 2}, r"misshapen: \['midlayer\.self_attn\.k_proj\.weight \[32, 12"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, keys, message: str) -> None:
    folder = change(layouts.eagle3(tmp_path / "head"), **keys)
    with pytest.raises(InputError, match=message) as caught:
        load_head(folder)
    assert str(caught.value).startswith(f"head.path={folder}: ")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("midlayer.hidden_norm.weight", None, r"missing: \['midlayer\.hidden_norm\.weight'\]$"),
        ("midlayer.mlp.up_proj.bias", [96], r"foreign: \['midlayer\.mlp\.up_proj\.bias'\]$"),
        ("midlayer.self_attn.o_proj.bias", [64], r"foreign: \['midlayer\.self_attn\.o_proj\.bias"),
        ("norm.weight", [65], r"misshapen: \['norm\.weight \[65\], not \[64\]'\]$"),
        (
            "fc.weight",
            [64, 128],
            r"fc\.weight \[64, 128\] reads 2 hidden states of 64, .* which is 3",
        ),
        ("lm_head.weight", None, r"lm_head\.weight is missing.* 24 of 96 ids"),
        ("d2t", None, r"draft vocabularies disagree: 96 of 96 ids by d2t, \[24\] by"),
        ("fc_norm.0.weight", [64], r"missing: \['fc_norm\.1\.weight', 'fc_norm\.2\.weight'\]$"),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path, name: str, shape, message: str) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)

    folder = change(layouts.eagle3(tmp_path / "head"), edit)
    with pytest.raises(InputError, match=message):
        load_head(folder)


def test_missing_and_foreign_tensors_have_the_names_of_the_file(tmp_path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.router.weight"] = torch.zeros(4, 64)

    folder = change(layouts.modelopt(tmp_path / "head"), edit)
    message = r"missing: \['model\.layers\.0\.mlp\.up_.*foreign: \['model\.layers\.0\.mlp\.router"
    with pytest.raises(InputError, match=message):
        load_head(folder)


def test_an_eagle1_head_with_a_draft_vocabulary_is_refused(tmp_path) -> None:
    def reduce(tensors: dict[str, Tensor]) -> None:
        ids = torch.arange(24)
        tensors |= {"d2t": torch.zeros_like(ids), "lm_head.weight": torch.zeros(24, 64)}

    folder = layouts.eagle1(tmp_path / "head")
    with pytest.raises(InputError, match=r"EAGLE-1 head with a draft vocabulary, .* \[32\] by con"):
        load_head(change(folder, hot_vocab_size=32))
    with pytest.raises(InputError, match=r"EAGLE-1 head with a draft vocabulary, .* 24 of 96 ids"):
        load_head(change(folder, reduce, hot_vocab_size=24))


def test_pickled_weights_are_never_opened(tmp_path) -> None:
    folder = layouts.eagle3(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = r"no \*\.safetensors there; .*never opened; .*head\.revision=refs/pr/1, or convert"
    with pytest.raises(InputError, match=message):
        load_head(str(folder))


def test_broken_files_are_named(tmp_path) -> None:
    folder = layouts.eagle3(tmp_path / "head")
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"head\.path=.*: config\.json is not JSON"):
        load_head(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json there"):
        load_head(str(folder))
    with pytest.raises(InputError, match=r"head\.path=.*no such folder"):
        load_head(str(tmp_path / "nope"))


def test_load_head_tells_medusa_from_eagle(tmp_path) -> None:
    noisy_head(random_target()).save(tmp_path / "medusa")
    assert isinstance(load_head(str(tmp_path / "medusa")), MedusaHead)
    assert isinstance(load_head(str(layouts.eagle3(tmp_path / "eagle"))), EagleHead)
    with pytest.raises(InputError, match=r"a Medusa head reads .* leave head\.layers unset"):
        load_head(str(tmp_path / "medusa"), layers=[1, 2, 3])


def test_a_hub_id_is_resolved_once_and_named_in_errors(tmp_path, monkeypatch) -> None:
    folder = layouts.speculators(tmp_path / "snapshot")
    asked = []

    def download(path: str, revision: str | None, **_: Any) -> str:
        asked.append((path, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_head("me/head", "refs/pr/1", [1, 2, 4]).taps.layers == (1, 2, 4)
    assert asked == [("me/head", "refs/pr/1")]
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"head\.path=me/head: no \*\.safetensors"):
        load_head("me/head")


# --- P-EAGLE.


@pytest.fixture
def peagle(tmp_path: Path) -> tuple[PEagleHead, Path]:
    made("peagle").save(tmp_path / "head")
    return made("peagle"), tmp_path / "head"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id=None: must be from 0 to 95"),
        ({"mask_token_id": 96}, "mask_token_id=96: must be from 0 to 95"),
        ({"norm_output": True, "eagle_config": {}}, "norm_output=True, .* must be False"),
        ({"num_hidden_layers": 3}, "missing: .'layers.2"),
    ],
)
def test_peagle_files_that_are_not_read(peagle, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_head(change(peagle[1], **keys))


def test_a_peagle_head_that_names_no_layers_is_not_read(tmp_path: Path) -> None:
    build(toy_target(), "peagle", layers=[0, 1, 2]).save(tmp_path / "head")
    with pytest.raises(InputError, match=r"config\.json names no layers"):
        load_head(change(tmp_path / "head", **{IDS: None, "eagle_config": {}}))


@pytest.mark.parametrize("plan", [{}, {"speculators_config": {"proposal_methods": []}}])
def test_what_a_peagle_file_does_not_say_is_as_others_train_it(peagle, plan) -> None:
    """8 tokens; the feature may have any shape."""
    head, folder = peagle

    def flatten(tensors: dict[str, Tensor]) -> None:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()

    again = load_head(change(folder, flatten, num_depths=None, **plan))
    assert again.config.num_draft_tokens == 8
    assert again.mask_hidden.equal(head.mask_hidden)


def test_an_eagle_head_is_not_taken_for_one(peagle, tmp_path: Path) -> None:
    assert find_kind_name(load_head(str(peagle[1]))) == "peagle"
    assert find_kind_name(load_head(str(layouts.eagle3(tmp_path / "eagle")))) == "eagle"
