"""Finds the prompt that a model read before each of its turns, and the text that it wrote there.

It wrote all that follows the generation prompt, up to where it stops: thinking and channel headers
included, an empty thinking block that the template adds to a turn without thinking left out. Text
that a template does not render is not learnt: thinking is named, anything else refused. Each turn
is taken from a rendering of its own, as templates change earlier turns (Qwen3 drops their thinking,
gpt-oss closes them otherwise).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conf.errors import InputError
from data.rows.messages import Messages
from data.templates.template import ANSWER, ChatTemplate, Ending, Tools, shared_start

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
"""From so many turns on, renderings of their own take longer than finding them in one."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn, as it was when the model wrote it.

    Attributes:
        prompt: that the model had read.
        written: by the model, its end-of-turn token included.
        through: the rendering of the conversation up to and with the turn.
        left_out: names of the parts of the turn that the template does not render.
    """

    prompt: str
    written: str
    through: str
    left_out: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The prompt and the text of the turn."""
        return self.prompt + self.written


def find_turns(
    messages: Messages, indices: Sequence[int], template: ChatTemplate, tools: Tools
) -> list[Turn]:
    """Finds the prompt and the text of each of the model's turns.

    Args:
        messages: a conversation.
        indices: of the assistant's messages to find, ascending.
        template: the target's.
        tools: function schemas that every prompt shows.

    Raises:
        InputError: the template refuses the conversation, does not render what a turn says, or
            does not tell where it begins or ends.
    """
    turns = _aligned(messages, indices, template, tools) if len(indices) >= MIN_ALIGNED else None
    return turns or [find_turn(messages[: i + 1], template, tools) for i in indices]


def find_turn(messages: Messages, template: ChatTemplate, tools: Tools = None) -> Turn:
    """Finds the prompt and the text of the turn that ends a conversation.

    Raises:
        InputError: as `find_turns` does.
    """
    last = messages[-1]
    through = template.through(messages, tools)
    prompt, rest = _divide(messages, through, template, tools)
    thinks = last.get("reasoning_content") or "</think>" in last["content"]
    block = None if thinks else EMPTY_THINKING.match(rest)
    if block:
        # What follows it as in any turn is the template's, more space than that the answer's.
        space = shared_start(rest[block.end() :], template.lead_space)
        end = block.end() + len(space)
        prompt, rest = prompt + rest[:end], rest[end:]
    # R1 closes a turn with tool calls twice; what the model writes ends with the first stop
    # behind all that the turn says. A turn that says it nowhere is refused for all of it.
    written = ""
    for written in _closed(rest, template.ending(bool(last.get("tool_calls"))), template):
        if not _unsaid(last, written):
            break
    return Turn(prompt, written, through, _left_out(last, written))


def _divide(
    messages: Messages, through: str, template: ChatTemplate, tools: Tools
) -> tuple[str, str]:
    """The prompt that the model had read before it wrote the last message, and the rest."""
    before, last = messages[:-1], messages[-1]
    prompt = template.prompt(before, tools)
    if through.startswith(prompt):
        return prompt, through[len(prompt) :]
    probe = template.through([*before, {"role": "assistant", "content": ANSWER}], tools)
    answer, history = probe.find(ANSWER), len(shared_start(prompt, probe))
    # gpt-oss shows earlier thinking, and Mistral the system message, until the answer is there:
    # only the prompt has them. The turn begins behind the end of the prompt.
    header = prompt.removeprefix(template.through(before, tools)) or template.last_special(prompt)
    at = probe.rfind(header, 0, answer)
    start = at + len(header)
    if header and at >= history and through.startswith(probe[:start]):
        return prompt, through[start:]
    # The generation prompt leads into thinking (or past it), and the rendered turn does not.
    start = len(template.whole_tokens(probe[:history], probe))
    lead = probe[start:answer]
    if squash(lead) in (squash(prompt[start:]), "</think>", "<think></think>"):
        start, lead = answer, ""
    only_special = re.fullmatch(rf"(\s|{template.special_pattern})*", lead)
    if only_special and start <= answer and through.startswith(probe[:start]):
        rest = through[start:]
        if OPENED_THINKING.search(prompt):
            return through[:start], rest
        if not any(tag in prompt[start:] and rest.startswith(tag) for tag in THINKING_TAGS):
            return prompt, rest
    hint = "; data.chat_template_kwargs={enable_thinking: true} may be missing"
    apart = len(shared_start(prompt, through))
    raise InputError(
        "the target's chat template renders an answer elsewhere than after its generation "
        f"prompt {prompt[-60:]!r}: {through[apart : apart + 60]!r}"
        + (hint if any(_thoughts(last)) else "")
    )


