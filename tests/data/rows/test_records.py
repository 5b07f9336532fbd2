"""Loads files and Hub datasets: rows with their places, refusals, digests."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow as pa
import pytest
import xxhash
from doors import COMMANDS
from omegaconf import OmegaConf
from pyarrow import parquet
from toys import tokenizer

from conf.errors import InputError
from conf.settings.data import DataConfig, Form, OnBadRow
from data.prepared.prepare import prepare_datasets
from data.rows.records import compute_prompt_digest, load_records
from data.rows.row_digests import PromptDigests
from tests.chats import write_rows

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
GOOD = {"messages": [USER, ASSISTANT]}
SKIP = DataConfig(on_bad_row=OnBadRow.skip)
GSM8K = {
    "question": "Janet\u2019s ducks lay 16 eggs per day. How many does she sell?",
    "answer": "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n#### 9",
}


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSONL (strings and bytes as they are) and returns the path."""

    def write(*rows: dict | str | bytes, name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return str(path)

    return write


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.fixture
def hub(monkeypatch):
    """The Hub's openai/gsm8k, which has no default configuration."""

    def load(path: str, name: str | None, split: str, streaming: bool = False) -> Any:
        if path != "openai/gsm8k":
            raise datasets.exceptions.DatasetNotFoundError("doesn't exist on the Hub")
        assert (split, streaming) == ("test", False)
        if name != "main":
            raise ValueError("Config name is missing.\nPlease pick one among ['main', 'socratic']")
        return datasets.Dataset.from_list([GSM8K] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load)


def test_a_hub_dataset_with_configurations(hub):
    config = DataConfig("openai/gsm8k", subset="main", split="test", max_length=512)
    loaded = load_records("openai/gsm8k", config)
    assert loaded.records[0].messages[0] == user(GSM8K["question"])
    assert [r.where for r in loaded.records[:2]] == [f"openai/gsm8k[test]:{n}" for n in (1, 2)]
    assert prepare_datasets(config, tokenizer(), seed=0)[2].num_records == 4


def test_bad_answers_are_left_out_and_counted(write, tmp_path):
    rows = [{"prompt": "Hi", "completion": "Hello", "label": n % 2 == 0} for n in range(8)]
    config = DataConfig(write(*rows), num_proc=1, prepared_dir=str(tmp_path / "prepared"))
    report = prepare_datasets(config, tokenizer(), seed=0)[2]
    assert (report.num_records, report.num_dropped, report.unread) == (8, 4, {})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("openai/gsm8k",
         r"data.subset=null, data.split=test\) failed: .*\n.*'main', 'socratic'"),
        ("me/chats", r"data.path=me/chats: .*Hub dataset .*doesn't exist"),
    ],
)  # fmt: skip
def test_hub_datasets_that_cannot_be_loaded(hub, path, message):
    with pytest.raises(InputError, match=message):
        load_records(path, DataConfig(split="test"))


@pytest.mark.parametrize(
    ("num_rows", "error", "message"),
    [
        (0, RuntimeError("Dataset scripts are no longer supported, but found chats.py"),
         r"no such file or folder, and loading it .* failed: Dataset scripts .* name files of its"),
        (2, ConnectionError("lost"),
         r"reading row 3 of the Hub dataset \(data.subset=null, data.split=train\) failed: lost;"),
        (1, pa.ArrowInvalid("not JSON"), r"reading row 2 .* failed: not JSON"),
        (1, KeyError(), r"reading row 2 .* failed: KeyError; start again"),
    ],
)  # fmt: skip
def test_hub_datasets_that_fail_are_one_line(monkeypatch, num_rows, error, message):
    """A dataset of a script, and a stream that ends in the middle, whatever a client raises."""

    def stream() -> Iterator[dict]:
        yield from [GOOD] * num_rows
        raise error

    def load(*_: Any, **__: Any) -> Any:
        if num_rows == 0:
            raise error
        return stream()

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match=rf"data.path=me/chats: {message}"):
        load_records("me/chats", DataConfig(streaming=True))


def test_where_counts_lines_and_blank_lines_are_no_rows(write):
    path = write("\ufeff" + json.dumps(GOOD), "", GOOD)
    loaded = load_records(path)
    assert [r.where for r in loaded.records] == [f"{path}:1", f"{path}:3"]
    assert loaded.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', r"rows.jsonl:2: .*invalid JSON \(.* at column 15\)"),
        (b'{"text": "\xff"}', r"rows.jsonl:2: .*not UTF-8 \(at byte 10\)"),
        ("[1, 2]", r"rows.jsonl:2: field '\(whole row\)': found \[1, 2\] \(list\); allowed: an"),
        ({"chat": [], "id": 3},
         r"field 'messages': found the fields chat, id; allowed: a row of data.form=messages"),
        ({"messages": []}, r"field 'messages': found \[\] \(list\); allowed: a non-empty list"),
    ],
)  # fmt: skip
def test_malformed_row_names_line_and_field(write, row, message):
    path = write(GOOD, row)
    with pytest.raises(InputError, match=r"rows.jsonl:2: .*data.on_bad_row=skip") as caught:
        load_records(path)
    caught.match(message)
    loaded = load_records(path, SKIP)
    assert len(loaded.records) == 1
    assert len(loaded.bad) == 1
    assert loaded.bad[0].startswith(f"{path}:2: field ")


