import hashlib
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import templates
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from templates import REFUSING
from transformers import PreTrainedTokenizerFast

from conf.errors import InputError
from conf.settings.data import DataConfig, Form, OnBadRow
from data.prepared import prepare as preparing
from data.prepared.packing import PackedDataset, pack_samples
from data.prepared.prepare import DataReport, split_records
from data.rows.records import NUM_BAD_SHOWN
from data.templates.record_encoder import Sample
from tests.chats import write_rows


def sample(*ids: int) -> Sample:
    """Token ids; the first is never learnt."""
    return Sample(list(ids), [False] + [True] * (len(ids) - 1))


def prepare(
    config: DataConfig, tokenizer: Any, *, path: str, eval_path: str | None, **more: Any
) -> tuple[PackedDataset, PackedDataset, DataReport]:
    return preparing.prepare_datasets(
        replace(config, path=path, eval_path=eval_path), tokenizer, **more
    )


def make_tokenizer(template: str | None = REFUSING) -> PreTrainedTokenizerFast:
    return templates.make_tokenizer(template, special=["<|im_start|>", "<|im_end|>"])


def exchange(prompt: str, answer: str) -> dict:
    return {"prompt": prompt, "response": answer}


@pytest.fixture
def write(tmp_path):
    def write(rows: list[dict], name: str = "rows.jsonl") -> str:
        return str(write_rows(tmp_path / name, rows))

    return write


ROWS = [exchange(f"ask {i}", "word " * (i % 7 + 1)) for i in range(100)]


