"""Heads in GGUF files: the independent reader computes what was trained, and no fault passes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import eagle, toy_target
from feature_heads import fresh, settings_of
from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.draft_head import DraftHead
from heads.export.gguf import GgufFile, Value, interleave_rows, write_gguf
from heads.export.writer import compute_reference_tensors, export_head
from heads.target_model.model import Target

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = {"input_embedding_scale": 1.5, "output_multiplier": 0.25, "final_logit_softcapping": 0.5}
SMALL = {"selector_top_k": 7}  # 7 * 8 are 56, of a hidden size of 64
EAGLES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, after the norm": {"norm_before_residual": True},
    "eagle3, first and last out of order": {"layers": [7, 0, 3]},
    "eagle3, all ids": {"num_ids": 96},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, causal in a window": {"causal": True, "window": 9},
    "dflash, window in one layer": {"window": 4},
    "dflash, reduced": {"own_output_head": True, "draft_vocab_size": 64},
    "dflash, own embedding": {},
    "dflash2": SMALL,
    "dflash2, scaled": SMALL,
    "dspark": {},
    "dspark, reduced": {"own_output_head": True, "draft_vocab_size": 64},
    "dspark, blind confidence": {"confidence_head_with_markov": False},
    "dspark, no confidence": {"confidence_weight": 0.0, "confidence_head_with_markov": False},
    "dspark, filled in": {},
}
ROPES = {"linear": LINEAR, "yarn": YARN, "llama3": LLAMA3}
NAMES = (
    *EAGLES,
    *("eagle3, norm before fc", "eagle3, own embedding", "eagle3, target's head"),
    *BLOCKS,
    *(f"{kind}, {rope}" for kind in ("eagle3", "dflash", "dspark") for rope in ROPES),
)


def changed(head: Any, **config: Any) -> Any:
    """An untrained head like another, of another architecture."""
    made = type(head)(replace(head.config, **config), head.vocab)
    return made.attach(head.target)


def made(target: Target, name: str) -> DraftHead:
    """A random head, none of whose weights is a one or a zero."""
    kind, _, more = name.partition(", ")
    if kind == "eagle3":
        own: Any = eagle(target, **EAGLES.get(name, {}))
        configs: dict[str, dict[str, Any]] = {
            "norm before fc": {"norm_before_fc": True},
            "own embedding": {"own_embedding": True},
        }
        if more == "target's head":
            own = eagle(target, num_ids=96)
            configs[more] = {"own_output_head": False}
    else:
        own = fresh(target, settings_of(kind, **BLOCKS.get(name, {})))
        configs = {
            "own embedding": {"own_embedding": True},
            "window in one layer": {"full_layers": (1,)},
            "scaled": SCALED,
            "filled in": {"sample_from_anchor": False},
        }
    head = changed(own, **configs.get(more, {}))
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.copy_(noise + (parameter.ndim == 1))
    return head.eval()


def target_of(name: str) -> Target:
    rope = ROPES.get(name.rpartition(", ")[2])
    return toy_target(**({"rope_parameters": rope} if rope else {}))


def exported(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    target = target_of(name)
    head = made(target, name).attach(target, dtype)
    export_head(
        head,
        ExportFormat.llamacpp,
        compute_reference_tensors(head, target, 5, 3),
        folder,
        {"git": "abc"},
    )
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_an_independent_reader_computes_the_trained_logits(name: str, tmp_path: Path) -> None:
    verdict = check_parity(exported(name, tmp_path / "out"))
    assert verdict.max_difference < 1e-4 * verdict.scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["eagle3", "dflash, own embedding", "dflash2", "dspark"])
def test_in_half_precision_too(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    verdict = check_parity(exported(name, tmp_path / "out", dtype))
    assert verdict.max_difference < 1e-4 * verdict.scale
    assert f"tensors of {str(dtype).removeprefix('torch.')}" in verdict.lines[2]


def test_what_is_read_is_said(tmp_path: Path) -> None:
    folder = exported("eagle3, after the norm", tmp_path / "out")
    assert check_parity(folder).lines[1:] == [
        "eagle3-toy-F32.gguf: llama.cpp reads hidden states [2, 4, 5], norm flags on: "
        "norm_before_residual",
        "eagle3-toy-F32.gguf: 14 tensors of float32, none missing, none unknown",
        "vocabulary: drafts 24 of 96 ids with its own output head",
    ]


def metadata(key: str, value: Any = None) -> Callable[[dict, dict], None]:
    """A fault: a piece of metadata with another value, or gone."""

    def break_it(keys: dict[str, Value], _: dict[str, Tensor]) -> None:
        del keys[key]
        if value is not None:
            keys[key] = Value.from_content(value)

    return break_it


def tensor(
    name: str, change: Callable[[Tensor], Tensor] | None = None
) -> Callable[[dict, dict], None]:
    """A fault: a tensor changed, or gone."""

    def break_it(_: dict[str, Value], tensors: dict[str, Tensor]) -> None:
        found = tensors.pop(name)
        if change is not None:
            tensors[name] = change(found)

    return break_it


def swapped(one: str, other: str) -> Callable[[dict, dict], None]:
    def break_it(_: dict[str, Value], tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return break_it


Q, K, CONV = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_conv_"
LOGITS = "logits of the served head differ"
FAULTS: list[tuple[str, Callable[[dict, dict], None], str]] = [
    # What llama.cpp would compute in silence.
    ("eagle3", tensor(Q, lambda w: interleave_rows(w, 4)), LOGITS),
    ("eagle3", tensor(K, lambda w: interleave_rows(w, 2)), LOGITS),
    ("eagle3", tensor("d2t", lambda ids: ids - torch.arange(len(ids))), "d2t: llama.cpp needs 24"),
    ("eagle3", tensor("d2t", lambda ids: ids.roll(1)), LOGITS),
    ("eagle3", metadata("eagle3.target_layers", [1, 3, 4]), "the head was trained on .2, 4, 5."),
    ("eagle3", metadata("eagle3.target_layers", [2, 4, 8]), r"needs each of 0\.\.7 once"),
    ("eagle3", metadata("eagle3.target_layers", [2, 4]), "but the head was trained on"),
    ("eagle3", metadata("eagle3.norm_before_residual", True), LOGITS),
    ("eagle3, after the norm", metadata("eagle3.norm_before_residual"), LOGITS),
    ("eagle3, norm before fc", metadata("eagle3.norm_before_fc", False), "does not read: .'input_"),
    ("eagle3, llama3", tensor("rope_freqs.weight"), LOGITS),
    ("eagle3, llama3", tensor("rope_freqs.weight", lambda x: 1 / x), LOGITS),
    ("eagle3, yarn", metadata("eagle3.rope.scaling.type", "linear"), LOGITS),
    ("eagle3, linear", metadata("eagle3.rope.scaling.type"), LOGITS),
    ("eagle3", metadata("eagle3.rope.freq_base"), "freq_base: without it llama.cpp turns with a t"),
    ("eagle3, own embedding", tensor("token_embd.weight"), LOGITS),
    ("eagle3", tensor("output.weight"), "lm_head.weight is missing"),
    ("eagle3", tensor("fc.weight", lambda w: w.roll(64, 1)), LOGITS),
    ("eagle3", swapped("blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight"), LOGITS),
    ("eagle3", metadata("eagle3.block_count", 2), "block_count is 2: llama.cpp needs 1"),
    ("eagle3", metadata("eagle3.block_count", 1.0), r"needs a value of type int \(4\)"),
    ("eagle3", metadata("general.architecture", "llama"), "needs 'eagle3'"),
    ("eagle3", metadata("eagle3.context_length", 128), "context_length is 128: .* needs 256"),
    ("eagle3", metadata("eagle3.attention.key_length", 16), "value_length is 32.* needs 16"),
    ("eagle3", metadata("general.file_type", 1), "all must be the same one of"),
    ("eagle3", metadata("tokenizer.ggml.tokens", ["a", "b"]), "needs the target's 96"),
    ("eagle3", tensor("output_norm.weight", Tensor.half), "of torch.float16: llama.cpp needs"),
    ("eagle3", tensor("d2t", Tensor.float), "d2t is of torch.float32: llama.cpp needs torch.int64"),
    ("dflash", tensor(Q, lambda w: interleave_rows(w, 4)), LOGITS),
    ("dflash", metadata("dflash.target_layers", [0, 1]), "the head was trained on .1, 2."),
    ("dflash", metadata("dflash.target_layers", [2, 3]), "the head was trained on .1, 2."),
    ("dflash", metadata("dflash.attention.causal", True), LOGITS),
    ("dflash", metadata("dflash.block_size"), "no dflash.block_size: without it llama.cpp takes"),
    ("dflash", metadata("dflash.block_size", 4), r"has shape \[4, 5, 96\]; must be \[3"),
    ("dflash", metadata("tokenizer.ggml.mask_token_id"), "mask_token_id: without it llama.cpp has"),
    ("dflash", metadata("tokenizer.ggml.mask_token_id", 4), "needs 3, as it was trained"),
    ("dflash, own embedding", tensor("output.weight"), "head's own embedding as output head"),
    ("dflash, causal in a window", metadata("dflash.attention.causal"), LOGITS),
    ("dflash, causal in a window", metadata("dflash.attention.sliding_window", 2), LOGITS),
    ("dflash, causal in a window", metadata("dflash.attention.sliding_window"), LOGITS),
    ("dflash, window in one layer",
     metadata("dflash.attention.sliding_window_pattern", [False, True]), LOGITS),
    ("dflash, window in one layer", metadata("dflash.attention.causal", True), "see all of the t"),
    ("dflash, reduced", tensor("d2t", lambda ids: ids - torch.arange(len(ids))), "offsets"),
    ("dflash, reduced", tensor("d2t"), r"lm_head.weight is \[64, 64\].* needs \[96, 64\]"),
    ("dflash, llama3", tensor("rope_freqs.weight"), LOGITS),
    ("dflash2", swapped(f"{CONV}base", "blk.0.ffn_conv_base"), "drafts other ids"),
    ("dflash2", swapped(f"{CONV}proj.weight", "blk.0.ffn_conv_proj.weight"), "drafts other ids"),
    ("dflash2", tensor(f"{CONV}base", lambda kernel: kernel.flip(0)), "drafts other ids"),
    ("dflash2", swapped("selector_predecessor.weight", "selector_successor.weight"), LOGITS),
    ("dflash2", tensor("selector_hidden.weight"), "these are not the tensors of dflash2 heads"),
    ("dflash2", metadata("dflash.selector_top_k", 8), "is 8: .* k with k . .k . 1. of at most 64"),
    ("dflash2", metadata("dflash.selector_top_k", 4), "drafts other ids"),
    ("dflash2", metadata("dflash.conv_group_size", 16), r"kernel_projection.weight is \[48, 64\]"),
    ("dflash2, scaled", metadata("dflash.embedding_scale"), "differ"),
    ("dflash2, scaled", metadata("dflash.logit_scale"), LOGITS),
    ("dflash2, scaled", metadata("dflash.final_logit_softcapping"), LOGITS),
    ("dspark", swapped("markov_w1.weight", "markov_w2.weight"), LOGITS),
    ("dspark", metadata("dflash.sample_from_anchor", False), r"has shape \[5, 5, 96\]; must"),
    ("dspark, filled in", metadata("dflash.sample_from_anchor"), r"has shape \[4, 5, 96\]; must"),
    ("dspark", tensor("conf_proj.weight", lambda w: w[:, :64]), r"is \[1, 64\].* needs \[1, 72\]"),
    ("dspark, llama3", tensor("rope_freqs.weight"), LOGITS),
]  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0]}: {case[2]}")
def test_a_fault_is_caught(case: Any, tmp_path: Path) -> None:
    name, fault, message = case
    folder = exported(name, tmp_path / "export")
    check_parity(folder)
    (file,) = folder.glob("*.gguf")
    found = GgufFile(file, "file")
    keys, tensors = dict(found.metadata), found.load_tensors()
    fault(keys, tensors)
    write_gguf(file, keys, tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_files_that_are_no_whole_gguf_are_refused(tmp_path: Path) -> None:
    folder = exported("eagle3", tmp_path / "export")
    (file,) = folder.glob("*.gguf")
    content = file.read_bytes()
    endless = content[:24] + b"\xff" * 8  # the length of the first key
    for damaged in (content[: len(content) // 2], b"GGUF\2" + content[5:], content[:50], endless):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"eagle3-toy-F32\.gguf: not a whole GGUF file"):
            check_parity(folder)
    file.rename(folder / "a.gguf")
    (folder / "b.gguf").write_bytes(content)
    with pytest.raises(InputError, match=r"GGUF files \['a.gguf', 'b.gguf'\]; must be exactly one"):
        check_parity(folder)
