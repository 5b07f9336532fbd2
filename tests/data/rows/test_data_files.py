"""Kinds of files and folders, the rows that are read of them, and benchmarks as published."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from data.rows.data_files import Row, find_dataset_revision, find_source, iter_rows
from data.rows.records import load_records
from tests.chats import write_rows

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROW = {"messages": CHAT}
LINE = json.dumps(ROW).encode() + b"\n"
GZIP = gzip.compress(LINE * 99, mtime=0)
QUOTED = b'"' + json.dumps(CHAT).replace('"', '""').encode() + b'"'
CSV = b'prompt,response\nHi,"Hello, you"\n\n"Two\nlines",x\nlast,y\n'


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def table(content: bytes) -> pa.Table:
    return pa.Table.from_pylist([json.loads(line) for line in content.splitlines()])


def arrow_stream(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table(content).schema) as writer:
        writer.write_table(table(content))
    return sink.getvalue().to_pybytes()


def arrow_file(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table(content).schema) as writer:
        writer.write_table(table(content))
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.jsonl", LINE * 2, [":1", ":2"]),
        ("a.ndjson", LINE * 2, [":1", ":2"]),
        ("A.JSONL", LINE * 2, [":1", ":2"]),
        ("a.jsonl.gz", gzip.compress(LINE * 2, mtime=0), [":1", ":2"]),
        ("a.jsonl.zst", zstd(LINE * 2), [":1", ":2"]),
        ("a.jsonl.zst", zstd(LINE) + zstd(LINE), [":1", ":2"]),
        ("a.json", b"[" + LINE + b"," + LINE + b"]", ["[row 1]", "[row 2]"]),
        ("a.json", b"\xef\xbb\xbf" + LINE + b"\n" + LINE, [":1", ":3"]),
        ("a.json.gz", gzip.compress(LINE, mtime=0), [":1"]),
        ("a.json", LINE, [":1"]),
        ("a.arrow", arrow_stream(LINE * 2), ["[row 1]", "[row 2]"]),
        ("a.arrow", arrow_file(LINE * 2), ["[row 1]", "[row 2]"]),
        ("a.csv", b"messages,id\n" + QUOTED + b",3\n", [":2"]),
    ],
)  # fmt: skip
def test_kinds_of_files(tmp_path, name, content, places):
    path = tmp_path / name
    path.write_bytes(content)
    loaded = load_records(str(path))
    assert [record.where for record in loaded.records] == [f"{path}{place}" for place in places]
    assert all(record.messages == CHAT for record in loaded.records)


def test_the_sha256_is_of_what_is_unpacked(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(LINE * 9))
    loaded = load_records(str(tmp_path / "a.jsonl.zst"))
    assert loaded.sha256 == hashlib.sha256(LINE * 9).hexdigest()


@pytest.mark.parametrize(("name", "cells"), [("a.csv", CSV), ("a.tsv", CSV.replace(b",", b"\t"))])
def test_cells(tmp_path, name, cells):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + cells)
    records = load_records(str(path)).records
    assert [record.row for record in records] == [
        {"prompt": "Hi", "response": "Hello, you" if name == "a.csv" else "Hello\t you"},
        {"prompt": "Two\nlines", "response": "x"},
        {"prompt": "last", "response": "y"},
    ]
    assert [record.where for record in records] == [f"{path}:2", f"{path}:4", f"{path}:6"]


def test_a_row_with_more_cells_than_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(CSV + b"a,b,c\n")
    with pytest.raises(InputError, match=r"a.csv:7: .*found 3 cells under 2 names"):
        load_records(str(path))
    assert len(load_records(str(path), DataConfig(on_bad_row=OnBadRow.skip)).records) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", r"a.txt: ends in '.txt'; allowed: .jsonl, .ndjson, .json, .csv, .tsv, "),
        ("a.jsonl.xz", b"x", r"a.jsonl.xz: ends in '.xz'; .*the first 5 also in .gz or .zst"),
        ("a.parquet.gz", b"x", r"a.parquet.gz: ends in '.gz'"),
        *(("a.jsonl.gz", content, r"a.jsonl.gz: not a readable gzip file: ")
          for content in (b"not gzip", GZIP[:-9], GZIP[:10] + b"\xff" * 9,
                          GZIP[:-8] + b"crc, size")),
        ("a.jsonl.zst", b"nonsense", r"a.jsonl.zst: cannot be read: ZSTD"),
        ("a.jsonl.zst", zstd(LINE * 9)[:-9], r"a.jsonl.zst: cannot be read: Truncated"),
        ("a.arrow", b"nonsense", r"a.arrow: not a readable Arrow file: "),
        ("a.arrow", arrow_stream(LINE).replace(b"Hello", b"\xff\xff\xff\xff\xff"),
         r"a.arrow: not a readable Arrow file: .*UTF8"),
        ("a.json", b'{\n"messages": []\n}', r"a.json: found \{'messages': \[\]\} .*allowed: a"),
        ("a.json", b'[{"a": 1},\n{"a": ]', r"a.json:2: invalid JSON \(Expecting value at column 7"),
        ("a.json", b'[{"a": "\xff"}]', r"a.json: not UTF-8 \(at byte 8\)"),
        ("a.json", b"[" * 100_000, r"a.json: unreadable JSON: maximum recursion"),
        ("a.json", b"[" + b"9" * 5000 + b"]", r"a.json: unreadable JSON: Exceeds"),
        ("a.csv", b"a,a\n1,2\n", r"a.csv:1: two columns have the same name among a, a"),
        ("a.csv", b'prompt\n"x\n', r"a.csv:2: unexpected end of data"),
        ("a.csv", b"prompt\nx\n\xff\n", r"a.csv:3: not UTF-8 \(at byte 0\)"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_records(str(tmp_path / name))


def test_an_object_on_several_lines_is_told_how_it_is_written_on_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{\n  "text": "a"\n}\n')
    with pytest.raises(InputError, match=r"a.jsonl:1 .*over several lines; name the file .json"):
        load_records(str(path))


@pytest.fixture
def folder(tmp_path):
    """Writes files of one row each and returns their folder."""

    def folder(*names: str) -> Path:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(LINE)
        return tmp_path

    return folder


@pytest.mark.parametrize(
    ("names", "split", "read", "left_out"),
    [
        ("b.jsonl a.jsonl", "train", "a.jsonl b.jsonl", ""),
        ("b.jsonl a.jsonl", "test", "a.jsonl b.jsonl", ""),
        ("train.jsonl test.jsonl", "train", "train.jsonl", "test.jsonl (data.split=train)"),
        ("train.jsonl test.jsonl", "test", "test.jsonl", "train.jsonl (data.split=test)"),
        ("train.jsonl valid.jsonl", "validation", "valid.jsonl",
         "train.jsonl (data.split=validation)"),
        ("train-00000-of-00002.jsonl train-00001-of-00002.jsonl validation-00000-of-00001.jsonl",
         "train", "train-00000-of-00002.jsonl train-00001-of-00002.jsonl",
         "validation-00000-of-00001.jsonl (data.split=train)"),
        ("data/train_gen.jsonl data/train_sft.jsonl", "train_sft", "data/train_sft.jsonl",
         "data/train_gen.jsonl (data.split=train_sft)"),
        ("train.jsonl more.jsonl test_2.jsonl", "train", "more.jsonl train.jsonl",
         "test_2.jsonl (data.split=train)"),
        ("train_gen-00000-of-00001.jsonl train_sft-00000-of-00001.jsonl", "train_sft",
         "train_sft-00000-of-00001.jsonl",
         "train_gen-00000-of-00001.jsonl (data.split=train_sft)"),
        ("unit_test_chats.jsonl a.jsonl", "train", "a.jsonl unit_test_chats.jsonl", ""),
        ("train/a.jsonl test/a.jsonl", "test", "test/a.jsonl", "train/a.jsonl (data.split=test)"),
        ("chats.jsonl my.test.jsonl", "train", "chats.jsonl", "my.test.jsonl (data.split=train)"),
        ("latest.jsonl contest.jsonl", "train", "contest.jsonl latest.jsonl", ""),
        # What lies beside the rows: named, but for what tools write about them.
        ("data/a.jsonl README.md .git/x.json .gitattributes dataset_info.json manifest.json",
         "train", "data/a.jsonl", "README.md (no rows)"),
    ],
)  # fmt: skip
def test_files_of_a_folder(folder, names, split, read, left_out):
    path = folder(*names.split())
    loaded = load_records(str(path), DataConfig(split=split))
    assert [record.where for record in loaded.records] == [f"{path}/{n}:1" for n in read.split()]
    assert loaded.left_out == ((left_out,) if left_out else ())


def test_configurations_in_folders(folder):
    path = folder("main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl")
    source = find_source(str(path), DataConfig(subset="main"))
    assert source.files == (path / "main/train.jsonl",)
    why = "(data.subset=main data.split=train)"
    assert source.left_out == (f"main/test.jsonl {why}", f"socratic/train.jsonl {why}")
    with pytest.raises(InputError, match=r"data.subset=other: no file and no folder of .* has"):
        find_source(str(path), DataConfig(subset="other"))


def test_a_split_that_no_file_is_named_for(folder):
    path = folder("dev.jsonl", "test.jsonl")
    message = r"data.split=train: no file of .* is named after it; it holds dev.jsonl, test.jsonl"
    with pytest.raises(InputError, match=message):
        find_source(str(path))


def test_a_cloned_hub_dataset(tmp_path):
    (tmp_path / "data").mkdir()
    dataset = datasets.Dataset.from_list([ROW, ROW])
    for split in ("train", "test"):
        dataset.to_parquet(tmp_path / f"data/{split}-00000-of-00001.parquet")
    loaded = load_records(str(tmp_path))
    file = tmp_path / "data/train-00000-of-00001.parquet"
    assert [record.where for record in loaded.records] == [f"{file}[row 1]", f"{file}[row 2]"]
    assert loaded.left_out == ("data/test-00000-of-00001.parquet (data.split=train)",)


def test_a_dataset_that_was_saved_to_disk(tmp_path):
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([ROW, ROW]).save_to_disk(saved)
    (saved / "cache-0123.arrow").write_bytes(b"of an earlier map()")
    file = saved / "data-00000-of-00001.arrow"
    loaded = load_records(str(saved))
    assert [record.where for record in loaded.records] == [f"{file}[row 1]", f"{file}[row 2]"]
    assert loaded.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_saved_dataset_of_several_splits(tmp_path):
    one = datasets.Dataset.from_list([ROW])
    datasets.DatasetDict({"train": one, "test_sft": one}).save_to_disk(tmp_path / "saved")
    loaded = load_records(str(tmp_path / "saved"), DataConfig(split="test_sft"))
    file = tmp_path / "saved/test_sft/data-00000-of-00001.arrow"
    assert [record.where for record in loaded.records] == [f"{file}[row 1]"]
    assert loaded.left_out == ("train/ (data.split=test_sft)",)
    with pytest.raises(InputError, match=r"data.split=dev: not in .* has test_sft, train"):
        load_records(str(tmp_path / "saved"), DataConfig(split="dev"))


def test_a_damaged_saved_dataset(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(
        InputError, match=r"state.json: does not describe a saved dataset: KeyError"
    ):
        load_records(str(tmp_path))
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(InputError, match=r"holds no rows"):
        load_records(str(tmp_path))
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    with pytest.raises(InputError, match=r"a.arrow: not a readable Arrow file: .*No such file"):
        load_records(str(tmp_path))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "pandas.jsonl", "a.json", "a.arrow"])
def test_a_table_has_the_same_text_in_every_kind_of_file(tmp_path, name):
    """In a table every object has the fields of all others, empty; so have JSON lines of one."""
    tools = [{"name": name, "parameters": {"properties": {name: {"type": "string"}}}}
             for name in ("add", "find")]  # fmt: skip
    calls = [[{"name": name, "arguments": {name: "x"}}] for name in ("add", "find")]
    rows = [
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": call}], "tools": tools,
         "chat_template_kwargs": kwargs}
        for call, kwargs in zip(calls, ({"enable_thinking": True}, {"style": "dry"}), strict=True)
    ]  # fmt: skip
    dataset = datasets.Dataset.from_list(rows)
    path = tmp_path / name
    if name == "a.parquet":
        dataset.to_parquet(path)
    elif name == "a.arrow":
        path.write_bytes(arrow_file(b"\n".join(json.dumps(row).encode() for row in rows)))
    elif name == "pandas.jsonl":
        dataset.to_pandas().to_json(path, orient="records", lines=True)
    else:
        dataset.to_json(path, lines=name == "a.jsonl")
    first, second = load_records(str(path)).records
    assert [r.template_kwargs for r in (first, second)] == [
        {"enable_thinking": True}, {"style": "dry"},
    ]  # fmt: skip
    assert [r.messages[1]["tool_calls"][0]["function"]["arguments"] for r in (first, second)] == [
        {"add": "x"}, {"find": "x"},
    ]  # fmt: skip
    assert first.tools == second.tools == [{"type": "function", "function": t} for t in tools]
    assert (first.unread_fields, second.unread_fields) == ((), ())


def test_arguments_written_as_json_keep_their_nulls(tmp_path):
    call = {"name": "add", "arguments": '{"a": null}'}
    row = {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call]}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (record,) = load_records(str(tmp_path / "a.jsonl")).records
    assert record.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_objects_that_a_table_holds_as_json(tmp_path):
    kind = datasets.Features({"messages": datasets.Value("string"), "tools": [datasets.Json()]})
    tools = [{"name": "add", "parameters": {"a": 1}}, {"name": "find", "parameters": {"b": [2]}}]
    rows = [{"messages": json.dumps(CHAT), "tools": tools}]
    datasets.Dataset.from_list(rows, features=kind).to_parquet(tmp_path / "a.parquet")
    (record,) = load_records(str(tmp_path / "a.parquet")).records
    assert record.messages == CHAT
    assert record.tools == [{"type": "function", "function": tool} for tool in tools]


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE * 3)
    digest = hashlib.sha256()
    rows = iter_rows(find_source(str(path)), digest)
    assert isinstance(rows, Iterator)
    assert next(rows) == Row(f"{path}:1", raw=LINE)
    assert digest.hexdigest() == hashlib.sha256(LINE).hexdigest()
    assert next(rows).parse_raw() == Row(f"{path}:2", value=ROW)


def test_what_was_left_out_is_printed(folder):
    path = folder("train.jsonl", "test.jsonl")
    rows = [b"[]\n"] * 11 + [json.dumps(ROW | {"id": n}).encode() + b"\n" for n in range(1000)]
    (path / "train.jsonl").write_bytes(b"".join([LINE, *rows]))
    lines = load_records(str(path), DataConfig(on_bad_row=OnBadRow.skip)).format_lines()
    assert lines[0].startswith(f"malformed: {path}/train.jsonl:2: field '(whole row)'")
    assert lines[10:] == [
        "malformed: 1 more",
        "fields not read: id (1,000 rows)",
        "not read: test.jsonl (data.split=train)",
        "copies: 1,000 rows repeat an earlier one",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}\n',
        '[{"prompt": "a"},\n {"prompt": "b"}]',
        '{\n"prompt": "a"}{"prompt": "b"}',
    ],
)
def test_json_as_jq_writes_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(text)
    rows = iter_rows(find_source(str(tmp_path / "rows.json")), hashlib.sha256())
    assert [row.parse_raw().value for row in rows] == [{"prompt": "a"}, {"prompt": "b"}]


# --- Benchmarks of speculative decoding as they are published: placeholders, places and versions.


SPEED = {"question_id": "0f3c", "category": "coding", "source": "me/codes", "multiturn": True}
TWO = ["Sort a list.", "Now without sorted()."]
ASKED = [{"role": "user", "content": text} for text in TWO]
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def written(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(write_rows(path, list(rows)))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (SPEED | {"turns": [PLACEHOLDER]}, "turns"),
        # The rest of the prompt is there, its source is not; of a later turn as well.
        (SPEED | {"turns": [TWO[0], PLACEHOLDER + "\n\nSummarise: {article}"]}, "turns"),
        (SPEED | {"messages": [ASKED[0] | {"content": PLACEHOLDER}]}, "messages"),
    ],
)
def test_prompts_that_were_never_fetched(tmp_path: Path, row: dict, field: str) -> None:
    path = written(tmp_path / "a.jsonl", row)
    message = rf"a\.jsonl:1: field '{field}': found a placeholder of SPEED-Bench .*prepare\.py"
    with pytest.raises(InputError, match=message):
        load_records(path)
    both = written(tmp_path / "b.jsonl", row, {**row, field: TWO if field == "turns" else ASKED})
    left = load_records(both, DataConfig(on_bad_row=OnBadRow.skip))
    assert (len(left.records), len(left.bad)) == (1, 1)


@pytest.mark.parametrize(
    "name", ["{}.jsonl", "{}/test.jsonl", "{}/test-00000-of-00001.jsonl", "data/{}.jsonl"]
)
def test_a_configuration_is_a_file_or_a_folder(tmp_path: Path, name: str) -> None:
    for config in ("qualitative", "throughput_1k"):
        row = SPEED | {"turns": [config], "category": config}
        written(tmp_path / name.format(config), row)
    config = DataConfig(subset="throughput_1k", split="test")
    (record,) = load_records(str(tmp_path), config).records
    assert record.category == "throughput_1k"
    config.subset = "throughput_2k"
    message = r"data\.subset=throughput_2k: no file and no folder .*; it holds .*throughput_1k"
    with pytest.raises(InputError, match=message):
        load_records(str(tmp_path), config)


A, B = "a1" * 20, "b2" * 20


def test_the_version_of_a_copy(tmp_path: Path) -> None:
    rows = Path(written(tmp_path / "plain/rows.jsonl", {}))
    assert find_dataset_revision(str(rows)) is None
    cached = written(tmp_path / f"datasets--me--x/snapshots/{A}/data/rows.jsonl", {})
    assert find_dataset_revision(cached) == A
    notes = tmp_path / "got/.cache/huggingface/download/qualitative"
    got = Path(written(tmp_path / "got/qualitative/test.jsonl", {}))
    for name in ("test.parquet", "more.parquet"):
        written(notes / f"{name}.metadata")
        (notes / f"{name}.metadata").write_text(f"{B}\netag\n1.5\n")
    assert [find_dataset_revision(str(p)) for p in (got, got.parent, got.parents[1])] == [B, B, B]
    (notes / "more.parquet.metadata").write_text(f"{A}\netag\n1.5\n")
    assert find_dataset_revision(str(got)) is None


def test_the_version_of_a_clone(tmp_path: Path) -> None:
    rows = written(tmp_path / "clone/rows.jsonl", {})
    git = tmp_path / "clone/.git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert find_dataset_revision(str(tmp_path / "clone")) is None
    (git / "packed-refs").write_text(f"# pack\n{A} refs/heads/main\n{B} refs/heads/other\n")
    assert find_dataset_revision(str(tmp_path / "clone")) == A
    (git / "refs/heads/main").write_text(B + "\n")
    assert find_dataset_revision(str(tmp_path / "clone")) == B
    (git / "HEAD").write_text(A + "\n")
    assert find_dataset_revision(str(tmp_path / "clone")) == A
    # A file of one's own in a repository of one's own has no published version.
    assert find_dataset_revision(rows) is None


def test_the_version_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: HfApi, path: str) -> Any:
        if path == "nvidia/SPEED-Bench":
            return SimpleNamespace(sha=A)
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(HfApi, "dataset_info", answer)
    assert [find_dataset_revision(path) for path in ("nvidia/SPEED-Bench", "me/x")] == [A, None]
