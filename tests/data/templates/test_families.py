"""The learnt text of conversations by every family of chat templates, in literal strings.

Expectations follow from a conversation and its family's notation (`templates.Family`), never from
the code under test; a cell is right, or refused for the family's own reason.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from templates import CALLS, FAMILIES, Family, Says, encoder, record, thinking, turns_of, written

from conf.errors import InputError
from data.rows.records import Record

NOT_RENDERED = "does not render tool calls"
THINKS = Says("I am fine.", "Am I?\nFine, yes.")
AGAIN = Says("Yes", "Hm.")
CONVERSATIONS: dict[str, list[str | Says]] = {
    "single": ["Hi", Says("Hello there")],
    "system": ["system: Be kind", "Hi", Says("Hello there"), "And you?", Says("I am fine.")],
    "spaces": [
        "Hi", Says("  padded  "), "And?", Says("\nHello\n"), "So?", Says("\n\nYes\n\n"),
        "Hi", Says("I am fine.\n\nYes, no.\n\n\nb"),
    ],
    "echoes": [
        "Hello there", Says("Hello there"), "user", Says("assistant"), "system", Says("user"),
        "👋🏽", Says("👩‍👩‍👧‍👦 naïve 🙂🙂"), "So?", Says("👩‍👩‍👧‍👦 naïve 🙂🙂"),
    ],
    "thinking": ["Hi", THINKS, "So?", AGAIN, "Yes", Says("Yes")],
    "thinking quoted": ["system: Yes, Hi", "Hi", AGAIN, "Yes", Says("Hi", "b")],
    "inline": ["Hi", Says("Hello there", "Hm.", inline=True)],
    "call": ["Where?", CALLS, "tool: Sunny", Says("It is sunny.")],
    "call thinking": ["Where?", CALLS._replace(thought="Hm."), "tool: Sunny", Says("Sun.", "Ah.")],
}  # fmt: skip


def reason(notes: Family, said: Record) -> str:
    """Why the family refuses a conversation; empty if it does not."""
    for message in said.messages:
        if message["role"] == "system" and "system" in notes.refuses:
            return notes.refuses["system"]
        if message.get("tool_calls") and not notes.call:
            return notes.refuses.get("calls", NOT_RENDERED)
        thinks = message.get("reasoning_content") or "</think>" in message["content"]
        if thinks and "thinking" in notes.refuses:
            return notes.refuses["thinking"]
        if thinks and message.get("tool_calls") and "calls behind thinking" in notes.refuses:
            return notes.refuses["calls behind thinking"]
    return ""


def check_learnt(family: str, turns: list[str | Says]) -> None:
    """What the model would write is learnt, behind its prompt; or the family's refusal."""
    notes, said, encodes = FAMILIES[family], record(turns), encoder(family)
    why = reason(notes, said)
    if why:
        with pytest.raises(InputError) as caught:
            encodes.encode_record(said)
        words = f"chats.jsonl:7: the target's chat template {why}"
        assert str(caught.value).startswith(words)
        return
    samples = encodes.encode_record(said)
    found, answers = turns_of(samples, family), [turn for turn in turns if isinstance(turn, Says)]
    assert [learnt for _, learnt in found] == [written(notes, turn) for turn in answers]
    lost = [turn for turn in answers if turn.thought and "{}" not in thinking(notes, turn)]
    assert samples[0].unrendered_parts == ("thinking",) * len(lost)
    assert not any(sample.unrendered_parts for sample in samples[1:])
    template, tokenizer = encodes.build_template({}, said.tools), encodes.tokenizer
    indices = [i for i, m in enumerate(said.messages) if m["role"] == "assistant"]
    for index, turn, (before, _) in zip(indices, answers, found, strict=True):
        prompt = template.render_prompt(said.messages[:index], said.tools)
        if "{}" not in thinking(notes, turn):
            call_blank = notes.blank if notes.call_blank is None else notes.call_blank
            blank = call_blank if turn.calls else notes.blank
            prompt = prompt.removesuffix(notes.opens) + blank * prompt.endswith(notes.opens)
        # Tokens may swallow a line break, which the prompt then loses as well.
        assert before == tokenizer.decode(tokenizer(prompt, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_what_the_model_would_write_is_learnt_or_refused(family: str, name: str) -> None:
    check_learnt(family, CONVERSATIONS[name])


TEXTS = st.lists(
    st.sampled_from(["Yes", "user", "assistant", "I am fine.\n\nNo", "naïve 🙂", "a  b"]),
    min_size=1, max_size=3,
).map(" ".join)  # fmt: skip
THOUGHTS = st.sampled_from(["", "Hm.", "Am I?\nFine, yes."])
ANSWERS = st.tuples(TEXTS, THOUGHTS, st.booleans()).map(
    lambda each: Says(each[0], each[1], inline=each[2] and each[1] != "")
)
CALLED = THOUGHTS.map(lambda thought: [CALLS._replace(thought=thought), "tool: Sunny"])
ROUNDS = st.tuples(TEXTS, st.one_of(st.just([]), CALLED), ANSWERS)


@given(st.sampled_from([*FAMILIES]), st.booleans(), st.lists(ROUNDS, min_size=1, max_size=4))
def test_masks_cover_exactly_the_answers_of_any_alternation_of_turns(family, system, rounds):
    turns = [turn for asked, called, answer in rounds for turn in (asked, *called, answer)]
    check_learnt(family, ["system: Be kind"] * system + turns)
