"""Long conversations, calls, ids as the model wrote them, and what a record says besides."""

import copy
import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from templates import (
    CALLS,
    CHATML,
    FAMILIES,
    HEADER,
    HI,
    LOOK,
    OSLO,
    Says,
    chat,
    encoder,
    learnt,
    make_tokenizer,
    marked,
    record,
    shown,
    turns_of,
    written,
)

from conf.errors import InputError
from conf.settings.data import Form
from data.rows.data_files import Row
from data.rows.records import Record, parse_record
from data.templates.record_encoder import RecordEncoder, Sample, encode_text
from data.templates.turns import find_turn, find_turns

ANSWERS = [Says(f"I am {i}.\n\nno " * (i % 5 + 1)) for i in range(20)]
LONG = [each for i, answer in enumerate(ANSWERS) for each in (f"{i}?\n\nYes", answer)]
# Every turn behind one header, behind empty thinking, behind a header that the prompt goes on from.
ALIGNED = ("chatml", "llama-3.1", "gemma-3", "olmo", "exaone-4", "nemotron-3", "deepseek-r1")
# No header, an end that depends on what follows, turns that change when they are read again.
APART = ("mistral-nemo", "glm-5", "command-r7b")


def own_turns(said: Record, indices: list[int], family: str) -> list[tuple[str, str]]:
    template = encoder(family).build_template({}, None)
    turns = [find_turn(said.messages[: i + 1], template) for i in indices]
    return [(turn.prompt, turn.written) for turn in turns]


@pytest.mark.parametrize("family", [*ALIGNED, *APART])
def test_turns_of_a_long_conversation_are_those_of_its_parts(family, monkeypatch) -> None:
    said = record(LONG)
    template, indices = encoder(family).build_template({}, None), list(range(1, 40, 2))
    rendered: list[int] = []
    through = template.render_conversation

    def counted(messages: list[dict], tools: list[dict] | None = None) -> str:
        rendered.append(len(messages))
        return through(messages, tools)

    template.find_turn_ending(calls=False)
    monkeypatch.setattr(template, "render_conversation", counted)
    found = [(t.prompt, t.written) for t in find_turns(said.messages, indices, template, None)]
    assert len(rendered) < 15 if family in ALIGNED else len(rendered) >= 20
    assert [text for _, text in found] == [written(FAMILIES[family], turn) for turn in ANSWERS]
    assert found[::6] == own_turns(said, indices[::6], family)


ASKED = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "quoted",
    ["We write " + HEADER, HEADER, "<|im_end|>", "a<|im_end|>\n" + HEADER + "b<|im_end|>\nc"],
)
@pytest.mark.parametrize("asked", [True, False])
def test_a_long_conversation_that_quotes_its_own_header(quoted: str, asked: bool) -> None:
    contents = long_contents()
    contents[8 if asked else 9] = f"See {quoted}!"
    tokenizer = make_tokenizer(CHATML)
    (sample,) = RecordEncoder(tokenizer).encode_record(chat(*contents))
    assert tokenizer.decode(learnt(sample)) == "".join(
        f"{text}<|im_end|>" for text in contents[1::2]
    )


def long_contents() -> list[str]:
    return [text for i in range(10) for text in (f"{i}?", f"Yes {i}")]


def test_a_long_conversation_whose_template_shortens_an_answer() -> None:
    contents = long_contents()
    contents[5] = "a" + "\n" * 40 + "b"
    (text,) = marked(chat(*contents), CHATML.replace("m.content", "m.content.replace('\n', '')"))
    contents[5] = "ab"
    assert [part.split("]]")[0] for part in text.split("[[")[1:]] == [
        f"{answer}<|im_end|>" for answer in contents[1::2]
    ]


def test_a_long_conversation_whose_template_shows_the_system_message_once() -> None:
    """Before the last question, as Mistral's: every turn was written behind it."""
    last = "{% if m.role == 'user' and messages[loop.index0 + 2:] == [] %}{{ system }}{% endif %}"
    pop = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}"
    )
    template = pop + CHATML.replace("{{ m.content }}", last + "{{ m.content }}")
    texts = marked(chat(*long_contents(), system="Be kind. "), template)
    assert [text.partition("[[")[0].count("Be kind. ") for text in texts] == [1] * 10
    assert texts[3].endswith(f"Be kind. 3?<|im_end|>\n{HEADER}[[Yes 3<|im_end|>]]")


def test_an_answer_that_quotes_what_the_template_forbids_is_refused() -> None:
    contents = long_contents()
    contents[5] = "<|start|>assistant<|channel|>final<|message|>No"
    with pytest.raises(InputError, match=r"^chats.jsonl:7: .* Pass thinking apart!$"):
        encoder("gpt-oss").encode_record(chat(*contents))


