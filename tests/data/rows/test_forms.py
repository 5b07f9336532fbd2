"""Each published form of a row becomes a record, a field that is named, or a refusal."""

import copy
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputError
from conf.settings.data import COLUMNS, DataConfig, Form
from data.rows.data_files import Row
from data.rows.field_checks import MalformedRowError, format_found_value
from data.rows.messages import LEARNT, REASONING, ROLES
from data.rows.records import (
    CONTEXTS,
    FORMS,
    GOOD,
    MASKS,
    PROMPTS,
    REPLIES,
    SYSTEM_TEXTS,
    TEMPLATE_KWARGS,
    TOOLS,
    TRUNCATED_TURNS,
    Record,
    detect_form,
    load_records,
    parse_record,
)

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
CHAT = [USER, ASSISTANT]
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ASSISTANT,
]
NO_ID = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def read(row: object, form: Form = Form.auto, **columns: str) -> Record:
    """The record of a row that stands alone in its file."""
    line = Row("rows.jsonl:1", raw=json.dumps(row).encode())
    found = detect_form([line], "rows.jsonl", columns) if form is Form.auto else form
    return parse_record(line, found, columns, detected=form is Form.auto)


def assistant(**fields: Any) -> list:
    return [USER, {"role": "assistant"} | fields]


