import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exports import CELLS, EAGLE31, config_of, eagle, exported, make, stored, toy_target
from safetensors import safe_open
from safetensors.torch import load_file

from conf.errors import InputError
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.eagle.eagle import EagleHead
from heads.export import writer as export
from heads.export.writer import check_export_target, check_format, compute_reference_tensors
from heads.kinds import load_head
from heads.medusa import MedusaHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.mark.parametrize(("engine", "kind"), CELLS)
def test_an_export_is_read_back_bit_by_bit(
    target: Target, tmp_path: Path, engine: str, kind: str
) -> None:
    head = make(target, kind)
    if kind == "medusa":
        head.config = replace(head.config, target="me/toy")
    back = load_head(str(exported(head, target, engine, tmp_path / "out")))
    assert back.config == head.config
    expected, found = head.state_dict(), back.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    if isinstance(head, EagleHead):
        assert back.vocab.ids.equal(head.vocab.ids)
        assert back.vocab.size == 96


def test_headsmith_json_says_what_was_trained_and_what_was_written(
    target: Target, tmp_path: Path
) -> None:
    folder = exported(make(target, "eagle3"), target, "original", tmp_path / "out")
    assert json.loads((folder / "headsmith.json").read_text()) == {
        "git": "abc",
        "export": {
            "format": "original",
            "kind": "eagle3",
            "layers": [2, 4, 5],
            "target": "me/toy",
            "dtype": "float32",
            "files": [
                "config.json",
                "headsmith.json",
                "README.md",
                "model.safetensors",
                "parity/parity.safetensors",
            ],
            "added": ["embed_tokens.weight"],
            "target_problem": "",
            "version_limit": "",
        },
    }


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_head_borrows_is_written_where_it_would_start_at_random(
    tmp_path: Path, tied: bool
) -> None:
    """A published head without an output head of its own drafts with the target's."""
    target = toy_target(tie_word_embeddings=tied)
    whole = eagle(target, num_ids=96)
    head = EagleHead(replace(whole.config, own_output_head=False), whole.vocab)
    tensors = whole.state_dict()
    del tensors["lm_head.weight"]
    head.load_state_dict(tensors)
    head.attach(target)
    for engine in ("sglang", "original", "speculators"):
        folder = exported(head, target, engine, tmp_path / engine)
        written = load_file(folder / "model.safetensors")
        assert written["lm_head.weight"].equal(target.output_head.weight)
        assert config_of(folder)["draft_vocab_size"] == 96
        assert load_head(str(folder)).lm_head is None
    for engine in ("vllm", "trtllm"):
        folder = exported(head, target, engine, tmp_path / engine)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_the_targets_embedding_goes_to_the_authors_code(target: Target, tmp_path: Path) -> None:
    folder = exported(make(target, "eagle1"), target, "original", tmp_path / "out")
    embedding = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert embedding.equal(target.embedding.weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("engine", "kind"), [c for c in CELLS if c[0] != "llamacpp"])
def test_half_precision_is_written_and_said_in_every_place(
    target: Target, tmp_path: Path, engine: str, kind: str, dtype: str
) -> None:
    head = make(target, kind).attach(target, getattr(torch, dtype))
    folder = exported(head, target, engine, tmp_path / "out")
    (weights,) = folder.glob("*.safetensors")
    kinds = {each.dtype for each in load_file(weights).values() if each.is_floating_point()}
    assert kinds == {getattr(torch, dtype)}
    config = config_of(folder)
    assert (config["dtype"], config.get("torch_dtype", dtype)) == (dtype, dtype)
    about = json.loads((folder / "headsmith.json").read_text())["export"]
    assert about["dtype"] == dtype
    assert check_parity(folder).max_difference < 1e-4 * check_parity(folder).scale
    back = load_head(str(folder)).state_dict()
    assert all(back[name].equal(each.float()) for name, each in head.state_dict().items())


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rope_is_spelled_twice(tmp_path: Path, kind: str) -> None:
    scaled = toy_target(rope_parameters=ROPES[kind])
    head = eagle(scaled)
    folder = exported(head, scaled, "sglang", tmp_path / "out")
    config = config_of(folder)
    assert config["rope_parameters"] == ROPES[kind]
    assert config["rope_theta"] == ROPES[kind]["rope_theta"]
    old = {name: value for name, value in ROPES[kind].items() if name != "rope_theta"}
    assert config["rope_scaling"] == old | {"type": kind}
    assert load_head(str(folder)).config == head.config


