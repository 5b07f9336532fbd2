"""Renderings that are rewritten, repeated or refused: exact masks and exact words."""

from dataclasses import replace
from pathlib import Path

import pytest
from templates import (
    CHATML,
    FAMILIES,
    NO_SPECIAL,
    TAGGED,
    chat,
    encoder,
    learnt,
    load_template,
    make_tokenizer,
    marked,
    shown,
)
from tokenizers import normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conf.errors import InputError
from conf.settings.data import DataConfig, Form
from data.prepared.dataset_cache import load_or_prepare_data
from data.rows.data_files import Row
from data.rows.records import Record, find_rendered_start, find_turn_marker, parse_record
from data.templates.record_encoder import RecordEncoder
from data.templates.turns import TurnMarkers
from tests.chats import write_rows

# As DeepSeek-R1 and QwQ: the prompt opens the thinking that the finished turn lacks.
OPENS_THINKING = load_template("opens_thinking")
# As Phi-4-mini: the end of the text has a token of its own, whoever spoke last.
ENDS_TEXT = load_template("ends_text")
# As vision models: a content is a text or parts, which follow one another.
PARTS = load_template("parts")
# Turns but the last lose what stands before `</think>`.
STRIPS = load_template("strips")


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
        RecordEncoder(make_tokenizer(template)).encode_record(chat(*contents))
    return str(caught.value)


def test_what_the_tokenizer_would_add_is_the_templates_business() -> None:
    found, expected = RecordEncoder(adds_bos(CHATML)), RecordEncoder(make_tokenizer(CHATML))
    messages = [{"role": "user", "content": "Hi"}]
    assert found.encode_prompt(messages) == expected.encode_prompt(messages)
    assert found.encode_record(chat("Hi", "Yes")) == expected.encode_record(chat("Hi", "Yes"))


