"""Packed training and held-out sequences from data, with a report about the data."""

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from conf.errors import InputError
from conf.settings.data import Form, PackedConfig
from data.prepared.dataset_cache import PreparedFolder, load_or_prepare_data
from data.prepared.packing import PackedDataset, TokenisedSamples
from data.rows.records import format_counts, format_malformed_rows
from data.rows.row_digests import count_copies

MANY_TRUNCATED = 0.1
"""Truncated samples per record above which a report warns."""
WIDE = 0.1
"""Fraction of padding above which another length is advised. Padding takes as long as text."""


@dataclass(frozen=True)
class DataReport:
    """Counts over training and held-out records."""

    path: str
    eval_path: str | None
    form: Form
    num_records: int
    """Well-formed records, before any is dropped."""
    num_bad: int
    num_truncated: int
    num_dropped: int
    """Records without a learnt token, after truncation."""
    num_tokens: int
    num_supervised_tokens: int
    padding: float
    """Fraction of padding in the packed sequences."""
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
    """Speed at which the training data were tokenised, now or earlier."""
    unread: dict[str, int] = field(default_factory=dict)
    """Number of rows per field that has a value but is not read."""
    unrendered: dict[str, int] = field(default_factory=dict)
    """Number of parts that the chat template does not render, by name."""
    left_out: list[str] = field(default_factory=list)
    """Files of a folder that are not read, with reasons."""
    eval_sha256: str | None = None
    """Checksum of the data of `eval_path`."""
    num_copies: int = 0
    """Records whose token ids repeat an earlier record of the same path."""
    num_heldout: int = 0
    """Held-out records."""
    num_heldout_known: int = 0
    """Held-out records whose first prompt is also that of a record to train on."""

    def estimate_num_tokens(self, num_sequences: int) -> int:
        """Estimate the tokens of some packed sequences, without padding, from the mean of all."""
        num_all = self.num_train_sequences + self.num_eval_sequences
        return round(self.num_tokens * num_sequences / num_all)

    def format_lines(self) -> list[str]:
        """Format the report as lines of text."""
        supervised = self.num_supervised_tokens / self.num_tokens
        held_out = self.eval_path or "a share of it"
        advice = " (a larger data.max_length packs closer)" if self.padding > WIDE else ""
        lines = [
            f"records: {self.num_records:,} read, {self.num_heldout:,} of them held out, "
            f"{self.num_bad:,} malformed, "
            f"{self.num_truncated:,} truncated, {self.num_dropped:,} dropped (nothing to learn)",
            *self._format_truncation(),
            f"tokens: {self.num_tokens:,}, of which {supervised:.1%} are learnt",
            f"sequences: {self.num_train_sequences:,} to train on, "
            f"{self.num_eval_sequences:,} held out, {self.padding:.1%} padding{advice}",
        ]
        if self.lengths:  # missing in reports of older feature stores
            half, most, nearly_all, longest = self.lengths.values()
            speed = f", {self.rows_per_s:,.0f} rows/s" if self.rows_per_s else ""
            lines += [
                f"tokens of a sample: {half:,} (half of all), {most:,} (90%), {nearly_all:,} "
                f"(99%), {longest:,} (longest)",
                f"prepared: {', '.join(self.prepared)}{speed}",
            ]
        lines += format_counts("fields not read", self.unread, "rows")
        lines += format_counts("not rendered by the chat template", self.unrendered, "times")
        lines += (f"not read: {name}" for name in self.left_out)
        if self.num_copies:
            lines.append(
                f"copies: {self.num_copies:,} of {self.num_records:,} records repeat an earlier "
                "one; every copy is read, and copies are held out together"
            )
        if self.num_heldout_known:
            lines.append(
                f"held out, but trained on: the first prompts of {self.num_heldout_known:,} of "
                f"{self.num_heldout:,} records, so held-out figures are too good"
            )
        return [
            f"data: {self.path} (form {self.form.value}, sha256 {self.sha256[:12]}); "
            f"held out: {held_out}",
            *(f"  {line}" for line in (*lines, *format_malformed_rows(self.bad))),
        ]

    def _format_truncation(self) -> list[str]:
        """Format a warning if more than a tenth of the samples lose their ends."""
        if not self.lengths or self.num_truncated <= MANY_TRUNCATED * self.num_records:
            return []
        most, longest = -(-self.lengths["p90"] // 64) * 64, self.lengths["longest"]
        kept = (
            f"{most} keeps 90% whole, {longest} all" if most < longest else f"{longest} keeps all"
        )
        return [
            f"warning: {self.num_truncated:,} samples of {self.num_records:,} records are longer "
            f"than data.max_length, so their ends are not learnt; data.max_length={kept}"
        ]


def prepare_datasets(
    config: PackedConfig, tokenizer: PreTrainedTokenizerBase, seed: int, progress: bool = True
) -> tuple[PackedDataset, PackedDataset, DataReport]:
    """Open or prepare the data, and pack training and held-out sequences.

    All processes of a launch may call this at once: one prepares, the others wait.

    Args:
        config: data settings with a `path`.
        tokenizer: the target's tokenizer.
        seed: seed of the held-out choice and of the packing.
        progress: whether to report waiting for another process.

    Returns:
        The training set, the held-out set and the report.

    Raises:
        InputError: bad data, a set without learnt tokens, or two paths with the same rows.
    """
    path, eval_path = str(config.path), config.eval_path
    folders = [load_or_prepare_data(path, config, tokenizer, progress)]
    if eval_path is None:
        train, heldout = split_records(folders[0].copies, config.eval_fraction, seed, path)
    else:
        folders.append(load_or_prepare_data(eval_path, config, tokenizer, progress))
        train, heldout = (np.arange(folder.num_records) for folder in folders)
    selections = [
        RecordSelection(path, folders[0], train[: config.num_prompts]),
        RecordSelection(eval_path or f"{path} (held-out share)", folders[-1], heldout),
    ]
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_id = next(token_id for token_id in ids if token_id is not None)
    sets = [selection.pack_records(config.max_length, seed, pad_id) for selection in selections]
    digests = [set(each.folder.copies[each.records].tolist()) for each in selections]
    if eval_path is not None and digests[0] == digests[1]:
        raise InputError(
            f"data.eval_path={eval_path}: holds the rows of data.path={path}, so nothing would be "
            "held out; name other rows, or leave data.eval_path unset to hold out a share"
        )
    return sets[0], sets[1], _build_report(config, folders, selections, sets)


def split_records(
    copies: np.ndarray, fraction: float, seed: int, path: str
) -> tuple[np.ndarray, np.ndarray]:
    """Split records at random into those to train on and those to hold out.

    All copies of a record are on one side, unless there is no other record.

    Args:
        copies: [R] digest of each record; copies have the same.
        fraction: fraction of the records, each copy counted once, to hold out.
        seed: seed of the choice.
        path: path of the data, for the message.

    Returns:
        Indices of the records to train on, and of the held-out records (at least one), both rising.

    Raises:
        InputError: there is only one record.
    """
    if len(copies) < 2:
        raise InputError(
            f"data.path={path}: a single record cannot be split; add records, or set data.eval_path"
        )
    _, first, group = np.unique(copies, return_index=True, return_inverse=True)
    if len(first) == 1:  # nothing but copies of one record
        first = group = np.arange(len(copies))
    num_groups = len(first)
    count = min(max(1, round(fraction * num_groups)), num_groups - 1)
    chosen_groups = np.zeros(num_groups, dtype=np.bool_)
    in_order = np.argsort(first)  # groups by their first records
    chosen_groups[in_order[random.Random(seed).sample(range(num_groups), count)]] = True
    chosen = chosen_groups[group]
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


@dataclass(frozen=True)
class RecordSelection:
    """Records of a prepared folder for one set.

    Attributes:
        name: name of the set in messages.
        folder: prepared folder.
        records: indices of the records, rising.
    """

    name: str
    folder: PreparedFolder
    records: np.ndarray

    @cached_property
    def _sample_numbers(self) -> np.ndarray:
        return np.flatnonzero(np.isin(self.folder.record_of_sample, self.records))

    @cached_property
    def samples(self) -> TokenisedSamples:
        """Samples of these records."""
        return self.folder.samples.select_samples(self._sample_numbers)

    def pack_records(self, max_length: int, seed: int, pad_id: int) -> PackedDataset:
        """Pack these records into sequences.

        Raises:
            InputError: no token is learnt.
        """

        def place(sample: int) -> str:
            return self.folder.find_location(
                int(self.folder.record_of_sample[self._sample_numbers[sample]])
            )

        packed = PackedDataset(
            self.samples, max_length, seed=seed, pad_id=pad_id, place=place,
            prompts=self.folder.prompts[self.records],
        )  # fmt: skip
        if packed.num_supervised_tokens:
            return packed
        bad = self.folder.bad_row_messages
        why = f"; the first malformed row: {bad[0]}" if bad else ""
        lacking = (
            f"{packed.num_dropped} of {len(self.records)} records have no learnt token within "
        )
        lacking += f"data.max_length={max_length}"
        whole = self.folder.samples
        if not whole.count_learnt_tokens(int(whole.lengths.max())).any():
            lacking = (
                f"none of its {self.folder.num_records} records of form {self.folder.form.value} "
                "has text of an assistant; scripts/regenerate.py lets the target answer them "
                "(docs/data.md)"
            )
        raise InputError(f"{self.name}: nothing to learn; {lacking}{why}")


def _build_report(
    config: PackedConfig,
    folders: list[PreparedFolder],
    selections: list[RecordSelection],
    sets: list[PackedDataset],
) -> DataReport:
    heldout = selections[1]
    num_tokens = sum(packed.num_tokens for packed in sets)
    refused = sum(
        int(np.isin(part.folder.refused_records, part.records).sum()) for part in selections
    )
    bad = [message for folder in folders for message in folder.bad_row_messages]
    lengths = np.concatenate([selection.samples.lengths for selection in selections])
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99, 1], method="higher").tolist()
    return DataReport(
        path=str(config.path),
        eval_path=config.eval_path,
        form=folders[0].form,
        num_records=sum(len(selection.records) for selection in selections) - refused,
        num_bad=len(bad),
        num_truncated=sum(packed.num_truncated for packed in sets),
        num_dropped=sum(packed.num_dropped for packed in sets),
        num_tokens=num_tokens,
        num_supervised_tokens=sum(packed.num_supervised_tokens for packed in sets),
        padding=1 - num_tokens / sum(len(packed) * packed.max_length for packed in sets),
        sha256=folders[0].sha256,
        num_train_sequences=len(sets[0]),
        num_eval_sequences=len(sets[1]),
        bad=bad,
        lengths=dict(zip(("p50", "p90", "p99", "longest"), map(int, quantiles), strict=True)),
        prepared=[str(folder.folder) for folder in folders],
        rows_per_s=folders[0].rows_per_s,
        unread=dict(sum((Counter(folder.unread) for folder in folders), Counter())),
        unrendered=dict(sum((Counter(folder.unrendered) for folder in folders), Counter())),
        left_out=[name for folder in folders for name in folder.source.left_out],
        eval_sha256=folders[1].sha256 if len(folders) > 1 else None,
        num_copies=sum(count_copies(folder.copies.tolist()) for folder in folders),
        num_heldout=len(heldout.records),
        num_heldout_known=sets[0].prompts.count_known(heldout.folder.prompts[heldout.records]),
    )
