"""Commands as users start them, in processes of their own that need not wait for imports.

A script or module is run as `__main__` in a fork of a server that has imported the libraries
Headsmith is made with, and nothing of Headsmith. What a launcher starts, it starts as ever.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    "accelerate.commands.launch", "datasets", "hydra", "matplotlib.pyplot", "rich",
    "safetensors.torch", "torch", "torch._dynamo", "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(LIBRARIES))


def _as_main(command: list[str], cwd: str, env: dict[str, str], outputs: tuple[str, ...]) -> None:
    """Does as `python script ...` and `python -m module ...`."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    mine = {str(ROOT), str(ROOT / "tests")}
    sys.path[:] = [p for p in sys.path if p and p not in mine]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


class Command:
    """As much of `subprocess.Popen` as tests use, of `sys.executable ...` in a group of its own.

    Args:
        merged: what it says on stderr is among what it says on stdout.
    """

    def __init__(
        self, command: list[str], cwd: Path, env: dict[str, str], merged: bool = True
    ) -> None:
        assert command[0] == sys.executable
        self.command = command
        self._folder = tempfile.TemporaryDirectory()
        names = ("out", "out" if merged else "error")
        self._outputs = [Path(self._folder.name, name) for name in names]
        outputs = tuple(map(str, self._outputs))
        self._process = FORKS.Process(target=_as_main, args=(command[1:], str(cwd), env, outputs))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def printed(self) -> str:
        """What it has printed so far."""
        return self._outputs[0].read_text()

    def communicate(self, timeout: float = 180) -> tuple[str, str]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        out, error = [path.read_text() for path in self._outputs]
        return out, error


def run(command: list[str], cwd: Path, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Waits for a command."""
    return _finished(Command(command, cwd, env, merged=False))


def run_two(
    command: list[str], cwd: Path, env: dict[str, str]
) -> "list[subprocess.CompletedProcess[str]]":
    """Waits for two processes that find each other as those of a launcher do."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = env | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no",
    }  # fmt: skip
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    started = [Command(command, cwd, shared | rank, merged=False) for rank in ranks]
    return [_finished(each) for each in started]


def _finished(started: Command) -> "subprocess.CompletedProcess[str]":
    out, error = started.communicate()
    assert started.returncode is not None
    return subprocess.CompletedProcess(started.command, started.returncode, out, error)
