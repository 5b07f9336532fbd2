"""Rendering and tokenising of rows in shards, in worker processes for large data.

A shard is a safetensors file of T tokens and N samples: `input_ids` [T] int32, `loss_mask` [T]
bool, `lengths` [N] int32 and `record` [N] int64, the index of each sample's record among the
well-formed rows of the shard. Of each of these records it holds two digests, [R] uint64: `copies`
of its token ids, and `prompts` of its first prompt. A JSON file, written after it, has its
checksum, counts and the messages of bad rows.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

from conf.errors import InputError
from conf.files import SAFETENSORS_SUFFIX, is_file_whole, write_atomically
from conf.settings.data import Form, PackedConfig
from data.rows.data_files import Row
from data.rows.field_checks import MalformedRowError
from data.rows.records import compute_prompt_digest, parse_record, refuse_dialogue
from data.templates.record_encoder import RecordEncoder, Sample

SHARD_ROWS = 2048
SHARD_BYTES = 1 << 24
"""Target size in bytes of a shard's rows, which limits the memory of a worker."""
NUM_SMALL = 2
"""Shards that are made faster than workers start."""


@dataclass(frozen=True)
class TokenisingSettings:
    """Settings that turn rows into samples.

    Attributes:
        folder: folder of the prepared data.
        tokenizer: the target's tokenizer.
        form: form of the rows.
        config: data settings.
        root: common start of the places of rows. Shards store places without it.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    form: Form
    config: PackedConfig
    root: str


@dataclass(frozen=True)
class BadRow:
    """Row without samples.

    Attributes:
        place: place of the row, without `TokenisingSettings.root`.
        why: problem of the row.
        record: index among the well-formed rows of the shard; None if malformed.
    """

    place: str
    why: str
    record: int | None = None


@dataclass(frozen=True)
class PreparedShard:
    """Samples of some rows, in a file.

    Attributes:
        name: name of its files, without endings.
        size: bytes of the file.
        checksum: xxh3_64 of the file.
        num_rows: number of rows read for it.
        num_records: number of well-formed rows.
        bad: malformed rows and rows that cannot be rendered, in order.
        unread: number of rows per field that has a value but is not read.
        unrendered: number of parts that the chat template does not render, by name.
        highest: largest token id.
    """

    name: str
    size: int
    checksum: str
    num_rows: int
    num_records: int
    bad: list[BadRow]
    unread: dict[str, int]
    unrendered: dict[str, int]
    highest: int

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "PreparedShard":
        """Build the shard from the JSON that `asdict` gave."""
        return cls(**{**stored, "bad": [BadRow(**bad) for bad in stored["bad"]]})

    def is_whole(self, folder: Path) -> bool:
        """Tell whether the file has the recorded size and checksum."""
        return is_file_whole(folder / f"{self.name}{SAFETENSORS_SUFFIX}", self.size, self.checksum)


@dataclass(frozen=True)
class TokenisingJob:
    """Rows to turn into a shard.

    Attributes:
        name: name of the shard's files, without endings.
        rows: rows of the shard; none if it is done.
        done: shard of an earlier start, if its files are whole.
    """

    name: str
    rows: list[Row]
    done: PreparedShard | None


def iter_shards(
    rows: Iterator[Row], settings: TokenisingSettings, num_proc: int
) -> Generator[tuple[PreparedShard, bool]]:
    """Yield the shards of all rows in order, writing the missing ones.

    Args:
        rows: all rows.
        settings: settings that turn rows into samples.
        num_proc: largest number of worker processes; 1 stays in this process.

    Yields:
        Each shard in row order, and whether it is new.

    Raises:
        InputError: a row has another form than the others, or a worker was killed.
        OSError: a shard cannot be written.
    """
    jobs = _iter_jobs(settings.folder, rows)
    first = list(islice(jobs, NUM_SMALL + 1))
    jobs = chain(first, jobs)
    if num_proc == 1 or len(first) <= NUM_SMALL:
        for job in jobs:
            yield tokenise_shard(job, settings), job.done is None
        return
    # Workers fork from a server process, which has neither threads nor a CUDA device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.tokenization_utils_tokenizers"])
    pool = ProcessPoolExecutor(num_proc, context, _initialise_worker, (settings,))
    try:
        yield from _iter_results(pool, jobs, 2 * num_proc)
    except BrokenProcessPool as error:
        raise InputError(
            f"data.num_proc={num_proc}: a worker was killed, probably because memory ran out; "
            "start again with a smaller data.num_proc. Finished shards are kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _iter_jobs(folder: Path, rows: Iterator[Row]) -> Iterator[TokenisingJob]:
    for number, batch in enumerate(_iter_batches(rows)):
        name = f"shard-{number:05d}"
        try:
            shard = PreparedShard.from_json(json.loads((folder / f"{name}.json").read_bytes()))
            whole = shard.num_rows == len(batch) and shard.is_whole(folder)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            whole = False
        yield TokenisingJob(name, [] if whole else batch, done=shard if whole else None)


def _iter_batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += len(repr(row.value) if row.raw is None else row.raw)
        if len(batch) == SHARD_ROWS or num_bytes >= SHARD_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _iter_results(
    pool: ProcessPoolExecutor, jobs: Iterator[TokenisingJob], num_ahead: int
) -> Iterator[tuple[PreparedShard, bool]]:
    """Yield each shard, in the order of the jobs, and whether it is new; start jobs in advance."""
    waiting: deque[tuple[Future[PreparedShard], bool]] = deque()
    for job in chain(jobs, [None]):
        if job is not None:
            waiting.append((_submit_job(pool, job), job.done is None))
        while len(waiting) > (num_ahead if job else 0):
            shard, is_new = waiting.popleft()
            yield shard.result(), is_new


def _submit_job(pool: ProcessPoolExecutor, job: TokenisingJob) -> Future[PreparedShard]:
    """Submit a job without handing the running script to the workers.

    Each worker would otherwise import the script, and run it if it has no `__main__` guard.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return pool.submit(_run_job, job)
    finally:
        sys.modules["__main__"] = script


