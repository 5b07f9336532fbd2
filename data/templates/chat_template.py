"""Chat template of a target: renders conversations, and finds how the template closes a turn.

Templates differ in their input (contents as parts, arguments as text) and do not tell where a turn
ends: some add text after the last turn (a newline, an eos of the whole conversation). Notation and
ending are found once per template, by rendering messages of known text.
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
from data.rows.messages import REASONING, Messages, format_call_arguments, restore_parts

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
PLAIN_NOTATION = dict.fromkeys(("parts", "thinking_parts", "text_arguments"), False)
TEMPLATE_FAULTS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class TurnEnding:
    """End of the last turn.

    Attributes:
        closing: text that the model writes at the end, which is the end-of-turn token.
        rendered: text that the template renders at the end, which may differ.
    """

    closing: str
    rendered: str


class ChatTemplate:
    """Chat template of a tokenizer, with template variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        *,
        with_tools: bool = False,
    ) -> None:
        """Keep tokenizer and settings; render later.

        Args:
            tokenizer: the target's tokenizer.
            kwargs: `chat_template_kwargs`, as at serving.
            with_tools: whether conversations have tools, for which some tokenizers have another
                template.

        Raises:
            InputError: the tokenizer has no chat template, or none of this name.
        """
        if not tokenizer.chat_template:
            raise InputError(
                f"target {_get_tokenizer_name(tokenizer)}: has no chat template, but the data are "
                "conversations; use the chat version of the model, put a chat_template.jinja into "
                "its folder, or give plain text (rows with a 'text' field)"
            )
        self.tokenizer = tokenizer
        self._probe_tools = PROBE_TOOLS if with_tools else None
        named = {**(kwargs or {})}
        wanted = named.pop("chat_template", None)
        self.source = _choose_template(tokenizer, wanted, self._probe_tools)
        self.variables = {**tokenizer.special_tokens_map, **named}

    def render_prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Render a conversation up to the start of the assistant's turn.

        Raises as `render_conversation` does.
        """
        return self._render_messages(messages, tools, self._message_notation, prompt=True)

    def render_conversation(self, messages: Messages, tools: Tools = None) -> str:
        """Render a whole conversation.

        Raises:
            InputError: the template refuses the conversation.
        """
        return self._render_messages(messages, tools, self._message_notation, prompt=False)

    def _render_messages(
        self, messages: Messages, tools: Tools, notation: dict[str, bool], *, prompt: bool
    ) -> str:
        try:
            rendered: Any = render_jinja_template(
                conversations=[[self._rewrite_message(each, **notation) for each in messages]],
                tools=None if tools is None else [*tools],
                chat_template=self.source,
                add_generation_prompt=prompt,
                **self.variables,
            )
        # Templates are programs and fail like programs, e.g. Hermes' with a TypeError.
        except TEMPLATE_FAULTS as error:
            raise InputError(
                f"the target's chat template refuses the conversation: {error}"
            ) from None
        return str(rendered[0][0])

    def _rewrite_message(
        self, message: dict, *, parts: bool, thinking_parts: bool, text_arguments: bool
    ) -> dict:
        """Rename and rewrite the fields of a message as this template reads them."""
        rewritten = {key: value for key, value in message.items() if key != "content_parts"}
        reasoning = message.get("reasoning_content")
        if reasoning:
            rewritten |= dict.fromkeys(REASONING, reasoning)
        if message["role"] == "developer" and "developer" not in self.source:
            rewritten["role"] = "system"
        thinks = bool(reasoning) and thinking_parts
        if "content_parts" in message and (parts or thinks or self._joins_parts):
            rewritten["content"] = restore_parts(message)["content"]
        elif parts or thinks:
            rewritten["content"] = [{"type": "text", "text": message["content"]}]
        if thinks:
            rewritten["content"].insert(0, {"type": "thinking", "thinking": reasoning})
        if text_arguments:
            rewritten = format_call_arguments(rewritten)
        return rewritten

    @cached_property
    def _message_notation(self) -> dict[str, bool]:
        """Notation in which this template reads a message.

        Contents may be lists of parts (vision models), with thinking as a part (Mistral); tool
        arguments may be JSON text (DeepSeek).
        """
        notation = PLAIN_NOTATION
        question, answer, _ = build_probe_messages(calls=False)
        thought = answer | {"reasoning_content": THOUGHT}
        for name, messages, text in (
            ("parts", [question], QUESTION),
            ("thinking_parts", [question, thought], THOUGHT),
        ):
            other = notation | {name: True}
            if self._renders_text(text, messages, other) and not self._renders_text(
                text, messages, notation
            ):
                notation = other
        calls = build_probe_messages(calls=True)[:2]
        return notation | {"text_arguments": self._try_render(calls, notation) is None}

    @cached_property
    def _joins_parts(self) -> bool:
        """Tell whether this template renders the parts of a message.

        Servers give a message's parts to such a template, and one text with a line for each part to
        others (vLLM).
        """
        texts = [QUESTION, ANSWER]
        message = restore_parts({"role": "user", "content_parts": texts})
        return all(self._renders_text(text, [message], PLAIN_NOTATION) for text in texts)

    def _try_render(self, messages: Messages, notation: dict[str, bool]) -> str | None:
        try:
            return self._render_messages(messages, self._probe_tools, notation, prompt=False)
        except InputError:
            return None

    def _renders_text(self, text: str, messages: Messages, notation: dict[str, bool]) -> bool:
        """Tell whether a text is rendered, not as Python or JSON notation of its part."""
        rendered = self._try_render(messages, notation) or ""
        return text in rendered and not re.search(rf"""['"]{text}['"]""", rendered)

    @lru_cache(maxsize=2)  # noqa: B019  templates live as long as their run
    def find_turn_ending(self, calls: bool) -> TurnEnding:
        """Find the end of the last turn.

        The turn is rendered as the last one and as one that is followed. The text that both
        renderings share is the model's, up to the opening of the next turn. gpt-oss closes the last
        turn differently; GLM closes no turn and stops at the token that opens the next.

        Args:
            calls: whether the turn calls tools.

        Raises:
            InputError: the template does not render turns of this kind.
        """
        messages, tools = build_probe_messages(calls=calls), self._probe_tools
        last = self.render_conversation(messages[:2], tools)
        followed = self.render_conversation(messages, tools)
        if ANSWER not in last:
            kind = "tool calls" if calls else "an assistant's text"
            raise InputError(f"the target's chat template does not render {kind}")
        tail, more = last.rpartition(ANSWER)[2], followed.rpartition(ANSWER)[2]
        shared = self.whole_tokens(find_common_prefix(tail, more), tail)
        shared = shared.partition(self._opening_token)[0] if self._opening_token else shared
        shared = shared.rstrip()
        # Text before the stop token belongs to the turn: an id, a bracket after an argument.
        last_stop = re.search(rf"({self.stop_pattern})$", shared)
        if last_stop:
            return TurnEnding(last_stop.group(), tail[last_stop.start() :])
        stop = re.compile(rf"\s*({self.stop_pattern})")
        stopped = stop.match(tail, len(shared)) or stop.match(more, len(shared))
        return TurnEnding(stopped.group() if stopped else "", tail[len(shared) :])

    @cached_property
    def lead_space(self) -> str:
        """White space that the template puts before an answer's text."""
        text = self.render_conversation(build_probe_messages(calls=False)[:2], self._probe_tools)
        lead = text.partition(ANSWER)[0]
        return lead[len(lead.rstrip()) :]

    @cached_property
    def _opening_token(self) -> str:
        """Special token that opens a turn, if any."""
        text = self.render_conversation(build_probe_messages(calls=False)[:1], self._probe_tools)
        tokens = (token.group() for token in re.finditer(self.special_pattern, text))
        return next((token for token in tokens if token != self.tokenizer.bos_token), "")

    def whole_tokens(self, common: str, text: str) -> str:
        """Shorten the common start of a text and another so that no special token is cut."""
        for token in re.finditer(self.special_pattern, text):
            if token.start() < len(common) < token.end():
                return common[: token.start()]
        return common

    def last_special(self, text: str) -> str:
        """Find the special token at the end of a text; return "" without one."""
        token = re.search(rf"({self.special_pattern})$", text)
        return token.group() if token else ""

    @cached_property
    def special_pattern(self) -> str:
        """Regular expression of all tokens that are never split."""
        return _build_any_pattern(t.content for t in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def stop_pattern(self) -> str:
        """Regular expression of tokens that may end a turn, without `</think>` and such."""
        added = self.tokenizer.added_tokens_decoder.values()
        return _build_any_pattern(token.content for token in added if token.special)


def find_common_prefix(one: str, other: str) -> str:
    """Find the common start of two texts."""
    pairs = zip(one, other, strict=False)
    return one[: next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _build_any_pattern(contents: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(set(contents), key=len, reverse=True))) or "(?!)"


def _choose_template(tokenizer: PreTrainedTokenizerBase, wanted: str | None, tools: Tools) -> str:
    """Choose a tokenizer's template: by name, its default, or the given one if it is a template."""
    if wanted is not None and "{" in wanted:
        return wanted
    given = tokenizer.chat_template
    templates: dict[str, str] = given if isinstance(given, dict) else {"default": str(given)}
    if wanted is None:
        wanted = "tool_use" if tools and "tool_use" in templates else "default"
    if wanted not in templates:
        raise InputError(
            f"target {_get_tokenizer_name(tokenizer)}: has no chat template {wanted!r}; set "
            f"data.chat_template_kwargs={{chat_template: NAME}} to one of {sorted(templates)}"
        )
    return templates[wanted]


def _get_tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "(unnamed)"


def build_probe_messages(*, calls: bool) -> Messages:
    """Build a question, a turn whose text (or last argument) is `ANSWER`, and a following turn."""
    question = {"role": "user", "content": QUESTION}
    if not calls:
        return [question, {"role": "assistant", "content": ANSWER}, question]
    function = {"name": "look", "arguments": {"at": ANSWER}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": QUESTION, "name": "look", "tool_call_id": CALL_ID}
    return [question, answer, result]
