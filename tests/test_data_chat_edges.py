"""Where rendering is rewritten, repeated or refused: exact masks and exact words."""

import pytest
from test_data_chat import (
    CHATML,
    ENDS_TEXT,
    GEMMA,
    NO_SPECIAL,
    OPENS_THINKING,
    QWEN3,
    TAGGED,
    chat,
    make_tokenizer,
    marked,
)
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from conf.schema import InputError
from data.chat import encode, encode_prompt

# Turns but the last lose what stands before `</think>`.
STRIPS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def adds_bos(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts `<s>` before every text of its own accord."""
    tokenizer = make_tokenizer(template)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("Yes")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def refused(template: str, *contents: str) -> str:
    with pytest.raises(InputError) as caught:
        encode(chat(*contents), make_tokenizer(template), 1000)
    return str(caught.value)


def test_what_the_tokenizer_would_add_is_the_templates_business() -> None:
    tokenizer = adds_bos(CHATML)
    plain = make_tokenizer(CHATML)
    messages = [{"role": "user", "content": "Hi"}]
    assert encode_prompt(messages, tokenizer) == encode_prompt(messages, plain)
    found, expected = (encode(chat("Hi", "Yes"), each, 100) for each in (tokenizer, plain))
    assert found == expected


def test_an_answer_that_the_tokenizer_rewrites_is_still_found() -> None:
    """The check decodes what is learnt; here nothing decodes to what was written."""
    tokenizer = adds_bos(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    sample = encode(chat("Hi", "YES, I am"), tokenizer, 100)
    learnt = [i for i, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]
    assert tokenizer.decode(learnt) == "yes, i am<|im_end|>"


def test_words_of_a_missing_template() -> None:
    tokenizer = make_tokenizer(None)
    rest = (
        "has no chat template, but the data are conversations: take the chat version of the "
        "model, put a chat_template.jinja into its folder, or give plain text (rows with a "
        "'text' field)"
    )
    for name, shown in (("", "(unnamed)"), ("org/base", "org/base")):
        tokenizer.name_or_path = name
        with pytest.raises(InputError) as caught:
            encode_prompt([{"role": "user", "content": "Hi"}], tokenizer)
        assert str(caught.value) == f"target {shown} {rest}"


def test_words_of_a_tokenizer_without_offsets() -> None:
    class Slow:
        chat_template, is_fast, name_or_path = CHATML, False, ""

    with pytest.raises(InputError, match=r"^target \(unnamed\): Slow gives no character offsets,"):
        encode(chat("Hi", "Hello"), Slow(), 1000)  # type: ignore[arg-type]


def test_words_of_a_tagged_template_that_refuses() -> None:
    template = TAGGED.replace("<s>", "<s>{{ raise_exception('No more') }}", 1)
    said = refused(template, "Hi", "Hello")
    assert said == "chats.jsonl:7: the target's chat template refuses the conversation: No more"


def test_a_tagged_template_knows_the_special_tokens() -> None:
    template = TAGGED.replace("'<|end|>' }}{% endgen", "eos_token }}{% endgen")
    assert marked(chat("Hi", "Yes"), template).endswith("<|assistant|>\n[[Yes</s>]]\n")


@pytest.mark.parametrize(("length", "cut"), [(2000, False), (2001, True)])
def test_words_of_an_answer_that_is_not_rendered(length: int, cut: bool) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    answer = "b" * 79 + "cd"
    text = "a" * length
    shown = text if not cut else "a" * 2000 + " ... (2001 characters)"
    assert refused(template, text, answer) == (
        f"chats.jsonl:7: the chat template does not render the assistant's text "
        f"'{'b' * 79}c'; rendered text:\n{shown}"
    )


def test_words_of_a_mask_that_learns_something_else() -> None:
    other = TAGGED.replace("m.content + '<|end|>' }}{% endgen", "('x' * 81) }}{% endgen")
    answer = "b" * 79 + "cd"
    said = refused(other, "Hi", answer)
    start = (
        f"chats.jsonl:7: the loss mask learns '{'x' * 80}' for the assistant's text "
        f"'{'b' * 79}c'; rendered text:\n<s><|user|>\nHi<|end|>\n<|assistant|>\n"
    )
    assert said.startswith(start)
    empty = TAGGED.replace("m.content + '<|end|>' }}{% endgen", "'' }}{% endgen")
    assert "chats.jsonl:7: the loss mask is empty for the assistant's text 'Yes'; r" in refused(
        empty, "Hi", "Yes"
    )


def test_every_turn_is_checked() -> None:
    """The second is wrong, the first and the third are not."""
    template = TAGGED.replace("m.content + '<|end|>'", "m.content.replace('No', '?') + '<|end|>'")
    assert "for the assistant's text 'No'" in refused(template, "a", "Yes", "b", "No", "c", "Yes")


def test_only_a_final_eos_of_the_text_is_left_out() -> None:
    """In ChatML-like templates the eos may also be the end of the turn."""
    ends_turn = ENDS_TEXT.replace("'<|end|>' }}", "'<|end|>' + (eos_token if m.role == 'assistant' else '') }}")  # fmt: skip # noqa: E501
    ends_turn = ends_turn.replace("{% else %}{{ eos_token }}", "")
    assert marked(chat("Hi", "Yes", "So?", "No"), ends_turn) == (
        "<|user|>Hi<|end|><|assistant|>[[Yes<|end|></s>]]"
        "<|user|>So?<|end|><|assistant|>[[No<|end|></s>]]"
    )
    assert marked(chat("Hi", "Yes"), ENDS_TEXT) == (
        "<|user|>Hi<|end|><|assistant|>[[Yes<|end|>]]</s>"
    )
    # An eos that follows no special token closes the turn.
    bare = ENDS_TEXT.replace(" + '<|end|>'", "")
    assert marked(chat("Hi", "Yes"), bare) == "<|user|>Hi<|assistant|>[[Yes</s>]]"


def test_turns_whose_thinking_is_stripped_are_found_where_they_stand() -> None:
    """The words of each answer stand in the question before it, too."""
    record = chat("Yes", "<think>a</think>Yes", "Yes, no", "<think>b</think>no", "no", "no")
    assert marked(record, STRIPS) == (
        "<|user|>Yes<|end|><|assistant|>[[Yes<|end|>]]<|user|>Yes, no<|end|>"
        "<|assistant|>[[no<|end|>]]<|user|>no<|end|><|assistant|>[[no<|end|>]]"
    )


def test_stripped_turns_after_a_system_message_that_quotes_them() -> None:
    record = chat("Hi", "<think>a</think>Hello", "Hello", "<think>b</think>Hi", system="Hello Hi")
    assert marked(record, QWEN3) == (
        "<|im_start|>system\nHello Hi<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello<|im_end|>]]\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nb\n</think>\n\nHi<|im_end|>]]\n"
    )


def test_thinking_that_speaks_of_thinking() -> None:
    """What remains of a stripped turn begins behind the last end of thinking."""
    record = chat("Hi", "<think>a</think>b</think>Yes", "So?", "No")
    assert marked(record, STRIPS) == (
        "<|user|>Hi<|end|><|assistant|>[[Yes<|end|>]]<|user|>So?<|end|><|assistant|>[[No<|end|>]]"
    )


def test_a_tagged_empty_thinking_block_belongs_to_the_prompt() -> None:
    template = TAGGED.replace("{{ m.content +", "{{ '<think>\n\n</think>\n\n' + m.content +")
    assert marked(chat("Hi", "Yes"), template).endswith("\n<think>\n\n</think>\n\n[[Yes<|end|>]]\n")


def test_an_answer_with_an_empty_thinking_block_of_its_own_is_learnt_whole() -> None:
    own = "<think>\n\n</think>\n\nYes"
    assert marked(chat("Hi", own), CHATML).endswith(f"assistant\n[[{own}<|im_end|>]]\n")


def test_turns_that_only_think() -> None:
    record = chat("Hi", "<think>a</think>", "So?", "Yes")
    text = marked(record, OPENS_THINKING.replace("m.content.split('</think>')[-1]", "m.content"))
    assert text == (
        "<s><|user|>Hi<|assistant|>[[<think>a</think></s>]]<|user|>So?<|assistant|>[[Yes</s>]]"
    )


def test_a_model_by_another_name_after_a_long_conversation() -> None:
    turns = [text for i in range(6) for text in (f"q{i}", f"a{i}")]
    text = marked(chat(*turns), GEMMA)
    assert [part.split("]]")[0] for part in text.split("[[")[1:]] == [
        f"a{i}<end_of_turn>" for i in range(6)
    ]


def test_a_turn_that_ends_in_words_is_learnt_with_them() -> None:
    """Also where the question says the same, and an earlier turn loses its thinking."""
    record = chat("Yes", "<think>a</think>Yes", "Yes, no", "<think>b</think>no", "no", "no")
    assert marked(record, STRIPS.replace("<|end|>", " [done]")) == (
        "<|user|>Yes [done]<|assistant|>[[Yes [done]]]<|user|>Yes, no [done]"
        "<|assistant|>[[no [done]]]<|user|>no [done]<|assistant|>[[no [done]]]"
    )


def test_a_turn_that_ends_in_nothing_ends_there() -> None:
    record = chat("Hi", "<think>a</think>Yes", "So?", "No")
    assert marked(record, STRIPS.replace("<|end|>", "")) == (
        "<|user|>Hi<|assistant|>[[Yes]]<|user|>So?<|assistant|>[[No]]"
    )


def test_a_tokenizer_without_an_end_of_text() -> None:
    tokenizer = make_tokenizer(NO_SPECIAL)
    tokenizer.eos_token = None
    sample = encode(chat("Hi", "Yes"), tokenizer, 100)
    learnt = [i for i, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]
    assert tokenizer.decode(learnt) == "Yes"


def test_a_first_message_without_words_before_a_stripped_turn() -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}\n{% endfor %}"  # fmt: skip # noqa: E501
    assert marked(chat("ab", "<think>a</think>ab", "ab", "ab"), template) == (
        "ab\n[[ab]]\nab\n[[ab]]\n"
    )