def test_the_authors_code_gets_two_keys_of_rope_scaling(tmp_path: Path) -> None:
    scaled = toy_target(rope_parameters=ROPES["linear"])
    folder = exported(eagle(scaled), scaled, "original", tmp_path / "out")
    assert config_of(folder)["rope_scaling"] == {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        (
            {"fc_bias": True},
            "vllm",
            r"vLLM has no place for a bias of the fusion layer \(fc.bias\)",
        ),
        ({"fc_bias": True}, "sglang", "allowed for this head: trtllm$"),
        ({"norm_before_residual": True}, "sglang", "residual.*allowed for this head: vllm, spec"),
        ({"norm_before_residual": True}, "trtllm", "TensorRT-LLM has no place for the normed feat"),
        (EAGLE31, "original", "authors' code has no place for a norm per feature"),
        ({"layers": [5, 2, 4]}, "vllm", r"rising order, and this head reads \[5, 2, 4\]; allowed"),
        (
            {"layers": [4]},
            "sglang",
            r"at least 2 hidden states.* \[4\]; allowed for this head: vllm, s",
        ),
        (
            {"layers": [1, 2, 3]},
            "original",
            r"reads hidden states \[1, 2, 3\] of 8, .* \[2, 4, 5\]",
        ),
        ({"layers": [0, 2, 4]}, "trtllm", r"TensorRT-LLM they must lie in 1\.\.7, "),
        ({"layers": [2, 4, 8]}, "vllm", r"vLLM they must lie in 0\.\.7, "),
    ],
)
def test_a_head_that_an_engine_would_compute_otherwise_is_refused(
    target: Target, settings, engine: str, message: str
) -> None:
    with pytest.raises(InputError, match=rf"format={engine}.*{message}"):
        check_export_target(eagle(target, **settings), ExportFormat(engine))


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "original"])
def test_no_engine_loads_medusa_heads_with_fewer_ids(target: Target, engine: str) -> None:
    few = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    pruned = make(target, "medusa").prune_vocab(few).attach(target)
    with pytest.raises(InputError, match=r"reduced draft vocabulary.*allowed for this head: none"):
        check_format(pruned, ExportFormat(engine))


@pytest.mark.parametrize(
    ("kind", "engine", "message"),
    [
        ("medusa", "sglang", "SGLang loads no Medusa heads; .*: vllm, trtllm, original$"),
        ("medusa", "speculators", "speculators loads no Medusa heads"),
        ("eagle1", "trtllm", "TensorRT-LLM loads no EAGLE-1/2 heads; .*: vllm, sglang, original$"),
    ],
)
def test_a_head_that_an_engine_does_not_load_is_refused(
    target: Target, kind: str, engine: str, message: str
) -> None:
    with pytest.raises(InputError, match=rf"^format={engine}: {message}"):
        check_format(make(target, kind), ExportFormat(engine))


def test_the_authors_code_shares_the_blocks_of_a_medusa_head(target: Target) -> None:
    head = MedusaHead.from_target(target, num_heads=2, num_layers=2)
    with pytest.raises(InputError, match=r"merges the 2 residual blocks.*: vllm, trtllm$"):
        check_format(head, ExportFormat.original)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_authors_code_knows_no_newer_rope(kind: str) -> None:
    scaled = toy_target(rope_parameters=ROPES[kind])
    with pytest.raises(InputError, match=f"supports plain RoPE.* this head has {kind} with 5"):
        check_format(eagle(scaled), ExportFormat.original)


