"""A fast part of `scripts/zoo/check.py`: twenty families, each kind of layer."""

import json
import re
from pathlib import Path

import commands
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.scripts import TargetsRun
from heads.target_model.load import load_target
from scripts.zoo import check as checks
from scripts.zoo.check import (
    YES,
    Findings,
    build_table,
    check_in_process,
    check_target,
    format_counts,
    get_result_path,
)
from scripts.zoo.tiny_targets import (
    MADE_FILE,
    NO_TARGET,
    PAD,
    choose_tiny_sizes,
    find_placeholder_ids,
    list_model_types,
    make_tiny_config,
    make_tiny_target,
)

LOSSLESS = ("loads", "check", "chain", "tree", "batch")
SERVED = (
    "llama", "deepseek_v3", "qwen3_moe", "gemma3", "falcon", "gpt2", "gpt_oss", "phi3",
    "gemma4_text", "gemma3n_text", "llama4", "qwen3_5", "lfm2", "mamba2", "jamba", "nemotron_h",
)  # fmt: skip
"""Grouped queries, latent attention, experts, windows, one head of keys, biases, sinks, LongRoPE,
shared keys, several streams, chunks, the delta rule, convolutions, Mamba-2, and mixtures of these.
"""
REFUSED = {
    "minimax": r"check: refused.*cache of its own",
    "recurrent_gemma": r"check: refused.*outside the cache",
    "doge": r"check: refused.*drops keys",
}


# Of the others the tests of the engine, of layers and of wrappers run each kind as well.
OFTEN = ("deepseek_v3", "gemma3")
EACH = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in SERVED]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture
def short_texts(monkeypatch) -> None:
    """That still go past windows, chunks and switches."""
    monkeypatch.setattr(checks, "NUM_NEW", 24)


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize("model_type", EACH)
def test_texts_are_those_of_generate(zoo, model_type: str) -> None:
    if model_type == "phi3" and transformers.__version__.startswith("5.17"):
        pytest.skip("whose generate reads one token alone at the switch")
    found = check_target(make_tiny_target(model_type, zoo), heads=False)
    assert found["columns"] == dict.fromkeys(LOSSLESS, YES), found["traceback"]


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize("model_type", REFUSED)
def test_who_is_not_served_is_told_in_a_line(zoo, model_type: str) -> None:
    found = check_target(make_tiny_target(model_type, zoo), heads=False)
    wrong = {name: each for name, each in found["columns"].items() if each != YES}
    first = next(f"{name}: {wrong[name]}" for name in LOSSLESS if name in wrong)
    assert re.match(REFUSED[model_type], first), first
    assert not found["traceback"]


def test_each_kind_of_layer_is_shown_once_at_least() -> None:
    kinds = {
        "llama": None,
        "gemma2": ["sliding_attention", "full_attention"] * 2,
        "qwen3_next": ["linear_attention"] * 3 + ["full_attention"],
        "deepseek_v4": ["heavily_compressed_attention"] * 3 + ["compressed_sparse_attention"],
    }
    for name, expected in kinds.items():
        config = make_tiny_config(name)
        assert getattr(config, "layer_types", None) == expected, name
        assert config.num_hidden_layers == 4
    assert make_tiny_config("gemma3").text_config.layer_types[-1] == "full_attention"


def test_sizes_are_small_and_fit_each_other() -> None:
    config = make_tiny_config("deepseek_v3")
    names = ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    assert [getattr(config, name) for name in names] == [64, 4, 16, 8]
    assert (config.qk_head_dim, config.head_dim, config.num_key_value_heads) == (24, 8, 4)
    assert (config.n_routed_experts, config.n_group, config.topk_group) == (4, 2, 1)
    config = make_tiny_config("phi3")
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    assert len(config.rope_parameters["long_factor"]) == 8
    text = make_tiny_config("cosmos3_edge").text_config
    assert text.rope_parameters["mrope_section"] == [3, 2, 3]  # of 24, 20, 20
    whole = make_tiny_config("qwen3_5")
    assert whole.image_token_id != whole.video_token_id
    assert 300 <= min(whole.image_token_id, whole.video_token_id) < whole.text_config.vocab_size
    several = make_tiny_config("ovis2")
    ids = several.visual_indicator_token_ids
    assert len(ids) == len(set(ids)) == 5
    assert 300 <= min(ids) <= max(ids) < several.text_config.vocab_size


