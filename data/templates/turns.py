"""Turns of a rendered conversation: the prompt and the text that the model wrote in each.

The model wrote everything after the generation prompt up to its stop token, including thinking and
channel headers, but not an empty thinking block that the template adds. Text that the template does
not render is not learnt: missing thinking is counted, other missing text is an error. Each turn is
taken from a rendering that ends with it, because templates change earlier turns (Qwen3 drops their
thinking, gpt-oss closes them differently).

`TurnMarkers` recognises rendered dialogues among plain texts, whose questions must not be learnt.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conf.errors import InputError
from data.rows.field_checks import remove_white_space
from data.rows.messages import Messages
from data.templates.chat_template import (
    ANSWER,
    QUESTION,
    ChatTemplate,
    Tools,
    TurnEnding,
    build_probe_messages,
    find_common_prefix,
)

THINKING_TAGS = {
    "<think>": "</think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
}
EMPTY_THINKING = re.compile(
    "|".join(
        rf"\s*({re.escape(begin)})?\s*{re.escape(end)}" for begin, end in THINKING_TAGS.items()
    )
)
OPENED_THINKING = re.compile(rf"({'|'.join(map(re.escape, THINKING_TAGS))})\s*$")
MIN_ALIGNED = 8
"""Number of turns from which one rendering of all turns is tried before one per turn."""


@dataclass(frozen=True)
class Turn:
    """Assistant turn as the model wrote it.

    Attributes:
        prompt: text that the model had read before the turn.
        written: text that the model wrote, including its end-of-turn token.
        conversation_text: rendering of the conversation up to the end of the turn.
        unrendered_parts: names of the turn's parts that the template does not render.
    """

    prompt: str
    written: str
    conversation_text: str
    unrendered_parts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Prompt and written text of the turn."""
        return self.prompt + self.written


def find_turns(
    messages: Messages, indices: Sequence[int], template: ChatTemplate, tools: Tools
) -> list[Turn]:
    """Find the prompt and the text of each of the model's turns.

    Args:
        messages: conversation.
        indices: indices of the assistant messages to find, rising.
        template: the target's template.
        tools: function schemas that every prompt shows.

    Raises:
        InputError: the template refuses the conversation, does not render the text of a turn, or
            does not show where the turn begins or ends.
    """
    turns = _find_aligned_turns(messages, indices, template, tools)
    return turns or [find_turn(messages[: i + 1], template, tools) for i in indices]


def find_turn(messages: Messages, template: ChatTemplate, tools: Tools = None) -> Turn:
    """Find the prompt and the text of the last turn of a conversation.

    Raises:
        InputError: as `find_turns`.
    """
    last = messages[-1]
    through = template.render_conversation(messages, tools)
    prompt, rest = _split_prompt(messages, through, template, tools)
    thinks = last.get("reasoning_content") or "</think>" in last["content"]
    block = None if thinks else EMPTY_THINKING.match(rest)
    if block:
        # The usual space after the block is the template's; further space is the answer's.
        space = find_common_prefix(rest[block.end() :], template.lead_space)
        end = block.end() + len(space)
        prompt, rest = prompt + rest[:end], rest[end:]
    # R1 closes a turn with tool calls twice. The model's text ends at the first stop token after
    # everything the turn says; a turn without such a stop is refused.
    written, ending = "", template.find_turn_ending(bool(last.get("tool_calls")))
    for written in _iter_closed_turns(rest, ending, template):
        if not _find_lost_part(last, written):
            break
    return Turn(prompt, written, through, _list_unrendered_parts(last, written))


