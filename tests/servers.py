"""Servers on loopback: of chats, of drafts with their counts, and of hidden states."""

import fcntl
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from loopback import HERE, Answers, Loopback
from safetensors.torch import save_file
from torch import Tensor

from conf.settings.scripts import RelayRun
from eval.measure.target_answers import generate_greedy_answers
from heads.target_model.model import FeatureLayers
from scripts.relay import RelayServer

Fault = tuple[int, dict[str, str]] | str


def reply_to(body: dict) -> str:
    """A digest of everything that the server was asked."""
    asked = json.dumps([body["messages"], body.get("seed"), body["max_tokens"]], sort_keys=True)
    return f"answer {hashlib.sha256(asked.encode()).hexdigest()[:8]}"


class ChatServer(Loopback):
    """An OpenAI-compatible server whose answers depend on the request alone.

    A context manager; `url` is the base URL.

    Attributes:
        faults: taken from the front, one per request: a status with headers, or `drop`.
        fault_for: called with the request body; may return a fault for it.
        bodies: of all requests that were answered.
        others: answers at further paths.
        most_at_once: the largest number of requests in flight.
        connections: what requests want of their connections.
    """

    path = "/v1/chat/completions"
    models: tuple[dict, ...] = ({"id": "toy"}, {"id": "other"})

    def __init__(self, delay_s: float = 0.0, address: tuple[str, int] = HERE) -> None:
        self.delay_s = delay_s
        self.faults: list[Fault] = []
        self.fault_for: Callable[[dict], Fault | None] = lambda _: None
        self.finish_reason: Callable[[dict], str] = lambda _: "stop"
        self.reply: Callable[[dict], object] = reply_to
        self.bodies: list[dict] = []
        self.others: dict[str, Callable[[dict], dict]] = {}
        self.keys: set[str | None] = set()
        self.connections: set[str | None] = set()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        super().__init__(_Handler, address)
        self.url = f"{self.root}/v1"

    def page(self, path: str) -> dict | str | None:
        """The answer to a GET: JSON, text or nothing."""
        return {"data": self.models} if path == "/v1/models" else None

    def answer(self, body: dict) -> dict:
        message = {"role": "assistant", "content": self.reply(body)}
        return {"choices": [{"message": message, "finish_reason": self.finish_reason(body)}]}

    def enter(self, body: dict) -> Fault | None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.faults.pop(0) if self.faults else self.fault_for(body)

    def leave(self) -> None:
        with self._lock:
            self._at_once -= 1


class _Handler(Answers, BaseHTTPRequestHandler):
    owner: ChatServer

    def do_GET(self) -> None:
        page = self.owner.page(self.path)
        if page is None:
            self.send_json({"error": "no such page"}, 404)
        elif isinstance(page, str):
            self.send_bytes(page.encode())
        else:
            self.send_json(page)

    def do_POST(self) -> None:
        body = json.loads(self.read_body())
        answer = {self.owner.path: self.owner.answer, **self.owner.others}.get(self.path)
        if answer is None:
            self.send_json({"error": "no such page"}, 404)
            return
        self.owner.keys.add(self.headers.get("Authorization"))
        self.owner.connections.add(self.headers.get("Connection"))
        fault = self.owner.enter(body)
        time.sleep(self.owner.delay_s)
        self.owner.leave()  # who has the answer may ask again at once
        self._answer(body, fault, answer)

    def _answer(
        self, body: dict, fault: Fault | None, answer: Callable[[dict], dict | list[dict]]
    ) -> None:
        if fault == "drop":
            self.close_connection = True
        elif isinstance(fault, tuple):
            echo = self.headers.get("Authorization", "")
            self.send_json({"error": f"injected, you sent {echo}"}, fault[0], fault[1])
        else:
            self.owner.bodies.append(body)
            found = answer(body)
            if isinstance(found, list):
                pieces = "".join(f"data: {json.dumps(piece)}\n\n" for piece in found)
                self.send_bytes(f": ping\n\n{pieces}data: [DONE]\n\n".encode())
            else:
                self.send_json(found)


