"""A target's chat template: what it renders, and what of that a model writes.

What a model writes in a turn is what follows its generation prompt, up to where it stops. Templates
say neither: they add text after the end of the last turn (`\\n`, an eos of the whole conversation),
lead into thinking that a message does not have, or drop thinking. Both are found by rendering
messages of known text, once per template.

Letters: a conversation ends in an assistant turn; `prompt` is what the model read, `through` the
rendering of the conversation, the turn included.
"""

import json
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from conf.schema import InputError

Messages = list[dict[str, Any]]

ANSWER, QUESTION, THOUGHT = "zqanswerqz", "zqquestionqz", "zqthoughtqz"
CALL_ID = "abcdefghi"  # Mistral wants nine letters
EMPTY_THINKING = re.compile(r"\s*(<think>)?\s*</think>\s*")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Ending:
    """How a template closes a turn that is the last."""

    closing: str
    """What the model writes after its text: the end-of-turn token."""
    rendered: str
    """What the template renders after it: more, less or something else."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn, as it was when the model wrote it."""

    read: str
    """What the model had read."""
    written: str
    """What it wrote, its end-of-turn token included."""
    through: str
    """All that is rendered of the conversation and the turn."""
    left_out: tuple[str, ...]
    """What the template does not render of the turn, so that it is not learnt."""


