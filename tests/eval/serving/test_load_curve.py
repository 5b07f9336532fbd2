"""A curve of servers whose speed falls with load, and windows that are spoiled."""

import json
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from loopback import Answers, Loopback
from toys import save_target

from conf.command.jsonl_store import JsonlStore
from conf.settings.data import DataConfig
from conf.settings.measure import ServeRun
from conf.settings.target import TargetConfig
from data.servers import serving_engines
from data.servers.http_client import Endpoint
from data.servers.serving_engines import ServingEngine
from eval import serve
from eval.measure.prompts import Prompt
from eval.serving.load_curve import build_schedule, check_windows, measure_curve
from eval.serving.server_load import ROUNDS, WITH, WITHOUT
from tests.chats import write_rows

DEPTH, NUM_TOKENS, NUM_PROMPTS = 3, 25, 8
PASS_S = 0.5
STUCK, PATIENCE = "stuck", 1200
"""Twentieths of a second after which a server breaks off, as a client sends too few requests."""


class Clock:
    """Seconds that pass only as a server says, and how often the client has read them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.now_s, self.num_reads, self.busy = 0.0, 0, 0.1

    def read(self) -> float:
        with self.changed:
            self.num_reads += 1
            self.changed.notify_all()
            return self.now_s


class LoadedServer(Loopback):
    """A vLLM over HTTP whose passes take seconds of a clock, by the number of running requests.

    Every text has `NUM_TOKENS` tokens: one of its first pass, then one of each, or `DEPTH` accepted
    ones more. A pass begins when the client has read all pieces and sent all requests that it can
    send, so the clock depends on nothing but the numbers of requests.

    Attributes:
        sizes: requests in flight of the passes over all prompts to come.
        pass_s: seconds of a pass by the number of running requests.
        later: factor of these seconds in the second half of a pass over all prompts.
        token: every token of its texts.
        num_tokens: tokens of its texts.
        ending: why its texts end.
        running: requests that it says it runs; None says the truth.
        foreign: tokens that it counts with each text beside its own.
        cached: prompt tokens that it counts as cached with each text.
        most_drafting: running requests with which it still drafts.
    """

    def __init__(self, clock: Clock, depth: int, sizes: list[int]) -> None:
        super().__init__(_Handler)
        self.clock, self.depth, self.sizes = clock, depth, list(sizes)
        self.pass_s: Callable[[int], float] = lambda _: PASS_S
        self.later, self.token, self.num_tokens, self.ending = 1.0, 7, NUM_TOKENS, "length"
        self.foreign, self.cached, self.most_drafting = 0, 0, 1000
        self.running: int | None = None
        self.counts = {"drafts": 0, "generated": 0, "cached": 0, "running": 0}
        self.live: list[_Text] = []
        self.size = self.num_texts = self.num_ended = self.num_messages = self.reads_before = 0
        self.num_begun = 0
        self.first: _Text | None = None
        self._stopped = False
        self._engine = threading.Thread(target=self._run)

    def __enter__(self) -> "LoadedServer":
        self._engine.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        self._engine.join()
        super().__exit__(*error)

    def enter(self) -> "_Text":
        with self.clock.changed:
            if self.num_ended == self.num_texts:
                self.size = self.sizes.pop(0)
                self.num_texts = NUM_PROMPTS * math.ceil(ROUNDS * self.size / NUM_PROMPTS)
                self.num_ended = self.num_messages = 0
                self.num_begun, self.first = 1, _Text()
                self.reads_before = self.clock.num_reads - 1
                self.live.append(self.first)
            else:
                self.live.append(_Text())
            self.num_messages += 1
            self.clock.changed.notify_all()
            return self.live[-1]

    def _is_settled(self) -> bool:
        expected = min(self.num_begun, self.num_texts - self.num_ended)
        num_read = self.clock.num_reads - self.reads_before
        return 0 < expected == len(self.live) and num_read == self.num_messages

    def _run(self) -> None:
        num_waits = 0
        while not self._stopped:
            with self.clock.changed:
                if self.clock.changed.wait_for(self._is_settled, 0.05):
                    self._decode()
                    num_waits = 0
                elif (num_waits := num_waits + bool(self.live)) == PATIENCE:
                    for text in self.live:
                        text.pieces.put((0, STUCK))

    def _decode(self) -> None:
        """One pass of all running requests."""
        num_running = self.counts["running"] = len(self.live)
        late = self.num_ended * 2 >= self.num_texts
        self.clock.now_s += self.pass_s(num_running) * (self.later if late else 1)
        drafts = self.depth if num_running <= self.most_drafting else 0
        for text in self.live.copy():
            num_new = min(1 + drafts, self.num_tokens - text.num_sent) if text.num_sent else 1
            self.counts["drafts"] += bool(drafts and text.num_sent)
            text.num_sent += num_new
            ended = text.num_sent == self.num_tokens
            text.pieces.put((num_new, self.ending if ended else None))
            self.num_messages += 1
            if ended:
                self.live.remove(text)
                self.num_ended += 1
                self.counts["generated"] += self.num_tokens + self.foreign
                self.counts["cached"] += self.cached
        # The client spreads its first requests over the tokens of the first text.
        assert self.first is not None
        num_begun = 1 + self.first.num_sent * self.size // NUM_TOKENS
        ended = self.first.num_sent == self.num_tokens
        self.num_begun = self.size if ended else min(self.size, num_begun)

    def metrics(self) -> str:
        drafts, running = self.counts["drafts"], self.counts["running"]
        lines = [
            f"vllm:generation_tokens_total {self.counts['generated']}.0",
            f"vllm:prefix_cache_hits_total {self.counts['cached']}.0",
            f"vllm:num_requests_running {running if self.running is None else self.running}.0",
            f"vllm:spec_decode_num_drafts_total {drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {drafts * self.depth}",
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{place}"}} {drafts}' for place in range(self.depth)]
        return "\n".join(lines) + "\n"


class _Text:
    def __init__(self) -> None:
        self.pieces: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self.num_sent = 0


class _Handler(Answers, BaseHTTPRequestHandler):
    owner: LoadedServer
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.send_bytes(self.owner.metrics().encode())
        elif self.path == "/v1/models":
            model = {"id": "toy", "owned_by": "vllm", "max_model_len": 256}
            self.send_json({"data": [model]})
        else:
            self.send_json({}, 404)

    def do_POST(self) -> None:
        self.read_body()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        text, ending = self.owner.enter(), None
        while ending is None:
            num_new, ending = text.pieces.get()
            if ending == STUCK:
                self.close_connection = True
                return
            choice = {"token_ids": [self.owner.token] * num_new, "finish_reason": ending}
            data = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


@contextmanager
def two_servers(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> Iterator[tuple[LoadedServer, LoadedServer]]:
    """A server whose passes with drafts take longer the more requests run, and one without."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    clock = Clock()

    class Watch:
        def __init__(self) -> None:
            self.started_s = clock.now_s

        def seconds(self) -> float:
            return clock.read() - self.started_s

        def processor_seconds(self) -> float:
            return clock.busy * (clock.now_s - self.started_s)

    monkeypatch.setattr(serving_engines, "Stopwatch", Watch)
    with LoadedServer(clock, DEPTH, sizes) as ours, LoadedServer(clock, 0, sizes) as base:
        # 25 passes, or 7 that each take as long as one and n fourths: no gain from n = 10.3 on.
        ours.pass_s = lambda num_running: PASS_S * (1 + num_running / 4)
        yield ours, base


