"""Files or Hub dataset of a path: their rows, and the commit that they come from."""

import csv
import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import find_local_path
from conf.settings.data import RowsConfig
from data.rows.field_checks import format_found_value, parse_json

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
DATA_ENDINGS = (*TEXTS, *(text + packing for text in TEXTS for packing in COMPRESSIONS), *TABLES)
ALLOWED = f"{', '.join((*TEXTS, *TABLES))}; the first {len(TEXTS)} also in .gz or .zst"
SAVED_STATE, SAVED_SPLITS = "state.json", "dataset_dict.json"

METADATA_FILES = (
    SAVED_STATE,
    SAVED_SPLITS,
    "dataset_info.json",
    "dataset_infos.json",
    "manifest.json",
)
SPLIT_NAMES = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
SHARD_NUMBER = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
NOT_LETTERS = re.compile(r"[^a-z]+")
BATCH_ROWS = 1024
WHITE_SPACE = re.compile(r"\s*")
LINES_HINT = (
    ", an object over several lines; name the file .json, or write one object per line (jq -c . "
    "FILE)"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


@dataclass(frozen=True)
class DataSource:
    """Source of rows: the files or the Hub dataset of a path.

    Attributes:
        path: path as the user typed it.
        files: files in reading order; empty for a Hub dataset.
        left_out: other files of the folder, with the reason why they are not read.
        config: settings of a Hub dataset: `subset`, `split` and `streaming`.
    """

    path: str
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()
    config: RowsConfig = field(default_factory=RowsConfig)

    @property
    def root(self) -> str:
        """Common start of the places of the rows."""
        return str(Path(self.path).expanduser()) if self.files else self.path


def find_source(path: str, config: RowsConfig | None = None) -> DataSource:
    """Find the files or the Hub dataset of a path, without reading rows.

    Args:
        path: file, folder, dataset written by `save_to_disk`, or Hub dataset id.
        config: data settings; its own `path` is ignored. Files of a folder that are named after no
            split count as `train` if others are named after splits.

    Raises:
        InputError: nothing is there, or no file belongs to the split.
    """
    config = config or RowsConfig()
    local = find_local_path("data.path", path, DATA_ENDINGS)
    if local is None:
        return DataSource(path, (), config=config)
    if local.is_dir():
        return _find_folder_source(local, path, config.subset, config.split)
    parse_file_ending(local)
    return DataSource(path, (local,))


def _find_folder_source(folder: Path, path: str, subset: str | None, split: str) -> DataSource:
    if (folder / SAVED_SPLITS).is_file():
        names = [part.name for part in sorted(folder.iterdir()) if (part / SAVED_STATE).is_file()]
        if split not in names:
            raise InputError(
                f"data.split={split}: not in {path}, which has {', '.join(names) or 'no splits'}"
            )
        others = tuple(f"{name}/ (data.split={split})" for name in names if name != split)
        return DataSource(path, _list_saved_files(folder / split), others)
    if (folder / SAVED_STATE).is_file():
        return DataSource(path, _list_saved_files(folder))
    inside = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    visible = [file for file in inside if not any(part.startswith(".") for part in file.parts)]
    files = [file for file in visible if _is_data_file(file)]
    if not files:
        raise InputError(f"{path}: no file in this folder ends in {ALLOWED}")
    of_subset = [file for file in files if subset is None or subset in _list_split_names(file)]
    if not of_subset:
        raise InputError(
            f"data.subset={subset}: no file and no folder of {path} has this name; "
            f"it holds {', '.join(map(str, files))}"
        )
    chosen = _select_split(of_subset, path, split)
    why = f"data.split={split}" if subset is None else f"data.subset={subset} data.split={split}"
    left_out = tuple(
        f"{file} ({why if _is_data_file(file) else 'no rows'})"
        for file in sorted({*visible} - {*chosen})
        if file.name not in METADATA_FILES
    )
    return DataSource(path, tuple(folder / file for file in chosen), left_out)


def _list_saved_files(folder: Path) -> tuple[Path, ...]:
    """List the files of a dataset written by `save_to_disk`, without caches beside them."""
    try:
        state = json.loads((folder / SAVED_STATE).read_text(encoding="utf-8"))
        files = tuple(folder / str(part["filename"]) for part in state["_data_files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / SAVED_STATE}: does not describe a saved dataset: {error!r}"
        ) from None
    if not files:
        raise InputError(f"{folder}: holds no rows; name data with rows")
    return files


def _is_data_file(file: Path) -> bool:
    return file.name.lower().endswith(DATA_ENDINGS) and file.name not in METADATA_FILES


def _select_split(files: list[Path], path: str, split: str) -> list[Path]:
    """Select the files of a split; return all files if none is named after a split."""
    names = {file: [name.lower() for name in _list_split_names(file)] for file in files}
    splits = {file: _find_split_name(names[file]) for file in files}
    if not any(splits.values()):
        return files
    usual_name = SPLIT_NAMES.get(split)
    chosen = [
        file
        for file in files
        if (split in names[file] if usual_name is None else (splits[file] or "train") == usual_name)
    ]
    if not chosen:
        raise InputError(
            f"data.split={split}: no file of {path} is named after it; it holds "
            f"{', '.join(map(str, files))}"
        )
    return chosen


def _list_split_names(file: Path) -> list[str]:
    """List names that may be of a split or subset: folders, and the file's without shard number."""
    ending = next(each for each in DATA_ENDINGS if file.name.lower().endswith(each))
    return [*file.parts[:-1], SHARD_NUMBER.sub("", file.name[: -len(ending)])]


def _find_split_name(names: list[str]) -> str | None:
    """Find the split that a file is named after: `test-00000-of-00002`, `test_sft`, `my.test`."""
    *folders, stem = names
    words = [word for word in NOT_LETTERS.split(stem) if word]
    candidates = [*words[:1], *words[-1:], *folders]
    return next((SPLIT_NAMES[name] for name in candidates if name in SPLIT_NAMES), None)


def parse_file_ending(file: Path) -> str:
    """Parse the ending that decides how a file is read, e.g. `.jsonl` of `a.jsonl.gz`.

    Raises:
        InputError: the ending is not in `DATA_ENDINGS`.
    """
    name = file.name.lower()
    if not name.endswith(DATA_ENDINGS):
        raise InputError(f"{file}: ends in '{file.suffix}'; allowed: {ALLOWED}")
    unpacked = name.removesuffix(".gz").removesuffix(".zst")
    return f".{unpacked.rpartition('.')[2]}"


def check_data_paths(config: RowsConfig, section: str = "data") -> None:
    """Refuse missing data, and files with other endings than `DATA_ENDINGS`.

    Args:
        config: data settings.
        section: section of these settings in the command.

    Raises:
        InputError: the message names the path.
    """
    for name in ("path", "eval_path"):
        path = getattr(config, name)
        local = None if path is None else find_local_path(f"{section}.{name}", path, DATA_ENDINGS)
        if local is not None and local.is_file():
            parse_file_ending(local)
    if config.features is not None and not Path(config.features).expanduser().is_dir():
        raise InputError(
            f"{section}.features={config.features}: no such folder; name the out_dir of "
            "scripts/capture.py"
        )


@dataclass(frozen=True)
class Row:
    """Row as stored in the data.

    Attributes:
        location: `file:line`, `file[row n]` or `id[split]:row`, counted from 1.
        raw: undecoded line of JSON.
        value: decoded content, if any.
        problem: reason why the row cannot be decoded.
    """

    location: str
    raw: bytes | None = None
    value: object = None
    problem: str | None = None

    def parse_raw(self) -> "Row":
        """Decode the raw line into a value or a problem; return a row without one as it is."""
        if self.raw is None:
            return self
        try:
            text = self.raw.decode("utf-8-sig").rstrip()
            return Row(self.location, value=parse_json(text, _drop_nulls))
        except UnicodeDecodeError as error:
            problem = f"bytes that are not UTF-8 (at byte {error.start})"
        except ValueError as error:
            several = self.raw.strip() in (b"{", b"[")
            problem = f"{error}{LINES_HINT if several else ''}"
        return Row(self.location, problem=problem)


def iter_rows(source: DataSource, digest: "hashlib._Hash") -> Iterator[Row]:
    """Yield the rows of a source; lines of JSON stay undecoded.

    Memory does not grow with file size, except for JSON lists, which are decoded whole.

    Args:
        source: result of `find_source`.
        digest: checksum to update with the unpacked files, or with the rows of a Hub dataset.

    Raises:
        InputError: a file does not match its ending, or the Hub dataset cannot be loaded.
    """
    if not source.files:
        yield from _iter_hub_rows(source, digest)
    for file in source.files:
        yield from READERS[parse_file_ending(file)](file, digest)


def _iter_lines(file: Path, digest: "hashlib._Hash") -> Iterator[bytes]:
    suffix = file.suffix.lower()
    try:
        with gzip.open(file) if suffix == ".gz" else file.open("rb") as stream:
            lines: Iterable[bytes] = stream
            if suffix == ".zst":
                import pyarrow

                lines = io.BufferedReader(pyarrow.input_stream(stream, "zstd"))
            for line in lines:
                digest.update(line)
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file}: not a readable gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error}") from None


