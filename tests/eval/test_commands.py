"""`eval/acceptance.py` and `eval/speedup.py`: figures, conditions, resumption and refusals."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from toys import eagle_head, noisy_head, save_target

from conf.command.jsonl_store import JsonlStore
from conf.command.run_record import PROMPTS_PLACEHOLDER
from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import DraftModelConfig, HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import AcceptanceRun, Mode, ServeRun, SpeedupRun, TreeSearchRun
from conf.settings.target import TargetConfig
from data.rows.records import load_records
from data.templates.record_encoder import RecordEncoder
from eval import acceptance, serve, speedup, tree_search
from eval.acceptance import pool_conditions
from eval.decode.engine import decode
from eval.measure import measurement as bench
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.measure.measurement import compute_prompt_seed
from eval.measure.prompts import render_first_turns
from eval.measure.verdict import format_published
from eval.preflight_checks import build_condition_runs
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.eagle.network import EagleDrafter
from heads.folders import PROFILE
from heads.kinds import load_head
from heads.target_model.load import load_target
from tests.chats import write_rows
from tests.conf.command.test_following import pasted

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    return made(tmp_path_factory.mktemp("eval"), "llama")


@pytest.fixture(scope="module")
def eagles(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("eagle")
    path = str(save_target(folder / "target", num_hidden_layers=4))
    target = load_target(TargetConfig(path=path), torch.device("cpu"))
    eagle_head(target, EagleForm.eagle3, 150, num_updates=20).save(folder / "eagle3")
    rows = [{"category": c, "turns": [f"hello {c}, how are you?"]} for c in ("math", "writing")]
    prompts = write_rows(folder / "prompts.jsonl", rows)
    return {"target": path, "data": str(prompts), "head": str(folder / "eagle3")}


def made(folder: Path, family: str) -> dict:
    path = str(save_target(folder / "target", family))
    target = load_target(TargetConfig(path=path), torch.device("cpu"))
    noisy_head(target).save(folder / "head")
    rows = [
        {"category": category, "turns": [f"hello {word}, how are you?", "and now?"]}
        for category in ("writing", "math")
        for word in ("there", "you")
    ]
    prompts = write_rows(folder / "prompts.jsonl", rows)
    return {"target": path, "head": str(folder / "head"), "data": str(prompts)}


def settings(setting: dict, out_dir: Path) -> dict:
    return {
        "target": TargetConfig(path=setting["target"]),
        "data": DataConfig(path=setting["data"]),
        "head": HeadRef(path=setting["head"]),
        "max_new_tokens": 14,
        "out_dir": str(out_dir),
    }


def measured(setting: dict, out_dir: Path, **changes: Any) -> dict:
    acceptance.main(AcceptanceRun(**{**settings(setting, out_dir), **changes}))
    assert (out_dir / "golden.yaml").is_file()
    return json.loads((out_dir / "acceptance.json").read_text())


def figures(result: dict, tree: str) -> list:
    names = (
        "tau", "acceptance_length", "alpha", "per_position", "histogram", "by_category",
        "by_input_length", "by_mode", "num_tokens", "draft_tokens", tree,
    )  # fmt: skip
    return [result[name] for name in names]


def test_replay_and_decoding_agree_to_the_last_digit(
    setting, tmp_path, capsys, monkeypatch
) -> None:
    replayed = measured(setting, tmp_path / "r", mode=Mode.replay)
    assert (tmp_path / "r/acceptance.png").is_file()
    monkeypatch.setattr(acceptance, "plot_acceptance", lambda *_: None)
    said = capsys.readouterr().out
    assert "\nToo few prompts to judge this head: tau " in said
    script, following = pasted(said)
    assert (script, following.head.path) == ("eval/acceptance.py", setting["head"])
    assert (following.target.path, following.data.path) == (setting["target"], PROMPTS_PLACEHOLDER)
    assert (following.max_new_tokens, following.out_dir) == (14, str(tmp_path / "r-again"))
    decoded = measured(setting, tmp_path / "d", mode=Mode.decode)
    assert (replayed["mode"], decoded["mode"]) == ("replay", "decode")
    assert figures(replayed, "static_tree") == figures(decoded, "static_tree")
    assert len(replayed["alpha"]) == 3
    assert replayed["num_prompts"] == 8  # two turns of 4 dialogues
    assert replayed["by_category"]["math"].keys() >= {"tau", "ci95", "num_prompts"}
    assert replayed["versions"]["torch"]
    assert replayed["data"] == {
        "path": setting["data"], "version": None, "subset": None, "split": "train", "form": "turns",
        "sha256": hashlib.sha256(Path(setting["data"]).read_bytes()).hexdigest(),
        "chat_template_kwargs": {}, "target_dtype": "float32", "trained_on": [],
        "target_changes": [], "num_copies": 2, "num_prompts": 8, "num_bad": 0, "most_turns": 2,
    }  # fmt: skip
    assert replayed["conditions"] == {
        "data": f"prompts.jsonl, sha256 {replayed['data']['sha256'][:8]}",
        "turns": "all turns",
        "draft_tokens": 3,
        "sampling": "greedy",
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "max_new_tokens": 14,
        "chat_template": replayed["target_identity"]["template"],
    }


def test_a_head_is_held_against_the_profile_beside_it(eagles, tmp_path, capsys) -> None:
    head = shutil.copytree(eagles["head"], tmp_path / "head")
    own = eagles | {"head": str(head)}
    assert measured(own, tmp_path / "without", depth=3)["published"] is None
    profile = {"measured": True, "marginal_accept_rates": [0.5, 0.25, 0.1]}
    (head / PROFILE).write_text(json.dumps(profile | {"accept_length_model": "chain_analytic"}))
    found = measured(own, tmp_path / "with", depth=3)
    assert (found["published"]["published"], found["published"]["equal"]) == (1.85, None)
    said = capsys.readouterr().out
    assert f"\n{format_published(found)}\n\nToo few prompts to judge" in said
    assert said.count(PROFILE) == 1


def test_so_they_do_for_eagle_heads(eagles, tmp_path, no_picture) -> None:
    replayed, decoded = (measured(eagles, tmp_path / m.value, mode=m, depth=3) for m in Mode)
    assert figures(replayed, "dynamic_tree") == figures(decoded, "dynamic_tree")
    assert len(replayed["alpha"]) == len(replayed["agreement"]) == 3
    assert replayed["tree"] == {"depth": 2, "top_k": 4, "num_tokens": 5}


def test_speedup_measures_every_method_and_is_lossless(setting, tmp_path, capsys) -> None:
    own = settings(setting, tmp_path) | {"max_new_tokens": 6}
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
        assert sum(sum(prompt["emitted"]) for prompt in row["prompts"]) + 8 <= row["num_tokens"]
        assert [p["dialogue"] for p in row["prompts"]] == [*range(4)] * 2
        assert row["breakdown"].keys() == {"prefill", "draft", "verify", "accept", "host"}
        assert row["acceptance_length"]["passes"]["pooled"] == row["tau"]
        assert sum(row["histogram"]) == row["num_steps"]
        assert row["by_input_length"].keys() == {"<1k"}
    assert result["methods"]["medusa_chain"]["draft_tokens"] == 3
    assert result["methods"]["vanilla"]["acceptance_length"]["drafts"]["pooled"] is None
    assert result["conditions"]["sampling"] == "greedy"
    assert result["lossless"] == {"num_prompts": 8, "num_equal": 8, "first_divergences": []}
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


def test_sampled_acceptance_says_how_it_was_sampled(eagles, tmp_path, no_picture) -> None:
    changes = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "depth": 3}
    result = measured(eagles, tmp_path, mode=Mode.decode, **changes)
    assert (result["temperature"], result["top_p"], result["top_k"]) == (0.8, 0.9, 20)
    target = load_target(TargetConfig(path=eagles["target"]), torch.device("cpu"))
    head = load_head(eagles["head"]).attach(target).eval()
    steps = []
    for prompt in render_first_turns(
        load_records(eagles["data"]).records, RecordEncoder(target.tokenizer)
    ):
        seed, warm = compute_prompt_seed(prompt, 0), Sampling(0.8, 0.9, 20)
        drafter = EagleDrafter(head, 3, warm, drafter_seeds([seed]))
        found = decode(target, drafter, prompt.token_ids, 14, warm, seed)
        steps.append(PromptSteps("", found.steps))
    assert result["tau"] == tau(steps) > 1.0


# One head under several conditions, in one table.


def test_a_condition_changes_what_it_names() -> None:
    config = AcceptanceRun(
        out_dir="out",
        max_new_tokens=8,
        conditions=[
            "",
            "  mode=decode   temperature=1 top_p=0.9",
            "data.path=a/long.jsonl data.chat_template_kwargs.enable_thinking=false",
        ],
    )
    given, drawn, long = build_condition_runs(config).values()
    assert list(build_condition_runs(config))[1] == "mode=decode temperature=1 top_p=0.9"
    assert (given.mode, given.temperature, given.out_dir) == (Mode.replay, 0.0, "out/as_given")
    assert (drawn.mode, drawn.temperature, drawn.top_p) == (Mode.decode, 1.0, 0.9)
    assert drawn.out_dir == "out/mode=decode_temperature=1_top_p=0.9"
    assert (long.data.path, long.data.chat_template_kwargs) == (
        "a/long.jsonl", {"enable_thinking": False},
    )  # fmt: skip
    assert all((run.max_new_tokens, run.conditions) == (8, []) for run in (given, drawn, long))


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (["hot"], r"conditions: 'hot': 'hot' sets nothing; a condition is settings such as"),
        (["temprature=1"], r"temprature: this command has no such setting"),
        (["head.path=other"], r"conditions: 'head.path=other': head.path is not a condition; allo"),
        (["depth=3"], r"depth is not a condition; allowed: data, num_turns, .*temperature"),
        (["temperature=1"], r"conditions: 'temperature=1': temperature=1.0: only greedy text can"),
        (["temperature=hot"], r"conditions: 'temperature=hot': Value 'hot'.* could not be"),
        (["seed=1", " seed=1"], r"conditions: 'seed=1' stands twice"),
    ],
)
def test_what_is_no_condition_is_refused_before_anything_is_loaded(
    setting, tmp_path, conditions, message
) -> None:
    own = settings(setting, tmp_path)
    with pytest.raises(InputError, match=message):
        acceptance.check_acceptance_run(AcceptanceRun(**own, conditions=conditions))


def test_all_conditions_stand_in_one_table(
    setting, tmp_path, capsys, monkeypatch, no_picture
) -> None:
    own = settings(setting, tmp_path) | {"max_new_tokens": 8, "num_turns": 1}
    own["data"].num_prompts = 2
    alone = AcceptanceRun(**own | {"out_dir": str(tmp_path / "alone")})
    acceptance.main(alone)
    loaded: list[object] = []
    load = bench.load_target
    monkeypatch.setattr(bench, "load_target", lambda *given: loaded.append(1) or load(*given))

    def run() -> dict[str, Any]:
        capsys.readouterr()
        acceptance.main(AcceptanceRun(**own, conditions=["", "mode=decode temperature=1"]))
        return json.loads((tmp_path / "conditions.json").read_text())["conditions"]

    rows = run()
    assert len(loaded) == 1
    for name, folder in (("", "as_given"), ("mode=decode temperature=1", None)):
        file = tmp_path / (folder or "mode=decode_temperature=1") / "acceptance.json"
        written = json.loads(file.read_text())
        assert (rows[name]["tau"], rows[name]["num_prompts"]) == (written["tau"], 2)
        assert rows[name]["conditions"]["sampling"] == ("temperature 1" if name else "greedy")
    assert rows[""]["tau"] == json.loads((tmp_path / "alone/acceptance.json").read_text())["tau"]
    shown = capsys.readouterr().out
    assert re.search(r"│ as given +│ +2 │ +\d+ │ \d\.\d\d \d", shown)
    assert re.search(r"│ condition: as given +│ +2 │ \d\.\d{3} │", shown)
    assert f"\nwrote {tmp_path}/conditions.json, {tmp_path}/conditions.png\n" in shown
    assert (tmp_path / "conditions.png").is_file()
    monkeypatch.setattr(acceptance, "plot_comparison", lambda *_: None)
    # A second start takes the results that are there.
    (tmp_path / "conditions.json").unlink()
    assert run() == rows
    assert len(loaded) == 1
    (tmp_path / "conditions.json").unlink()
    with pytest.raises(InputError, match=r"as_given/acceptance.json is of other settings"):
        acceptance.main(AcceptanceRun(**own | {"max_new_tokens": 9}, conditions=[""]))


def test_all_figures_are_shown_in_tables(capsys) -> None:
    one = {"num_prompts": 1, "tau": 1.5, "ci95": None, "alpha": [0.5]}
    many = {"num_prompts": 12, "tau": 2.0, "ci95": (1.75, 2.25), "alpha": [0.75, 0.25]}
    lengths = {"drafts": {"pooled": 2.0, "turns": 2.125, "dialogues": 2.25}}
    tree = {
        "tau": 3.0, "by_category": {"math": {"tau": 2.5}, "chat": {"tau": 3.5}},
        "by_mode": {"text": {"prose": {"tau": 2.75}}},
    }  # fmt: skip
    result = {
        "mode": "replay", **many, "num_prompts": 13, "tau_ci95": (1.5, 2.5),
        "by_category": {"math": one, "chat": many}, "static_tree": tree,
        "by_mode": {
            "text": {
                "prose": {"tau": 1.25, "tau_ci95": [1.0, 1.5], "num_dialogues": 8},
                "thinking": {"tau": 1.0, "tau_ci95": None, "num_dialogues": 1},
            }
        },
        "prompts": [{"dialogue": n} for n in range(13)], "acceptance_length": lengths,
    }  # fmt: skip
    acceptance.print_acceptance(result, Console(width=90))
    lines = capsys.readouterr().out.splitlines()
    rows = [re.sub(r"\s*[│┃]\s*", " | ", line).strip(" |") for line in lines]
    assert [row for row in rows if row[0] not in "┏┡└"] == [
        "Acceptance (replay, 13 prompts)",
        "category | prompts | tau chain | 95% interval | tau tree | alpha",
        "math | 1 | 1.500 | - | 2.500 | 0.50",
        "chat | 12 | 2.000 | 1.75-2.25 | 3.500 | 0.75 0.25",
        "all | 13 | 2.000 | 1.50-2.50 | 3.000 | 0.75 0.25",
        "tau by mode",
        "mode | dialogues | tau | 95% interval | tau, tree",
        "text: prose | 8 | 1.250 | 1.00-1.50 | 2.750",
        "text: thinking | 1 | 1.000 | - | -",
        "Acceptance length of the chain, as others define it",
        "counted | pooled | mean over turns | over dialogues",
        "1 + accepted / drafts, as vLLM | 2.000 | 2.125 | 2.250",
    ]


def test_the_table_of_a_speedup_tells_what_is_lossy_and_what_differs(capsys) -> None:
    one = {
        "tau": 1.0, "tokens_per_s": 40.0, "speedup": 1.0, "speedup_ci95": None,
        "efficiency": None, "lossy": False, "prompts": [{"dialogue": n} for n in range(12)],
    }  # fmt: skip
    two = one | {"tau": 2.5, "tokens_per_s": 80.25, "speedup": 2.006, "efficiency": 0.8}
    two |= {"speedup_ci95": (1.75, 2.25), "lossy": True}
    result = {
        "baseline": "vanilla", "methods": {"vanilla": one, "medusa_typical": two},
        "lossless": {"num_prompts": 9, "num_equal": 8, "first_divergences": ["prompt 3"] * 6},
    }  # fmt: skip
    speedup.print_speedup(result, Console(width=90))
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "Speed-up over the baseline, vanilla (medians, 12 dialogues)"
    assert [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in lines if line[0] in "│┃"] == [
        ["method", "tau", "tokens/s", "speed-up", "95% interval", "efficiency"],
        ["vanilla", "1.000", "40.0", "1.00", "-", "-"],
        ["medusa_typical (lossy)", "2.500", "80.2", "2.01", "1.75-2.25", "0.80"],
    ]
    equal = "8 of 9 texts equal to the target's greedy text under every method"
    assert lines[-6:] == [equal, *["  prompt 3"] * 5]
    speedup.print_speedup(result | {"lossless": None}, Console(width=90))
    assert "equal" not in capsys.readouterr().out


def test_conditions_are_modes_of_all_that_they_measure() -> None:
    def result(sha256: str, *emitted: int) -> dict[str, Any]:
        rows = [
            {
                "dialogue": n, "turn": 1, "category": "all", "prompt_tokens": 5, "spans": {},
                "drafted": [9], "accepted": [each - 1], "emitted": [each],
            }
            for n, each in enumerate(emitted)
        ]  # fmt: skip
        return {"data": {"sha256": sha256}, "prompts": rows}

    pooled = pool_conditions({"": result("ab", 1, 2), "t=1": result("ab", 3, 4, 5)}, seed=0)
    other = pool_conditions({"": result("ab", 1, 2), "t=1": result("cd", 3, 4, 5)}, seed=0)
    assert pooled["tau"] == other["tau"] == 3.0
    found = pooled["by_mode"]["condition"]
    assert [(name, row["tau"], row["num_dialogues"]) for name, row in found.items()] == [
        ("as given", 1.5, 2), ("t=1", 4.0, 3),
    ]  # fmt: skip
    # The same data are the same dialogues.
    assert pooled["by_mode"]["turn"]["1"]["num_dialogues"] == 3
    assert other["by_mode"]["turn"]["1"]["num_dialogues"] == 5


# A measurement that was killed goes on; one of something else does not.


class KilledError(Exception):
    """In place of a signal."""


def killed_after(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next measurement writes so many rows."""
    append, left = JsonlStore.append, [num_rows]

    def limited(journal: JsonlStore, rows: list[dict]) -> None:
        if not left[0]:
            raise KilledError
        left[0] -= 1
        append(journal, rows)

    monkeypatch.setattr(JsonlStore, "append", limited)