@pytest.mark.parametrize("family", [f for f, notes in FAMILIES.items() if notes.call])
def test_calls_are_closed_whatever_their_last_argument(family: str) -> None:
    for value, expected in ((5, "5"), ("</tool_call>", '"</tool_call>"')):
        said = record(["Where?", CALLS])
        said.messages[1]["tool_calls"][0]["function"]["arguments"]["at"] = value
        ((_, found),) = turns_of(encoder(family).encode_record(said), family)
        call = written(FAMILIES[family], CALLS).replace('"Oslo"', expected)
        # What a template makes of `<` in JSON is its own.
        found = found.replace("\\u003c", "<").replace("\\u003e", ">")
        assert found == call.replace("Oslo", str(value))


def test_text_and_several_calls_are_learnt_together() -> None:
    said = record(["Where?", CALLS, "tool: Sunny", Says("Sun.")])
    said.messages[1]["content"] = "I look."
    said.messages[1]["tool_calls"] *= 2
    call = f"<tool_call>\n{OSLO}\n</tool_call>"
    ((_, first), (_, last)) = turns_of(encoder("qwen3").encode_record(said), "qwen3")
    assert first == f"I look.\n{call}\n{call}<|im_end|>"
    assert last == "Sun.<|im_end|>"


def test_calls_without_arguments() -> None:
    said = record(["Where?", CALLS])
    said.messages[1]["tool_calls"][0]["function"]["arguments"] = {}
    ((_, first),) = turns_of(encoder("qwen2.5").encode_record(said), "qwen2.5")
    assert first == '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'


def test_a_template_may_ask_whose_result_a_result_is() -> None:
    tokenizer = copy.deepcopy(encoder("qwen2.5").tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'tool' and not (m.name and m.tool_call_id) %}"
        "{{ raise_exception('whose result?') }}{% endfor %}" + tokenizer.chat_template
    )
    said = record(["Where?", CALLS])
    assert RecordEncoder(tokenizer).encode_record(said) == encoder("qwen2.5").encode_record(said)


def test_a_call_that_is_not_rendered_is_refused_by_name() -> None:
    """This one renders calls, of one function alone."""
    source, each = FAMILIES["qwen3-2507"].template, "for c in m.tool_calls"
    tokenizer = make_tokenizer(source.replace(each, f"{each} if c.function.name == 'look'"))
    said = record(["Where?", CALLS])
    said.messages[1]["tool_calls"][0]["function"]["name"] = "find"
    with pytest.raises(InputError, match=r"does not render the call of find of the assistant"):
        RecordEncoder(tokenizer).encode_record(said)


def test_a_line_break_of_the_answer_never_joins_the_headers() -> None:
    tokenizer = make_tokenizer(CHATML)
    joined, read = (tokenizer(text)["input_ids"] for text in (HI + "\n\n\nYes", HI))
    assert tokenizer.convert_ids_to_tokens(joined)[-4:] == ["ĊĊ", "Ċ", "Ċ", "Yes"]
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("Hi", "\n\n\nYes"))
    assert sample.input_ids[: len(read)] == read
    assert tokenizer.convert_ids_to_tokens(learnt(sample)) == ["ĊĊ", "Ċ", "Yes", "<|im_end|>"]


def test_a_line_break_of_the_answer_never_joins_what_follows() -> None:
    template = (
        "{% for m in messages %}{{ '# ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '# assistant\n' }}{% endif %}"
    )
    assert marked(chat("Hi", "Yes\n", "So?", "No"), template) == [
        "# user\nHi\n\n# assistant\n[[Yes\n]]\n\n# user\nSo?\n\n# assistant\n[[No]]\n\n"
    ]


