"""Prepared data are known by what the files hold, which are read again where they may be others."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from tests.data.prepared.test_folder import ROWS, config, contents, opened, tokenised, write

__all__ = ["config", "tokenised"]


def test_a_second_start_does_not_read_the_data(config: DataConfig, monkeypatch) -> None:
    first, usual, read = opened(config), Path.open, []

    def noted(path: Path, *how: Any, **more: Any) -> Any:
        read.append(str(path))
        return usual(path, *how, **more)

    monkeypatch.setattr(Path, "open", noted)
    assert contents(opened(config)) == contents(first)
    assert read
    assert config.path not in read


def test_data_that_cannot_be_read_are_no_full_disk(config: DataConfig, monkeypatch) -> None:
    usual = Path.open

    def refused(path: Path, *how: Any, **more: Any) -> Any:
        if str(path) == config.path:
            raise PermissionError(13, "Permission denied", config.path)
        return usual(path, *how, **more)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match=rf"^{config.path}: cannot be read: .*Permission denied"):
        opened(config)


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
    write(Path(str(config.path)), [*ROWS, {"prompt": ""}])
    config = replace(config, on_bad_row=OnBadRow.skip)
    first = opened(config)
    copy = tmp_path / "copied.jsonl"
    shutil.copy(str(config.path), copy)
    os.utime(str(config.path), ns=(1, 1))
    found = [opened(config), opened(replace(config, path=str(copy)))]
    assert len(tokenised) == 20
    assert [each.folder for each in found] == [first.folder] * 2
    why = ":21: field 'prompt': found empty text; allowed: a non-empty string"
    assert [each.bad for each in found] == [[f"{config.path}{why}"], [f"{copy}{why}"]]
