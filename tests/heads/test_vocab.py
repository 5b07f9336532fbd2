import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from conf.errors import InputError
from heads.vocab import (
    DraftVocab,
    compute_covered_fraction,
    format_coverage,
    format_heldout_coverage,
)

# 16 target ids; 100 tokens. Ids 4, 7, 9 and 10 tie, 1, 2, 3 and the last five are unseen.
COUNTS = torch.tensor([2, 0, 0, 0, 5, 50, 20, 5, 8, 5, 5, 0, 0, 0, 0, 0])


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def small() -> DraftVocab:
    return DraftVocab(ids(0, 1, 5, 9), 10)


def test_mappings_of_four_of_ten_ids() -> None:
    vocab = small()
    assert not vocab.is_full
    assert vocab.to_target_ids(ids(3, 0, 2)).tolist() == [9, 0, 5]
    assert vocab.compute_offsets().tolist() == [0, 0, 3, 6]
    assert vocab.build_mask().int().tolist() == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert (vocab.compute_offsets().dtype, vocab.build_mask().dtype) == (torch.int64, torch.bool)


def test_target_ids_that_are_not_in_are_minus_one() -> None:
    targets = torch.tensor([[0, 2, 5, 4], [9, 8, 10, -1]])
    expected = [[0, -1, 2, -1], [3, -1, -1, -1]]
    assert small().to_draft_ids(targets).tolist() == expected
    # A transposed view: not contiguous, which searchsorted warns about.
    assert small().to_draft_ids(targets.T).T.tolist() == expected


def test_everything_is_the_identity() -> None:
    vocab = DraftVocab.make_full(4)
    assert vocab.is_full
    assert (
        vocab.to_target_ids(ids(2, 3)).tolist() == vocab.to_draft_ids(ids(2, 3)).tolist() == [2, 3]
    )
    assert vocab.compute_offsets().tolist() == [0, 0, 0, 0]
    assert vocab.build_mask().tolist() == [True] * 4


def test_to_moves_the_ids_and_what_is_made_of_them() -> None:
    vocab = small().to("meta")
    assert vocab.ids.device.type == vocab.compute_offsets().device.type == "meta"
    assert vocab.size == 10


@settings(suppress_health_check=[HealthCheck.too_slow])  # where others use the machine
@given(st.permutations(range(10)), st.integers(1, 10), st.booleans())
def test_ids_in_any_order_are_sorted_and_name_their_rows(order, size: int, by_mask: bool) -> None:
    """Offsets of rising ids are read as they are; others, as of ids by frequency, with a mask."""
    chosen = order[:size]
    rows = sorted(range(size), key=lambda row: chosen[row])
    d2t = torch.tensor(chosen) - torch.arange(size)
    mask = torch.zeros(10, dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)
    if not by_mask and chosen != sorted(chosen) and int(d2t.min()) >= 0:
        return  # refused, as these may be ids
    vocab, found = DraftVocab.from_offsets(d2t, 10, mask if by_mask else None)
    assert (vocab.ids.tolist(), found.tolist()) == (sorted(chosen), rows)
    assert vocab.is_full == (size == 10)
    assert vocab.ids.dtype == torch.int64
    saved = DraftVocab(vocab.ids, 10)
    again, kept = DraftVocab.from_offsets(saved.compute_offsets().int(), 10, saved.build_mask())
    assert (again.ids.tolist(), kept.tolist()) == (vocab.ids.tolist(), [*range(size)])


