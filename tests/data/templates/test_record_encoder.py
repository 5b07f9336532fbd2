"""Every template below is rendered with the same small byte-level tokenizer; no network."""

import pytest
from templates import (
    CHATML,
    HI,
    NO_SPECIAL,
    TAGGED,
    chat,
    encoder,
    make_tokenizer,
    marked,
    shown,
)

from conf.errors import InputError
from data.templates.record_encoder import RecordEncoder


def test_mask_of_a_short_chat_token_by_token():
    tokenizer = make_tokenizer(CHATML)
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("user", "Yes"))
    assert tokenizer.convert_ids_to_tokens(sample.input_ids) == [
        "<|im_start|>", "user", "Ċ", "user", "<|im_end|>", "Ċ",
        "<|im_start|>", "assistant", "Ċ", "Yes", "<|im_end|>", "Ċ",
    ]  # fmt: skip
    assert sample.loss_mask == [False] * 9 + [True, True, False]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            TAGGED,
            "<s><|system|>\nBe kind<|end|>\n<|user|>\nHi<|end|>\n"
            "<|assistant|>\n[[Hello there<|end|>]]\n<|user|>\nAnd you?<|end|>\n"
            "<|assistant|>\n[[Fine.\n\nYes<|end|>]]\n",
        ),
        (
            NO_SPECIAL,
            "### system: Be kind\n### user: Hi\n### assistant: [[Hello there]]\n"
            "### user: And you?\n### assistant: [[Fine.\n\nYes]]\n",
        ),
    ],
    ids=["tagged", "no-special"],
)
def test_exactly_the_assistant_is_learnt(template, expected, trim_offsets):
    said = chat("Hi", "Hello there", "And you?", "Fine.\n\nYes", system="Be kind")
    assert marked(said, template, trim_offsets=trim_offsets) == [expected]


@pytest.mark.parametrize("answer", ["naïve 🙂🙂", "  padded  \n", "a   b \n\n c", "日本語。"])
def test_odd_characters_and_spaces_stay_inside_the_mask(answer):
    """Of a tokenizer that cuts spaces off its offsets."""
    text = "".join(marked(chat("Hi", answer, "🙂", answer), TAGGED, trim_offsets=True))
    turns = [part.split("]]")[0] for part in text.split("[[")[1:]]
    assert [turn.partition("<|")[0].strip() for turn in turns] == [answer.strip()] * 2


def test_thinking_is_learnt_when_the_template_spaces_it_differently():
    (sample,) = encoder("qwen3").encode_record(chat("Hi", "<think>Hm.</think>Hello"))
    text = HI + "[[<think>\nHm.\n</think>\n\nHello<|im_end|>]]\n"
    assert shown(sample, encoder("qwen3").tokenizer) == text


def test_a_prompt_that_nobody_answers_is_read():
    assert marked(chat("Hi"), CHATML) == ["<|im_start|>user\nHi<|im_end|>\n"]
    (text,) = marked(chat("Hi", "Yes", "So?"), CHATML)
    assert text == HI + "[[Yes<|im_end|>]]\n<|im_start|>user\nSo?<|im_end|>\n"


def test_prompt_ends_where_the_assistant_starts():
    tokenizer = make_tokenizer(CHATML)
    ids = RecordEncoder(tokenizer).encode_prompt([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == HI


def test_a_template_is_chosen_by_its_name() -> None:
    other = CHATML.replace("<|im_start|>", "<|rag|>")
    tokenizer = make_tokenizer({"plain": CHATML, "rag": other})
    messages = [{"role": "user", "content": "hello"}]
    for wanted, begins in (({"chat_template": "rag"}, "<|rag|>user"),
                           ({"chat_template": "plain"}, "<|im_start|>user"),
                           ({"chat_template": other}, "<|rag|>user")):  # fmt: skip
        template = RecordEncoder(tokenizer, wanted).build_template({}, None)
        assert template.render_prompt(messages).startswith(begins)
    said = r"chat template '(default|rags)'; set .*{chat_template: NAME}.* \['plain', 'rag'\]"
    for wanted in ({}, {"chat_template": "rags"}):
        with pytest.raises(InputError, match=said):
            RecordEncoder(tokenizer, wanted).build_template({}, None)