def parted(*contents: str) -> Record:
    """A chat whose contents have a part for each word."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[i % 2], "content": [{"type": "text", "text": word} for word in text.split()]}
        for i, text in enumerate(contents)
    ]
    return parse_record(Row("chats.jsonl:7", value={"messages": messages}), Form.messages)


@pytest.mark.parametrize(
    ("template", "between", "num_pairs"),
    [
        (PARTS, "", 8),
        (PARTS.replace("m.content is string", "false"), "", 1),
        (PARTS.replace("{{ part.text }}", "{{ part.text }} "), " ", 1),
        # Takes texts alone, to which servers make a line of each part.
        (CHATML, "\n", 8),
        (CHATML.replace("m.content", "m.content | string"), "\n", 1),
    ],
)
def test_parts_are_joined_as_the_template_joins_them(
    template: str, between: str, num_pairs: int
) -> None:
    end = between if between == " " else ""
    tokenizer = make_tokenizer(template)
    samples = RecordEncoder(tokenizer).encode_record(parted(*["you are", "I am fine"] * num_pairs))
    assert [shown(sample, tokenizer) for sample in samples] == [
        (
            f"<|im_start|>user\nyou{between}are{end}<|im_end|>\n<|im_start|>assistant\n"
            f"[[I{between}am{between}fine{end}<|im_end|>]]\n"
        )
        * num_pairs
    ]


def test_an_answer_that_the_tokenizer_rewrites_is_still_found() -> None:
    """Nothing that is learnt decodes to what was written."""
    tokenizer = adds_bos(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("Hi", "YES, I am"))
    assert tokenizer.decode(learnt(sample)) == "yes, i am<|im_end|>"


def test_words_of_a_missing_template() -> None:
    tokenizer = make_tokenizer(None)
    rest = (
        ": has no chat template, but the data are conversations; use the chat version of the "
        "model, put a chat_template.jinja into its folder, or give plain text (rows with a "
        "'text' field)"
    )
    for name, named in (("", "(unnamed)"), ("org/base", "org/base")):
        tokenizer.name_or_path = name
        with pytest.raises(InputError) as caught:
            RecordEncoder(tokenizer).encode_prompt([{"role": "user", "content": "Hi"}])
        assert str(caught.value) == f"target {named}{rest}"


@pytest.mark.parametrize(("name", "named"), [("", r"\(unnamed\)"), ("old/model", "old/model")])
def test_words_of_a_tokenizer_without_offsets(name: str, named: str) -> None:
    class Slow:
        chat_template, is_fast, name_or_path = CHATML, False, name

    said = rf"^chats.jsonl:7: target {named}: Slow gives no character offsets,"
    with pytest.raises(InputError, match=said):
        RecordEncoder(Slow()).encode_record(chat("Hi", "Hello"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "contents", "said"),
    [
        (TAGGED.replace("<s>", "<s>{{ raise_exception('No more') }}", 1), ["Hi", "Hello"],
         "refuses the conversation: No more"),
        # A template fails as programs do.
        (CHATML.replace("m.content", "1 + m.content"), ["Hi", "Yes"],
         "refuses the conversation: unsupported operand type(s) for +: 'int' and 'str'"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else '-' }}"),
         ["Hi", "Hello"], "does not render an assistant's text"),
        (CHATML.replace("m.content", "m.content.replace('b', '?')"), ["Hi", "b" * 79 + "cd"],
         f"does not render the text '{'b' * 79}c' of the assistant; it renders '{'?' * 79}c'"),
        (CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if m.content != 'Yes' else '!' }}"),
         ["Hi", "Yes"], "closes the turn with 'Yes!\\n', others with '<|im_end|>\\n'"),
        (CHATML.replace("<|im_start|>assistant", "<|im_start|>model"), ["Hi", "Yes"],
         "renders an answer elsewhere than after its generation prompt "
         "'<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>model\\n': "
         "'assistant\\nYes<|im_end|>\\n'"),
    ],
)  # fmt: skip
def test_words_of_a_conversation_that_is_refused(template, contents, said) -> None:
    assert refused(template, *contents) == f"chats.jsonl:7: the target's chat template {said}"


def test_every_turn_is_checked() -> None:
    """The second is wrong, the first and the third are not."""
    template = CHATML.replace("m.content", "m.content.replace('No', '?')")
    assert "does not render the text 'No'" in refused(template, "a", "Yes", "b", "No", "c", "Yes")


def test_only_a_final_eos_of_the_text_is_left_out() -> None:
    """In ChatML-like templates the eos may also be the end of the turn."""
    ends_turn = ENDS_TEXT.replace("'<|end|>' }}", "'<|end|>' + (eos_token if m.role == 'assistant' else '') }}")  # fmt: skip # noqa: E501
    ends_turn = ends_turn.replace("{% else %}{{ eos_token }}", "")
    assert marked(chat("Hi", "Yes", "So?", "No"), ends_turn) == [
        "<|user|>Hi<|end|><|assistant|>[[Yes<|end|></s>]]"
        "<|user|>So?<|end|><|assistant|>[[No<|end|></s>]]"
    ]
    assert marked(chat("Hi", "Yes"), ENDS_TEXT) == [
        "<|user|>Hi<|end|><|assistant|>[[Yes<|end|>]]</s>"
    ]
    # An eos that follows no special token closes the turn.
    bare = ENDS_TEXT.replace(" + '<|end|>'", "")
    assert marked(chat("Hi", "Yes"), bare) == ["<|user|>Hi<|assistant|>[[Yes</s>]]"]


def test_turns_whose_thinking_is_stripped_are_learnt_as_they_were() -> None:
    """The words of each answer stand in the question before it, too."""
    record = chat("Yes", "<think>a</think>Yes", "Yes, no", "<think>b</think>no", "no", "no")
    asked = "<|user|>Yes<|end|><|assistant|>"
    again = asked + "Yes<|end|><|user|>Yes, no<|end|><|assistant|>"
    assert marked(record, STRIPS) == [
        asked + "[[<think>a</think>Yes<|end|>]]",
        again + "[[<think>b</think>no<|end|>]]",
        again + "no<|end|><|user|>no<|end|><|assistant|>[[no<|end|>]]",
    ]


def test_thinking_that_speaks_of_thinking() -> None:
    """The rest of a stripped turn begins behind the last end of thinking."""
    record = chat("Hi", "<think>a</think>b</think>Yes", "So?", "No")
    assert marked(record, STRIPS) == [
        "<|user|>Hi<|end|><|assistant|>[[<think>a</think>b</think>Yes<|end|>]]",
        "<|user|>Hi<|end|><|assistant|>Yes<|end|><|user|>So?<|end|><|assistant|>[[No<|end|>]]",
    ]


def test_an_answer_with_an_empty_thinking_block_of_its_own_is_learnt_whole() -> None:
    own = "<think>\n\n</think>\n\nYes"
    assert marked(chat("Hi", own), CHATML)[0].endswith(f"assistant\n[[{own}<|im_end|>]]\n")


def test_turns_that_only_think() -> None:
    record = chat("Hi", "<think>a</think>", "So?", "Yes")
    assert marked(record, OPENS_THINKING) == [
        "<s><|user|>Hi<|assistant|>[[<think>a</think></s>]]<|user|>So?<|assistant|>[[Yes</s>]]"
    ]


def test_a_turn_that_no_token_ends_is_stopped_by_the_next_turns() -> None:
    """As GLM is; words of the template before it are the model's."""
    assert marked(chat("Hi", "Yes", "So?", "No"), STRIPS.replace("<|end|>", "")) == [
        "<|user|>Hi<|assistant|>[[Yes<|user|>]]So?<|assistant|>[[No<|user|>]]"
    ]
    assert marked(chat("Yes", "Yes", "no", "no"), STRIPS.replace("<|end|>", " [done]")) == [
        "<|user|>Yes [done]<|assistant|>[[Yes [done]<|user|>]]no [done]"
        "<|assistant|>[[no [done]<|user|>]]"
    ]


