"""Reports of a contest on results; and whole contests, stopped and not."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from commands import ROOT
from stores import save_inputs

from conf.errors import InputError
from heads.kinds import load_head
from scripts.contest import report
from scripts.contest.run import Entrant, TaskCosts, collect_task_costs, list_head_methods
from tests.train.parallel.test_launch import ENV, wait_for
from train.loop import memory

RECIPES = [Entrant("medusa", "medusa", ()), Entrant("eagle3_1", "eagle", ("head=eagle3_1",))]
WAYS = {
    "medusa": {"chain": "medusa_chain", "tree": "medusa_tree"},
    "eagle3_1": {"chain": "eagle_chain", "tree": "eagle_tree"},
}
RATES = {
    "vanilla": (100, 400), "medusa_chain": (150, 450), "medusa_tree": (300, 200),
    "eagle_chain": (200, 380), "eagle_tree": (120, 420), "suffix": (160, 500),
}  # fmt: skip
"""tokens/s, one and four at a time."""


def rows(*emitted: int) -> list[dict[str, Any]]:
    return [{"dialogue": n, "turn": 1, "emitted": [each] * 2} for n, each in enumerate(emitted)]


def speed() -> dict[str, Any]:
    emitted = {"vanilla": (1, 1), "eagle_chain": (2, 4)}
    sizes = {
        size: {
            "methods": {
                name: {
                    "tokens_per_s": rates[place],
                    "speedup": rates[place] / RATES["vanilla"][place],
                    "speedup_ci95": None if name == "vanilla" else [0.5, 2.5],
                }
                for name, rates in RATES.items()
            }
        }
        for place, size in enumerate(("1", "4"))
    }
    found = {
        n: {"tau": sum(emitted.get(n, (2, 3))) / 2, "prompts": rows(*emitted.get(n, (2, 3)))}
        for n in RATES
    }
    return {"concurrency": sizes, "methods": found}


def acceptance(tau: float, *emitted: int) -> dict[str, Any]:
    figures = {"tau": tau, "tau_ci95": None, "alpha": [0.5], "prompts": rows(*emitted)}
    return {**figures, "num_tokens": 20, "num_prompts": 2, "static_tree": {**figures, "tau": 4.0}}


COSTS = {
    "prompt": 0.5,
    "sizes": {
        "1": {"plain": 0.1, "heads": [{"chain": 0.2, "tree": 0.3}, {"chain": 0.4, "tree": 0.8}]},
        "4": {"plain": 0.2, "heads": [{"chain": 0.4, "tree": 0.6}, {"chain": 0.8, "tree": 1.6}]},
    },
}
PLAN = {
    "steps": {"medusa": 60, "eagle3_1": 20},
    "seconds_per_step": {"medusa": 1.0, "eagle3_1": 3.0},
    "estimate": {
        "train medusa": {"seconds": 60.0, "bytes": 2_000_000, "memory": 10**9},
        "speed": {"seconds": 90.0, "memory": 2 * 10**9},
    },
}


def measured(out_dir: Path) -> TaskCosts:
    """A folder in which all but the report is done."""
    contents = {"speed/speedup": speed(), "costs/costs": COSTS}
    contents["acceptance/medusa/acceptance"] = acceptance(2.0, 2, 3)
    contents["acceptance/eagle3_1/acceptance"] = acceptance(2.5, 2, 4)
    for name, content in contents.items():
        path = out_dir / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    for name in WAYS:
        folder = out_dir / "heads" / name / "head"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(name.encode())
        data = {
            "sha256": "ab",
            "num_train_sequences": 40,
            "num_tokens": 900,
            "rows_per_s": len(name),
        }
        (folder / "headsmith.json").write_text(json.dumps({"data": data}))
    took = TaskCosts(out_dir)
    took.rows["train medusa"] = {"seconds": 120.0, "memory": 3 * 10**9, "since": None}
    took.rows["speed"] = {"seconds": 30.0, "memory": 10**9, "since": None}
    return took


def test_the_fastest_head_over_all_batch_sizes_wins() -> None:
    # 200 x 380 = 76,000 beats 150 x 450 = 67,500, 300 x 200 and 120 x 420.
    assert report.find_winner(speed(), WAYS) == ("eagle3_1", "eagle_chain")


def test_speed_is_predicted_from_acceptance_and_costs() -> None:
    results = {"medusa": acceptance(2.0), "eagle3_1": acceptance(2.5)}
    found = report.predict_rates(COSTS, results, WAYS)
    # 11 tokens a text, the first from the prompt's own pass.
    assert found["vanilla"] == pytest.approx({"1": 11 / (0.5 + 1.0), "4": 11 / (0.5 + 0.5)})
    assert found["medusa_chain"]["1"] == pytest.approx(11 / (0.5 + 5 * 0.2))
    assert found["medusa_tree"]["4"] == pytest.approx(11 / (0.5 + 2.5 * 0.6 / 4))
    assert found["eagle_chain"]["4"] == pytest.approx(11 / (0.5 + 4 * 0.8 / 4))


def test_a_contest_ends_with_a_table_a_page_and_a_head(tmp_path: Path) -> None:
    assert list_head_methods(RECIPES) == WAYS
    said = report.write_report(
        WAYS, tmp_path, PLAN, collect_task_costs(PLAN, measured(tmp_path), tmp_path)
    )
    text = (tmp_path / "contest.md").read_text()
    assert said.startswith(text)
    lines = text.splitlines()
    assert lines[0] == (
        "eagle3_1 wins, drafting by eagle_chain. Faster over all batch sizes, without training: "
        "suffix."
    )
    # The other head: -0.5 tokens a pass, of which -1 in one dialogue and none in the other.
    assert (
        "| medusa | medusa_chain | 2.500 | -0.500 (-1.000 to +0.000) "
        "| 150 [7], 1.50x (0.50-2.50) | 450 [11], 1.12x (0.50-2.50) |"
    ) in lines
    assert "| - | vanilla | 1.000 | -2.000 (-3.000 to -1.000) | 100 [7], 1.00x |" in text
    assert "| - | suffix | 2.500 | -0.500 (-1.000 to +0.000) | 160, 1.60x (" in text
    assert "| medusa | 2.000 | - | -0.500 (-1.000 to +0.000) | 4.000 |" in text
    assert "| train medusa | 1.0 → 2.0 | 2 → 0 | 1.00 → 3.00 |" in lines
    assert "| all | 2.5 → 2.5 | 2 → 0 | 2.00 → 3.00 |" in lines
    page = (tmp_path / "contest.html").read_text()
    assert "<td>eagle_chain</td>" in page
    assert "<script" not in page
    assert (tmp_path / "winner/head/weights").read_bytes() == b"eagle3_1"
    content = json.loads((tmp_path / "contest.json").read_text())
    assert (content["winner"], content["method"]) == ("eagle3_1", "eagle_chain")
    assert content["methods"]["suffix"]["sizes"]["4"]["measured"] == 500


def test_a_report_needs_what_is_measured(tmp_path: Path) -> None:
    took = measured(tmp_path)
    (tmp_path / "costs/costs.json").unlink()
    with pytest.raises(
        InputError, match=r"costs\.json is missing; run the other parts before report"
    ):
        report.write_report(WAYS, tmp_path, PLAN, collect_task_costs(PLAN, took, tmp_path))


def test_memory_of_gpus_is_what_trainings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = measured(tmp_path)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3_500_000_000)
    (tmp_path / "logs").mkdir()
    said = memory.format_measured_memory({"target": 3 * 10**9}, torch.device("cuda"))
    (tmp_path / "logs/train-medusa.log").write_text(f"{said}\n")
    first = {**PLAN["estimate"]["train medusa"], "device": 4e9}
    plan = {**PLAN, "estimate": {**PLAN["estimate"], "train medusa": first}}
    header, *others = report.build_cost_rows(plan, collect_task_costs(plan, took, tmp_path))
    assert header[-1] == "GB on each device"
    assert [row[-1] for row in others] == ["4.00 → 3.50", "- → -", "4.00 → 3.50"]


def test_heads_of_other_data_do_not_compete(tmp_path: Path) -> None:
    took, path = measured(tmp_path), tmp_path / "heads/eagle3_1/head/headsmith.json"
    path.write_text(path.read_text().replace("900", "901"))
    with pytest.raises(InputError, match=r"medusa and eagle3_1, .* num_tokens was 900, is 901"):
        report.write_report(WAYS, tmp_path, PLAN, collect_task_costs(PLAN, took, tmp_path))


def test_a_plan_says_what_it_will_take() -> None:
    assert report.format_plan(PLAN).splitlines() == [
        "medusa: 60 steps of 1.00 s",
        "eagle3_1: 20 steps of 3.00 s",
        "estimated: 0.04 h, 2 MB on disk, 2.00 GB of memory",
    ]


def arguments(inputs: Path, out_dir: Path) -> list[str]:
    chat = inputs / "chat.jsonl"
    return [
        sys.executable, str(ROOT / "scripts/contest/run.py"), f"target.path={inputs / 'target'}",
        f"data.path={chat}", "data.max_length=128", "data.eval_fraction=0.2", f"out_dir={out_dir}",
        f"prompts.path={chat}", "prompts.num_prompts=3", "recipes=[medusa,eagle3_1]",
        f"tokens={4 * 128 * 12}", "train.batch_size=4", "untrained=[prompt_lookup,suffix]",
        "concurrency=[1,2]", "max_new_tokens=12", "num_turns=1", "num_repeats=1", "probe_steps=4",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_contest_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path) -> None:
    inputs, out_dir = save_inputs(tmp_path), tmp_path / "killed"
    stops = {
        "logs/probe-eagle3_1.log": signal.SIGKILL,
        "logs/train-medusa.log": signal.SIGKILL,
        "heads/eagle3_1/metrics.jsonl": signal.SIGTERM,
        "speed/speedup.partial/0/runs.jsonl": signal.SIGKILL,
    }
    for name, number in stops.items():
        process = commands.Command(arguments(inputs, out_dir), tmp_path, ENV)
        wait_for(out_dir / name, process)
        os.kill(process.pid, number)
        process.communicate()
    finished(inputs, out_dir)
    finished(inputs, tmp_path / "whole")
    for head in WAYS:
        folders = (each / "heads" / head / "head" for each in (out_dir, tmp_path / "whole"))
        ours, theirs = (load_head(str(each)).collect_tensors() for each in folders)
        for key, tensor in ours.items():
            assert tensor.equal(theirs[key]), key
    ours, theirs = (
        json.loads((each / "contest.json").read_text()) for each in (out_dir, tmp_path / "whole")
    )
    for name, row in ours["methods"].items():
        assert (row["tau"], row["label"]) == (theirs["methods"][name]["tau"], row["label"])
    assert load_head(str(out_dir / "winner/head")).collect_tensors()
    assert "then" not in finished(inputs, out_dir)  # nothing is left to do


def finished(inputs: Path, out_dir: Path) -> str:
    done = commands.run(arguments(inputs, out_dir), out_dir.parent, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
