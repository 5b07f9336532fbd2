"""The learnt text of 18 conversations by every family of chat templates, in literal strings.

Expectations follow from a conversation and its family's notation (`templates.Family`), never from
the code under test; a cell is right, or refused for the family's own reason.
"""

from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from templates import FAMILIES, VERBATIM, Family
from tokenizers import AddedToken

from conf.errors import InputError
from data.rows.records import Record
from data.templates.record_encoder import RecordEncoder, Sample
from tests.data.templates.test_record_encoder import make_tokenizer

PROPERTIES = {"at": {"type": "string", "description": "town"}}
LOOK = {
    "type": "function",
    "function": {
        "name": "look", "description": "looks",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["at"]},
    },
}  # fmt: skip
NOT_RENDERED = "does not render tool calls"


class Says(NamedTuple):
    """An assistant's turn."""

    text: str
    thought: str = ""
    inline: bool = False
    """Its thinking stands in its content."""
    calls: bool = False


SINGLE = ["Hi", Says("Hello there")]
SEVERAL = ["Hi", Says("Hello there"), "And you?", Says("I am fine."), "Good", Says("Yes")]
THINKS = Says("I am fine.", "Am I?\nFine, yes.")
CALLS = Says("", calls=True)
CONVERSATIONS: dict[str, list[str | Says]] = {
    "single": SINGLE,
    "several": SEVERAL,
    "system": ["system: Be kind", *SINGLE],
    "system several": ["system: Be kind", *SEVERAL],
    "thinking": ["Hi", THINKS],
    "thinking several": ["Hi", THINKS, "And you?", Says("Yes", "Hm.")],
    "thinking first": ["Hi", THINKS, "And you?", Says("Yes")],
    "thinking last": ["Hi", Says("Yes"), "And you?", THINKS],
    "inline": ["Hi", Says("Hello there", "Hm.", inline=True)],
    "padded": ["Hi", Says("  padded  "), "And?", Says(" Yes ")],
    "newlines": ["Hi", Says("\nHello\n"), "And?", Says("\n\nYes\n\n")],
    "emoji": ["Hi", Says("👩‍👩‍👧‍👦 naïve 🙂🙂"), "👋🏽", Says("🏳️‍🌈")],
    "echo": ["Hello there", Says("Hello there"), "Yes", Says("Yes")],
    "equal": ["Hi", Says("Yes"), "So?", Says("Yes")],
    "blank lines": ["Hi", Says("I am fine.\n\nYes, no."), "So?", Says("a\n\n\nb")],
    "roles": ["user", Says("assistant"), "model", Says("user"), "system", Says("model")],
    "call": ["Where?", CALLS, "tool: Sunny", Says("It is sunny.")],
    "call thinking": ["Where?", CALLS._replace(thought="Hm."), "tool: Sunny", Says("Sun.", "Ah.")],
}


def record(said: list[str | Says]) -> Record:
    messages: list[dict[str, Any]] = []
    for each in said:
        if isinstance(each, Says):
            messages.append(assistant(each))
        elif each.startswith("tool: "):
            named = {"name": "look", "tool_call_id": "callnine1"}
            messages.append({"role": "tool", "content": each.removeprefix("tool: "), **named})
        else:
            role, _, text = each.rpartition(": ")
            messages.append({"role": role or "user", "content": text})
    tools = [LOOK] if any(message.get("tool_calls") for message in messages) else None
    return Record(messages, None, "chats.jsonl:7", tools=tools)


def assistant(turn: Says) -> dict[str, Any]:
    inline = VERBATIM.replace("{}", turn.thought) if turn.inline else ""
    message: dict[str, Any] = {"role": "assistant", "content": inline + turn.text}
    if turn.thought and not turn.inline:
        message["reasoning_content"] = turn.thought
    if turn.calls:
        function = {"name": "look", "arguments": {"at": "Oslo"}}
        message["tool_calls"] = [{"id": "callnine1", "type": "function", "function": function}]
    return message


@cache
def encoder(family: str) -> RecordEncoder:
    notes = FAMILIES[family]
    tokenizer = make_tokenizer(None, special=[notes.bos, notes.eos])
    named = [AddedToken(each, rstrip=notes.strips_right) for each in notes.special.split()]
    tokenizer.add_tokens(named, special_tokens=True)
    tokenizer.add_tokens(notes.added.split())
    tokenizer.chat_template = notes.template
    return RecordEncoder(tokenizer, notes.kwargs)


