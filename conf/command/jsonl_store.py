"""A JSONL file that grows row by row, survives `kill -9`, and ends up in row order."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from conf.command.run_record import check_unchanged
from conf.errors import InputError
from conf.files import LOCK_NAME, load_json, lock_file, make_folder, write_atomically

ROWS_NAME = "conversations.jsonl"
MANIFEST_NAME = "manifest.json"
PARTIAL = ".partial"
"""Suffix of a folder that holds a measurement until its result is written."""


class JsonlStore:
    """Finished rows on disk. Every row is a JSON object with an integer `id`.

    A manifest beside the rows says how the rows are made. A second start continues the same work,
    and refuses to mix other work into the file. The store is a context manager that holds the
    folder's lock.

    Attributes:
        done_ids: ids of the rows on disk.
        num_dropped_bytes: bytes of a half-written last line that were dropped at the start.
    """

    def __init__(
        self, out_dir: Path, manifest: dict[str, object], rows_name: str = ROWS_NAME
    ) -> None:
        """Open the rows of an earlier start, or begin a new file.

        Args:
            out_dir: folder of the files; created if absent.
            manifest: everything that decides what a row holds, as JSON values.
            rows_name: name of the file of rows.

        Raises:
            InputError: another process writes here, the folder holds other work, or a row
                other than the last is damaged.
        """
        self.path = out_dir / rows_name
        self.done_ids: set[int] = set()
        self.num_dropped_bytes = 0
        make_folder(out_dir)
        self._lock = lock_file(out_dir / LOCK_NAME)
        with contextlib.ExitStack() as unless_opened:
            unless_opened.callback(self._lock.release)
            _check_manifest(self.path, manifest)
            if self.path.exists():
                self._drop_torn_line()
            write_atomically(out_dir / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")
            unless_opened.pop_all()

    def __enter__(self) -> "JsonlStore":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def append(self, rows: list[dict]) -> None:
        """Append rows and wait until they are on disk. Rows whose ids are there are skipped.

        Raises:
            InputError: the file cannot be written.
        """
        new_rows = [row for row in rows if row["id"] not in self.done_ids]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new_rows)
        try:
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(
                f"{self.path}: {error.strerror}; finished rows are kept: start again to continue"
            ) from error
        self.done_ids.update(row["id"] for row in new_rows)

    def load_rows(self) -> list[dict]:
        """Load all rows on disk, in the order of their ids."""
        rows = (row for _, row in _iter_rows(self.path)) if self.path.exists() else ()
        return sorted(rows, key=lambda row: row["id"])

    def write_sorted(self) -> list[dict]:
        """Rewrite the file atomically in the order of the ids; return its rows."""
        rows = self.load_rows()
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(self.path, "".join(lines))
        return rows

    def _drop_torn_line(self) -> None:
        """Cut a torn last line off the file, and collect `done_ids`."""
        size = self.path.stat().st_size
        end = 0
        for end, row in _iter_rows(self.path):  # noqa: B007  the last value is used below
            self.done_ids.add(row["id"])
        if end < size:
            self.num_dropped_bytes = size - end
            os.truncate(self.path, end)


def _check_manifest(rows: Path, manifest: dict[str, object]) -> None:
    out_dir, path = rows.parent, rows.parent / MANIFEST_NAME
    before = load_json(path)
    if before is None:
        if rows.exists():
            raise InputError(
                f"out_dir={out_dir}: its {rows.name} has no {MANIFEST_NAME} that says how the rows "
                "were made; allowed: an empty folder, or one to continue; type another out_dir"
            )
        return
    partial = next((folder for folder in out_dir.parents if folder.suffix == PARTIAL), None)
    remedy = "type another out_dir" if partial is None else f"delete {partial} to begin anew"
    check_unchanged(f"out_dir={out_dir} holds rows", before, manifest, remedy)


def _iter_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield the offset after each line and its row; stop before a torn last line.

    A torn line lacks its newline, or, after a power failure, holds other bytes.
    """
    offset = 0
    size = path.stat().st_size
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            row = None
            with contextlib.suppress(ValueError):
                row = json.loads(line)
            if not (isinstance(row, dict) and isinstance(row.get("id"), int)):
                if offset + len(line) == size:
                    return
                raise InputError(
                    f"{path}:{number}: not a row of this file; delete the line and start again"
                )
            offset += len(line)
            yield offset, row
