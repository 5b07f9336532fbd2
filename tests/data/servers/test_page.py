"""`data/servers/README.md` as a reader meets it, from two terminals; vLLM is a stand-in."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import commands
import httpx
import pytest
from commands import ROOT
from stores import save_chat
from toys import save_target

from tests.train.parallel.test_launch import ENV

PAGE = (ROOT / "data/servers/README.md").read_text()
SMALL = {
    "train/eagle.py": ["train.max_steps=4", "train.batch_size=2", "data.max_length=128"],
    "scripts/capture.py": ["data.max_length=128", "data.eval_fraction=0.2"],
    "eval/acceptance.py": ["max_new_tokens=8", "data.num_prompts=2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target at the place of Qwen/Qwen3-8B, conversations, prompts, and `vllm` on the path."""
    folder = tmp_path_factory.mktemp("page")
    save_target(folder / "Qwen/Qwen3-8B", num_hidden_layers=8)
    save_chat(folder / "my_chats.jsonl")
    (folder / "prompts.jsonl").write_text('{"turns": ["hello, how are you?"]}\n' * 2)
    vllm = folder / "bin/vllm"
    vllm.parent.mkdir()
    vllm.write_text(
        f'#!/bin/bash\nexec {sys.executable} {ROOT}/tests/engines/vllm_standin.py "$@"\n'
    )
    vllm.chmod(0o755)
    return folder


def shown(script: str) -> str:
    """The first command of the page that runs a script."""
    (line, *_) = re.findall(rf"(?:python|accelerate launch) {script} [^\n|`]*", PAGE)
    return line


def run(folder: Path, line: str, port: int, **env: str) -> "subprocess.CompletedProcess[str]":
    words = shlex.split(line.replace(":8000", f":{port}"))
    script = next(word for word in words if word.endswith(".py"))
    settings = words[words.index(script) + 1 :]
    command = [sys.executable, str(ROOT / script), *settings, *SMALL[script]]
    return commands.run(command, folder, {**ENV, "NO_PROXY": "127.0.0.1,localhost", **env})


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def started(folder: Path, line: str, ready: str) -> Iterator[None]:
    """A server in another terminal."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    server = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env={**ENV, "PATH": path}, start_new_session=True
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                httpx.get(ready)
                break
            except httpx.TransportError:
                assert server.poll() is None
                time.sleep(0.2)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


@pytest.mark.slow
def test_training_says_what_to_serve_and_what_is_served_does_all_of_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    port = free_port()
    refused = run(folder, shown("train/eagle.py"), port)
    assert refused.returncode != 0
    (serve,) = re.findall(r"serve with: (vllm serve .*)", " ".join(refused.stderr.split()))
    # The page's line is of 36 layers.
    (written,) = re.findall(r"^vllm serve .*", PAGE, re.M)
    own = serve.replace("[2, 4, 5, 8]", "[2, 18, 33, 36]").replace("2-4-5-8", "2-18-33-36")
    assert [*own.split()[:3], "--max-model-len", "2049", *own.split()[3:]] == written.split()
    serve = serve.replace("/dev/shm", str(folder / "shm"))
    line = f"{serve} --max-model-len 2049 --port {port}"
    with started(folder, line, f"http://127.0.0.1:{port}/v1/models"):
        for script in SMALL:
            done = run(folder, shown(script), port)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "log-probabilities 0.0000 nats" in done.stdout
        assert "tau" in done.stdout
        (relay_line,) = re.findall(r"^python scripts/relay.py .*", PAGE, re.M)
        relay_port, key = free_port(), "0" * 64
        relay = relay_line.replace("10.0.0.5", "127.0.0.1").replace("8100", str(relay_port))
        relay = relay.replace("/dev/shm/layers-2-18-33-36", str(folder / "shm/layers-2-4-5-8"))
        relay = f"HEADSMITH_RELAY_TOKEN={key} {relay.replace('scripts', f'{ROOT}/scripts')}"
        (by_relay,) = re.findall(r"^accelerate launch train/eagle.py .*", PAGE, re.M)
        by_relay = by_relay.replace("10.0.0.5", "127.0.0.1").replace("8100", str(relay_port))
        with started(folder, relay, f"http://127.0.0.1:{relay_port}/health"):
            done = run(folder, f"{by_relay}-relay", port, HEADSMITH_RELAY_TOKEN=key)
            assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "shm/layers-2-4-5-8").iterdir()) == []
