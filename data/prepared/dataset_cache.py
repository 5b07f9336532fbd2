"""Cache of prepared data: a folder of tokenised samples that all processes, nodes and starts read.

The folder's name is a checksum of everything that decides its content: the data, the tokenizer with
its chat template, settings, and the code that reads rows. It lies in `data.prepared_dir`:

    <key>/shard-00000.safetensors    untruncated samples (`data.prepared.tokenise`)
    <key>/index.json                 names of shards with checksums; written last
    contents/<files>.json            checksum of the data, by path, size and time of the files
    <key>/lock                       held by the process that prepares the data

One process prepares missing data while the others wait (`hold_lock`).
"""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from conf.command.environment import count_cores
from conf.command.run_record import compute_code_checksum, to_json
from conf.errors import InputError
from conf.files import (
    POLL_S,
    SAFETENSORS_SUFFIX,
    HeldLock,
    cache_dir,
    try_lock,
    write_atomically,
)
from conf.settings.data import Form, OnBadRow, PackedConfig
from data.prepared import tokenise
from data.prepared.packing import TokenChunk, TokenisedSamples
from data.prepared.tokenise import BadRow, PreparedShard, TokenisingSettings, iter_shards
from data.rows import data_files, field_checks, messages, records, row_digests
from data.rows.data_files import DataSource, find_source, iter_rows
from data.rows.records import NUM_ROWS_TO_DETECT, detect_form
from data.templates import chat_template, record_encoder, turns
from data.templates.record_encoder import RecordEncoder

INDEX = "index.json"
SAMPLE_MODULES = (
    record_encoder, data_files, records, messages, chat_template, tokenise, turns, field_checks,
    row_digests,
)  # fmt: skip
"""Modules that turn rows into samples. The folder's key holds a checksum of their code, so a change
to one of them prepares the data anew."""
LIBRARIES = ("transformers", "tokenizers", "jinja2")
CONTENT_SETTINGS = ("form", "columns", "subset", "split", "chat_template_kwargs")
"""Data settings that decide the samples of a row."""
NON_CONTENT_SETTINGS = ("num_proc", "prepared_dir")
"""Data settings that change neither the samples nor their packing."""


class PreparedFolder:
    """Opened prepared data.

    Attributes:
        folder: folder of the prepared data.
        form: form of the rows.
        sha256: checksum of the data.
        num_records: number R of well-formed rows.
        samples: untruncated samples of all records.
        record_of_sample: [N] int64 record of each sample.
        copies: [R] uint64 digest of each record's token ids; copies have the same.
        prompts: [R] uint64 digest of each record's first prompt.
        refused_records: [n] int64 records that cannot be rendered.
        bad_row_messages: one message per malformed or refused row, in row order.
        malformed_locations: places of the malformed rows.
        unread: number of rows per field that has a value but is not read.
        unrendered: number of parts that the chat template does not render, by name.
        source: source of the rows.
        rows_per_s: speed of the preparation; None if an earlier start had done it.
    """

    def __init__(
        self,
        folder: Path,
        source: DataSource,
        form: Form,
        sha256: str,
        rows_per_s: float | None,
        shards: list[PreparedShard],
    ) -> None:
        """Open the files of shards, which are whole; tensors stay on disk until they are read."""
        self.folder, self.source, self.form = folder, source, form
        self.sha256, self.rows_per_s = sha256, rows_per_s
        tensors = [load_file(folder / f"{shard.name}{SAFETENSORS_SUFFIX}") for shard in shards]
        names = ("lengths", "record", "copies", "prompts")
        lengths, records, self.copies, self.prompts = (
            np.concatenate([each[name].numpy() for each in tensors]) for name in names
        )
        chunks = [TokenChunk(each["input_ids"], each["loss_mask"]) for each in tensors]
        highest = max(shard.highest for shard in shards)
        self.samples = TokenisedSamples(chunks, lengths, highest=highest)
        starts = list(accumulate((shard.num_records for shard in shards), initial=0))
        self.num_records = starts[-1]
        self.record_of_sample = records + np.repeat(
            starts[:-1], [len(each["record"]) for each in tensors]
        )
        rows = [
            (row, start) for shard, start in zip(shards, starts, strict=False) for row in shard.bad
        ]
        self.bad_row_messages = [_format_bad_row(source, row) for row, _ in rows]
        refused = [row.record + start for row, start in rows if row.record is not None]
        self.refused_records = np.array(refused, dtype=np.int64)
        malformed = (row for row, _ in rows if row.record is None)
        self.malformed_locations = frozenset(source.root + row.place for row in malformed)
        self.unread = dict(sum((Counter(shard.unread) for shard in shards), Counter()))
        self.unrendered = dict(sum((Counter(shard.unrendered) for shard in shards), Counter()))

    def find_location(self, record: int) -> str:
        """Find the place of a record, e.g. `file:line`, by reading the data again."""
        rows = (row.location for row in iter_rows(self.source, hashlib.sha256()))
        return next(
            islice((row for row in rows if row not in self.malformed_locations), record, None)
        )


