"""A part of a contest: a command, the file that it leaves, and what it takes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import write_whole

MARK = "HEADSMITH_CONTEST"
"""The environment variable by which a contest knows its commands; holds its folder."""
TAIL = 15
"""Lines of a log that are shown where a part fails."""


@dataclass(frozen=True)
class Part:
    """A command whose result is not made again where it is.

    Attributes:
        name: of its log, and of what it took.
        command: its words.
        result: the file that is there once it is done.
        fresh: a folder that goes before it starts, for what cannot go on.
        folder: whose bytes count.
    """

    name: str
    command: list[str]
    result: Path
    fresh: Path | None = None
    folder: Path | None = None


class Took:
    """Seconds and peak memory of each part over all starts, in `took.json`."""

    def __init__(self, out_dir: Path) -> None:
        self.path = out_dir / "took.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())
        for name, row in self.rows.items():
            if row["since"] is not None:  # killed: it was at work until its last word
                log = log_of(out_dir, name)
                last = log.stat().st_mtime if log.exists() else row["since"]
                row["seconds"] += max(0.0, last - row["since"])
                row["since"] = None

    def begin(self, name: str) -> None:
        """A part starts."""
        row = self.rows.setdefault(name, {"seconds": 0.0, "memory": 0})
        row["since"] = time.time()
        self._write()

    def end(self, name: str, memory: int) -> None:
        """It ended, after a peak of so many bytes in one of its processes."""
        row = self.rows[name]
        row["seconds"] += time.time() - row["since"]
        row |= {"memory": max(row["memory"], memory), "since": None}
        self._write()

    def _write(self) -> None:
        write_whole(self.path, json.dumps(self.rows, indent=1) + "\n")


def run(part: Part, out_dir: Path, took: Took) -> None:
    """Runs a part whose result is not there.

    Raises:
        InputError: it left none; with the last lines of its log.
    """
    if part.fresh is not None:
        shutil.rmtree(part.fresh, ignore_errors=True)
    log = log_of(out_dir, part.name)
    log.parent.mkdir(exist_ok=True)
    environ = os.environ | {MARK: str(out_dir.resolve())}
    took.begin(part.name)
    with log.open("ab") as file:
        child = subprocess.Popen(part.command, stdout=file, stderr=file, env=environ)
        try:
            code, memory = _wait(child)
        except BaseException:  # a signal: the command saves what it has
            child.terminate()
            took.end(part.name, _wait(child)[1])
            raise
    took.end(part.name, memory)
    if not part.result.exists():
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-TAIL:]
        shown = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            f"{part.name} ended with code {code} and without {part.result}; {log} ends:\n{shown}"
        )


def _wait(child: "subprocess.Popen[bytes]") -> tuple[int, int]:
    """The exit code, and bytes of the largest process among it and what it waited for."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def log_of(out_dir: Path, name: str) -> Path:
    """Where a part's words go."""
    return out_dir / "logs" / f"{name.replace(' ', '-')}.log"


def end_orphans(out_dir: Path) -> None:
    """Ends what a contest in this folder that was killed left running, and waits for it."""
    while pids := list(_orphans(out_dir)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(1)


def _orphans(out_dir: Path) -> Iterator[int]:
    wanted = f"{MARK}={out_dir.resolve()}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
        except OSError:  # another user's, or just gone
            continue


def device_memory(out_dir: Path, name: str) -> dict[str, float]:
    """`device`: bytes that a training used on each GPU at most, as it said itself; or nothing."""
    log = log_of(out_dir, name)
    said = (
        re.findall(r"([\d.]+) GB measured at most", log.read_text(errors="replace"))
        if log.exists()
        else []
    )
    return {"device": float(said[-1]) * 1e9} if said else {}


def bytes_of(folder: Path) -> int:
    """Of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