def chat(*messages: Any, **fields: Any) -> dict:
    return {"messages": list(messages), **fields}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        # Roles and keys of messages, under any name of their list.
        ({"conversations": CHAT}, CHAT),
        ({"messages": SHAREGPT}, CHAT),
        ({"dialogue": CHAT}, CHAT),
        ({"dialog": CHAT}, CHAT),
        ({"messages": json.dumps(CHAT)}, CHAT),
        ({"messages": [json.dumps(USER), json.dumps(ASSISTANT)]}, CHAT),
        *((chat(USER, {"role": role, "content": "Hello"}), CHAT)
          for role in ("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot", "Assistant", "GPT")),
        (chat({"role": "Human", "content": "Hi"}, ASSISTANT), CHAT),
        (chat({"role": "developer", "content": "Be kind"}, USER),
         [{"role": "developer", "content": "Be kind"}, USER]),
        (chat(USER | {"name": "Ann"}), [USER | {"name": "Ann"}]),
        (chat(USER, ASSISTANT | {"tool_calls": None}), CHAT),
        # Any order that a template may take.
        (chat(ASSISTANT, USER, ASSISTANT), [ASSISTANT, USER, ASSISTANT]),
        (chat(USER, USER, ASSISTANT, ASSISTANT), [USER, USER, ASSISTANT, ASSISTANT]),
        (chat(USER, SYSTEM, ASSISTANT), [USER, SYSTEM, ASSISTANT]),
        # Parts.
        (chat({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASSISTANT), CHAT),
        (chat({"role": "user", "content": [{"type": "text", "text": "a"},
                                           {"type": "input_text", "text": "b"}, "c"]}),
         [{"role": "user", "content": "a\nb\nc", "content_parts": ["a", "b", "c"]}]),
        # System texts.
        (chat(*CHAT, system="Be kind"), [SYSTEM, *CHAT]),
        (chat(*CHAT, system_prompt="Be kind"), [SYSTEM, *CHAT]),
        (chat(SYSTEM, *CHAT, system="Be kind", system_prompt="Be kind"), [SYSTEM, *CHAT]),
        (chat(*CHAT, system=" "), CHAT),
        (chat({"role": "developer", "content": "Be kind"}, USER, system="Be kind"),
         [{"role": "developer", "content": "Be kind"}, USER]),
        (chat(USER, {"role": "system", "content": "Now be brief"}, system="Be kind"),
         [SYSTEM, USER, {"role": "system", "content": "Now be brief"}]),
        (chat({"role": "system", "content": ""}, *CHAT), CHAT),
        ({"system_prompt": "Be kind", "question": "Hi", "response": "Hello"}, [SYSTEM, *CHAT]),
        # Reasoning.
        *((chat(USER, ASSISTANT | {key: "Hm"}), assistant(content="Hello", reasoning_content="Hm"))
          for key in ("reasoning_content", "reasoning", "thinking")),
        (chat(*assistant(content=None, reasoning="Hm")),
         assistant(content="", reasoning_content="Hm")),
        (chat(*assistant(content="<think>Hm</think>Hello")),
         assistant(content="<think>Hm</think>Hello")),
        # Calls and their results.
        (chat(*CALLS), CALLS),
        (chat(*assistant(content=None, tool_calls=[{"id": "c1", "function":
                                                    {"name": "add", "arguments": '{"a": 1}'}}])),
         assistant(content="", tool_calls=[CALL])),
        (chat(*assistant(content="Well", tool_calls=[{"name": "add", "arguments": {"a": 1}}])),
         assistant(content="Well", tool_calls=[NO_ID])),
        (chat(*assistant(content="Well", function_call={"name": "add", "arguments": '{"a": 1}'}),
              {"role": "function", "name": "add", "content": "2"}),
         [*assistant(content="Well", tool_calls=[NO_ID]),
          {"role": "tool", "content": "2", "name": "add"}]),
        (chat(*assistant(tool_calls=json.dumps([{"name": "now", "arguments": ""}]))),
         assistant(content="", tool_calls=[
             {"type": "function", "function": {"name": "now", "arguments": {}}}])),
        ({"conversations": [SHAREGPT[0],
                            {"from": "function_call", "value": json.dumps(NO_ID["function"])},
                            {"from": "observation", "value": "2"}, SHAREGPT[1]]},
         [*assistant(content="", tool_calls=[NO_ID]), {"role": "tool", "content": "2"}, ASSISTANT]),
        (chat(*assistant(tool_calls=[CALL], function_call=NO_ID["function"])),
         assistant(content="", tool_calls=[CALL, NO_ID])),
        ({"conversations": [*SHAREGPT, {"from": "tool", "value": ""}]},
         [*CHAT, {"role": "tool", "content": ""}]),
        # Questions and answers.
        *(({question: "Hi", answer: "Hello"}, CHAT)
          for question in ("prompt", "question", "query", "problem", "input")
          for answer in ("response", "completion", "output", "solution", "answer")),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, *CHAT]),
        ({"problem": "Hi", "reasoning_content": "Hm", "solution": "Hello"},
         assistant(content="Hello", reasoning_content="Hm")),
        ({"instruction": "Hi", "response": "Hello"}, CHAT),
        *(({question: "More", "input": "", "output": "Yes", "system": "Be kind",
            "history": history},
           [SYSTEM, *CHAT, {"role": "user", "content": "More"},
            {"role": "assistant", "content": "Yes"}])
          for question in ("instruction", "prompt", "query")
          for history in ([["Hi", "Hello"]], CHAT)),
        # What a question is about, unless the question has it.
        *(({question: "Sum up", context: "A story", "answer": "Hello"},
           [{"role": "user", "content": "Sum up\n\nA story"}, ASSISTANT])
          for question in ("instruction", "prompt", "question", "input")
          for context in ("context", "passage")),
        # Preferences: the chosen answer.
        ({"prompt": "Hi", "chosen": "Hello"}, CHAT),
        ({"system": "Be kind", "question": "Hi", "chosen": "Hello"}, [SYSTEM, *CHAT]),
        ({"prompt": "Hi", "chosen": CHAT}, CHAT),
        ({"prompt": [USER], "chosen": [ASSISTANT]}, CHAT),
        ({"prompt": [SYSTEM, USER], "chosen": [SYSTEM, *CHAT]}, [SYSTEM, *CHAT]),
        ({"prompt": "Hi", "chosen": [SYSTEM, *CHAT]}, [SYSTEM, *CHAT]),
        ({"chosen": [SYSTEM, *CHAT]}, [SYSTEM, *CHAT]),
        ({"chosen": [ASSISTANT, *CHAT]}, [ASSISTANT, *CHAT]),
        ({"prompt": "Hi", "chosen": ASSISTANT}, CHAT),
        ({"prompt": "Hi", "chosen": json.dumps([ASSISTANT])}, CHAT),
        ({"instruction": "Sum up", "input": "A story", "history": [["Hi", "Hello"]],
          "chosen": "Hello"},
         [*CHAT, {"role": "user", "content": "Sum up\n\nA story"}, ASSISTANT]),
        # It stands beside the conversation, or repeats the conversation.
        *((chat(*CHAT, USER, chosen=chosen), [*CHAT, *CHAT])
          for chosen in ("Hello", ASSISTANT, [ASSISTANT], SHAREGPT[1], [*CHAT, *CHAT],
                         json.dumps([ASSISTANT]))),
        (chat(*CHAT, USER, system="Be kind", chosen=[*CHAT, *CHAT]), [SYSTEM, *CHAT, *CHAT]),
        *((chat(*CHAT, chosen=chosen), CHAT) for chosen in ("Hello", ASSISTANT, CHAT)),
        (chat(USER, ASSISTANT | {"content": "No"}, chosen=CHAT), CHAT),
        ({"prompt": "Hi", "chosen": '["Hello"]'},
         [USER, {"role": "assistant", "content": '["Hello"]'}]),
    ],
)  # fmt: skip
def test_messages_of_every_shape(row, messages):
    assert replace(read(row), row=row) == Record(messages, None, "rows.jsonl:1", row=row)


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [USER], "prompt": "x", "text": "y"}, Form.messages),
        ({"conversations": SHAREGPT, "turns": ["Hi"]}, Form.conversations),
        ({"turns": ["Hi"], "chosen": "x"}, Form.turns),
        ({"chosen": CHAT, "instruction": "Hi", "prompt": "x"}, Form.preference),
        ({"messages": None, "instruction": "Hi", "prompt": "x", "text": "y"}, Form.alpaca),
        ({"prompt": "Hi", "input_ids": [1]}, Form.prompt),
        ({"input_ids": [1], "text": "x"}, Form.tokens),
        ({"text": "Hi", "question": "x"}, Form.text),
        ({"question": "Hi"}, Form.question),
    ],
)
def test_the_first_form_that_a_row_has_a_key_of(row, form):
    for more in ({}, {"question": "x"}):
        assert detect_form([Row("rows.jsonl:1", value=row | more)], "rows.jsonl") is form


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        *((chat(*CHAT, **{key: tools}), {"tools": [TOOL]})
          for key in ("tools", "functions")
          for tools in ([TOOL], [TOOL["function"]], [json.dumps(TOOL)], json.dumps([TOOL]),
                        [{"type": "function"} | TOOL["function"]])),
        (chat(*CHAT, tools=[]), {}),
        (chat(*CHAT, tools="[]"), {}),
        (chat(*CHAT, chat_template_kwargs={"enable_thinking": False}),
         {"template_kwargs": {"enable_thinking": False}}),
        (chat(*CHAT, category="math"), {"category": "math"}),
        (chat(*CHAT, system="Be kind", category=""), {"messages": [SYSTEM, *CHAT]}),
        *((chat(USER, ASSISTANT | {key: value}), {"unlearnt_messages": frozenset({1})})
          for key in ("weight", "train", "training", "loss", "loss_mask", "loss_weight",
                      "loss_scale", "trainable", "train_on_turn", "learnable")
          for value in (0, 0.0, False)),
        (chat(USER, ASSISTANT | {"mask": 0}), {"unlearnt_messages": frozenset({1})}),
        (chat(USER, ASSISTANT | {"weight": 1, "mask": 1, "train_detail": []}), {}),
        ({"conversation": [{"input": "Hi", "output": "Hello", "train": False}]},
         {"unlearnt_messages": frozenset({1})}),
        # Rows that are not learnt, or whose answer is a bad one.
        *((chat(*CHAT, **{key: 0}), {"unlearnt_messages": frozenset({1})})
          for key in ("weight", "train", "loss_mask", "loss_scale", "trainable", "train_on_turn",
                      "learnable", "mask")),
        (chat(*CHAT, loss=False), {"unlearnt_messages": frozenset({1})}),
        (chat(*CHAT, USER, ASSISTANT, train=False),
         {"messages": [*CHAT, *CHAT], "unlearnt_messages": frozenset({1, 3})}),
        *((row | {key: value}, {"unlearnt_messages": excluded})
          for row in ({"prompt": "Hi", "completion": "Hello"}, chat(*CHAT))
          for key in ("label", "kto_tag")
          for value, excluded in ((False, frozenset({1})), ("False", frozenset({1})),
                                  (True, frozenset()), ("true", frozenset()))),
        (chat(*CHAT, loss_mask="0", train="True"), {"unlearnt_messages": frozenset({1})}),
        (chat(*CHAT, mask="User"), {}),
        (chat(*CHAT, mask="Assistant"), {"unlearnt_messages": frozenset({1})}),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "train": False},
         {"messages": None, "tokens": ([1, 2], [False, False])}),
        # A second mask says the same, or everything.
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [-100, 2], "completion_mask": [1, 1]},
         {"messages": None, "tokens": ([1, 2], [False, True])}),
        # Places count from the first message that remains.
        (chat({"role": "system", "content": ""}, USER, ASSISTANT | {"train": False}),
         {"unlearnt_messages": frozenset({1})}),
        (chat(USER, ASSISTANT | {"train": False, "token_ids": [5, 6]}, system="Be kind"),
         {"messages": [SYSTEM, *CHAT], "unlearnt_messages": frozenset({2}),
          "written_ids": {2: [5, 6]}}),
        *(({"input_ids": [1, 2, 3], **mask},
           {"messages": None, "tokens": ([1, 2, 3], [False, True, True])})
          for mask in ({"loss_mask": [0, 1, 1]}, {"assistant_masks": [0, 1, 1]},
                       {"completion_mask": [False, True, True]}, {"labels": [-100, 2, 3]})),
        ({"input_ids": [9, 1, 2], "loss_mask": [0, 0, 1], "attention_mask": [0, 1, 1]},
         {"messages": None, "tokens": ([1, 2], [False, True])}),
        ({"text": "Once upon"}, {"messages": None, "text": "Once upon"}),
    ],
)  # fmt: skip
def test_what_stands_beside_messages(row, fields):
    expected = {"messages": CHAT, "text": None, "where": "rows.jsonl:1", "row": row} | fields
    assert read(row) == Record(**expected)


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (chat(*CHAT, id=3, source="web", score=None, tags=[]), ("id", "source")),
        (chat(*CHAT, prompt="Hi", text="x"), ("prompt", "text")),
        (chat(USER | {"annotations": [1]}, ASSISTANT | {"annotations": [2]}),
         ("messages[].annotations",)),
        (chat(USER | {"thinking": "x", "train": True}),
         ("messages[].thinking", "messages[].train")),
        (chat({"role": "user", "content": [{"text": "Hi", "cache_control": {"a": 1}}]}),
         ("messages[].content[].cache_control",)),
        (chat(*assistant(content="x", tool_calls=[CALL | {"index": 1}])),
         ("messages[].tool_calls[].index",)),
        (chat(*assistant(content="x", function_call={"name": "f", "parsed": 1})),
         ("messages[].function_call.parsed",)),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, ("rejected",)),
        ({"problem": "Hi", "solution": "So", "answer": "42"}, ("answer",)),
        ({"question": "Hi", "response": "Hello", "system": "a", "system_prompt": "b"},
         ("system_prompt",)),
        ({"prompt": "Hi", "reply": "Hello"}, ("reply",)),
        ({"text": "x", "question": "y"}, ("question",)),
        ({"text": "a x", "answer": "x", "output": 3}, ("answer", "output")),
        # The row means the same without them: messages have their texts, or nothing is learnt.
        (chat({"role": "user", "content": "Is A  story sad?"}, ASSISTANT, context="A story",
              choices=["sad"], history="[]"), ("context", "choices", "history")),
        ({"prompt": "Sum up:\nA  story", "context": "A story", "answer": "x"}, ("context",)),
        ({"question": "Hi", "context": " \n", "answer": "Hello"}, ("context",)),
        (chat(*CHAT, rejected_response="No", loss=1.5, label=3, input="x"),
         ("rejected_response", "loss", "label", "input")),
        (chat(USER, label=0), ("label",)),
        (chat(*CHAT, weight="12 kg", mask="all"), ("weight", "mask")),
        (chat(*CHAT, input_ids=[1, 2], loss_mask=[0, 1], labels=[1, 2]),
         ("input_ids", "loss_mask", "labels")),
        (chat(USER | {"train_detail": [{"train": False}]}, ASSISTANT),
         ("messages[].train_detail",)),
        ({"input_ids": [1], "labels": [1], "length": 1}, ("length",)),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(row, unread):
    assert read(row).unread_fields == unread


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    (chat(USER, {"role": "moderator", "content": "x"}),
     rf"'messages\[1\].role': found 'moderator' \(str\); allowed: {', '.join(ROLES)}"),
    ({"conversations": [{"from": "nobody", "value": "x"}]},
     r"'conversations\[0\].from': found 'nobody' \(str\); allowed: system, user, assistant"),
    ({"messages": "Hi"}, r"'messages': found 'Hi' \(str\); allowed: a non-empty list"),
    (chat("Hi"), r"'messages\[0\]': .*an object with 'role' and 'content'"),
    (chat({"role": ["user"], "content": "x"}), r"'messages\[0\].role': found \['user'\]"),
    (chat({"content": "x"}), r"'messages\[0\].role': found nothing"),
    (chat(*assistant()), r"'messages\[1\].content': found nothing; allowed: a string"),
    (chat(*assistant(content=" \n")),
     r"'messages\[1\].content': found empty text; allowed: a non-empty string"),
    (chat(*assistant(content="\ud83d")),
     r"'messages\[1\].content': found half of a surrogate pair"),
    ({"instruction": "", "output": "x"}, r"'instruction': found empty text"),
    ({"instruction": "x", "output": ""}, r"'output': found empty text"),
    ({"instruction": "x", "input": 3, "output": "y"}, r"'input': found 3 \(int\)"),
    ({"prompt": ["x", 3]}, r"'prompt\[1\]': found 3 \(int\); allowed: a string"),
    ({"prompt": []}, r"'prompt': found \[\] \(list\); allowed: a string"),
    ({"prompt": "x", "response": 1}, r"'response': found 1 \(int\)"),
    ({"turns": ["x", None]}, r"'turns\[1\]': found nothing; allowed: a string"),
    ({"turns": []}, r"'turns': found \[\] \(list\); allowed: a non-empty list of strings"),
    ({"text": 3}, r"'text': found 3 \(int\); allowed: a string"),
    # Images, sounds and films: a target reads text alone.
    (chat(USER | {"content": [{"audio_url": {"url": "a.wav"}}]}, ASSISTANT),
     r"'messages\[0\].content\[0\].audio_url': found \{'url': 'a.wav'\} \(dict\)"),
    (chat(USER | {"images": ["a.png"]}, ASSISTANT),
     r"'messages\[0\].images': found \['a.png'\] \(list\); allowed: text alone"),
    ({"image": "a.png", "conversations": SHAREGPT},
     r"'image': found 'a.png' \(str\); allowed: text alone, without this field"),
    ({"prompt": "What is said?", "audio": {"bytes": "x"}}, r"'audio': found \{'bytes': 'x'\}"),
    (chat({"role": "tool", "content": "2"}, ASSISTANT),
     r"'messages\[0\].role': found a tool's result before any call"),
    (chat(USER, ASSISTANT | {"content": [{"type": "image_url", "image_url": {}}]}),
     r"'messages\[1\].content\[0\]': found a part of type 'image_url'"),
    (chat(USER, ASSISTANT | {"content": [3]}), r"'messages\[1\].content\[0\]': found 3"),
    (chat(USER, ASSISTANT | {"content": [{"type": "text"}]}),
     r"'messages\[1\].content\[0\].text': found nothing"),
    (chat(USER, ASSISTANT | {"content": {"a": 1}}), r"'messages\[1\].content': found \{'a': 1"),
    (chat(SYSTEM, *CHAT, system="Be rude"),
     r"'messages\[0\].content': found another system text, 'Be kind' \(str\), than the row's"),
    (chat(*CHAT, system=3), r"'system': found 3 \(int\); allowed: a string"),
    (chat({"role": "system", "content": " "}), r"'messages': found only a system message"),
    (chat({"role": "developer", "content": "x"}), r"'messages': found only a system message"),
    (chat(USER, ASSISTANT | {"reasoning": "a", "thinking": "b"}),
     r"'messages\[1\].thinking': found another reasoning; allowed: one per message"),
    (chat(USER, ASSISTANT | {"reasoning": 3}), r"'messages\[1\].reasoning': found 3"),
    (chat(USER | {"tool_calls": [CALL]}), r"'messages\[0\].tool_calls': found calls of the u"),
    (chat(*assistant(tool_calls=[{"name": "f", "arguments": '{"a": '}])),
     r"'messages\[1\].tool_calls\[0\].arguments': found '\{\"a\": ' \(str\); .*an object"),
    (chat(*assistant(tool_calls=[{"name": "f", "arguments": [1]}])),
     r"'messages\[1\].tool_calls\[0\].arguments': found \[1\] \(list\)"),
    (chat(*assistant(tool_calls=[{"name": "f", "arguments": {"a": "\ud83d"}}])),
     r"'messages\[1\].tool_calls\[0\]': found half of a surrogate pair"),
    (chat(*assistant(tool_calls=[{"id": "c"}])), r"tool_calls\[0\].function': found .*'name'"),
    (chat(*assistant(tool_calls=[CALL | {"type": "custom"}])),
     r"'messages\[1\].tool_calls\[0\].type': found 'custom' .*allowed: function"),
    (chat(*assistant(tool_calls="f(x)")), r"'messages\[1\].tool_calls': found 'f\(x\)'"),
    ({"conversations": [*SHAREGPT, {"from": "function_call", "value": "f(x)"}]},
     r"'conversations\[2\].value': found 'f\(x\)' .*a non-empty list of tool calls"),
    (chat(USER, ASSISTANT | {"weight": 0.5}), r"'messages\[1\].weight': found 0.5 .*0 or 1"),
    (chat(USER, ASSISTANT | {"train": "no"}), r"'messages\[1\].train': found 'no'"),
    *((chat(USER, ASSISTANT | {key: value}), rf"'messages\[1\].{key}': found .*0 or 1")
      for key, value in (("loss_scale", 0.5), ("loss_mask", [0, 1]), ("mask", True),
                         ("mask", False), ("trainable", "yes"))),
    (chat(USER, ASSISTANT | {"train_detail": [{"begin_offset": 0, "train": False}]}),
     r"'messages\[1\].train_detail': found .*train, true or false for the whole message"),
    *((chat(USER, ASSISTANT | {key: value}), rf"'messages\[1\].{key}': found .*a known name")
      for key, value in (("masked", True), ("ignore_loss", True), ("is_trainable", False),
                         ("loss_weights", [0.5]), ("token_mask", [0, 1]), ("mask_ratio", 0.5))),
    *((chat(*CHAT, **{key: value}), rf"field '{key}': found .*allowed: ")
      for key, value in (("loss_scale", 0.5), ("weight", 0.5), ("mask", True),
                         ("train_detail", [{"train": False}]), ("loss_mask", [0, 1]),
                         ("assistant_masks", [0, 1]), ("label", 0), ("label", 1),
                         ("label", -1), ("is_correct", False), ("rejected", True),
                         ("kto_tag", 0), ("history", [["a", "b"]]), ("document", "A story"),
                         ("choices", ["A", "B"]), ("options", '["x", "y"]'),
                         ("context", {"text": "A story"}), ("chosen", "Other"),
                         ("chosen", [USER, USER]), ("chosen", [SYSTEM, *CHAT]),
                         ("chosen", True))),
    (chat({"role": "system", "content": ""}, chosen=[USER, ASSISTANT]), r"'chosen': found"),
    *(({"question": "Hi", "answer": "Hello", key: value}, rf"field '{key}': found .*allowed: ")
      for key, value in (("choices", [1, 2]), ("A", "x"), ("choice_B", "x"), ("opa", "x"),
                         ("endings", ["x"]), ("context", ["A story"]), ("input", "A story"),
                         ("retrieved_contexts", ["x"]), ("knowledge", "x"), ("ctxs", ["x"]),
                         ("schema", "CREATE TABLE t (id int)"),
                         ("documents", ["A story"]), ("history", "A story"))),
    ({"instruction": "Answer", "question": "Why?", "output": "Hello"}, r"'question': found"),
    ({"turns": ["Hi"], "context": "A story"}, r"'context': found 'A story'"),
    *(({"text": "Sort a list.", key: value},
       rf"'{key}': found .*'data.columns=\{{prompt: text, response: {key}\}}', or set data\.f")
      for key, value in (("code", "sorted(x)"), ("answer", "x"), ("output", ["x"]),
                         ("role", "prompter"))),
    ({"text": "Hi", "train": False}, r"'text': found a text that is not learnt"),
    ({"input_ids": [1, 2], "loss_mask": [1, 1], "labels": [-100, 2]},
     r"'labels': found another mask than in 'loss_mask'"),
    (chat(USER, ASSISTANT | {"token_ids": [1, -2]}),
     r"'messages\[1\].token_ids\[1\]': found -2"),
    (chat(*CHAT, tools=[{"type": "function", "function": {}}]), r"'tools\[0\]': .*a 'name'"),
    (chat(*CHAT, tools="search"), r"'tools': found 'search' \(str\)"),
    (chat(*CHAT, chat_template_kwargs=[1]), r"'chat_template_kwargs': found \[1\]"),
    ({"instruction": "x", "history": ["Hi"]}, r"'history\[0\]': found 'Hi' .*a pair of"),
    ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello"}, r"'chosen': .*with a 'prompt' beside"),
    ({"prompt": [SYSTEM, USER], "chosen": CHAT}, r"'prompt': found .*what 'chosen' begins"),
    ({"prompt": "Hi", "chosen": []}, r"'chosen': found \[\] \(list\); allowed: a non-empty"),
    ({"prompt": "Bye", "chosen": CHAT}, r"'prompt': found 'Bye' .*what 'chosen' begins with"),
    *(({key: "<s>[INST] Hi [/INST]", "response": "Yes"}, rf"'{key}': found a rendered prompt "
       r"\(it begins with '<s>\[INST\]'\); allowed: messages or a bare question, to render$")
      for key in ("prompt", "question")),
    *(({key: "USER: Hi ASSISTANT:", "output": "Yes"}, rf"'{key}': .* ends with 'ASSISTANT:'")
      for key in ("instruction", "prompt", "question")),
    (chat({"role": "user", "content": "<|im_start|>user\nHi<|im_end|>"}, ASSISTANT),
     r"'messages, message 0': found text that begins with '<\|im_start\|>'; allowed: text al"),
    *((row, rf"'{key}, message 1': found text that ends with '{re.escape(end)}'")
      for end in ("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>",
                  "<\uff5cend\u2581of\u2581sentence\uff5c>")
      for key, row in (("messages", chat(*assistant(content=f"Hello{end}\n"))),
                       ("prompt", {"prompt": "Hi", "response": f"Hello{end}"}))),
    ({"input_ids": [1, 2]}, r"'input_ids': found ids without a loss mask; allowed: one of the "
                            r"fields loss_mask, assistant_masks, completion_mask, labels"),
    ({"input_ids": [1, 2], "loss_mask": [1]},
     r"'loss_mask': found 1 values; allowed: one for each of 2 input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, r"'loss_mask\[1\]': found 2 .*0 or 1"),
    # Labels that are shifted, so that each would be learnt one place off.
    ({"input_ids": [1, 2], "labels": [2, 3]}, r"'labels\[0\]': found 2 .*allowed: -100 or 1"),
    ({"input_ids": [1, True], "labels": [1, 1]}, r"'input_ids\[1\]': found True"),
    ({"input_ids": [1, 2**31], "labels": [1, 1]}, r"'input_ids\[1\]': found 2147483648"),
    *(({"text": text}, r"'text': found a whole dialogue \(turn marker '.*=text to learn")
      for text in ("<|im_start|>user\nHi", "<|start_header_id|>user", "<start_of_turn>user",
                   "<s>[INST] Hi [/INST] Yes", "### Human: Hi\n### Assistant: Yes",
                   "\n\nHuman: Hi\n\nAssistant: Yes", "Human: Hi\nAssistant: Yes",
                   "USER: Hi ASSISTANT: Yes")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), UNREADABLE)
