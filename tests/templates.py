"""Families of chat templates with what each makes learnt, and conversations to render.

`data/templates/families` holds each family's template, as small as its structure allows, and
`families.toml` its notation. What a family makes learnt of a turn is, in this order,

    think or inline, lead, the content as `says` leaves it, call, close

with the model's thinking and the call's own text put in. `blank` and `opens` say how what was read
differs from the generation prompt.
"""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import processors as post_processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.rows.records import Record
from data.templates.record_encoder import RecordEncoder, Sample

FOLDER = Path(__file__).parent / "data/templates/families"
VERBATIM = "<think>\n{}\n</think>\n\n"
"""The form of thinking inside the content of a conversation."""
SAYS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
    "lstrip line breaks": lambda text: text.lstrip("\n"),
    "strip, no blank lines": lambda text: text.replace("\n\n", "\n").strip(),
}
REFUSALS = {
    "roles alternate": "refuses the conversation: Conversation roles must alternate "
    "user/assistant/user/assistant/...",
    "no system role": "refuses the conversation: System role not supported",
    "no tool role": "refuses the conversation: Only user and assistant roles are supported!",
    "elsewhere": "renders an answer elsewhere than after its generation prompt",
}


@dataclass(frozen=True)
class Family:
    """A section of `families.toml`; `like` names a section whose values it takes over."""

    template: str | dict[str, str]
    """Its own, or that of the family that it is like; by name where there are several."""
    special: str = ""
    """Its special tokens, apart by spaces."""
    close: str = ""
    """The end of a turn: the end-of-turn token, and the text that the model writes before it."""
    lead: str = ""
    """Text between the generation prompt and the answer's text."""
    says: Callable[[str], str] = str
    """The spacing of contents; unchanged by default."""
    think: str = ""
    """The form of `reasoning_content`; empty where the template drops it."""
    inline: str = VERBATIM
    """The same of thinking inside a content, which most templates leave as it is."""
    call: str = ""
    """A call of look(at="Oslo"); empty where the template renders none."""
    call_think: str | None = None
    """As `think`, where a turn with a call differs; so with the others below."""
    call_lead: str = ""
    call_close: str | None = None
    blank: str = ""
    """The empty thinking that a turn without any has behind its prompt, in place of `opens`."""
    call_blank: str | None = None
    opens: str = ""
    """The end of a prompt that only turns with thinking go on from."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Refused parts (system, calls, thinking, calls behind thinking), and the words for each."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    bos: str = "<s>"
    eos: str = "</s>"
    added: str = ""
    """Tokens that are never split and not special, such as `<think>`."""
    strips_right: bool = False
    """Special tokens swallow the white space after them (Phi-3)."""


def load_template(name: str) -> str:
    """A template that is of no family."""
    return (FOLDER.parent / f"{name}.jinja").read_text().removesuffix("\n")


def load_families() -> dict[str, Family]:
    families: dict[str, Family] = {}
    sections = tomllib.loads((FOLDER / "families.toml").read_text())
    for name, notes in sections.items():
        given: dict[str, Any] = dict(notes)
        own, of_tools = FOLDER / f"{name}.jinja", FOLDER / f"{name}.tool_use.jinja"
        if own.exists():
            given["template"] = own.read_text()
        if of_tools.exists():
            given["template"] = {"default": given["template"], "tool_use": of_tools.read_text()}
        if "says" in given:
            given["says"] = SAYS[given["says"]]
        if "refuses" in given:
            given["refuses"] = {part: REFUSALS[why] for part, why in given["refuses"].items()}
        like = given.pop("like", None)
        families[name] = replace(families[like], **given) if like else Family(**given)
    return families


FAMILIES = load_families()
CHATML = load_template("chatml")
REFUSE = "{% if m.content == 'refuse me' %}{{ raise_exception('refused') }}{% endif %}"
REFUSING = CHATML.replace("%}", "%}" + REFUSE, 1)
# `{% generation %}` marks what others learn; here it is around the header, and not the end.
TAGGED = load_template("tagged")
NO_SPECIAL = load_template("no_special")
HEADER = "<|im_start|>assistant\n"
HI = f"<|im_start|>user\nHi<|im_end|>\n{HEADER}"
"""A question and the prompt for its answer, in ChatML."""
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>",
    "<think>", "</think>",
)  # fmt: skip
TRAINING = ["Hello there, how are you?", "user", "assistant", "I am fine.\n\nYes, no.", "\n\n\n\n"]


@cache
def _train(special: tuple[str, ...], trim_offsets: bool) -> str:
    """A byte-level tokenizer of 500 tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=trim_offsets
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    if trim_offsets:
        tokenizer.post_processor = post_processors.ByteLevel(trim_offsets=True)
    return tokenizer.to_str()