# As vLLM 0.32 writes it, but for more counters of its own.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="toy"}} {drafts:.1f}
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="toy"}} 1.7952553050919838e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="toy"}} {proposed:.1f}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="toy"}} {total:.1f}
{positions}
"""
POSITION = (
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="toy",'
    'position="{place}"}} {count:.1f}'
)

# As llama.cpp b11549 writes it; the positions are not there before a first draft.
LLAMACPP_METRICS = """\
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total {proposed}
llamacpp:spec_decode_num_accepted_tokens_total {total}
llamacpp:spec_decode_num_drafts_total {drafts}
llamacpp:requests_processing {running}
"""
LLAMACPP_POSITION = (
    'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}\n'
)

Answers = Callable[[list[int], int], tuple[list[int], list[int]]]


class DraftServer(ChatServer):
    """Answers and counts as vLLM, SGLang or llama.cpp do, as told; `root` is the URL without `/v1`.

    A text that is to be streamed comes in two pieces, the second with the reason of its end.

    Attributes:
        kind: `vllm`, `sglang` or `llamacpp`.
        depth: draft tokens of a pass; 0 is a server without a head.
        answers: the text after a prompt, of so many tokens at most, and what each pass accepted.
        server_info: changes to what SGLang says of its start.
        rendered: token ids that its chat template makes of messages.
        temperature: that all requests must ask for.
    """

    def __init__(self, kind: str, depth: int, answers: Answers) -> None:
        super().__init__()
        self.kind, self.depth, self.answers = kind, depth, answers
        window = {"meta": {"n_ctx": 256}} if kind == "llamacpp" else {"max_model_len": 256}
        self.models = ({"id": "toy", "owned_by": kind, **window},)
        self.path = {
            "vllm": "/v1/completions",
            "sglang": "/generate",
            "llamacpp": "/completion",
        }[kind]
        self.server_info: dict = {}
        self.rendered: Callable[[list[dict]], list[int]] = lambda _: []
        self.others["/v1/chat/completions"] = self._chat
        self.temperature = 0.0
        # Other people's, from before.
        self.drafts, self.accepted = 7, [depth - place for place in range(depth)]
        self.proposed = depth * self.drafts
        if kind == "llamacpp":
            self.drafts, self.proposed, self.accepted = 0, 0, [0] * depth

    def page(self, path: str) -> dict | str | None:
        if path == "/metrics" and self.kind != "sglang":
            return self._llamacpp_metrics() if self.kind == "llamacpp" else self._metrics()
        if path == "/get_server_info" and self.kind == "sglang":
            algorithm = "EAGLE3" if self.depth else None
            steps = {"speculative_num_steps": self.depth, "speculative_eagle_topk": 1}
            return {"speculative_algorithm": algorithm, **steps, **self.server_info}
        return super().page(path)

    def _chat(self, body: dict) -> dict:
        assert body["max_tokens"] == 1
        ids = self.rendered(body["messages"])
        told = {"prompt_token_ids": ids} if self.kind == "vllm" else {}
        return {"choices": [], "usage": {"prompt_tokens": len(ids)}, **told}

    def answer(self, body: dict) -> dict | list[dict]:  # type: ignore[override]
        asked = body["sampling_params"] if self.kind == "sglang" else body
        penalty = "repeat_penalty" if self.kind == "llamacpp" else "repetition_penalty"
        assert (asked["temperature"], asked[penalty]) == (self.temperature, 1.0)
        with self._lock:
            return {"sglang": self._sglang, "llamacpp": self._llamacpp, "vllm": self._vllm}[
                self.kind
            ](body)

    def _sglang(self, body: dict) -> dict | list[dict]:
        text, lengths = self.answers(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
        meta: dict = {"finish_reason": {"type": "length"}, "cached_tokens": 0}
        meta |= {"spec_correct_drafts_histogram": histogram} if histogram and self.depth else {}

        def piece(ids: list[int]) -> dict:
            return {"output_ids": ids, "meta_info": {"completion_tokens": len(ids), **meta}}

        # Each piece holds the text so far.
        return [piece(text[:1]), piece(text)] if body.get("stream") else piece(text)

    def _vllm(self, body: dict) -> dict | list[dict]:
        assert body["return_token_ids"]
        text, lengths = self.answers(body["prompt"], body["max_tokens"])
        self.drafts += len(lengths)
        self.proposed += self.depth * len(lengths)
        for place in range(self.depth):
            self.accepted[place] += sum(length > place for length in lengths)

        def piece(ids: list[int], ending: str | None = "length") -> dict:
            return {"choices": [{"text": "", "token_ids": ids, "finish_reason": ending}]}

        first, second = _halves(text)
        pieces = [piece(first, None), piece(second), {"choices": []}]
        return pieces if body.get("stream") else piece(text)

    def _llamacpp(self, body: dict) -> dict | list[dict]:
        assert body["return_tokens"]
        assert not body["cache_prompt"]
        text, lengths = self.answers(body["prompt"], body["n_predict"])
        left = body["n_predict"] - 1
        for length in lengths:
            # The last token is the bonus token of a pass.
            size = min(self.depth, left - 1)
            if size > 0:
                self.drafts, self.proposed = self.drafts + 1, self.proposed + size
                for place in range(min(length, size)):
                    self.accepted[place] += 1
            left -= length + 1
        pieces = [{"content": "", "tokens": ids} for ids in _halves(text)]
        pieces.append({"tokens": [], "stop_type": "limit", "timings": {"cache_n": 0}})
        return pieces if body.get("stream") else {"content": "", "tokens": text}

    def _llamacpp_metrics(self) -> str:
        lines = [LLAMACPP_POSITION.format(place=i, count=n) for i, n in enumerate(self.accepted)]
        values = {"drafts": self.drafts, "proposed": self.proposed, "total": sum(self.accepted)}
        values["running"] = self.most_at_once
        return LLAMACPP_METRICS.format(**values) + "".join(lines if self.drafts else [])

    def _metrics(self) -> str:
        if not self.depth:
            return f"vllm:num_requests_running {self.most_at_once:.1f}\n"
        lines = [POSITION.format(place=i, count=n) for i, n in enumerate(self.accepted)]
        values = {"drafts": self.drafts, "proposed": self.proposed, "total": sum(self.accepted)}
        return METRICS.format(**values, positions="\n".join(lines))


def _halves(text: list[int]) -> tuple[list[int], list[int]]:
    return text[:1], text[1:]


HIDDEN = 2


def state(token: int, layer: int) -> list[float]:
    """The state of a token behind a layer."""
    return [100.0 * layer + token, -1.0]


def serving(
    target: Any, folder: Path, layers: list[int], address: tuple[str, int] = HERE
) -> "EngineServer":
    """A server of a target's own states, before the final norm, and of its own answers."""
    server = EngineServer(folder, layers, address=address)
    server.models = ({"id": "toy"},)
    taps, one_at_a_time = FeatureLayers(tuple(layers)), server.one_at_a_time

    def states(ids: list[int]) -> Tensor:
        with one_at_a_time:
            found = target.encode_text(ids, taps).layers
        return torch.stack([found[index][0] for index in layers], 1)

    def follows(ids: list[int], num_new: int) -> list[int]:
        if num_new == 1:
            return [0]  # nobody reads it
        with one_at_a_time:
            return generate_greedy_answers(target, [ids], num_new)[0]

    def log_probs(ids: list[int]) -> list[float]:
        with one_at_a_time:
            logits = target.compute_logits(target.encode_text(ids).hidden_states[0, :-1])
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    server.states, server.follows, server.log_probs = states, follows, log_probs
    return server