def load_or_prepare_data(
    path: str, config: PackedConfig, tokenizer: PreTrainedTokenizerBase, progress: bool = True
) -> PreparedFolder:
    """Open the prepared data of a path; prepare them first if they are missing.

    One process prepares them; the others wait.

    Args:
        path: JSONL (also gzipped), JSON or Parquet file, folder of files, or Hub dataset id.
        config: data settings; its own paths are ignored.
        tokenizer: the target's tokenizer.
        progress: whether to report waiting for another process.

    Raises:
        InputError: missing data, bad rows, or a folder that cannot be written.
    """
    root = Path(config.prepared_dir or cache_dir() / "prepared").expanduser().absolute()

    def report_waiting(holder: str) -> None:
        if progress:
            tqdm.write(f"waiting for {holder}, which is preparing {path}", file=sys.stderr)

    try:
        source = find_source(path, config)
        contents = _compute_source_checksum(source, root)
        folder = root / _compute_folder_key(contents, config, tokenizer)
        prepared = _open_prepared(folder, source)
        if prepared is None:
            folder.mkdir(parents=True, exist_ok=True)
            ready = (folder / INDEX).is_file
            with hold_lock(folder / "lock", ready, report_waiting) as is_holder:
                if is_holder and not ready():
                    _prepare_shards(folder, source, config, tokenizer)
            prepared = _open_prepared(folder, source)
    except OSError as error:
        raise InputError(
            f"data.prepared_dir={root}: cannot hold the prepared data ({error}); free space there, "
            "or name another folder"
        ) from error
    if prepared is None:
        raise InputError(
            f"data.prepared_dir={root}: newly written data are damaged; name another folder"
        )
    if prepared.bad_row_messages and config.on_bad_row is OnBadRow.error:
        raise _make_bad_row_error(prepared.bad_row_messages[0])
    return prepared


def _compute_folder_key(
    contents: str, config: PackedConfig, tokenizer: PreTrainedTokenizerBase
) -> str:
    code = compute_code_checksum(Path(str(module.__file__)) for module in SAMPLE_MODULES)
    settings = [to_json(getattr(config, name)) for name in CONTENT_SETTINGS]
    libraries = [version(name) for name in LIBRARIES]
    facts = [contents, settings, _collect_tokenizer_facts(tokenizer), code, libraries]
    return _hash_json(facts)[:32]


def _compute_source_checksum(source: DataSource, root: Path) -> str:
    """Compute the checksum of a source, or read the one stored for the same unchanged files."""
    if not source.files:
        return _find_hub_fingerprint(source)
    facts = _list_file_facts(source)
    paths = [str(file.absolute()) for file in source.files]
    stored = root / "contents" / f"{_hash_json([paths, facts])}.json"
    if stored.is_file():
        return str(json.loads(stored.read_bytes()))
    digest = hashlib.sha256()
    for path, (name, size, *_) in zip(source.files, facts, strict=True):
        digest.update(json.dumps([name, size]).encode())
        try:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
    _check_unchanged(source, facts)
    stored.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(stored, json.dumps(digest.hexdigest()), shared=True)
    return digest.hexdigest()


def _list_file_facts(source: DataSource) -> list[tuple[str, int, int, int]]:
    """List name, size and time stamps of every file of the data.

    A single file is listed by its ending in place of its name, so that renaming it does not prepare
    it again. The inode's time is included because copies may keep the modification time (rsync -t,
    cp -p, tar).
    """
    local = Path(source.path).expanduser()
    return [
        (
            str(file.relative_to(local)) if file != local else "".join(file.suffixes[-2:]),
            file.stat().st_size,
            file.stat().st_mtime_ns,
            file.stat().st_ctime_ns,
        )
        for file in source.files
    ]


def _check_unchanged(source: DataSource, facts: list[tuple[str, int, int, int]]) -> None:
    if _list_file_facts(source) != facts:
        raise InputError(
            f"{source.path}: changed while being read; start again once it is complete"
        )


def _find_hub_fingerprint(source: DataSource) -> str:
    import datasets
    from huggingface_hub import HfApi

    next(iter_rows(source, hashlib.sha256()), None)  # raises if data are missing
    config = source.config
    if config.streaming:
        return str(HfApi().dataset_info(source.path).sha)
    loaded = datasets.load_dataset(source.path, name=config.subset, split=config.split)
    return str(loaded._fingerprint)


