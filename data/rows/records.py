"""Loader of conversations and texts that checks every row."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from conf.errors import InputError
from conf.settings.data import Form, OnBadRow, RowsConfig
from data.rows.files import find_source, iter_rows
from data.rows.forms import NUM_ROWS_TO_DETECT, Record, detect_form, parse_record
from data.rows.messages import Messages
from data.rows.values import MalformedRowError

__all__ = ["LoadedRecords", "MalformedRowError", "Messages", "Record", "load_records"]

NUM_BAD_SHOWN = 10


@dataclass(frozen=True)
class LoadedRecords:
    """Checked rows of a path."""

    records: list[Record]
    form: Form
    bad: list[str]
    """One message per skipped row."""
    sha256: str
    """Checksum of the unpacked files (of a folder in name order), or of the rows of a Hub
    dataset."""
    unread: dict[str, int] = field(default_factory=dict)
    """Number of rows per field that has a value but is not read, e.g. `id`."""
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not read, with reasons."""

    def format_lines(self) -> list[str]:
        """Lines about the rows and fields that are not read."""
        return [
            *format_malformed_rows(self.bad),
            *format_counts("fields not read", self.unread, "rows"),
            *(f"not read: {name}" for name in self.left_out),
        ]


def format_malformed_rows(bad: list[str]) -> list[str]:
    """Lines with the first messages of malformed rows, and the number of others."""
    more = len(bad) - NUM_BAD_SHOWN
    shown = [f"malformed: {message}" for message in bad[:NUM_BAD_SHOWN]]
    return [*shown, *([f"malformed: {more:,} more"] if more > 0 else [])]


def format_counts(what: str, counts: Mapping[str, int], unit: str) -> list[str]:
    """Line of names with counts; no line without names."""
    names = ", ".join(f"{name} ({count:,} {unit})" for name, count in counts.items())
    return [f"{what}: {names}"] if names else []


def load_records(path: str, config: RowsConfig | None = None) -> LoadedRecords:
    """Load and check every row of a file, a folder or a Hub dataset.

    Args:
        path: file, folder of files, or Hub dataset id.
        config: data settings; its own `path` is ignored.

    Raises:
        InputError: missing data, no rows, mixed forms, or a malformed row.
    """
    config = config or RowsConfig()
    source = find_source(path, subset=config.subset, split=config.split, streaming=config.streaming)
    digest = hashlib.sha256()
    rows = iter_rows(source, digest)
    first = list(islice(rows, NUM_ROWS_TO_DETECT))
    if not first:
        raise InputError(f"{path}: holds no rows; name data with rows")
    detected = config.form is Form.auto
    form = detect_form(first, path, config.columns) if detected else config.form
    records, bad, unread = [], [], Counter[str]()
    for row in chain(first, rows):
        try:
            record = parse_record(row, form, config.columns, detected=detected)
        except MalformedRowError as error:
            bad.append(f"{row.location}: {error}")
            if config.on_bad_row is OnBadRow.error:
                hint = "fix the row or set data.on_bad_row=skip"
                raise InputError(f"{bad[0]} ({hint})") from None
            continue
        records.append(record)
        unread.update(record.unread_fields)
    if not records:
        raise InputError(f"{path}: every row is malformed ({len(bad)}); the first: {bad[0]}")
    return LoadedRecords(records, form, bad, digest.hexdigest(), dict(unread), source.left_out)
