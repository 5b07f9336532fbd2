"""Benchmarks of speculative decoding as they are published: placeholders, places and versions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from data.rows.data_files import find_dataset_revision
from data.rows.records import load_records
from tests.chats import write_rows

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