class ChatTemplate:
    """The chat template of a tokenizer, with settings of its own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> None:
        """Looks nothing up yet.

        Args:
            tokenizer: the target's, with a chat template.
            kwargs: `chat_template_kwargs`, as at serving.
            tools: function schemas that every prompt shows.
        """
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.source = tokenizer.get_chat_template(tools=self.tools)
        self.variables = {**tokenizer.special_tokens_map, **(kwargs or {})}

    def prompt(self, messages: Messages) -> str:
        """Renders a conversation up to where the assistant starts to write.

        Raises:
            InputError: the template refuses it.
        """
        return self._render(messages, prompt=True)

    def through(self, messages: Messages) -> str:
        """Renders a whole conversation.

        Raises:
            InputError: the template refuses it.
        """
        return self._render(messages, prompt=False)

    def turn(self, messages: Messages) -> Turn:
        """Finds what the model wrote in the last message.

        Args:
            messages: a conversation that ends in an assistant turn.

        Raises:
            InputError: the template refuses it, does not render what the turn says, or does not
                tell where it begins or ends.
        """
        through = self.through(messages)
        last = messages[-1]
        read, rest = self._divide(messages[:-1], through, last)
        if not last.get("reasoning_content") and "</think>" not in last["content"]:
            thinking = _empty_thinking(rest)
            read, rest = read + rest[:thinking], rest[thinking:]
        # R1 closes a turn with tool calls twice; what the model writes ends with the first stop
        # behind all that the turn says. A turn that says it nowhere is refused for all of it.
        written = ""
        for written in self._closings(rest, self._ending(bool(last.get("tool_calls")))):
            if not _unsaid(last, written):
                break
        return Turn(read, written, through, _left_out(last, written))

    def _render(
        self, messages: Messages, *, prompt: bool, shape: dict[str, bool] | None = None
    ) -> str:
        shape = self._shape if shape is None else shape
        try:
            (text,), _ = render_jinja_template(
                conversations=[[self._shown(message, **shape) for message in messages]],
                tools=self.tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                **self.variables,
            )
        # A template is somebody's program, and fails as programs do: Hermes' with a TypeError.
        except Exception as error:
            raise InputError(
                f"the target's chat template refuses the conversation: {error}"
            ) from None
        return str(text)

    def _shown(
        self, message: dict, *, parts: bool, thinking_parts: bool, text_arguments: bool
    ) -> dict:
        """Names and shapes the fields of a message as this template reads them."""
        shown = dict(message)
        reasoning = message.get("reasoning_content")
        if reasoning:
            shown |= dict.fromkeys(REASONING_NAMES, reasoning)
        if message["role"] == "developer" and "developer" not in self.source:
            shown["role"] = "system"
        thinks = bool(reasoning) and thinking_parts
        if parts or thinks:
            shown["content"] = [{"type": "text", "text": message["content"]}]
        if thinks:
            shown["content"].insert(0, {"type": "thinking", "thinking": reasoning})
        if text_arguments and "tool_calls" in message:
            shown["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return shown

    @cached_property
    def _shape(self) -> dict[str, bool]:
        """How this template reads a message.

        Contents may be lists of parts (vision models), thinking a part among them (Mistral),
        arguments of tools JSON text (DeepSeek).
        """
        shape = dict.fromkeys(("parts", "thinking_parts", "text_arguments"), False)
        question, answer, _ = _probe(calls=False)
        thought = answer | {"reasoning_content": THOUGHT}
        for name, messages, text in (
            ("parts", [question], QUESTION),
            ("thinking_parts", [question, thought], THOUGHT),
        ):
            other = shape | {name: True}
            if not self._renders(text, messages, shape) and self._renders(text, messages, other):
                shape = other
        calls = _probe(calls=True)[:2]
        return shape | {"text_arguments": self._fails(calls, shape)}

    def _fails(self, messages: Messages, shape: dict[str, bool]) -> bool:
        try:
            self._render(messages, prompt=False, shape=shape)
        except InputError:
            return True
        return False

    def _renders(self, text: str, messages: Messages, shape: dict[str, bool]) -> bool:
        """Tells whether a text is shown, and not in Python's or JSON's notation of its part."""
        try:
            rendered = self._render(messages, prompt=False, shape=shape)
        except InputError:
            return False
        return text in rendered and not re.search(rf"""['"]{text}['"]""", rendered)

    def _divide(self, before: Messages, through: str, last: dict) -> tuple[str, str]:
        """Returns what the model had read before it wrote the turn, and the rest of `through`."""
        prompt = self.prompt(before)
        if through.startswith(prompt):
            return prompt, through[len(prompt) :]
        probe = self.through([*before, {"role": "assistant", "content": ANSWER}])
        answer = probe.find(ANSWER)
        # gpt-oss shows earlier thinking, and Mistral the system message, until the answer is
        # there: what was read is only in the prompt. The turn begins behind what ends it.
        header = prompt.removeprefix(self.through(before)) or self._last_special(prompt)
        at = probe.rfind(header, 0, answer) + len(header)
        history = len(os.path.commonprefix([prompt, probe]))
        if header and at - len(header) >= history and through.startswith(probe[:at]):
            return prompt, through[at:]
        # The generation prompt leads into thinking (or past it), and the rendered turn does not.
        shared = self._whole_tokens(os.path.commonprefix([prompt, probe]), probe)
        start = len(shared)
        lead = probe[start:answer]
        if _squash(lead) in (_squash(prompt[start:]), "</think>", "<think></think>"):
            start, lead = answer, ""
        if re.fullmatch(rf"(\s|{self._special_pattern})*", lead) and answer >= start:  # noqa: SIM102
            if through.startswith(probe[:start]):
                return through[:start], through[start:]
        hint = "; data.chat_template_kwargs={enable_thinking: true} may be missing"
        raise InputError(
            "the target's chat template renders an answer elsewhere than after its generation "
            f"prompt {prompt[-60:]!r}: {through[start : start + 60]!r}"
            + (hint if last.get("reasoning_content") else "")
        )

    def _closings(self, rest: str, ending: Ending) -> Iterator[str]:
        """Cuts a turn behind its end, or closes it: at the first stop in it, the next, ..."""
        if not rest.endswith(ending.rendered):
            raise InputError(
                f"the target's chat template closes the turn with {rest[-60:]!r}, others with "
                f"{ending.rendered!r}"
            )
        written = rest.removesuffix(ending.rendered) + ending.closing
        stop = re.search(rf"({self._stop_pattern})$", ending.closing)
        for found in re.finditer(re.escape(stop.group()), written) if stop else ():
            yield written[: found.end()]
        yield written

    @lru_cache(maxsize=2)  # noqa: B019  templates live as long as their run
    def _ending(self, calls: bool) -> Ending:
        """How a template closes a turn that is the last.

        What the renderings of a turn share when it is the last one and when it is followed is
        the model's, up to where the next turn opens. gpt-oss closes the last one otherwise than
        the rest; GLM closes none, and is stopped by the token that opens the next.
        """
        messages = _probe(calls)
        last, followed = self.through(messages[:2]), self.through(messages)
        if ANSWER not in last:
            what = "tool calls" if calls else "an assistant's text"
            raise InputError(f"the target's chat template does not render {what}")
        tail, more = last.rpartition(ANSWER)[2], followed.rpartition(ANSWER)[2]
        shared = self._whole_tokens(os.path.commonprefix([tail, more]), tail)
        shared = shared.partition(self._opening)[0] if self._opening else shared
        shared = shared.rstrip()
        if re.search(rf"({self._stop_pattern})$", shared):
            return Ending(shared, tail)
        stop = re.compile(rf"\s*({self._stop_pattern})")
        found = stop.match(tail, len(shared)) or stop.match(more, len(shared))
        return Ending(shared + (found.group() if found else ""), tail)

    @cached_property
    def _opening(self) -> str:
        """The special token that opens a turn, if one does."""
        text = self.through(_probe(calls=False)[:1])
        found = [each.group() for each in re.finditer(self._special_pattern, text)]
        return next((each for each in found if each != self.tokenizer.bos_token), "")

    def _whole_tokens(self, common: str, text: str) -> str:
        """Cuts the shared start of two texts back to where no special token is cut in two."""
        for token in re.finditer(self._special_pattern, text):
            if token.start() < len(common) < token.end():
                return common[: token.start()]
        return common

    def _last_special(self, text: str) -> str:
        """Returns the special token that a text ends in, if it ends in one."""
        found = re.search(rf"({self._special_pattern})$", text)
        return found.group() if found else ""

    @cached_property
    def _special_pattern(self) -> str:
        return _any_of(t.content for t in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def _stop_pattern(self) -> str:
        """Tokens that may end a turn; `</think>` and `</tool_call>` do not."""
        added = self.tokenizer.added_tokens_decoder.values()
        return _any_of(token.content for token in added if token.special)


def _any_of(contents: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(set(contents), key=len, reverse=True))) or "(?!)"


