"""What regenerated rows hold besides answers: given ones, tools, where a conversation ends."""

import json
from pathlib import Path

import pytest

from conf.schema import DataConfig, InputError, RegenerateRun
from data.records import load_records
from scripts import regenerate
from tests.chat_server import ChatServer
from tests.chats import assistant, rows_in, user, write_rows

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}
RESULT = {"role": "tool", "content": "Sunny"}


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(server: ChatServer, folder: Path, rows: list[dict], **settings: object) -> list[dict]:
    data = DataConfig(
        path=str(write_rows(folder / "in.jsonl", rows)),
        chat_template_kwargs={"enable_thinking": False},
    )
    out_dir = folder / "out"
    chosen = {"endpoint": server.url, "kept_share": 0.0, "out_dir": str(out_dir), **settings}
    regenerate.main(RegenerateRun(data=data, **chosen))
    return rows_in(out_dir)


def test_half_of_the_conversations_keep_their_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [{"messages": [user(f"q{i}"), assistant(f"given {i}")]} for i in range(40)]
    asked = [{"messages": [user(f"open {i}")]} for i in range(10)]
    with ChatServer() as server:
        rows = run(server, tmp_path, given + asked, kept_share=0.5)
        again = run(server, tmp_path, given + asked, kept_share=0.5)
        assert len(server.bodies) == 50 - sum("kept" in row for row in rows)
    assert rows == again
    assert [row["id"] for row in rows] == list(range(50))
    kept = [row for row in rows if row.get("kept")]
    assert 12 <= len(kept) <= 28
    assert all(row["messages"] == given[row["id"]]["messages"] for row in kept)
    assert all(row["messages"][-1]["content"].startswith("answer ") for row in rows[40:])
    assert f"{len(kept)} of 50 conversations keep their answers" in capsys.readouterr().out


def test_a_kept_row_says_what_it_said(tmp_path: Path) -> None:
    weighed = assistant("no") | {"weight": 0}
    row = {
        "messages": [user("a"), weighed, user("b"), assistant("yes")],
        "tools": [LOOK], "chat_template_kwargs": {"style": "dry"}, "category": "math",
    }  # fmt: skip
    with ChatServer() as server:
        rows = run(server, tmp_path, [row], kept_share=0.999)
    assert rows == [{"id": 0, **row, "truncated_turns": [], "kept": True}]
    (loaded,) = load_records(str(tmp_path / "out/conversations.jsonl")).records
    assert (loaded.unlearnt, loaded.template_kwargs) == ({1}, {"style": "dry"})


def test_tools_and_calls_reach_the_server_and_come_back(tmp_path: Path) -> None:
    function = {"name": "look", "arguments": json.dumps({"at": "Oslo"})}

    class Server(ChatServer):
        def answer(self, body: dict) -> dict:
            called = {"id": "c1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [called]}
            return {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    row = {"messages": [user("a"), assistant("x"), user("b")], "tools": [LOOK]}
    with Server() as server:
        (found,) = run(server, tmp_path, [row])
    assert found["tools"] == [LOOK]
    assert found["messages"][1] == {
        "role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}],
    }  # fmt: skip
    first, second = sorted(server.bodies, key=lambda body: len(body["messages"]))
    assert first["tools"] == [LOOK]
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert "return_token_ids" not in first
    assert second["messages"][1]["tool_calls"][0]["function"] == function


def test_a_conversation_ends_before_a_result_that_no_answer_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = assistant("") | {"tool_calls": [CALL]}
    row = {"messages": [user("a"), calls, RESULT, assistant("b"), user("c"), assistant("d")]}
    with ChatServer() as server:
        (found,) = run(server, tmp_path, [row])
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]
    assert "1 of them end early, before the result of a tool" in capsys.readouterr().out


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_is_a_share(tmp_path: Path, share: float) -> None:
    with pytest.raises(InputError, match=f"kept_share={share}: must be from 0 to below 1"):
        regenerate.main(RegenerateRun(endpoint="http://127.0.0.1:1/v1", kept_share=share))
