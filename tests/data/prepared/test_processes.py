"""Data prepared by worker processes, by several starts at once, and by starts that are killed."""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Command

from conf import files as lock
from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from data.prepared import dataset_cache, tokenise
from data.prepared import dataset_cache as prepared
from data.prepared.dataset_cache import hold_lock, load_or_prepare_data
from data.rows.data_files import Row, find_source
from tests.chats import write_rows
from tests.data.prepared.test_packing import exchange, make_tokenizer

TOKENIZER = make_tokenizer()
ROWS: list[Any] = [exchange(f"ask {i}", "word " * (i % 7 + 1)) for i in range(24)]
ROWS[9], ROWS[14], ROWS[21] = {"prompt": ""}, exchange("refuse me", "x"), 7
STARTS = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from conf.settings.data import DataConfig
from data.prepared import tokenise
from data.prepared import dataset_cache as prepared
from data.templates.record_encoder import RecordEncoder
from templates import REFUSING, make_tokenizer
real, count = RecordEncoder.encode_record, 0
def watched(self, record):
    global count
    count += 1
    {act}
    return real(self, record)
{before}
RecordEncoder.encode_record, tokenise.SHARD_ROWS = watched, 4
config = DataConfig({path!r}, num_proc={num_proc}, prepared_dir={folder!r})
found = prepared.load_or_prepare_data({path!r}, config, make_tokenizer(REFUSING))
print("made", count, "of", found.num_records)
"""


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    return DataConfig(
        str(path), num_proc=2, prepared_dir=str(tmp_path / "prepared"), on_bad_row=OnBadRow.skip
    )


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "SHARD_ROWS", 4)


HANG = """
real_rows = prepared.iter_rows
def rows(*arguments):
    yield from real_rows(*arguments)
    Path('hanging').touch()
    time.sleep(1000)
prepared.iter_rows, prepared.NUM_ROWS_TO_DETECT = rows, 1
"""


def started(config: DataConfig, act: str, rows: int = 8, before: str = "") -> Command:
    """A start of its own that does something before, and at every record that it tokenises."""
    path = write_rows(Path(str(config.path)), ROWS[:rows])
    code = STARTS.format(
        root=str(ROOT), tests=str(ROOT / "tests"), path=str(path), act=act,
        before=before,
        num_proc=config.num_proc, folder=config.prepared_dir,
    )  # fmt: skip
    script = path.with_name("start.py")
    script.write_text(code)
    return Command([sys.executable, str(script)], path.parent, dict(os.environ))


def files(folder: Path) -> dict[str, bytes]:
    """All of a store but the speed at which it was made."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    index = json.loads(found["index.json"])
    return found | {"index.json": json.dumps({**index, "rows_per_s": None}).encode()}


def test_workers_make_what_one_process_makes(config: DataConfig, tmp_path: Path) -> None:
    here = replace(config, num_proc=1, prepared_dir=str(tmp_path / "here"))
    there = load_or_prepare_data(str(config.path), config, TOKENIZER)
    assert files(there.folder) == files(
        load_or_prepare_data(str(config.path), here, TOKENIZER).folder
    )
    assert len(files(there.folder)) == 13
    places = [message.removeprefix(str(config.path))[:3] for message in there.bad_row_messages]
    assert places == [":10", ":15", ":22"]
    with pytest.raises(InputError, match=r"rows.jsonl:10: field 'prompt': found empty text"):
        prepared_dir = str(tmp_path / "third")
        strict = replace(config, on_bad_row=OnBadRow.error, prepared_dir=prepared_dir)
        load_or_prepare_data(str(config.path), strict, TOKENIZER)
    assert multiprocessing.active_children() == []


SEQUENCES = """
from conf.settings.data import DataConfig
from data.prepared.prepare import prepare_datasets
from templates import REFUSING, make_tokenizer
config = DataConfig({path!r}, max_length=64, num_proc=1, prepared_dir={folder!r})
sets = prepare_datasets(config, make_tokenizer(REFUSING), seed=5)[:2]
print([[packed[i]["input_ids"].tolist() for i in range(len(packed))] for packed in sets])
"""


def test_every_process_prepares_the_same(
    config: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, script = Path(str(config.path)), tmp_path / "start.py"
    write_rows(path, [exchange(f"ask {i}", "word " * i) for i in range(1, 7)])
    here, there = (
        SEQUENCES.format(path=str(path), folder=str(tmp_path / name)) for name in ("here", "there")
    )
    begin = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
    script.write_text(begin + there)
    # Forked from a server whose strings have other hashes than here.
    said, _ = Command([sys.executable, str(script)], tmp_path, dict(os.environ)).communicate()
    exec(here)
    assert said.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]