SIZES = [1, 2, 4, 8, 16]


def test_the_head_of_a_server_that_slows_with_load_is_off_from_where_it_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_draws: None, capsys: Any
) -> None:
    rows = [{"turns": [f"hello number {n}, how are you?"]} for n in range(NUM_PROMPTS)]
    run = ServeRun(
        target=TargetConfig(path=str(save_target(tmp_path / "target"))),
        data=DataConfig(path=str(write_rows(tmp_path / "prompts.jsonl", rows))),
        out_dir=str(tmp_path / "out"),
        max_new_tokens=NUM_TOKENS,
        concurrency=SIZES[::-1],
        num_repeats=1,
        num_warmups=0,
    )
    with two_servers(monkeypatch, SIZES) as (ours, base):
        assert ours.pass_s(10) * 7 < base.pass_s(10) * 25 < ours.pass_s(11) * 7
        run.endpoint, run.baseline = ours.root, base.root
        serve.main(run)
    result = json.loads((tmp_path / "out/serve.json").read_text())
    assert list(result["concurrency"]) == [str(size) for size in SIZES]
    for size, load in result["concurrency"].items():
        rows_ = load["methods"]
        assert failed(load) == {WITH: [], WITHOUT: []}, size
        assert all(row["valid"] for row in rows_.values())
        size_, expected = int(size), 25 / 7 / (1 + int(size) / 4)
        assert rows_[WITHOUT]["tokens_per_s"] == pytest.approx(size_ / PASS_S, rel=0.05)
        assert rows_[WITHOUT]["tokens_per_s_per_user"] == pytest.approx(1 / PASS_S)
        assert rows_[WITH]["tokens_per_s_per_user"] == pytest.approx(
            4 / ours.pass_s(size_), rel=0.05
        )
        assert rows_[WITH]["speedup"] == pytest.approx(expected, rel=0.05)
    assert (result["schedule"], result["off_from"]) == ([[1, 8, DEPTH], [9, 16, 0]], 9)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "The head gains up to 8 in flight and loses from 16 on: it should be off from batches of 9 "
        "on. num_speculative_tokens_per_batch_size: [[1, 8, 3], [9, 16, 0]]"
    ) in said
    assert "This head is worth serving: with 1 in flight" in said
    assert "and is no faster with 16." in said
    assert (tmp_path / "out/serve.png").exists()


