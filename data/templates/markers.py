"""Recognises rendered dialogues among plain texts, whose questions must not be learnt."""

import re
from dataclasses import dataclass

from conf.errors import InputError
from data.rows.values import MalformedRowError
from data.templates.template import (
    ANSWER,
    QUESTION,
    ChatTemplate,
    build_probe_messages,
    find_common_prefix,
)

ROLE = r"(im_start|start|bom|\w*(user|assistant|header|turn|role)\w*)"
ROLE_TOKEN = re.compile(
    rf"<[|\uff5c]{ROLE}[|\uff5c]?>|\[\|{ROLE}\|\]|<start_of_turn>", re.IGNORECASE | re.ASCII
)
BEGIN = re.compile(rf"\s*(<[^<>\s]+>\s*)?({ROLE_TOKEN.pattern}|\[INST\])", re.IGNORECASE)
"""Start of a rendered prompt, perhaps after a token that begins any text."""
WORDS = (
    ("[INST]", "[/INST]"),
    ("### Assistant",),
    ("### Instruction", "### Response"),
    ("Human:", "\nAssistant:"),
    ("User:", "\nAssistant:"),
    ("USER:", "ASSISTANT:"),
)
"""Lines of strings that occur together in dialogues of common templates without such tokens."""


def find_turn_marker(text: str) -> str:
    """Turn marker of a text that is a rendered dialogue of any model; empty for other texts."""
    token = ROLE_TOKEN.search(text)
    if token:
        return token.group()
    return next((words[-1].strip() for words in WORDS if all(w in text for w in words)), "")


def refuse_dialogue(marker: str) -> None:
    """Refuse a text with a turn marker.

    Raises:
        MalformedRowError: the marker is not empty.
    """
    if marker:
        raise MalformedRowError(
            "text",
            f"a whole dialogue (turn marker {marker!r})",
            "messages, whose answers are learnt; or data.form=text to learn the whole text",
        )


def find_rendered_start(prompt: str) -> str:
    """Start of a prompt that is a rendered turn; empty for other prompts."""
    begin = BEGIN.match(prompt)
    return begin.group().strip() if begin else ""


@dataclass(frozen=True)
class TurnMarkers:
    """Tokens and texts that the target's template puts around turns.

    Attributes:
        tokens: special tokens between turns, without those that begin and end any text.
        asks: text before a question.
        answers: text before an answer.
    """

    tokens: tuple[str, ...] = ()
    asks: str = ""
    answers: str = ""

    @classmethod
    def from_template(cls, template: ChatTemplate) -> "TurnMarkers":
        """Markers in a rendering of known texts; empty if the template refuses them."""
        question, answer, _ = build_probe_messages(calls=False)
        try:
            text = template.render_conversation([question, answer, question, answer])
        except InputError:
            return cls()
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
        """Marker in a text that is rendered like the target's dialogues; empty for other texts."""
        token = next((token for token in self.tokens if token in text), "")
        # Some templates end a question with a single sign, which occurs in any text.
        if token or not re.search(r"\w\w", self.answers):
            return token
        at = text.find(self.asks)
        return self.answers if at >= 0 and text.find(self.answers, at) >= 0 else ""
