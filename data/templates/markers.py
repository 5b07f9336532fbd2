"""Texts that are rendered dialogues: of those all would be learnt, the questions too."""

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
    """Returns what says that a text is a dialogue, rendered for whatever model; or nothing."""
    found = ROLE_TOKEN.search(text)
    if found:
        return found.group()
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
    """Returns what a prompt begins with if that is a rendered turn; or nothing."""
    found = BEGIN.match(prompt)
    return found.group().strip() if found else ""


@dataclass(frozen=True)
class Markers:
    """What the target's own template puts around turns.

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
        """Taps them off a rendering of known texts; none where it is refused."""
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
            tuple(dict.fromkeys(each for each in tokens if each not in ends)),
            asks.strip(),
            shared_start(first, second).strip(),
        )

    def find(self, text: str) -> str:
        """Returns what says that a text is rendered as the target's dialogues are; or nothing."""
        token = next((each for each in self.tokens if each in text), "")
        # A lone sign, as some templates put behind a question, stands in any text.
        if token or not re.search(r"\w\w", self.answers):
            return token
        at = text.find(self.asks)
        return self.answers if at >= 0 and text.find(self.answers, at) >= 0 else ""
