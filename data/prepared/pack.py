"""Packs samples into sequences of one length, and prepares training and held-out data.

Letters: N samples, S packed sequences, T tokens of a sequence (`max_length`).
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from conf.errors import InputError
from conf.settings.data import DataConfig, Form
from data.ids import Vocabulary, check_ids
from data.prepared.dataset import Prepared, open_prepared
from data.prepared.fit import pack
from data.prepared.samples import Samples
from data.rows.records import counted, malformed
from data.templates.chat import Sample


class PackedDataset(Dataset):
    """Sequences of whole documents, the same for every process.

    Item i is a dict of tensors `[T]`; for documents of 3 and 2 tokens and T = 6:

        input_ids    int64  a a a b b p    (p: pad)
        loss_mask    bool   0 1 1 0 1 0
        position_ids int64  0 1 2 0 1 0
        document_ids int64  0 0 0 1 1 -1
    """

    def __init__(
        self,
        samples: Iterable[Sample] | Samples,
        max_length: int,
        *,
        seed: int,
        pad_id: int = 0,
        place: Callable[[int], str] = "sample {}".format,
    ):
        """Decides the places of the samples.

        Args:
            samples: where they lie, or the samples themselves, which are read once; longer ones
                are cut to `max_length`.
            max_length: tokens of a sequence.
            seed: decides which documents meet and the order of the sequences.
            pad_id: token id of the padding.
            place: says where sample i, counted from 0, came from.
        """
        self.max_length = max_length
        self.pad_id = pad_id
        found = samples if isinstance(samples, Samples) else Samples.of(samples)
        num_learnt = found.num_learnt(max_length)
        self.num_truncated = int((found.lengths > max_length).sum())
        self.num_dropped = int((num_learnt == 0).sum())
        """Samples without a learnt token, after truncation."""
        self.num_supervised_tokens = int(num_learnt.sum())
        """Tokens that are learnt."""
        self._place, self._taken = place, np.flatnonzero(num_learnt)
        self._samples = found.take(self._taken)
        self._lengths = np.minimum(self._samples.lengths, max_length)
        self.sequences = pack(self._lengths, max_length, seed)
        """Sample numbers of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self._lengths.sum())

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each sequence, without padding."""
        return [int(self._lengths[samples].sum()) for samples in self.sequences]

    @property
    def checksum(self) -> str:
        """xxh3_64 of the ids and masks of all samples, in the order they were read."""
        digest = xxhash.xxh3_64()
        for piece in self._samples.cut(self.max_length):
            digest.update(piece.input_ids.numpy().tobytes())
        for piece in self._samples.cut(self.max_length):
            digest.update(piece.loss_mask.numpy().tobytes())
        return digest.hexdigest()

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each id occurs among the learnt tokens.

        Args:
            vocab_size: V, ids of the target's output head; all learnt ones are below.
        """
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for piece in self._samples.cut(self.max_length):
            counts += torch.bincount(piece.input_ids[piece.loss_mask], minlength=vocab_size)
        return counts

    def check_ids(self, target: Vocabulary) -> None:
        """Refuses token ids that a target cannot read, and learnt ones that it cannot write.

        Effects: a padding that it cannot read, as tokenizers that were given one have, becomes 0.

        Raises:
            InputError: with the first of them and where it is from.
        """
        self.pad_id = self.pad_id if self.pad_id < target.num_embeddings else 0
        if self._samples.highest < min(target.num_embeddings, target.vocab_size):
            return
        for number, length in enumerate(self._lengths.tolist()):
            found = self._samples.read(number, length)
            where = partial(self._place, int(self._taken[number]))
            learnt = found.input_ids[found.loss_mask].tolist()
            check_ids(found.input_ids.tolist(), target, where, learnt)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids = torch.full((self.max_length,), self.pad_id)
        loss_mask = torch.zeros(self.max_length, dtype=torch.bool)
        position_ids = torch.zeros(self.max_length, dtype=torch.int64)
        document_ids = torch.full((self.max_length,), -1)
        at = 0
        for document, sample in enumerate(self.sequences[index].tolist()):
            length = int(self._lengths[sample])
            here = slice(at, at + length)
            found = self._samples.read(sample, length)
            input_ids[here], loss_mask[here] = found.input_ids, found.loss_mask
            position_ids[here] = torch.arange(length)
            document_ids[here] = document
            at += length
        return {
            "input_ids": input_ids,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }


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
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of samples before truncation: `p50`, `p90`, `p99` and `longest`."""
    prepared: list[str] = field(default_factory=list)
    """Folders of the tokenised samples."""
    rows_per_s: float | None = None
    """At which the training data were tokenised, whenever that was."""
    unread: dict[str, int] = field(default_factory=dict)
    """Rows by field that has something in it and is not read."""
    unrendered: dict[str, int] = field(default_factory=dict)
    """How often the chat template does not render what a record says, by name."""
    left_out: list[str] = field(default_factory=list)
    """Files of a folder that are not read, and why."""

    def lines(self) -> list[str]:
        """Returns the report as lines to print."""
        share = self.num_supervised_tokens / self.num_tokens
        held_out = self.eval_path or "a share of it"
        return [
            f"data: {self.path} (form {self.form.value}, sha256 {self.sha256[:12]}); "
            f"held out: {held_out}",
            f"  records: {self.num_records:,} used, {self.num_bad:,} malformed, "
            f"{self.num_truncated:,} truncated, {self.num_dropped:,} dropped (nothing to learn)",
            f"  tokens: {self.num_tokens:,}, of which {share:.1%} are learnt",
            f"  sequences: {self.num_train_sequences:,} to train on, "
            f"{self.num_eval_sequences:,} held out, {self.padding:.1%} padding",
            *self._lines_of_store(),
            *(f"  {line}" for line in malformed(self.bad)),
        ]

    def _lines_of_store(self) -> list[str]:
        """None for the reports of older stores of features."""
        if not self.lengths:
            return []
        half, most, nearly_all, longest = self.lengths.values()
        speed = f", {self.rows_per_s:,.0f} rows/s" if self.rows_per_s else ""
        left_out = [
            *counted("fields not read", self.unread, "rows"),
            *counted("not rendered by the chat template", self.unrendered, "times"),
            *(f"not read: {name}" for name in self.left_out),
        ]
        return [
            f"  tokens of a sample: {half:,} (half of all), {most:,} (90%), {nearly_all:,} (99%), "
            f"{longest:,} (longest)",
            f"  prepared: {', '.join(self.prepared)}{speed}",
            *(f"  {line}" for line in left_out),
        ]


def prepare(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, progress: bool = True
) -> tuple[PackedDataset, PackedDataset, DataReport]:
    """Opens the prepared data, making them if need be, and packs training and held-out sequences.

    All processes of a launch may call it at once: one of them prepares, and the others wait.

    Args:
        config: of the data; its `path` is set.
        tokenizer: the target's.
        seed: decides which records are held out, and the packing.
        progress: whether to say that another process is waited for.

    Returns:
        The training set, the held-out set and what became of the data.

    Raises:
        InputError: bad data, or nothing to learn in either set.
    """
    path, eval_path = str(config.path), config.eval_path
    stores = [open_prepared(path, config, tokenizer, progress)]
    if eval_path is None:
        train, heldout = split(stores[0].num_records, config.eval_fraction, seed, path)
    else:
        stores.append(open_prepared(eval_path, config, tokenizer, progress))
        train, heldout = (np.arange(store.num_records) for store in stores)
    parts = [
        Part(path, stores[0], train[: config.num_prompts]),
        Part(eval_path or f"{path} (held-out share)", stores[-1], heldout),
    ]
    sets = [part.packed(config.max_length, seed, _pad_id(tokenizer)) for part in parts]
    return sets[0], sets[1], _report(config, stores, parts, sets)


def split(num_records: int, fraction: float, seed: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the records to train on, and of a share held out, at least one, both rising."""
    if num_records < 2:
        raise InputError(f"{path}: one record cannot be split; add records or set data.eval_path")
    count = min(max(1, round(fraction * num_records)), num_records - 1)
    chosen = np.zeros(num_records, dtype=np.bool_)
    chosen[random.Random(seed).sample(range(num_records), count)] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


