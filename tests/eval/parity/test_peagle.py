"""Exports of P-EAGLE heads: each passes the independent reader, and no fault does."""

import json
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from exports import config_of, toy_target
from feature_heads import MASK, fresh, settings_of
from safetensors.torch import load_file, save_file

from conf.errors import InputError
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.eagle.peagle import PEagleHead
from heads.export.writer import check_format
from heads.kinds import find_kind_name, load_head
from heads.target_model.model import Target
from tests.eval.parity.test_blocks import LOGITS, able, config, exported, tensor

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"fc_norm": True, "norm_before_residual": True, "num_layers": 3},
    "all ids": {"draft_vocab_size": None, "num_layers": 1},
}
IDS = "eagle_aux_hidden_state_layer_ids"


def made(target: Target, name: str) -> PEagleHead:
    """A random head, none of whose weights is a one or a zero."""
    head = fresh(target, settings_of("peagle", **KINDS[name]))
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.fixture(scope="module")
def heads(target: Target) -> dict[str, PEagleHead]:
    return {name: made(target, name) for name in KINDS}


def test_which_engine_takes_which_head(heads) -> None:
    assert {name: able(head) for name, head in heads.items()} == {
        "plain": ["vllm", "speculators"],
        "normed": ["vllm"],
        "all ids": ["vllm", "speculators"],
    }
    with pytest.raises(InputError, match="loads no P-EAGLE heads"):
        check_format(heads["plain"], ExportFormat.sglang)
    with pytest.raises(InputError, match=r"no place for a norm per feature \(fc_norm\)"):
        check_format(heads["normed"], ExportFormat.speculators)
    facts = heads["plain"].build_card_facts({}, None)
    assert (facts.vllm_method, facts.vllm_settings) == ("eagle3", {"parallel_drafting": True})
    assert "drafts 4 tokens in one pass" in facts.description


@pytest.mark.parametrize("name", KINDS)
def test_every_export_is_the_trained_head_and_reads_back(
    target: Target, heads, name: str, tmp_path: Path
) -> None:
    head = heads[name]
    text = [5, 17, 40, 8, 77, 23, 61, 9, 30]
    output = target.encode_response(text[:3], text[3:], head.taps)
    expected = head.compute_candidates(output, text, 2, 4, 3)
    head.save(tmp_path / "own")
    folders = {"own": tmp_path / "own"}
    for engine in able(head):
        folders[engine] = exported(head, target, engine, tmp_path / engine)
        verdict = check_parity(folders[engine])
        assert verdict.max_difference < 1e-4 * verdict.scale
        command = head.plan_export(ExportFormat(engine), engine).command
        assert ('"parallel_drafting": true' in command) == (engine == "vllm")
    for folder in folders.values():
        again = load_head(str(folder))
        assert isinstance(again, PEagleHead)
        assert find_kind_name(again) == "peagle"
        again.attach(target)
        assert again.config.num_draft_tokens == 4
        assert again.config.mask_token_id == MASK
        assert again.compute_candidates(output, text, 2, 4, 3).equal(expected)


