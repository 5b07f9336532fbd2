"""The parity gate: what it lets through, and every fault that it must not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    absolute,
    both_ropes,
    change,
    copied,
    drop,
    eagle,
    edited,
    edited_json,
    halves_swapped,
    layers,
    old_spelling,
    put,
    shaken,
    swapped,
    write_eagle,
    write_medusa,
)
from toys import noisy_head, random_target

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from eval.parity.gate import TOLERANCE, check_parity
from heads.eagle.head import EagleHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

WEIGHTS, CONFIG, NOTE = "model.safetensors", "config.json", "headsmith.json"
FAR = {"num_hidden_layers": 6, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
E31 = {"fc_norm": True, "norm_output": True}


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(**FAR)


@pytest.fixture(scope="module")
def good(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per kind of head, that nothing is wrong with."""
    root = tmp_path_factory.mktemp("good")
    write_eagle(root / "eagle3", eagle(target, num_ids=40), target)
    write_eagle(root / "eagle31", eagle(target, **E31), target)
    write_eagle(root / "eagle1", eagle(target, EagleForm.eagle1), target)
    write_medusa(root / "medusa", noisy_head(target), target)
    scaled = random_target(**FAR, rope_parameters=LLAMA3)
    write_eagle(root / "llama3", eagle(scaled), scaled, rope_scaling=old_spelling(LLAMA3))
    return root


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {"num_ids": 40}),
        ("eagle3", {"layers": [1, 3]}),
        ("eagle3", {"norm_before_residual": True, **E31}),
        ("eagle1", {}),
    ],
)
def test_a_good_export_gives_the_trained_logits(
    target: Target, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    head = eagle(target, EagleForm[kind], **settings)
    count = {"num_aux_hidden_states": len(head.config.layers)} if kind == "eagle3" else {}
    verdict = check_parity(write_eagle(tmp_path / "export", head, target, **count))
    assert verdict.max_difference < TOLERANCE * verdict.scale / 2
    assert f"format vllm, head {kind}" in verdict.lines[0]


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_that_a_head_can_have_is_read(tmp_path: Path, rope: str) -> None:
    target = random_target(**FAR, rope_parameters=ROPES[rope])
    old = None if rope == "default" else old_spelling(ROPES[rope])
    check_parity(write_eagle(tmp_path / "export", eagle(target), target, rope_scaling=old))


def test_a_qwen3_head_with_its_own_embedding_and_one_norm_over_all_features(
    target: Target, tmp_path: Path
) -> None:
    config = replace(eagle(target).config, qk_norm=True, norm_before_fc=True, own_embedding=True)
    head = shaken(EagleHead(config, DraftVocab.everything(target.vocab_size)).attach(target))
    check_parity(write_eagle(tmp_path / "export", head, target))


def test_a_head_that_uses_the_targets_output_head(target: Target, tmp_path: Path) -> None:
    config = replace(eagle(target).config, own_output_head=False)
    head = shaken(EagleHead(config, DraftVocab.everything(target.vocab_size)).attach(target))
    folder = write_eagle(tmp_path / "export", head, target, draft_vocab_size=target.vocab_size)
    assert "the target's output head" in check_parity(folder).lines[-1]


def test_medusa_under_the_names_of_the_authors_and_of_vllm(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "medusa")
    assert check_parity(folder).max_difference == 0
    with edited(folder / "medusa_lm_head.safetensors") as tensors:
        for name in list(tensors):
            head, layer, *rest = name.split(".")
            block = f"blocks.{head}.layers.{layer}.{rest[-1]}"
            new = block if rest[0] == "linear" else f"lm_heads.{head}.weight"
            tensors[new] = tensors.pop(name)
    assert check_parity(folder).max_difference == 0


DIFFER = "logits of the served head differ"
PROJECTIONS = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
MLP = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up")]
BROKEN_TENSORS = {
    "d2t holds absolute ids": ("eagle3", absolute, "absolute target ids"),
    "t2d marks other ids": ("eagle3", change("t2d", lambda t: t.roll(1)), "other ids than t2d"),
    "d2t is missing": ("eagle3", drop("d2t"), r"missing: \['d2t'\]"),
    "d2t is of floats": ("eagle3", change("d2t", torch.Tensor.float), "d2t is of torch.float32"),
    "d2t names an id twice": (
        "eagle3",
        lambda t: (t.pop("t2d"), t["d2t"][1:2].copy_(t["d2t"][:1] - 1)),
        "same id twice",
    ),
    "d2t leads elsewhere, unmarked": (
        "eagle3",
        lambda t: (t.pop("t2d"), t["d2t"][-1:].sub_(1)),
        "can draft different ids",
    ),
    "lm_head is missing": ("eagle3", drop("lm_head.weight"), "lm_head.weight is missing"),
    "a norm is missing": ("eagle3", drop("norm.weight"), r"missing: \['norm.weight'\]"),
    "a tensor too many": (
        "eagle3", put("fc.bias", torch.zeros(64)), r"not read: \['fc.bias'\]",
    ),
    "a tensor under a foreign name": (
        "eagle1",
        lambda t: t.update({"midlayer.mlp.up_proj.weight": t.pop("layers.0.mlp.up_proj.weight")}),
        "missing: .*not read: .*midlayer",
    ),
    "a tensor under two names": (
        "eagle3",
        lambda t: t.update({"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"]}),
        "under two names",
    ),
    "a tensor is misshapen": (
        "eagle3", change("fc.weight", lambda t: t[:, :-1]), r"fc.weight is \[64, 191\]",
    ),
    "a tensor holds NaN": (
        "eagle3", lambda t: t["fc.weight"][0, :1].fill_(float("nan")), "fc.weight: 1 values",
    ),
    "a tensor is of another dtype": (
        "eagle3", change("fc.weight", lambda t: t.bfloat16()), "dtypes of its floats",
    ),
    "a tensor was rounded to bfloat16": (
        "eagle3", change("fc.weight", lambda t: t.bfloat16().float()), DIFFER,
    ),
    "norms of two features are swapped": (
        "eagle31", swapped("fc_norm.0.weight", "fc_norm.1.weight"), DIFFER,
    ),
    "embedding and feature in the wrong order": (
        "eagle3", halves_swapped(*PROJECTIONS), DIFFER,
    ),
    "the same in EAGLE-1": ("eagle1", halves_swapped("fc.weight"), DIFFER),
    "gate and up are swapped": ("eagle3", swapped(*MLP), DIFFER),
    "the two norms of the input are swapped": (
        "eagle3",
        swapped("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"),
        DIFFER,
    ),
    "two Medusa heads are swapped": ("medusa", swapped("0.1.weight", "1.1.weight"), DIFFER),
    "a Medusa head is missing": ("medusa", drop("2.1.weight"), r"missing: \['2.1.weight'\]"),
    "a Medusa head under two names": (
        "medusa",
        lambda t: t.update({"lm_heads.0.weight": t["0.1.weight"]}),
        "under two names",
    ),
    "a Medusa bias is misshapen": (
        "medusa", change("0.0.linear.bias", lambda t: t[1:]), "0.0.linear.bias is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_TENSORS)
def test_a_fault_in_the_weights_is_named(good: Path, tmp_path: Path, fault: str) -> None:
    kind, breaks, message = BROKEN_TENSORS[fault]
    folder = copied(good, tmp_path, kind)
    with edited(next(folder.glob("*.safetensors"))) as tensors:
        breaks(tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


BROKEN_CONFIGS = {
    "layers off by one": ("eagle3", layers(0, 2, 4), r"trained on \[1, 3, 5\]"),
    "layers in another order": ("eagle3", layers(3, 1, 5), "in rising order"),
    "a layer after the final norm": ("eagle3", layers(1, 3, 6), "before the final norm"),
    "layers in one place alone": (
        "eagle3",
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
        "other place for it",
    ),
    "no layers": (
        "eagle3",
        lambda c: (c.pop("eagle_aux_hidden_state_layer_ids"), c.pop("eagle_config")),
        "eagle_aux_hidden_state_layer_ids is absent",
    ),
    "layers counted otherwise": ("eagle3", put("num_aux_hidden_states", 4), "num_aux_hidden"),
    "norm_before_residual absent": (
        "eagle3", drop("norm_before_residual"), "norm_before_residual is absent",
    ),
    "norm_output absent": ("eagle3", drop("norm_output"), "norm_output is absent"),
    "fc_norm absent": ("eagle3", drop("fc_norm"), "fc_norm is absent"),
    "norm_before_fc absent": ("eagle3", drop("norm_before_fc"), "norm_before_fc is absent"),
    "norm_before_residual flipped": ("eagle3", put("norm_before_residual", True), DIFFER),
    "norm_output flipped": ("eagle31", put("norm_output", False), DIFFER),
    "fc_norm flipped": ("eagle31", put("fc_norm", False), "not read: .*fc_norm"),
    "a flag in two places": (
        "eagle3",
        lambda c: c["eagle_config"].update(norm_before_fc=True),
        "other place for it",
    ),
    "a flag as text": ("eagle3", put("norm_output", "false"), "a value of type bool"),
    "another theta": ("eagle3", both_ropes(theta=500000.0), DIFFER),
    "half of the head turned": ("eagle3", both_ropes(partial_rotary_factor=0.5), DIFFER),
    "scaling dropped": ("llama3", both_ropes(), DIFFER),
    "scaling dropped from one spelling": (
        "llama3", put("rope_scaling", None), "two spellings of RoPE disagree",
    ),
    "theta in one spelling alone changed": (
        "eagle3", put("rope_theta", 500000.0), "two spellings of RoPE disagree",
    ),
    "a RoPE that heads have not": (
        "eagle3", both_ropes(rope_type="dynamic", factor=2.0), "dynamic",
    ),
    "two kinds of RoPE in one spelling": (
        "llama3", lambda c: c["rope_scaling"].update(type="yarn"), "type is 'yarn'",
    ),
    "a RoPE without its factor": (
        "eagle3", both_ropes(rope_type="linear"), "the key 'factor' for linear",
    ),
    "no theta": ("eagle3", drop("rope_theta", "rope_parameters"), "rope_theta is absent"),
    "positions cut": ("eagle3", put("max_position_embeddings", 2048), "max_position_embeddings"),
    "another vocabulary": ("eagle3", put("vocab_size", 128), "vocab_size is 128"),
    "another draft vocabulary": ("eagle3", put("draft_vocab_size", 32), "is .40.*32"),
    "no draft vocabulary": ("eagle3", drop("draft_vocab_size"), "draft_vocab_size is absent"),
    "another epsilon": ("eagle3", put("rms_norm_eps", 0.1), DIFFER),
    "a bias that vLLM gives the attention": ("eagle3", put("bias", True), "bias is True"),
    "a scale of the logits": ("eagle3", put("logit_scale", 2.0), DIFFER),
    "another class": ("eagle3", put("architectures", ["LlamaModel"]), "architectures"),
    "a part that is no object": ("eagle3", put("eagle_config", [2]), "needs an object"),
    "a Qwen3 layer in EAGLE-1": ("eagle1", put("model_type", "qwen3"), "model_type is 'qwen3'"),
    "a layer of another family": ("eagle3", put("model_type", "mistral"), "is 'mistral'"),
    "two layers": ("eagle3", put("num_hidden_layers", 2), "num_hidden_layers is 2"),
    "another activation": ("eagle3", put("hidden_act", "gelu"), "hidden_act is 'gelu'"),
    "a sliding window": (
        "eagle3", put("layer_types", ["sliding_attention"]), "layer_types is",
    ),
    "biases of the attention by another name": ("eagle3", put("qkv_bias", True), "qkv_bias"),
    "one feature, unfused": (
        "eagle3", lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux",
    ),
    "another dtype": ("eagle3", put("dtype", "bfloat16"), "must be one of"),
    "Medusa's vocabulary absent": ("medusa", drop("vocab_size"), "takes 32001"),
    "Medusa's biases dropped": (
        "medusa", put("medusa_fc_bias", False), "not read: .*0.0.linear.bias",
    ),
    "fewer Medusa heads": ("medusa", put("medusa_num_heads", 2), "not read: .*2.1.weight"),
    "Medusa as another class": ("medusa", put("architectures", ["Medusa"]), "architectures"),
    "Medusa as another model": ("medusa", put("model_type", "llama"), "model_type is 'llama'"),
    "Medusa of another width": ("medusa", put("hidden_size", 32), "hidden_size is 32"),
    "Medusa over some ids": ("medusa", put("truncated_vocab_size", 40), "truncated_vocab_size"),
    "Medusa with one output head": ("medusa", put("original_lm_head", True), "original_lm_head"),
    "two numbers of Medusa heads": ("medusa", put("num_attention_heads", 8), "disagree"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_CONFIGS)
def test_a_fault_in_the_config_is_named(good: Path, tmp_path: Path, fault: str) -> None:
    kind, breaks, message = BROKEN_CONFIGS[fault]
    folder = copied(good, tmp_path, kind)
    with edited_json(folder / CONFIG) as config:
        breaks(config)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_layers_off_by_one_show_in_the_logits_too(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "eagle3")
    with edited_json(folder / CONFIG) as config, edited_json(folder / NOTE) as note:
        layers(0, 2, 4)(config)
        note["export"]["layers"] = [0, 2, 4]
    with pytest.raises(InputError, match=rf"{DIFFER}.* at depth \d, row \d+"):
        check_parity(folder)
