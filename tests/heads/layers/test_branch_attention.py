import gc
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.layers.branch_attention import (
    ROWS_PER_CHUNK,
    BranchCache,
    CausalRange,
    branch_attention,
    build_causal_range,
    plain_branch_attention,
)
from heads.layers.documents import Documents

DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, -1])
T = len(DOCUMENTS)
ALL, SOME = torch.arange(T), torch.tensor([1, 2, 5, 7, 9])
HEADS = [(4, 2), (3, 3), (6, 1)]
# Each number of own drafts with each number of heads; rows and a number that cuts them in turn.
PAIRS = [
    (num_own, heads, (ALL, SOME)[place % 2], place // 2 % 2)
    for place, (num_own, heads) in enumerate(product((0, 1, 3), HEADS))
]


def literal(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, window: int = 0, sinks: Any = None
) -> Tensor:
    """[N, Q, d] row by row and head by head; keys and values [1 + J, T, K, d]."""
    groups, found = query.shape[1] // keys.shape[2], []
    for number, row in enumerate(rows.tolist()):
        seen = [s for s in range(row + 1) if DOCUMENTS[s] == DOCUMENTS[row]]
        for head in range(query.shape[1]):
            k, v = (
                torch.cat([each[0, seen, head // groups], each[1:, row, head // groups]])[-window:]
                for each in (keys, values)
            )
            scores = k @ query[number, head] / query.shape[-1] ** 0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            found.append(scores.softmax(-1)[: len(v)] @ v)
    return torch.stack(found).view_as(query)


def tensors(
    num_own: int, rows: Tensor, heads: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Query [N, Q, 16], keys and values [1 + J, T, K, 16], and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(rows), heads[0])] + [(1 + num_own, T, heads[1])] * 2 + [(len(rows), heads[0])]
    made = [torch.randn(*shape, 16, generator=generator).to(device, dtype) for shape in shapes]
    return [each.requires_grad_() for each in made[:3]] + made[3:]


def branches_of(keys: Tensor, values: Tensor, rows: Tensor) -> BranchCache:
    own = [list(each[1:, rows]) for each in (keys, values)]
    documents = Documents.from_ids(DOCUMENTS[None]).to_device(keys.device)
    return BranchCache(
        keys[:1], values[:1], build_causal_range(documents, rows.to(keys.device)), *own
    )


def with_grads(attend, inputs: list[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    """Output of `attend(query, branches)`, and gradients of query, keys and values."""
    query, keys, values, upstream = inputs
    found = attend(query, branches_of(keys, values, rows))
    return found, *torch.autograd.grad(found, (query, keys, values), upstream)


def fused(query: Tensor, branches: BranchCache) -> Tensor:
    found = branch_attention(query, branches)
    assert type(found.grad_fn).__name__ in (
        "ChunkedBranchAttentionBackward",
        "FlashBranchAttentionBackward",
    )
    return found


def test_a_row_sees_its_document_up_to_its_own_token() -> None:
    seen = build_causal_range(Documents.from_ids(torch.tensor([[0, 0, 1, 1]])), torch.arange(4))
    rows = seen.build_mask(4)
    assert rows.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_chunks_of_rows_span_only_what_they_see(monkeypatch) -> None:
    monkeypatch.setattr("heads.layers.branch_attention.ROWS_PER_CHUNK", 2)
    keys, values = torch.zeros(2, 1, T, 1, 8)
    branches = BranchCache(
        keys, values, build_causal_range(Documents.from_ids(DOCUMENTS[None]), SOME)
    )
    spans = branches.row_ranges
    found = [(s.rows.start, s.rows.stop, s.tokens.start, s.tokens.stop) for s in spans]
    assert found == [(0, 2, 0, 3), (2, 4, 4, 8), (4, 5, 9, 10)]
    inf = float("inf")
    assert spans[0].build_bias(keys.dtype).tolist() == [[0, 0, -inf], [0, 0, 0]]
    assert spans[1].build_bias(keys.dtype).tolist() == [[0, 0, -inf, -inf], [0, 0, 0, 0]]


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("rows", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("chunk", [3, ROWS_PER_CHUNK])
def test_the_plain_path_is_the_definition(
    num_own: int, rows: Tensor, chunk: int, monkeypatch
) -> None:
    monkeypatch.setattr("heads.layers.branch_attention.ROWS_PER_CHUNK", chunk)
    inputs = tensors(num_own, rows, (4, 2), torch.float64)
    found = with_grads(branch_attention, inputs, rows)
    assert type(found[0].grad_fn).__name__ not in (
        "ChunkedBranchAttentionBackward",
        "FlashBranchAttentionBackward",
    )
    query, keys, values, upstream = inputs
    expected = literal(query, keys, values, rows)
    grads = torch.autograd.grad(expected, (query, keys, values), upstream)
    for mine, theirs in zip(found, (expected, *grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("sunk", [False, True])
def test_windows_and_sinks_are_the_definition(num_own: int, window: int | None, sunk: bool) -> None:
    """A window goes on over the row's own drafts, and so leaves the text behind."""
    query, keys, values, upstream = tensors(num_own, ALL, (4, 2), torch.float64)
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if sunk else None
    inputs = [query, keys, values, *([sinks] if sunk else [])]
    found = branch_attention(query, branches_of(keys, values, ALL), window, sinks)
    expected = literal(query, keys, values, ALL, window or 0, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_own", "heads", "rows", "whole"), PAIRS)
def test_the_fused_path_equals_the_plain_one(
    num_own: int, heads: tuple[int, int], rows: Tensor, whole: int, monkeypatch
) -> None:
    chunk = ROWS_PER_CHUNK if whole else 3
    monkeypatch.setattr("heads.layers.branch_attention.ROWS_PER_CHUNK", chunk)
    inputs = tensors(num_own, rows, heads, torch.float32)
    expected = with_grads(plain_branch_attention, inputs, rows)
    for mine, theirs in zip(with_grads(fused, inputs, rows), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def scores_of(query: Tensor, keys: Tensor, documents: Documents) -> Tensor:
    """[Q, S, S] of a query for every token, -inf where it may not look."""
    seen = build_causal_range(documents, torch.arange(len(query))).build_mask(len(keys))
    groups = query.shape[1] // keys.shape[1]
    scores = torch.einsum("tqd,sqd->qts", query, keys.repeat_interleave(groups, 1))
    return (scores * query.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))


def flash(query: Tensor, keys: Tensor, values: Tensor, documents: Documents) -> tuple:
    """The result of the kernel for documents, in any dtype and without the kernel."""
    scores = scores_of(query, keys, documents)
    groups = query.shape[1] // keys.shape[1]
    wide = values.repeat_interleave(groups, 1)
    return torch.einsum("qts,sqd->tqd", scores.softmax(-1), wide), scores.logsumexp(-1)


def flash_backward(grad: Tensor, text: tuple, found: tuple, documents: Documents) -> tuple:
    """P = exp(S - L) and dS = P (dO v - sum(dO O)), of the O and L that it is given."""
    query, keys, values = text
    groups, scale = query.shape[1] // keys.shape[1], query.shape[-1] ** -0.5
    k, v = (each.repeat_interleave(groups, 1) for each in (keys, values))
    weights = (scores_of(query, keys, documents) - found[1].unsqueeze(-1)).exp()
    inner = torch.einsum("tqd,sqd->qts", grad, v) - (grad * found[0]).sum(-1).T.unsqueeze(-1)
    d_scores = weights * inner * scale
    d_keys = torch.einsum("qts,tqd->sqd", d_scores, query)
    d_values = torch.einsum("qts,tqd->sqd", weights, grad)
    of_groups = (each.unflatten(1, (-1, groups)).sum(2) for each in (d_keys, d_values))
    return torch.einsum("qts,sqd->tqd", d_scores, k), *of_groups


@pytest.mark.parametrize(("num_own", "heads", "rows", "whole"), PAIRS)
def test_one_call_for_all_documents_equals_the_plain_path(
    num_own: int, heads: tuple[int, int], rows: Tensor, whole: int, monkeypatch
) -> None:
    joined_bytes = 2**20 if whole else 1
    monkeypatch.setattr("heads.layers.branch_attention.can_use_flash", lambda _: True)
    monkeypatch.setattr("heads.layers.branch_attention.flash_attention", flash)
    monkeypatch.setattr("heads.layers.branch_attention.flash_attention_backward", flash_backward)
    monkeypatch.setattr("heads.layers.branch_attention.OWN_BYTES", joined_bytes)
    inputs = tensors(num_own, rows, heads, torch.float32)
    expected = with_grads(plain_branch_attention, inputs, rows)
    found = with_grads(branch_attention, inputs, rows)
    assert type(found[0].grad_fn).__name__ == "FlashBranchAttentionBackward"
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float64(dtype: torch.dtype) -> None:
    inputs = tensors(3, ALL, (4, 2), dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, expected = with_grads(fused, inputs, ALL), with_grads(plain_branch_attention, exact, ALL)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-2, atol=2e-2)


def test_own_drafts_are_joined_in_float32_under_autocast_too() -> None:
    inputs = tensors(3, ALL, (4, 2), torch.bfloat16)
    expected = with_grads(fused, inputs, ALL)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_grads(fused, inputs, ALL)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("by_flash", [False, True])
def test_what_a_step_leaves_is_freed_with_it(by_flash: bool, monkeypatch) -> None:
    """A step's keys are made of the output before; whoever keeps both keeps them for ever."""
    monkeypatch.setattr("heads.layers.branch_attention.can_use_flash", lambda _: by_flash)
    monkeypatch.setattr("heads.layers.branch_attention.flash_attention", flash)
    query, keys, values, _ = tensors(0, ALL, (2, 2), torch.float32)
    branches = branches_of(keys, values, ALL)
    for _ in range(2):
        output = branch_attention(query, branches)
        branches.draft_keys.append(output)
        branches.draft_values.append(output)
    freed = weakref.ref(branches)
    del branches, output
    gc.collect()
    assert freed() is None


def test_several_texts_have_gradients_too() -> None:
    query, keys, values, upstream = tensors(1, ALL, (4, 2), torch.float32)
    seen = build_causal_range(Documents.from_ids(DOCUMENTS[None]), ALL)
    both = CausalRange(torch.cat([seen.first, seen.first]), torch.cat([seen.end, seen.end]))
    found = branch_attention(torch.cat([query, query]), BranchCache(keys, values, both))
    grads = torch.autograd.grad(found, (query, keys, values), torch.cat([upstream, upstream]))
    alone = [
        branch_attention(query, BranchCache(keys[i : i + 1], values[i : i + 1], seen))
        for i in range(2)
    ]
    expected = torch.autograd.grad(alone, (query, keys, values), [upstream, upstream])
    for mine, theirs in zip((found, *grads), (torch.cat(alone), *expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_selected_branches_take_their_drafts_along() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8)
    allowed = build_causal_range(Documents.from_lengths([4], torch.device("cpu")), torch.arange(4))
    branches = BranchCache(keys[:1], values[:1], allowed, [keys[1]], [values[1]])
    query, rows = torch.randn(4, 2, 8), torch.tensor([2, 0, 2])
    whole = branch_attention(query, branches)
    torch.testing.assert_close(
        branch_attention(query[rows], branches.select_rows(rows)), whole[rows]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("chunk", [3, ROWS_PER_CHUNK])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
def test_attention_on_cuda_equals_that_of_float64(
    num_own: int, heads: tuple[int, int], chunk: int, dtype, tolerance: float, monkeypatch
) -> None:
    """Numbers of 16 bits take the fused path; CUDA has no fused kernel for float32."""
    monkeypatch.setattr("heads.layers.branch_attention.ROWS_PER_CHUNK", chunk)
    attend = branch_attention if dtype is torch.float32 else fused
    for rows in (ALL, SOME):
        inputs = tensors(num_own, rows, heads, dtype, "cuda")
        exact = [each.detach().double().requires_grad_() for each in inputs]
        expected = with_grads(plain_branch_attention, exact, rows)
        for mine, theirs in zip(with_grads(attend, inputs, rows), expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
