"""Processor threads of a process, under launchers and without."""

import os
import subprocess
import sys

import pytest
from commands import ROOT

from conf.command import environment
from conf.command.environment import count_threads
from conf.errors import InputError

SCRIPT = """
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


def test_every_command_that_computes_takes_them() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}

    def said(*words: str, **environ: str) -> str:
        command = [sys.executable, "-c", "import os" + SCRIPT, *words]
        done = subprocess.run(
            command, cwd=ROOT, env={**own, **environ}, capture_output=True, text=True, check=False
        )
        return done.stdout

    cores = environment.count_cores()
    assert said(**LAUNCHED) == f"{cores} {cores}\n"
    assert said("num_threads=3", **LAUNCHED) == "3 3\n"