@pytest.mark.parametrize("mode", list(Mode))
def test_acceptance_goes_on_where_it_was_killed(
    setting, tmp_path, monkeypatch, no_picture, mode
) -> None:
    def run(name: str, max_new_tokens: int = 8) -> dict:
        own = settings(setting, tmp_path / name)
        own["data"].num_prompts, own["max_new_tokens"] = 2, max_new_tokens
        acceptance.main(AcceptanceRun(**own, mode=mode))
        return json.loads((tmp_path / name / "acceptance.json").read_text())

    whole = run("whole")
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(KilledError):
            run("killed")
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["acceptance.partial"]
    measured = []
    one = acceptance._build_prompt_row
    monkeypatch.setattr(
        acceptance, "_build_prompt_row", lambda *given: measured.append(given[2]) or one(*given)
    )
    with pytest.raises(InputError, match=r"delete .*/killed/acceptance.partial to begin anew, or"):
        run("killed", max_new_tokens=13)
    again = run("killed")
    assert [(prompt.dialogue, prompt.turn) for prompt in measured] == [(1, 2)]
    for key in ("tau", "tau_ci95", "alpha", "by_category", "prompts", "static_tree"):
        assert again[key] == whole[key]
    assert again.get("agreement") == whole.get("agreement")
    # A list of numbers takes one line.
    numbers = f'"emitted": {json.dumps(again["prompts"][0]["emitted"])}'
    assert numbers in (tmp_path / "killed/acceptance.json").read_text()
    assert not (tmp_path / "killed/acceptance.partial").exists()