def thinking(notes: Family, turn: Says) -> str:
    """The family's notation of the thinking of a turn; empty where there is none."""
    shown = notes.inline if turn.inline else notes.think
    if turn.calls and notes.call_think is not None:
        shown = notes.call_think
    return shown if turn.thought else ""


def written(notes: Family, turn: Says) -> str:
    """The text that the model writes in a turn, from the family's notation alone."""
    shown = thinking(notes, turn).replace("{}", turn.thought)
    close = notes.close
    if turn.calls:
        close = close if notes.call_close is None else notes.call_close
        return shown + notes.call_lead + notes.call + close
    if turn.inline:
        return notes.lead + shown + notes.says(turn.text) + close
    return shown + notes.lead + notes.says(turn.text) + close


def turns_of(samples: list[Sample], family: str) -> list[tuple[str, str]]:
    """The text before each learnt run, and the run, decoded."""
    tokenizer, turns = encoder(family).tokenizer, []
    for sample in samples:
        place = 0
        for learnt, run in groupby(sample.loss_mask):
            end = place + len(list(run))
            if learnt:
                before, ids = sample.input_ids[:place], sample.input_ids[place:end]
                turns.append((tokenizer.decode(before), tokenizer.decode(ids)))
            place = end
    return turns


def reason(notes: Family, said: Record) -> str:
    """Why the family refuses a conversation; empty if it does not."""
    for message in said.messages:
        if message["role"] == "system" and "system" in notes.refuses:
            return notes.refuses["system"]
        if message.get("tool_calls") and not notes.call:
            return notes.refuses.get("calls", NOT_RENDERED)
        thinks = message.get("reasoning_content") or "</think>" in message["content"]
        if thinks and "thinking" in notes.refuses:
            return notes.refuses["thinking"]
        if thinks and message.get("tool_calls") and "calls behind thinking" in notes.refuses:
            return notes.refuses["calls behind thinking"]
    return ""


def cells(*, refused: bool) -> pytest.MarkDecorator:
    """Every family with every conversation that it renders, or refuses."""
    found = [
        (family, name)
        for family, notes in FAMILIES.items()
        for name, said in CONVERSATIONS.items()
        if bool(reason(notes, record(said))) == refused
    ]
    return pytest.mark.parametrize(("family", "name"), found, ids=map(": ".join, found))


@cells(refused=True)
def test_what_a_family_refuses_is_refused_for_its_reason(family: str, name: str) -> None:
    said = record(CONVERSATIONS[name])
    with pytest.raises(InputError) as caught:
        encoder(family).encode_record(said)
    words = f"chats.jsonl:7: the target's chat template {reason(FAMILIES[family], said)}"
    assert str(caught.value).startswith(words)


@cells(refused=False)
def test_exactly_what_the_model_would_write_is_learnt(family: str, name: str) -> None:
    notes, said = FAMILIES[family], record(CONVERSATIONS[name])
    samples = encoder(family).encode_record(said)
    answers = [turn for turn in CONVERSATIONS[name] if isinstance(turn, Says)]
    assert [learnt for _, learnt in turns_of(samples, family)] == [
        written(notes, turn) for turn in answers
    ]
    lost = [t for t in answers if t.thought and "{}" not in thinking(notes, t)]
    assert samples[0].unrendered_parts == ("thinking",) * len(lost)
    assert not any(sample.unrendered_parts for sample in samples[1:])


@cells(refused=False)
def test_what_stands_before_is_the_generation_prompt(family: str, name: str) -> None:
    notes, said = FAMILIES[family], record(CONVERSATIONS[name])
    found = turns_of(encoder(family).encode_record(said), family)
    template, tokenizer = encoder(family).build_template({}, said.tools), encoder(family).tokenizer
    indices = [i for i, m in enumerate(said.messages) if m["role"] == "assistant"]
    answers = [turn for turn in CONVERSATIONS[name] if isinstance(turn, Says)]
    for index, turn, (before, _) in zip(indices, answers, found, strict=True):
        prompt = template.render_prompt(said.messages[:index], said.tools)
        if "{}" not in thinking(notes, turn):
            call_blank = notes.blank if notes.call_blank is None else notes.call_blank
            blank = call_blank if turn.calls else notes.blank
            prompt = prompt.removesuffix(notes.opens) + blank * prompt.endswith(notes.opens)
        # Tokens may swallow a line break, which the prompt then loses as well.
        assert before == tokenizer.decode(tokenizer(prompt, add_special_tokens=False)["input_ids"])