def test_what_cannot_be_read_is_refused_by_name(row, message):
    with pytest.raises(MalformedRowError, match=message):
        read(row)


def test_what_is_allowed_is_said_whole() -> None:
    """Of all rows above, but for advice with names of columns, which the schemas below show."""
    said = set()
    for row, _ in UNREADABLE:
        with pytest.raises(MalformedRowError) as refused:
            read(row)
        said.add(refused.value.allowed)
    advice = ("a text that the messages hold too; ", "plain text without it; map it")
    assert {each for each in said if not each.startswith(advice)} == {
        "-100 or 1", "0 or 1", "0 or 1 (learnt)", "0 or 1, false or true",
        "False, or label: false, with which the answer is not learnt",
        "True, or label: false, with which the answer is not learnt", "a function with a 'name'",
        "a list beside input_ids",
        "a mask of a known name: train, true or false for the whole message",
        "a non-empty list of function schemas", "a non-empty list of objects",
        "a non-empty list of pairs", "a non-empty list of strings",
        "a non-empty list of tool calls", "a non-empty string",
        "a pair of the user's text and the answer", "a row to learn", "a string",
        "a string or a list of messages", "a token id", "after it", "an object",
        "an object with 'role' and 'content'", "an object with 'type' and 'text'",
        "an object with a 'name'", "an object, or one written as JSON", "at least one user message",
        "false (a bad answer) or true; a number may be a class: name it otherwise", "function",
        "messages or a bare question, to render",
        "messages, whose answers are learnt; or data.form=text to learn the whole text",
        "one for each of 2 input_ids",
        "one of the fields loss_mask, assistant_masks, completion_mask, labels beside",
        "one of them", "one per message", "parts of type 'text'",
        "system, user, assistant, tool, developer, human, gpt, chatgpt, bing, bard, model, "
        "ai, bot, function, observation, tool_response, function_call, tool_call",
        "text alone, without this field",
        "text alone; the target's template puts its own tokens around the text",
        "the answer to the last question of the messages", "the assistant's", "the same mask",
        "valid Unicode", "what 'chosen' begins with",
        "with a 'prompt' beside, or a list of messages",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "row", "indices"),
    [
        ({"finish_reason": "length"}, {}, {1}),
        ({}, {"stop_reason": "max_tokens"}, {1}),
        ({"finish_reason": "stop", "stop_reason": None}, {"finish_reason": "end_turn"}, set()),
    ],
)
def test_answers_that_a_server_cut_off(message, row, indices):
    record = read({"messages": [USER, ASSISTANT | message]} | row)
    assert (record.truncated_messages, record.unread_fields) == (indices, ())


