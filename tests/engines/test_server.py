"""vLLM's own server on a CPU: what `scripts/serve_check.py` reads of it, and hidden states."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from environments import SCRIPTS, VLLM, needs, opened
from stores import NUM_LAYERS, save_inputs
from toys import eagle_head, save_target

from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.scripts import ServeCheckRun
from conf.settings.target import Dtype, TargetConfig
from data.servers.endpoint import Endpoint
from data.servers.hidden_states import HiddenStatesServer, ServerTaps
from data.servers.pool import StatesPool
from data.servers.versions import WRITINGS
from eval.measure.answers import greedy_answers
from heads.target_model.model import Taps
from heads.target_model.remote import final_norm, load_remote
from scripts import serve_check
from tests.train.loop.test_served import trained as heads_trained

pytestmark = pytest.mark.engine


@contextmanager
def served(log: Path, *arguments: str) -> Iterator[str]:
    """The base URL of vLLM's server, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ[VLLM], str(SCRIPTS / "vllm_server.py"), "--host", "127.0.0.1"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1"
    try:
        while not answers(f"{url}/models"):
            assert server.poll() is None, log.read_text()[-5000:]
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@needs(VLLM)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vllm_hands_out_the_states_that_we_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Documents that share their beginnings, up to the whole context, prefilled in pieces."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = save_target(tmp_path / "target", family, num_hidden_layers=4)
    target = opened(folder)
    bare = load_remote(TargetConfig(path=str(folder), dtype=Dtype.float32), target.device)
    taps = ServerTaps((0, 3, 1), target.num_layers, target.hidden_size, final_norm(bare))
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
        StatesPool([HiddenStatesServer(Endpoint(url), taps, concurrency=4)]) as engine,
    ):
        assert engine.servers[0].max_model_len == 128
        assert engine.servers[0].writing == WRITINGS[-1]
        found = list(engine.read_many(documents))
        answered = engine.answers([ids[:20], ids[:5]], 12, {"temperature": 0.0})
        assert list((storage / "layers-0-1-3-4").iterdir()) == []
    assert len(found) == len(documents)
    for document, states in zip(documents, found, strict=True):
        ours = target.read_text(document, Taps((0, 3, 1)))
        wanted = {f"layers.{index}": layer[0] for index, layer in ours.layers.items()}
        wanted["hidden_states"] = ours.hidden_states[0]
        assert states.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(states[name], tensor, rtol=0, atol=1e-5, msg=name)
    for prompt, (answer, states) in zip((ids[:20], ids[:5]), answered, strict=True):
        assert answer == greedy_answers(target, [prompt], 12, shown=False)[0]
        assert states["hidden_states"].shape == (len(prompt) + 11, target.hidden_size)


@needs(VLLM)
def test_a_head_learns_from_vllm_what_it_learns_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = save_inputs(tmp_path / "inputs")
    taps = ServerTaps((0, 1, 2, NUM_LAYERS), NUM_LAYERS, 64, None)
    options = ["--model", str(inputs / "target"), "--dtype", "float32", "--enforce-eager"]
    limits = ["--max-model-len", "160", "--max-num-batched-tokens", "48", "--max-num-seqs", "16"]
    arguments = [*options, *limits, *taps.serve_options(tmp_path / "states")]
    expected = heads_trained("eagle", inputs, tmp_path / "here", [])
    with served(tmp_path / "server.log", *arguments) as url:
        found = heads_trained("eagle", inputs, tmp_path / "served", [url, url])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@needs(VLLM)
def test_vllm_served_with_a_head_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose texts end at the limit, in a window with room for the drafts behind it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = save_target(tmp_path / "target", num_hidden_layers=6)
    head = tmp_path / "head"
    eagle_head(opened(folder), EagleForm.eagle3).save(head)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"hello {word}, how are you?"]} for word in ("there", "you", "today")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    options = ["--model", str(folder), "--dtype", "float32", "--enforce-eager"]
    arguments = [*options, "--speculative-config", json.dumps(speculative)]
    with served(tmp_path / "server.log", *arguments) as url:
        config = ServeCheckRun(
            endpoint=url,
            target=TargetConfig(path=str(folder), dtype=Dtype.float32),
            data=DataConfig(path=str(prompts)),
            head=HeadRef(path=str(head)),
            max_new_tokens=48,
            out_dir=str(tmp_path),
        )
        serve_check.main(config)
    result = json.loads((tmp_path / "serve_check.json").read_text())
    assert (result["engine"], result["depth"], result["num_texts"]) == ("vllm", 3, 3)
    assert result["problems"] == result["divergences"] == []
    assert result["theirs"]["drafts"] > result["theirs"]["accepted"][0] > 0
