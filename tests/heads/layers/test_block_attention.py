"""Attention of blocks against a sum written row by row."""

from functools import cache

import pytest
import torch
from torch import Tensor

from heads.layers import block_attention as attention
from heads.layers import block_attention as kernels
from heads.layers.block_attention import BlockRange, block_attention, plain_block_attention

S, SIZE = 11, 3
FIRST, END = [0, 0, 4, 4, 9], [1, 4, 6, 9, 11]
KINDS = [(False, None), (True, None), (False, 3), (True, 3), (False, 2), (False, 1)]


def sight(causal: bool = False, window: int | None = None) -> BlockRange:
    first, end = torch.tensor(FIRST), torch.tensor(END)
    return BlockRange(first, end, SIZE, causal, window, (first, end))


def inputs(heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, text keys and values, own keys and values."""
    generator = torch.Generator().manual_seed(0)
    many, few = heads
    blocks, text = (len(FIRST), SIZE), (1, S)
    shapes = [(*blocks, many), *[(*text, few)] * 2, *[(*blocks, few)] * 2]
    made = [torch.randn(*shape, 8, generator=generator, dtype=dtype) for shape in shapes]
    return [each.requires_grad_() for each in made]


def literal(query: Tensor, *both: Tensor, causal: bool, window: int | None) -> Tensor:
    """Row by row and head by head."""
    keys, values, own_keys, own_values = both
    groups, found = query.shape[2] // keys.shape[2], []
    for block in range(len(FIRST)):
        for row in range(SIZE):
            place = END[block] + row
            text = [
                s for s in range(FIRST[block], END[block]) if window is None or place - s < window
            ]
            mine = [
                other
                for other in range(SIZE)
                if (not causal or other <= row) and (window is None or abs(row - other) < window)
            ]
            for head in range(query.shape[2]):
                few = head // groups
                k = torch.cat([keys[0, text, few], own_keys[block, mine, few]])
                v = torch.cat([values[0, text, few], own_values[block, mine, few]])
                weights = (k @ query[block, row, head] / query.shape[-1] ** 0.5).softmax(-1)
                found.append(weights @ v)
    return torch.stack(found).view_as(query)


def run(attend, made: list[Tensor]) -> tuple[Tensor, ...]:
    """The output, and gradients of all that went in."""
    output = attend(*made)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return output.detach(), *torch.autograd.grad(output, made, upstream.to(output))


def both_ways(attend, seen: BlockRange):
    return lambda query, k, v, own_k, own_v: attend(query, (k, v), (own_k, own_v), seen)


@cache
def expected_of(heads: tuple[int, int], causal: bool, window: int | None) -> tuple[Tensor, ...]:
    return run(lambda *each: literal(*each, causal=causal, window=window), inputs(heads))


@pytest.mark.parametrize(("place", "kind"), enumerate(KINDS))
@pytest.mark.parametrize("rows", [1, 6, 128])
@pytest.mark.parametrize("cpu", [True, False])
def test_rows_see_their_text_and_their_block(
    place: int, kind: tuple[bool, int | None], rows: int, cpu: bool, monkeypatch
) -> None:
    heads, (causal, window) = [(4, 2), (3, 3), (6, 1)][(place + rows) % 3], kind
    for name in ("ROWS_PER_CHUNK", "ROWS_PER_LAUNCH"):
        monkeypatch.setattr(attention, name, rows)
    # Elsewhere in whole tiles, of which there is more than one here.
    monkeypatch.setattr(attention, "SHORT_LENGTH_STEP", 4)
    monkeypatch.setattr(attention, "LENGTH_STEP", 4)
    monkeypatch.setattr(kernels, "is_on_cpu", lambda _: cpu)
    made = inputs(heads)
    expected = expected_of(heads, causal, window)
    for attend in (block_attention, plain_block_attention):
        found = run(both_ways(attend, sight(causal, window)), made)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_several_texts_each_with_its_own_blocks() -> None:
    query, keys, values, own_keys, own_values = (each.detach() for each in inputs())
    query, own = query[:4], (own_keys[:4], own_values[:4])
    text = tuple(torch.cat([each, each.flip(1)]) for each in (keys, values))
    first, end = torch.tensor(FIRST[:4]), torch.tensor(END[:4])
    found = block_attention(query, text, own, BlockRange(first, end, SIZE))
    for number, rows in enumerate((slice(0, 2), slice(2, 4))):
        seen = BlockRange(first[rows], end[rows], SIZE, bounds_on_cpu=(first[rows], end[rows]))
        alone = tuple(each[number, None] for each in text)
        mine = block_attention(query[rows], alone, tuple(each[rows] for each in own), seen)
        torch.testing.assert_close(found[rows], mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_are_near_wide_ones(dtype: torch.dtype) -> None:
    made = inputs()
    expected = run(both_ways(block_attention, sight()), made)
    narrow = [each.detach().to(dtype).requires_grad_() for each in made]
    found = run(both_ways(block_attention, sight()), narrow)
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [33, 96, 129, 1100])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (4, 1)])
def test_on_cuda_numbers_are_those_of_the_definition(
    heads: tuple[int, int], window: int | None, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    end = torch.randperm(num_tokens - 1, generator=generator)[:70].sort().values + 1
    first, (many, few) = end // 32 * 16, heads
    own, text = (len(end), 5), (1, num_tokens)
    shapes = [(*own, many), *[(*text, few)] * 2, *[(*own, few)] * 2]
    made = [torch.randn(*each, 64, generator=generator).to(dtype) for each in shapes]
    results = []
    for device, attend, wide in (
        ("cpu", plain_block_attention, torch.float64),
        ("cuda", None, dtype),
    ):
        places = first.to(device), end.to(device)
        seen = BlockRange(*places, 5, window is not None, window, (first, end))
        leaves = [each.to(device, wide).requires_grad_() for each in made]
        results.append(run(both_ways(attend or block_attention, seen), leaves))
    tolerance = 5e-3 if dtype is torch.float32 else 0.05  # products may be in TF32
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_a_chunk_reads_no_token_that_none_of_its_blocks_sees(monkeypatch) -> None:
    def read(seen: BlockRange) -> list[tuple[slice, slice]]:
        return [
            (each.rows, each.tokens) for each in seen.make_chunk_plan(torch.empty(0), S, 1).chunks
        ]

    monkeypatch.setattr(attention, "ROWS_PER_CHUNK", 2 * SIZE)
    rows = slice(0, 6), slice(6, 12), slice(12, 15)
    tokens = slice(0, 4), slice(4, 9), slice(9, 11)
    assert read(sight()) == list(zip(rows, tokens, strict=True))
    # The first row of a block sees one token less than the window.
    tokens = slice(0, 4), slice(4, 9), slice(9, 11)
    assert read(sight(window=3)) == list(zip(rows, tokens, strict=True))
    tokens = slice(0, 4), slice(5, 9), slice(10, 11)
    assert read(sight(window=2)) == list(zip(rows, tokens, strict=True))


def test_off_the_cpu_a_run_sees_few_lengths() -> None:
    lengths = [attention._round_up_length(number) for number in range(1, 16385)]
    assert all(length >= number for number, length in enumerate(lengths, 1))
    assert sorted(set(lengths)) == [
        512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192,
        10240, 12288, 14336, 16384,
    ]  # fmt: skip


def test_what_hides_tokens_is_made_once_for_all_layers(monkeypatch) -> None:
    made = []
    of_text = BlockRange.build_context_mask
    monkeypatch.setattr(
        BlockRange, "build_context_mask", lambda *given: made.append(1) or of_text(*given)
    )
    seen, inside = sight(window=3), inputs()
    for number, attend in enumerate((block_attention, plain_block_attention), 1):
        for _ in range(3):
            run(both_ways(attend, seen), inside)
        assert len(made) == number