def test_an_own_embedding_goes_where_it_is_read(target: Target, tmp_path: Path) -> None:
    trained = eagle(target)
    head = EagleHead(replace(trained.config, own_embedding=True), trained.vocab)
    tensors = trained.state_dict() | {"embed_tokens.weight": target.embedding.weight}
    head.load_state_dict(tensors)
    head.attach(target)
    assert "embed_tokens.weight" in stored(exported(head, target, "vllm", tmp_path / "vllm"))
    # A copy of the target's is nothing to lose.
    assert "embed_tokens.weight" not in stored(exported(head, target, "sglang", tmp_path / "sgl"))
    head.embed_tokens.weight.data[7] += 1
    assert "embed_tokens.weight" in stored(exported(head, target, "original", tmp_path / "orig"))
    with pytest.raises(
        InputError, match=r"SGLang drafts with the target's embedding, but .*embed_to"
    ):
        check_export_target(head, ExportFormat.sglang)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_full_disk_leaves_the_earlier_export(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    folder = exported(make(target, "eagle3"), target, "vllm", tmp_path / "out")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    calls = []

    def full(tensors, path: Path, metadata) -> None:
        calls.append(path.name)
        path.write_bytes(b"half")
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(InputError, match=r"out: cannot be written: .*No space left"):
        exported(make(target, "medusa"), target, "original", folder)
    assert calls == ["medusa_lm_head.safetensors", "parity.safetensors"][:failing]
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


SERVED = {
    ("vllm", "medusa"): """vllm serve me/toy --speculative-config '{"method": "medusa", \
"model": "DIR", "num_speculative_tokens": 2}'""",
    ("vllm", "eagle1"): """vllm serve me/toy --speculative-config '{"method": "eagle", \
"model": "DIR", "num_speculative_tokens": 5}'""",
    ("speculators", "eagle3"): "vllm serve DIR",
    ("sglang", "eagle3"): "python -m sglang.launch_server --model-path me/toy "
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path DIR --speculative-num-steps 5 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6",
    ("trtllm", "eagle3"): """cat > speculative.yaml <<END
speculative_config:
  decoding_type: Eagle3
  max_draft_len: 5
  speculative_model: DIR
  eagle3_layers_to_capture: [1, 3, 4]
END
trtllm-serve me/toy --config speculative.yaml""",
}


@pytest.mark.parametrize(("engine", "kind"), SERVED)
def test_the_readme_says_how_to_serve_and_verify(
    target: Target, tmp_path: Path, engine: str, kind: str
) -> None:
    head = make(target, kind)
    if kind == "medusa":
        head.config = replace(head.config, target="me/toy")
    assert head.plan_export(ExportFormat(engine), "DIR").command == SERVED[engine, kind]
    text = (exported(head, target, engine, tmp_path / "out") / "README.md").read_text()
    assert f"```\n{SERVED[engine, kind]}\n```" in text
    assert "python scripts/verify_export.py DIR" in text


@pytest.mark.parametrize(
    ("kind", "title"), [("eagle3", "EAGLE-3 heads"), ("eagle3.1", "EAGLE-3.1 heads")]
)
def test_the_readme_names_the_kind_of_head(
    target: Target, tmp_path: Path, kind: str, title: str
) -> None:
    folder = exported(make(target, kind), target, "vllm", tmp_path / "out")
    assert (folder / "README.md").read_text().startswith(f"# {title} for me/toy\n")


def test_golden_values_travel_with_the_head(target: Target, tmp_path: Path) -> None:
    head = make(target, "eagle3")
    folder = exported(head, target, "vllm", tmp_path / "out")
    tensors, metadata = compute_reference_tensors(head, target, num_rows=3, depth=2)
    found = load_file(folder / "parity/parity.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())
    with safe_open(folder / "parity/parity.safetensors", "pt") as file:
        assert file.metadata() == metadata


@pytest.mark.parametrize(("engine", "kind"), CELLS)
def test_an_independent_reader_computes_the_trained_logits(
    target: Target, tmp_path: Path, engine: str, kind: str
) -> None:
    verdict = check_parity(exported(make(target, kind), target, engine, tmp_path / "out"))
    assert verdict.max_difference < 1e-4 * verdict.scale


# gpt-oss has YaRN without rounding, and its heads as well.
YARN = {
    ("trtllm", "eagle3"),
    ("trtllm", "eagle3.1"),
    ("original", "eagle1"),
    ("original", "eagle3"),
    ("llamacpp", "eagle3"),
}


@pytest.mark.parametrize(("family", "refused"), [("gpt_oss", YARN), ("lfm2", set())])
def test_heads_of_targets_with_sinks_and_states_are_exported_as_well(
    tmp_path: Path, family: str, refused: set[tuple[str, str]]
) -> None:
    made = toy_target(family)
    for engine, kind in CELLS:
        head = make(made, kind)
        if (engine, kind) in refused:
            with pytest.raises(
                InputError,
                match=r"does not read truncate of RoPE|supports plain RoPE|assumes truncate=True",
            ):
                check_format(head, ExportFormat(engine))
            continue
        check_export_target(head, ExportFormat(engine))
        verdict = check_parity(exported(head, made, engine, tmp_path / f"{engine}-{kind}"))
        assert verdict.max_difference < 1e-4 * verdict.scale