@pytest.mark.slow
def test_speedup_goes_on_with_the_same_layers(setting, tmp_path, monkeypatch, capsys) -> None:
    def run(**changes) -> None:
        own = settings(setting, tmp_path)
        own["data"].num_prompts = 2
        own |= {"methods": "skip_layers", "num_turns": 1, "num_repeats": 1, "num_warmups": 0}
        own["draft"] = DraftModelConfig(path=str(draft))
        speedup.main(SpeedupRun(**own | changes))

    draft = shutil.copytree(setting["target"], tmp_path / "draft")
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(KilledError):
            run()
    before = (tmp_path / "speedup.partial/0/runs.jsonl").read_text().splitlines()
    assert json.loads(before[0])["id"] == -1
    with pytest.raises(InputError, match=r"config\.max_new_tokens was 14, is 15"):
        run(max_new_tokens=15)
    for folder, what in ((setting["head"], r"heads was \[\["), (draft, r"draft_weights was \[")):
        weights = next(Path(folder).glob("*.safetensors"))
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + b"x")
        with pytest.raises(InputError, match=rf"in another way: {what}'[0-9a-f]{{64}}'\]+, is "):
            run()
        weights.write_bytes(content)
    monkeypatch.setattr("eval.compare.methods.search_skipped_layers", None)  # not searched again
    run()
    assert "continuing with 3 runs of an earlier start" in " ".join(capsys.readouterr().err.split())
    result = json.loads((tmp_path / "speedup.json").read_text())
    assert result["methods"]["skip_layers"]["skip"] == json.loads(before[0])["skip"]
    assert result["lossless"]["num_equal"] == 2
    assert not (tmp_path / "speedup.partial").exists()