def test_a_turn_that_ends_in_words_alone_is_learnt_with_them() -> None:
    template = NO_SPECIAL.replace("m.content +", "m.content + ' [done]' +")
    assert marked(chat("Hi", "Yes", "So?", "No"), template) == [
        "### user: Hi [done]\n### assistant: [[Yes [done]]]\n"
        "### user: So? [done]\n### assistant: [[No [done]]]\n"
    ]


def test_a_tokenizer_without_an_end_of_text() -> None:
    tokenizer = make_tokenizer(NO_SPECIAL)
    tokenizer.eos_token = None
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("Hi", "Yes"))
    assert tokenizer.decode(learnt(sample)) == "Yes"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_spaces_before_and_behind_an_answer_that_no_token_ends(trim_offsets: bool) -> None:
    """The prompt's own last space is the first word's, as the tokenizer has it."""
    tokenizer = make_tokenizer(NO_SPECIAL, trim_offsets=trim_offsets)
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("Hi", "no "))
    assert shown(sample, tokenizer) == "### user: Hi\n### assistant:[[ no ]]\n"
    assert tokenizer.convert_ids_to_tokens(learnt(sample)) == ["Ġno", "Ġ"]


def test_texts_are_not_taken_apart_where_the_tokenizer_would_add_to_the_parts() -> None:
    tokenizer = make_tokenizer(CHATML.replace("<|im_start|>", "# "))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    (sample,) = RecordEncoder(tokenizer).encode_record(chat("Hi", "\n\n\nYes"))
    assert shown(sample, tokenizer) == (
        " # user\nHi<|im_end|> \n# assistant[[\n\n\n\nYes<|im_end|>]] \n"
    )


def test_a_template_of_texts_alone() -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert marked(chat("ab", "ab", "ab", "ab"), template) == ["ab\n[[ab]]\nab\n[[ab]]\n"]


# --- Texts and prompts that were rendered before they came here.


PLAIN = (
    "def ask(user: str) -> str:\n    return f'<{user}>' if role[0] | 1 else '[user]'\n",
    "The assistant: a novel.\n\n## User: none\n\nAnd so the user left.",
    "<|endoftext|>One text.<|endoftext|>And <s>struck</s> words; <turn> and <header>.",
    "<li>user\n<s>user</s>, <s>bot and its users</s>, <bos>users\n",
)


def rendered(family: str) -> str:
    said = chat("Hi", "It is a tree.", "So?", "Ten meters.")
    return encoder(family).build_template({}, None).render_conversation(said.messages)