def _empty_thinking(written: str) -> int:
    """Returns the length of a thinking block that a template adds to a turn without thinking."""
    found = EMPTY_THINKING.match(written)
    return found.end() if found else 0


def _unsaid(message: dict, written: str) -> str:
    """Names what a turn says, thinking apart, and what is written does not; empty if nothing."""
    answer = _squash(message["content"]).rpartition("</think>")[2]
    if answer not in _squash(written):
        return f"the text {message['content'][:80]!r}"
    names = (call["function"]["name"] for call in message.get("tool_calls", ()))
    return next((f"the call of {name}" for name in names if name not in written), "")


def _left_out(message: dict, written: str) -> tuple[str, ...]:
    """Returns `("thinking",)` if the turn thinks and the template does not render it.

    Raises:
        InputError: what is not rendered is more than thinking.
    """
    unsaid = _unsaid(message, written)
    if unsaid:
        raise InputError(
            f"the target's chat template does not render {unsaid} of the assistant; it renders "
            f"{written[:80]!r}"
        )
    said = _squash(written)
    thoughts = (message["content"], message.get("reasoning_content") or "")
    return () if all(_squash(each) in said for each in thoughts) else ("thinking",)


def _squash(text: str) -> str:
    return "".join(text.split())


def _probe(calls: bool) -> Messages:
    """Returns a question, a turn whose text (or last argument) is `ANSWER`, and what follows."""
    question = {"role": "user", "content": QUESTION}
    if not calls:
        return [question, {"role": "assistant", "content": ANSWER}, question]
    function = {"name": "look", "arguments": {"at": ANSWER}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": QUESTION, "name": "look", "tool_call_id": CALL_ID}
    return [question, answer, result]


def _with_text_arguments(call: dict) -> dict:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}
