"""Rows as they lie in files, parsed where they are tokenised."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import DataConfig, Form
from data import records
from data.records import Record


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        where: `file:line`, `file[row n]` or `id[split]:row`, counted from 1.
        raw: a line of JSON that has not been parsed.
        value: what it holds, once it is.
        problem: why it could not be.
    """

    where: str
    raw: bytes | None = None
    value: object = None
    problem: str | None = None

    @property
    def num_bytes(self) -> int:
        """How much there is to work on, about."""
        return len(repr(self.value)) if self.raw is None else len(self.raw)


def read_rows(path: str, config: DataConfig, digest: "hashlib._Hash") -> Iterator[Row]:
    """The rows of a file, a folder or a Hub dataset.

    Args:
        path: of them.
        config: names the configuration and split of a Hub dataset.
        digest: takes in what is read.

    Raises:
        InputError: nothing at `path`, or a file that cannot be read.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(each for each in local.iterdir() if each.name.endswith(records.SUFFIXES))
    else:
        files = [local] if local.is_file() else []
    if not files:
        for row in records._read(path, config.subset, config.split, digest):
            yield Row(row.where, None, row.value, row.problem)
    for file in files:
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            for number, line in enumerate(records._lines(file), 1):
                digest.update(line)
                if line.strip():
                    yield Row(f"{file}:{number}", line)
        else:
            for row in records._read_file(file, digest):
                yield Row(row.where, None, row.value, row.problem)


def detect(rows: Sequence[Row], path: str, config: DataConfig) -> Form:
    """The form of rows, of which these are the first.

    Raises:
        InputError: none of them has a known form.
    """
    if config.form is not Form.auto:
        return config.form
    return records._detect([_parsed(row) for row in rows], path)


def to_record(row: Row, form: Form, config: DataConfig) -> Record:
    """A row, checked.

    Raises:
        MalformedRowError: a field is not what its form asks for.
        InputError: it is of another form than the first rows.
    """
    parsed = _parsed(row)
    if config.form is Form.auto:
        records._refuse_mixed(parsed, form)
    return records._record(parsed, form)


def hub_fingerprint(path: str, config: DataConfig) -> str:
    """Changes with the rows of a Hub dataset.

    Raises:
        InputError: nothing at `path`.
    """
    import datasets

    next(read_rows(path, config, hashlib.sha256()), None)  # says what is missing
    return datasets.load_dataset(path, name=config.subset, split=config.split)._fingerprint


def _parsed(row: Row) -> records._Row:
    if row.raw is None:
        return records._Row(row.where, row.value, row.problem)
    return records._parse_line(row.where, row.raw)
