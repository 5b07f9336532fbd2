"""Reports of a contest on results; and whole contests, stopped and not."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import ROOT
from stores import save_inputs

from conf.errors import InputError
from heads.kinds import load_head
from scripts.contest import run as report
from scripts.contest.run import Entrant, list_head_methods
from tests.train.runs import ENV, wait_for

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


def measured(out_dir: Path) -> None:
    """A folder in which all but the report is done."""
    contents = {"speed/speedup": speed()}
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


def test_the_fastest_head_over_all_batch_sizes_wins() -> None:
    # 200 x 380 = 76,000 beats 150 x 450 = 67,500, 300 x 200 and 120 x 420.
    figures = report.collect_method_figures(speed(), WAYS)
    assert [(row["label"], name) for name, row in figures.items()][:3] == [
        (None, "suffix"), ("eagle3_1", "eagle_chain"), ("medusa", "medusa_chain"),
    ]  # fmt: skip


def test_a_contest_ends_with_tables_and_a_head(tmp_path: Path) -> None:
    assert list_head_methods(RECIPES) == WAYS
    measured(tmp_path)
    said = report.write_report(WAYS, tmp_path, 60)
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
        "| 150, 1.50x (0.50-2.50) | 450, 1.12x (0.50-2.50) |"
    ) in lines
    assert "| - | vanilla | 1.000 | -2.000 (-3.000 to -1.000) | 100, 1.00x |" in text
    assert "| - | suffix | 2.500 | -0.500 (-1.000 to +0.000) | 160, 1.60x (" in text
    assert "| medusa | 2.000 | - | -0.500 (-1.000 to +0.000) | 4.000 |" in text
    assert (tmp_path / "winner/head/weights").read_bytes() == b"eagle3_1"
    content = json.loads((tmp_path / "contest.json").read_text())
    assert (content["winner"], content["method"]) == ("eagle3_1", "eagle_chain")
    assert content["steps"] == {"medusa": 60, "eagle3_1": 60}
    assert content["methods"]["suffix"]["sizes"]["4"]["measured"] == 500


def test_a_report_needs_all_that_is_measured_of_heads_with_the_same_data(tmp_path: Path) -> None:
    measured(tmp_path)
    path = tmp_path / "heads/eagle3_1/head/headsmith.json"
    same = path.read_text()
    path.write_text(same.replace("900", "901"))
    with pytest.raises(InputError, match=r"medusa and eagle3_1, .* num_tokens was 900, is 901"):
        report.write_report(WAYS, tmp_path, 60)
    path.write_text(same)
    (tmp_path / "speed/speedup.json").unlink()
    missing = r"speedup\.json is missing; run the other parts before report"
    with pytest.raises(InputError, match=missing):
        report.write_report(WAYS, tmp_path, 60)


def arguments(inputs: Path, out_dir: Path) -> list[str]:
    chat = inputs / "chat.jsonl"
    return [
        sys.executable, str(ROOT / "scripts/contest/run.py"), f"target.path={inputs / 'target'}",
        f"data.path={chat}", "data.max_length=128", "data.eval_fraction=0.2", f"out_dir={out_dir}",
        f"prompts.path={chat}", "prompts.num_prompts=3", "recipes=[medusa,eagle3_1]",
        f"tokens={4 * 128 * 12}", "train.batch_size=4", "untrained=[prompt_lookup,suffix]",
        "concurrency=[1,2]", "max_new_tokens=12", "num_turns=1", "num_repeats=1",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_contest_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path) -> None:
    inputs, out_dir = save_inputs(tmp_path), tmp_path / "killed"
    stops = {
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