def test_nothing_grows() -> None:
    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, pad_token_id=None, head_dim=8)
    sizes = choose_tiny_sizes(config)
    assert (sizes["hidden_size"], sizes["num_hidden_layers"], sizes["head_dim"]) == (32, 2, 8)
    assert "pad_token_id" not in sizes


def test_a_tiny_target_is_made_once_and_says_how(zoo) -> None:
    folder = make_tiny_target("granite", zoo)
    made = json.loads((folder / MADE_FILE).read_text())
    assert (made["class"], made["layers"]) == ("GraniteForCausalLM", "4")
    assert made["num_distinct_tokens"] >= 8
    assert made["logits_std"] == pytest.approx(2, abs=0.2)
    assert made["reach"] > 0.05
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert make_tiny_target("granite", zoo) == folder
    assert weights.stat().st_mtime_ns == before


def test_tokens_that_stand_for_pictures_are_never_said(zoo) -> None:
    assert find_placeholder_ids(make_tiny_config("llava")) == [300]
    assert find_placeholder_ids(make_tiny_config("qwen3_5")) == [300, 301, 302, 303]
    assert find_placeholder_ids(make_tiny_config("llama")) == []
    weights = load_file(make_tiny_target("gemma3", zoo) / "model.safetensors")
    rows = next(each for name, each in weights.items() if name.endswith("embed_tokens.weight"))
    assert (rows == 0).all(1).nonzero().flatten().tolist() == [PAD, 300, 301, 302]


def test_whoever_is_no_target_is_known_to_transformers() -> None:
    assert not set(NO_TARGET) - set(list_model_types())


# --- What the checks find where something is wrong.


def broken(monkeypatch, change) -> None:
    """Targets are changed after they are loaded, and their check went through."""

    def load(config, device):
        target = load_target(config, device)
        change(target)
        return target

    monkeypatch.setattr(checks, "load_target", load)


def test_a_tree_whose_siblings_see_each_other_differs(zoo, monkeypatch) -> None:
    def change(target) -> None:
        extend = target.run_pending

        def causal(cache, ids, mask=None, *rest, **named):
            mask = None if mask is None else torch.ones_like(mask).tril()
            return extend(cache, ids, mask, *rest, **named)

        target.run_pending = causal

    broken(monkeypatch, change)
    found = check_target(make_tiny_target("llama", zoo), heads=False)
    assert found["columns"]["chain"] == YES
    assert re.match(
        r"differs: 3 of 4 texts, the first from token \d+ of 48, margin there 0\.\d",
        (found["columns"]["tree"]),
    )
    assert found["state"] == "differs"


@pytest.mark.slow
def test_states_that_replay_reads_otherwise_differ(zoo, monkeypatch) -> None:
    def change(target) -> None:
        read_text = target.encode_text
        target.encode_text = lambda ids, taps: read_text([ids[1], *ids[1:]], taps)

    broken(monkeypatch, change)
    found = check_target(make_tiny_target("llama", zoo))
    assert re.match(r"differs: medusa, from pass \d+ of \d+", found["columns"]["replay"])
    assert {each for name, each in found["columns"].items() if name != "replay"} == {YES}


def test_a_traceback_is_a_failure_and_is_kept(zoo, monkeypatch) -> None:
    def change(target) -> None:
        target.new_cache = None

    broken(monkeypatch, change)
    found = check_target(make_tiny_target("llama", zoo), heads=False)
    assert found["columns"]["chain"] == "FAILED: TypeError: 'NoneType' object is not callable"
    assert "in decode_batch" in found["traceback"]
    assert found["state"] == "fails"