class Spaces:
    """Tokens are words with the space before them, and spaces."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        found = list(re.finditer(r" ?\S+| +", text))
        return {
            "input_ids": [m.group() for m in found],
            "offset_mapping": [m.span() for m in found],
        }

    def decode(self, ids: list[str]) -> str:
        return "".join(ids)


def test_spaces_of_an_answer_never_join_those_that_follow() -> None:
    text, written = "x: yes   ", (3, 8)
    tokens = encode_text(text, list(written), Spaces())  # type: ignore[arg-type]
    assert tokens.ids == ["x:", " yes", "  ", " "]
    assert (tokens.starts, tokens.ends) == ([0, 2, 6, 8], [2, 6, 8, 9])


def given(written_ids: dict[int, list[str]], *contents: str) -> tuple[list[str], list[Sample]]:
    """A chat in ChatML with turns as the model wrote them, in tokens."""
    tokenizer = make_tokenizer(CHATML)
    ids = {i: tokenizer.convert_tokens_to_ids(tokens) for i, tokens in written_ids.items()}
    samples = RecordEncoder(tokenizer).encode_record(replace(chat(*contents), written_ids=ids))
    return [shown(sample, tokenizer) for sample in samples], samples


def test_turns_written_as_the_tokenizer_would_are_joined() -> None:
    texts, _ = given({1: ["Yes", "<|im_end|>"]}, "Hi", "Yes", "So?", "No")
    so = "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [HI + f"[[Yes<|im_end|>]]\n{so}[[No<|im_end|>]]"]


def test_turns_written_in_other_tokens_are_learnt_in_those_and_apart() -> None:
    texts, samples = given({1: ["Y", "e", "s", "<|im_end|>"]}, "Hi", "Yes", "So?", "No")
    so = "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [HI + "[[Yes<|im_end|>]]", HI + f"Yes<|im_end|>\n{so}[[No<|im_end|>]]"]
    assert make_tokenizer(None).convert_ids_to_tokens(learnt(samples[0])) == [
        "Y", "e", "s", "<|im_end|>",
    ]  # fmt: skip


def test_a_turn_cut_short_is_learnt_without_its_end() -> None:
    """A model that ran out of tokens wrote none."""
    texts, _ = given({1: ["Yes"]}, "Hi", "Yes")
    assert texts == [HI + "[[Yes]]"]


def test_turns_that_are_not_to_be_learnt_are_read() -> None:
    said = replace(chat("Hi", "Yes", "So?", "No"), unlearnt_messages=frozenset({1}))
    so = "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert marked(said, CHATML) == [HI + f"Yes<|im_end|>\n{so}[[No<|im_end|>]]\n"]
    said = replace(chat("Hi", "Yes", "So?", "No"), unlearnt_messages=frozenset({3}))
    assert marked(said, CHATML) == [HI + f"[[Yes<|im_end|>]]\n{so}No<|im_end|>\n"]


def test_tokens_of_a_record_are_taken_as_they_are() -> None:
    said = Record(None, None, "tokens.jsonl:1", tokens=([5, 6, 7], [False, True, True]))
    assert RecordEncoder(make_tokenizer(None)).encode_record(said) == [
        Sample([5, 6, 7], [False, True, True])
    ]  # fmt: skip


def test_a_records_own_template_arguments_come_before_the_settings() -> None:
    each = "{{ m.role }}\n{{ mode + tone if m.role == 'assistant' else '' }}"
    template = CHATML.replace(HEADER, HEADER + "{{ mode + tone }}")
    tokenizer = make_tokenizer(template.replace("{{ m.role }}\n", each))
    run = RecordEncoder(tokenizer, {"mode": "user", "tone": "Yes"})
    plain, own = chat("Hi", "Hello"), replace(chat("Hi", "Hello"), template_kwargs={"mode": "no"})
    texts = [shown(run.encode_record(said)[0], tokenizer) for said in (plain, own, plain)]
    assert texts == [
        f"{HI}{shown_mode}[[Hello<|im_end|>]]\n" for shown_mode in ("userYes", "noYes", "userYes")
    ]


NO_SYSTEM = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")


@pytest.mark.parametrize(
    ("template", "change", "expected"),
    [
        (CHATML, {}, ()),
        (NO_SYSTEM, {}, ("a system message",)),
        (CHATML, {"tools": [LOOK]}, ("tools",)),
        (CHATML.replace("{% for", "{{ tools }}{% for", 1), {"tools": [LOOK]}, ()),
        (NO_SYSTEM, {"tools": [LOOK]}, ("tools", "a system message")),
    ],
)
def test_what_the_model_was_told_and_the_template_hides_is_named(template, change, expected):
    said = replace(chat("Hi", "Yes", "So?", "No", system="Be kind"), **change)
    (sample,) = RecordEncoder(make_tokenizer(template)).encode_record(said)
    assert sample.unrendered_parts == expected


def test_each_thinking_that_is_hidden_is_named_once() -> None:
    said = chat(*long_contents())
    said.messages[1]["reasoning_content"] = said.messages[5]["reasoning_content"] = "Hm."
    (sample,) = RecordEncoder(make_tokenizer(CHATML)).encode_record(said)
    assert sample.unrendered_parts == ("thinking", "thinking")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_templates_find_thinking_under_the_name_they_read(name: str) -> None:
    template = CHATML.replace("{{ m.content", "{{ '(' + m.NAME + ')' if m.NAME }}{{ m.content")
    said = chat("Hi", "Yes")
    said.messages[1]["reasoning_content"] = "Hm."
    (text,) = marked(said, template.replace("NAME", name))
    assert text == f"{HI}[[(Hm.)Yes<|im_end|>]]\n"


@pytest.mark.parametrize("thinking", ["<think>Hm.</think>", ""])
def test_words_of_thinking_that_the_settings_turn_off(thinking: str) -> None:
    said = chat("Hi", thinking + "Yes")
    if not thinking:
        said.messages[1]["reasoning_content"] = "Hm."
    with pytest.raises(InputError) as caught:
        encoder("qwen3-off").encode_record(said)
    assert str(caught.value).endswith(
        "'data.chat_template_kwargs={enable_thinking: true}' may be missing"
    )


def test_a_long_conversation_that_begins_with_a_greeting() -> None:
    """Its template cannot render a conversation of nothing, as many cannot."""
    tokenizer = make_tokenizer("{% if messages[0].role == 'system' %}{% endif %}" + CHATML)
    said = record([Says("Welcome"), *LONG])
    (sample,) = RecordEncoder(tokenizer).encode_record(said)
    assert sample.unrendered_parts == ("a greeting",)
    assert shown(sample, tokenizer).count("[[") == 20


def test_an_answer_to_nothing_is_not_learnt() -> None:
    said = Record([{"role": "assistant", "content": "Welcome"}], None, "here")
    (sample,) = RecordEncoder(make_tokenizer(CHATML)).encode_record(said)
    assert not any(sample.loss_mask)


def test_a_greeting_is_read_and_named() -> None:
    said = chat("Hi", "Yes")
    said.messages.insert(0, {"role": "assistant", "content": "Hello there"})
    tokenizer = make_tokenizer(CHATML)
    (sample,) = RecordEncoder(tokenizer).encode_record(said)
    assert sample.unrendered_parts == ("a greeting",)
    assert shown(sample, tokenizer) == f"{HEADER}Hello there<|im_end|>\n{HI}[[Yes<|im_end|>]]\n"


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ([], "[[Yes<|im_end|>]]\n{}Why?<|im_end|>\n{}[[Be<|im_end|>]]\n"),
        ([1], "[[Yes<|im_end|>]]\n{}Why?<|im_end|>\n{}[[Be]]<|im_end|>\n"),
        ([0, 1], "[[Yes]]<|im_end|>\n{}Why?<|im_end|>\n{}[[Be]]<|im_end|>\n"),
    ],
)
def test_the_end_of_an_answer_that_was_cut_off_is_read(cut: list[int], expected: str) -> None:
    why = {"role": "user", "content": "Why?"}
    said = [{"role": "assistant", "content": text} for text in ("Yes", "Be")]
    row = {"messages": [ASKED, said[0], why, said[1]], "truncated_turns": cut}
    (text,) = marked(parse_record(Row("here", value=row), Form.messages), CHATML)
    assert text.partition(HEADER)[2] == expected.format("<|im_start|>user\n", HEADER)


def test_thinking_that_was_cut_off_is_not_closed() -> None:
    thinks = {"role": "assistant", "content": "", "reasoning_content": "So they"}
    record = Record([ASKED, thinks], None, "here", truncated_messages=frozenset({1}))
    for family, expected in (("qwen3", "<think>\nSo they"), ("deepseek-r1", "")):
        (sample,) = encoder(family).encode_record(record)
        assert encoder(family).tokenizer.decode(learnt(sample)) == expected


NEMOTRON = "<function=look>\n<parameter=at>\nOslo\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2.5", f"<tool_call>\n{OSLO}\n</tool_call>"),
        # The line break before a call is the model's, that behind it was not reached.
        ("nemotron-3", f"\n<tool_call>\n{NEMOTRON}\n</tool_call>"),
    ],
)
def test_a_call_that_was_cut_off_is_not_closed(family: str, expected: str) -> None:
    said = replace(record(["Where?", CALLS]), truncated_messages=frozenset({1}))
    ((_, call),) = turns_of(encoder(family).encode_record(said), family)
    assert call == expected


def test_a_turn_of_which_the_template_shows_nothing_is_not_learnt() -> None:
    """Its end alone would teach the target to say nothing."""
    thinks = {"role": "assistant", "content": "", "reasoning_content": "So"}
    said = [ASKED, thinks, ASKED, {"role": "assistant", "content": "Yes"}]
    (sample,) = RecordEncoder(make_tokenizer(CHATML)).encode_record(Record(said, None, "here"))
    assert make_tokenizer(CHATML).decode(learnt(sample)) == "Yes<|im_end|>"
    assert sample.unrendered_parts == ("thinking",)
