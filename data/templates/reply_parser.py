"""Parser of a model's text into a message: thinking, text and tool calls.

Notations differ by model (`<think>`, `[THINK]`, channels). A model's notation is found by rendering
known messages with the target's chat template, and is then searched in the reply. A parsed reply is
rendered again and must give the model's text; otherwise the reply stays one text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from conf.errors import InputError
from data.rows.field_checks import remove_white_space
from data.rows.messages import Messages
from data.templates.chat_template import (
    ANSWER,
    PROBE_TOOLS,
    THOUGHT,
    ChatTemplate,
    Tools,
    build_probe_messages,
)
from data.templates.turns import THINKING_TAGS, Turn, find_turn


@dataclass(frozen=True)
class Notation:
    """Texts that a template puts around the parts of a turn.

    Attributes:
        text: text before an answer without thinking.
        thinking: pairs of texts before thinking, and between thinking and answer or call. There
            are several variants.
        closing: text after an answer.
        call: texts before a tool's name, between name and JSON arguments, and after the arguments;
            None if the template does not render calls in JSON.
        call_tags: texts before a tool's name and after its arguments, in any notation, without
            JSON's signs; None if the template renders no calls.
    """

    text: str
    thinking: tuple[tuple[str, str], ...]
    closing: str
    call: tuple[str, str, str] | None
    call_tags: tuple[str, str] | None


def parse_reply(
    written: str, before: Messages, template: ChatTemplate, tools: Tools = None
) -> dict:
    """Parse the model's text into the message that the template renders to it.

    Args:
        written: decoded tokens of the model with special tokens, up to the stop token.
        before: conversation before the reply.
        template: the target's template.
        tools: function schemas that the prompt showed.

    Returns:
        Message with `role`, `content` and, if present, `reasoning_content` and `tool_calls`.
    """
    notation = _detect_notation(template, with_tools=tools is not None)
    body = _cut_turn_end(written, notation.closing, template)
    for message in _iter_parses(body, notation):
        try:
            turn = find_turn([*before, message], template, tools)
        except InputError:
            continue
        rendered = remove_white_space(_cut_turn_end(turn.written, notation.closing, template))
        # Thinking that the template never renders (DeepSeek-R1) cannot be compared; the rest must.
        same = str.endswith if turn.unrendered_parts else str.__eq__
        if same(remove_white_space(body), rendered):
            return message
    return {"role": "assistant", "content": body.strip()}


def thinking_tags(template: ChatTemplate, tools: Tools = None) -> tuple[tuple[str, str], ...]:
    """List pairs of tags before and after thinking, the template's own first."""
    thinking = _detect_notation(template, with_tools=tools is not None).thinking
    pairs = ((before.strip(), between.strip()) for before, between in thinking)
    return tuple((before, between) for before, between in pairs if before and between)


def call_tags(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the texts before a tool's name and after its arguments, either of which may be empty.

    Returns None if the template renders no calls.
    """
    return _detect_notation(template, with_tools=True).call_tags


def _cut_turn_end(written: str, closing: str, template: ChatTemplate) -> str:
    """Remove the end of the turn from a reply, whether of a text or of a call."""
    if closing and written.endswith(closing):
        return written.removesuffix(closing)
    return re.sub(rf"({template.stop_pattern})$", "", written)


def _iter_parses(body: str, notation: Notation) -> Iterator[dict]:
    """Yield the message of a reply in every notation that the template knows, likeliest first."""
    divided = []
    for before, between in notation.thinking:
        # If the prompt opens the thinking, the reply begins inside the thinking.
        opened = body.lstrip().removeprefix(before.strip())
        thought, tag, rest = opened.partition(between.strip() or "\0")
        if tag:
            divided.append((thought.strip(), rest))
    for thought, rest in (*divided, ("", body.strip().removeprefix(notation.text.strip()))):
        reasoning = {"reasoning_content": thought} if thought else {}
        content, calls = _split_calls(rest, notation)
        if calls:
            yield {"role": "assistant", "content": content, **reasoning, "tool_calls": calls}
        yield {"role": "assistant", "content": rest.strip(), **reasoning}


def _split_calls(text: str, notation: Notation) -> tuple[str, list[dict]]:
    """Split a text into the part before the first call, and the calls."""
    if notation.call is None:
        return text, []
    before, between, after = (around.strip() for around in notation.call)
    pattern = re.compile(rf"{re.escape(before)}\s*([\w.-]+)\s*{re.escape(between)}\s*")
    calls: list[dict] = []
    content, end = "", 0
    while call := pattern.search(text, end):
        content = content if calls else text[: call.start()]
        try:
            arguments, end = json.JSONDecoder().raw_decode(text, call.end())
        except ValueError:
            return text, []
        if not isinstance(arguments, dict):
            return text, []
        end += len(text[end:]) - len(text[end:].lstrip().removeprefix(after))
        function = {"name": call.group(1), "arguments": arguments}
        calls.append({"type": "function", "id": f"call{len(calls):05}", "function": function})
    return content.strip(), calls


@lru_cache(maxsize=8)
def _detect_notation(template: ChatTemplate, *, with_tools: bool) -> Notation:
    tools = PROBE_TOOLS if with_tools else None
    question, answer, _ = build_probe_messages(calls=False)
    text = _find_probe_turn([question, answer], template, tools)
    called_answer = build_probe_messages(calls=True)[1]
    thinks = {"reasoning_content": THOUGHT}
    thought = _find_probe_turn([question, answer | thinks], template, tools)
    called = _find_probe_turn([question, called_answer], template, tools)
    thought_called = _find_probe_turn([question, called_answer | thinks], template, tools)
    lead, _, closing = text.written.partition(ANSWER) if text else ("", "", "")
    call = _find_call_texts(called.written, closing, template) if called else None
    thinking = list(THINKING_TAGS.items())
    for turn, follows in ((thought_called, call[0] if call else ""), (thought, ANSWER)):
        before, thought_text, rest = turn.written.partition(THOUGHT) if turn else ("", "", "")
        if thought_text and follows and follows in rest:
            thinking.insert(0, (before, rest.partition(follows)[0]))
    tags = _find_call_tags(called.written, template) if called else None
    return Notation(lead, tuple(thinking), closing, call, tags)


def _find_call_texts(
    written: str, closing: str, template: ChatTemplate
) -> tuple[str, str, str] | None:
    """Find the texts around a call of `look` (`Notation.call`); None if arguments are not JSON."""
    arguments = re.search(rf'{{\s*"at":\s*"{ANSWER}"\s*}}', written)
    if arguments is None:
        return None
    before, _, between = written[: arguments.start()].rpartition("look")
    return before, between, _cut_turn_end(written[arguments.end() :], closing, template)


def _find_call_tags(written: str, template: ChatTemplate) -> tuple[str, str] | None:
    """Find the texts around a call of `look` (`Notation.call_tags`); None if there is no call."""
    before, name, rest = written.partition("look")
    if not name or ANSWER not in rest:
        return None
    after = re.sub(rf"({template.stop_pattern})\s*$", "", rest.rpartition(ANSWER)[2])
    return before.partition("{")[0].strip(), re.sub(r'^["}\]\s]+', "", after).strip()


def _find_probe_turn(messages: Messages, template: ChatTemplate, tools: Tools) -> Turn | None:
    try:
        return find_turn(messages, template, tools)
    except InputError:
        return None
