"""What a model wrote, as a message: thinking, text and calls of tools apart.

Forms differ by model (`<think>`, `[THINK]`, channels), so they are read off the target's own chat
template: messages of known text are rendered, and what stands around the text is looked for in the
reply. A reply taken apart is rendered again and must give what the model wrote; one that does not
stays whole, as text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from conf.errors import InputError
from data.rows.messages import Messages
from data.templates.template import ANSWER, PROBE_TOOLS, THOUGHT, ChatTemplate, Tools, probe
from data.templates.turns import THINKING_TAGS, Turn, find_turn, squash


@dataclass(frozen=True)
class Shapes:
    """What a template puts around the parts of a turn; None where it does not render a part."""

    text: str
    """Before a text without thinking."""
    thinking: tuple[tuple[str, str], ...]
    """Before thinking, and between it and a text, or a call."""
    closing: str
    """Behind a text."""
    call: tuple[str, str, str] | None
    """Before a tool's name, between it and its arguments in JSON, and behind them."""


def parse_reply(
    written: str, before: Messages, template: ChatTemplate, tools: Tools = None
) -> dict:
    """Returns the assistant's message of which a template makes what the model wrote.

    Args:
        written: the model's tokens, decoded, special ones included, up to its stop.
        before: the conversation that it answered.
        template: the target's.
        tools: function schemas that the prompt showed.

    Returns:
        `role`, `content`, and `reasoning_content` and `tool_calls` where there are any.
    """
    shapes = _shapes(template, with_tools=tools is not None)
    body = _open(written, shapes.closing, template)
    for message in _readings(body, shapes):
        if _gives(message, body, before, template, tools, shapes.closing):
            return message
    return {"role": "assistant", "content": body.strip()}


def thinking_tags(template: ChatTemplate, tools: Tools = None) -> tuple[tuple[str, str], ...]:
    """Returns what stands before thinking and what ends it, the template's own ways first."""
    found = _shapes(template, with_tools=tools is not None).thinking
    pairs = ((before.strip(), between.strip()) for before, between in found)
    return tuple((before, between) for before, between in pairs if before and between)


def _open(written: str, closing: str, template: ChatTemplate) -> str:
    """Takes the end of its turn off a reply, be it that of a text or of a call."""
    if closing and written.endswith(closing):
        return written.removesuffix(closing)
    return re.sub(rf"({template.stop_pattern})$", "", written)


def _readings(body: str, shapes: Shapes) -> Iterator[dict]:
    """Takes a reply apart in every way that its template knows, the likeliest first."""
    text = body.strip().removeprefix(shapes.text.strip())
    for reasoning, rest in (*_think(body, shapes), ("", text)):
        content, calls = _call(rest, shapes)
        if calls:
            yield _message(reasoning, content, calls)
        yield _message(reasoning, rest.strip(), [])


def _think(body: str, shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Divides thinking from what comes after it, in every way that finds both."""
    for around in shapes.thinking:
        before, between = (each.strip() for each in around)
        # Where the prompt opens the thinking, a reply begins inside it.
        thought, found, rest = body.lstrip().removeprefix(before).partition(between or "\0")
        if found:
            yield thought.strip(), rest


def _call(text: str, shapes: Shapes) -> tuple[str, list[dict]]:
    """Returns the text before the first call, and the calls."""
    if shapes.call is None:
        return text, []
    before, between, after = (each.strip() for each in shapes.call)
    pattern = re.compile(rf"{re.escape(before)}\s*([\w.-]+)\s*{re.escape(between)}\s*")
    calls: list[dict] = []
    content, at = "", 0
    while found := pattern.search(text, at):
        content = content if calls else text[: found.start()]
        try:
            arguments, at = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            return text, []
        if not isinstance(arguments, dict):
            return text, []
        at += len(text[at:]) - len(text[at:].lstrip().removeprefix(after))
        function = {"name": found.group(1), "arguments": arguments}
        calls.append({"type": "function", "id": f"call{len(calls):05}", "function": function})
    return content.strip(), calls


def _message(reasoning: str, content: str, calls: list[dict]) -> dict:
    message: dict = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _gives(
    message: dict,
    body: str,
    before: Messages,
    template: ChatTemplate,
    tools: Tools,
    closing: str,
) -> bool:
    """Tells whether a template makes of a message what the model wrote, white space apart.

    Thinking that it never renders (DeepSeek-R1) cannot tell; the rest must.
    """
    try:
        turn = find_turn([*before, message], template, tools)
    except InputError:
        return False
    rendered = squash(_open(turn.written, closing, template))
    return squash(body).endswith(rendered) if turn.left_out else squash(body) == rendered


@lru_cache(maxsize=8)
def _shapes(template: ChatTemplate, *, with_tools: bool) -> Shapes:
    tools = PROBE_TOOLS if with_tools else None
    question, answer, _ = probe(calls=False)
    text = _probed([question, answer], template, tools)
    called_answer = probe(calls=True)[1]
    thought = _probed([question, _thinks(answer)], template, tools)
    called = _probed([question, called_answer], template, tools)
    thought_called = _probed([question, _thinks(called_answer)], template, tools)
    lead, _, closing = text.written.partition(ANSWER) if text else ("", "", "")
    call = _call_shape(called.written, closing, template) if called else None
    thinking = list(THINKING_TAGS.items())
    for turn, ends in ((thought_called, call[0] if call else ""), (thought, ANSWER)):
        before, found, rest = turn.written.partition(THOUGHT) if turn else ("", "", "")
        if found and ends and ends in rest:
            thinking.insert(0, (before, rest.partition(ends)[0]))
    return Shapes(lead, tuple(thinking), closing, call)


def _call_shape(written: str, closing: str, template: ChatTemplate) -> tuple[str, str, str] | None:
    """Finds a call of `look` in what a model wrote; None if its arguments are not JSON."""
    arguments = re.search(rf'{{\s*"at":\s*"{ANSWER}"\s*}}', written)
    if arguments is None:
        return None
    before, _, between = written[: arguments.start()].rpartition("look")
    return before, between, _open(written[arguments.end() :], closing, template)


def _thinks(message: dict) -> dict:
    return message | {"reasoning_content": THOUGHT}


def _probed(messages: Messages, template: ChatTemplate, tools: Tools) -> Turn | None:
    try:
        return find_turn(messages, template, tools)
    except InputError:
        return None
