"""`eval/acceptance.py` and `eval/speedup.py`, on Medusa and EAGLE heads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import eagle_head, noisy_head, save_target

from conf.command.run_record import PROMPTS_PLACEHOLDER
from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import DynamicTreeConfig, HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import AcceptanceRun, Mode, SpeedupRun, TreeSearchRun
from conf.settings.target import TargetConfig
from data.rows.records import load_records
from data.templates.record_encoder import RecordEncoder
from eval import acceptance, speedup, tree_search
from eval.decode.engine import decode
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.measure.measurement import compute_prompt_seed
from eval.measure.prompts import render_first_turns
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.eagle.network import EagleDrafter
from heads.kinds import load_head
from heads.target_model.load import load_target
from tests.conf.command.test_following import pasted


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    return made(tmp_path_factory.mktemp("eval"), "llama")


@pytest.fixture(scope="module")
def eagles(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("eagle")
    path = str(save_target(folder / "target", num_hidden_layers=4))
    target = load_target(TargetConfig(path=path), torch.device("cpu"))
    eagle_head(target, EagleForm.eagle3, 150, num_updates=40).save(folder / "eagle3")
    eagle_head(target, EagleForm.eagle1, num_updates=40).save(folder / "eagle1")
    prompts = folder / "prompts.jsonl"
    rows = [{"category": c, "turns": [f"hello {c}, how are you?"]} for c in ("math", "writing")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"target": path, "data": str(prompts), "head": "", "folder": folder}


def made(folder: Path, family: str) -> dict:
    path = str(save_target(folder / "target", family))
    target = load_target(TargetConfig(path=path), torch.device("cpu"))
    noisy_head(target).save(folder / "head")
    rows = [
        {"category": category, "turns": [f"hello {word}, how are you?", "and now?"]}
        for category in ("writing", "math")
        for word in ("there", "you", "today")
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"target": path, "head": str(folder / "head"), "data": str(prompts)}


def settings(setting: dict, out_dir: Path) -> dict:
    return {
        "target": TargetConfig(path=setting["target"]),
        "data": DataConfig(path=setting["data"]),
        "head": HeadRef(path=setting["head"]),
        "max_new_tokens": 24,
        "out_dir": str(out_dir),
    }


def measured(setting: dict, out_dir: Path, **changes: Any) -> dict:
    acceptance.main(AcceptanceRun(**{**settings(setting, out_dir), **changes}))
    assert (out_dir / "acceptance.png").is_file()
    assert (out_dir / "golden.yaml").is_file()
    return json.loads((out_dir / "acceptance.json").read_text())


def with_eagle(eagles: dict, name: str) -> dict:
    return {**eagles, "head": str(eagles["folder"] / name)}


def figures(result: dict, tree: str) -> list:
    names = (
        "tau", "acceptance_length", "alpha", "per_position", "histogram", "by_category",
        "by_input_length", "num_tokens", "draft_tokens", tree,
    )  # fmt: skip
    return [result[name] for name in names]


def test_replay_and_decoding_agree_to_the_last_digit(setting, tmp_path, capsys) -> None:
    replayed = measured(setting, tmp_path / "r", mode=Mode.replay)
    said = capsys.readouterr().out
    assert "\nToo few prompts to judge this head: tau " in said
    script, following = pasted(said)
    assert (script, following.head.path) == ("eval/acceptance.py", setting["head"])
    assert (following.target.path, following.data.path) == (setting["target"], PROMPTS_PLACEHOLDER)
    assert (following.max_new_tokens, following.out_dir) == (24, str(tmp_path / "r-again"))
    decoded = measured(setting, tmp_path / "d", mode=Mode.decode)
    assert (replayed["mode"], decoded["mode"]) == ("replay", "decode")
    assert figures(replayed, "static_tree") == figures(decoded, "static_tree")
    assert len(replayed["alpha"]) == 3
    assert replayed["num_prompts"] == 12  # two turns of 6 dialogues
    assert replayed["by_category"]["math"].keys() >= {"tau", "ci95", "num_prompts"}
    assert replayed["versions"]["torch"]
    assert replayed["data"]["form"] == "turns"
    assert replayed["conditions"] == {
        "data": f"prompts.jsonl, sha256 {replayed['data']['sha256'][:8]}",
        "turns": "all turns",
        "draft_tokens": 3,
        "sampling": "greedy",
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "max_new_tokens": 24,
        "chat_template": replayed["target_identity"]["template"],
    }


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_so_they_do_for_eagle_heads(eagles, tmp_path, head: str) -> None:
    own = with_eagle(eagles, head)
    replayed, decoded = (measured(own, tmp_path / m.value, mode=m, depth=3) for m in Mode)
    assert figures(replayed, "dynamic_tree") == figures(decoded, "dynamic_tree")
    assert len(replayed["alpha"]) == len(replayed["agreement"]) == 3
    assert replayed["tree"] == {"depth": 2, "top_k": 4, "num_tokens": 5}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_so_they_do_on_recurrent_layers(tmp_path: Path, family: str) -> None:
    own = made(tmp_path, family)
    replayed, decoded = (measured(own, tmp_path / mode.value, mode=mode) for mode in Mode)
    assert figures(replayed, "static_tree") == figures(decoded, "static_tree")


@pytest.mark.slow
def test_trees_are_searched_on_recurrent_layers(tmp_path: Path) -> None:
    small = {"max_nodes": 8, "num_repeats": 1, "batch_sizes": [1, 4]}
    tree_search.main(TreeSearchRun(**settings(made(tmp_path, "lfm2"), tmp_path / "o"), **small))
    found = json.loads((tmp_path / "o/tree_search.json").read_text())
    assert found["found"]["tau"] >= 1 <= found["default"]["tau"]


def test_speedup_measures_every_method_and_is_lossless(setting, tmp_path, capsys) -> None:
    own = settings(setting, tmp_path) | {"max_new_tokens": 12}
    speedup.main(SpeedupRun(**own, num_repeats=1, num_warmups=0))
    result = json.loads((tmp_path / "speedup.json").read_text())
    assert list(result["methods"]) == [
        "vanilla", "generate", "generate_lookup", "medusa_chain", "medusa_tree", "medusa_suffix",
        "prompt_lookup", "ngram", "suffix", "recycling", "lookahead", "early_exit",
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "skip_layers is left out: it searches layers" in said.err
    assert "\nToo few prompts to judge this head: medusa_" in said.out
    script, following = pasted(said.out)
    assert (script, following.data.path) == ("eval/speedup.py", PROMPTS_PLACEHOLDER)
    assert (following.head.path, following.target.path) == (setting["head"], setting["target"])
    export = speedup.build_export_settings(load_head(setting["head"]), SpeedupRun(**own))
    assert export == {
        "target.path": setting["target"],
        "head.path": setting["head"],
        "format": "vllm",
        "dtype": "float32",
        "out_dir": f"{Path(setting['head']).parent}-vllm",
    }
    assert result["baselines"] == ["vanilla", "generate"]
    speeds = {name: result["methods"][name]["speedup"] for name in result["baselines"]}
    assert speeds[result["baseline"]] == max(speeds.values()) == 1.0
    for row in result["methods"].values():
        assert row["efficiency"] == pytest.approx(row["decode_speedup"] / row["tau"])
        assert sum(sum(prompt["emitted"]) for prompt in row["prompts"]) + 12 <= row["num_tokens"]
        assert [p["dialogue"] for p in row["prompts"]] == [*range(6)] * 2
        assert row["breakdown"].keys() == {"prefill", "draft", "verify", "accept", "host"}
        assert row["acceptance_length"]["passes"]["pooled"] == row["tau"]
        assert sum(row["histogram"]) == row["num_steps"]
        assert row["by_input_length"].keys() == {"<1k"}
    assert result["methods"]["medusa_chain"]["draft_tokens"] == 3
    assert result["methods"]["vanilla"]["acceptance_length"]["drafts"]["pooled"] is None
    assert result["conditions"]["sampling"] == "greedy"
    assert result["lossless"] == {"num_prompts": 12, "num_equal": 12, "first_divergences": []}
    assert (tmp_path / "speedup.png").is_file()
    assert "medusa_tree" in (tmp_path / "speedup.html").read_text()
    golden = {file.name for file in tmp_path.glob("golden_*.yaml")}
    assert golden >= {"golden_medusa_chain.yaml"}
    assert not golden & {"golden_medusa_tree.yaml", "golden_vanilla.yaml", "golden_suffix.yaml"}
    tree = result["methods"]["medusa_tree"]["tree"]
    assert len(tree["parents"]) == len(tree["acceptance"]) == 9
    own = result["methods"]["medusa_tree"]
    assert sum(tree["acceptance"][1:]) == pytest.approx(sum(own["per_position"]))
    shown = result["texts"][0]["methods"]
    assert ["".join(piece for piece, _ in text) for text in shown.values()] == [
        "".join(piece for piece, _ in shown["vanilla"])
    ] * len(shown)


def test_sampled_acceptance_says_how_it_was_sampled(eagles, tmp_path) -> None:
    changes = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "depth": 3}
    result = measured(with_eagle(eagles, "eagle3"), tmp_path, mode=Mode.decode, **changes)
    assert (result["temperature"], result["top_p"], result["top_k"]) == (0.8, 0.9, 20)
    target = load_target(TargetConfig(path=eagles["target"]), torch.device("cpu"))
    head = load_head(str(eagles["folder"] / "eagle3")).attach(target).eval()
    steps = []
    for prompt in render_first_turns(
        load_records(eagles["data"]).records, RecordEncoder(target.tokenizer)
    ):
        seed, warm = compute_prompt_seed(prompt, 0), Sampling(0.8, 0.9, 20)
        drafter = EagleDrafter(head, 3, warm, drafter_seeds([seed]))
        found = decode(target, drafter, prompt.token_ids, 24, warm, seed)
        steps.append(PromptSteps("", found.steps))
    assert result["tau"] == tau(steps) > 1.0


def test_speedup_runs_eagles_methods_and_is_lossless(eagles, tmp_path) -> None:
    own = settings(with_eagle(eagles, "eagle3"), tmp_path)
    tree = DynamicTreeConfig(depth=3, top_k=2, num_tokens=5)
    methods = ["eagle_chain", "eagle_tree"]
    run = SpeedupRun(**own, num_repeats=1, num_warmups=0, dynamic_tree=tree, methods=methods)
    speedup.main(run)
    result = json.loads((tmp_path / "speedup.json").read_text())
    assert list(result["methods"]) == ["vanilla", "generate", "eagle_chain", "eagle_tree"]
    assert result["lossless"] == {"num_prompts": 2, "num_equal": 2, "first_divergences": []}
    assert result["tree"] == {"depth": 3, "top_k": 2, "num_tokens": 5}
    run = replace(run, temperature=1.0, out_dir=str(tmp_path / "sampled"))
    speedup.main(run)
    assert json.loads((tmp_path / "sampled/speedup.json").read_text())["lossless"] is None


def test_methods_are_chosen_by_name(setting, tmp_path) -> None:
    own = settings(setting, tmp_path) | {"max_new_tokens": 4}
    run = SpeedupRun(**own, methods=["medusa_tree"], num_repeats=1, num_warmups=0)
    speedup.main(run)
    result = json.loads((tmp_path / "speedup.json").read_text())
    assert list(result["methods"]) == ["vanilla", "generate", "medusa_tree"]
    run.methods = ["eagle_tree"]
    with pytest.raises(InputError, match="already holds"):
        speedup.main(run)
    run.out_dir = str(tmp_path / "other")
    with pytest.raises(
        InputError, match=r"methods=\['eagle_tree'\]: needs eagle_tree \(an EAGLE head\)"
    ):
        speedup.main(run)
    run.methods = ["medussa"]
    with pytest.raises(InputError, match=r"methods=\['medussa'\]: unknown; allowed: all, vanilla"):
        speedup.main(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": HeadRef()}, r"head\.path is unset"),
        ({"head": HeadRef(path="nowhere/at/all")}, r"head\.path=nowhere/at/all: no such folder"),
        ({"data": DataConfig(path="gone.jsonl")}, r"gone\.jsonl"),
        ({"depth": 4}, r"depth=4: this head drafts at most 3 tokens"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, r"tree: has depth 4, .* depths 1\.\.3"),
        (
            {"max_new_tokens": 4000},
            r"max_new_tokens=4000 are \d+, above the target's window of 256",
        ),
    ],
)
def test_bad_settings_are_named(setting, tmp_path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        acceptance.main(AcceptanceRun(**{**settings(setting, tmp_path / "o"), **changes}))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1.0}, r"temperature=1\.0: only greedy text can be replayed"),
        ({"temperature": -1.0}, r"temperature=-1\.0: must be at least 0"),
        ({"top_p": 0.0}, r"top_p=0\.0: must be above 0"),
        ({"tree": [[0]]}, r"tree: an EAGLE head drafts dynamic trees"),
    ],
)
def test_bad_settings_of_eagle_heads_are_named(
    eagles, tmp_path, changes: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        measured(with_eagle(eagles, "eagle3"), tmp_path / "o", **changes)
    assert not (tmp_path / "o").exists()


def test_layers_of_a_head_that_counts_otherwise(eagles, tmp_path) -> None:
    own = settings(eagles, tmp_path / "o")
    own["head"] = HeadRef(path=str(eagles["folder"] / "eagle3"), layers=[0, 1, 9])
    with pytest.raises(InputError, match=r"head\.layers=\[9\]: .* hidden states 0\.\.4"):
        acceptance.main(AcceptanceRun(**own))


def test_a_result_is_never_overwritten(setting, tmp_path) -> None:
    (tmp_path / "acceptance.json").write_text("{}")
    with pytest.raises(InputError, match=r"out_dir=.* already holds acceptance\.json"):
        acceptance.main(AcceptanceRun(**settings(setting, tmp_path)))
    assert (tmp_path / "acceptance.json").read_text() == "{}"
