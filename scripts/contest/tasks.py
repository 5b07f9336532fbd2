"""A task of a contest: a command, the file that it writes, and its cost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import write_atomically

MARK = "HEADSMITH_CONTEST"
"""Environment variable that marks the commands of a contest; its value is the folder."""
TAIL = 15
"""Lines of a log to show when a task fails."""


@dataclass(frozen=True)
class Task:
    """A command that is not run again if its result exists.

    Attributes:
        name: name of its log and of its costs.
        command: its arguments.
        result: file that exists once it is done.
        fresh: folder to delete before it starts, for a task that cannot continue.
    """

    name: str
    command: list[str]
    result: Path
    fresh: Path | None = None


class TaskCosts:
    """Seconds and peak memory of each task over all starts, stored in `took.json`."""

    def __init__(self, out_dir: Path) -> None:
        self.path = out_dir / "took.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())
        for name, row in self.rows.items():
            if row["since"] is not None:  # killed: it worked until its last output
                log = log_path(out_dir, name)
                last = log.stat().st_mtime if log.exists() else row["since"]
                row["seconds"] += max(0.0, last - row["since"])
                row["since"] = None

    def start_task(self, name: str) -> None:
        """Start to count."""
        row = self.rows.setdefault(name, {"seconds": 0.0, "memory": 0})
        row["since"] = time.time()
        self._write_rows()

    def end_task(self, name: str, memory: int) -> None:
        """Stop to count, with the peak bytes of one of the processes."""
        row = self.rows[name]
        row["seconds"] += time.time() - row["since"]
        row |= {"memory": max(row["memory"], memory), "since": None}
        self._write_rows()

    def _write_rows(self) -> None:
        write_atomically(self.path, json.dumps(self.rows, indent=1) + "\n")


def run_task(task: Task, out_dir: Path, took: TaskCosts) -> None:
    """Run a task.

    Raises:
        InputError: it left no result; the message has the last lines of its log.
    """
    if task.fresh is not None:
        shutil.rmtree(task.fresh, ignore_errors=True)
    log = log_path(out_dir, task.name)
    log.parent.mkdir(exist_ok=True)
    environ = os.environ | {MARK: str(out_dir.resolve())}
    took.start_task(task.name)
    with log.open("ab") as file:
        child = subprocess.Popen(task.command, stdout=file, stderr=file, env=environ)
        try:
            code, memory = _wait_for_task(child)
        except BaseException:  # a signal: the command saves its state
            child.terminate()
            took.end_task(task.name, _wait_for_task(child)[1])
            raise
    took.end_task(task.name, memory)
    if not task.result.exists():
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-TAIL:]
        shown = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            f"{task.name} ended with code {code}, but without {task.result}; {log} ends:\n{shown}"
        )


def _wait_for_task(child: "subprocess.Popen[bytes]") -> tuple[int, int]:
    """Wait; return the exit code, and bytes of the largest process of it and its children."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def log_path(out_dir: Path, name: str) -> Path:
    """File for a task's output."""
    return out_dir / "logs" / f"{name.replace(' ', '-')}.log"


def end_orphans(out_dir: Path) -> None:
    """End processes that a killed contest in this folder left, and wait for them."""
    while pids := list(iter_orphan_pids(out_dir)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(1)


def iter_orphan_pids(out_dir: Path) -> Iterator[int]:
    """Ids of processes that contests in this folder started."""
    wanted = f"{MARK}={out_dir.resolve()}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or just gone
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def device_memory(out_dir: Path, name: str) -> dict[str, float]:
    """`device`: most bytes of a training on each GPU, as its log states; empty if it does not."""
    log = log_path(out_dir, name)
    text = log.read_text(errors="replace") if log.exists() else ""
    said = re.findall(r"([\d.]+) GB measured at most", text)
    return {"device": float(said[-1]) * 1e9} if said else {}


def bytes_of(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
