"""Rows of files and Hub datasets, read one by one."""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from conf.errors import InputError
from data.rows.sources import Source, kind_of
from data.rows.values import parse_json, show

BATCH_ROWS = 1024
SPACE = re.compile(r"\s*")
ONE_A_LINE = ", an object on several lines: name the file .json, or write one a line (jq -c . FILE)"


class Digest(Protocol):
    """What bytes are counted into, e.g. `hashlib.sha256()`."""

    def update(self, data: bytes, /) -> object:
        """Takes the next bytes."""


@dataclass(frozen=True)
class Row:
    """A row as it lies in the data.

    Attributes:
        where: `file:line`, `file[row n]` or `id[split]:row`, counted from 1.
        raw: an undecoded line of JSON.
        value: what it holds, once decoded.
        problem: why it cannot be decoded.
    """

    where: str
    raw: bytes | None = None
    value: object = None
    problem: str | None = None

    def parsed(self) -> "Row":
        """Returns the row decoded, with its value or its problem."""
        if self.raw is None:
            return self
        try:
            return Row(self.where, value=parse_json(self.raw.decode("utf-8-sig").rstrip()))
        except UnicodeDecodeError as error:
            problem = f"bytes that are not UTF-8 (at byte {error.start})"
        except ValueError as error:
            several = self.raw.strip() in (b"{", b"[")
            problem = f"{error}{ONE_A_LINE if several else ''}"
        return Row(self.where, problem=problem)


def read_rows(source: Source, digest: Digest) -> Iterator[Row]:
    """Yields the rows of a source, undecoded where they are lines of JSON.

    Memory does not grow with files, but for JSON lists, which are decoded whole.

    Args:
        source: of `find_source`.
        digest: takes the contents of the files, unpacked, or the rows of a Hub dataset.

    Raises:
        InputError: a file is not what its name says, or the Hub dataset cannot be loaded.
    """
    if not source.files:
        yield from _hub(source, digest)
    for file in source.files:
        yield from READERS[kind_of(file)](file, digest)


def _open(file: Path) -> BinaryIO:
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    if suffix == ".zst":
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(file), "zstd")))
    return file.open("rb")


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with _open(file) as stream:
            yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file}: not a readable gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error}") from None


def _counted(file: Path, digest: Digest) -> Iterator[bytes]:
    for line in _lines(file):
        digest.update(line)
        yield line


def _json_lines(file: Path, digest: Digest) -> Iterator[Row]:
    for number, line in enumerate(_counted(file, digest), 1):
        if line.strip():
            yield Row(f"{file}:{number}", raw=line)


def _json(file: Path, digest: Digest) -> Iterator[Row]:
    """Taps a list of objects, or one after another, on a line each or as `jq` writes them."""
    if _holds_lines(file):
        yield from _json_lines(file, digest)
        return
    content = b"".join(_counted(file, digest))
    try:
        values = _documents(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 (at byte {error.start})") from None
    except json.JSONDecodeError as error:
        place = f"{error.msg} at column {error.colno}"
        raise InputError(f"{file}:{error.lineno}: invalid JSON ({place})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: JSON that cannot be read: {error}") from None
    if len(values) == 1:
        values = values[0]
    if not isinstance(values, list):
        raise InputError(f"{file}: found {show(values)}; allowed: a list of objects, or one a line")
    for number, value in enumerate(values, 1):
        yield Row(f"{file}[row {number}]", value=value)


def _documents(text: str) -> list[Any]:
    """The JSON values that stand one after another in a text."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (begin := SPACE.match(text, at)) and begin.end() < len(text):
        value, at = decoder.raw_decode(text, begin.end())
        found.append(value)
    return found or [json.loads(text)]  # which says what an empty one lacks


def _holds_lines(file: Path) -> bool:
    """Whether the first line that is not blank is an object of its own."""
    for line in _lines(file):
        start = line.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if start:
            return start == b"{" and isinstance(Row("", raw=line).parsed().value, dict)
    return True


def _cells(file: Path, digest: Digest) -> Iterator[Row]:
    """Taps cells under the names of the first line."""
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if kind_of(file) == ".tsv" else ","
    reader = csv.reader(_decoded_lines(file, digest), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise InputError(f"{file}:1: two columns of one name among {', '.join(names)}")
        end = reader.line_num
        for cells in reader:
            where, end = f"{file}:{end + 1}", reader.line_num
            if len(cells) == len(names):
                yield Row(where, value=dict(zip(names, cells, strict=True)))
            elif cells:
                yield Row(where, problem=f"{len(cells)} cells under {len(names)} names")
    except csv.Error as error:
        raise InputError(f"{file}:{reader.line_num}: {error}") from None


def _decoded_lines(file: Path, digest: Digest) -> Iterator[str]:
    for number, line in enumerate(_counted(file, digest), 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{file}:{number}: not UTF-8 (at byte {error.start})") from None


def _parquet(file: Path, digest: Digest) -> Iterator[Row]:
    from pyarrow import parquet

    def batches() -> Iterator:
        return parquet.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS)

    yield from _table(file, digest, "Parquet", batches)


def _arrow(file: Path, digest: Digest) -> Iterator[Row]:
    import pyarrow

    def batches() -> Iterator:
        with pyarrow.memory_map(str(file)) as mapped:
            try:
                reader = pyarrow.ipc.open_file(mapped)
            except pyarrow.ArrowInvalid:
                yield from pyarrow.ipc.open_stream(mapped)
            else:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)

    yield from _table(file, digest, "Arrow", batches)


def _table(file: Path, digest: Digest, kind: str, batches: Callable[[], Iterator]) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        with file.open("rb") as stream:
            for chunk in iter(lambda: stream.read(1 << 20), b""):
                digest.update(chunk)
        for batch in batches():
            batch.validate(full=True)  # a damaged one may point beyond its end
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for value in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    yield Row(f"{file}[row {number}]", value=_filled(value))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not a readable {kind} file: {error}") from None


def _filled(value: object) -> object:
    """Returns a value without the empty fields that tables give every object."""
    if isinstance(value, dict):
        return {key: _filled(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_filled(part) for part in value]
    return value


def _hub(source: Source, digest: Digest) -> Iterator[Row]:
    import datasets

    path, subset, split = source.path, source.subset, source.split
    try:
        dataset = datasets.load_dataset(path, name=subset, split=split, streaming=source.streaming)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise InputError(
            f"data.path={path}: no such file or folder, and as a Hub dataset "
            f"(data.subset={subset or 'null'}, data.split={split}) it cannot be loaded: {error}"
        ) from error
    for number, row in enumerate(dataset, 1):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        yield Row(f"{path}[{split}]:{number}", value=_filled(row))


READERS: dict[str, Callable[[Path, Digest], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _cells,
    ".tsv": _cells,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
