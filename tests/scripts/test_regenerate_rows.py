"""Parts of regenerated rows besides answers: tools, calls, the end of a conversation."""

import json
from pathlib import Path

import pytest

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.scripts import RegenerateRun
from data.rows.records import load_records
from scripts import regenerate
from tests.chats import assistant, rows_in, user, write_rows
from tests.servers import ChatServer

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}
RESULT = {"role": "tool", "content": "Sunny"}


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(server: ChatServer, folder: Path, rows: list[dict]) -> list[dict]:
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
        (found,) = run(server, tmp_path, [row])
    assert {key: found[key] for key in own} == own
    assert found["messages"][1] == {
        "role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}],
    }  # fmt: skip
    first, second = sorted(server.bodies, key=lambda body: len(body["messages"]))
    assert first["tools"] == [LOOK]
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "style": "dry"}
    assert "return_token_ids" not in first
    assert second["messages"][1]["tool_calls"][0]["function"] == function


def test_parts_reach_the_server_and_come_back(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    with ChatServer() as server:
        (found,) = run(server, tmp_path, [{"messages": [user("x") | {"content": parts}]}])
    assert (
        server.bodies[-1]["messages"] == [found["messages"][0]] == [user("x") | {"content": parts}]
    )


@pytest.mark.parametrize("arguments", ["", None, "null", {}, "{}"])
def test_a_call_without_arguments_is_kept(tmp_path: Path, arguments: object) -> None:
    with CallingServer() as server:
        function = {"name": "look", "arguments": arguments}
        server.call = {"type": "function", "function": function}
        (found,) = run(server, tmp_path, [{"messages": [user("a")], "tools": [LOOK]}])
    (call,) = found["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": {}}


@pytest.mark.parametrize(("reason", "cut"), [("stop", []), ("length", [0]), ("abort", [0])])
def test_an_answer_that_the_target_had_not_ended_is_named(
    tmp_path: Path, reason: str, cut: list[int]
) -> None:
    with ChatServer() as server:
        server.finish_reason = lambda _: reason
        (found,) = run(server, tmp_path, [{"turns": ["a"]}])
    assert found["truncated_turns"] == cut
    (record,) = load_records(str(tmp_path / "out" / "conversations.jsonl")).records
    assert record.truncated_messages == frozenset({1} if cut else ())


def test_a_conversation_ends_before_a_result_that_no_answer_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = assistant("") | {"tool_calls": [CALL]}
    row = {"messages": [user("a"), calls, RESULT, assistant("b"), user("c"), assistant("d")]}
    with ChatServer() as server:
        (found,) = run(server, tmp_path, [row])
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]
    assert "1 of them end early, before the result of a tool" in capsys.readouterr().out


def test_conversations_without_a_question_are_told(tmp_path: Path, capsys) -> None:
    silent, asking = {"messages": [assistant("x")]}, {"messages": [user("a"), assistant("x")]}
    with ChatServer() as server:
        run(server, tmp_path, [asking, silent])
        said = "1 of them have no user message to answer, first "
        assert f"{said}{tmp_path}/in.jsonl:2" in capsys.readouterr().out
        with pytest.raises(InputError, match=r"no row has a user message to answer, first .*:1; "):
            run(server, tmp_path, [silent])