def test_a_text_is_learnt_whole_where_that_is_said():
    for row in ({"text": "<|im_start|>user\nHi"}, {"text": "Sort a list.", "code": "sorted(x)"}):
        assert read(row, Form.text).text == row["text"]


def test_a_chosen_answer_takes_the_place_and_the_mask_of_another():
    """What is said of the answer that is not chosen goes with it."""
    other = ASSISTANT | {"content": "No", "train": False, "token_ids": [5]}
    record = read(chat(USER, other, chosen=CHAT))
    assert (record.messages, record.unlearnt_messages, record.written_ids) == (
        CHAT,
        frozenset(),
        {},
    )
    record = read(chat(USER, chosen=ASSISTANT | {"train": False}))
    assert (record.messages, record.unlearnt_messages) == (CHAT, frozenset({1}))


@pytest.mark.parametrize(
    ("row", "columns", "messages"),
    [
        ({"my_chat": CHAT}, {"messages": "my_chat"}, CHAT),
        ({"ask": "Hi", "reply": "Hello", "persona": "Be kind"},
         {"prompt": "ask", "response": "reply", "system": "persona"}, [SYSTEM, *CHAT]),
        # What is named comes before what is recognised.
        ({"messages": [USER], "ask": "Hi", "reply": "Hello", "output": "x"},
         {"prompt": "ask", "response": "reply"}, CHAT),
        ({"prompt": "summary", "dialogue": "Hi", "response": "Hello"},
         {"prompt": "dialogue"}, CHAT),
        ({"messages": CHAT, "persona": "Be kind"}, {"system": "persona"}, [SYSTEM, *CHAT]),
        ({"messages": CHAT, "context": "A story"}, {"unread": "context"}, CHAT),
    ],
)  # fmt: skip
def test_columns_of_other_names(row, columns, messages):
    record = read(row, **DataConfig(columns=columns).columns)
    assert (record.messages, record.row) == (messages, row)


