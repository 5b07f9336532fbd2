"""Heads as llama.cpp's GGUF files: names, keys and dtypes, what is refused, and the way back."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT
from exports import EAGLE31, build, eagle, toy_target, write

from conf.errors import InputError
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.draft_head import DraftHead
from heads.export.gguf import (
    LAYER_INPUTS,
    NO_LAYER_INPUTS,
    GgufFile,
    Kind,
    Value,
    target_hint,
    write_gguf,
)
from heads.export.writer import (
    compute_reference_tensors,
    export_head,
    list_serving_warnings,
)
from heads.folders import locate_head
from heads.kinds import load_head
from heads.target_model.model import Target

LLAMACPP = ExportFormat.llamacpp


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def written(head: DraftHead, target: Target, folder: Path, source: Path | None = None) -> GgufFile:
    export_head(
        head,
        LLAMACPP,
        compute_reference_tensors(head, target, 3, 2),
        folder,
        {"git": "abc"},
        source,
    )
    (file,) = folder.glob("*.gguf")
    return GgufFile(file, "file")


def facts(found: GgufFile) -> dict[str, Any]:
    """Metadata but for the placeholder vocabulary, which has a test of its own."""
    return {
        key: value.content
        for key, value in found.metadata.items()
        if not key.startswith("tokenizer.") or key.endswith("_id")
    }


def test_an_eagle3_file(target: Target, tmp_path: Path) -> None:
    head = eagle(target, norm_before_residual=True)
    found = written(head.to(torch.bfloat16), target, tmp_path / "out")
    assert found.file.name == "eagle3-toy-BF16.gguf"
    assert facts(found) == {
        "general.architecture": "eagle3",
        "general.type": "model",
        "general.name": "EAGLE-3 heads for toy",
        "general.file_type": 32,
        "general.base_model.count": 1,
        "general.base_model.0.name": "me/toy",
        "eagle3.block_count": 1,
        "eagle3.context_length": 256,
        "eagle3.embedding_length": 64,
        "eagle3.feed_forward_length": head.config.llama.intermediate_size,
        "eagle3.attention.head_count": head.config.llama.num_attention_heads,
        "eagle3.attention.head_count_kv": head.config.llama.num_key_value_heads,
        "eagle3.attention.key_length": head.config.llama.head_dim,
        "eagle3.attention.value_length": head.config.llama.head_dim,
        "eagle3.vocab_size": 96,
        "eagle3.rope.dimension_count": head.config.llama.head_dim,
        "eagle3.attention.layer_norm_rms_epsilon": pytest.approx(head.config.llama.rms_norm_eps),
        "eagle3.rope.freq_base": 10000,
        "eagle3.target_layers": [2, 4, 5],
        "eagle3.target_hidden_size": 64,
        "eagle3.norm_before_residual": True,
        "eagle3.norm_before_fc": False,
    }
    kinds = {key: found.metadata[f"eagle3.{key}"].kind for key in ("target_layers", "block_count")}
    assert kinds == {"target_layers": Kind.INT32, "block_count": Kind.UINT32}
    assert found.load_tensors()["d2t"].equal(head.vocab.ids)
    out = tmp_path / "out"
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        "README.md", "eagle3-toy-BF16.gguf", "headsmith.json", "parity/parity.safetensors",
    ]  # fmt: skip


def test_a_head_reads_as_far_as_its_target(target: Target, tmp_path: Path) -> None:
    head = eagle(target)
    head.config.llama.max_position_embeddings = 128
    assert facts(written(head, target, tmp_path / "out"))["eagle3.context_length"] == 256
    check_parity(tmp_path / "out")


def test_a_confidence_head_that_reads_no_token_is_padded(target: Target, tmp_path: Path) -> None:
    head = build(target, "dspark, blind confidence")
    found = written(head, target, tmp_path / "out")
    assert found.file.name == "dspark-toy-F32.gguf"
    assert facts(found)["dflash.has_confidence_head"] is True
    padded = found.load_tensors()["conf_proj.weight"]
    assert padded[:, :64].equal(head.confidence_head.proj.weight)
    assert not padded[:, 64:].any()
    none = written(build(target, "dspark, no confidence"), target, tmp_path / "none")
    assert facts(none)["dflash.has_confidence_head"] is False


def test_beside_an_own_embedding_block_drafters_bring_the_targets_output_head(
    target: Target, tmp_path: Path
) -> None:
    found = written(build(target, "dflash, own embedding"), target, tmp_path / "out")
    assert found.load_tensors()["output.weight"].equal(target.output_head.weight)
    about = json.loads((tmp_path / "out" / "headsmith.json").read_text())["export"]
    assert (about["format"], about["added"]) == ("llamacpp", ["output.weight"])
    assert load_head(str(tmp_path / "out")).lm_head is None
    # A file alone cannot tell whose it is.
    assert load_head(str(found.file)).lm_head is not None
    eagle3 = written(build(target, "eagle3, own embedding"), target, tmp_path / "eagle3")
    assert {"token_embd.weight", "output.weight"} <= set(eagle3.load_tensors())


def test_the_vocabulary_of_a_target_is_copied_but_for_the_mask(
    target: Target, tmp_path: Path
) -> None:
    head = build(target, "dflash")
    assert written(head, target, tmp_path / "out").metadata[
        "tokenizer.ggml.tokens"
    ] == Value.from_content([f"<{index}>" for index in range(96)])
    words = {
        "tokenizer.ggml.tokens": Value.from_content([f"w{index}" for index in range(96)]),
        "tokenizer.ggml.mask_token_id": Value.from_content(5),
    }
    write_gguf(tmp_path / "t.gguf", words, {})
    found = written(head, target, tmp_path / "out", tmp_path / "t.gguf").metadata
    assert found["tokenizer.ggml.tokens"] == words["tokenizer.ggml.tokens"]
    assert found["tokenizer.ggml.mask_token_id"] == Value.from_content(3)
    assert "tokenizer.ggml.model" not in found


def test_a_target_on_this_machine_is_not_fetched_and_a_gguf_not_converted(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = eagle(target)
    monkeypatch.setattr(target, "name", str(tmp_path))
    first, second = head.plan_export(LLAMACPP).command.splitlines()
    name = tmp_path.name
    assert first == (
        f"python llama.cpp/convert_hf_to_gguf.py {tmp_path} --outtype auto --outfile {name}.gguf"
    )
    assert second.startswith(f"llama-server -m {name}.gguf -md DIR/eagle3-{name.lower()}-F32.gguf ")
    monkeypatch.setattr(target, "name", f"{tmp_path}/Toy-Q4_1.gguf")
    (only,) = head.plan_export(LLAMACPP).command.splitlines()
    file = f"{tmp_path}/Toy-Q4_1.gguf"
    assert only.startswith(f"llama-server -m {file} -md DIR/eagle3-toy-q4_1-F32.gguf --spec-type")
    monkeypatch.setattr(target, "name", "me/toys/q4/Toy-Q4_1.gguf")
    assert (
        "llama-server -hf me/toys -hff q4/Toy-Q4_1.gguf -md " in head.plan_export(LLAMACPP).command
    )
    # What could be on the Hub is what lies here, which nobody else has.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "toy.gguf").touch()
    monkeypatch.setattr(target, "name", "toys/toy.gguf")
    assert head.plan_export(LLAMACPP).command.startswith("llama-server -m toys/toy.gguf -md ")
    for name in ("toys", str(tmp_path)):
        monkeypatch.setattr(target, "name", name)
        assert "general.base_model.0.name" not in facts(written(head, target, tmp_path / "out"))


QWEN2 = (
    "llama.cpp b11434 serves no head of a target of type qwen2: `llama-server` starts, and ends "
    "with an assertion at the first request (GGML_ASSERT of t_layer_inp). "
    "docs/serving/llama_cpp.md of Headsmith lists the types that work."
)


def test_the_readme_warns_before_the_line_that_would_crash(tmp_path: Path) -> None:
    qwen2 = toy_target("qwen2")
    written(eagle(qwen2), qwen2, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"## Serve\n\n{QWEN2}\n\n```\nhf download me/toy" in text


def test_a_target_type_is_served_or_ends_the_server_or_is_not_known() -> None:
    assert target_hint("qwen3_5_text") == target_hint("llama") == ""
    assert target_hint("qwen2") == QWEN2
    assert "type blt: its converter knows no such type. docs" in target_hint("blt")
    assert not {*LAYER_INPUTS} & {*NO_LAYER_INPUTS}


@pytest.mark.parametrize("types", [LAYER_INPUTS, NO_LAYER_INPUTS])
def test_the_page_lists_every_type(types: tuple[str, ...]) -> None:
    page = (ROOT / "docs/serving/llama_cpp.md").read_text().splitlines()
    lists = [line.rstrip(" |").rpartition("| ")[2].split(", ") for line in page]
    assert sorted(types) in lists


def test_what_engines_do_not_serve_is_known_before_training() -> None:
    qwen2, qwen3 = toy_target("qwen2"), toy_target("qwen3")
    assert list_serving_warnings(eagle(qwen2), qwen2) == [QWEN2]
    assert list_serving_warnings(eagle(qwen3), qwen3) == []
    # Not for llama.cpp in any case, unless the target's own file is.
    assert list_serving_warnings(eagle(qwen2, **EAGLE31), qwen2) == []
    qwen2.name = qwen3.name = "me/toy/toy.gguf"
    assert list_serving_warnings(eagle(qwen2, **EAGLE31), qwen2) == [QWEN2]
    (line,) = list_serving_warnings(eagle(qwen3, **EAGLE31), qwen3)
    assert re.fullmatch(
        r"llama.cpp, which serves GGUF files, has no place for .*fc_norm.*; it serves heads of "
        "train/eagle.py with head=eagle3, and of .*",
        line,
    )


def test_a_head_of_a_file_is_found(target: Target, tmp_path: Path) -> None:
    folder = write("eagle3", "llamacpp", tmp_path / "out")
    (file,) = folder.glob("*.gguf")
    assert locate_head(str(folder), None) == folder
    assert locate_head(str(file), None) == file
    shutil.copy(file, folder / "eagle3-other.gguf")
    with pytest.raises(InputError, match=r"name one of \['eagle3-other.gguf', 'eagle3-toy-F32"):
        load_head(str(folder))
    with pytest.raises(InputError, match=r"gone\.gguf"):
        load_head(str(folder / "gone.gguf"))
    write_gguf(file, {"general.architecture": Value.from_content("llama")}, {})
    with pytest.raises(InputError, match="of architecture llama; allowed: eagle3, dflash"):
        load_head(str(file))
    write_gguf(file, {"general.architecture": Value.from_content("eagle3")}, {})
    with pytest.raises(InputError, match=r"eagle3\.block_count is missing in its metadata"):
        load_head(str(file))


def test_divisors_that_no_llama3_has_are_refused(tmp_path: Path) -> None:
    (file,) = write("eagle3, llama3", "llamacpp", tmp_path / "out").glob("*.gguf")
    found = GgufFile(file, "file")
    tensors = found.load_tensors()
    tensors["rope_freqs.weight"] = torch.linspace(1, 8, len(tensors["rope_freqs.weight"]))
    write_gguf(file, found.metadata, tensors)
    with pytest.raises(InputError, match=r"rope_freqs\.weight is not llama3's"):
        load_head(str(file))


def test_the_first_files_of_llamacpp_named_layers_otherwise(tmp_path: Path) -> None:
    (file,) = write("eagle3", "llamacpp", tmp_path / "out").glob("*.gguf")
    found = GgufFile(file, "file")
    old = {key.replace("target_layers", "extract_layers"): v for key, v in found.metadata.items()}
    write_gguf(file, old, found.load_tensors())
    assert load_head(str(file)).config.layers == (2, 4, 5)
