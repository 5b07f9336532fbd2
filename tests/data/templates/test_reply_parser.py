"""Replies taken apart by a target's own template, and learnt as they were written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from templates import FAMILIES, LOOK, Says, assistant, encoder, learnt_runs, written

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from conf.settings.scripts import RegenerateRun
from conf.settings.target import Dtype, TargetConfig
from data.rows.records import load_records
from data.templates.reply_parser import parse_reply, thinking_tags
from scripts import regenerate
from tests.chats import assistant as said
from tests.chats import rows_in, user, write_rows
from tests.servers import ChatServer
from tests.toys import random_model

CHANNELS = ["gpt-oss", "gemma-4", "ministral", "qwen3.5"]
ASKED = [{"role": "user", "content": "Where?"}]
# Calls in another notation than JSON behind a name stay text.
NO_CALLS = {"gemma-4", "qwen3.5"}


def read(family: str, reply: str, tools: list[dict] | None = None) -> dict[str, Any]:
    return parse_reply(reply, ASKED, encoder(family).build_template({}, tools), tools)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("family", CHANNELS)
@pytest.mark.parametrize("turn", [Says("I am fine.\n\nYes"), Says("Hello", "Am I?\nFine, yes.")])
def test_text_and_thinking_are_told_apart(family: str, turn: Says) -> None:
    notes = FAMILIES[family]
    if turn.thought and not notes.think:  # Gemma 4 writes it, and its template drops it
        reply = f"<|channel>thought\n{turn.thought}\n<channel|>{turn.text}{notes.close}"
    else:
        reply = written(notes, turn)
    assert read(family, reply) == assistant(turn)


@pytest.mark.parametrize("family", [each for each in CHANNELS if each not in NO_CALLS])
@pytest.mark.parametrize("thought", ["", "Hm."])
def test_calls_are_told_apart(family: str, thought: str) -> None:
    turn = Says("", thought, calls=True)
    found = read(family, written(FAMILIES[family], turn), [LOOK])
    assert without_ids(found) == without_ids(assistant(turn))


def test_thinking_that_the_template_never_renders_is_told_apart() -> None:
    assert read("deepseek-r1", "Hm.\n</think>\n\nYes" + FAMILIES["deepseek-r1"].close) == {
        "role": "assistant", "content": "Yes", "reasoning_content": "Hm.",
    }  # fmt: skip


def test_an_answer_that_was_cut_off_has_no_end() -> None:
    assert read("qwen3.5", "Hm.\n</think>\n\nYes, I") == {
        "role": "assistant", "content": "Yes, I", "reasoning_content": "Hm.",
    }  # fmt: skip


@pytest.mark.parametrize("family", CHANNELS)
def test_what_has_no_known_form_stays_text(family: str) -> None:
    close = FAMILIES[family].close
    odd = "Yes" + close.strip() + " and no"
    assert read(family, odd + close)["content"] == odd.strip()


def test_a_call_with_words_behind_it_stays_text() -> None:
    notes = FAMILIES["ministral"]
    reply = notes.call + " and more" + notes.close
    assert read("ministral", reply, [LOOK]) == said(notes.call + " and more")


def test_a_call_whose_arguments_are_no_object_stays_text() -> None:
    notes = FAMILIES["ministral"]
    call = notes.call.replace('{"at": "Oslo"}', "[1]")
    assert call != notes.call
    assert read("ministral", call + notes.close, [LOOK]) == said(call)


def test_the_templates_own_tags_of_thinking_come_first() -> None:
    tags = thinking_tags(encoder("ministral").build_template({}, None))
    assert tags[0] == ("[THINK]", "[/THINK]")
    assert ("<think>", "</think>") in tags[1:]
    # A prompt that ends with the first tag leaves a model's turn without.
    assert all(all(pair) for pair in thinking_tags(encoder("qwen3.5").build_template({}, None)))


def tiny_target(folder: Path, family: str) -> TargetConfig:
    notes = FAMILIES[family]
    tokenizer = encoder(family).tokenizer
    torch.manual_seed(3)
    model = random_model("llama", vocab_size=len(tokenizer))
    ends = {"close": notes.close, "call": notes.call_close or notes.close}
    stops = {tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in ends.values()}
    model.generation_config.eos_token_id = sorted(stops)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetConfig(path=str(folder), dtype=Dtype.float32)


def learnt(family: str, path: Path) -> list[list[list[int]]]:
    """The learnt tokens of every row, a list for each of its turns."""
    return [
        [
            sample.input_ids[begin:end]
            for sample in encoder(family).encode_record(record)
            for begin, end in learnt_runs(sample)
        ]
        for record in load_records(str(path)).records
    ]


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3.5"])
def test_ids_that_are_learnt_are_those_that_were_written(family: str, tmp_path: Path) -> None:
    rows = [{"messages": [user(f"Hi {i}"), said("old"), user("So?")]} for i in range(4)]
    path = str(write_rows(tmp_path / "in.jsonl", rows))
    # What is drawn may be a text that the template refuses.
    data = DataConfig(path=path, on_bad_row=OnBadRow.skip)
    run = RegenerateRun(
        target=tiny_target(tmp_path / "target", family), data=data, temperature=1.0,
        max_new_tokens=9, out_dir=str(tmp_path / "out"), vllm="none",
    )  # fmt: skip
    regenerate.main(run)
    rows = rows_in(tmp_path / "out")
    wrote = [[m["token_ids"] for m in row["messages"] if m["role"] == "assistant"] for row in rows]
    assert len(wrote) >= 2
    assert all(len(turns) == 2 for turns in wrote)
    assert learnt(family, tmp_path / "out/conversations.jsonl") == wrote


@pytest.mark.parametrize("family", ["gemma-4", "ministral"])
def test_a_server_that_tells_ids_is_believed(family: str, tmp_path: Path) -> None:
    notes, tokenizer = FAMILIES[family], encoder(family).tokenizer
    turns = [Says("Hello", "Am I?" if notes.think else ""), Says("Yes")]
    replies = iter(turns)

    class Server(ChatServer):
        models = ({"id": "toy", "owned_by": "vllm"},)

        def answer(self, body: dict) -> dict:
            assert body["return_token_ids"]
            assert (body["top_k"], body["min_p"]) == (0, 0.0)
            turn = next(replies)
            message = {"role": "assistant", "content": turn.text, "reasoning": turn.thought or None}
            ids = tokenizer(written(notes, turn), add_special_tokens=False)["input_ids"]
            return {"choices": [{"message": message, "finish_reason": "stop", "token_ids": ids}]}

    row = {"messages": [user("Hi"), user("So?")]}
    data = DataConfig(path=str(write_rows(tmp_path / "in.jsonl", [row])))
    with Server() as server:
        run = RegenerateRun(data=data, endpoint=server.url, out_dir=str(tmp_path / "out"))
        regenerate.main(run)
    (row,) = rows_in(tmp_path / "out")
    assert [m.get("reasoning_content", "") for m in row["messages"][1::2]] == [
        turn.thought for turn in turns
    ]
    ids = [tokenizer(written(notes, t), add_special_tokens=False)["input_ids"] for t in turns]
    assert learnt(family, tmp_path / "out/conversations.jsonl") == [ids]


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    answer = said("Hello there") | {"token_ids": [3, 4, 5]}
    path = write_rows(tmp_path / "in.jsonl", [{"messages": [user("Hi"), answer]}])
    with pytest.raises(
        InputError, match=r"in.jsonl:1: messages\[1\].token_ids: give .*'Hello there'"
    ):
        learnt("qwen3.5", path)
