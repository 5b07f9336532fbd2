"""Every template below is rendered with the same small byte-level tokenizer; no network."""

from itertools import groupby

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from conf.errors import InputError
from data.rows.records import Record
from data.templates.record_encoder import RecordEncoder, Sample

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>",
    "<|assistant|>", "<|end|>", "<|return|>", "<|start|>", "<think>", "</think>",
]  # fmt: skip
TRAINING = ["Hello there, how are you?", "user", "assistant", "I am fine.\n\nYes, no.", "\n\n\n\n"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content | trim + '<|eot_id|>' %}{% if loop.first %}<|begin_of_text|>{% endif %}"
    "{{ text }}{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# `{% generation %}` marks what others learn; here it is around the header, and not the end.
TAGGED = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|assistant|>\n' + m.content }}{% endgeneration %}{{ '<|end|>\n' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# As Qwen3: thinking is stripped from turns before the last user message, and the last
# turn gets a thinking block even when it has none.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '')"
    " + '\n</think>\n\n' }}{% endif %}{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek-R1 and QwQ: the prompt opens the thinking that the finished turn lacks.
OPENS_THINKING = (
    "<s>{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# As gpt-oss: the last turn ends in another token than the turns before it.
TWO_ENDS = (
    "{% for m in messages %}<|start|>{{ m.role + '\n' + m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Phi-4-mini: the end of the text has a token of its own, whoever spoke last.
ENDS_TEXT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
NO_SPECIAL = (
    "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)


def make_tokenizer(
    template: str | None, *, trim_offsets: bool = False, special: list[str] = SPECIAL
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=trim_offsets
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    if trim_offsets:
        from tokenizers import processors

        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        chat_template=template,
    )


def chat(*contents: str, system: str | None = None) -> Record:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Record(messages, None, "chats.jsonl:7")


def shown(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded sample with learnt tokens in [[ ]]."""
    assert len(sample.input_ids) == len(sample.loss_mask)
    text = ""
    pairs = zip(sample.loss_mask, sample.input_ids, strict=True)
    for learnt, run in groupby(pairs, lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in run])
        text += f"[[{piece}]]" if learnt else piece
    return text


def marked(record: Record, template: str, **settings: bool) -> list[str]:
    tokenizer = make_tokenizer(template, **settings)
    return [shown(sample, tokenizer) for sample in RecordEncoder(tokenizer).encode_record(record)]


# As vision models: a content is a text or parts, which follow one another.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def learnt(sample: Sample) -> list[int]:
    return [i for i, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]


def test_mask_of_a_short_chat_token_by_token():
    tokenizer = make_tokenizer(CHATML)
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("user", "Yes"))
    assert tokenizer.convert_ids_to_tokens(sample.input_ids) == [
        "<|im_start|>", "user", "Ċ", "user", "<|im_end|>", "Ċ",
        "<|im_start|>", "assistant", "Ċ", "Yes", "<|im_end|>", "Ċ",
    ]  # fmt: skip
    assert sample.loss_mask == [False] * 9 + [True, True, False]


TWO_TURNS = chat("Hi", "Hello there", "And you?", "Fine.\n\nYes", system="Be kind")


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n[[Hello there<|im_end|>]]\n"
            "<|im_start|>user\nAnd you?<|im_end|>\n"
            "<|im_start|>assistant\n[[Fine.\n\nYes<|im_end|>]]\n",
        ),
        (
            LLAMA3,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello there<|eot_id|>]]"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd you?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[Fine.\n\nYes<|eot_id|>]]",
        ),
        (
            TAGGED,
            "<s><|system|>\nBe kind<|end|>\n<|user|>\nHi<|end|>\n"
            "<|assistant|>\n[[Hello there<|end|>]]\n<|user|>\nAnd you?<|end|>\n"
            "<|assistant|>\n[[Fine.\n\nYes<|end|>]]\n",
        ),
        (
            OPENS_THINKING,
            "<s><|system|>Be kind<|user|>Hi<|assistant|>[[Hello there</s>]]<|user|>And you?"
            "<|assistant|>[[Fine.\n\nYes</s>]]",
        ),
        (
            ENDS_TEXT,
            "<|system|>Be kind<|end|><|user|>Hi<|end|><|assistant|>[[Hello there<|end|>]]"
            "<|user|>And you?<|end|><|assistant|>[[Fine.\n\nYes<|end|>]]</s>",
        ),
        (
            NO_SPECIAL,
            "### system: Be kind\n### user: Hi\n### assistant: [[Hello there]]\n"
            "### user: And you?\n### assistant: [[Fine.\n\nYes]]\n",
        ),
    ],
    ids=["chatml", "llama3", "tagged", "opens-thinking", "ends-text", "no-special"],
)
def test_exactly_the_assistant_is_learnt(template, expected, trim_offsets):
    assert marked(TWO_TURNS, template, trim_offsets=trim_offsets) == [expected]


def test_a_turn_that_is_closed_otherwise_when_followed_has_a_sample_of_its_own():
    """The model ends every turn in <|return|>; <|end|> is what it reads later."""
    asked = "<|start|>system\nBe kind<|end|><|start|>user\nHi<|end|><|start|>assistant\n"
    assert marked(TWO_TURNS, TWO_ENDS) == [
        asked + "[[Hello there<|return|>]]",
        asked + "Hello there<|end|><|start|>user\nAnd you?<|end|>"
        "<|start|>assistant\n[[Fine.\n\nYes<|return|>]]",
    ]


def test_gemma_calls_the_assistant_model():
    assert marked(chat("Hi", "Hello", "Who?", "Me"), GEMMA) == [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[[Hello<end_of_turn>]]\n"
        "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n[[Me<end_of_turn>]]\n"
    ]


def test_mistral_has_no_generation_prompt():
    assert marked(chat("Hi", "Hello", "Who?", "Me"), MISTRAL) == [
        "<s>[INST] Hi [/INST][[ Hello</s>]][INST] Who? [/INST][[ Me</s>]]"
    ]


HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_qwen3_thinking_is_learnt_in_every_turn_as_it_was_written():
    """Read again, a turn has lost its thinking: what it was is in a sample of its own."""
    think = "<think>\nHm.\n</think>\n\n"
    assert marked(chat("Hi", think + "Hello", "Who?", think + "Me"), QWEN3) == [
        HI + f"[[{think}Hello<|im_end|>]]",
        HI + "Hello<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        f"<|im_start|>assistant\n[[{think}Me<|im_end|>]]\n",
    ]


def test_qwen3_thinking_is_learnt_when_the_template_spaces_it_differently():
    (text,) = marked(chat("Hi", "<think>Hm.</think>Hello"), QWEN3)
    assert text == HI + "[[<think>\nHm.\n</think>\n\nHello<|im_end|>]]\n"


def test_qwen3_empty_thinking_is_the_templates_not_the_models():
    assert marked(chat("Hi", "Hello", "Who?", "Hello"), QWEN3) == [
        HI + "<think>\n\n</think>\n\n[[Hello<|im_end|>]]",
        HI + "Hello<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[Hello<|im_end|>]]\n",
    ]


def test_spaces_of_an_answer_behind_empty_thinking_are_learnt():
    (text,) = marked(chat("Hi", "  Hello"), QWEN3.replace("parts[-1].strip()", "parts[-1]"))
    assert text == HI + "<think>\n\n</think>\n\n[[  Hello<|im_end|>]]\n"


def test_a_repeated_answer_is_learnt_each_time():
    think = "<think>\nHm.\n</think>\n\n"
    texts = marked(chat("Hi", think + "Yes", "So?", think + "Yes", "Yes", think + "Yes"), QWEN3)
    assert [text.partition("[[")[2].rstrip("\n") for text in texts] == [
        f"{think}Yes<|im_end|>]]"
    ] * 3


def test_text_that_occurs_in_the_header_is_not_confused():
    texts = marked(chat("s", "s", "user", "assistant"), OPENS_THINKING)
    assert texts == ["<s><|user|>s<|assistant|>[[s</s>]]<|user|>user<|assistant|>[[assistant</s>]]"]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TAGGED, QWEN3, TWO_ENDS])
@pytest.mark.parametrize("answer", ["naïve 🙂🙂", "  padded  \n", "a   b \n\n c", "日本語。"])
def test_odd_characters_and_spaces_stay_inside_the_mask(template, answer):
    for trim_offsets in (False, True):
        record = chat("Hi", answer, "🙂", answer)
        text = "".join(marked(record, template, trim_offsets=trim_offsets))
        turns = [part.split("]]")[0] for part in text.split("[[")[1:]]
        assert [turn.partition("<|")[0].strip() for turn in turns] == [answer.strip()] * 2


def test_a_header_token_that_swallows_the_answers_newlines_stays_unlearnt():
    tokenizer = make_tokenizer(TAGGED)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|assistant|>", rstrip=True)]}
    )
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("Hi", "\n\nYes"))
    assert tokenizer.decode(learnt(sample)) == "Yes<|end|>"


def test_a_prompt_without_answer_has_nothing_to_learn():
    assert marked(chat("Hi"), CHATML) == ["<|im_start|>user\nHi<|im_end|>\n"]


def test_a_prompt_behind_the_last_answer_is_read():
    (text,) = marked(chat("Hi", "Yes", "So?"), CHATML)
    assert text == HI + "[[Yes<|im_end|>]]\n<|im_start|>user\nSo?<|im_end|>\n"


def test_plain_text_is_learnt_whole():
    (sample,) = RecordEncoder(make_tokenizer(None)).encode_record(
        Record(None, "Hello there", "texts.jsonl:1")
    )
    assert sample.loss_mask == [True] * len(sample.input_ids)


def test_prompt_ends_where_the_assistant_starts():
    tokenizer = make_tokenizer(CHATML)
    ids = RecordEncoder(tokenizer).encode_prompt([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_is_chosen_by_its_name() -> None:
    other = CHATML.replace("<|im_start|>", "<|rag|>")
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = {"plain": CHATML, "rag": other}
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


def test_what_the_template_refuses_is_named():
    encoder = RecordEncoder(make_tokenizer(GEMMA))
    with pytest.raises(InputError, match="System role not supported"):
        encoder.encode_prompt(TWO_TURNS.messages)
