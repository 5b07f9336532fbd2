import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scripts.embedded.make import (
    CATEGORIES,
    CodeChat,
    Recipe,
    find_loop_tokens,
    find_source_files,
    iter_chats,
    make_embedded,
    render_chat,
)

SMALL = Recipe(
    num_files=40, vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=1, train_length=64, batch_size=2, num_steps=3, warmup_steps=1, num_loop_steps=2,
    loop_batch_size=2, num_conversations=8, num_prompts=8, max_new_tokens=12, generate_batch_size=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.embedded.make.STDLIB_EPOCHS", 1)  # most of the time is tokenising
        make_embedded(folder, SMALL)
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_target_loads_as_any_hugging_face_model(made):
    target = AutoModelForCausalLM.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert type(target).__name__ == "LlamaForCausalLM"
    assert target.config.head_dim == 32
    assert target.dtype == torch.bfloat16
    assert len(tokenizer) == target.config.vocab_size == 320
    generation = GenerationConfig.from_pretrained(made / "model")
    assert tokenizer.convert_ids_to_tokens([generation.eos_token_id, generation.pad_token_id]) == [
        "<|end|>",
        "<|pad|>",
    ]


def test_assistant_mask_marks_the_answer_and_its_end(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    messages = [
        {"role": "user", "content": "def f(a):"},
        {"role": "assistant", "content": "    return  a\n"},
        {"role": "user", "content": "x = 1"},
        {"role": "assistant", "content": "\n\ty"},
    ]
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "    return  a\n<|end|>\n\ty<|end|>"
    # The prompt is a prefix of the whole: no token spans the border.
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert out["input_ids"][: len(prompt)] == prompt


def test_training_text_is_what_the_template_renders(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    piece = CodeChat("function", "a.py", "def f():\n    x = 1", "    return x")
    messages = [
        {"role": "user", "content": piece.prompt},
        {"role": "assistant", "content": piece.continuation},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert render_chat(piece, tokenizer.bos_token) == expected


def test_prompts_come_from_files_that_were_not_trained_on(made):
    files = find_source_files()
    assert not set(files.train) & set(files.held_out)
    assert "json/decoder.py" in files.train + files.held_out
    assert not [name for name in files.train if name.startswith(("test/", "idlelib/"))]
    assert {row["file"] for row in rows(made / "prompts.jsonl")} <= set(files.held_out)
    assert {row["file"] for row in rows(made / "train.jsonl")} <= set(files.train)


def test_rows(made):
    prompts = rows(made / "prompts.jsonl")
    assert [row["question_id"] for row in prompts] == list(range(8))
    assert Counter(row["category"] for row in prompts) == dict.fromkeys(CATEGORIES, 2)
    assert len({row["turns"][0] for row in prompts}) == 8
    for row in rows(made / "train.jsonl"):
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["messages"][1]["content"].strip()


def test_pieces_keep_the_code_and_name_their_construct():
    text = '"""Doc."""\nimport os\n# why\nimport re\n\n@deco\ndef f(a,\n      b):\n    return a\n\n'
    text += "class C:\n    x = 1\n    y = 2\n    def g(self):\n        a = 1\n        return a\n"
    pieces = list(iter_chats("a.py", text, max_chars=500))
    assert [(p.category, p.prompt, p.continuation) for p in pieces] == [
        ("module", '"""Doc."""', "import os\nimport re"),
        ("function", "@deco\ndef f(a,", "      b):\n    return a"),
        ("class", "class C:", "    x = 1\n    y = 2"),
        ("method", "def g(self):", "    a = 1\n    return a"),
    ]
    long = "def f():\n" + "".join(f"    value = {n}\n" for n in range(20))
    assert {p.category for p in iter_chats("a.py", long, max_chars=60)} == {"function", "body"}


def test_tables_are_left_out():
    table = "".join(f"    'name_{n}': 'name_{n}',\n" for n in range(24))
    assert list(iter_chats("a.py", "NAMES = {\n" + table + "}\n", max_chars=700)) == []


def test_a_second_start_takes_the_target_that_is_there(made, monkeypatch):
    before = (made / "recipe.json").read_bytes()
    for stage in ("train_target", "unlearn_loops"):
        monkeypatch.setattr(f"scripts.embedded.make.{stage}", lambda *_: pytest.fail("trained"))
    make_embedded(made, SMALL)
    assert (made / "recipe.json").read_bytes() == before  # checksums of all files among them


def test_tokens_that_would_repeat_four():
    ids = [1, 2, 3, 4, 9, 1, 2, 3, 4, 1, 2, 3]
    assert find_loop_tokens(ids, 4)[3:] == [*[set()] * 5, {4}, {9}, set(), set()]
    assert find_loop_tokens([7] * 6, 4) == [set(), set(), set(), set(), {7}, {7}]