def test_a_field_hidden_by_a_column_is_named():
    row = {"prompt": "summary", "dialogue": "Hi", "response": "Hello"}
    assert read(row, prompt="dialogue").unread_fields == ("prompt",)


def test_an_error_has_the_name_that_the_data_have():
    with pytest.raises(MalformedRowError, match=r"field 'my_chat\[1\].content': found 3 \(int\)"):
        read({"my_chat": assistant(content=3)}, messages="my_chat")
    with pytest.raises(MalformedRowError, match=r"field 'reply': found 3 \(int\)"):
        read({"prompt": "Hi", "reply": 3}, response="reply")


def test_a_column_that_no_row_has():
    with pytest.raises(InputError, match=r"data.columns=\{prompt: asks\}: none of .* has 'asks'"):
        read({"ask": "Hi"}, prompt="asks")


def test_every_column_is_read_by_some_form():
    known = {name for keys, _ in FORMS.values() for name in keys}
    known |= {*TOOLS, *SYSTEM_TEXTS, *TEMPLATE_KWARGS, *PROMPTS, *REPLIES, *MASKS}
    known |= {"category", "reasoning_content", "history", "labels", "unread"}
    assert set(COLUMNS) <= known
    assert [*FORMS] == list(Form)[1:]


def test_the_page_names_every_field():
    page = (Path(__file__).parents[3] / "data/README.md").read_text()
    names = {name for form, (keys, _) in FORMS.items() for name in (form.value, *keys)}
    names |= {
        *TOOLS,
        *SYSTEM_TEXTS,
        *TEMPLATE_KWARGS,
        TRUNCATED_TURNS,
        *REASONING,
        *REPLIES,
        *MASKS,
        *LEARNT,
        *GOOD,
        *CONTEXTS,
    }
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_rows_of_other_forms_are_refused_where_the_form_was_detected():
    line = Row("rows.jsonl:7", raw=b'{"prompt": "Hi"}')
    with pytest.raises(InputError, match=r"rows.jsonl:7: a row of form prompt .*of form messages"):
        parse_record(line, Form.messages, detected=True)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"[" * 100_000, r"found JSON with too deep nesting; allowed: one JSON object"),
        (b'{"text": ' + b"9" * 5000 + b"}", r"found JSON with too long a number"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", r"'messages\[0\]': found "),
    ],
)
def test_lines_that_no_parser_takes(raw, problem):
    with pytest.raises(MalformedRowError, match=problem):
        parse_record(Row("rows.jsonl:1", raw=raw), Form.messages)