BEYOND = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (AcceptanceRun, {"head": HeadRef()}, r"head\.path is unset"),
    (AcceptanceRun, {"head": HeadRef("nowhere/at/all")}, r"path=nowhere/at/all: no such folder"),
    (AcceptanceRun, {"data": DataConfig(path="gone.jsonl")}, r"gone\.jsonl"),
    (AcceptanceRun, {"depth": 4}, r"depth=4: this head drafts at most 3 tokens"),
    (AcceptanceRun, {"tree": BEYOND}, r"tree: has depth 4, .* depths 1\.\.3"),
    (AcceptanceRun, {"max_new_tokens": 4000}, r"=4000 are \d+, above the target's window of 256"),
    (AcceptanceRun, {"temperature": 1.0}, r"temperature=1\.0: only greedy text can be replayed"),
    (AcceptanceRun, {"temperature": -1.0}, r"temperature=-1\.0: must be at least 0"),
    (AcceptanceRun, {"top_p": 0.0}, r"top_p=0\.0: must be above 0"),
    (AcceptanceRun, {"head": "eagle3", "tree": [[0]]}, r"tree: an EAGLE head drafts dynamic trees"),
    (AcceptanceRun, {"head": "eagle3", "layers": [0, 1, 9]},
     r"head\.layers=\[9\]: .* hidden states 0\.\.4"),
    (SpeedupRun, {"methods": ["eagle_tree"]}, r"methods=\['eagle_tree'\]: needs .*an EAGLE head"),
    (SpeedupRun, {"methods": "eagle_tre"}, r"\['eagle_tre'\]: unknown; allowed: all, vanilla"),
    (SpeedupRun, {"methods": ["medusa_typical"]}, r"temperature above 0"),
    (SpeedupRun, {"methods": "generate_lookup", "batch_size": 2}, r"batch_size=1, no recurrent"),
    (SpeedupRun, {"heads": ["nowhere/at/all"]}, r"nowhere/at/all"),
    (TreeSearchRun, {"top_ks": [2, 1]}, r"top_ks=\[2, 1\]: must be numbers above 0, in rising"),
    (TreeSearchRun, {"batch_sizes": []}, r"batch_sizes=\[\]: must be numbers above 0, in rising"),
    (TreeSearchRun, {"max_nodes": 0}, r"max_nodes=0"),
    (TreeSearchRun, {"curve": "gone.json"}, r"curve=gone\.json: not a cost curve"),
    (ServeRun, {"tolerance": 1.0}, r"tolerance=1\.0: must be from 0 to below 1"),
    (ServeRun, {"concurrency": [1, 0]}, r"concurrency=\[1, 0\]: numbers must be positive"),
    (ServeRun, {"num_repeats": 0}, r"num_repeats=0: must be above 0"),
]  # fmt: skip
MAINS = {
    AcceptanceRun: acceptance, SpeedupRun: speedup, TreeSearchRun: tree_search, ServeRun: serve
}  # fmt: skip


