"""Answers of a server or of a target here in place of those of rows: retried, resumed, refused."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_environments import make_environment

from conf.command.jsonl_store import JsonlStore
from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from conf.settings.scripts import RegenerateRun
from conf.settings.target import Dtype, Quantization, TargetConfig
from data.rows.records import Record, load_records
from data.servers import http_client as endpoint_module
from data.servers.http_client import Endpoint, retry_after_s
from heads.target_model.load import load_config
from scripts import regenerate
from scripts.regenerate import ConversationAnswerer, Dialogue
from tests.chats import assistant, chats, rows_in, user, write_rows
from tests.conf.command.test_following import pasted
from tests.servers import ChatServer, reply_to
from tests.toys import random_model, tokenizer

CPU = torch.device("cpu")
KEY = "sk-very-secret"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}
RESULT = {"role": "tool", "content": "Sunny"}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run_with(server: ChatServer, data: Path, out_dir: Path, **changes: Any) -> list[dict]:
    on_bad_row = changes.pop("on_bad_row", OnBadRow.error)
    settings = {"endpoint": server.url, "concurrency": 4, "max_retries": 3, **changes}
    data_config = DataConfig(path=str(data), on_bad_row=on_bad_row)
    regenerate.main(RegenerateRun(data=data_config, out_dir=str(out_dir), **settings))
    return rows_in(out_dir)


def expected_answer(messages: list[dict], max_tokens: int = 512) -> str:
    return reply_to({"messages": messages, "max_tokens": max_tokens})


def test_every_answer_is_replaced_in_the_context_of_the_new_ones(tmp_path: Path) -> None:
    with ChatServer() as server:
        rows = run_with(server, chats(tmp_path / "in.jsonl"), tmp_path / "out")
    assert [row["id"] for row in rows] == list(range(12))
    assert rows[1] == {
        "id": 1,
        "messages": [user("question 1"), assistant(expected_answer([user("question 1")]))],
        "category": "c1",
        "truncated_turns": [],
    }
    system, first, answer, second, last = rows[3]["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert answer == assistant(expected_answer([system, first]))
    assert last == assistant(expected_answer([system, first, answer, second]))
    assert {body["model"] for body in server.bodies} == {"toy"}
    assert "old" not in (tmp_path / "out/conversations.jsonl").read_text()


@pytest.mark.parametrize(
    ("model", "norms"), [("me/model", True), ("me/model-GGUF/model-Q4_1.gguf", False)]
)
def test_turns_become_conversations_that_load_again(tmp_path, capsys, model, norms) -> None:
    """The next line trains EAGLE-3.1, whose norms a target in llama.cpp has no place for."""
    data = write_rows(tmp_path / "in.jsonl", [{"turns": ["a?", "b?"], "category": "math"}])
    with ChatServer() as server:
        (row,) = run_with(server, data, tmp_path / "out", model=model)
        said = capsys.readouterr().out
        assert f"tokens a turn; answers go to {tmp_path}/out/conversations.jsonl\n" in said
        script, training = pasted(said)
        assert (script, training.target.path) == ("train/eagle.py", model)
        assert training.head.fc_norm is norms
        assert training.data.path == str(tmp_path / "out/conversations.jsonl")
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
        again = run_with(server, tmp_path / "out/conversations.jsonl", tmp_path / "out2")
    assert again == [row]
    assert row["category"] == "math"


def test_settings_of_a_server_reach_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "key")
    with ChatServer() as server:
        asked = RegenerateRun(endpoint=server.url, api_key_env="MINE", max_retries=2, timeout_s=9.5)
        for model, named in ((None, "toy"), ("other", "other")):
            found = asyncio.run(regenerate.make_endpoint(replace(asked, model=model)))
            assert found == Endpoint(server.url, named, "key", 2, 9.5)


def test_failures_are_retried_and_requests_overlap(tmp_path, capsys) -> None:
    data = chats(tmp_path / "in.jsonl")
    with ChatServer(delay_s=0.02) as server:
        server.faults = [(500, {}), "drop", (500, {}), (429, {"Retry-After": "0.5"}), (503, {})]
        started = time.monotonic()
        rows = run_with(server, data, tmp_path / "out")
        took_s = time.monotonic() - started
        clean = run_with(server, data, tmp_path / "clean")
    assert rows == clean
    assert took_s > 0.5, "Retry-After was not honoured"
    assert 1 < server.most_at_once <= 4
    assert "5 requests were repeated" in capsys.readouterr().out


def test_rows_that_keep_failing_are_listed_and_retried_at_the_next_start(tmp_path, capsys) -> None:
    data = chats(tmp_path / "in.jsonl")
    with ChatServer() as server:
        server.fault_for = lambda body: (
            (500, {}) if body["messages"][-1]["content"] == "question 4" else None
        )
        with pytest.raises(SystemExit) as exited:
            run_with(server, data, tmp_path / "out", max_retries=1)
        assert exited.value.code == 1
        assert [row["id"] for row in rows_in(tmp_path / "out")] == [0, 1, 2, 3, *range(5, 12)]
        output = capsys.readouterr().out
        assert "1 conversations failed; start again to retry them" in output
        assert "in.jsonl:5: HTTP 500" in output
        server.fault_for = lambda _: None
        num_before = len(server.bodies)
        rows = run_with(server, data, tmp_path / "out")
    assert [row["id"] for row in rows] == list(range(12))
    assert len(server.bodies) == num_before + 1


def test_a_dead_server_stops_the_run_early(tmp_path: Path) -> None:
    data = chats(tmp_path / "in.jsonl", num_rows=200)
    with ChatServer() as server:
        server.fault_for = lambda _: (503, {})
        with pytest.raises(InputError, match="8 conversations in a row failed"):
            run_with(server, data, tmp_path / "out", max_retries=0)
        assert server.bodies == []
    with pytest.raises(InputError, match=r"endpoint=http.*ConnectError.*\(2 attempts\)"):
        run_with(server, data, tmp_path / "out", max_retries=1)


def test_a_refused_row_stops_or_is_left_out(tmp_path, capsys) -> None:
    data = chats(tmp_path / "in.jsonl")
    with ChatServer() as server:
        server.fault_for = lambda body: (
            (400, {}) if body["messages"][-1]["content"] == "question 4" else None
        )
        with pytest.raises(InputError, match=r"in\.jsonl:5: HTTP 400.*data\.on_bad_row=skip"):
            run_with(server, data, tmp_path / "out")
        rows = run_with(server, data, tmp_path / "out", on_bad_row=OnBadRow.skip)
    assert [row["id"] for row in rows] == [0, 1, 2, 3, *range(5, 12)]
    assert "1 conversations skipped, refused:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "api_key_env"), (403, "may not use"), (404, "usually ends in /v1")]
)
def test_the_key_is_sent_and_never_shown(status, hint, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    data = chats(tmp_path / "in.jsonl")
    with ChatServer() as server:
        run_with(server, data, tmp_path / "out")
        assert server.keys == {f"Bearer {KEY}"}
        server.fault_for = lambda _: (status, {})
        with pytest.raises(InputError, match=hint) as refused:
            run_with(server, data, tmp_path / "out2")
    shown = capsys.readouterr()
    assert KEY not in str(refused.value) + shown.out + shown.err
    assert "***" in str(refused.value)
    for path in (tmp_path / "out").rglob("*"):
        assert KEY not in path.read_text()


def test_truncated_and_empty_answers_are_counted(tmp_path, capsys) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"turns": ["a?", "b?"]}, {"turns": ["silence?"]}])
    with ChatServer() as server:
        server.finish_reason = lambda body: "length" if len(body["messages"]) > 1 else "stop"
        server.reply = lambda body: "" if "silence" in str(body) else "yes"
        (row,) = run_with(server, data, tmp_path / "out")
        assert row["truncated_turns"] == [1]
        server.reply = lambda _: None
        with pytest.raises(SystemExit):
            run_with(server, data, tmp_path / "out2", max_retries=0)
    output = capsys.readouterr().out
    assert "1 of them hold an answer cut off at max_new_tokens=512" in output
    assert "1 conversations skipped, the target's answer is empty" in output
    assert "the reply's content is NoneType" in output


def test_sampling_sends_a_seed_per_row_and_turn(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"turns": ["a?", "b?"]}, {"turns": ["a?"]}])
    with ChatServer() as server:
        run_with(server, data, tmp_path / "out", temperature=0.7)
        first = sorted(body["seed"] for body in server.bodies)
        run_with(server, data, tmp_path / "out2", temperature=0.7, concurrency=1)
        assert sorted(body["seed"] for body in server.bodies[3:]) == first
        assert len(set(first)) == 3
        run_with(server, data, tmp_path / "out3")
        assert "seed" not in server.bodies[-1]


def test_kill_in_mid_run_loses_and_repeats_nothing(tmp_path: Path) -> None:
    data = chats(tmp_path / "in.jsonl", num_rows=24)
    written = tmp_path / "out/conversations.jsonl"
    with ChatServer(delay_s=0.02) as server:
        child = os.fork()
        if child == 0:
            try:
                run_with(server, data, tmp_path / "out", temperature=0.5)
            finally:
                os._exit(1)
        while not (written.exists() and written.read_bytes().count(b"\n") >= 8):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "ended before it could be killed"
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kept = [json.loads(line) for line in written.read_text().splitlines()]
        with written.open("a") as file:
            file.write('{"id": 23, "messages": [{"ro')
        server.delay_s = 0.0
        time.sleep(0.1)
        num_asked = len(server.bodies)
        rows = run_with(server, data, tmp_path / "out", temperature=0.5)
        num_resumed = len(server.bodies) - num_asked
        clean = run_with(server, data, tmp_path / "clean", temperature=0.5)
    assert [row["id"] for row in rows] == list(range(24))
    assert rows == clean
    num_turns, num_kept = (sum(len(row["messages"]) // 2 for row in each) for each in (rows, kept))
    assert num_resumed == num_turns - num_kept > 0


def test_another_setting_is_refused(tmp_path: Path) -> None:
    data = chats(tmp_path / "in.jsonl")
    with ChatServer() as server:
        run_with(server, data, tmp_path / "out")
        for changes, match in [
            ({"temperature": 0.5}, r"temperature was 0\.0, is 0\.5"),
            ({"max_new_tokens": 7}, "max_new_tokens was 512, is 7"),
            ({"seed": 1}, "seed was 0, is 1"),
            ({"model": "other"}, "model was 'toy', is 'other'"),
        ]:
            with pytest.raises(InputError, match=match):
                run_with(server, data, tmp_path / "out", **changes)
        data.write_text(data.read_text().replace("question 1", "query 1"))
        with pytest.raises(InputError, match="data_sha256 was"):
            run_with(server, data, tmp_path / "out")
        (tmp_path / "out/manifest.json").unlink()
        with pytest.raises(InputError, match=r"has no manifest\.json that says how"):
            run_with(server, data, tmp_path / "out")


def test_journal_recovers_and_guards_its_rows(tmp_path: Path) -> None:
    rows = [{"id": 2, "a": "é"}, {"id": 0, "a": "b"}]
    with JsonlStore(tmp_path, {"seed": 0}) as journal:
        journal.append(rows)
        journal.append([{"id": 2, "a": "again"}])
        with pytest.raises(InputError, match="another process is writing here"):
            JsonlStore(tmp_path, {"seed": 0})
    path = tmp_path / "conversations.jsonl"
    whole = path.read_bytes()
    for torn in (b'{"id": 5', b'{"id": 5, "a": "\xc3', b"\0\0\0\n"):
        path.write_bytes(whole + torn)
        with JsonlStore(tmp_path, {"seed": 0}) as journal:
            assert (journal.done_ids, journal.num_dropped_bytes) == ({0, 2}, len(torn))
        assert path.read_bytes() == whole
    with JsonlStore(tmp_path, {"seed": 0}) as journal:
        assert journal.write_sorted() == [rows[1], rows[0]]
    path.write_bytes(b"garbage\n" + whole)
    # Holds the traceback, and so the journal that was refused, which must not hold the folder.
    with pytest.raises(InputError, match=r"conversations\.jsonl:1: not a row") as refused:
        JsonlStore(tmp_path, {"seed": 0})
    path.write_bytes(whole)
    with JsonlStore(tmp_path, {"seed": 0}) as journal:
        assert journal.done_ids == {0, 2}
    assert refused.tb is not None


def test_retry_after() -> None:
    assert retry_after_s(None) == 0
    assert retry_after_s("1.5") == 1.5
    assert retry_after_s("soon") == 0
    assert 8 < retry_after_s(formatdate(time.time() + 10, usegmt=True)) <= 10


def test_bad_settings_are_named(tmp_path: Path) -> None:
    text = write_rows(tmp_path / "text.jsonl", [{"text": "no question"}])
    good = chats(tmp_path / "in.jsonl")

    def refused(match: str, data: Path = good, **settings: Any) -> None:
        own = {"data": DataConfig(path=str(data)), "out_dir": str(tmp_path / "out")}
        with pytest.raises(InputError, match=match):
            regenerate.main(RegenerateRun(**own, **settings))

    refused("plain text has no questions", text)
    refused("must be like http://localhost", endpoint="localhost:8000")
    refused("must not hold a password", endpoint="http://me:pw@localhost/v1", model="toy")
    refused("no such file", tmp_path / "missing.jsonl")
    assert not (tmp_path / "out").exists()


# --- Parts of rows besides answers: tools, calls, the end of a conversation.


def run_rows(server: ChatServer, folder: Path, rows: list[dict]) -> list[dict]:
    data = DataConfig(
        path=str(write_rows(folder / "in.jsonl", rows)),
        chat_template_kwargs={"enable_thinking": False},
    )
    out_dir = folder / "out"
    regenerate.main(RegenerateRun(data=data, endpoint=server.url, out_dir=str(out_dir)))
    return rows_in(out_dir)


class CallingServer(ChatServer):
    """Answers everything with one call."""

    call: dict

    def answer(self, body: dict) -> dict:
        message = {"role": "assistant", "content": None, "tool_calls": [self.call]}
        return {"choices": [{"message": message, "finish_reason": "tool_calls"}]}


def test_tools_and_calls_reach_the_server_and_come_back(tmp_path: Path) -> None:
    function = {"name": "look", "arguments": json.dumps({"at": "Oslo"})}
    own = {"tools": [LOOK], "chat_template_kwargs": {"style": "dry"}}
    row = {"messages": [user("a"), assistant("x"), user("b")], **own}
    with CallingServer() as server:
        server.call = {"id": "c1", "type": "function", "function": function}
        (found,) = run_rows(server, tmp_path, [row])
    assert {key: found[key] for key in own} == own
    assert found["messages"][1] == assistant("") | {"tool_calls": [CALL | {"id": "c1"}]}
    first, second = sorted(server.bodies, key=lambda body: len(body["messages"]))
    assert first["tools"] == [LOOK]
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "style": "dry"}
    assert "return_token_ids" not in first
    assert second["messages"][1]["tool_calls"][0]["function"] == function


def test_parts_reach_the_server_and_come_back(tmp_path: Path) -> None:
    asked = user("x") | {"content": [{"type": "text", "text": text} for text in ("a", "b")]}
    with ChatServer() as server:
        (found,) = run_rows(server, tmp_path, [{"messages": [asked]}])
    assert server.bodies[-1]["messages"] == [found["messages"][0]] == [asked]


@pytest.mark.parametrize("arguments", ["", None, "null", {}])
def test_a_call_without_arguments_is_kept(tmp_path: Path, arguments: object) -> None:
    with CallingServer() as server:
        function = {"name": "look", "arguments": arguments}
        server.call = {"type": "function", "function": function}
        (found,) = run_rows(server, tmp_path, [{"messages": [user("a")], "tools": [LOOK]}])
    (call,) = found["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": {}}


@pytest.mark.parametrize(("reason", "cut"), [("stop", []), ("length", [0]), ("abort", [0])])
def test_an_answer_that_the_target_had_not_ended_is_named(tmp_path, reason, cut) -> None:
    with ChatServer() as server:
        server.finish_reason = lambda _: reason
        (found,) = run_rows(server, tmp_path, [{"turns": ["a"]}])
    assert found["truncated_turns"] == cut
    (record,) = load_records(str(tmp_path / "out" / "conversations.jsonl")).records
    assert record.truncated_messages == frozenset({1} if cut else ())


def test_a_conversation_ends_before_a_result_that_no_answer_called(tmp_path, capsys) -> None:
    calls = assistant("") | {"tool_calls": [CALL]}
    row = {"messages": [user("a"), calls, RESULT, assistant("b"), user("c"), assistant("d")]}
    with ChatServer() as server:
        (found,) = run_rows(server, tmp_path, [row])
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]
    assert "1 of them end early, before the result of a tool" in capsys.readouterr().out


def test_conversations_without_a_question_are_told(tmp_path: Path, capsys) -> None:
    silent, asking = {"messages": [assistant("x")]}, {"messages": [user("a"), assistant("x")]}
    with ChatServer() as server:
        run_rows(server, tmp_path, [asking, silent])
        said = "1 of them have no user message to answer, first "
        assert f"{said}{tmp_path}/in.jsonl:2" in capsys.readouterr().out
        with pytest.raises(InputError, match=r"no row has a user message to answer, first .*:1; "):
            run_rows(server, tmp_path, [silent])


# --- Answers of a target in this process.


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("target"), "llama")


def saved(folder: Path, family: str) -> Path:
    words = tokenizer()
    model = random_model(family, vocab_size=len(words))
    # A shipped penalty that would change greedy text if it were obeyed.
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def run_local(target_path: Path, data: Path, out_dir: Path, **changes: Any) -> list[dict]:
    on_bad_row = changes.pop("on_bad_row", OnBadRow.error)
    config = RegenerateRun(
        target=TargetConfig(path=str(target_path), dtype=Dtype.float32),
        data=DataConfig(path=str(data), on_bad_row=on_bad_row),
        out_dir=str(out_dir),
        **{"max_new_tokens": 12, "vllm": "none", **changes},
    )
    regenerate.main(config)
    return rows_in(out_dir)


RARE = [pytest.param(each, marks=pytest.mark.slow) for each in ("lfm2", "gpt_oss", "qwen3_next")]


@pytest.mark.parametrize("family", ["llama", *RARE])
def test_batched_answers_are_those_of_generate(tmp_path: Path, family: str) -> None:
    """Its penalty included, of what each text holds and not of what fills up the batch."""
    target_path = saved(tmp_path / "target", family)
    data = chats(tmp_path / "in.jsonl", num_rows=7)
    batched = run_local(target_path, data, tmp_path / "out4", batch_size=4)
    plain = run_local(target_path, data, tmp_path / "plain", batch_size=4, plain=True)
    assert batched == run_local(target_path, data, tmp_path / "out1", batch_size=1)
    assert [row["id"] for row in batched] == list(range(7))
    answers = {row["messages"][-1]["content"] for row in batched}
    assert len(answers) > 3, "the toy target says the same to everybody"
    target = regenerate.load_target(TargetConfig(path=str(target_path)), torch.device("cpu"))
    (question, answer) = batched[1]["messages"]
    asked = Dialogue(1, Record([question], None, "in.jsonl:2"), seed=0)
    assert asked.advance_to_question()
    config = RegenerateRun(batch_size=4, max_new_tokens=12)
    ids = ConversationAnswerer(target, config).encode_prompt(asked)
    prompt_length = len(ids)
    own = AutoModelForCausalLM.from_pretrained(target_path)
    text = own.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0]
    assert answer["token_ids"] == text[prompt_length:].tolist()
    (question, answer) = plain[1]["messages"]
    with torch.no_grad():
        while len(ids) < prompt_length + 12 and ids[-1] not in target.stop_ids:
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer["token_ids"] == ids[prompt_length:]
    said = target.tokenizer.decode(ids[prompt_length:], skip_special_tokens=True)
    assert answer["content"] == said.strip()


def test_a_vllm_of_this_command_writes_the_rows_of_this_process(
    target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Calls of tools, cut answers and all; the server is asked for nothing but token ids."""
    data = chats(tmp_path / "in.jsonl", num_rows=4)
    with data.open("a") as file:
        for question in ("call?", "why?"):
            row = {"messages": [user(question), assistant("old")], "tools": [LOOK]}
            file.write(json.dumps(row) + "\n")
    known: dict[tuple[int, ...], list[int]] = {}
    answer = regenerate.stream_answers

    def noted(target: Any, requests: list[Any], *given: Any) -> Any:
        for number, ids in answer(target, requests, *given):
            ids = [*ids[:5], 2] if number == 0 else ids  # noqa: PLW2901  one ends by itself
            known[tuple(requests[number].prompt_ids)] = ids
            yield number, ids

    monkeypatch.setattr(regenerate, "stream_answers", noted)
    expected = run_local(target_path, data, tmp_path / "here")
    assert "answering in process" not in capsys.readouterr().out
    environment = make_environment(tmp_path / "its", known)
    found = run_local(target_path, data, tmp_path / "out", vllm=str(environment))
    assert found == expected
    assert {bool(row["truncated_turns"]) for row in found} == {True, False}
    log = (tmp_path / "out/vllm.log").read_text().splitlines()
    assert log[0] == "serving"
    assert "next" in capsys.readouterr().out
    # A second start has nothing to ask, and starts nothing.
    (tmp_path / "out/vllm.log").unlink()
    assert run_local(target_path, data, tmp_path / "out", vllm=str(environment)) == expected
    assert not (tmp_path / "out/vllm.log").exists()
    with pytest.raises(InputError, match="source was 'vLLM', is 'in process'"):
        run_local(target_path, data, tmp_path / "out")