def _iter_json_lines(file: Path, digest: "hashlib._Hash") -> Iterator[Row]:
    for number, line in enumerate(_iter_lines(file, digest), 1):
        if line.strip():
            yield Row(f"{file}:{number}", raw=line)


def _iter_json_rows(file: Path, digest: "hashlib._Hash") -> Iterator[Row]:
    """Yield the objects of a JSON file: a list, or one after another, per line or as from `jq`."""
    if _holds_lines(file):
        yield from _iter_json_lines(file, digest)
        return
    content = b"".join(_iter_lines(file, digest))
    try:
        values = _parse_json_values(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 (at byte {error.start})") from None
    except json.JSONDecodeError as error:
        place = f"{error.msg} at column {error.colno}"
        raise InputError(f"{file}:{error.lineno}: invalid JSON ({place})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: unreadable JSON: {error}") from None
    if len(values) == 1:
        values = values[0]
    if not isinstance(values, list):
        raise InputError(
            f"{file}: found {format_found_value(values)}; allowed: a list of objects, or one "
            "object per line"
        )
    for number, value in enumerate(values, 1):
        yield Row(f"{file}[row {number}]", value=value)


def _parse_json_values(text: str) -> list[Any]:
    """Parse the JSON values that follow one another in a text."""
    decoder, values, end = json.JSONDecoder(object_hook=_drop_nulls), [], 0
    while (space := WHITE_SPACE.match(text, end)) and space.end() < len(text):
        value, end = decoder.raw_decode(text, space.end())
        values.append(value)
    return values or [json.loads(text)]  # raises for an empty text


def _holds_lines(file: Path) -> bool:
    """Tell whether the first non-blank line is a whole object."""
    for line in _iter_lines(file, hashlib.sha256()):
        start = line.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if start:
            return start == b"{" and isinstance(Row("", raw=line).parse_raw().value, dict)
    return True


def _iter_csv_rows(file: Path, digest: "hashlib._Hash") -> Iterator[Row]:
    """Yield the rows of a CSV file, with the names in its first line as fields."""
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if parse_file_ending(file) == ".tsv" else ","

    def iter_texts() -> Iterator[str]:
        for number, line in enumerate(_iter_lines(file, digest), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{file}:{number}: not UTF-8 (at byte {error.start})") from None

    reader = csv.reader(iter_texts(), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise InputError(
                f"{file}:1: two columns have the same name among {', '.join(names)}; rename one"
            )
        end = reader.line_num
        for cells in reader:
            location, end = f"{file}:{end + 1}", reader.line_num
            if len(cells) == len(names):
                yield Row(location, value=dict(zip(names, cells, strict=True)))
            elif cells:
                yield Row(location, problem=f"{len(cells)} cells under {len(names)} names")
    except csv.Error as error:
        raise InputError(f"{file}:{reader.line_num}: {error}") from None


def _iter_table_rows(file: Path, digest: "hashlib._Hash") -> Iterator[Row]:
    import pyarrow

    number, name = 0, parse_file_ending(file).removeprefix(".").capitalize()
    try:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
        for batch in _iter_table_batches(file):
            batch.validate(full=True)  # a damaged batch may point beyond its end
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for value in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    yield Row(f"{file}[row {number}]", value=_drop_empty_fields(value))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not a readable {name} file: {error}") from None


def _iter_table_batches(file: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    if parse_file_ending(file) == ".parquet":
        yield from parquet.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS)
        return
    with pyarrow.memory_map(str(file)) as mapped:
        try:
            reader = pyarrow.ipc.open_file(mapped)
        except pyarrow.ArrowInvalid:
            yield from pyarrow.ipc.open_stream(mapped)
        else:
            yield from map(reader.get_batch, range(reader.num_record_batches))


def _drop_empty_fields(value: object) -> object:
    """Remove the empty fields that tables give every object."""
    if isinstance(value, dict):
        return {key: _drop_empty_fields(part) for key, part in _drop_nulls(value).items()}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return [_drop_empty_fields(part) for part in value]
    return value


def _drop_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove the empty fields of an object, which JSON lines written from a table have too."""
    return {key: part for key, part in fields.items() if part is not None}


def _iter_hub_rows(source: DataSource, digest: "hashlib._Hash") -> Iterator[Row]:
    import datasets

    config, number = source.config, 0
    try:
        rows = datasets.load_dataset(
            source.path, name=config.subset, split=config.split, streaming=config.streaming
        )
        for number, row in enumerate(rows, 1):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            location = f"{source.path}[{config.split}]:{number}"
            yield Row(location, value=_drop_empty_fields(row))
    # Clients, decoders and builders of datasets raise errors of many kinds.
    except Exception as error:
        settings = f"(data.subset={config.subset or 'null'}, data.split={config.split})"
        what = (
            f"reading row {number + 1} of the Hub dataset {settings} failed"
            if number
            else f"no such file or folder, and loading it as a Hub dataset {settings} failed"
        )
        raise InputError(
            f"data.path={source.path}: {what}: {str(error) or type(error).__name__}; start again, "
            "or name files of its rows"
        ) from error


READERS: dict[str, Callable[[Path, "hashlib._Hash"], Iterator[Row]]] = {
    ".jsonl": _iter_json_lines,
    ".ndjson": _iter_json_lines,
    ".json": _iter_json_rows,
    ".csv": _iter_csv_rows,
    ".tsv": _iter_csv_rows,
    ".parquet": _iter_table_rows,
    ".arrow": _iter_table_rows,
}


def find_dataset_revision(path: str) -> str | None:
    """Find the commit of a Hub dataset, or the commit that a local path is a copy of.

    Args:
        path: `data.path`, which is a Hub dataset id, a clone, or a file or folder in the Hub
            client's cache or written by `hf download --local-dir`.

    Returns:
        40 hexadecimal digits; None if unknown, or if the Hub cannot be reached.
    """
    local = find_local_path("data.path", path, DATA_ENDINGS)
    if local is None:
        from huggingface_hub import HfApi

        with suppress(OSError):
            return HfApi().dataset_info(path).sha
        return None
    if snapshot := SNAPSHOT.search(local.absolute().as_posix()):
        return snapshot[1]
    if (local / ".git").is_dir():  # a .git further up belongs to the user's own repository
        return _find_clone_commit(local / ".git")
    folders = [
        folder / ".cache/huggingface/download" for folder in (local, *local.absolute().parents)
    ]
    return next((_find_downloaded_commit(each) for each in folders[:3] if each.is_dir()), None)


def _find_clone_commit(git: Path) -> str | None:
    """Find the commit that a clone has checked out, in its folder `.git`."""
    head = _read_file_text(git / "HEAD").strip()
    name = head.removeprefix("ref: ").strip()
    texts = "\n".join([head, *(_read_file_text(git / file) for file in (name, "packed-refs"))])
    commit = re.search(rf"^([0-9a-f]{{40}})( {re.escape(name)})?$", texts, re.MULTILINE)
    return commit[1] if commit else None


def _find_downloaded_commit(notes: Path) -> str | None:
    """Find the commit that the Hub's client noted for every file; None if several."""
    found = {COMMIT.match(_read_file_text(file)) for file in notes.rglob("*.metadata")}
    commits = {commit and commit[0] for commit in found}
    return commits.pop() if len(commits) == 1 else None


def _read_file_text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""