def _closed(rest: str, ending: Ending, template: ChatTemplate) -> Iterator[str]:
    """Cuts a turn behind its end, or closes it: at the first stop in it, the next, ..."""
    if not rest.endswith(ending.rendered):
        raise InputError(
            f"the target's chat template closes the turn with {rest[-60:]!r}, others with "
            f"{ending.rendered!r}"
        )
    written = rest.removesuffix(ending.rendered) + ending.closing
    stop = re.search(rf"({template.stop_pattern})$", ending.closing)
    for place in re.finditer(re.escape(stop.group()), written) if stop else ():
        yield written[: place.end()]
    yield written


def _unsaid(message: dict, written: str) -> str:
    """Names a part of a turn, thinking apart, that the text lacks; empty if it lacks none."""
    if not is_shown(_text(message), written):
        return f"the text {message['content'][:80]!r}"
    names = (call["function"]["name"] for call in message.get("tool_calls", ()))
    return next((f"the call of {name}" for name in names if name not in written), "")


def _left_out(message: dict, written: str) -> tuple[str, ...]:
    """`("thinking",)` if the turn thinks and the template does not render that.

    Raises:
        InputError: it does not render more than that.
    """
    unsaid = _unsaid(message, written)
    if unsaid:
        raise InputError(
            f"the target's chat template does not render {unsaid} of the assistant; it renders "
            f"{written[:80]!r}"
        )
    shown = all(is_shown(thought, written) for thought in _thoughts(message))
    return () if shown else ("thinking",)


def _text(message: dict) -> str:
    return str(message["content"].rpartition("</think>")[2])


def _thoughts(message: dict) -> tuple[str, str]:
    """The thinking beside a turn's text and that in it, where a prompt may open it."""
    inline = message["content"].rpartition("</think>")[0].strip().removeprefix("<think>")
    return message.get("reasoning_content") or "", inline


def says_nothing(message: dict, turn: Turn) -> bool:
    """True if the template leaves out all that a turn says, and closes it nonetheless."""
    return bool(turn.left_out) and not (_text(message).strip() or message.get("tool_calls"))


def cut_off(turn: Turn, message: dict, template: ChatTemplate) -> Turn:
    """The turn without its end, which the model had not come to.

    Args:
        turn: as the template renders it, closed.
        message: of the turn; where that is thinking alone, the thinking was not ended either.
        template: the target's.
    """
    calls = bool(message.get("tool_calls"))
    thought, inline = _thoughts(message)
    said = "" if calls else (_text(message).strip() or inline.strip() or thought.strip())
    at = turn.written.rfind(said) if said else -1
    if at >= 0:
        return replace(turn, written=turn.written[: at + len(said)])
    closing = template.ending(calls).closing
    return replace(turn, written=turn.written.removesuffix(closing).rstrip())


def is_shown(text: str, rendered: str) -> bool:
    """True if a text is rendered, white space apart."""
    return text.strip() in rendered or squash(text) in squash(rendered)


def _aligned(
    messages: Messages, indices: Sequence[int], template: ChatTemplate, tools: Tools
) -> list[Turn] | None:
    """Finds the turns of a long conversation in one rendering, if they can be told apart there.

    They can where every assistant turn stands behind the same header and nothing else does,
    and the first and the last are as renderings of their own have them.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    more = ("reasoning_content", "tool_calls")
    if any(
        "</think>" in messages[i]["content"] or any(map(messages[i].get, more)) for i in answers
    ):
        return None
    outer = indices[0], indices[-1]
    own = [find_turn(messages[: i + 1], template, tools) for i in outer]
    whole = template.through(messages, tools)
    header = own[0].prompt.removeprefix(template.through(messages[: outer[0]], tools))
    starts = [place.end() for place in re.finditer(re.escape(header), whole)] if header else []
    if len(starts) != len(answers):
        return None
    closing = template.ending(calls=False).closing
    turns = {}
    for i, start in zip(answers, starts, strict=True):
        said = messages[i]["content"].strip()
        end = whole.find(closing, start + len(said)) + len(closing)
        turns[i] = Turn(whole[:start], whole[start:end], whole)
        if squash(turns[i].written) != squash(said + closing):
            return None
    if [turns[i].text for i in outer] != [turn.text for turn in own]:
        return None
    return [turns[i] for i in indices]


def squash(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())