def test_what_vllm_is_started_with(target_path: Path, tmp_path: Path, monkeypatch) -> None:
    started: list[list[str]] = []

    @contextmanager
    def serve(python: str, model: str, options: list[str], log: Path) -> Iterator[str]:
        started.append([python, model, *options, str(log)])
        yield "http://127.0.0.1:1/v1"

    monkeypatch.setattr(regenerate, "serve_model", serve)
    monkeypatch.setattr(regenerate, "TEMPLATE_TOKENS", 10)
    monkeypatch.setattr(regenerate, "choose_fast_dtype", lambda dtype, _: dtype)
    row = Record([user("why?" * 10)], None, "in.jsonl:1")
    target = TargetConfig(path=str(target_path), revision="v2", trust_remote_code=True)
    config = RegenerateRun(target=target, concurrency=5, plain=True, max_new_tokens=20, seed=3)
    monkeypatch.setattr(regenerate, "load_config", lambda _: load_config(TargetConfig(target.path)))
    for more in (0, 10_000):  # the second beyond the window
        config.max_new_tokens += more
        with ExitStack() as stack:
            endpoint = regenerate.start_vllm("py", config, CPU, [Dialogue(0, row, 0)], stack)
        assert endpoint.model == str(target_path)
    length = str(10 + len(json.dumps([row.messages, None])) + 20)
    rest = ["--seed", "3", "--revision", "v2", "--trust-remote-code", "--generation-config", "vllm"]
    log = str(Path(config.out_dir) / "vllm.log")
    for found, window in zip(started, (length, "256"), strict=True):
        sizes = ["--max-num-seqs", "5", "--dtype", "auto", "--max-model-len", window]
        assert found == ["py", str(target_path), *sizes, *rest, log]