LATER = "layers.1.self_attn.q_proj.weight"
FAULTS = [
    ("plain", "vllm", config("eagle_config", IDS, value=[2, 3]), "needs .1, 2., as at the other"),
    ("plain", "vllm", config("mask_token_id", value=4), "trained with 3"),
    ("plain", "vllm", config("mask_token_id"), "None, but the head was trained with 3"),
    ("plain", "vllm", config("num_hidden_layers", value=1), "num_hidden_layers"),
    ("plain", "vllm", config("rope_parameters", "rope_theta", value=1e6), "RoPE"),
    ("plain", "vllm", config("norm_before_residual", value=True), "norm_before_residual"),
    ("plain", "vllm", config("draft_vocab_size", value=96), "does not read: .'d2t'"),
    ("plain", "vllm", tensor("mask_hidden", None), "missing tensors: .'mask_hidden'"),
    ("plain", "vllm", tensor("mask_hidden", torch.zeros_like), LOGITS),
    ("plain", "vllm", tensor("mask_hidden", lambda w: w.roll(64, -1)), LOGITS),
    ("plain", "vllm", tensor(LATER, None), "missing tensors: .'layers.1.self_attn.q_proj.weight'"),
    ("plain", "vllm", tensor("layers.1.input_layernorm.weight", torch.ones_like), LOGITS),
    ("plain", "vllm", tensor("layers.0.hidden_norm.weight", torch.ones_like), LOGITS),
    ("plain", "vllm", tensor("fc.weight", lambda w: w.roll(64, 1)), LOGITS),
    ("plain", "vllm", tensor("d2t", None), "missing tensors: .'d2t'"),
    ("normed", "vllm", tensor("fc_norm.1.weight", torch.ones_like), LOGITS),
    ("normed", "vllm", config("fc_norm", value=False), "fc_norm"),
    ("plain", "speculators", config("speculators_model_type", value="eagle3"), "'peagle'"),
    ("plain", "speculators", config(IDS, value=[2, 3]), "trained on"),
    ("plain", "speculators", config("mask_token_id", value=4), "trained with 3"),
    ("plain", "speculators", tensor("lm_head.weight", None), "random"),
]  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_a_fault_is_caught(target: Target, heads, case: Any, tmp_path: Path) -> None:
    name, engine, fault, message = case
    folder = exported(heads[name], target, engine, tmp_path / "export")
    check_parity(folder)
    fault(folder)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_config_of_each_engine(target: Target, heads, tmp_path: Path) -> None:
    native, theirs = (
        config_of(exported(heads["plain"], target, engine, tmp_path / engine))
        for engine in ("vllm", "speculators")
    )
    assert native["architectures"] == ["LlamaForCausalLMEagle3"]
    assert native["eagle_config"][IDS] == [1, 2]
    assert (native["num_hidden_layers"], native["mask_token_id"]) == (2, 3)
    assert theirs["architectures"] == ["PEagleSpeculator"]
    assert (theirs["speculators_model_type"], theirs["mask_token_id"]) == ("peagle", 3)
    assert theirs["transformer_layer_config"]["num_hidden_layers"] == 2
    plan = theirs["speculators_config"]
    assert plan["algorithm"] == "peagle"
    assert plan["proposal_methods"][0]["speculative_tokens"] == 4
    names = {"layers.0.hidden_norm.weight", LATER, "mask_hidden", "d2t", "lm_head.weight"}
    for engine in ("vllm", "speculators"):
        assert names <= set(load_file(tmp_path / engine / "model.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id=None: must be from 0 to 95"),
        ({"mask_token_id": 96}, "mask_token_id=96: must be from 0 to 95"),
        ({"norm_output": True}, "norm_output=True, .* must be False"),
        ({"num_hidden_layers": 3}, "missing: .'layers.2"),
    ],
)
def test_files_that_are_not_read(target: Target, heads, change, message, tmp_path: Path) -> None:
    heads["plain"].save(tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    content = json.loads(file.read_text())
    content["eagle_config"].pop("norm_output", None)
    file.write_text(json.dumps(content | change))
    with pytest.raises(InputError, match=message):
        load_head(str(tmp_path / "head"))


def test_a_head_that_names_no_layers_is_not_read(target: Target, tmp_path: Path) -> None:
    fresh(target, settings_of("peagle", layers=[0, 1, 2])).save(tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    content = json.loads(file.read_text())
    del content[IDS], content["eagle_config"]
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"config\.json names no layers"):
        load_head(str(tmp_path / "head"))


@pytest.mark.parametrize("plan", [{}, {"speculators_config": {"proposal_methods": []}}])
def test_what_a_file_does_not_say_is_as_others_train_it(
    target: Target, heads, plan: dict[str, Any], tmp_path: Path
) -> None:
    """8 tokens; the feature may have any shape."""
    heads["plain"].save(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["num_depths"]
    (tmp_path / "config.json").write_text(json.dumps(content | plan))
    tensors = load_file(tmp_path / "model.safetensors")
    flat = tensors | {"mask_hidden": tensors["mask_hidden"].flatten()}
    save_file(flat, tmp_path / "model.safetensors")
    again = load_head(str(tmp_path))
    assert again.config.num_draft_tokens == 8
    assert again.mask_hidden.equal(heads["plain"].mask_hidden)


def test_an_eagle_head_is_not_taken_for_one(tmp_path: Path) -> None:
    assert find_kind_name(load_head(str(layouts.eagle3(tmp_path / "head")))) == "eagle"