def make_tokenizer(
    template: str | dict[str, str] | None,
    *,
    trim_offsets: bool = False,
    special: Iterable[str] = SPECIAL,
) -> PreTrainedTokenizerFast:
    """The first two special tokens begin and end a text."""
    bos, eos, *_ = special = tuple(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train(special, trim_offsets)),
        bos_token=bos,
        eos_token=eos,
        chat_template=template,
    )


@cache
def encoder(family: str) -> RecordEncoder:
    notes = FAMILIES[family]
    tokenizer = make_tokenizer(None, special=[notes.bos, notes.eos])
    named = [AddedToken(each, rstrip=notes.strips_right) for each in notes.special.split()]
    tokenizer.add_tokens(named, special_tokens=True)
    tokenizer.add_tokens(notes.added.split())
    tokenizer.chat_template = notes.template
    return RecordEncoder(tokenizer, notes.kwargs)


PROPERTIES = {"at": {"type": "string", "description": "town"}}
LOOK = {
    "type": "function",
    "function": {
        "name": "look", "description": "looks",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["at"]},
    },
}  # fmt: skip
OSLO = '{"name": "look", "arguments": {"at": "Oslo"}}'


class Says(NamedTuple):
    """An assistant's turn."""

    text: str
    thought: str = ""
    inline: bool = False
    """Its thinking stands in its content."""
    calls: bool = False


CALLS = Says("", calls=True)


def record(said: list[str | Says]) -> Record:
    """A conversation of questions, `role: text` of others, and the assistant's turns."""
    messages: list[dict[str, Any]] = []
    for each in said:
        if isinstance(each, Says):
            messages.append(assistant(each))
        elif each.startswith("tool: "):
            named = {"name": "look", "tool_call_id": "callnine1"}
            messages.append({"role": "tool", "content": each.removeprefix("tool: "), **named})
        else:
            role, _, text = each.rpartition(": ")
            messages.append({"role": role or "user", "content": text})
    tools = [LOOK] if any(message.get("tool_calls") for message in messages) else None
    return Record(messages, None, "chats.jsonl:7", tools=tools)


def chat(*contents: str, system: str | None = None) -> Record:
    """A conversation whose texts are asked and answered in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Record(messages, None, "chats.jsonl:7")


def assistant(turn: Says) -> dict[str, Any]:
    inline = VERBATIM.replace("{}", turn.thought) if turn.inline else ""
    message: dict[str, Any] = {"role": "assistant", "content": inline + turn.text}
    if turn.thought and not turn.inline:
        message["reasoning_content"] = turn.thought
    if turn.calls:
        function = {"name": "look", "arguments": {"at": "Oslo"}}
        message["tool_calls"] = [{"id": "callnine1", "type": "function", "function": function}]
    return message


def thinking(notes: Family, turn: Says) -> str:
    """The family's notation of the thinking of a turn; empty where there is none."""
    shown = notes.inline if turn.inline else notes.think
    if turn.calls and notes.call_think is not None:
        shown = notes.call_think
    return shown if turn.thought else ""


def written(notes: Family, turn: Says) -> str:
    """The text that the model writes in a turn, from the family's notation alone."""
    shown = thinking(notes, turn).replace("{}", turn.thought)
    close = notes.close
    if turn.calls:
        close = close if notes.call_close is None else notes.call_close
        return shown + notes.call_lead + notes.call + close
    if turn.inline:
        return notes.lead + shown + notes.says(turn.text) + close
    return shown + notes.lead + notes.says(turn.text) + close


def learnt(sample: Sample) -> list[int]:
    return [i for i, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]


def learnt_runs(sample: Sample) -> list[tuple[int, int]]:
    """Begin and end of every run of learnt tokens."""
    runs, place = [], 0
    for on, run in groupby(sample.loss_mask):
        end = place + len(list(run))
        runs += [(place, end)] if on else []
        place = end
    return runs


def turns_of(samples: list[Sample], family: str) -> list[tuple[str, str]]:
    """The text before each learnt run, and the run, decoded."""
    decode = encoder(family).tokenizer.decode
    return [
        (decode(sample.input_ids[:begin]), decode(sample.input_ids[begin:end]))
        for sample in samples
        for begin, end in learnt_runs(sample)
    ]


def shown(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded sample with learnt tokens in [[ ]]."""
    assert len(sample.input_ids) == len(sample.loss_mask)
    text, place = "", 0
    for begin, end in learnt_runs(sample):
        text += tokenizer.decode(sample.input_ids[place:begin])
        text += f"[[{tokenizer.decode(sample.input_ids[begin:end])}]]"
        place = end
    return text + tokenizer.decode(sample.input_ids[place:])


def marked(record: Record, template: str, **settings: bool) -> list[str]:
    tokenizer = make_tokenizer(template, **settings)
    return [shown(sample, tokenizer) for sample in RecordEncoder(tokenizer).encode_record(record)]