@pytest.mark.parametrize(("fast", "usual"), [("float32", "float32"), ("bfloat16", "auto")])
def test_a_cpu_without_bfloat16_serves_float32_unless_told(fast, usual, monkeypatch) -> None:
    monkeypatch.setattr(regenerate, "choose_fast_dtype", lambda *_: getattr(torch, fast))
    found = [regenerate.choose_served_dtype(each, CPU) for each in (Dtype.auto, Dtype.bfloat16)]
    assert found == [usual, "bfloat16"]


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"adapter": "me/adapter"}, "target.adapter=me/adapter"),
        ({"attention": "eager"}, "target.attention=eager"),
        ({"device_map": "auto"}, "target.device_map=auto"),
        ({"path": "me/m/m.gguf"}, "target.path=me/m/m.gguf"),
        ({"quantization": Quantization.int8}, "target.quantization=int8"),
    ],
)
def test_a_target_that_vllm_would_load_otherwise_answers_here(
    target: dict, named: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    environment = str(make_environment(tmp_path / "its"))
    config = RegenerateRun(target=TargetConfig(**{"path": "me/m", **target}), vllm=environment)
    refused = rf"does not answer with {re.escape(named)} as this process does; set vllm=none"
    with pytest.raises(InputError, match=refused):
        regenerate.choose_vllm(config, CPU)
    monkeypatch.setattr(regenerate, "find_vllm_python", lambda _: "py")
    assert regenerate.choose_vllm(replace(config, vllm="auto"), CPU) is None
    assert f"answering in process, for {named}; on a GPU or" in capsys.readouterr().out
    monkeypatch.setattr(regenerate, "find_vllm_python", lambda _: None)
    assert regenerate.choose_vllm(RegenerateRun(target=TargetConfig(path="me/m")), CPU) is None
    assert "answering in process, as no vLLM was found (docs/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"stop_strings": ["###"], "no_repeat_ngram_size": 0}, "stop_strings=['###'] of its gen"),
        ({"bad_words_ids": [[3]]}, "bad_words_ids=[[3]] of its generation config"),
        ({"num_beams": 4}, "num_beams=4 of its generation config"),
        ({"repetition_penalty": 1.1, "temperature": 0.7, "num_beams": 1, "top_k": 20}, None),
    ],
)
def test_rules_of_a_generation_config_that_vllm_ignores_are_followed_here(
    rules: dict, named: str | None, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(rules))
    monkeypatch.setattr(regenerate, "find_vllm_python", lambda _: "py")
    monkeypatch.setattr(regenerate, "choose_fast_dtype", lambda dtype, _: dtype)
    config = RegenerateRun(target=TargetConfig(path=str(tmp_path)))
    assert regenerate.choose_vllm(config, CPU) == (None if named else "py")
    assert not named or f"for {named}" in capsys.readouterr().out
    assert regenerate.choose_vllm(replace(config, plain=True), CPU) == "py"