def test_documents_lie_side_by_side_with_their_own_positions():
    packed = PackedDataset(
        [sample(1, 2, 3, 4), sample(4, 5, 6), sample(7, 8)], 10, seed=0, pad_id=9
    )
    assert len(packed) == 1
    item = packed[0]
    assert item["input_ids"].tolist() == [1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    learnt = [False, True, True, True, False, True, True, False, True, False]
    assert item["loss_mask"].tolist() == learnt
    assert item["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]
    assert item["document_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, -1]
    assert {name: tensor.dtype for name, tensor in item.items()} == {
        "input_ids": torch.int64, "loss_mask": torch.bool,
        "position_ids": torch.int64, "document_ids": torch.int64,
    }  # fmt: skip


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=20)


@given(MASKS, st.integers(1, 12), st.integers(0, 3))
def test_packing_neither_splits_nor_loses(masks, max_length, seed):
    """Of each sample with a learnt token its first `max_length` tokens lie together, once."""
    samples = [Sample([100 * n + i for i in range(len(m))], m) for n, m in enumerate(masks)]
    cut = [(each.input_ids[:max_length], each.loss_mask[:max_length]) for each in samples]
    kept = [(ids, mask) for ids, mask in cut if any(mask)]
    packed = PackedDataset(samples, max_length, seed=seed, pad_id=7777)
    found, num_filled = [], []
    for item in (packed[i] for i in range(len(packed))):
        ids, mask, positions, documents = (
            item[name].tolist()
            for name in ("input_ids", "loss_mask", "position_ids", "document_ids")
        )
        place = 0
        for document in range(max(documents) + 1):
            end = place + documents.count(document)
            assert documents[place:end] == [document] * (end - place)
            assert positions[place:end] == list(range(end - place))
            found.append((ids[place:end], mask[place:end]))
            place = end
        rest = max_length - place
        assert ids[place:] == [7777] * rest
        assert (mask[place:], positions[place:]) == ([False] * rest, [0] * rest)
        assert documents[place:] == [-1] * rest
        num_filled.append(place)
    assert sorted(found) == sorted(kept)
    assert packed.sequence_lengths == num_filled
    assert packed.num_truncated == sum(len(mask) > max_length for mask in masks)
    assert packed.num_dropped == len(masks) - len(kept)
    assert packed.num_tokens == sum(num_filled)
    learnt = [i for ids, mask in kept for i, on in zip(ids, mask, strict=True) if on]
    assert packed.num_supervised_tokens == len(learnt)
    counts = packed.count_token_ids(2000)
    assert counts.nonzero()[:, 0].tolist() == sorted(learnt)
    assert counts.dtype == torch.int64


def test_a_tokenizer_larger_than_the_output_head_is_refused():
    packed = PackedDataset([sample(4, 5, 6)], 4, seed=0, pad_id=7)
    target = SimpleNamespace(name="toy", num_embeddings=7, vocab_size=6)
    with pytest.raises(InputError, match=r"sample 0: token id 6, but the output head of toy has 6"):
        packed.check_token_ids(target)
    assert (packed.pad_id, packed[0]["input_ids"].tolist()) == (0, [4, 5, 6, 0])


def plainly_packed(lengths: list[int], max_length: int, seed: int) -> list[list[int]]:
    """Sequences as heads have been trained on since the first version."""
    generator = random.Random(seed)
    order = list(range(len(lengths)))
    generator.shuffle(order)
    sequences: list[list[int]] = []
    for begin in range(0, len(order), 16384):
        room: list[tuple[int, int]] = []  # (tokens left, sequence)
        for sample in sorted(order[begin : begin + 16384], key=lambda sample: -lengths[sample]):
            fits = [each for each in room if each[0] >= lengths[sample]]
            left, sequence = min(fits, default=(max_length, len(sequences)))
            if fits:
                room.remove((left, sequence))
            else:
                sequences.append([])
            sequences[sequence].append(sample)
            if left > lengths[sample]:
                room.append((left - lengths[sample], sequence))
    generator.shuffle(sequences)
    return sequences


@pytest.mark.parametrize(
    ("num_samples", "max_length", "seed"), [(0, 8, 5), (1, 8, 6), (300, 50, 5), (20_000, 3, 6)]
)
def test_sequences_and_their_order_stay_what_they_were(num_samples, max_length, seed):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, max_length + 1, (num_samples,), generator=generator).tolist()
    sequences = [sequence.tolist() for sequence in pack_samples(lengths, max_length, seed)]
    assert sequences == plainly_packed(lengths, max_length, seed)
    assert num_samples < 20_000 or sum(lengths) / (max_length * len(sequences)) > 0.99


def texts(packed: PackedDataset, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The documents of a packed set, decoded."""
    found = []
    for item in (packed[i] for i in range(len(packed))):
        for document in range(int(item["document_ids"].max()) + 1):
            found.append(tokenizer.decode(item["input_ids"][item["document_ids"] == document]))
    return found


def test_num_prompts_caps_training_and_leaves_the_held_out_set(write):
    tokenizer, path = make_tokenizer(), write(ROWS)
    held = []
    for cap in (None, 8):
        config = DataConfig(max_length=64, num_prompts=cap)
        train, held_out, _ = prepare(config, tokenizer, path=path, eval_path=None, seed=0)
        held.append(sorted(texts(held_out, tokenizer)))
    assert len(texts(train, tokenizer)) == 8
    assert held[0] == held[1]


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 9)
)
def test_a_split_keeps_copies_together_and_a_record_on_each_side(copies, fraction, seed):
    train, held_out = split_records(np.array(copies, dtype=np.uint64), fraction, seed, "rows.jsonl")
    assert sorted([*train, *held_out]) == list(range(len(copies)))
    assert train.tolist() == sorted(train)
    # The choice is that of heads that were trained before: in the order of first records.
    firsts = list(dict.fromkeys(copies))
    groups = firsts if len(firsts) > 1 else list(range(len(copies)))
    count = min(max(1, round(fraction * len(groups))), len(groups) - 1)
    chosen = {groups[i] for i in random.Random(seed).sample(range(len(groups)), count)}
    found = held_out.tolist() if len(firsts) == 1 else [copies[i] for i in held_out]
    assert set(found) == chosen
    assert len(firsts) == 1 or not chosen & {copies[i] for i in train}


def test_copies_are_counted_and_never_held_out_from_themselves(write, tmp_path):
    tokenizer, config = make_tokenizer(), DataConfig(max_length=64, eval_fraction=0.2)
    rows = [exchange(f"ask {i}", f"word {i}") for i in range(20)]
    folder = Path(write(rows)).parent
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "link.jsonl").symlink_to(folder / "rows.jsonl")
    train, held_out, report = prepare(config, tokenizer, path=str(folder), eval_path=None, seed=0)
    assert not set(texts(train, tokenizer)) & set(texts(held_out, tokenizer))
    assert len(texts(held_out, tokenizer)) == 12
    assert (report.num_copies, report.num_heldout, report.num_heldout_known) == (40, 12, 0)
    assert (report.num_records, report.form) == (60, Form.prompt)
    assert report.padding == 1 - report.num_tokens / (64 * (len(train) + len(held_out)))
    assert (
        "  copies: 40 of 60 records repeat an earlier one; every copy is read, and copies are held "
        "out together"
    ) in report.format_lines()
    assert len(train.prompts) == 16


def test_rows_of_eval_path_that_are_trained_on_are_refused_or_counted(write):
    tokenizer, config = make_tokenizer(), DataConfig(max_length=64)
    path, shuffled = write(ROWS), write(ROWS[::-1], "shuffled.jsonl")
    for same in (path, shuffled):
        message = (
            r"data\.eval_path=.*: holds the rows of data\.path=.*rows\.jsonl, so nothing would"
        )
        with pytest.raises(InputError, match=message):
            prepare(config, tokenizer, path=path, eval_path=same, seed=0)
    # The first has another answer, and the second is new.
    some = write([exchange("ask 0", "other"), exchange("new", "words"), *ROWS[90:]], "some.jsonl")
    train, held_out, report = prepare(config, tokenizer, path=path, eval_path=some, seed=0)
    assert (report.num_heldout_known, report.num_heldout, report.num_copies) == (11, 12, 0)
    assert (len(texts(train, tokenizer)), len(texts(held_out, tokenizer))) == (100, 12)
    assert report.eval_sha256 == hashlib.sha256(Path(some).read_bytes()).hexdigest()
    assert (
        "  held out, but trained on: the first prompts of 11 of 12 records, so held-out figures "
        "are too good"
    ) in report.format_lines()


def test_rows_that_the_template_refuses_are_no_copies(write):
    rows = [exchange("refuse me", "words")] * 3 + ROWS
    config = DataConfig(max_length=64, on_bad_row=OnBadRow.skip)
    _, _, report = prepare(config, make_tokenizer(), path=write(rows), eval_path=None, seed=0)
    assert (report.num_bad, report.num_copies) == (3, 0)


REPORT = DataReport(
    path="rows.jsonl", eval_path=None, form=Form.prompt, num_records=1200, num_bad=3,
    num_truncated=1000, num_dropped=7, num_tokens=4000, num_supervised_tokens=1000,
    padding=0.125, sha256="0123456789abcdef", num_train_sequences=50, num_eval_sequences=5,
    bad=["row 1", "row 2"], lengths={"p50": 90, "p90": 400, "p99": 1000, "longest": 70000},
    prepared=["cache/1", "cache/2"], rows_per_s=3000.4, num_heldout=25,
)  # fmt: skip


def test_the_lines_of_a_report():
    assert REPORT.format_lines() == [
        "data: rows.jsonl (form prompt, sha256 0123456789ab); held out: a share of it",
        "  records: 1,200 read, 25 of them held out, 3 malformed, 1,000 truncated, 7 dropped "
        "(nothing to learn)",
        "  warning: 1,000 samples of 1,200 records are longer than data.max_length, so their ends "
        "are not learnt; data.max_length=448 keeps 90% whole, 70000 all",
        "  tokens: 4,000, of which 25.0% are learnt",
        "  sequences: 50 to train on, 5 held out, 12.5% padding (a larger data.max_length packs "
        "closer)",
        "  tokens of a sample: 90 (half of all), 400 (90%), 1,000 (99%), 70,000 (longest)",
        "  prepared: cache/1, cache/2, 3,000 rows/s",
        "  malformed: row 1",
        "  malformed: row 2",
    ]
    short = replace(REPORT, lengths=REPORT.lengths | {"longest": 448})
    assert short.format_lines()[2].endswith("are not learnt; data.max_length=448 keeps all")
    few = replace(REPORT, num_truncated=120)
    assert few.format_lines()[2].startswith("  tokens: ")
    assert replace(few, num_truncated=121).format_lines()[2].startswith("  warning: 121 samples ")
    before = replace(REPORT, eval_path="other.jsonl", lengths={}, prepared=[], rows_per_s=None)
    other = replace(before, bad=["row"] * NUM_BAD_SHOWN)
    assert other.format_lines()[0].endswith("; held out: other.jsonl")
    assert other.format_lines()[4:] == ["  malformed: row"] * NUM_BAD_SHOWN
    many = replace(before, bad=["row"] * (NUM_BAD_SHOWN + 1)).format_lines()
    assert many[4:] == ["  malformed: row"] * NUM_BAD_SHOWN + ["  malformed: 1 more"]


def test_tokens_of_some_sequences_hold_no_padding_and_none_that_are_held_out() -> None:
    assert REPORT.estimate_num_tokens(55) == 4000
    assert REPORT.estimate_num_tokens(50) == 3636
    assert REPORT.estimate_num_tokens(8) == 582


def test_nothing_to_learn_is_refused(write):
    path = write([{"prompt": f"ask {i}"} for i in range(3)])
    with pytest.raises(InputError) as caught:
        prepare(DataConfig(), make_tokenizer(), path=path, eval_path=None, seed=0)
    assert str(caught.value) == (
        f"{path}: nothing to learn; none of its 3 records of form prompt has text of an assistant; "
        "scripts/regenerate.py lets the target answer them (docs/data.md)"
    )
    short, path = DataConfig(max_length=3, on_bad_row=OnBadRow.skip), write(ROWS)
    within = "have no learnt token within data.max_length=3"
    with pytest.raises(InputError) as caught:
        prepare(short, make_tokenizer(), path=path, eval_path=None, seed=0)
    assert str(caught.value) == f"{path}: nothing to learn; 98 of 98 records {within}"
    path = write([exchange("ask", "word"), {"prompt": ""}, {"prompt": ""}])
    with pytest.raises(InputError) as caught:
        prepare(short, make_tokenizer(), path=path, eval_path=path, seed=0)
    assert str(caught.value).startswith(
        f"{path}: nothing to learn; 1 of 1 records {within}; the first malformed row: {path}:2: "
    )


def test_one_record_cannot_be_split(write):
    with pytest.raises(InputError, match=r"a single record cannot be split; .*data.eval_path"):
        prepare(DataConfig(), make_tokenizer(), path=write(ROWS[:1]), eval_path=None, seed=0)


def test_conversations_need_a_chat_template_and_texts_do_not(write):
    with pytest.raises(InputError, match="no chat template"):
        prepare(DataConfig(), make_tokenizer(None), path=write(ROWS), eval_path=None, seed=0)
    path = write([{"text": "Once upon"}, {"text": "a time"}])
    train, held_out, _ = prepare(
        DataConfig(), make_tokenizer(None), path=path, eval_path=None, seed=0
    )
    assert train.num_supervised_tokens == train.num_tokens > 0
    assert len(held_out) == 1
