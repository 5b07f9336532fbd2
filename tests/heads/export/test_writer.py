"""What an export holds for each engine: names and keys literally, commands, and whole or not."""

import errno
import json
from pathlib import Path

import pytest
import torch
from exports import ROPES, build, config_of, eagle, exported, make, toy_target, write
from safetensors import safe_open
from safetensors.torch import load_file

from conf.errors import InputError
from conf.settings.export import ExportFormat
from heads.export import writer as export
from heads.export.writer import compute_reference_tensors
from heads.kinds import load_head
from heads.target_model.model import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


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
                "config.json", "headsmith.json", "README.md", "model.safetensors",
                "parity/parity.safetensors",
            ],
            "added": ["embed_tokens.weight"],
            "target_problem": "",
            "version_limit": "",
        },
    }  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_head_borrows_is_written_where_it_would_start_at_random(
    tmp_path: Path, tied: bool
) -> None:
    """A published head without an output head of its own drafts with the target's."""
    target = toy_target(tie_word_embeddings=tied)
    head = build(target, "eagle3", {"own_output_head": False}, draft_vocab_size=None)
    for engine in ("sglang", "original", "speculators"):
        folder = exported(head, target, engine, tmp_path / engine)
        written = load_file(folder / "model.safetensors")
        assert written["lm_head.weight"].equal(target.output_head.weight)
        assert config_of(folder)["draft_vocab_size"] == 96
        assert load_head(str(folder)).lm_head is None
    for engine in ("vllm", "trtllm"):
        folder = exported(head, target, engine, tmp_path / engine)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_ends_that_a_target_ties_are_two_tensors_of_a_file(tmp_path: Path) -> None:
    target = toy_target(tie_word_embeddings=True)
    folder = exported(make(target, "dspark"), target, "original", tmp_path / "out")
    written = load_file(folder / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert written[name].equal(target.embedding.weight), name


def test_the_targets_embedding_goes_to_the_authors_code(target: Target, tmp_path: Path) -> None:
    folder = exported(make(target, "eagle1"), target, "original", tmp_path / "out")
    embedding = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert embedding.equal(target.embedding.weight)


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rope_is_spelled_twice(tmp_path: Path, kind: str) -> None:
    config = config_of(write(f"eagle3, {kind}", "sglang", tmp_path / "out"))
    assert config["rope_parameters"] == ROPES[kind]
    assert config["rope_theta"] == ROPES[kind]["rope_theta"]
    old = {name: value for name, value in ROPES[kind].items() if name != "rope_theta"}
    assert config["rope_scaling"] == old | {"type": kind}


def test_the_authors_code_gets_two_keys_of_rope_scaling(tmp_path: Path) -> None:
    folder = write("eagle3, linear", "original", tmp_path / "out")
    assert config_of(folder)["rope_scaling"] == {"type": "linear", "factor": 4.0}


def test_an_own_embedding_goes_where_it_is_read(target: Target, tmp_path: Path) -> None:
    head = build(target, "eagle3", {"own_embedding": True})
    head.embed_tokens.weight.data.copy_(target.embedding.weight)

    def has_embedding(engine: str) -> bool:
        folder = exported(head, target, engine, tmp_path / engine)
        return "embed_tokens.weight" in load_file(folder / "model.safetensors")

    assert has_embedding("vllm")
    assert not has_embedding("sglang")  # a copy of the target's is nothing to lose
    head.embed_tokens.weight.data[7] += 1
    assert has_embedding("original")


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


CONFIGS = Path(__file__).parent / "configs"
"""As each engine finds them, by engine and kind of head."""
TITLES = {"medusa": "Medusa", "eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3", "eagle3.1": "EAGLE-3.1",
          "dflash": "DFlash", "dflash2": "DFlash-2", "dspark": "DSpark"}  # fmt: skip
LLAMACPP = """hf download me/toy --local-dir toy
python llama.cpp/convert_hf_to_gguf.py toy --outtype auto --outfile toy.gguf
llama-server -m toy.gguf -md DIR/{}-toy-F32.gguf --spec-type draft-{} --spec-draft-n-max {} \
--metrics"""
SERVED = {
    ("vllm", "medusa"): """vllm serve me/toy --speculative-config '{"method": "medusa", \
"model": "DIR", "num_speculative_tokens": 2}'""",
    ("vllm", "eagle3.1"): """vllm serve me/toy --speculative-config '{"method": "eagle3", \
"model": "DIR", "num_speculative_tokens": 5}'""",
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
    ("llamacpp", "eagle3"): LLAMACPP.format("eagle3", "eagle3", 5),
    ("llamacpp", "dflash"): LLAMACPP.format("dflash", "dflash", 4),
    ("llamacpp", "dflash2"): LLAMACPP.format("dflash", "dflash", 4),
    ("llamacpp", "dspark"): LLAMACPP.format("dspark", "dspark", 5),
}


@pytest.mark.parametrize(("engine", "kind"), SERVED)
def test_the_readme_says_how_to_serve_and_verify(
    target: Target, tmp_path: Path, engine: str, kind: str
) -> None:
    head = make(target, kind)
    assert head.plan_export(ExportFormat(engine), "DIR").command == SERVED[engine, kind]
    text = (exported(head, target, engine, tmp_path / "out") / "README.md").read_text()
    assert f"```\n{SERVED[engine, kind]}\n```" in text
    assert "python scripts/verify_export.py DIR" in text
    assert "ends with an assertion" not in text
    assert text.startswith(f"# {TITLES[kind]} heads for me/toy\n")


def test_golden_values_travel_with_the_head(target: Target, tmp_path: Path) -> None:
    head = make(target, "eagle3")
    folder = exported(head, target, "vllm", tmp_path / "out")
    tensors, metadata = compute_reference_tensors(head, target, num_rows=3, depth=2)
    found = load_file(folder / "parity/parity.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())
    with safe_open(folder / "parity/parity.safetensors", "pt") as file:
        assert file.metadata() == metadata


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda file: file.stem)
def test_each_engine_finds_its_own_keys_and_files(
    target: Target, tmp_path: Path, file: Path
) -> None:
    engine, _, kind = file.stem.partition("-")
    folder = exported(make(target, kind), target, engine, tmp_path / "out")
    assert config_of(folder) == json.loads(file.read_text())
    theirs = kind == "medusa" and engine != "vllm"
    weights = "medusa_lm_head.safetensors" if theirs else "model.safetensors"
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    own = ["README.md", "config.json", "headsmith.json", "parity/parity.safetensors"]
    assert files == sorted([*own, weights])
    if engine == "trtllm" and kind != "medusa":
        assert load_file(folder / weights)["d2t"].dtype is torch.int32


# --- Reference values; that their logits are right is seen by `tests/eval/parity`.

ROWS, DEPTH = 5, 3


def test_features_are_the_targets_own_as_transformers_counts_them(target: Target) -> None:
    values, _ = compute_reference_tensors(make(target, "eagle3"), target, ROWS, DEPTH)
    first = export._draw_tokens(target, ROWS + DEPTH + 1)[:ROWS]
    assert values["token_ids"][: ROWS - 1].equal(first[1:])
    with torch.no_grad():
        whole = target.model(first[None], output_hidden_states=True).hidden_states
    assert len(whole) == 9
    for index, states in enumerate(whole):
        assert values[f"hidden_states.{index}"].equal(states[0])
    tapped = target.encode_text(first.tolist(), eagle(target).taps)
    for index, states in tapped.layers.items():
        torch.testing.assert_close(values[f"hidden_states.{index}"], states[0], rtol=0, atol=1e-5)


def test_what_is_the_targets_lies_beside(target: Target) -> None:
    values, _ = compute_reference_tensors(make(target, "eagle1"), target, ROWS, DEPTH)
    assert values["token_embeddings"].equal(target.embedding.weight[values["token_ids"]])
    assert values["output_head"].equal(target.output_head.weight)
    assert sorted(values) == [
        "hidden_states.7", "hidden_states.8", "ids", "logits", "output_head", "position_ids",
        "token_embeddings", "token_ids",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3"])
def test_a_large_vocabulary_keeps_the_likeliest_ids_and_a_spread(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    head = make(target, kind)
    whole, _ = compute_reference_tensors(head, target, ROWS, DEPTH)
    for name, size in {"MOST_IDS": 95, "LIKELIEST": 1, "SPREAD": 4}.items():
        monkeypatch.setattr(export, name, size)
    few, _ = compute_reference_tensors(head, target, ROWS, DEPTH)
    likeliest = whole["logits"].argmax(-1).flatten().tolist()
    assert few["ids"].tolist() == sorted({0, 31, 63, 95, *likeliest})
    assert few["logits"].equal(whole["logits"][..., few["ids"]])
    if kind == "eagle1":
        assert few["output_head"].equal(whole["output_head"][few["ids"]])
    else:
        assert few["logsumexp"].equal(whole["logsumexp"])


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3"])
def test_a_bfloat16_head_is_computed_in_float32_on_its_rounded_values(
    target: Target, kind: str
) -> None:
    rounded = make(target, kind).attach(target, torch.bfloat16)
    found, _ = compute_reference_tensors(rounded, target, ROWS, DEPTH)
    widened = rounded.float()
    expected, _ = compute_reference_tensors(widened, target, ROWS, DEPTH)
    if kind == "medusa":
        assert found["logits"].equal(expected["logits"])
    else:
        # What comes from the target is rounded as well.
        assert found["token_embeddings"].dtype == torch.bfloat16
        assert not found["logits"].equal(expected["logits"])
        seen = found["logits"].isfinite()
        scale = expected["logits"][seen].abs().max()
        assert (found["logits"] - expected["logits"])[seen].abs().max() < 0.02 * scale
    assert found["logits"].dtype == torch.float32


def test_a_quantised_output_head_of_the_target_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "has_plain_head", False)
    with pytest.raises(InputError, match=r"target\.path=me/toy: its output head is quantised"):
        compute_reference_tensors(eagle(target, "eagle1"), target, ROWS, DEPTH)
