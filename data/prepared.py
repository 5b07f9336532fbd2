"""Data prepared once: a folder of tokenised samples that all processes, nodes and starts read.

Its name is a checksum of all that decides what is in it: the contents of the data, the tokenizer
with its chat template, settings, and the code that reads rows. It lies in `data.prepared_dir`:

    <key>/shard-00000.safetensors    samples, untruncated (`data.preparing`)
    <key>/index.json                 names of shards with checksums; written last
    contents/<files>.json            checksum of data by path, size and time of the files
"""

import hashlib
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from conf.schema import DataConfig, Form, InputError, OnBadRow
from data import chat, preparing, records, rows
from data.chat import check_tokenizer
from data.heartbeat import held
from data.preparing import BadRow, Rule, Shard, make_shards, num_cores, write
from data.rows import detect, hub_fingerprint, read_rows
from data.samples import Piece, Samples
from data.shard import SUFFIX

INDEX = "index.json"
RULE = (chat, records, rows, preparing)
"""Modules that decide what becomes of a row: whoever changes one prepares anew."""
LIBRARIES = ("transformers", "tokenizers", "jinja2")
HOW = ("num_proc", "prepared_dir")
"""Settings of the data that decide nothing of what becomes of them."""
READ_BYTES = 1 << 24
NUM_DETECTED = 100
"""Rows at the beginning whose form is that of all."""


@dataclass(frozen=True)
class Prepared:
    """An opened store.

    Attributes:
        folder: where it is.
        form: of its rows.
        sha256: of the data.
        num_records: R, well-formed rows.
        samples: of all records, untruncated.
        record: [N] int64, the record of each sample.
        refused: [n] int64, records that cannot be rendered.
        bad: a message per malformed or refused row, in the order of the rows.
        rows_per_s: at which it was prepared; None if an earlier start had done everything.
    """

    folder: Path
    form: Form
    sha256: str
    num_records: int
    samples: Samples
    record: np.ndarray
    refused: np.ndarray
    bad: list[str]
    rows_per_s: float | None

    def samples_of(self, numbers: np.ndarray) -> Samples:
        """The samples of some records, in their order."""
        return self.samples.take(np.flatnonzero(np.isin(self.record, numbers)))


@dataclass(frozen=True)
class _Index:
    form: str
    sha256: str
    rows_per_s: float | None
    shards: list[Shard]


def open_prepared(
    path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase, progress: bool = True
) -> Prepared:
    """Opens the prepared data at a path; if there are none, one process makes them.

    Args:
        path: JSONL (also gzipped), JSON or Parquet file, a folder of them, or a Hub dataset id.
        config: how to read it; its own paths are not looked at.
        tokenizer: the target's.
        progress: whether to say that another process is waited for.

    Raises:
        InputError: nothing at `path`, bad rows, or a folder that cannot be written.
    """
    root = _root(config)
    try:
        contents = _contents(path, config, root)
        folder = root / _key(contents, config, tokenizer)
        found = _opened(folder, path)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            ready = (folder / INDEX).is_file
            with held(folder / "lock", ready, partial(_waiting, path, progress)) as mine:
                if mine and not ready():
                    _prepare(folder, path, config, tokenizer)
            found = _opened(folder, path)
    except OSError as error:
        raise InputError(
            f"data.prepared_dir={root}: cannot hold the prepared data ({error}): free space there, "
            "or name another folder"
        ) from error
    if found is None:
        raise InputError(
            f"data.prepared_dir={root}: what was just written there is damaged: name another folder"
        )
    if found.bad and config.on_bad_row is OnBadRow.error:
        raise _stopped(found.bad[0])
    return found


def _root(config: DataConfig) -> Path:
    cache = os.environ.get("HEADSMITH_CACHE") or "~/.cache/headsmith"
    return Path(config.prepared_dir or Path(cache) / "prepared").expanduser().absolute()


def _contents(path: str, config: DataConfig, root: Path) -> str:
    """A checksum of what is at a path; of files that have not changed since it is remembered."""
    local = Path(path).expanduser()
    if not local.exists():
        return hub_fingerprint(path, config)
    facts = _facts(local)
    known = root / "contents" / f"{_sha256([str(local.absolute()), facts])}.json"
    if known.is_file():
        return str(json.loads(known.read_bytes()))
    digest = hashlib.sha256()
    for name, size, _ in facts:
        digest.update(json.dumps([name, size]).encode())
        with (local / name if local.is_dir() else local).open("rb") as file:
            for chunk in iter(partial(file.read, READ_BYTES), b""):
                digest.update(chunk)
    _check_unchanged(path, facts)
    known.parent.mkdir(parents=True, exist_ok=True)
    write(known, json.dumps(digest.hexdigest()).encode())
    return digest.hexdigest()


