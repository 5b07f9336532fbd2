"""vLLM's own server on a CPU: what `eval/serve.py` reads of it, and hidden states."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from environments import SCRIPTS, VLLM, needs, opened, serve_checked
from stores import NUM_LAYERS, save_inputs
from toys import eagle_head, save_target

from conf.settings.eagle import EagleForm
from conf.settings.target import Dtype, TargetConfig
from data.servers.hidden_states import HiddenStatesClient, ServerFeatureLayers
from data.servers.http_client import Endpoint
from data.servers.server_pool import HiddenStatesPool
from eval.measure.target_answers import generate_greedy_answers
from heads.target_model.load import find_final_norm, load_remote
from heads.target_model.model import FeatureLayers
from tests.train.loop.test_served import LAYERS
from tests.train.loop.test_served import trained as heads_trained

pytestmark = pytest.mark.engine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass
class Server:
    """vLLM's server in a process of its own."""

    log: Path
    arguments: Sequence[str]
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        command = [os.environ[VLLM], str(SCRIPTS / "vllm_server.py"), "--host", "127.0.0.1"]
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *self.arguments],
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        while not answers(f"{self.url}/models"):
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            time.sleep(0.2)

    def end(self, how: int = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        self.process.wait()


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Servers that answer."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.end()


@contextmanager
def served(log: Path, *arguments: str) -> Iterator[str]:
    """The base URL of vLLM's server, once it answers."""
    server = Server(log, arguments)
    with running(server):
        yield server.url


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@needs(VLLM)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vllm_hands_out_the_states_that_we_compute(tmp_path, monkeypatch, family) -> None:
    """Documents that share their beginnings, up to the whole context, prefilled in pieces."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = save_target(tmp_path / "target", family, num_hidden_layers=4)
    target = opened(folder)
    bare = load_remote(TargetConfig(path=str(folder), dtype=Dtype.float32), target.device)
    taps = ServerFeatureLayers(
        (0, 3, 1), target.num_layers, target.hidden_size, find_final_norm(bare)
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (127,), generator=generator).tolist()
    ends = torch.randint(target.vocab_size, (6, 9), generator=generator).tolist()
    documents = [ids, ids[:1], *(ids[: 20 * n] + end for n, end in enumerate(ends)), ids[:64]]
    storage = tmp_path / "states"
    options = ["--model", str(folder), "--dtype", "float32", "--enforce-eager"]
    limits = ["--max-model-len", "128", "--max-num-batched-tokens", "48", "--max-num-seqs", "4"]
    arguments = [*options, *limits, *taps.serve_options(storage)]
    with (
        served(tmp_path / "server.log", *arguments) as url,
        HiddenStatesPool([HiddenStatesClient(Endpoint(url), taps, concurrency=4)]) as engine,
    ):
        assert engine.servers[0].max_model_len == 128
        found = list(engine.stream_states(documents))
        answered = engine.request_answers_with_states([ids[:20], ids[:5]], 12, {"temperature": 0.0})
        assert list((storage / "layers-0-1-3-4").iterdir()) == []
    assert len(found) == len(documents)
    for document, states in zip(documents, found, strict=True):
        ours = target.encode_text(document, FeatureLayers((0, 3, 1)))
        wanted = {f"layers.{index}": layer[0] for index, layer in ours.layers.items()}
        wanted["hidden_states"] = ours.hidden_states[0]
        assert states.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(states[name], tensor, rtol=0, atol=1e-5, msg=name)
    for prompt, (answer, states) in zip((ids[:20], ids[:5]), answered, strict=True):
        assert answer == generate_greedy_answers(target, [prompt], 12)[0]
        assert states["hidden_states"].shape == (len(prompt) + 11, target.hidden_size)


def arguments_of(inputs: Path, storage: Path, kind: str) -> list[str]:
    """Of a server of the states that a kind of head reads."""
    taps = ServerFeatureLayers((*LAYERS[kind], NUM_LAYERS), NUM_LAYERS, 64, None)
    options = ["--model", str(inputs / "target"), "--dtype", "float32", "--enforce-eager"]
    limits = ["--max-model-len", "160", "--max-num-batched-tokens", "48", "--max-num-seqs", "16"]
    return [*options, *limits, *taps.serve_options(storage)]


@needs(VLLM)
@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash"])
def test_a_head_learns_from_vllm_what_it_learns_here(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = save_inputs(tmp_path / "inputs")
    expected = heads_trained(kind, inputs, tmp_path / "here", [])
    with served(tmp_path / "log", *arguments_of(inputs, tmp_path / "states", kind)) as url:
        found = heads_trained(kind, inputs, tmp_path / "served", [url, url])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


NUM_STEPS = 60


def steps_done(out_dir: Path) -> int:
    file = out_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@contextmanager
def meanwhile(out_dir: Path, what: Callable[[], object]) -> Iterator[None]:
    """Does something once a run has made a third of its steps."""

    def wait() -> None:
        while steps_done(out_dir) < NUM_STEPS // 3:
            time.sleep(0.02)
        what()

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(wait)
        yield
        done.result()


def small_disk(folder: Path) -> None:
    """A file system of 2 MiB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")


@needs(VLLM)
@pytest.mark.parametrize("fault", ["killed", "restarted", "full"])
def test_what_befalls_vllm_changes_nothing(tmp_path, monkeypatch, fault) -> None:
    """One of two servers dies; the only one is started anew; its folder is full for a while."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs, storage, out_dir = save_inputs(tmp_path / "inputs"), tmp_path / "states", tmp_path / "o"
    settings: dict[str, Any] = {"max_steps": NUM_STEPS, "eval_steps": 1000}
    expected = heads_trained("medusa", inputs, tmp_path / "here", [], **settings)
    arguments = arguments_of(inputs, storage, "medusa")
    servers = [
        Server(tmp_path / f"log{n}", arguments) for n in range(2 if fault == "killed" else 1)
    ]
    filler = storage / "filler"

    def strike() -> None:
        if fault == "full":
            with contextlib.suppress(OSError), filler.open("wb") as file:
                file.write(bytes(4 << 20))
            time.sleep(5)
            filler.unlink()
            return
        servers[0].end(signal.SIGKILL)
        if fault == "restarted":
            servers[0].start()

    if fault == "full":
        small_disk(storage)
    try:
        with running(*servers), meanwhile(out_dir, strike):
            urls = [server.url for server in servers]
            found = heads_trained("medusa", inputs, out_dir, urls, **settings)
    finally:
        if fault == "full":
            subprocess.run(["umount", str(storage)], check=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@needs(VLLM)
def test_vllm_served_with_a_head_passes_the_check(tmp_path, monkeypatch) -> None:
    """Prompts whose texts end at the limit, in a window with room for the drafts behind it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = save_target(tmp_path / "target", num_hidden_layers=6)
    head = tmp_path / "head"
    eagle_head(opened(folder), EagleForm.eagle3).save(head)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    options = ["--model", str(folder), "--dtype", "float32", "--enforce-eager"]
    arguments = [*options, "--speculative-config", json.dumps(speculative)]
    with served(tmp_path / "server.log", *arguments) as url:
        result = serve_checked(url, "vllm", str(folder), head, tmp_path / "check")
    [measured] = result["concurrency"].values()
    # Two texts of each of three prompts.
    row = measured["methods"]["with drafts"]
    assert row["num_tokens"] == row["window"]["num_generated"] == [288] * 3
    assert (row["window"]["num_cached"], row["window"]["num_cut"]) == ([0, 0, 0], [0, 0, 0])
    assert row["window"]["most_running"] == 1
