"""`eval/speedup.py` in two processes: the prompts are spread, the texts stay."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import commands
from commands import ROOT

from tests.eval.test_commands import made

ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MASTER"))},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def measured(settings: dict, out_dir: Path, run: Callable) -> dict:
    command = [
        sys.executable, str(ROOT / "eval/speedup.py"), "methods=medusa_tree",
        f"target.path={settings['target']}", f"data.path={settings['data']}",
        f"head.path={settings['head']}", f"out_dir={out_dir}", "max_new_tokens=16",
        "num_repeats=1", "num_warmups=0", "temperature=0.7", "data.num_prompts=3",
    ]  # fmt: skip
    processes = run(command, out_dir.parent, ENV)
    for done in processes:
        assert done.returncode == 0, done.stderr
    assert [done.stdout.count("wrote") for done in processes] == [1, 0][: len(processes)]
    return json.loads((out_dir / "speedup.json").read_text())


def test_two_processes_measure_what_one_measures(tmp_path: Path) -> None:
    settings = made(tmp_path, "llama")
    one = measured(settings, tmp_path / "1", lambda *how: [commands.run(*how)])
    two = measured(settings, tmp_path / "2", commands.run_two)
    for key in ("tau", "tau_ci95", "alpha", "num_tokens", "num_steps"):
        assert one["methods"]["medusa_tree"][key] == two["methods"]["medusa_tree"][key]
    assert [text["methods"] for text in one["texts"]] == [text["methods"] for text in two["texts"]]
    assert two["data"]["num_prompts"] == 6