def _collect_tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Collect all that decides a tokenizer's output, except truncation and padding.

    Callers set truncation and padding.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any
    if backend is None:
        ends = [getattr(tokenizer, f"add_{name}_token", None) for name in ("bos", "eos")]
        rules = [sorted(tokenizer.get_vocab().items()), ends]
    else:
        rules = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__name__, rules, special, tokenizer.chat_template]


def _hash_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _prepare_shards(
    folder: Path, source: DataSource, config: PackedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the missing shards, and then the index."""
    path, facts, digest = source.path, _list_file_facts(source), hashlib.sha256()
    rows = iter_rows(source, digest)
    first = list(islice(rows, NUM_ROWS_TO_DETECT))
    if not first:
        raise InputError(f"{path}: holds no rows; name data with rows")
    form = detect_form(first, path, config.columns) if config.form is Form.auto else config.form
    if form not in (Form.text, Form.tokens):
        # Raises for a tokenizer without a chat template.
        RecordEncoder(tokenizer).build_template({}, None)
    settings = TokenisingSettings(folder, tokenizer, form, config, source.root)
    shards, num_new, start = [], 0, time.monotonic()
    results = iter_shards(chain(first, rows), settings, config.num_proc or count_cores())
    few = len(first) < NUM_ROWS_TO_DETECT
    with closing(results), tqdm(desc="preparing", unit=" rows", disable=few) as bar:
        for shard, is_new in results:
            if shard.bad and config.on_bad_row is OnBadRow.error:
                raise _make_bad_row_error(_format_bad_row(source, shard.bad[0]))
            shards.append(shard)
            num_new += shard.num_rows if is_new else 0
            bar.update(shard.num_rows)
    if not any(shard.num_records for shard in shards):
        bad = [_format_bad_row(source, bad) for shard in shards for bad in shard.bad]
        raise InputError(f"{path}: every row is malformed ({len(bad)}); the first: {bad[0]}")
    _check_unchanged(source, facts)
    rows_per_s = round(num_new / (time.monotonic() - start), 1) if num_new else None
    index = {
        "form": form.value, "sha256": digest.hexdigest(), "rows_per_s": rows_per_s,
        "shards": [asdict(shard) for shard in shards],
    }  # fmt: skip
    write_atomically(folder / INDEX, json.dumps(index), shared=True)
    for leftover in folder.glob("*.tmp"):  # left by killed starts
        leftover.unlink(missing_ok=True)


def _open_prepared(folder: Path, source: DataSource) -> PreparedFolder | None:
    """Open prepared data; return None if files are missing or damaged.

    Damaged files are named, and the index is deleted, so that they are prepared again.
    """
    try:
        index = json.loads((folder / INDEX).read_bytes())
        form, sha256, rows_per_s = Form(index["form"]), index["sha256"], index["rows_per_s"]
        shards = [PreparedShard.from_json(shard) for shard in index["shards"]]
        damaged = [shard.name for shard in shards if not shard.is_whole(folder)]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        damaged = [INDEX]
    if damaged:
        names = ", ".join(damaged)
        tqdm.write(f"{folder}: damaged files are made again: {names}", file=sys.stderr)
        (folder / INDEX).unlink(missing_ok=True)
        return None
    return PreparedFolder(folder, source, form, sha256, rows_per_s, shards)


def _format_bad_row(source: DataSource, bad: BadRow) -> str:
    return f"{source.root}{bad.place}: {bad.why}"


def _make_bad_row_error(message: str) -> InputError:
    return InputError(f"{message}; fix the row or set data.on_bad_row=skip")


@contextmanager
def hold_lock(
    path: Path, ready: Callable[[], bool], report_waiting: Callable[[str], None]
) -> Iterator[bool]:
    """Hold a lock between machines, or wait until its holder's result is ready.

    The lock is a file whose time stamp the holder keeps updating, as system locks do not work on
    every network file system. After a holder was cut off for a minute, a process of another machine
    can hold the lock too. Use it to save work, not to protect data.

    Args:
        path: path of the lock.
        ready: function that tells whether the result is ready.
        report_waiting: function called once with the name of the holder.

    Yields:
        Whether this process holds the lock.

    Raises:
        OSError: the folder cannot be written.
    """
    for number, found in enumerate(try_lock(path)):
        if isinstance(found, HeldLock):
            with found:
                yield True
            return
        if ready():
            yield False
            return
        if number == 0:
            report_waiting(str(found[0]))
        time.sleep(POLL_S)
