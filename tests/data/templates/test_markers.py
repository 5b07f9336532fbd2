"""Texts and prompts that were rendered before they came here."""

from dataclasses import replace
from pathlib import Path

import pytest
from templates import CHATML, FAMILIES, NO_SPECIAL, chat, encoder, make_tokenizer
from tokenizers import processors

from conf.errors import InputError
from conf.settings.data import DataConfig, Form
from data.prepared.dataset_cache import load_or_prepare_data
from data.rows.records import Record, find_rendered_start, find_turn_marker
from data.templates.record_encoder import RecordEncoder
from data.templates.turns import TurnMarkers
from tests.chats import write_rows
from tests.data.templates.test_encoder_edges import adds_bos

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