@pytest.mark.parametrize(("command", "changes", "message"), REFUSED)
def test_bad_settings_are_named(setting, eagles, tmp_path, command, changes, message) -> None:
    own = settings(setting, tmp_path / "o")
    if changes.get("head") == "eagle3":
        own = settings(eagles, tmp_path / "o")
        head = HeadRef(eagles["head"], layers=changes.get("layers"))
        changes = {"head": head, **{name: changes[name] for name in changes.keys() & {"tree"}}}
    with pytest.raises(InputError, match=message):
        MAINS[command].main(command(**{**own, **changes}))
    assert not (tmp_path / "o").exists()


def test_a_machine_without_a_compiler_is_told_before_anything_is_loaded(
    setting, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("conf.command.environment.find_missing_toolchain", lambda _: "gcc")
    own = settings(setting, tmp_path / "o") | {"target": TargetConfig(path="./gone")}
    why = r"^compile=true: torch\.compile lacks gcc; get it, or type compile=false$"
    with pytest.raises(InputError, match=why):
        speedup.main(SpeedupRun(**own, compile=True))


def test_a_result_is_never_overwritten(setting, tmp_path) -> None:
    for command in (AcceptanceRun, SpeedupRun, TreeSearchRun):
        module = MAINS[command]
        file = tmp_path / f"{module.__name__.removeprefix('eval.')}.json"
        file.write_text("{}")
        with pytest.raises(InputError, match=rf"out_dir=.* already holds {file.name}"):
            module.main(command(**settings(setting, tmp_path)))
        assert file.read_text() == "{}"