def test_ids_that_are_no_offsets_by_their_mask_are_named() -> None:
    with pytest.raises(InputError, match=r"not mark target id 1, .*seems to hold target ids"):
        DraftVocab.from_offsets(ids(3, 0), 10, DraftVocab(ids(0, 3), 10).build_mask())


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (ids(0, 0, 8), r"d2t maps draft id 2 to target id 10, outside 0 to 9$"),
        (ids(-1, 0), r"d2t maps draft id 0 to target id -1, outside 0 to 9$"),
        (ids(0, 3, 2), r"d2t maps draft ids 1 and 2 to the same target id 4; it seems to hold"),
        (ids(4, 1, 2, 1, 0), r"d2t maps draft ids 0 and 2 to the same target id 4$"),
        (
            ids(3, 0),
            r"d2t does not rise, and may hold offsets or target ids: add t2d, which tells$",
        ),
        (ids(0, 1, 5, 9), r"target id 12, outside 0 to 9; it seems to hold target ids"),
        (torch.tensor([0.0, 1.0]), r"d2t is torch.float32 \[2\]: must be \[Vd\] int64"),
        (torch.zeros(1, 4, dtype=torch.int64), r"d2t is torch.int64 \[1, 4\]: must"),
        (torch.zeros(0, dtype=torch.int64), r"d2t is torch.int64 \[0\]: must"),
    ],
)
def test_a_mapping_that_is_not_one_of_offsets_is_named(d2t: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DraftVocab.from_offsets(d2t, 10)


@pytest.mark.parametrize(
    ("t2d", "message"),
    [
        ([1, 1, 0, 0, 0], r"t2d has shape \[5\]: must be \[10\]"),
        ([1, 1, 0, 0, 0, 1, 0, 0, 1, 1], r"t2d marks 5 target ids, but d2t maps to 4"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1], r"t2d does not mark target id 5, to which d2t maps"),
    ],
)
def test_a_mask_that_disagrees_is_named(t2d: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DraftVocab.from_offsets(ids(0, 0, 3, 6), 10, torch.tensor(t2d).bool())


def test_the_mask_gives_absolute_ids_away_where_offsets_would_do() -> None:
    # As offsets 1, 3, 5 mean the ids 1, 4, 7, all below 10.
    absolute = ids(1, 3, 5)
    mask = DraftVocab(absolute, 10).build_mask()
    with pytest.raises(InputError, match=r"not mark target id 4, .*seems to hold target ids"):
        DraftVocab.from_offsets(absolute, 10, mask)


def test_choose_takes_the_most_frequent_and_the_lowest_among_equals() -> None:
    assert DraftVocab.from_counts(COUNTS, 3, []).ids.tolist() == [5, 6, 8]
    assert DraftVocab.from_counts(COUNTS, 5, []).ids.tolist() == [4, 5, 6, 7, 8]
    # Unseen ids fill what is left.
    assert DraftVocab.from_counts(COUNTS, 10, []).ids.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_special_tokens_are_always_in() -> None:
    vocab = DraftVocab.from_counts(COUNTS, 4, [15, 2, 15])
    assert (vocab.ids.tolist(), vocab.size) == ([2, 5, 6, 15], 16)
    assert DraftVocab.from_counts(COUNTS, 2, [15, 2]).ids.tolist() == [2, 15]
    with pytest.raises(InputError, match=r"head.draft_vocab_size=1: must be at least 2, the num"):
        DraftVocab.from_counts(COUNTS, 1, [15, 2])


def test_special_tokens_beyond_the_output_head_are_passed_over() -> None:
    assert DraftVocab.from_counts(COUNTS, 2, [16, 3]).ids.tolist() == [3, 5]


@pytest.mark.parametrize("size", [None, 16, 20])
def test_no_size_or_one_as_large_as_the_target_takes_everything(size: int | None) -> None:
    assert DraftVocab.from_counts(COUNTS, size, [3]).is_full


def test_choose_reads_its_input_only() -> None:
    counts = COUNTS.clone()
    DraftVocab.from_counts(counts, 4, [15])
    assert torch.equal(counts, COUNTS)


def test_coverage_lines_show_the_choice_and_other_sizes() -> None:
    chosen = DraftVocab.from_counts(COUNTS, 3, [])
    assert format_coverage(COUNTS, chosen, []) == [
        "draft vocabulary: 3 of 16 ids cover 78.00% of the learnt tokens",
        "  by size: 1 50.0%, 2 70.0%, 4 83.0%, 8 100.0%, 16 100.0%",
    ]


def test_coverage_lines_leave_out_sizes_that_cannot_be_chosen() -> None:
    counts = torch.ones(4096, dtype=torch.int64)
    lines = format_coverage(counts, DraftVocab.from_counts(counts, 1024, range(300)), range(300))
    assert lines == [
        "draft vocabulary: 1,024 of 4,096 ids cover 25.00% of the learnt tokens",
        "  by size: 512 12.5%, 1,024 25.0%, 2,048 50.0%, 4,096 100.0%",
    ]
    ones = torch.ones(3, dtype=torch.int64)
    lines = format_coverage(ones, DraftVocab.make_full(3), [])
    assert lines[1] == "  by size: 1 33.3%, 3 100.0%"


def test_coverage_of_held_out_text_is_said_beside_that_of_the_data() -> None:
    chosen = DraftVocab.from_counts(COUNTS, 3, [])
    learnt = torch.zeros_like(COUNTS)
    learnt[[5, 6, 8, 1]] = torch.tensor([500, 490, 8, 2])  # id 1 is not among the three
    assert format_heldout_coverage(learnt, chosen) == (
        "draft vocabulary: covers 99.80% of 1,000 held-out tokens"
    )
    assert format_heldout_coverage(COUNTS, chosen) == (
        "draft vocabulary: covers 78.00% of 100 held-out tokens; a larger head.draft_vocab_size, "
        "or more data, covers more"
    )


def test_narrowing_keeps_the_most_frequent_of_the_ids_that_are_in() -> None:
    vocab = DraftVocab(ids(4, 5, 8, 12, 15), 16)
    # Id 6 is commoner than 8 but not in; special 2 is not in either, unseen 15 is.
    narrowed = vocab.choose_subset(COUNTS, 3, [15, 2, 16])
    assert (narrowed.ids.tolist(), narrowed.size) == ([5, 8, 15], 16)
    assert compute_covered_fraction(COUNTS, narrowed) == 0.58
    assert vocab.choose_subset(COUNTS, 5, [15]).ids.tolist() == [4, 5, 8, 12, 15]
    assert vocab.filter_ids([16, 15, 2, 4]) == [4, 15]
