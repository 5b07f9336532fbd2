"""Exports of block drafters: each passes the independent reader, and no fault does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import config_of, toy_target
from feature_heads import BLOCKS, fresh, settings_of
from safetensors.torch import load_file, save_file

from conf.errors import InputError
from conf.settings.blocks import Markov
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.blocks.block_head import BlockHead
from heads.export.writer import check_format, compute_reference_tensors, export_head
from heads.kinds import load_head
from heads.target_model.model import Target

ENGINES = ("vllm", "sglang", "speculators", "original")
MORE = {
    "dspark, in a window": {"causal": True, "window": 4},
    "dflash, ends": {"layers": [1, 4, 7]},
    "dflash2, in a window": {"window": 4},
    "dflash2, scaled": {},
    "dflash, mixed": {"causal": True, "window": 4},
    "dspark, mixed": {"causal": True, "window": 4},
}


SCALED = {"input_embedding_scale": 1.5, "output_multiplier": 0.25, "final_logit_softcapping": 0.5}


def made(target: Target, name: str) -> BlockHead:
    """A random head, none of whose weights is a one or a zero."""
    changes = {**BLOCKS.get(name, {}), **MORE.get(name, {})}
    head = fresh(target, settings_of(name.split(",", maxsplit=1)[0], **changes))
    if "mixed" in name:
        head.config = replace(head.config, full_layers=(0,))
    if "scaled" in name:
        head.config = replace(head.config, **SCALED)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.fixture(scope="module")
def heads(target: Target) -> dict[str, BlockHead]:
    return {name: made(target, name) for name in (*BLOCKS, *MORE)}


def exported(head: BlockHead, target: Target, engine: str, folder: Path) -> Path:
    values = compute_reference_tensors(head, target, num_rows=5)
    export_head(head, ExportFormat(engine), values, folder, {"git": "abc"})
    return folder


def able(head: BlockHead) -> list[str]:
    return [each.value for each in ExportFormat if head.plan_export(each).problem is None]


def test_which_engine_takes_which_head(heads) -> None:
    assert {name: able(head) for name, head in heads.items()} == {
        "dflash": ["vllm", "sglang", "speculators", "original", "llamacpp"],
        "dflash, causal in a window": ["vllm", "speculators", "llamacpp"],
        "dflash, reduced": ["vllm", "speculators", "llamacpp"],
        "dflash2": ["vllm", "sglang", "speculators", "original"],
        "dspark": ["vllm", "sglang", "speculators", "original", "llamacpp"],
        "dspark, gated": ["sglang", "speculators", "original"],
        "dspark, rnn": ["speculators"],
        "dspark, in a window": ["vllm", "speculators", "llamacpp"],
        "dflash, ends": ["vllm", "sglang", "speculators", "original", "llamacpp"],
        "dflash2, in a window": ["vllm", "speculators"],
        "dflash2, scaled": ["vllm", "sglang", "original"],
        # speculators' layout has one word for all layers in vLLM.
        "dflash, mixed": ["vllm"],
        "dspark, mixed": ["vllm"],
    }
    facts = {name: head.build_card_facts({}, None) for name, head in heads.items()}
    served = [facts[name].vllm_method for name in ("dflash2", "dspark", "dspark, rnn")]
    assert served == ["dflash", "dspark", None]
    assert "markov_head_type=vanilla only" in facts["dspark, rnn"].vllm_problem
    assert (
        "drafts 5 tokens in one pass, each from the previous token" in facts["dspark"].description
    )
    with pytest.raises(InputError, match=r"markov_head_type=vanilla only, and this head has rnn"):
        check_format(heads["dspark, rnn"], ExportFormat.vllm)
    with pytest.raises(
        InputError,
        match="has no layout for DFlash heads in this version; allowed for this head: vllm",
    ):
        check_format(heads["dflash"], ExportFormat.trtllm)


@pytest.mark.parametrize("name", [*BLOCKS, *MORE])
def test_every_export_is_the_trained_head_and_reads_back(
    target: Target, heads, name: str, tmp_path: Path
) -> None:
    head = heads[name]
    text = [5, 17, 40, 8, 77, 23, 61, 9, 30]
    output = target.encode_response(text[:3], text[3:], head.taps)
    depth = head.config.num_draft_tokens
    expected = head.compute_candidates(output, text, 2, depth, 3)
    for engine in able(head):
        folder = exported(head, target, engine, tmp_path / engine)
        verdict = check_parity(folder)
        assert verdict.max_difference < 1e-4 * verdict.scale
        again = load_head(str(folder)).attach(target)
        assert again.config == head.config or name.startswith("dflash") or name.startswith("dspark")
        assert again.compute_candidates(output, text, 2, depth, 3).equal(expected)
        assert folder.name in head.plan_export(ExportFormat(engine), str(folder)).command


def edited(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def config(*path: str, value: Any = None) -> Callable[[Path], None]:
    """A fault: a key of config.json with another value, or gone."""

    def break_it(folder: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            for key in path[:-1]:
                content = content[key]
            assert path[-1] in content
            content.pop(path[-1])
            if value is not None:
                content[path[-1]] = value

        edited(folder / "config.json", change)

    return break_it


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """A fault: a tensor changed, or gone."""

    def break_it(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        found = weights.pop(name)
        if change is not None:
            weights[name] = change(found).contiguous()
        save_file(weights, folder / "model.safetensors")

    return break_it


def causal_everywhere(folder: Path) -> None:
    """A fault in heads whose layers differ: engines go by this one word in all."""
    edited(folder / "config.json", lambda content: content["dflash_config"].update(causal=True))


SWAPPED = ["sliding_attention", "full_attention"]
BLOCK, PREDECESSOR = ("dflash_config",), "candidate_selector.predecessor_codebook"
LOGITS = "logits of the served head differ"
FAULTS = [
    ("dflash", "vllm", config(*BLOCK, "target_layer_ids", value=[1, 2]), "would read hidden"),
    ("dflash", "vllm", config(*BLOCK, "causal", value=True), LOGITS),
    ("dflash", "vllm", config(*BLOCK, "causal"), "causal is absent"),
    ("dflash", "vllm", config(*BLOCK, "mask_token_id"), "mask_token_id is absent"),
    ("dflash", "vllm", config(*BLOCK, "mask_token_id", value=4), "needs 3, as it was trained"),
    ("dflash", "vllm", config("block_size", value=4), r"has shape \[4, 5, 96\]; must be \[3"),
    ("dflash", "vllm", config("rope_parameters", "rope_type", value="linear"), "spellings"),
    ("dflash", "vllm", config("max_position_embeddings", value=128), "the target's 256 or more"),
    ("dflash", "vllm", config("rope_parameters", "rope_theta", value=1e6), "spellings of RoPE"),
    ("dflash", "vllm", config("layer_types"), "layer_types is absent"),
    ("dflash", "vllm", config("architectures", value=["LlamaForCausalLM"]), "DFlashDraftModel"),
    ("dflash", "vllm", tensor("hidden_norm.weight", None), "missing tensors: .'hidden_n"),
    ("dflash", "vllm", tensor("layers.1.self_attn.k_norm.weight", torch.ones_like), LOGITS),
    ("dflash", "vllm", tensor("fc.weight", lambda w: w.roll(64, 1)), LOGITS),
    ("dflash", "sglang", tensor("norm.weight", lambda w: w[:-1]), r"norm.weight is \[63\]"),
    ("dflash, causal in a window", "vllm", config("sliding_window", value=2), LOGITS),
    ("dflash, causal in a window", "vllm", config("sliding_window"), "sliding_window is absent"),
    ("dflash, reduced", "vllm", tensor("d2t", None), "missing tensors: .'d2t'"),
    ("dflash, reduced", "vllm", tensor("d2t", lambda d: d + torch.arange(len(d))), "d2t leads to"),
    ("dflash", "speculators", config("sample_from_anchor"), "sample_from_anchor is absent"),
    ("dflash", "speculators", config("sample_from_anchor", value=True), "needs False"),
    ("dflash", "speculators", config("sliding_window_non_causal"), "non_causal is absent"),
    ("dflash", "speculators", config("aux_hidden_state_layer_ids", value=[2, 3]), "would read"),
    ("dflash", "speculators", config("mask_token_id"), "mask_token_id is absent"),
    ("dflash, reduced", "speculators", tensor("lm_head.weight", None), "missing tensors: .'lm_h"),
    ("dspark, in a window", "speculators", config("sliding_window_non_causal", value=True), LOGITS),
    ("dspark", "vllm", config("sample_from_anchor", value=False), r"has shape \[5, 5, 96\]; must"),
    ("dspark", "vllm", config("sample_from_anchor"), "sample_from_anchor is absent"),
    ("dspark", "vllm", config("is_causal", value=True), LOGITS),
    ("dspark", "vllm", config("markov_rank", value=9), r"weight is \[1, 72\]"),
    ("dspark", "vllm", config("markov_head_type", value="gated"), "needs 'vanilla'"),
    ("dspark, gated", "sglang", config("markov_head_type", value="vanilla"), "does not read"),
    ("dspark", "vllm", tensor("markov_head.markov_w2.weight", torch.zeros_like), LOGITS),
    ("dspark", "original", config("target_layer_ids", value=[1, 2]), "would read hidden states"),
    ("dflash2", "vllm", config(*BLOCK, "selector_top_k", value=4), "drafts other ids"),
    ("dflash2", "vllm", config(*BLOCK, "conv_kernel_size"), "conv_kernel_size is absent"),
    ("dflash2", "vllm", config(*BLOCK, "causal", value=True), "causal is True: vLLM needs False"),
    ("dflash2", "vllm", tensor("layers.0.mlp_conv.base_kernel", lambda k: k.flip(0)), "logits"),
    ("dflash2", "vllm", tensor(PREDECESSOR, lambda k: k.roll(1, 0)), LOGITS),
    ("dflash2", "speculators", config("selector_top_k", value=4), "drafts other ids"),
    ("dflash2", "speculators", config("conv_group_size"), "conv_group_size is absent"),
    ("dflash2", "speculators", config("aux_hidden_state_layer_ids", value=[2, 3]), "would read"),
    ("dflash2", "speculators", config("speculators_model_type", value="dflash"), "kind of the hea"),
    ("dflash2, in a window", "speculators", config("sliding_window_non_causal", value=False),
     "needs True"),
    ("dflash, mixed", "vllm", config("layer_types", value=["sliding_attention"] * 2), "is absent"),
    ("dflash, mixed", "vllm", config("layer_types", value=["full_attention"] * 2), "needs False"),
    ("dflash2, scaled", "vllm", config(*BLOCK, "input_embedding_scale"), "drafts other ids"),
    ("dflash2, scaled", "vllm", config(*BLOCK, "output_multiplier"), LOGITS),
    ("dflash2, scaled", "sglang", config(*BLOCK, "final_logit_softcapping"), LOGITS),
    ("dflash, mixed", "vllm", causal_everywhere, "causal is True: vLLM needs False"),
    ("dflash, mixed", "vllm", config("layer_types", value=SWAPPED), LOGITS),
    ("dspark, mixed", "vllm", config("layer_types", value=SWAPPED), LOGITS),
    ("dflash2, in a window", "speculators", tensor(PREDECESSOR, lambda k: k.roll(1, 0)), LOGITS),
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
    found = {
        (name, engine): config_of(exported(heads[name], target, engine, tmp_path / name / engine))
        for name, engine in (
            ("dflash", "vllm"),
            ("dflash", "speculators"),
            ("dflash2", "speculators"),
            ("dspark", "original"),
        )
    }
    native = found["dflash", "vllm"]
    assert native["architectures"] == ["DFlashDraftModel"]
    assert native["dflash_config"] == {
        "mask_token_id": 3, "target_layer_ids": [0, 1], "causal": False,
    }  # fmt: skip
    assert (native["block_size"], native["num_target_layers"]) == (5, 8)
    theirs = found["dflash", "speculators"]
    assert theirs["aux_hidden_state_layer_ids"] == [1, 2]
    assert theirs["speculators_model_type"] == "dflash"
    assert theirs["sliding_window_non_causal"] is True
    assert theirs["sample_from_anchor"] is False
    assert theirs["transformer_layer_config"]["num_hidden_layers"] == 2
    proposal = theirs["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 4
    assert "dflash_config" not in theirs
    # Both ends are the target's, which engines have.
    weights = load_file(tmp_path / "dflash" / "speculators" / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(weights)
    second = found["dflash2", "speculators"]
    assert second["architectures"] == ["DFlash2DraftModel"]
    assert second["speculators_model_type"] == "dflash2"
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    assert [second[name] for name in names] == [3, 8, 4, 9]
    assert {"causal", "target_layer_ids", "dflash_config"}.isdisjoint(second)
    dspark = found["dspark", "original"]
    assert dspark["target_layer_ids"] == [0, 1]
    assert dspark["markov_head_type"] == Markov.vanilla.value
    assert (dspark["sample_from_anchor"], dspark["block_size"]) == (True, 5)
    weights = load_file(tmp_path / "dspark" / "original" / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight"} <= set(weights)
