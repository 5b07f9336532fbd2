"""Data prepared once: what is stored, when it is found again, and when it is made anew."""

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from huggingface_hub import HfApi
from templates import REFUSING

from conf.errors import InputError
from conf.settings.data import DataConfig, Form, OnBadRow
from data.prepared import tokenise
from data.prepared.dataset_cache import PreparedFolder, load_or_prepare_data
from data.prepared.packing import PackedDataset
from data.prepared.prepare import prepare_datasets
from data.rows.records import Record, load_records
from data.templates import record_encoder as encoder
from data.templates.record_encoder import RecordEncoder, Sample
from tests.chats import write_rows
from tests.data.prepared.test_packing import exchange, make_tokenizer

ROWS = [exchange(f"ask {i}", "word " * (i % 7 + 1)) for i in range(20)]
TOKENIZER = make_tokenizer()
ENCODE = RecordEncoder(TOKENIZER).encode_record
REFUSED = "the target's chat template refuses the conversation: refused"


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """20 rows in shards of 4."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS)
    return DataConfig(str(path), num_proc=1, prepared_dir=str(tmp_path / "prepared"))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "SHARD_ROWS", 4)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The places of the records that are tokenised."""
    places: list[str] = []
    real = RecordEncoder.encode_record

    def watched(self: RecordEncoder, record: Record) -> list[Sample]:
        places.append(Path(record.where).name)
        return real(self, record)

    monkeypatch.setattr(RecordEncoder, "encode_record", watched)
    return places


def opened(config: DataConfig, tokenizer: Any = TOKENIZER) -> PreparedFolder:
    return load_or_prepare_data(str(config.path), config, tokenizer)


def contents(found: PreparedFolder) -> list[tuple[int, list[int], list[bool]]]:
    samples = [found.samples.slice_sample(i, int(n)) for i, n in enumerate(found.samples.lengths)]
    return [
        (int(record), each.input_ids.tolist(), each.loss_mask.tolist())
        for record, each in zip(found.record_of_sample, samples, strict=True)
    ]


def encoded(path: str) -> list[tuple[int, list[int], list[bool]]]:
    """One at a time, in memory."""
    records = load_records(path).records
    samples = [sample for record in records for sample in ENCODE(record)]
    return [(n, sample.input_ids, sample.loss_mask) for n, sample in enumerate(samples)]


def test_a_store_holds_what_the_rows_give_one_at_a_time(config: DataConfig) -> None:
    found = opened(config)
    assert contents(found) == encoded(str(config.path))
    assert (found.num_records, found.form, found.bad_row_messages) == (20, Form.prompt, [])
    assert found.sha256 == load_records(str(config.path)).sha256
    names = [f"shard-0000{n}.{ending}" for n in range(5) for ending in ("json", "safetensors")]
    assert sorted(path.name for path in found.folder.iterdir()) == ["index.json", *names]


def test_its_sequences_are_those_of_samples_in_memory(config: DataConfig) -> None:
    held_out = Path(str(config.path)).with_name("held_out.jsonl")
    write_rows(held_out, ROWS[:9])
    config = replace(config, max_length=32, eval_path=str(held_out))
    samples = [sample for r in load_records(str(config.path)).records for sample in ENCODE(r)]
    there, _, report = prepare_datasets(config, TOKENIZER, seed=7)
    here = PackedDataset(samples, 32, seed=7, pad_id=there.pad_id)
    assert len(there) == len(here) > 5
    for index in range(len(here)):
        for name, tensor in here[index].items():
            assert torch.equal(there[index][name], tensor), name
    truncated = [sum(len(ids) > 32 for _, ids, _ in encoded(str(each)))
                 for each in (config.path, held_out)]  # fmt: skip
    assert (there.num_truncated, report.num_truncated) == (truncated[0], sum(truncated))
    assert (there.checksum, there.sequence_lengths) == (
        here.checksum,
        here.sequence_lengths,
    )
    assert torch.equal(there.count_token_ids(300), here.count_token_ids(300))
    assert there.num_supervised_tokens == here.num_supervised_tokens


def test_its_tokens_stay_in_the_files(config: DataConfig) -> None:
    found = opened(config)
    maps = Path("/proc/self/maps").read_text()
    assert all(f"{found.folder}/shard-0000{n}.safetensors" in maps for n in range(5))