def test_arguments_that_json_cannot_hold():
    row = chat(*assistant(tool_calls=[{"name": "f", "arguments": {"a": b"x"}}]))
    with pytest.raises(
        MalformedRowError, match=r"tool_calls\[0\]': found a value that JSON cannot hold"
    ):
        parse_record(Row("rows.parquet[row 1]", value=row), Form.messages)


def test_a_value_too_deep_to_be_shown():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert format_found_value(deep) == "deeply nested (list)"


def test_an_error_goes_from_one_process_to_another():
    error = MalformedRowError("text", "3 (int)", "a string")
    assert str(copy.copy(error)) == str(error)  # copied by the same protocol
    assert str(error) == "field 'text': found 3 (int); allowed: a string"


# --- Rows of popular datasets, toolkits and benchmarks, and what is read of them.
#
# They lie in `schemas.jsonl`. A reading is the texts of a row's messages in order; learnt texts
# stand in [[ ]]. A row is read so, or refused by the name of a field, or of no known form. Rows of
# benchmarks have a category besides.


LINES = (Path(__file__).parent / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
SCHEMAS: dict[str, dict[str, Any]] = {each["name"]: each for each in map(json.loads, LINES)}
BENCHMARKS = [name for name, schema in SCHEMAS.items() if "category" in schema]


def format_reading(record: Record) -> str:
    """Format the texts of a record's messages, with the learnt ones in [[ ]]."""
    messages = record.messages or [{"role": "assistant", "content": f"[{record.text}]"}]
    return " | ".join(
        f"[[{message['content']}]]"
        if message["role"] == "assistant" and i not in record.unlearnt_messages
        else message["content"]
        for i, message in enumerate(messages)
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_row_of_every_schema_is_read_or_refused_by_name(name: str) -> None:
    schema = SCHEMAS[name]
    line = Row("rows.jsonl:1", raw=json.dumps(schema["row"]).encode())
    try:
        record = parse_record(line, detect_form([line], "rows.jsonl"), detected=True)
        reading = format_reading(record)
        assert record.category == schema.get("category", record.category)
    except MalformedRowError as error:
        reading = f"refused: {error}"
    except InputError:
        reading = "a row of no known form"
    assert reading == schema["reading"]


WRONG = (None, 3, 0.5, True, "", " ", [], {}, [None], [3], [[]], {"a": 1}, "\ud800")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "rows.jsonl"


@settings(max_examples=90)
@given(st.sampled_from(BENCHMARKS), st.sampled_from(["field", "cut", "byte"]), st.randoms())
def test_a_damaged_file_is_refused_by_name_or_read(
    file: Path, name: str, damage: str, rng: random.Random
) -> None:
    """A field of another type, a file that ends early, or one byte that is another."""
    row = SCHEMAS[name]["row"]
    content = 2 * (json.dumps(row) + "\n").encode()
    place = rng.randrange(len(content))
    if damage == "field":
        content = json.dumps(row | {rng.choice([*row]): rng.choice(WRONG)}).encode()
    elif damage == "cut":
        content = content[:place]
    else:
        content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    file.write_bytes(content)
    try:
        records = load_records(str(file)).records
    except InputError as error:
        assert str(file) in str(error)
    else:
        assert all(record.messages or record.text for record in records)
