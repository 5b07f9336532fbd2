"""Threads of a process under launchers and without; and prompts that two processes share."""

import json
import os
import sys
from pathlib import Path

import commands
import pytest
from commands import ROOT

from conf.command import environment
from conf.command.environment import count_threads
from conf.errors import InputError
from tests.eval.test_commands import made
from tests.train.runs import start

OWN = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MASTER"))}
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from conf.command.entry import Command
from conf.settings.export import MergeAdapterRun

COMMAND = Command(__doc__, MergeAdapterRun, "merge")
COMMAND.parse_command_line()
COMMAND.run(lambda config: print(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")))
"""
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("asked", "environ", "number"),
    [
        ("auto", {}, None),
        ("auto", {"OMP_NUM_THREADS": "1"}, None),  # a user's own, under plain python
        ("auto", {"OMP_NUM_THREADS": "4"}, None),
        ("auto", LAUNCHED, 12),
        ("auto", {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}, 3),
        ("auto", {**LAUNCHED, "LOCAL_WORLD_SIZE": "16"}, 1),
        ("auto", {"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}, 1),  # torchrun
        ("auto", {"LOCAL_WORLD_SIZE": "1"}, 12),
        ("auto", {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 6),
        ("auto", {**LAUNCHED, "OMP_NUM_THREADS": "5"}, None),  # no launcher sets five by itself
        (3, {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}, 3),
        (1, LAUNCHED, 1),
    ],
)
def test_cores_are_divided_where_a_launcher_leaves_one_thread(
    monkeypatch: pytest.MonkeyPatch, asked: int | str, environ: dict[str, str], number: int | None
) -> None:
    monkeypatch.setattr(environment, "count_cores", lambda: 12)
    assert count_threads(asked, environ) == number


@pytest.mark.parametrize("asked", [0, -2, "many"])
def test_other_numbers_are_refused(asked: int | str) -> None:
    with pytest.raises(InputError, match=rf"num_threads={asked}: must be .* above 0, or auto"):
        count_threads(asked, {})


def test_every_command_that_computes_takes_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def said(*words: str) -> str:
        command = [sys.executable, str(tmp_path / "script.py"), *words]
        return commands.run(command, tmp_path, OWN | LAUNCHED).stdout

    cores = environment.count_cores()
    assert said() == f"{cores} {cores}\n"
    assert said("num_threads=3") == "3 3\n"


def words_of(settings: dict, out_dir: Path) -> list[str]:
    return [
        "methods=medusa_tree",
        f"target.path={settings['target']}", f"data.path={settings['data']}",
        f"head.path={settings['head']}", f"out_dir={out_dir}", "max_new_tokens=8",
        "num_repeats=1", "num_warmups=0", "temperature=0.7", "data.num_prompts=3",
    ]  # fmt: skip


def test_two_processes_measure_what_one_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = made(tmp_path, "llama")
    start("eval/speedup.py", *words_of(settings, tmp_path / "1"))
    assert capsys.readouterr().out.count("wrote") == 1
    command = [sys.executable, str(ROOT / "eval/speedup.py"), *words_of(settings, tmp_path / "2")]
    environ = OWN | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    processes = commands.run_two(command, tmp_path, environ)
    for done in processes:
        assert done.returncode == 0, done.stderr
    assert [done.stdout.count("wrote") for done in processes] == [1, 0]
    one, two = (json.loads((tmp_path / name / "speedup.json").read_text()) for name in "12")
    for key in ("tau", "tau_ci95", "alpha", "num_tokens", "num_steps"):
        assert one["methods"]["medusa_tree"][key] == two["methods"]["medusa_tree"][key]
    assert [text["methods"] for text in one["texts"]] == [text["methods"] for text in two["texts"]]
    assert two["data"]["num_prompts"] == 6