def tokenise_shard(job: TokenisingJob, settings: TokenisingSettings) -> PreparedShard:
    """Tokenise the rows of a job, and write the shard and its JSON file, unless it is done.

    Raises:
        InputError: a row has another form than the others.
        OSError: the shard cannot be written. Nothing of it is left.
    """
    if job.done:
        return job.done
    encoder = RecordEncoder(settings.tokenizer, settings.config.chat_template_kwargs)
    detected = settings.config.form is Form.auto
    ids, mask = array("i"), bytearray()
    lengths: list[int] = []
    record_of_sample: list[int] = []
    bad: list[BadRow] = []
    unread, unrendered = Counter[str](), Counter[str]()
    copies: list[int] = []
    prompts: list[int] = []
    for row in job.rows:
        place = row.location.removeprefix(settings.root)
        try:
            record = parse_record(row, settings.form, settings.config.columns, detected=detected)
            if record.text is not None and detected:
                refuse_dialogue(encoder.turn_markers.find_marker(record.text))
        except MalformedRowError as error:
            bad.append(BadRow(place, str(error)))
            continue
        unread.update(record.unread_fields)
        samples: list[Sample] = []
        try:
            samples = encoder.encode_record(record)
        except InputError as error:
            bad.append(BadRow(place, str(error).removeprefix(f"{row.location}: "), len(copies)))
        digest = xxhash.xxh3_64(b"" if samples else place.encode())  # a refused row has no copies
        for sample in samples:
            ids.extend(sample.input_ids)
            digest.update(array("i", [-1, *sample.input_ids]).tobytes())
            mask.extend(sample.loss_mask)
            lengths.append(len(sample.input_ids))
            record_of_sample.append(len(copies))
            unrendered.update(sample.unrendered_parts)
        copies.append(digest.intdigest())
        prompts.append(compute_prompt_digest(record))
    content = save(
        {
            "input_ids": np.array(ids, dtype=np.int32),
            "loss_mask": np.frombuffer(mask, dtype=np.bool_),
            "lengths": np.array(lengths, dtype=np.int32),
            "record": np.array(record_of_sample, dtype=np.int64),
            "copies": np.array(copies, dtype=np.uint64),
            "prompts": np.array(prompts, dtype=np.uint64),
        }
    )
    shard = PreparedShard(
        name=job.name,
        size=len(content),
        checksum=xxhash.xxh3_64_hexdigest(content),
        num_rows=len(job.rows),
        num_records=len(copies),
        bad=bad,
        unread=dict(unread),
        unrendered=dict(unrendered),
        highest=max(ids, default=0),
    )
    path = settings.folder / f"{job.name}.json"
    write_atomically(path.with_suffix(SAFETENSORS_SUFFIX), content, shared=True)
    write_atomically(path, json.dumps(asdict(shard)), shared=True)
    return shard


_worker_settings: TokenisingSettings | None = None
"""Settings of this process if it is a worker."""


def _initialise_worker(settings: TokenisingSettings) -> None:
    """Make this process a worker."""
    global _worker_settings  # noqa: PLW0603  a process has one, and jobs should not carry it
    _worker_settings = settings
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: TokenisingJob) -> PreparedShard:
    assert _worker_settings is not None
    return tokenise_shard(job, _worker_settings)
