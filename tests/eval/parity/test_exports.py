"""Every head for every engine: each export is the trained head, there and here."""

import json
import shutil
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from exports import (
    CELLS,
    HEADS,
    build,
    config_of,
    exported,
    find_engines,
    made,
    make,
    reference,
    target_of,
    toy_target,
    write,
)
from safetensors.torch import load_file
from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.draft_head import DraftHead
from heads.export.writer import check_format, export_head
from heads.kinds import load_head
from heads.target_model.model import TargetOutput

TEXT = [5, 17, 40, 8, 77, 23, 61, 9, 30]


def test_every_head_knows_the_engines_that_serve_it() -> None:
    for name, (engines, *_) in HEADS.items():
        assert find_engines(made(name)) == engines.split(), name


@cache
def output_of(name: str) -> TargetOutput:
    return target_of(name).encode_response(TEXT[:3], TEXT[3:], made(name).taps)


def candidates(head: DraftHead, name: str) -> Tensor:
    return head.compute_candidates(output_of(name), TEXT, 2, head.max_draft_tokens or 3, 3)


@cache
def own_candidates(name: str) -> Tensor:
    return candidates(made(name), name)


@pytest.mark.parametrize(("name", "engine"), CELLS)
def test_an_export_is_the_trained_head_and_exports_as_itself(
    tmp_path: Path, name: str, engine: str
) -> None:
    head, folder = made(name), write(name, engine, tmp_path / "out")
    verdict = check_parity(folder)
    assert verdict.max_difference < 1e-4 * verdict.scale / 2
    command = head.plan_export(ExportFormat(engine), str(folder)).command
    assert str(folder) in command
    in_parallel = name.startswith("peagle") and engine == "vllm"
    assert ('"parallel_drafting": true' in command) == in_parallel
    assert f"format {engine}, head {head.variant}" in verdict.lines[0]
    back = load_head(str(folder)).attach(target_of(name)).eval()
    assert back.config == head.config
    assert back.vocab.ids.equal(head.vocab.ids)
    expected, found = head.state_dict(), back.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[key].equal(each) for key, each in expected.items())
    assert back.taps == head.taps
    assert candidates(back, name).equal(own_candidates(name))
    export_head(back, ExportFormat(engine), reference(name), tmp_path / "again", {})
    if engine != "llamacpp":
        assert config_of(tmp_path / "again") == config_of(folder)
    for file in folder.glob("*.[gs]*"):  # .gguf and .safetensors
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        if engine == "llamacpp":  # a file alone
            copy = shutil.copy(file, tmp_path / "alone.gguf")
            alone = load_head(str(copy)).attach(target_of(name))
            export_head(alone, ExportFormat(engine), reference(name), tmp_path / "again", {})
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


HALF = {
    "medusa": "trtllm", "eagle1": "sglang", "eagle3": "original", "eagle3.1": "vllm",
    "eagle3, all ids": "speculators", "eagle3, norm before fc": "llamacpp", "peagle": "vllm",
    "dflash, own embedding": "llamacpp", "dflash2": "speculators", "dspark": "llamacpp",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "engine", "dtype"),
    [(*cell, dtype) for cell, dtype in zip(HALF.items(), cycle(["bfloat16", "float16"]))],
)
def test_half_precision_is_written_and_said_in_every_place(
    tmp_path: Path, name: str, engine: str, dtype: str
) -> None:
    target = target_of(name)
    head = build(target, name).attach(target, getattr(torch, dtype))
    folder = exported(head, target, engine, tmp_path / "out")
    verdict = check_parity(folder)
    assert verdict.max_difference < 1e-4 * verdict.scale
    assert any(f"of {dtype}" in line for line in verdict.lines)
    assert json.loads((folder / "headsmith.json").read_text())["export"]["dtype"] == dtype
    if engine != "llamacpp":
        config = config_of(folder)
        assert (config["dtype"], config.get("torch_dtype", dtype)) == (dtype, dtype)
    back = load_head(str(folder)).attach(target)
    assert all(back.state_dict()[n].equal(t.float()) for n, t in head.state_dict().items())
    again = exported(back.attach(target, getattr(torch, dtype)), target, engine, tmp_path / "again")
    for file in folder.glob("*.[gs]*"):
        assert (again / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("family", "refused"), [("gpt_oss", {"trtllm", "original", "llamacpp"}), ("lfm2", set())]
)
def test_heads_of_targets_with_sinks_and_states_are_exported_as_well(
    tmp_path: Path, family: str, refused: set[str]
) -> None:
    """gpt-oss has YaRN without rounding, and its heads as well."""
    target = toy_target(family)
    head = make(target, "eagle3")
    for engine in HEADS["eagle3"][0].split():
        if engine in refused:
            with pytest.raises(InputError, match=r"truncate of RoPE|supports plain|truncate=True"):
                check_format(head, ExportFormat(engine))
            continue
        verdict = check_parity(exported(head, target, engine, tmp_path / engine))
        assert verdict.max_difference < 1e-4 * verdict.scale


def test_what_is_read_is_said(tmp_path: Path) -> None:
    file = "eagle3-toy-F32.gguf"
    assert check_parity(write("eagle3, after the norm", "llamacpp", tmp_path / "out")).lines[
        1:
    ] == [
        f"{file}: llama.cpp reads hidden states [2, 4, 5], norm flags on: norm_before_residual",
        f"{file}: 14 tensors of float32, none missing, none unknown",
        "vocabulary: drafts 24 of 96 ids with its own output head",
    ]


# What no reader needs of a file.


@pytest.mark.parametrize("name", ["dflash", "dflash2, nine", "peagle"])
def test_speculators_proposes_what_the_head_drafts(tmp_path: Path, name: str) -> None:
    config = config_of(write(name, "speculators", tmp_path / "out"))
    [proposal] = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 4
    assert {"causal", "target_layer_ids", "dflash_config"}.isdisjoint(config)


def test_both_ends_are_the_target_s_which_the_authors_alone_do_not_have(tmp_path: Path) -> None:
    for name, engine in (("dflash", "vllm"), ("dspark", "original")):
        folder = write(name, engine, tmp_path / engine)
        weights = load_file(folder / "model.safetensors")
        assert ("embed_tokens.weight" in weights) == (engine == "original")