def test_a_cpu_without_bfloat16_starts_no_vllm_unless_told(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(regenerate, "find_vllm_python", lambda _: "py")
    monkeypatch.setattr(regenerate, "choose_fast_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(regenerate, "this_processor", lambda: "a CPU, AVX2")
    config = RegenerateRun(target=TargetConfig(path=str(tmp_path)))
    assert regenerate.choose_vllm(config, CPU) is None
    assert (
        "as a CPU, AVX2 imitates bfloat16, where vLLM was no faster (vllm=FOLDER)"
        in capsys.readouterr().out
    )
    assert regenerate.choose_vllm(replace(config, vllm="its"), CPU) == "py"


def test_the_target_multiplies_over_packed_weights(target_path, tmp_path, monkeypatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(regenerate, "pack_weights", lambda *modules: found.extend(modules))
    run_local(target_path, chats(tmp_path / "in.jsonl", num_rows=1), tmp_path / "out")
    assert [type(each).__name__ for each in found] == ["LlamaForCausalLM", "Linear"]


def test_answers_end_with_the_stop_texts_of_the_generation_config(tmp_path: Path) -> None:
    target_path = saved(tmp_path / "target", "llama")
    rows = [{"prompt": "why?"}, {"prompt": "who are you, there?"}]
    data = write_rows(tmp_path / "in.jsonl", rows)
    before = [row["messages"][1] for row in run_local(target_path, data, tmp_path / "before")]
    pieces = [tokenizer().decode([token]) for token in before[0]["token_ids"]]
    stop = next(each for each in pieces[1:] if each.isascii() and len(each) > 1)
    config = json.loads((target_path / "generation_config.json").read_text())
    (target_path / "generation_config.json").write_text(json.dumps(config | {"stop_strings": stop}))
    # Also where the question has them.
    rows[1]["prompt"] += stop
    data = write_rows(tmp_path / "in.jsonl", rows)
    first, second = (r["messages"][1] for r in run_local(target_path, data, tmp_path / "after"))
    assert first["token_ids"] == before[0]["token_ids"][: pieces.index(stop) + 1]
    assert len(second["token_ids"]) == 12
    with pytest.raises(InputError, match=r"generation_config was .*, is None"):
        run_local(target_path, data, tmp_path / "after", plain=True)


def test_the_bar_tells_tokens_and_forecasts_once_two_batches_have_ended(
    target_path, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    data = chats(tmp_path / "in.jsonl", num_rows=7)
    for batch_size, forecasts in ((4, False), (3, True)):
        rows = run_local(target_path, data, tmp_path / str(batch_size), batch_size=batch_size)
        assert len(rows) == 7
        said = capsys.readouterr().err
        assert said.rindex("Loading weights") < said.index("answering")
        last = said[said.rindex("answering: 100%") :]
        assert (" tokens/s]" in last, "row/s" in last) == (True, forecasts), last


def test_resumed_answers_equal_uninterrupted_ones(
    target_path, tmp_path, monkeypatch, capsys
) -> None:
    data = chats(tmp_path / "in.jsonl", num_rows=7)
    settings = {"batch_size": 3, "temperature": 0.8}
    monkeypatch.setattr(regenerate, "BATCHES_AT_A_TIME", 1)
    clean = run_local(target_path, data, tmp_path / "clean", **settings)
    answer_group = regenerate.iter_group_outcomes
    calls: list[int] = []

    def killed_in_the_second_group(group: Any, local: Any) -> Any:
        for outcome in answer_group(group, local):
            calls.append(len(group))
            if len(calls) == 5:
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(regenerate, "iter_group_outcomes", killed_in_the_second_group)
    with pytest.raises(KeyboardInterrupt):
        run_local(target_path, data, tmp_path / "out", **settings)
    # The last row is torn off too.
    path = tmp_path / "out/conversations.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    *whole, torn = path.read_bytes().split(b"\n")
    capsys.readouterr()
    assert run_local(target_path, data, tmp_path / "out", **settings) == clean
    assert (
        f"\ndropped a half-written row ({len(torn)} bytes)\n"
        f"continuing: {len(whole)} conversations are done\n"
        f"{7 - len(whole)} conversations to answer, at most 12 tokens a turn; "
        f"answers go to {path}\n"
    ) in capsys.readouterr().out
    assert len(whole) == 3
    monkeypatch.undo()
    assert run_local(target_path, data, tmp_path / "other", **settings, seed=1) != clean


def test_rows_that_do_not_fit_the_window(target_path, tmp_path, capsys) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"turns": ["x" * 600]}, {"turns": ["short?"]}])
    with pytest.raises(InputError, match=r"in\.jsonl:1: \d+ prompt tokens leave no room"):
        run_local(target_path, data, tmp_path / "out")
    rows = run_local(target_path, data, tmp_path / "out", on_bad_row=OnBadRow.skip)
    assert [row["id"] for row in rows] == [1]
    assert "1 conversations skipped, refused:" in capsys.readouterr().out
    with pytest.raises(InputError, match="max_new_tokens=256: leaves no room"):
        run_local(target_path, data, tmp_path / "out2", max_new_tokens=256)


def test_other_weights_do_not_go_on_with_the_answers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "target", "llama")
    data = chats(tmp_path / "in.jsonl", num_rows=2)
    run_local(folder, data, tmp_path / "out")
    random_model("llama", vocab_size=len(tokenizer()), seed=1).save_pretrained(folder)
    with pytest.raises(InputError, match=r"in another way: target\.weights was \w{12}, is"):
        run_local(folder, data, tmp_path / "out")