def _split_prompt(
    messages: Messages, through: str, template: ChatTemplate, tools: Tools
) -> tuple[str, str]:
    """Split the rendering `through` of messages into the prompt before the last, and the rest.

    Raises:
        InputError: the template does not render the turn after its generation prompt.
    """
    before, last = messages[:-1], messages[-1]
    prompt = template.render_prompt(before, tools)
    if through.startswith(prompt):
        return prompt, through[len(prompt) :]
    probe = template.render_conversation([*before, {"role": "assistant", "content": ANSWER}], tools)
    answer, history = probe.find(ANSWER), len(find_common_prefix(prompt, probe))
    # gpt-oss shows earlier thinking, and Mistral the system message, until the answer is there, so
    # only the prompt has them. The turn begins after the end of the prompt.
    opening = prompt.removeprefix(template.render_conversation(before, tools))
    header = opening or template.last_special(prompt)
    header_start = probe.rfind(header, 0, answer)
    start = header_start + len(header)
    if header and header_start >= history and through.startswith(probe[:start]):
        return prompt, through[start:]
    # The generation prompt opens (or skips) thinking, but the rendered turn does not.
    start = len(template.whole_tokens(probe[:history], probe))
    lead = probe[start:answer]
    skipped = (remove_white_space(prompt[start:]), "</think>", "<think></think>")
    if remove_white_space(lead) in skipped:
        start, lead = answer, ""
    only_special = re.fullmatch(rf"(\s|{template.special_pattern})*", lead)
    if only_special and start <= answer and through.startswith(probe[:start]):
        rest = through[start:]
        if OPENED_THINKING.search(prompt):
            return through[:start], rest
        if not any(tag in prompt[start:] and rest.startswith(tag) for tag in THINKING_TAGS):
            return prompt, rest
    missing = "; 'data.chat_template_kwargs={enable_thinking: true}' may be missing"
    hint = missing if any(split_thinking(last)[:2]) else ""
    apart = len(find_common_prefix(prompt, through))
    raise InputError(
        "the target's chat template renders an answer elsewhere than after its generation prompt "
        f"{prompt[-60:]!r}: {through[apart : apart + 60]!r}{hint}"
    )


def _iter_closed_turns(rest: str, ending: TurnEnding, template: ChatTemplate) -> Iterator[str]:
    """Yield the model's text up to its first stop token, the second, ..., and the whole text.

    Raises:
        InputError: the rendering does not end as turns of this kind do.
    """
    if not rest.endswith(ending.rendered):
        raise InputError(
            f"the target's chat template closes the turn with {rest[-60:]!r}, others with "
            f"{ending.rendered!r}"
        )
    written = rest.removesuffix(ending.rendered) + ending.closing
    stop = re.search(rf"({template.stop_pattern})$", ending.closing)
    for match in re.finditer(re.escape(stop.group()), written) if stop else ():
        yield written[: match.end()]
    yield written


def _find_lost_part(message: dict, written: str) -> str:
    """Find a part of a turn, except thinking, that the written text lacks; "" if complete."""
    if not is_rendered(split_thinking(message)[2], written):
        return f"the text {message['content'][:80]!r}"
    names = (call["function"]["name"] for call in message.get("tool_calls", ()))
    return next((f"the call of {name}" for name in names if name not in written), "")


def _list_unrendered_parts(message: dict, written: str) -> tuple[str, ...]:
    """List the unrendered parts of a turn: `("thinking",)`, or () if all is rendered.

    Raises:
        InputError: the template leaves out other parts than thinking.
    """
    lost_part = _find_lost_part(message, written)
    if lost_part:
        raise InputError(
            f"the target's chat template does not render {lost_part} of the assistant; it renders "
            f"{written[:80]!r}"
        )
    all_rendered = all(is_rendered(thought, written) for thought in split_thinking(message)[:2])
    return () if all_rendered else ("thinking",)


def split_thinking(message: dict) -> tuple[str, str, str]:
    """Split a turn into the thinking beside its text, the thinking inside, and the answer."""
    inline, _, answer = message["content"].rpartition("</think>")
    return message.get("reasoning_content") or "", inline.strip().removeprefix("<think>"), answer


def is_left_out(message: dict, turn: Turn) -> bool:
    """Tell whether the template renders nothing of a turn but its end."""
    says = split_thinking(message)[2].strip() or message.get("tool_calls")
    return bool(turn.unrendered_parts) and not says