def test_settings_say_how_rows_are_read(write):
    path = write({"ask": "Hi", "reply": "Hello"}, [])
    config = DataConfig(
        columns={"prompt": "ask", "response": "reply"}, on_bad_row=OnBadRow.skip, form=Form.prompt
    )
    loaded = load_records(path, config)
    assert (loaded.records[0].messages, len(loaded.bad)) == ([USER, ASSISTANT], 1)


def test_mixed_forms_are_refused_even_when_skipping(write):
    path = write(GOOD, {"prompt": "Hi", "id": 1})
    message = r"rows.jsonl:2: a row of form prompt \(the fields prompt, id\) among .*data.form="
    with pytest.raises(InputError, match=message):
        load_records(path, SKIP)
    forced = load_records(path, DataConfig(form=Form.messages, on_bad_row=OnBadRow.skip))
    assert (forced.records[0].messages, len(forced.bad)) == ([USER, ASSISTANT], 1)


def test_every_row_malformed(write):
    message = r"every row is malformed \(2\); the first: .*rows.jsonl:1"
    with pytest.raises(InputError, match=message):
        load_records(write({"messages": []}, {"messages": []}), SKIP)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"topic": "Wi-Fi", "user_message": "Why is it slow?"}, "user_message"),
        ({"his words": "Why?", "topic": "Wi-Fi"}, "his words"),
        ({}, "FIELD"),
    ],
)
def test_the_mapping_that_is_suggested_can_be_pasted(write, row: dict, column: str) -> None:
    with pytest.raises(InputError) as refused:
        load_records(write(row, name="a.jsonl"))
    [typed] = shlex.split(re.findall(r"'data\.columns=.*?'", str(refused.value))[0])
    run = OmegaConf.to_object(COMMANDS["scripts/show_mask.py"].compose_settings([typed]))
    assert run.data.columns == {"prompt": column}


def test_missing_and_empty(write, tmp_path):
    (tmp_path / "folder").mkdir()
    for path, message in (
        ("nowhere.jsonl", r"data.path=nowhere.jsonl: no such file or folder"),
        ("/no/where", r"data.path=/no/where: no such file or folder"),
        (write(""), r"rows.jsonl: holds no rows"),
        (str(tmp_path / "folder"), r"folder: no file in this folder ends in .jsonl, "),
        (write("nonsense", name="rows.parquet"), r"rows.parquet: not a readable Parquet file"),
        (write({"ask": "x", "reply": "y"}, name="a.jsonl"),
         r"the fields ask, reply; allowed: .*messages, con.*'data.columns=\{prompt: ask\}'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            load_records(path)


# --- Digests of prompts and rows: what makes two equal, and how many of a set are known.


FORMS = {
    "messages": {"messages": [{"role": "user", "content": "Why?"}]},
    "answered": {
        "messages": [
            {"role": "user", "content": "Why?\n"},
            {"role": "assistant", "content": "So."},
            {"role": "user", "content": "Who?"},
        ]
    },
    "conversations": {"conversations": [{"from": "human", "value": "Why?"}]},
    "turns": {"turns": ["Why?", "Who?"]},
    "prompt": {"prompt": "Why?", "response": "So."},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_prompt_has_one_digest_in_every_form_and_file(
    tmp_path: Path, name: str, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        write_rows(path, [FORMS[name]])
    else:
        parquet.write_table(pyarrow.Table.from_pylist([FORMS[name]]), path)
    [record] = load_records(str(path)).records
    assert compute_prompt_digest(record) == xxhash.xxh3_64_intdigest(b'"Why?"')


def test_another_question_makes_another_prompt_and_a_system_message_does_not(
    tmp_path: Path,
) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [FORMS["messages"]["messages"], [system, *FORMS["messages"]["messages"]]]
    rows.append([{"role": "user", "content": "Why not?"}])
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": row} for row in rows])
    digests = [compute_prompt_digest(record) for record in load_records(str(path)).records]
    assert digests[0] == digests[1] != digests[2]


def test_digests_are_stored_and_counted(tmp_path: Path) -> None:
    known = PromptDigests.from_values([2**64 - 1, 7, 7, 0])
    assert known.values.tolist() == [0, 7, 2**64 - 1]
    assert known.count_known([7, 7, 8, 2**64 - 1]) == 3
    path = tmp_path / "digests.json"
    assert PromptDigests.from_file(path) is None
    path.write_text(json.dumps(known.to_json()))
    stored = PromptDigests.from_file(path)
    assert stored is not None
    assert np.array_equal(stored.values, known.values)
    assert (stored | PromptDigests.from_values([5])).values.tolist() == [0, 5, 7, 2**64 - 1]
    path.write_text(json.dumps(known.to_json() | {"num_prompts": 4}))
    with pytest.raises(InputError, match=r"digests\.json: damaged \(3 digests in place of 4\)"):
        PromptDigests.from_file(path)