def test_a_second_start_reads_no_data_and_tokenises_nothing(
    config: DataConfig, tokenised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, usual, read = opened(config), Path.open, []
    assert len(tokenised) == 20

    def noted(path: Path, *how: Any, **more: Any) -> Any:
        read.append(str(path))
        return usual(path, *how, **more)

    monkeypatch.setattr(Path, "open", noted)
    again = opened(replace(config, max_length=16, num_prompts=3, eval_fraction=0.5, num_proc=7))
    assert len(tokenised) == 20
    assert again.folder == first.folder
    assert contents(again) == contents(first)
    assert read
    assert config.path not in read


def test_what_decides_the_tokens_decides_the_store(config: DataConfig) -> None:
    before = {opened(config).folder}
    others: list[dict[str, Any]] = [
        {"form": Form.prompt}, {"split": "test"}, {"columns": {"prompt": "prompt"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]  # fmt: skip
    for other in (replace(config, **each) for each in others):
        before.add(opened(other).folder)
    larger = make_tokenizer()
    larger.add_tokens(["word word"])
    for tokenizer in (make_tokenizer(REFUSING + "{# other #}"), larger):
        before.add(opened(config, tokenizer).folder)
    write_rows(Path(str(config.path)), [*ROWS[:-1], exchange("ask 91", ROWS[-1]["response"])])
    before.add(opened(config).folder)
    assert len(before) == 8


def test_other_code_makes_another_store_and_other_words_do_not(
    config: DataConfig, monkeypatch, tmp_path: Path
) -> None:
    before = opened(config).folder
    text = Path(str(encoder.__file__)).read_text()
    changed = tmp_path / "encoder.py"
    monkeypatch.setattr(encoder, "__file__", str(changed))
    changed.write_text(f"# other\n{text}")
    assert opened(config).folder == before
    changed.write_text(f"{text}\nother = 1\n")
    assert opened(config).folder != before


@pytest.mark.parametrize(
    ("damage", "with_index"), [("byte", True), ("byte", False), ("cut", False), ("gone", True)]
)
def test_a_damaged_shard_is_made_again(
    config: DataConfig, tokenised: list[str], capsys, damage: str, with_index: bool
) -> None:
    first = opened(config)
    shard = first.folder / "shard-00002.safetensors"
    before = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(before[:-1] + bytes([before[-1] ^ 1] if damage == "byte" else []))
    if not with_index:
        (first.folder / "index.json").unlink()
    tokenised.clear()
    assert contents(opened(config)) == encoded(str(config.path))
    assert tokenised == [f"rows.jsonl:{n}" for n in range(9, 13)]
    assert shard.read_bytes() == before
    said = f"{first.folder}: damaged files are made again: shard-00002\n"
    assert capsys.readouterr().err == (said if with_index else "")


def test_a_damaged_index_is_made_again(config: DataConfig, tokenised: list[str], capsys) -> None:
    index = opened(config).folder / "index.json"
    index.write_text(index.read_text()[:-5])
    tokenised.clear()
    assert contents(opened(config)) == encoded(str(config.path))
    assert tokenised == []
    assert capsys.readouterr().err.endswith("made again: index.json\n")


BAD = [*ROWS[:5], {"prompt": ""}, *ROWS[:5], exchange("refuse me", "x"), 7]


def test_bad_rows_are_listed_in_the_order_of_the_file(config: DataConfig) -> None:
    path = Path(str(config.path))
    write_rows(path, BAD)
    found = opened(replace(config, on_bad_row=OnBadRow.skip))
    assert found.bad_row_messages == [
        f"{path}:6: field 'prompt': found empty text; allowed: a non-empty string",
        f"{path}:12: {REFUSED}",
        f"{path}:13: field '(whole row)': found 7 (int); allowed: an object with fields",
    ]
    assert (found.num_records, found.refused_records.tolist()) == (11, [10])
    assert found.record_of_sample.tolist() == list(range(10))


def test_the_first_bad_row_stops(config: DataConfig, tokenised: list[str]) -> None:
    path = Path(str(config.path))
    write_rows(path, [*ROWS[:4], *BAD])
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            opened(config)
        why = "field 'prompt': found empty text; allowed: a non-empty string"
        assert str(caught.value) == f"{path}:10: {why}; fix the row or set data.on_bad_row=skip"
    assert len(tokenised) == 11  # the shard with it is whole, and what follows is not begun
    opened(replace(config, on_bad_row=OnBadRow.skip))
    assert len(tokenised) == 15
    with pytest.raises(InputError, match=r":10: field 'prompt': .*data.on_bad_row=skip"):
        opened(config)


def test_what_is_left_out_is_counted(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    think = [{"role": "user", "content": "ask"},
             {"role": "assistant", "content": "answer", "reasoning_content": "why"}]  # fmt: skip
    write_rows(folder / "train.jsonl", [{"messages": think, "id": n} for n in range(9)])
    write_rows(folder / "test.jsonl", ROWS)
    config = replace(config, path=str(folder), max_length=64)
    found, report = opened(config), prepare_datasets(config, TOKENIZER, seed=0)[2]
    assert found.num_records == 9
    assert (found.unread, report.unread) == ({"id": 9}, {"id": 9})
    assert list(found.unrendered.values()) == list(report.unrendered.values()) == [9]
    assert report.left_out == ["test.jsonl (data.split=train)"]
    assert "  fields not read: id (9 rows)" in report.format_lines()
    assert "  not read: test.jsonl (data.split=train)" in report.format_lines()


def test_ids_need_no_template(config: DataConfig) -> None:
    path = Path(str(config.path))
    ids = [{"input_ids": [n, n + 1], "loss_mask": [0, 1]} for n in range(5)]
    write_rows(path, ids)
    found = opened(config, make_tokenizer(None))
    assert contents(found) == [(n, [n, n + 1], [False, True]) for n in range(5)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "{path}: holds no rows"),
        ([{"prompt": ""}] * 9, "{path}: every row is malformed (9); the first: {path}:1: field"),
        ([*ROWS, {"text": "other"}], "{path}:21: a row of form text (the fields text) among rows"),
    ],
)
def test_data_that_cannot_be_prepared(config: DataConfig, rows: list[Any], message: str) -> None:
    path = Path(str(config.path))
    write_rows(path, rows)
    with pytest.raises(InputError) as caught:
        opened(replace(config, on_bad_row=OnBadRow.skip))
    assert str(caught.value).startswith(message.format(path=path))


def test_a_file_that_grows_while_it_is_read(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = Path(str(config.path)), RecordEncoder.encode_record

    def grow(self: RecordEncoder, record: Record) -> list[Sample]:
        write_rows(path, [*ROWS, *ROWS])
        return real(self, record)

    monkeypatch.setattr(RecordEncoder, "encode_record", grow)
    with pytest.raises(InputError, match=r"rows.jsonl: changed while being read"):
        opened(config)


def fill_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def damage(*_: Any) -> bool:
    return False


def forbid(path: Path, *how: Any, usual: Any = Path.open, **more: Any) -> Any:
    if path.name == "rows.jsonl":
        raise PermissionError(13, "Permission denied", str(path))
    return usual(path, *how, **more)


@pytest.mark.parametrize(
    ("changed", "name", "fault", "message"),
    [
        (
            tokenise.os,
            "fsync",
            fill_disk,
            r"prepared_dir=.*: cannot hold the prepared data \(.*No sp",
        ),
        (
            tokenise.PreparedShard,
            "is_whole",
            damage,
            "newly written data are damaged; name another",
        ),
        (Path, "open", forbid, r"^[^=]*rows\.jsonl: cannot be read: .*Permission denied"),
    ],
)
def test_what_a_disk_refuses_leaves_nothing_half_written(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, changed, name, fault, message
) -> None:
    monkeypatch.setattr(changed, name, fault)
    with pytest.raises(InputError, match=message):
        opened(config)
    assert list(Path(str(config.prepared_dir)).rglob("*.tmp")) == []


def test_it_lies_in_the_cache_unless_told(config: DataConfig, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path / "cache"))
    assert opened(replace(config, prepared_dir=None)).folder.parent == tmp_path / "cache/prepared"
    monkeypatch.delenv("HEADSMITH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = opened(replace(config, prepared_dir=None)).folder
    assert folder.parent == tmp_path / "home/.cache/headsmith/prepared"


def test_the_report_has_lengths_and_the_place(config: DataConfig) -> None:
    report = prepare_datasets(config, TOKENIZER, seed=0)[2]
    lengths = sorted(len(sample[1]) for sample in encoded(str(config.path)))
    assert report.lengths == {
        "p50": lengths[10], "p90": lengths[18], "p99": lengths[19], "longest": lengths[19]
    }  # fmt: skip
    assert report.prepared == [str(opened(config).folder)]
    assert report.rows_per_s is not None
    assert prepare_datasets(config, TOKENIZER, seed=0)[2] == report


def test_a_streamed_hub_dataset_is_known_by_its_revision(
    config: DataConfig, tokenised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(config.path)
    config.streaming = True
    asked = []

    def load(path: str, name: str | None, split: str, streaming: bool) -> Any:
        asked.append((path, name, split, streaming))
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    revisions = iter(["a1", "a1", "b2"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_: SimpleNamespace(sha=next(revisions)))
    hub = [load_or_prepare_data("me/chats", config, TOKENIZER) for _ in range(3)]
    assert set(asked) == {("me/chats", None, "train", True)}
    assert len(tokenised) == 2 * len(ROWS)
    assert hub[0].folder == hub[1].folder != hub[2].folder
    assert contents(hub[0]) == encoded(path)


def test_other_data_of_the_same_size_and_time_are_read(config: DataConfig) -> None:
    """As `rsync -t`, `cp -p` and `tar` leave them."""
    path, first = Path(str(config.path)), opened(config)
    before, text = path.stat(), path.read_text()
    path.write_text(text.replace("ask", "say"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    found = opened(config)
    assert found.folder != first.folder
    assert contents(found) != contents(first)


def test_data_are_known_by_their_contents(
    config: DataConfig, tokenised: list[str], tmp_path: Path
) -> None:
    write_rows(Path(str(config.path)), [*ROWS, {"prompt": ""}])
    config = replace(config, on_bad_row=OnBadRow.skip)
    first = opened(config)
    copy = tmp_path / "copied.jsonl"
    shutil.copy(str(config.path), copy)
    os.utime(str(config.path), ns=(1, 1))
    found = [opened(config), opened(replace(config, path=str(copy)))]
    assert len(tokenised) == 20
    assert [each.folder for each in found] == [first.folder] * 2
    why = ":21: field 'prompt': found empty text; allowed: a non-empty string"
    assert [each.bad_row_messages for each in found] == [[f"{config.path}{why}"], [f"{copy}{why}"]]
