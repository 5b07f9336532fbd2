import pytest
from toys import CHATML, tokenizer

from conf.errors import InputError
from data.rows.records import Record
from data.templates.record_encoder import RecordEncoder
from eval.measure.prompts import (
    Prompt,
    render_first_turns,
    render_next_turn,
    select_process_prompts,
)

SYSTEM = {"role": "system", "content": "Be kind"}
END = 2  # <|im_end|>
# Strips the thinking of earlier turns, as Qwen3's template does.
THINKING = CHATML.replace("m['content']", "m['content'].split('</think>')[-1].lstrip()")
NO_EMPTY_TURN = (
    "{% for m in messages %}{% if not m['content'] %}{{ raise_exception('empty turn') }}"
    "{% endif %}{% endfor %}" + CHATML
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def record(*messages: dict[str, str], category: str = "all", line: int = 1) -> Record:
    return Record(list(messages), None, f"chats.jsonl:{line}", category)


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def rendered(prompts: list[Prompt]) -> list[str]:
    return [tokenizer().decode(prompt.token_ids) for prompt in prompts]


TWO_TURNS = record(user("Hi"), user("And you?"), category="chat")


def test_first_turns_end_where_the_answer_begins():
    records = [
        TWO_TURNS,
        record(SYSTEM, user("Who?"), assistant("Me"), user("Why?"), category="qa", line=2),
    ]
    prompts = render_first_turns(records, RecordEncoder(tokenizer()))
    assert rendered(prompts) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n",
    ]
    assert [(p.category, p.dialogue, p.turn, p.question) for p in prompts] == [
        ("chat", 0, 1, "Hi"), ("qa", 1, 1, "Who?"),
    ]  # fmt: skip


def render_next_turns(records, prompts, answers, encoder) -> list[Prompt]:
    pairs = zip(prompts, answers, strict=True)
    turns = (render_next_turn(records[p.dialogue], p, ids, encoder) for p, ids in pairs)
    return [prompt for turn in turns for prompt in turn]


@pytest.mark.parametrize(
    ("template", "answer", "shown"),
    [
        (CHATML, "fine, thanks.<|im_end|>", "fine, thanks."),
        (CHATML, "<|im_end|>", ""),
        (THINKING, "<think>\nhello?\n</think>\n\nfine", "fine"),
    ],
)
def test_the_second_turn_follows_the_targets_answer_as_the_template_writes_it(
    template, answer, shown
):
    encoder = RecordEncoder(tokenizer(template))
    prompts = render_first_turns([TWO_TURNS], encoder)
    (prompt,) = following = render_next_turns([TWO_TURNS], prompts, [ids(answer)], encoder)
    assert rendered(following) == [
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{shown}<|im_end|>\n"
        "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert (prompt.category, prompt.dialogue, prompt.turn) == ("chat", 0, 2)
    assert prompt.question == "And you?"


def test_answers_of_the_data_set_are_not_used():
    own = record(
        SYSTEM, user("Who?"), assistant("ignored"), {"role": "tool", "content": "ignored"},
        assistant("ignored"), user("Why?"), assistant("ignored"), user("When?"),
    )  # fmt: skip
    prompts = render_first_turns([own], RecordEncoder(tokenizer()))
    for answer in ("me", "so"):
        prompts = render_next_turns([own], prompts, [ids(answer)], RecordEncoder(tokenizer()))
    assert rendered(prompts) == [
        "<|im_start|>system\nBe kind<|im_end|>\n"
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nme<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
        "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert prompts[0].turn == 3
    assert render_next_turns([own], prompts, [ids("now")], RecordEncoder(tokenizer())) == []


def test_dialogues_without_a_further_question_drop_out():
    records = [record(user("a")), TWO_TURNS, record(user("b"), assistant("c"))]
    prompts = render_first_turns(records, RecordEncoder(tokenizer()))
    following = render_next_turns(
        records, prompts, [ids("x"), ids("y"), ids("z")], RecordEncoder(tokenizer())
    )
    assert [(p.dialogue, p.turn) for p in following] == [(1, 2)]
    assert "assistant\ny<|im_end|>" in rendered(following)[0]


@pytest.mark.parametrize(
    "nothing", [record(SYSTEM, line=7), Record(None, "Once upon", "chats.jsonl:7")]
)
def test_a_record_without_a_question_is_refused(nothing):
    message = r"chats.jsonl:7: has no user message to answer, but measuring needs prompts"
    with pytest.raises(InputError, match=message):
        render_first_turns([TWO_TURNS, nothing], RecordEncoder(tokenizer()))


def test_what_the_template_refuses_is_named():
    strict = RecordEncoder(tokenizer(NO_EMPTY_TURN))
    prompts = render_first_turns([TWO_TURNS], strict)
    with pytest.raises(InputError, match=r"chats.jsonl:1, turn 2: .*refuses .*: empty turn"):
        render_next_turns([TWO_TURNS], prompts, [[END]], strict)


def of_dialogues(*dialogues: int) -> list[Prompt]:
    return [Prompt("all", [], dialogue) for dialogue in dialogues]


def test_dialogues_are_dealt_round():
    prompts = of_dialogues(0, 1, 2, 3, 4, 0, 1, 2)
    assert select_process_prompts(prompts, 0, 2) == of_dialogues(0, 2, 4, 0, 2)
    assert select_process_prompts(prompts, 1, 2) == of_dialogues(1, 3, 1)
