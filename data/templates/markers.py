"""Tells texts that are rendered dialogues: all of one would be learnt, the questions too."""

import re
from dataclasses import dataclass

from conf.errors import InputError
from data.rows.values import MalformedRowError
from data.templates.template import ANSWER, QUESTION, ChatTemplate, probe, shared_start

ROLE = r"(im_start|start|bom|\w*(user|assistant|header|turn|role)\w*)"
ROLE_TOKEN = re.compile(
    rf"<[|\uff5c]{ROLE}[|\uff5c]?>|\[\|{ROLE}\|\]|<start_of_turn>", re.IGNORECASE | re.ASCII
)
BEGIN = re.compile(rf"\s*(<[^<>\s]+>\s*)?({ROLE_TOKEN.pattern}|\[INST\])", re.IGNORECASE)
"""What a rendered prompt begins with, perhaps behind what begins any text."""
WORDS = (
    ("[INST]", "[/INST]"),
    ("### Assistant",),
    ("### Instruction", "### Response"),
    ("Human:", "\nAssistant:"),
    ("User:", "\nAssistant:"),
    ("USER:", "ASSISTANT:"),
)
"""All strings of one line stand in a dialogue of a common template without such tokens."""


def turn_marker(text: str) -> str:
    """The marker of turns in a text that is a dialogue, rendered for whatever model; or nothing."""
    token = ROLE_TOKEN.search(text)
    if token:
        return token.group()
    return next((words[-1].strip() for words in WORDS if all(w in text for w in words)), "")


def refuse_dialogue(marker: str) -> None:
    """Refuses a text in which a marker of turns was found.

    Raises:
        MalformedRowError: there is one.
    """
    if marker:
        raise MalformedRowError(
            "text",
            f"a whole dialogue (turn marker {marker!r})",
            "messages, of which answers are learnt; data.form=text learns all of it as it is",
        )


def begins_rendered(prompt: str) -> str:
    """The beginning of a prompt, if that is a rendered turn; or nothing."""
    begin = BEGIN.match(prompt)
    return begin.group().strip() if begin else ""


@dataclass(frozen=True)
class Markers:
    """Tokens and texts that the target's own template puts around turns.

    Attributes:
        tokens: special tokens between turns; those that begin and end any text are none.
        asks: before a question.
        answers: before an answer.
    """

    tokens: tuple[str, ...] = ()
    asks: str = ""
    answers: str = ""

    @classmethod
    def of(cls, template: ChatTemplate) -> "Markers":
        """The markers in a rendering of known texts; none where it is refused."""
        question, answer, _ = probe(calls=False)
        try:
            text = template.through([question, answer, question, answer])
        except InputError:
            return cls()
        pieces = re.split(f"{QUESTION}|{ANSWER}", text)
        if len(pieces) != 5:
            return cls()
        start, first, between, second, _ = pieces
        asks = shared_start(start[::-1], between[::-1])[::-1]
        tokenizer = template.tokenizer
        ends = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
        tokens = re.findall(template.stop_pattern, first + between + second)
        return cls(
            tuple(dict.fromkeys(token for token in tokens if token not in ends)),
            asks.strip(),
            shared_start(first, second).strip(),
        )

    def find(self, text: str) -> str:
        """The marker of a text that is rendered as the target's dialogues are; or nothing."""
        token = next((token for token in self.tokens if token in text), "")
        # A lone sign, as some templates put behind a question, stands in any text.
        if token or not re.search(r"\w\w", self.answers):
            return token
        at = text.find(self.asks)
        return self.answers if at >= 0 and text.find(self.answers, at) >= 0 else ""
