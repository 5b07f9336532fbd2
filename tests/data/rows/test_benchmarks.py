"""Benchmark files as they are published load without any setting; rows are shortened."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from toys import tokenizer

from conf.errors import InputError
from conf.settings.data import DataConfig, Form, OnBadRow
from data.prepared.prepare import prepare
from data.rows.records import load_records

MT_BENCH = [
    {"question_id": 81, "category": "writing",
     "turns": ["Compose an engaging travel blog post.", "Rewrite your previous response."]},
    {"question_id": 101, "category": "reasoning",
     "turns": ["What's your current position?", "And of the last person?"],
     "reference": ["You are in second place.", "Uncertain."]},
]  # fmt: skip
SPEC_BENCH = [
    MT_BENCH[0],
    {"question_id": 161, "category": "translation",
     "turns": ["Translate German to English: Guten Tag"], "reference": ["Good day"]},
    {"question_id": 241, "category": "summarization", "turns": ["Summarize: Hillary"],
     "reference": ["An armored van"]},
    {"question_id": 321, "category": "qa", "turns": ["Who played anna?"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["How much does travel cost?"],
     "reference": ["He pays 400*.5=$<<400*.5=200>>200 more.\n#### 1000"]},
    {"question_id": 481, "category": "rag", "turns": ["Some researchers state"],
     "reference": [["a source of lumber", "purifying water"]]},
]  # fmt: skip
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """ Add.\n    >>> add(1, 2)\n    3\n    """\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n\n",
}
GSM8K = {
    "question": "Janet\u2019s ducks lay 16 eggs per day. How many does she sell?",
    "answer": "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n#### 9",
}


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSONL, gzipped where the name says so, and returns the path."""

    def write(*rows: dict, name: str = "question.jsonl") -> str:
        path = tmp_path / name
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines, mtime=0) if name.endswith(".gz") else lines)
        return str(path)

    return write


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_mt_bench(write):
    loaded = load_records(write(*MT_BENCH))
    assert loaded.form is Form.turns
    assert [record.category for record in loaded.records] == ["writing", "reasoning"]
    assert loaded.records[1].messages == [
        user("What's your current position?"), user("And of the last person?"),
    ]  # fmt: skip


def test_spec_bench(write):
    loaded = load_records(write(*SPEC_BENCH))
    assert loaded.form is Form.turns
    assert [(record.category, len(record.messages)) for record in loaded.records] == [
        ("writing", 2), ("translation", 1), ("summarization", 1), ("qa", 1),
        ("math_reasoning", 1), ("rag", 1),
    ]  # fmt: skip
    assert loaded.records[5].messages == [user("Some researchers state")]


@pytest.mark.parametrize("name", ["HumanEval.jsonl.gz", "HumanEval.jsonl"])
def test_human_eval(write, name):
    path = write(HUMAN_EVAL, name=name)
    loaded = load_records(path)
    assert loaded.form is Form.prompt
    (record,) = loaded.records
    assert record.messages == [user(HUMAN_EVAL["prompt"])]
    assert (record.category, record.where) == ("all", f"{path}:1")
    unpacked = json.dumps(HUMAN_EVAL).encode() + b"\n"
    assert loaded.sha256 == hashlib.sha256(unpacked).hexdigest()


def test_gsm8k(write):
    loaded = load_records(write(GSM8K, name="test.jsonl"))
    assert loaded.form is Form.question
    assert loaded.records[0].messages == [
        user(GSM8K["question"]), {"role": "assistant", "content": GSM8K["answer"]},
    ]  # fmt: skip


def test_a_file_of_ones_own_with_turns_and_categories(write):
    loaded = load_records(
        write(
            {"category": "support", "turns": ["Hi", "And then?"]},
            {"category": "", "turns": ["No category"]},
            {"turns": ["None either"]},
        )
    )
    assert [record.category for record in loaded.records] == ["support", "all", "all"]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [user("Hi")]}, Form.messages),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, Form.conversations),
        ({"turns": ["Hi"]}, Form.turns),
        ({"instruction": "Hi"}, Form.alpaca),
        ({"prompt": "Hi"}, Form.prompt),
        ({"text": "Hi"}, Form.text),
    ],
)
def test_a_question_beside_another_form_is_not_read(write, row, form):
    assert load_records(write(GSM8K | row)).form is form


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?", "answer": ["Ann", "Anna"]},
         r"field 'answer': found \['Ann', 'Anna'\] \(list\); allowed: a string"),
        ({"question": "Who?", "answer": {"value": "Ann", "aliases": []}},
         r"field 'answer': found \{'value': 'Ann', 'aliases': \[\]\} \(dict\); allowed: a string"),
        ({"question": "Which?", "choices": ["a", "b"], "answer": 1},
         r"field 'answer': found 1 \(int\); allowed: a string"),
        ({"question": {"stem": "Which?"}, "answer": "a"},
         r"field 'question': found \{'stem': 'Which\?'\} \(dict\); allowed: a string"),
    ],
)  # fmt: skip
def test_answers_of_other_shapes_are_refused(write, row, message):
    path = write(GSM8K, row)
    with pytest.raises(InputError, match=rf"question.jsonl:2: {message}"):
        load_records(path)
    assert len(load_records(path, DataConfig(on_bad_row=OnBadRow.skip)).records) == 1


PACKED = gzip.compress(b"{}\n" * 99, mtime=0)


@pytest.mark.parametrize(
    "content", [b"not gzip", PACKED[:-9], PACKED[:10] + b"\xff" * 9, PACKED[:-8] + b"crc, size"]
)
def test_a_broken_gzip_file(tmp_path, content):
    path = Path(tmp_path / "rows.jsonl.gz")
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"rows.jsonl.gz: not a readable gzip file: "):
        load_records(str(path))


@pytest.fixture
def hub(monkeypatch):
    """The Hub's openai/gsm8k, which has no default configuration."""
    import datasets

    def load(path, name, split, streaming=False):
        assert (path, split) == ("openai/gsm8k", "test")
        if name != "main":
            raise ValueError("Config name is missing.\nPlease pick one among ['main', 'socratic']")
        return datasets.Dataset.from_list([GSM8K] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load)


def test_a_hub_dataset_with_configurations(hub):
    loaded = load_records("openai/gsm8k", DataConfig(subset="main", split="test"))
    assert loaded.records[0].messages[0] == user(GSM8K["question"])
    assert loaded.records[0].where == "openai/gsm8k[test]:1"


def test_a_configuration_that_is_missing(hub):
    message = r"data.subset=null, data.split=test\) it cannot be loaded: .*\n.*'main', 'socratic'"
    with pytest.raises(InputError, match=message):
        load_records("openai/gsm8k", DataConfig(split="test"))


def test_the_configuration_is_a_setting(hub):
    config = DataConfig("openai/gsm8k", subset="main", split="test", max_length=512)
    report = prepare(config, tokenizer(), seed=0)[2]
    assert report.num_records == 4
