"""Packs samples into sequences of one length, and prepares training and held-out data.

Letters: N samples, S packed sequences, T tokens of a sequence (`max_length`).
"""

import random
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from conf.schema import DataConfig, Form, InputError, OnBadRow
from data.chat import Encoder, Sample
from data.records import Record, Records, load_data

# Samples sorted and packed together: enough to fill sequences well, few enough that
# sequences of different windows stay alike.
WINDOW = 16384
NUM_BAD_SHOWN = 10


class PackedDataset(Dataset):
    """Sequences of whole documents, the same for every process.

    Item i is a dict of tensors `[T]`; for documents of 3 and 2 tokens and T = 6:

        input_ids    int64  a a a b b p    (p: pad)
        loss_mask    bool   0 1 1 0 1 0
        position_ids int64  0 1 2 0 1 0
        document_ids int64  0 0 0 1 1 -1
    """

    def __init__(self, samples: Iterable[Sample], max_length: int, *, seed: int, pad_id: int = 0):
        """Stores the samples and decides their places.

        Args:
            samples: read once; longer ones are cut to `max_length`.
            max_length: tokens of a sequence.
            seed: decides which documents meet and the order of the sequences.
            pad_id: token id of the padding.
        """
        self.max_length = max_length
        self.pad_id = pad_id
        self.num_truncated = 0
        self.num_dropped = 0
        """Samples without a learnt token, after truncation."""
        ids, mask = array("i"), bytearray()
        lengths = []
        for sample in samples:
            self.num_truncated += len(sample.input_ids) > max_length
            learnt = sample.loss_mask[:max_length]
            if not any(learnt):
                self.num_dropped += 1
                continue
            ids.extend(sample.input_ids[:max_length])
            mask.extend(learnt)
            lengths.append(len(learnt))
        self._ids = torch.frombuffer(ids or array("i", [0]), dtype=torch.int32)
        self._mask = torch.frombuffer(mask or bytearray(1), dtype=torch.bool)
        self._lengths = lengths
        self._starts = [0]
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self.sequences = pack(lengths, max_length, seed)
        """Sample numbers of each sequence, `[S]` lists."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return self._starts[-1]

    @property
    def num_supervised_tokens(self) -> int:
        """Tokens that are learnt."""
        return int(self._mask.sum())

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each sequence, without padding."""
        return [sum(self._lengths[sample] for sample in each) for each in self.sequences]

    @property
    def checksum(self) -> str:
        """xxh3_64 of the ids and masks of all samples, in the order they were read."""
        digest = xxhash.xxh3_64(self._ids.numpy().tobytes())
        digest.update(self._mask.numpy().tobytes())
        return digest.hexdigest()

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each id occurs among the learnt tokens.

        Args:
            vocab_size: V, ids of the target's output head.

        Raises:
            InputError: a learnt token has an id beyond it.
        """
        counts = torch.bincount(self._ids[self._mask], minlength=vocab_size)
        if len(counts) > vocab_size:
            raise InputError(
                f"the data has token id {len(counts) - 1}, but the target's output head has "
                f"vocab_size={vocab_size}: the tokenizer is larger than the head; give "
                "target.path the tokenizer it was trained with"
            )
        return counts

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids = torch.full((self.max_length,), self.pad_id)
        loss_mask = torch.zeros(self.max_length, dtype=torch.bool)
        position_ids = torch.zeros(self.max_length, dtype=torch.int64)
        document_ids = torch.full((self.max_length,), -1)
        at = 0
        for document, sample in enumerate(self.sequences[index]):
            start, length = self._starts[sample], self._lengths[sample]
            input_ids[at : at + length] = self._ids[start : start + length]
            loss_mask[at : at + length] = self._mask[start : start + length]
            position_ids[at : at + length] = torch.arange(length)
            document_ids[at : at + length] = document
            at += length
        return {
            "input_ids": input_ids,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }


def pack(lengths: list[int], max_length: int, seed: int) -> list[list[int]]:
    """Groups samples into sequences: best fit, longest first, in windows of shuffled samples.

    Args:
        lengths: tokens per sample, `[N]`, each at most `max_length`.
        max_length: tokens of a sequence.
        seed: of the shuffle of the samples, and then of the sequences.

    Returns:
        Sample numbers of each sequence.
    """
    generator = random.Random(seed)
    order = list(range(len(lengths)))
    generator.shuffle(order)
    sequences: list[list[int]] = []
    for begin in range(0, len(order), WINDOW):
        window = sorted(order[begin : begin + WINDOW], key=lambda sample: -lengths[sample])
        room: list[tuple[int, int]] = []  # (tokens left, sequence), sorted
        for sample in window:
            fit = bisect_left(room, (lengths[sample], -1))
            if fit == len(room):
                sequences.append([])
                left, sequence = max_length, len(sequences) - 1
            else:
                left, sequence = room.pop(fit)
            sequences[sequence].append(sample)
            insort(room, (left - lengths[sample], sequence))
    generator.shuffle(sequences)
    return sequences


@dataclass(frozen=True)
class DataReport:
    """What became of the data, training and held-out records together."""

    path: str
    eval_path: str | None
    form: Form
    num_records: int
    """Well-formed records used, before any is dropped."""
    num_bad: int
    num_truncated: int
    num_dropped: int
    """Records without a learnt token, after truncation."""
    num_tokens: int
    num_supervised_tokens: int
    padding: float
    """Share of padding in the packed sequences."""
    sha256: str
    num_train_sequences: int
    num_eval_sequences: int
    bad: list[str] = field(default_factory=list)
    """A message per malformed row."""

    def lines(self) -> list[str]:
        """Returns the report as lines to print."""
        share = self.num_supervised_tokens / self.num_tokens
        held_out = self.eval_path or "a share of it"
        more = len(self.bad) - NUM_BAD_SHOWN
        return [
            f"data: {self.path} (form {self.form.value}, sha256 {self.sha256[:12]}); "
            f"held out: {held_out}",
            f"  records: {self.num_records:,} used, {self.num_bad:,} malformed, "
            f"{self.num_truncated:,} truncated, {self.num_dropped:,} dropped (nothing to learn)",
            f"  tokens: {self.num_tokens:,}, of which {share:.1%} are learnt",
            f"  sequences: {self.num_train_sequences:,} to train on, "
            f"{self.num_eval_sequences:,} held out, {self.padding:.1%} padding",
            *(f"  malformed: {message}" for message in self.bad[:NUM_BAD_SHOWN]),
            *([f"  malformed: {more:,} more"] if more > 0 else []),
        ]


def prepare(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, progress: bool = True
) -> tuple[PackedDataset, PackedDataset, DataReport]:
    """Loads, tokenises and packs the training and the held-out data.

    Args:
        config: of the data; its `path` is set.
        tokenizer: the target's.
        seed: decides which records are held out, and the packing.
        progress: whether to show a bar.

    Returns:
        The training set, the held-out set and what became of the data.

    Raises:
        InputError: bad data, or nothing to learn in either set.
    """
    path, eval_path = str(config.path), config.eval_path
    loaded = _load(path, config, tokenizer)
    if eval_path is None:
        train, held_out = split(loaded.records, config.eval_fraction, seed, path)
        eval_bad: list[str] = []
    else:
        evaluation = _load(eval_path, config, tokenizer)
        train, held_out, eval_bad = loaded.records, evaluation.records, evaluation.bad
    train = train[: config.num_prompts]
    bad = [*loaded.bad, *eval_bad]
    sets = []
    for records, source in ((train, path), (held_out, eval_path or f"{path} (held-out share)")):
        samples = _samples(records, tokenizer, config, bad, progress)
        packed = PackedDataset(samples, config.max_length, seed=seed, pad_id=_pad_id(tokenizer))
        if not packed.num_supervised_tokens:
            raise InputError(_nothing(source, records, packed, loaded.form, bad))
        sets.append(packed)
    num_refused = len(bad) - len(loaded.bad) - len(eval_bad)
    num_records = len(train) + len(held_out) - num_refused
    report = _report(sets, loaded, config, num_records, bad)
    return sets[0], sets[1], report


def split(
    records: list[Record], fraction: float, seed: int, path: str
) -> tuple[list[Record], list[Record]]:
    """Holds out a share of the records, at least one, keeping the order of both parts."""
    if len(records) < 2:
        raise InputError(f"{path}: one record cannot be split; add records or set data.eval_path")
    count = min(max(1, round(fraction * len(records))), len(records) - 1)
    chosen = set(random.Random(seed).sample(range(len(records)), count))
    train = [record for i, record in enumerate(records) if i not in chosen]
    return train, [records[i] for i in sorted(chosen)]


def _load(path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Records:
    loaded = load_data(path, config)
    if loaded.form is not Form.text:
        Encoder(tokenizer).template({}, None)
    return loaded


def _samples(
    records: list[Record],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    bad: list[str],
    progress: bool,
) -> Iterator[Sample]:
    """Tokenises; under `data.on_bad_row=skip` appends what the template refuses to `bad`."""
    encoder = Encoder(tokenizer, config.chat_template_kwargs)
    quiet = not progress or len(records) <= 1000
    for record in tqdm(records, desc="tokenising", unit=" records", disable=quiet):
        try:
            yield from encoder.encode(record)
        except InputError as error:
            if config.on_bad_row is OnBadRow.error:
                raise
            bad.append(str(error))


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _nothing(
    source: str, records: list[Record], packed: PackedDataset, form: Form, bad: list[str]
) -> str:
    why = f"; the first malformed row: {bad[0]}" if bad else ""
    if not any(_has_answer(record) for record in records):
        why = f"; no record of form {form.value} has an assistant's text" + why
    return (
        f"{source}: nothing to learn: of {len(records)} records {packed.num_dropped} have no "
        f"learnt token within data.max_length={packed.max_length}{why}"
    )


def _has_answer(record: Record) -> bool:
    return record.messages is None or any(m["role"] == "assistant" for m in record.messages)


def _report(
    sets: list[PackedDataset], loaded: Records, config: DataConfig, num_records: int, bad: list[str]
) -> DataReport:
    num_tokens = sum(packed.num_tokens for packed in sets)
    slots = sum(len(packed) * packed.max_length for packed in sets)
    return DataReport(
        path=str(config.path),
        eval_path=config.eval_path,
        form=loaded.form,
        num_records=num_records,
        num_bad=len(bad),
        num_truncated=sum(packed.num_truncated for packed in sets),
        num_dropped=sum(packed.num_dropped for packed in sets),
        num_tokens=num_tokens,
        num_supervised_tokens=sum(packed.num_supervised_tokens for packed in sets),
        padding=1 - num_tokens / slots,
        sha256=loaded.sha256,
        num_train_sequences=len(sets[0]),
        num_eval_sequences=len(sets[1]),
        bad=bad,
    )
