"""What an export holds for each engine: names and keys literally, commands, and whole or not."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from exports import EAGLE31, ROPES, build, config_of, exported, make, stored, toy_target, write
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
    assert "embed_tokens.weight" in stored(exported(head, target, "vllm", tmp_path / "vllm"))
    # A copy of the target's is nothing to lose.
    assert "embed_tokens.weight" not in stored(exported(head, target, "sglang", tmp_path / "sgl"))
    head.embed_tokens.weight.data[7] += 1
    assert "embed_tokens.weight" in stored(exported(head, target, "original", tmp_path / "orig"))


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


TITLES = {"medusa": "Medusa", "eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3", "eagle3.1": "EAGLE-3.1"}
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


def named(prefix: str, shapes: dict[str, str]) -> dict[str, str]:
    return {prefix + name: f"float32 {shape}" for name, shape in shapes.items()}


LAYER = {
    "self_attn.o_proj.weight": "[64, 64]",
    "mlp.gate_proj.weight": "[96, 64]",
    "mlp.up_proj.weight": "[96, 64]",
    "mlp.down_proj.weight": "[64, 96]",
    "post_attention_layernorm.weight": "[64]",
}
LAYER1 = LAYER | {
    "self_attn.q_proj.weight": "[64, 64]",
    "self_attn.k_proj.weight": "[32, 64]",
    "self_attn.v_proj.weight": "[32, 64]",
}
LAYER3 = LAYER | {
    "self_attn.q_proj.weight": "[64, 128]",
    "self_attn.k_proj.weight": "[32, 128]",
    "self_attn.v_proj.weight": "[32, 128]",
    "input_layernorm.weight": "[64]",
    "hidden_norm.weight": "[64]",
}
MEDUSA_HEAD = {"0.linear.weight": "[64, 64]", "0.linear.bias": "[64]", "1.weight": "[96, 64]"}
NAME_IN_VLLM = {
    "0.linear.weight": "blocks.{}.layers.0.weight",
    "0.linear.bias": "blocks.{}.layers.0.bias",
    "1.weight": "lm_heads.{}.weight",
}
OUTER1 = named("", {"fc.weight": "[64, 128]"})
OUTER3 = named("", {"fc.weight": "[64, 192]", "norm.weight": "[64]", "lm_head.weight": "[24, 64]"})
FC_NORM = named("fc_norm.", {"0.weight": "[64]", "1.weight": "[64]", "2.weight": "[64]"})
EMBEDDING = named("", {"embed_tokens.weight": "[96, 64]"})
VOCAB = {"d2t": "int64 [24]", "t2d": "bool [96]"}
AUTHORS_MEDUSA = named("0.", MEDUSA_HEAD) | named("1.", MEDUSA_HEAD)
VLLM_MEDUSA = named(
    "", {NAME_IN_VLLM[n].format(k): shape for k in (0, 1) for n, shape in MEDUSA_HEAD.items()}
)
EAGLE1 = named("layers.0.", LAYER1) | OUTER1
EAGLE3 = named("midlayer.", LAYER3) | OUTER3
TENSORS = {
    ("vllm", "medusa"): VLLM_MEDUSA,
    ("vllm", "eagle1"): EAGLE1,
    ("vllm", "eagle3"): EAGLE3 | VOCAB,
    ("vllm", "eagle3.1"): EAGLE3 | VOCAB | FC_NORM,
    ("sglang", "eagle1"): EAGLE1 | {"fc.bias": "float32 [64]"},
    ("sglang", "eagle3"): EAGLE3 | VOCAB,
    ("sglang", "eagle3.1"): EAGLE3 | VOCAB | FC_NORM,
    ("trtllm", "medusa"): AUTHORS_MEDUSA,
    ("trtllm", "eagle3"): EAGLE3 | {"d2t": "int32 [24]"},
    ("trtllm", "eagle3.1"): EAGLE3 | {"d2t": "int32 [24]"} | FC_NORM,
    ("speculators", "eagle3"): named("layers.0.", LAYER3) | OUTER3 | VOCAB,
    ("speculators", "eagle3.1"): named("layers.0.", LAYER3) | OUTER3 | VOCAB | FC_NORM,
    ("original", "medusa"): AUTHORS_MEDUSA,
    ("original", "eagle1"): EAGLE1 | EMBEDDING,
    ("original", "eagle3"): EAGLE3 | VOCAB | EMBEDDING,
}
DTYPES = {"dtype": "float32", "torch_dtype": "float32"}
MEDUSA_KEYS = {
    "model_type": "medusa",
    "base_model_name_or_path": "me/toy",
    "hidden_size": 64,
    "vocab_size": 96,
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "medusa_fc_bias": True,
} | DTYPES
LLAMA_KEYS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 256,
    "vocab_size": 96,
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
} | DTYPES
NORMS = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": False,
}


def eagle_keys(architecture: str, layers: list[int] | None = None, **norms: bool) -> dict[str, Any]:
    shared = LLAMA_KEYS | {"base_model_name_or_path": "me/toy", "bias": False}
    shared |= {"architectures": [architecture]}
    if layers is None and architecture != "LlamaForCausalLM":
        return shared
    flags = NORMS | norms
    ids = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
    inner = {
        "use_aux_hidden_state": True,
        "return_hidden_post_norm": flags["norm_output"],
        **flags,
        **ids,
    }
    more = {"draft_vocab_size": 24, "target_hidden_size": 64, "eagle_config": inner, **flags}
    return shared | more | ids | ({"num_aux_hidden_states": 3} if layers else {})


def speculators_keys(**norms: bool) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 24,
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        **NORMS,
        **norms,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "transformer_layer_config": LLAMA_KEYS | {"num_aux_hidden_states": 3},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": "me/toy", "architectures": ["LlamaForCausalLM"]},
        },
    }


EAGLE1_KEYS = LLAMA_KEYS | {"base_model_name_or_path": "me/toy", "bias": False}
VLLM3 = "LlamaForCausalLMEagle3"
CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    ("vllm", "medusa"): MEDUSA_KEYS | {"architectures": ["MedusaModel"]},
    ("vllm", "eagle1"): EAGLE1_KEYS | {"architectures": ["LlamaForCausalLM"]},
    ("vllm", "eagle3"): eagle_keys(VLLM3, [2, 4, 5]),
    ("vllm", "eagle3.1"): eagle_keys(VLLM3, [2, 4, 5], **EAGLE31),
    ("sglang", "eagle1"): EAGLE1_KEYS | {"architectures": ["LlamaForCausalLMEagle"]},
    ("sglang", "eagle3"): eagle_keys(VLLM3, [1, 3, 4]),
    ("sglang", "eagle3.1"): eagle_keys(VLLM3, [1, 3, 4], **EAGLE31),
    ("trtllm", "medusa"): MEDUSA_KEYS,
    ("trtllm", "eagle3"): eagle_keys("LlamaForCausalLM", [1, 3, 4]),
    ("trtllm", "eagle3.1"): eagle_keys("LlamaForCausalLM", [1, 3, 4], **EAGLE31),
    ("speculators", "eagle3"): speculators_keys(),
    ("speculators", "eagle3.1"): speculators_keys(**EAGLE31),
    ("original", "medusa"): MEDUSA_KEYS,
    ("original", "eagle1"): EAGLE1_KEYS | {"architectures": ["LlamaForCausalLM"]},
    ("original", "eagle3"): eagle_keys("LlamaForCausalLM"),
}


@pytest.mark.parametrize(("engine", "kind"), CONFIGS)
def test_each_engine_finds_its_own_names_and_keys(
    target: Target, tmp_path: Path, engine: str, kind: str
) -> None:
    folder = exported(make(target, kind), target, engine, tmp_path / "out")
    theirs = kind == "medusa" and engine != "vllm"
    weights = "medusa_lm_head.safetensors" if theirs else "model.safetensors"
    assert stored(folder, weights) == TENSORS[engine, kind]
    assert config_of(folder) == CONFIGS[engine, kind]
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    own = ["README.md", "config.json", "headsmith.json", "parity/parity.safetensors"]
    assert files == sorted([*own, weights])
