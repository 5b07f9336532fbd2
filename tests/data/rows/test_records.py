import hashlib
import json
from pathlib import Path

import pytest

from conf.errors import InputError
from conf.settings.data import DataConfig, Form, OnBadRow
from data.rows.records import load_records

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
GOOD = {"messages": [USER, ASSISTANT]}


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSONL (strings and bytes as they are) and returns the path."""

    def write(*rows: dict | str | bytes, name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_bytes(b"".join(_bytes(line) + b"\n" for line in lines))
        return str(path)

    return write


def _bytes(line: str | bytes) -> bytes:
    return line if isinstance(line, bytes) else line.encode()


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"messages": [SYSTEM, USER, ASSISTANT, USER]}, Form.messages,
         [SYSTEM, USER, ASSISTANT, USER]),
        ({"conversations": [{"from": "system", "value": "Be kind"},
                            {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
         Form.conversations, [SYSTEM, USER, ASSISTANT]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, Form.alpaca, [USER, ASSISTANT]),
        ({"instruction": "Add", "input": "1 and 2", "output": "3"}, Form.alpaca,
         [{"role": "user", "content": "Add\n\n1 and 2"}, {"role": "assistant", "content": "3"}]),
        ({"turns": ["Hi", "And you?"]}, Form.turns,
         [USER, {"role": "user", "content": "And you?"}]),
        ({"prompt": "Hi"}, Form.prompt, [USER]),
        ({"prompt": "Hi", "response": "Hello"}, Form.prompt, [USER, ASSISTANT]),
        ({"prompt": "Hi", "completion": "Hello"}, Form.prompt, [USER, ASSISTANT]),
        # A published data set's extra columns do not mislead.
        ({"prompt": "x", "text": "y", "messages": [USER, ASSISTANT]}, Form.messages,
         [USER, ASSISTANT]),
        ({"messages": None, "instruction": "Hi", "output": "Hello", "text": "y"}, Form.alpaca,
         [USER, ASSISTANT]),
        ({"messages": [USER, ASSISTANT | {"tool_calls": None}]}, Form.messages, [USER, ASSISTANT]),
    ],
)  # fmt: skip
def test_each_form_is_detected_and_read(write, row, form, messages):
    loaded = load_records(write(row))
    assert loaded.form is form
    assert loaded.records[0].messages == messages
    assert loaded.records[0].text is None
    assert loaded.records[0].row == row
    assert loaded.bad == []


def test_plain_text(write):
    loaded = load_records(write({"text": "Once upon"}))
    assert loaded.form is Form.text
    assert (loaded.records[0].text, loaded.records[0].messages) == ("Once upon", None)


def test_category_is_kept(write):
    loaded = load_records(write({"turns": ["a"], "category": "math"}, {"turns": ["b"]}))
    assert [record.category for record in loaded.records] == ["math", "all"]


def test_the_form_can_be_forced(write):
    path = write({"messages": [USER], "text": "raw"})
    assert load_records(path, DataConfig(form=Form.text)).records[0].text == "raw"


def test_where_counts_lines_and_blank_lines_are_no_rows(write):
    path = write("\ufeff" + json.dumps(GOOD), "", GOOD)
    assert [r.where for r in load_records(path).records] == [f"{path}:1", f"{path}:3"]


def test_json_and_parquet_and_folder(write, tmp_path):
    from datasets import Dataset

    Path(tmp_path / "b.json").write_text(json.dumps([GOOD, GOOD]))
    Dataset.from_list([GOOD, GOOD, GOOD]).to_parquet(tmp_path / "c.parquet")
    write(GOOD, name="a.jsonl")
    Path(tmp_path / "README.md").write_text("not data")
    loaded = load_records(str(tmp_path))
    assert [Path(record.where).name for record in loaded.records] == [
        "a.jsonl:1", "b.json[row 1]", "b.json[row 2]",
        "c.parquet[row 1]", "c.parquet[row 2]", "c.parquet[row 3]",
    ]  # fmt: skip
    assert all(record.messages == [USER, ASSISTANT] for record in loaded.records)


def test_sha256_is_of_the_file(write):
    path = write(GOOD, GOOD)
    assert load_records(path).sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_hub_dataset(monkeypatch):
    import datasets

    def load(path, name, split, streaming):
        assert (path, name, split, streaming) == ("me/chats", None, "test", False)
        return datasets.Dataset.from_list([GOOD, GOOD])

    monkeypatch.setattr(datasets, "load_dataset", load)
    loaded = load_records("me/chats", DataConfig(split="test"))
    assert [r.where for r in loaded.records] == ["me/chats[test]:1", "me/chats[test]:2"]
    assert loaded.records[0].messages == [USER, ASSISTANT]


def test_hub_dataset_that_cannot_be_loaded(monkeypatch):
    import datasets

    def load(path, name, split, streaming=False):
        raise datasets.exceptions.DatasetNotFoundError("doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match=r"data.path=me/chats: .*Hub dataset .*doesn't exist"):
        load_records("me/chats")


def messages(*items: object) -> dict:
    return {"messages": list(items)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', r"rows.jsonl:2: .*invalid JSON \(.* at column 15\)"),
        (b'{"text": "\xff"}', r"rows.jsonl:2: .*not UTF-8 \(at byte 10\)"),
        ("[1, 2]", r"rows.jsonl:2: field '\(whole row\)': found \[1, 2\] \(list\); allowed: an"),
        ({"chat": [], "id": 3},
         r"field 'messages': found the fields chat, id; allowed: a row of data.form=messages"),
        (messages(), r"field 'messages': found \[\] \(list\); allowed: a non-empty list of obj"),
        ({"messages": "Hi"}, r"field 'messages': found 'Hi' \(str\); allowed: a non-empty list"),
        (messages("Hi"), r"field 'messages\[0\]': .*an object with 'role' and 'content'"),
        (messages(USER, {"role": "moderator", "content": "x"}),
         r"'messages\[1\].role': found 'moderator' \(str\); allowed: system, user, assist"),
        (messages({"role": ["user"], "content": "x"}), r"'messages\[0\].role': found \['user'\]"),
        (messages({"content": "x"}), r"'messages\[0\].role': found nothing"),
        (messages(USER, {"role": "assistant"}),
         r"'messages\[1\].content': found nothing; allowed: a string"),
        (messages(USER, {"role": "assistant", "content": {"text": "x"}}),
         r"'messages\[1\].content': found \{'text'.*\(dict\); allowed: a string"),
        (messages(USER, {"role": "assistant", "content": " \n"}),
         r"'messages\[1\].content': found empty text; allowed: a non-empty string"),
        (messages(USER, {"role": "assistant", "content": "\ud83d"}),
         r"'messages\[1\].content': found half of a surrogate pair"),
        (messages(USER, ASSISTANT | {"tool_calls": [{"id": 1}]}), r"'messages\[1\].tool_calls"),
        (messages(SYSTEM), r"'messages': found only a system message"),
    ],
)  # fmt: skip
def test_malformed_row_names_line_and_field(write, row, message):
    path = write(GOOD, row)
    with pytest.raises(InputError, match=r"rows.jsonl:2: .*data.on_bad_row=skip") as caught:
        load_records(path)
    caught.match(message)
    loaded = load_records(path, DataConfig(on_bad_row=OnBadRow.skip))
    assert len(loaded.records) == 1
    assert len(loaded.bad) == 1
    assert loaded.bad[0].startswith(f"{path}:2: field ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [{"from": "nobody", "value": "x"}]},
         r"'conversations\[0\].from': found 'nobody' \(str\); allowed: system, user, assistant"),
        ({"instruction": "", "output": "x"}, r"'instruction': found empty text"),
        ({"instruction": "x", "output": ""}, r"'output': found empty text"),
        ({"instruction": "x", "input": 3, "output": "y"}, r"'input': found 3 \(int\)"),
        ({"prompt": ["x"]}, r"'prompt': found \['x'\] \(list\); allowed: a string"),
        ({"prompt": "x", "response": 1}, r"'response': found 1 \(int\)"),
        ({"turns": ["x", None]}, r"'turns\[1\]': found nothing; allowed: a string"),
        ({"turns": []}, r"'turns': found \[\] \(list\); allowed: a non-empty list of strings"),
        ({"text": 3}, r"'text': found 3 \(int\); allowed: a string"),
    ],
)  # fmt: skip
def test_malformed_rows_of_the_other_forms(write, row, message):
    with pytest.raises(InputError, match=message):
        load_records(write(row))


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
        load_records(path, DataConfig(on_bad_row=OnBadRow.skip))
    assert (
        len(load_records(path, DataConfig(form=Form.messages, on_bad_row=OnBadRow.skip)).bad) == 1
    )


def test_wrong_column(write):
    message = r"the fields ask, reply; allowed: .*messages, con.*data.columns=\{prompt: ask, resp"
    with pytest.raises(InputError, match=message):
        load_records(write({"ask": "x", "reply": "y"}))


def test_every_row_malformed(write):
    with pytest.raises(
        InputError, match=r"every row is malformed \(2\); the first: .*rows.jsonl:1"
    ):
        load_records(write(messages(), messages()), DataConfig(on_bad_row=OnBadRow.skip))


def test_missing_and_empty(write, tmp_path):
    with pytest.raises(InputError, match=r"data.path=nowhere.jsonl: no such file or folder"):
        load_records("nowhere.jsonl")
    with pytest.raises(InputError, match=r"data.path=/no/where: no such file or folder"):
        load_records("/no/where")
    with pytest.raises(InputError, match=r"rows.jsonl: holds no rows"):
        load_records(write(""))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder: a folder without files that end in .jsonl, "):
        load_records(str(tmp_path / "folder"))


def test_a_file_that_is_not_what_its_name_says(write):
    with pytest.raises(InputError, match=r"rows.parquet: not a readable Parquet file"):
        load_records(write("nonsense", name="rows.parquet"))
