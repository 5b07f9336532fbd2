"""Renders with a target's chat template, and finds how it closes a turn.

Templates differ in what they take (contents as parts, arguments as text) and never say where a
turn ends: they add text behind the last one (a newline, an eos of the whole conversation). Both
are found by rendering messages of known text, once per template.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from conf.errors import InputError
from data.rows.messages import REASONING, Messages, with_text_arguments

Tools = list[dict] | None

ANSWER, QUESTION, THOUGHT = "zqanswerqz", "zqquestionqz", "zqthoughtqz"
CALL_ID = "abcdefghi"  # Mistral wants nine letters
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "looks",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "what"}},
                "required": ["at"],
            },
        },
    }
]
TEMPLATE_FAULTS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """The end of a turn that is the last.

    Attributes:
        closing: text that the model writes there: the end-of-turn token.
        rendered: text that the template renders there: more, less or something else.
    """

    closing: str
    rendered: str


class ChatTemplate:
    """The chat template of a tokenizer, with settings of its own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        *,
        with_tools: bool = False,
    ) -> None:
        """Renders nothing yet.

        Args:
            tokenizer: the target's.
            kwargs: `chat_template_kwargs`, as at serving.
            with_tools: whether conversations show tools, for which some have a template apart.

        Raises:
            InputError: the tokenizer has no chat template, or none of the name wanted.
        """
        if not tokenizer.chat_template:
            raise InputError(
                f"target {_name(tokenizer)} has no chat template, but the data are "
                "conversations: take the chat version of the model, put a chat_template.jinja into "
                "its folder, or give plain text (rows with a 'text' field)"
            )
        self.tokenizer = tokenizer
        self._probe_tools = PROBE_TOOLS if with_tools else None
        named = {**(kwargs or {})}
        self.source = _chosen(tokenizer, named.pop("chat_template", None), self._probe_tools)
        self.variables = {**tokenizer.special_tokens_map, **named}

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Renders a conversation up to where the assistant starts to write.

        Raises:
            InputError: the template refuses it.
        """
        return self._render(messages, tools, self._notation, prompt=True)

    def through(self, messages: Messages, tools: Tools = None) -> str:
        """Renders a whole conversation.

        Raises:
            InputError: the template refuses it.
        """
        return self._render(messages, tools, self._notation, prompt=False)

    def _render(
        self, messages: Messages, tools: Tools, notation: dict[str, bool], *, prompt: bool
    ) -> str:
        try:
            rendered: Any = render_jinja_template(
                conversations=[[self._shown(message, **notation) for message in messages]],
                tools=None if tools is None else [*tools],
                chat_template=self.source,
                add_generation_prompt=prompt,
                **self.variables,
            )
        # A template is somebody's program, and fails as programs do: Hermes' with a TypeError.
        except TEMPLATE_FAULTS as error:
            raise InputError(
                f"the target's chat template refuses the conversation: {error}"
            ) from None
        return str(rendered[0][0])

    def _shown(
        self, message: dict, *, parts: bool, thinking_parts: bool, text_arguments: bool
    ) -> dict:
        """Names and writes the fields of a message as this template reads them."""
        shown = dict(message)
        reasoning = message.get("reasoning_content")
        if reasoning:
            shown |= dict.fromkeys(REASONING, reasoning)
        if message["role"] == "developer" and "developer" not in self.source:
            shown["role"] = "system"
        thinks = bool(reasoning) and thinking_parts
        if parts or thinks:
            shown["content"] = [{"type": "text", "text": message["content"]}]
        if thinks:
            shown["content"].insert(0, {"type": "thinking", "thinking": reasoning})
        if text_arguments:
            shown = with_text_arguments(shown)
        return shown

    @cached_property
    def _notation(self) -> dict[str, bool]:
        """The notation in which this template reads a message.

        Contents may be lists of parts (vision models), thinking a part among them (Mistral),
        arguments of tools JSON text (DeepSeek).
        """
        notation = dict.fromkeys(("parts", "thinking_parts", "text_arguments"), False)
        question, answer, _ = probe(calls=False)
        thought = answer | {"reasoning_content": THOUGHT}
        for name, messages, text in (
            ("parts", [question], QUESTION),
            ("thinking_parts", [question, thought], THOUGHT),
        ):
            other = notation | {name: True}
            if self._shows(text, messages, other) and not self._shows(text, messages, notation):
                notation = other
        calls = probe(calls=True)[:2]
        return notation | {"text_arguments": self._rendered(calls, notation) is None}

    def _rendered(self, messages: Messages, notation: dict[str, bool]) -> str | None:
        try:
            return self._render(messages, self._probe_tools, notation, prompt=False)
        except InputError:
            return None

    def _shows(self, text: str, messages: Messages, notation: dict[str, bool]) -> bool:
        """True if a text is shown, and not in Python's or JSON's notation of its part."""
        rendered = self._rendered(messages, notation) or ""
        return text in rendered and not re.search(rf"""['"]{text}['"]""", rendered)

    @lru_cache(maxsize=2)  # noqa: B019  templates live as long as their run
    def ending(self, calls: bool) -> Ending:
        """The end of a turn that is the last.

        Text that the renderings of a turn share when it is the last one and when it is followed
        is the model's, up to where the next turn opens. gpt-oss closes the last one otherwise than
        the rest; GLM closes none, and is stopped by the token that opens the next.

        Args:
            calls: whether the turn calls tools.

        Raises:
            InputError: the template does not render such turns.
        """
        messages, tools = probe(calls=calls), self._probe_tools
        last, followed = self.through(messages[:2], tools), self.through(messages, tools)
        if ANSWER not in last:
            what = "tool calls" if calls else "an assistant's text"
            raise InputError(f"the target's chat template does not render {what}")
        tail, more = last.rpartition(ANSWER)[2], followed.rpartition(ANSWER)[2]
        shared = self.whole_tokens(shared_start(tail, more), tail)
        shared = shared.partition(self._opening)[0] if self._opening else shared
        shared = shared.rstrip()
        # What stands before the stop is the turn's own: an id, a bracket after an argument.
        at = re.search(rf"({self.stop_pattern})$", shared)
        if at:
            return Ending(at.group(), tail[at.start() :])
        stop = re.compile(rf"\s*({self.stop_pattern})")
        stopped = stop.match(tail, len(shared)) or stop.match(more, len(shared))
        return Ending(stopped.group() if stopped else "", tail[len(shared) :])

    @cached_property
    def lead_space(self) -> str:
        """The white space that the template puts before an answer's text."""
        text = self.through(probe(calls=False)[:2], self._probe_tools)
        lead = text.partition(ANSWER)[0]
        return lead[len(lead.rstrip()) :]

    @cached_property
    def _opening(self) -> str:
        """The special token that opens a turn, if one does."""
        text = self.through(probe(calls=False)[:1], self._probe_tools)
        tokens = (token.group() for token in re.finditer(self.special_pattern, text))
        return next((token for token in tokens if token != self.tokenizer.bos_token), "")

    def whole_tokens(self, common: str, text: str) -> str:
        """Cuts the shared start of two texts back to where no special token is cut in two."""
        for token in re.finditer(self.special_pattern, text):
            if token.start() < len(common) < token.end():
                return common[: token.start()]
        return common

    def last_special(self, text: str) -> str:
        """The special token that a text ends in, or nothing."""
        token = re.search(rf"({self.special_pattern})$", text)
        return token.group() if token else ""

    @cached_property
    def special_pattern(self) -> str:
        """A regular expression of every token that is never split."""
        return _any_of(t.content for t in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def stop_pattern(self) -> str:
        """A regular expression of tokens that may end a turn; not `</think>`, `</tool_call>`."""
        added = self.tokenizer.added_tokens_decoder.values()
        return _any_of(token.content for token in added if token.special)


def shared_start(one: str, other: str) -> str:
    """The characters that two texts begin with."""
    pairs = zip(one, other, strict=False)
    return one[: next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _any_of(contents: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(set(contents), key=len, reverse=True))) or "(?!)"


def _chosen(tokenizer: PreTrainedTokenizerBase, wanted: str | None, tools: Tools) -> str:
    """One of a tokenizer's templates by name, else the usual one; or one that is given itself."""
    if wanted is not None and "{" in wanted:
        return wanted
    given = tokenizer.chat_template
    templates: dict[str, str] = given if isinstance(given, dict) else {"default": str(given)}
    if wanted is None:
        wanted = "tool_use" if tools and "tool_use" in templates else "default"
    if wanted not in templates:
        raise InputError(
            f"target {_name(tokenizer)} has no chat template {wanted!r}; allowed: "
            f"data.chat_template_kwargs={{chat_template: NAME}} with one of {sorted(templates)}"
        )
    return templates[wanted]


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "(unnamed)"


def probe(*, calls: bool) -> Messages:
    """A question, a turn whose text (or last argument) is `ANSWER`, and what follows."""
    question = {"role": "user", "content": QUESTION}
    if not calls:
        return [question, {"role": "assistant", "content": ANSWER}, question]
    function = {"name": "look", "arguments": {"at": ANSWER}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": QUESTION, "name": "look", "tool_call_id": CALL_ID}
    return [question, answer, result]