def remove_turn_ending(turn: Turn, message: dict, template: ChatTemplate) -> Turn:
    """Remove the end of a turn that the model had not reached.

    Args:
        turn: turn as rendered, closed.
        message: message of the turn. If it only has thinking, the thinking was not ended either.
        template: the target's template.
    """
    calls = bool(message.get("tool_calls"))
    thought, inline, answer = (part.strip() for part in split_thinking(message))
    text = "" if calls else answer or inline or thought
    start = turn.written.rfind(text) if text else -1
    if start >= 0:
        return replace(turn, written=turn.written[: start + len(text)])
    closing = template.find_turn_ending(calls).closing
    return replace(turn, written=turn.written.removesuffix(closing).rstrip())


def is_rendered(text: str, rendered: str) -> bool:
    """Tell whether a text is rendered, ignoring white space."""
    return text.strip() in rendered or remove_white_space(text) in remove_white_space(rendered)


def _find_aligned_turns(
    messages: Messages, indices: Sequence[int], template: ChatTemplate, tools: Tools
) -> list[Turn] | None:
    """Find the turns of a long conversation in one rendering; None if that is not possible.

    It is possible if every assistant turn follows the same header, which occurs nowhere else, and
    if the first and the last turn equal their own renderings.
    """
    if len(indices) < MIN_ALIGNED:
        return None
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    more = ("reasoning_content", "tool_calls")
    if any(
        "</think>" in messages[i]["content"] or any(map(messages[i].get, more)) for i in answers
    ):
        return None
    outer = indices[0], indices[-1]
    outer_turns = [find_turn(messages[: i + 1], template, tools) for i in outer]
    whole = template.render_conversation(messages, tools)
    before = template.render_conversation(messages[: outer[0]], tools)
    header = outer_turns[0].prompt.removeprefix(before)
    starts = [match.end() for match in re.finditer(re.escape(header), whole)] if header else []
    if len(starts) != len(answers):
        return None
    closing = template.find_turn_ending(calls=False).closing
    turns = {}
    for i, start in zip(answers, starts, strict=True):
        text = messages[i]["content"].strip()
        end = whole.find(closing, start + len(text)) + len(closing)
        turns[i] = Turn(whole[:start], whole[start:end], whole)
        if remove_white_space(turns[i].written) != remove_white_space(text + closing):
            return None
    if [turns[i].text for i in outer] != [turn.text for turn in outer_turns]:
        return None
    return [turns[i] for i in indices]


@dataclass(frozen=True)
class TurnMarkers:
    """Tokens and texts that the target's template puts around turns.

    Attributes:
        tokens: special tokens between turns, without those that begin and end any text.
        asks: text that stands before a question.
        answers: text that stands before an answer.
    """

    tokens: tuple[str, ...] = ()
    asks: str = ""
    answers: str = ""

    @classmethod
    def from_template(cls, template: ChatTemplate) -> "TurnMarkers":
        """Find the markers in a rendering of known texts; empty if it does not show these.

        Raises:
            InputError: the template refuses the texts.
        """
        question, answer, _ = build_probe_messages(calls=False)
        text = template.render_conversation([question, answer, question, answer])
        pieces = re.split(f"{QUESTION}|{ANSWER}", text)
        if len(pieces) != 5:
            return cls()
        start, first, between, second, _ = pieces
        asks = find_common_prefix(start[::-1], between[::-1])[::-1]
        tokenizer = template.tokenizer
        ends = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
        tokens = re.findall(template.stop_pattern, first + between + second)
        return cls(
            tuple(dict.fromkeys(token for token in tokens if token not in ends)),
            asks.strip(),
            find_common_prefix(first, second).strip(),
        )

    def find_marker(self, text: str) -> str:
        """Find a marker in a text rendered like the target's dialogues; "" for other texts."""
        token = next((token for token in self.tokens if token in text), "")
        # Some templates end a question with a single sign, which occurs in any text.
        if token or not re.search(r"\w\w", self.answers):
            return token
        start = text.find(self.asks)
        return self.answers if start >= 0 and text.find(self.answers, start) >= 0 else ""