@contextmanager
def relaying(
    folder: Path, key: str | None = None, port: int = 0, **settings: Any
) -> Iterator[RelayServer]:
    """A relay beside a server."""
    config = RelayRun(folder=str(folder), **settings)
    config.port = port
    with RelayServer(config, key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class EngineServer(ChatServer):
    """Writes hidden states as vLLM does, by a rule one can do by hand.

    Attributes:
        layers: that it writes.
        folder: where it writes, in a folder named after its layers.
        write_s: how long after its reply a file is complete.
        change: applied to what is written.
        version: that it tells; None for a server that tells none.
        states: [S, L, D] of the tokens that it has read.
        follows: the tokens that it answers, at most so many.
        log_probs: of the tokens of a prompt but the first.
        one_at_a_time: held while a target is read, which threads cannot share.
        told_folder: the folder that it names in its replies.
    """

    path = "/v1/completions"

    def __init__(
        self,
        folder: Path,
        layers: list[int],
        delay_s: float = 0.0,
        address: tuple[str, int] = HERE,
    ) -> None:
        super().__init__(delay_s, address)
        self.models = ({"id": "toy", "max_model_len": 17}, {"id": "other"})
        self.layers = layers
        self.folder = folder / "-".join(map(str, ["layers", *layers]))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_s = 0.0
        self.change: Callable[[dict[str, Tensor]], object] = lambda _: None
        self.version: str | None = None
        self.states: Callable[[list[int]], Tensor] = self._by_hand
        self.follows: Callable[[list[int], int], list[int]] = lambda ids, num: [ids[-1] + 1] * num
        self.log_probs: Callable[[list[int]], list[float]] = lambda ids: [-1.0] * len(ids[1:])
        self.one_at_a_time = threading.Lock()
        self.told_folder = self.folder
        self._counter = 0

    def _by_hand(self, ids: list[int]) -> Tensor:
        return torch.tensor([[state(token, layer) for layer in self.layers] for token in ids])

    def page(self, path: str) -> dict | str | None:
        if path == "/version" and self.version is not None:
            return {"version": self.version}
        return super().page(path)

    def answer(self, body: dict) -> dict:
        with self._lock:
            file = self.folder / f"{self._counter}.safetensors"
            self._counter += 1
        lock = file.with_name(f"{file.name}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = self.follows(body["prompt"], body["max_tokens"])
        outputs = body.get("kv_transfer_params", {}).get("include_output_tokens")
        ids = body["prompt"] + (new[:-1] if outputs else [])

        def write() -> None:
            try:
                time.sleep(self.write_s)
                tensors = {"hidden_states": self.states(ids), "token_ids": torch.tensor(ids)}
                self.change(tensors)
                if tensors:
                    save_file(tensors, file)
            finally:
                lock.close()

        threading.Thread(target=write).start()
        told: dict[str, Any] = {"token_ids": new} if body.get("return_token_ids") else {}
        if "prompt_logprobs" in body:
            found = zip(body["prompt"][1:], self.log_probs(body["prompt"]), strict=True)
            after = [{str(token): {"logprob": nats}} for token, nats in found]
            told["prompt_logprobs"] = [None, *after]
        transfer = {"hidden_states_path": str(self.told_folder / file.name)}
        return {"choices": [told], "kv_transfer_params": transfer}