def test_a_worker_that_is_killed(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: Any) -> Iterator[Row]:
        yield from list(real(find_source(str(config.path)), digest))
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        yield from [Row("more.jsonl:1", b"{}")] * 40

    real, digest = prepared.iter_rows, hashlib.sha256()
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "iter_rows", rows)
        patch.setattr(prepared, "NUM_ROWS_TO_DETECT", 1)
        with pytest.raises(InputError, match=r"data.num_proc=2: a worker was k"):
            load_or_prepare_data(str(config.path), config, TOKENIZER)
    assert load_or_prepare_data(str(config.path), config, TOKENIZER).num_records == 22


def test_two_starts_at_once_make_one_store(config: DataConfig) -> None:
    config = replace(config, num_proc=1)
    first = started(config, "time.sleep(0.2)")
    second = started(config, "time.sleep(0.2)")
    outputs = [start.communicate()[0] for start in (first, second)]
    made = sorted(line for out in outputs for line in out.splitlines() if line.startswith("made"))
    assert made == ["made 0 of 8", "made 8 of 8"]
    waited = [out for out in outputs if "waiting for process " in out]
    assert len(waited) == 1
    assert waited[0].count(f"is preparing {config.path}") == 1
    assert "made 0 of 8" in waited[0]
    (folder,) = {path.parent for path in Path(str(config.prepared_dir)).glob("*/index.json")}
    assert not (folder / "lock").exists()


def test_a_start_that_is_killed_is_continued(config: DataConfig) -> None:
    config = replace(config, num_proc=1)
    killed = started(config, "if count == 7: os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    (lock,) = Path(str(config.prepared_dir)).glob("*/lock")
    assert sorted(path.name for path in lock.parent.glob("shard*")) == [
        "shard-00000.json", "shard-00000.safetensors"
    ]  # fmt: skip
    lock.with_name("shard-00002.safetensors.tmp").touch()
    out = started(config, "pass").communicate()[0]
    assert "made 4 of 8" in out
    assert list(lock.parent.glob("*.tmp")) == []
    assert "waiting" not in out  # on this machine one sees that the holder is gone


def workers_of(pid: int) -> list[int]:
    """Descendants, the server that forks among them."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [each for child in map(int, text.split()) for each in (child, *workers_of(child))]


def test_workers_end_with_a_start_that_is_killed(config: DataConfig, tmp_path: Path) -> None:
    start = started(config, "pass", rows=16, before=HANG)
    workers: list[int] = []
    try:
        for _ in range(1200):
            workers = workers_of(start.pid)
            if (tmp_path / "hanging").exists() and len(workers) >= 3:
                break
            time.sleep(0.1)
        assert len(workers) >= 3  # the two and the server that they are forked from
    finally:
        os.kill(start.pid, signal.SIGKILL)
    for _ in range(100):
        if not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers):
            break
        time.sleep(0.1)
    assert [pid for pid in workers if Path(f"/proc/{pid}/cmdline").exists()] == []


# --- A lock by beats: who holds it, who waits, and when it is taken over.


HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(dataset_cache, "POLL_S", 0.01)


def never() -> bool:
    return False


def test_it_is_held_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(KeyError), hold_lock(path, never, pytest.fail) as mine:
        assert mine
        assert path.read_text().split()[:2] == [HOST, str(os.getpid())]
        before = path.stat().st_mtime_ns
        time.sleep(0.2)
        assert path.stat().st_mtime_ns > before
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_who_finds_it_taken_waits_for_what_is_made(tmp_path: Path) -> None:
    path, made, told = tmp_path / "lock", tmp_path / "made", []
    with hold_lock(path, never, pytest.fail):
        # This process lives, so its beats alone say so.
        threading.Timer(0.2, made.touch).start()
        with hold_lock(path, made.is_file, told.append) as mine:
            assert not mine
            assert made.is_file()
        assert path.exists()
    assert told == [f"process {os.getpid()} on {HOST}"]


def test_a_lock_left_behind_is_taken_over(tmp_path: Path, monkeypatch) -> None:
    """Of a process on another machine one sees only that it is silent."""
    monkeypatch.setattr(lock, "STALE_S", 0.3)
    path, told, began = tmp_path / "lock", [], time.monotonic()
    path.write_text(f"another {os.getpid()} token")
    with hold_lock(path, never, told.append) as mine:
        assert mine
        assert path.read_text().split()[:2] == [HOST, str(os.getpid())]
    assert 0.3 <= time.monotonic() - began < 10
    assert len(told) == 1


def test_whoever_lost_it_leaves_it_to_the_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path, never, pytest.fail):
        path.write_text("another 1 token")
    assert path.read_text() == "another 1 token"


def test_of_many_at_once_one_holds_it(tmp_path: Path) -> None:
    path, inside, log = tmp_path / "lock", tmp_path / "inside", []

    def enter() -> None:
        with hold_lock(path, never, lambda _: None):
            inside.touch(exist_ok=False)
            time.sleep(0.01)
            log.append(json.dumps(path.read_text()))
            inside.unlink()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(log)) == 8