@dataclass(frozen=True)
class Part:
    """Records of a store that make one set.

    Attributes:
        name: of the set, in messages.
        store: that holds them.
        records: their numbers, rising.
    """

    name: str
    store: Prepared
    records: np.ndarray

    @cached_property
    def samples(self) -> Samples:
        """Of these records."""
        return self.store.samples.take(self._numbers)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self.store.samples_of(self.records)

    def _place(self, sample: int) -> str:
        return self.store.place_of(int(self.store.record[self._numbers[sample]]))

    def packed(self, max_length: int, seed: int, pad_id: int) -> PackedDataset:
        """Its sequences.

        Raises:
            InputError: nothing is learnt.
        """
        packed = PackedDataset(
            self.samples, max_length, seed=seed, pad_id=pad_id, place=self._place
        )
        if packed.num_supervised_tokens:
            return packed
        bad = self.store.bad
        why = f"; the first malformed row: {bad[0]}" if bad else ""
        if not self.samples.num_learnt(int(self.samples.lengths.max())).any():
            form = self.store.form.value
            why = f"; no record of form {form} has an assistant's text" + why
        raise InputError(
            f"{self.name}: nothing to learn: of {len(self.records)} records {packed.num_dropped} "
            f"have no learnt token within data.max_length={max_length}{why}"
        )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _report(
    config: DataConfig, stores: list[Prepared], parts: list[Part], sets: list[PackedDataset]
) -> DataReport:
    num_tokens = sum(packed.num_tokens for packed in sets)
    slots = sum(len(packed) * packed.max_length for packed in sets)
    refused = sum(int(np.isin(part.store.refused, part.records).sum()) for part in parts)
    bad = [message for store in stores for message in store.bad]
    lengths = np.concatenate([part.samples.lengths for part in parts])
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99, 1], method="higher").tolist()
    return DataReport(
        path=str(config.path),
        eval_path=config.eval_path,
        form=stores[0].form,
        num_records=sum(len(part.records) for part in parts) - refused,
        num_bad=len(bad),
        num_truncated=sum(packed.num_truncated for packed in sets),
        num_dropped=sum(packed.num_dropped for packed in sets),
        num_tokens=num_tokens,
        num_supervised_tokens=sum(packed.num_supervised_tokens for packed in sets),
        padding=1 - num_tokens / slots,
        sha256=stores[0].sha256,
        num_train_sequences=len(sets[0]),
        num_eval_sequences=len(sets[1]),
        bad=bad,
        lengths=dict(zip(("p50", "p90", "p99", "longest"), map(int, quantiles), strict=True)),
        prepared=[str(store.folder) for store in stores],
        rows_per_s=stores[0].rows_per_s,
        unread=dict(sum((Counter(store.unread) for store in stores), Counter())),
        unrendered=dict(sum((Counter(store.unrendered) for store in stores), Counter())),
        left_out=[name for store in stores for name in store.source.left_out],
    )
