"""Workers: modules of `scripts/bench/peers/` that run in a process, or an environment, apart.

A process of its own keeps one path's memory out of another's; another toolkit needs other
packages than ours anyway. A worker reads a job and writes a result, both JSON files.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def python_for(variable: str | None) -> str | None:
    """The Python that an environment variable names, ours for None; None if it is unset.

    Raises:
        InputError: it names no file.
    """
    if variable is None:
        return sys.executable
    python = os.environ.get(variable)
    if python is not None and not Path(python).is_file():
        raise InputError(f"{variable}={python}: no such file; it must name a Python")
    return python


def result_of(worker: str, job: dict[str, Any], python: str) -> dict[str, Any]:
    """What a worker makes of a job.

    Args:
        worker: module of `scripts/bench/peers/`.
        job: for its JSON file.
        python: the interpreter.

    Raises:
        InputError: it failed, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        question.write_text(json.dumps(job))
        command = [python, "-m", f"scripts.bench.peers.{worker}", str(question), str(answer)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"{python}: {job} failed there:\n{done.stderr[-2000:]}")
        return json.loads(answer.read_text())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
