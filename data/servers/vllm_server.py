"""vLLM's server (0.32) of a model, started for one command and stopped with it."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from conf.errors import InputError

MOST_START_S = 3600.0
"""Longest start: large weights may come from a slow disk, and graphs are compiled."""
MOST_END_S = 60.0
"""Seconds after which a server that was asked to end is killed."""
POLL_S = 0.2
NUM_LOG_LINES = 15
CAUSE = re.compile(r".*?(\w*(?:Error|Exception): .+)")
"""A line of a log that names why the server ended. The first is the cause of the others."""
CPU_CACHE_SHARE = 4
"""One of as many bytes of free memory holds keys and values on a CPU. vLLM by itself takes nearly
all memory of the machine, and refuses to start where some is used."""
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)
"""A command that gets SIGTERM when its parent has ended (PR_SET_PDEATHSIG of Linux)."""


def find_vllm_python(asked: str) -> str | None:
    """Find a Python that can import vLLM.

    Args:
        asked: folder of an environment, or its Python; `auto` for that of the `vllm` on the path,
            else this one; `none` for none.

    Returns:
        Path of the Python; None for `none`, and where `auto` finds none.

    Raises:
        InputError: `asked` names a place without vLLM.
    """
    if asked == "none":
        return None
    if asked == "auto":
        found = [_read_interpreter(script)] if (script := shutil.which("vllm")) else []
        return next((python for python in (*found, sys.executable) if _has_vllm(python)), None)
    place = Path(asked).expanduser()
    python = str(place / "bin/python" if place.is_dir() else place)
    if not _has_vllm(python):
        raise InputError(
            f"vllm={asked}: no Python that imports vLLM; give the folder of an environment that "
            "has vLLM, or its Python; or auto, or none"
        )
    return python


def _read_interpreter(script: str) -> str:
    """Read which Python runs a script that pip has installed."""
    with Path(script).open("rb") as file:
        return file.readline().removeprefix(b"#!").decode(errors="replace").strip()


def _has_vllm(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", HAS_VLLM], check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def serve_model(python: str, model: str, options: Sequence[str], log: Path) -> Iterator[str]:
    """Serve a model on this machine while the context is open, and yield the base URL.

    The server ends with this process, however that ends.

    Args:
        python: Python that imports vLLM.
        model: folder or Hub id.
        options: further options of `vllm serve`.
        log: file for what the server prints, replaced.

    Raises:
        InputError: the server ended before it answered, or took too long.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` is unknown to builds for CPUs.
    command = [python, "-c", END_WITH_PARENT, python]
    command += ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    cache_gib = max(1, free_gib // CPU_CACHE_SHARE)
    environ = {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib), **os.environ}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for_start(server, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _end(server)


def _wait_for_start(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    start = time.monotonic()
    while not _answers(port):
        if server.poll() is not None or time.monotonic() - start > MOST_START_S:
            how = f"ended with {server.returncode}" if server.returncode else "does not answer"
            lines = log.read_text(errors="replace").splitlines()
            causes = [found[1] for line in lines if (found := CAUSE.match(line))]
            raise InputError(
                f"vLLM {how}; set vllm=none to answer in process, or start the server yourself and "
                f"set endpoint=URL. From {log}:\n" + "\n".join(causes[:1] or lines[-NUM_LOG_LINES:])
            )
        time.sleep(POLL_S)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
    except httpx.RequestError:
        return False


def _end(server: "subprocess.Popen[bytes]") -> None:
    """End a server and the processes that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(MOST_END_S)