def failed(load: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the checks that did not pass, of each server."""
    return {
        name: [key for key, check in row["checks"].items() if not check["passed"]]
        for name, row in load["methods"].items()
    }


def slow_down(ours: LoadedServer, _base: LoadedServer) -> None:
    ours.later = 2.0


def hurry(ours: LoadedServer, _base: LoadedServer) -> None:
    ours.pass_s = lambda _: PASS_S / 20


def cache_prompts(_ours: LoadedServer, base: LoadedServer) -> None:
    base.cached = 1


def share_with_another_user(_ours: LoadedServer, base: LoadedServer) -> None:
    base.foreign = 2


def queue_requests(ours: LoadedServer, _base: LoadedServer) -> None:
    ours.running = 3


def cut_texts(ours: LoadedServer, _base: LoadedServer) -> None:
    ours.ending = "abort"


def serve_another_model(_ours: LoadedServer, base: LoadedServer) -> None:
    base.token = 8


def answer_shorter(_ours: LoadedServer, base: LoadedServer) -> None:
    base.num_tokens = NUM_TOKENS - 2


def stop_to_draft(ours: LoadedServer, _base: LoadedServer) -> None:
    ours.most_drafting = 1


def keep_the_client_busy(ours: LoadedServer, _base: LoadedServer) -> None:
    ours.clock.busy = 0.9


@pytest.mark.parametrize(
    ("spoil", "marks"),
    [
        (slow_down, {WITH: ["steady"]}),
        (hurry, {WITH: ["long_enough"]}),
        (cache_prompts, {WITHOUT: ["no_prefix_cache"]}),
        (share_with_another_user, {WITHOUT: ["nobody_else"]}),
        (queue_requests, {WITH: ["no_queue"]}),
        (cut_texts, {WITH: ["whole_texts"]}),
        (serve_another_model, {WITH: ["same_texts"]}),
        (answer_shorter, {WITH: ["same_texts", "same_lengths"]}),
        (stop_to_draft, {WITH: ["drafting"]}),
        (keep_the_client_busy, {WITH: ["fast_client"], WITHOUT: ["fast_client"]}),
    ],
)
def test_a_spoiled_window_is_marked(
    spoil: Callable[[LoadedServer, LoadedServer], None],
    marks: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_draws: None,
) -> None:
    loads = measured([1, 4], spoil, tmp_path, monkeypatch)
    assert failed(loads["4"]) == {WITH: [], WITHOUT: [], **marks}
    valid = {name: row["valid"] for name, row in loads["4"]["methods"].items()}
    assert valid == {name: name not in marks for name in valid}
    # The load is read by nobody.
    found = build_schedule({"4": loads["4"]}, DEPTH, NUM_PROMPTS)
    assert found["schedule_basis"] == "No schedule: no load has valid windows on both servers."


def test_no_larger_load_is_measured_than_a_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_draws: None, capsys: Any
) -> None:
    loads = measured([2, 4, 6], queue_requests, tmp_path, monkeypatch)
    assert list(loads) == ["2", "4"]
    words = "concurrency=[6]: left out, as a server runs at most 3 requests at a time"
    assert words in capsys.readouterr().err


def measured(
    sizes: list[int],
    spoil: Callable[[LoadedServer, LoadedServer], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """The loads of two servers, one of them spoiled."""
    run = ServeRun(max_new_tokens=NUM_TOKENS, concurrency=sizes, num_repeats=1, num_warmups=0)
    prompts = [Prompt("all", [1, 2, 3], dialogue) for dialogue in range(NUM_PROMPTS)]
    with ExitStack() as stack:
        ours, base = stack.enter_context(two_servers(monkeypatch, sizes))
        spoil(ours, base)
        servers = {
            name: stack.enter_context(
                ServingEngine(Endpoint(server.root), max(sizes), drafts=name == WITH)
            )
            for name, server in ((WITH, ours), (WITHOUT, base))
        }
        journal = stack.enter_context(JsonlStore(folder, {}))
        return measure_curve(servers, prompts, run, journal)


Bounds = tuple[float, float]
GAIN, UNDECIDED, LOSS = (1.1, 1.3), (0.9, 1.1), (0.7, 0.9)


def curve(*bounds: Bounds, invalid: tuple[int, ...] = (), baseline: str | None = WITHOUT) -> dict:
    """Loads 1, 2, 4, ... with intervals of the speed-up; the baseline of some is not valid."""
    return {
        str(size): {
            "baseline": baseline,
            "methods": {
                WITH: {"speedup_ci95": each, "valid": True},
                WITHOUT: {"speedup_ci95": None, "valid": size not in invalid},
            },
        }
        for size, each in ((2**place, each) for place, each in enumerate(bounds))
    }


@pytest.mark.parametrize(
    ("loads", "schedule", "basis"),
    [
        (curve(GAIN, GAIN, LOSS, LOSS), [[1, 2, 5], [3, 8, 0]],
         "The head gains up to 2 in flight and loses from 4 on: it should be off from batches of 3 "
         "on."),
        (curve(GAIN, UNDECIDED, GAIN, LOSS), [[1, 4, 5], [5, 8, 0]], "gains up to 4 .* from 8 on"),
        (curve(GAIN, LOSS, GAIN, LOSS), [[1, 4, 5], [5, 8, 0]], "gains up to 4 .* from 8 on"),
        (curve(GAIN, UNDECIDED, LOSS, UNDECIDED), [[1, 1, 5], [2, 8, 0]],
         "gains up to 1 in flight and loses from 4 on: it should be off from batches of 2 on"),
        (curve(GAIN, GAIN, UNDECIDED), [[1, 4, 5]],
         "The head gains up to 2 in flight and loses at no load up to 4: it may stay on."),
        (curve(LOSS, LOSS), [[1, 2, 0]], "gains at no load and loses from 1 on: .* of 1 on"),
        (curve(UNDECIDED, LOSS), [[1, 2, 0]], "gains at no load and loses from 2 on"),
        (curve(UNDECIDED, (1.0, 1.2), (0.8, 1.0)), None, "neither gains nor loses at any load"),
        (curve(GAIN, LOSS, GAIN, invalid=(4,)), [[1, 1, 5], [2, 2, 0]], "gains up to 1 "),
        (curve(GAIN, GAIN, LOSS, invalid=(2,)), [[1, 1, 5], [2, 4, 0]], "gains up to 1 .* from 4 "),
        (curve(GAIN, invalid=(1,)), None, "no load has valid windows on both servers"),
        (curve(GAIN, LOSS, baseline=None), None, "no load was timed beside a server without"),
        ({}, None, "no load was timed"),
    ],
)  # fmt: skip
def test_a_head_is_on_up_to_the_last_load_that_gains(
    loads: dict[str, Any], schedule: list[list[int]] | None, basis: str
) -> None:
    found = build_schedule(loads, 5, 8)
    assert found["schedule"] == schedule
    assert re.search(basis, found["schedule_basis"])
    off = [first for first, _, num_tokens in schedule or [] if not num_tokens]
    assert found["off_from"] == (off[0] if off else None)


def test_few_dialogues_give_no_schedule() -> None:
    found = build_schedule(curve(GAIN, LOSS), 5, 7)
    assert found == {
        "schedule": None, "off_from": None,
        "schedule_basis": "No schedule: 7 dialogues are too few, 8 are needed.",
    }  # fmt: skip


def load(**changes: Any) -> dict[str, Any]:
    """Two valid windows of two requests in flight; `changes` are of the server with drafts."""
    window: dict[str, Any] = {
        "seconds": [3.0, 2.0], "num_texts": [4, 5], "in_flight": [2.0, 1.8],
        "halves": [100.0, 120.0], "busy": [0.1, 0.8], "num_cut": [0, 0],
        "num_generated": [500, 505], "num_cached": [0, 5], "num_asked": 8,
        "num_prompt_tokens": 100, "most_running": 2, "num_other_texts": [0, 4],
    }  # fmt: skip
    row = {"num_tokens": [500, 500], "num_drafts": [200, 150], "window": window}
    ours = {
        **row,
        **{key: value for key, value in changes.items() if key in row},
        "window": {**window, **{key: value for key, value in changes.items() if key in window}},
    }
    return {"baseline": WITHOUT, "methods": {WITH: ours, WITHOUT: row}}


@pytest.mark.parametrize(
    ("changes", "marks", "found"),
    [
        ({}, [], ""),
        ({"in_flight": [2.0, 1.79]}, ["steady"],
         "1.8 requests of 2 in flight; 100.0 tokens/s in first halves, 120.0 in second ones"),
        ({"halves": [100.0, 121.0]}, ["steady"], "121.0 in second ones"),
        ({"halves": [100.0, 79.0]}, ["steady"], "79.0 in second ones"),
        ({"seconds": [3.0, 1.9]}, ["long_enough"],
         "4.9 s in all, 4 texts end in the shortest pass; at least 5 s and 4 texts are needed"),
        ({"num_texts": [3, 5]}, ["long_enough"], "3 texts end in the shortest pass"),
        ({"num_cut": [0, 1]}, ["whole_texts"], "the server cut 1 texts off"),
        ({"num_cached": [0, 6]}, ["no_prefix_cache"],
         "6% of the prompt tokens came from the prefix cache"),
        ({"most_running": 1}, ["no_queue"], "the server runs 1 requests at a time"),
        ({"num_generated": [500, 506]}, ["nobody_else"], "the server counts +6 tokens of others"),
        ({"num_generated": [494, 500]}, ["nobody_else"], "the server counts -6 tokens of others"),
        ({"busy": [0.81, 0.1]}, ["fast_client"], "this client is busy for 81% of the time"),
        ({"num_drafts": [200, 100]}, ["drafting"],
         "0.20 drafts per token, 0.40 under another load"),
        ({"num_other_texts": [0, 5]}, ["same_texts"], "5 of 8 texts differ without drafts"),
        ({"num_tokens": [530, 530], "num_generated": [530, 530]}, ["same_lengths"],
         "1060 tokens, 1000 without drafts"),
        ({"num_other_texts": None}, None, "no greedy texts without drafts to compare with"),
        ({"most_running": None}, None, "the server does not tell how many requests it runs"),
        ({"num_generated": [None, 500]}, None, "the server does not count generated tokens"),
        ({"num_cached": [None, None]}, None, "the server tells nothing of its prefix cache"),
    ],
)  # fmt: skip
def test_each_check_reads_its_figures(
    changes: dict[str, Any], marks: list[str] | None, found: str
) -> None:
    """None: the check stays open and the window valid."""
    other = load(num_drafts=[210, 200])["methods"]
    loads = {"2": load(**changes), "3": {"baseline": WITHOUT, "methods": other}}
    check_windows(loads)
    row = loads["2"]["methods"][WITH]
    states = {key: check["passed"] for key, check in row["checks"].items()}
    assert [key for key, passed in states.items() if passed is False] == (marks or [])
    assert list(states.values()).count(None) == (marks is None)
    assert row["valid"] == (not marks)
    assert any(found in check["found"] for check in row["checks"].values())
    assert loads["2"]["methods"][WITHOUT]["valid"]


def test_a_server_alone_is_compared_with_nothing() -> None:
    alone = load(num_other_texts=None)
    alone |= {"baseline": None, "methods": {WITH: alone["methods"][WITH]}}
    check_windows({"2": alone})
    assert failed(alone) == {WITH: ["same_texts", "same_lengths"]}
    assert alone["methods"][WITH]["valid"]