def test_states_of_what_was_found() -> None:
    everything = dict.fromkeys(checks.COLUMNS, YES)
    for columns, state in [
        (everything, "works"),
        (everything | {"tree": "refused: a state for each branch"}, "works with chains"),
        (everything | {"eagle": "refused: biased head"}, "refused"),
        (everything | {"eagle": "refused: biased head", "chain": "differs: 1"}, "differs"),
        (everything | {"chain": "differs: 1", "batch": "FAILED: KeyError: 1"}, "fails"),
        ({"loads": YES}, "refused"),
    ]:
        assert Findings("t", columns).state == state


# --- The command, in a process for each target.

assert commands.FORKS  # the server of processes that tests share, begun as it wants to be
ALL = dict.fromkeys(checks.COLUMNS, YES)
MADE = {"class": "LlamaForCausalLM", "layers": "4", "by_hand": {}}
ROWS = {
    "llama": {
        "state": "works", "columns": ALL, "attention": "sdpa: document by document", "made": MADE,
        "tau": {"medusa": 2.125, "eagle": 1.5},
    },
    "mamba": {
        "state": "refused", "columns": {"loads": "yes", "check": "refused: no | state"},
        "made": {**MADE, "by_hand": {"mamba": {"expand": 1}}},
    },
    "zamba": {"state": "not made", "why": "ValueError: no"},
}  # fmt: skip


def test_what_was_checked_is_not_checked_again(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    check_in_process(tmp_path, "bloom", timeout=120)
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["bloom.json"]
    found = json.loads(get_result_path(tmp_path, "bloom").read_text())
    assert (found["state"], found["columns"]["loads"]) == ("refused", "yes")
    assert "ALiBi" in found["columns"]["check"]
    get_result_path(tmp_path, "bloom").write_text(json.dumps({**found, "attention": "as it was"}))
    checks.main(TargetsRun(["bloom", "bert"], out_dir=str(tmp_path)))
    result = json.loads((tmp_path / "targets.json").read_text())
    assert result["counts"] == {"refused": 1}
    assert result["found"]["bloom"]["attention"] == "as it was"
    assert list(result["no_target"]) == ["bert"]
    assert "| as it was |" in (tmp_path / "targets.md").read_text()


def test_a_process_that_hangs_or_dies_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    check_in_process(tmp_path, "llama", timeout=0.01)
    found = json.loads(get_result_path(tmp_path, "llama").read_text())
    assert found["columns"] == {"loads": "FAILED: took more than 0.01 s"}
    assert found["state"] == "fails"
    (tmp_path / "found/qwen2.log").mkdir()  # it cannot write there
    check_in_process(tmp_path, "qwen2", timeout=60)
    found = json.loads(get_result_path(tmp_path, "qwen2").read_text())
    assert found["columns"] == {"loads": "FAILED: its process ended with code 1"}


def test_a_model_type_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = TargetsRun(["llama9"], out_dir=str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"model_types: llama9 is unknown; .*'llama', 'llama4'"):
        checks.main(config)
    assert not (tmp_path / "out").exists()


def test_an_out_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InputError, match=r"out.found: cannot be made: "):
        checks.main(TargetsRun(["llama"], out_dir=str(tmp_path / "out")))


def test_the_table() -> None:
    lines = build_table(ROWS, {"bert": "an encoder"}).splitlines()
    assert lines[2].startswith(format_counts(ROWS))
    assert format_counts(ROWS).endswith(": 1 works, 1 refused, 1 not made")
    start = lines.index("|---|" + "---|" * 10)
    assert lines[start + 1 :] == [
        "| llama | yes | yes | yes | yes | yes | yes, tau 2.12 | yes, tau 1.50 | yes | sdpa "
        "| LlamaForCausalLM, 4 |",
        "| mamba | yes | refused |  |  |  |  |  |  |  | LlamaForCausalLM, 4; expand=1 |",
        "",
        "## Why not",
        "",
        "| model type | reason |",
        "|---|---|",
        "| mamba | check: refused: no / state |",
        "| zamba | not made: ValueError: no |",
        "",
        "## No targets",
        "",
        "| model type | reason |",
        "|---|---|",
        "| bert | an encoder |",
    ]