def test_dialogues_of_every_family_are_known() -> None:
    """By the target's own template, and by whoever has another target."""
    texts = {family: rendered(family) for family in FAMILIES}
    own = {
        name: TurnMarkers.from_template(encoder(name).build_template({}, None)) for name in FAMILIES
    }
    assert [name for name, text in texts.items() if not own[name].find_marker(text)] == []
    unknown = [name for name, text in texts.items() if not find_turn_marker(text)]
    assert unknown == []
    assert [text for text in PLAIN if find_turn_marker(text)] == []
    assert [name for name in FAMILIES for text in PLAIN if own[name].find_marker(text)] == []


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c>Yes", "<\uff5cUser\uff5c>"),  # DeepSeek
        ("[gMASK]<sop><|user|>\nHi<|assistant|>\nYes", "<|user|>"),  # GLM
        ("<|start|>user<|message|>Hi<|end|>", "<|start|>"),  # gpt-oss
        ("<bos><|turn>user\nHi<turn|>\n<|turn>model\nYes<turn|>", "<|turn>"),  # Gemma 4
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi", "<|START_OF_TURN_TOKEN|>"),  # Cohere
        ("<|start_of_role|>user<|end_of_role|>Hi", "<|start_of_role|>"),  # Granite
        ("[|user|]Hi[|endofturn|]\n[|assistant|]Yes", "[|user|]"),  # EXAONE
        ("<|bom|><|system|> Be kind<|eom|>", "<|bom|>"),  # Jamba
        ("### Instruction:\nHi\n\n### Response:\nYes", "### Response"),  # Alpaca
        ("User: Hi\n\nAssistant: Yes", "Assistant:"),  # Falcon
        ("<s>user\nHi</s>\n<s>bot\nYes</s>", "<s>user"),  # Saiga
        ("<s>system\nBe kind</s><s>user\nHi</s>", "<s>system"),
        ("<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nYes", "<SPECIAL_11>User"),  # Nemotron-H
        ("]~b]user\nHi[e~[", "]~b]user"),  # MiniMax
        ("<|begin_of_text|>user\nHi", "<|begin_of_text|>user"),
    ],
)
def test_dialogues_of_other_targets_are_known(text: str, marker: str) -> None:
    assert find_turn_marker(text) == marker


def test_dialogues_are_known_by_the_words_of_the_targets_template() -> None:
    template = NO_SPECIAL.replace("'### ' + m.role", "'@ ' + m.role").replace("###", "@")
    markers = TurnMarkers.from_template(
        RecordEncoder(make_tokenizer(template)).build_template({}, None)
    )
    assert markers == TurnMarkers((), "@ user:", "@ assistant:")
    assert markers.find_marker("@ user: Hi\n@ assistant: Yes\n") == "@ assistant:"
    assert markers.find_marker("We write @ assistant: before what it says") == ""


def test_a_lone_letter_marks_no_dialogue() -> None:
    template = NO_SPECIAL.replace("'### ' + m.role", "('Q' if m.role == 'user' else 'A')")
    markers = TurnMarkers.from_template(
        RecordEncoder(make_tokenizer(template)).build_template({}, None)
    )
    assert (markers.asks, markers.answers) == ("Q:", "A:")
    assert markers.find_marker("Q: Hi\nA: Yes\n") == ""


def test_a_text_rendered_for_the_target_is_refused_unless_that_is_said(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(NO_SPECIAL.replace("###", "@"))
    text = "@ user: Hi\n@ assistant: Yes\n"
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "Hello there"}, {"text": text}])
    config = DataConfig(str(path), num_proc=1, prepared_dir=str(tmp_path / "prepared"))
    with pytest.raises(InputError, match=r"rows.jsonl:2: field 'text': .* marker '@ assistant:'"):
        load_or_prepare_data(str(path), config, tokenizer)
    found = load_or_prepare_data(str(path), replace(config, form=Form.text), tokenizer)
    assert tokenizer.decode(found.samples.slice_sample(1, 99).input_ids) == text


def test_what_begins_and_ends_any_text_stands_there_once() -> None:
    tokenizer = adds_bos(CHATML)
    both = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    for given, added in (("<s>Hi", "<s>Hi"), ("Hi", "<s>Hi"), ("<s><s>Hi", "<s><s>Hi")):
        (sample,) = RecordEncoder(tokenizer).encode_record(Record(None, given, "here"))
        assert tokenizer.decode(sample.input_ids) == added
        assert all(sample.loss_mask)
    tokenizer.backend_tokenizer.post_processor = both
    (sample,) = RecordEncoder(tokenizer).encode_record(Record(None, "<s>Hi</s>", "here"))
    assert tokenizer.decode(sample.input_ids) == "<s>Hi</s>"
    own = make_tokenizer(None)  # adds nothing, and takes nothing
    (sample,) = RecordEncoder(own).encode_record(Record(None, "<s><s>Hi</s></s>", "here"))
    assert own.decode(sample.input_ids) == "<s><s>Hi</s></s>"


def test_a_prompt_that_begins_rendered() -> None:
    assert find_rendered_start("<s>[INST] Hi [/INST]") == "<s>[INST]"
    assert find_rendered_start("<|begin_of_text|><|start_header_id|>user") != ""
    assert find_rendered_start(" <|im_start|>user\nHi") == "<|im_start|>"
    assert find_rendered_start("<s>user\nHi</s>") == "<s>user"
    assert find_rendered_start("What does <|im_start|> mean?") == ""
