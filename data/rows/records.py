"""Loads conversations and texts from files, folders and Hub datasets, and checks every row."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from conf.errors import InputError
from conf.settings.data import Form, OnBadRow, RowsConfig
from data.rows.files import find_source, read_rows
from data.rows.forms import NUM_LOOKED_AT, Record, detect, to_record
from data.rows.messages import Messages
from data.rows.values import MalformedRowError

__all__ = ["MalformedRowError", "Messages", "Record", "Records", "load_records"]

NUM_BAD_SHOWN = 10


@dataclass(frozen=True)
class Records:
    """The checked rows of a path."""

    records: list[Record]
    form: Form
    bad: list[str]
    """One message per row that was skipped."""
    sha256: str
    """Of the file contents, unpacked (a folder: in name order), or of the rows of a Hub dataset."""
    unread: dict[str, int] = field(default_factory=dict)
    """Rows by field that has something in it and is not read, e.g. `id`."""
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not read, and why."""

    def lines(self) -> list[str]:
        """The rows and fields that were left out, as lines to print."""
        return [
            *malformed(self.bad),
            *counted("fields not read", self.unread, "rows"),
            *(f"not read: {name}" for name in self.left_out),
        ]


def malformed(bad: list[str]) -> list[str]:
    """The first messages of malformed rows, and how many more there are, as lines."""
    more = len(bad) - NUM_BAD_SHOWN
    shown = [f"malformed: {message}" for message in bad[:NUM_BAD_SHOWN]]
    return [*shown, *([f"malformed: {more:,} more"] if more > 0 else [])]


def counted(what: str, counts: Mapping[str, int], unit: str) -> list[str]:
    """Names with their counts as one line, or none."""
    names = ", ".join(f"{name} ({count:,} {unit})" for name, count in counts.items())
    return [f"{what}: {names}"] if names else []


def load_records(path: str, config: RowsConfig | None = None) -> Records:
    """Loads and checks every row of a file, a folder or a Hub dataset.

    Args:
        path: a file, a folder of them, or a Hub dataset id.
        config: how to read it, as usual unless given; its own `path` is not looked at.

    Raises:
        InputError: nothing at `path`, no rows, mixed forms, or a malformed row.
    """
    config = config or RowsConfig()
    source = find_source(path, subset=config.subset, split=config.split, streaming=config.streaming)
    digest = hashlib.sha256()
    rows = read_rows(source, digest)
    first = list(islice(rows, NUM_LOOKED_AT))
    if not first:
        raise InputError(f"{path}: holds no rows")
    detected = config.form is Form.auto
    form = detect(first, path, config.columns) if detected else config.form
    records, bad, unread = [], [], Counter[str]()
    for row in chain(first, rows):
        try:
            record = to_record(row, form, config.columns, detected=detected)
        except MalformedRowError as error:
            bad.append(f"{row.where}: {error}")
            if config.on_bad_row is OnBadRow.error:
                hint = "fix the row or set data.on_bad_row=skip"
                raise InputError(f"{bad[0]} ({hint})") from None
            continue
        records.append(record)
        unread.update(record.unread)
    if not records:
        raise InputError(f"{path}: every row is malformed ({len(bad)}); the first: {bad[0]}")
    return Records(records, form, bad, digest.hexdigest(), dict(unread), source.left_out)