def _facts(local: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file; of a single one only how its name ends."""
    if local.is_file():
        return [("".join(local.suffixes[-2:]), local.stat().st_size, local.stat().st_mtime_ns)]
    inside = {each: each.relative_to(local) for each in sorted(local.rglob("*"))}
    return [
        (str(name), each.stat().st_size, each.stat().st_mtime_ns)
        for each, name in inside.items()
        if each.is_file() and not any(part.startswith(".") for part in name.parts)
    ]


def _check_unchanged(path: str, facts: list[tuple[str, int, int]]) -> None:
    if _facts(Path(path).expanduser()) != facts:
        raise InputError(f"{path}: changed while it was being read: start again once it is whole")


def _key(contents: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    code = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in RULE]
    settings = [config.form.value, config.subset, config.split]
    libraries = [version(name) for name in LIBRARIES]
    return _sha256([contents, settings, _tokenizer_facts(tokenizer), code, libraries])[:32]


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What a tokenizer does, but for cutting and padding, which its callers set."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rule: Any
    if backend is None:
        ends = [getattr(tokenizer, f"add_{name}_token", None) for name in ("bos", "eos")]
        rule = [sorted(tokenizer.get_vocab().items()), ends]
    else:
        rule = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__name__, rule, special, tokenizer.chat_template]


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _waiting(path: str, progress: bool, who: str) -> None:
    if progress:
        tqdm.write(f"waiting for {who}, which prepares {path}", file=sys.stderr)


def _prepare(
    folder: Path, path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Makes what is missing of a store."""
    local = Path(path).expanduser()
    facts = _facts(local) if local.exists() else []
    digest = hashlib.sha256()
    reading = read_rows(path, config, digest)
    first = list(islice(reading, NUM_DETECTED))
    if not first:
        raise InputError(f"{path}: holds no rows")
    form = detect(first, path, config)
    if form is not Form.text:
        check_tokenizer(tokenizer)
    rule = Rule(tokenizer, form, config, _prefix(path))
    shards, num_new, seconds = [], 0, -time.monotonic()
    making = make_shards(folder, chain(first, reading), rule, config.num_proc or num_cores())
    few = len(first) < NUM_DETECTED
    with closing(making), tqdm(desc="preparing", unit=" rows", disable=few) as bar:
        for shard, is_new in making:
            if shard.bad and config.on_bad_row is OnBadRow.error:
                raise _stopped(_message(path, shard.bad[0]))
            shards.append(shard)
            num_new += shard.num_rows if is_new else 0
            bar.update(shard.num_rows)
    if not any(shard.num_records for shard in shards):
        bad = [_message(path, bad) for shard in shards for bad in shard.bad]
        raise InputError(f"{path}: every row is malformed ({len(bad)}); the first: {bad[0]}")
    if facts:
        _check_unchanged(path, facts)
    rows_per_s = round(num_new / (seconds + time.monotonic()), 1) if num_new else None
    index = _Index(form.value, digest.hexdigest(), rows_per_s, shards)
    write(folder / INDEX, json.dumps(asdict(index)).encode())
    for leftover in folder.glob("*.tmp"):  # of starts that were killed
        leftover.unlink(missing_ok=True)


def _opened(folder: Path, path: str) -> Prepared | None:
    """A store that is whole; what is damaged is named, and the store to be prepared again."""
    try:
        stored = json.loads((folder / INDEX).read_bytes())
        index = _Index(**{**stored, "shards": [Shard.from_json(each) for each in stored["shards"]]})
        damaged = [shard.name for shard in index.shards if not shard.is_whole(folder)]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        damaged = [INDEX]
    if damaged:
        names = ", ".join(damaged)
        tqdm.write(f"{folder}: not what was written, made again: {names}", file=sys.stderr)
        (folder / INDEX).unlink(missing_ok=True)
        return None
    pieces, lengths, record = [], [], []
    refused: list[int] = []
    num_records = 0
    for shard in index.shards:
        tensors = _mapped(folder / f"{shard.name}{SUFFIX}")
        pieces.append(Piece(tensors["input_ids"], tensors["loss_mask"]))
        lengths.append(tensors["lengths"].numpy())
        record.append(tensors["record"].numpy() + num_records)
        refused += [bad.record + num_records for bad in shard.bad if bad.record is not None]
        num_records += shard.num_records
    return Prepared(
        folder=folder,
        form=Form(index.form),
        sha256=index.sha256,
        num_records=num_records,
        samples=Samples(pieces, np.concatenate(lengths)),
        record=np.concatenate(record),
        refused=np.array(refused, dtype=np.int64),
        bad=[_message(path, bad) for shard in index.shards for bad in shard.bad],
        rows_per_s=index.rows_per_s,
    )


def _mapped(path: Path) -> dict[str, Any]:
    """The tensors of a shard, which stay on the disk until they are read."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _prefix(path: str) -> str:
    """What the places of all rows of a path begin with."""
    local = Path(path).expanduser()
    return str(local) if local.exists() else path


def _message(path: str, bad: BadRow) -> str:
    return f"{_prefix(path)}{bad.place}: {bad.why}"


def _stopped(message: str) -> InputError:
    return InputError(f"{message} (fix the row or set data.on_bad_row=skip)")
