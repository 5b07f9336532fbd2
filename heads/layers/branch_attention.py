"""Attention of rows that draft in parallel.

Every use of an EAGLE layer has the same form. The text was read with true hidden states, which give
keys and values for its S tokens. From some of its tokens, N rows draft on: a row sees the text up
to its own token, and its own draft tokens, never another row. This covers the training-time test of
EAGLE-3 (causal block plus diagonals), the alignment of HASS, a chain in decoding (N = 1) and a
level of a dynamic tree (a row is a path). J steps cost J times N more scores, not a mask of [N, J *
N].

Training computes scores only inside a fused kernel: one call for all documents on CUDA, one per
chunk of rows on a CPU. For the text, a kernel returns output o and the logsumexp l of its scores.
These are joined with the few scores s_j of the row's own draft tokens into one distribution:

    L = logsumexp(l, s_1, ..., s_J)    O = o exp(l - L) + sum_j v_j exp(s_j - L)

The kernel's backward pass needs no more: from recomputed scores S it takes P = exp(S - L) and dS =
P (dO v - sum(dO O)). With the joined O and L it therefore returns exactly the text's share of the
gradients; the drafts' share follows from the same formula.

Letters: T texts, S tokens of a text, N rows, n rows of a chunk, s tokens of a range, J earlier
draft tokens of a row, Q heads, K key-value heads, G = Q / K heads of a group, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from heads.layers.block_attention import attend, attend_backward
from heads.layers.documents import (
    Documents,
    can_use_flash,
    flash_attention,
    flash_attention_backward,
)

OWN_BYTES = 64 * 2**20
"""Largest float32 bytes of the drafts' keys and values, for rows joined at a time."""
ROWS_PER_CHUNK = 256


class CausalRange(NamedTuple):
    """Stretches of the texts: each row sees one stretch of its text.

    Attributes:
        first: [N] int64, first token seen.
        end: [N] int64, one after the last token seen; above `first`.
        anchors: [N] int64, token from which each row drafts; None unless rows see their documents
            up to that token.
        documents: documents of the text; None without `anchors`.
    """

    first: Tensor
    end: Tensor
    anchors: Tensor | None = None
    documents: Documents | None = None

    @classmethod
    def from_ends(cls, end: Tensor) -> "CausalRange":
        """Let each row see everything before token `end` [N] int64."""
        return cls(torch.zeros_like(end), end)

    def build_mask(self, num_tokens: int) -> Tensor:
        """Build a mask [N, S] bool of the tokens that a row sees."""
        places = torch.arange(num_tokens, device=self.end.device)
        return (places >= self.first.unsqueeze(1)) & (places < self.end.unsqueeze(1))


def build_causal_range(documents: Documents, rows: Tensor) -> CausalRange:
    """Let a row see the tokens of its document up to its own, included.

    Args:
        documents: documents of a packed text.
        rows: [N] int64, token from which a row drafts.
    """
    bounds = documents.cu_seqlens.long()
    first = bounds[torch.searchsorted(bounds, rows, right=True) - 1]
    return CausalRange(first, rows + 1, rows, documents)


class BranchRange(NamedTuple):
    """Chunk of rows, with the stretch of the text that they see.

    Attributes:
        rows: the n rows.
        tokens: the s tokens, from the first to the last that any of the rows sees.
        seen: stretch that each row sees.
    """

    rows: slice
    tokens: slice
    seen: CausalRange

    def build_bias(self, dtype: torch.dtype) -> Tensor:
        """Build a bias [n, s] on the CPU: 0 for tokens that a row sees, -inf elsewhere."""
        first, end = (each.unsqueeze(1) for each in self.seen[:2])
        places = torch.arange(self.tokens.start, self.tokens.stop)
        hidden = (places < first) | (places >= end)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


@dataclass
class BranchCache:
    """Keys and values that N rows see: a text, and the draft tokens of each row.

    Each text has N / T rows; rows are ordered by text.

    Attributes:
        keys: [T, S, K, d] of the texts.
        values: [T, S, K, d] of the texts.
        context_range: stretch of the text that each row sees.
        draft_keys: J tensors [N, K, d] of the rows' draft tokens so far.
        draft_values: J tensors [N, K, d] of these tokens.
    """

    keys: Tensor
    values: Tensor
    context_range: CausalRange
    draft_keys: list[Tensor] = field(default_factory=list)
    draft_values: list[Tensor] = field(default_factory=list)

    def select_rows(self, rows: Tensor) -> "BranchCache":
        """Select the branches of rows [M] int64, equally many per text and in order."""
        seen = CausalRange(self.context_range.first[rows], self.context_range.end[rows])
        own = [[each[rows] for each in drafts] for drafts in (self.draft_keys, self.draft_values)]
        return BranchCache(self.keys, self.values, seen, *own)

    @cached_property
    def row_ranges(self) -> list[BranchRange]:
        """Return all rows in chunks, computed once for every step.

        Only on a CPU, as numbers of the device are read.

        Rows in text order see little of the text together. This saves half of the work in one
        causal text, and most of it with packed documents.
        """
        ranges, start = [], 0
        chunks = zip(*(each.split(ROWS_PER_CHUNK) for each in self.context_range[:2]), strict=True)
        for first, end in chunks:
            rows = slice(start, start + len(first))
            tokens = slice(int(first.min()), int(end.max()))
            ranges.append(BranchRange(rows, tokens, CausalRange(first, end)))
            start = rows.stop
        return ranges


def branch_attention(
    query: Tensor, branches: BranchCache, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attend from each row to its text and its own draft tokens, with one softmax over both.

    With gradients and over one text, it uses a fused kernel if the kernel supports the dtype and
    head size. Decoding (few rows, no gradients), windows and sinks use `plain_branch_attention`.

    Args:
        query: [N, Q, d], rotated.
        branches: branches with rotated keys, in the dtype of `query`.
        window: tokens that a row sees, its own included; None for all before it.
        sinks: [Q] score per head of a key without value; None for no such key.

    Returns:
        [N, Q, d].
    """
    plain = window is None and sinks is None
    if plain and torch.is_grad_enabled() and len(branches.keys) == 1:
        # Not `[0]`, whose gradient fills a tensor of zeros.
        text = (branches.keys.squeeze(0), branches.values.squeeze(0))
        own = (*branches.draft_keys, *branches.draft_values)
        if can_use_flash(query) and branches.context_range.documents is not None:
            return FlashBranchAttention.apply(query, *text, branches.context_range, *own)
        if query.device.type == "cpu" and query.dtype is not torch.float64:
            return ChunkedBranchAttention.apply(query, *text, branches.row_ranges, *own)
    return plain_branch_attention(query, branches, window, sinks)


def plain_branch_attention(
    query: Tensor, branches: BranchCache, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute `branch_attention` by its definition, for any dtype, device and number of texts.

    Keeps the scores of 256 rows of one text at a time, in the backward pass too, so memory beyond
    the inputs does not grow with N * S.
    """
    chunks = []
    num_texts, num_tokens = branches.keys.shape[:2]
    (first, end, *_), drafts = branches.context_range, (branches.draft_keys, branches.draft_values)
    if window is not None:
        first = torch.maximum(first, end + len(branches.draft_keys) - window)
        drafts = (branches.draft_keys[-window:], branches.draft_values[-window:])
    rows_per_chunk = ROWS_PER_CHUNK if num_texts == 1 else len(query)
    for start in range(0, len(query), rows_per_chunk):
        here = slice(start, start + rows_per_chunk)
        allowed = CausalRange(first[here], end[here]).build_mask(num_tokens)
        inputs = (query[here], branches.keys, branches.values, allowed, sinks)
        own = [each[here] for each in (*drafts[0], *drafts[1])]
        if torch.is_grad_enabled():
            chunks.append(
                checkpoint(_attend, *inputs, *own, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            chunks.append(_attend(*inputs, *own))
    return torch.cat(chunks)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, sinks: Tensor | None, *own: Tensor
) -> Tensor:
    """Attend by plain products; `own` has J keys, then J values, each [N, K, d]."""
    num_rows, num_heads, size = query.shape
    num_texts, num_tokens, num_kv_heads, _ = keys.shape
    grouped = query.view(num_rows, num_kv_heads, -1, size) * size**-0.5
    # [T, K, N / T * Q / K, S]: one matrix product per text and key-value head
    flat = grouped.view(num_texts, -1, *grouped.shape[1:]).transpose(1, 2).flatten(2, 3)
    scores = _arrange_by_row(flat @ keys.permute(0, 2, 3, 1), num_rows)
    scores = scores.masked_fill(~allowed[:, None, None], float("-inf"))
    num_own = len(own) // 2
    if num_own:
        own_keys, own_values = torch.stack(own[:num_own], 2), torch.stack(own[num_own:], 2)
        scores = torch.cat([scores, grouped @ own_keys.transpose(2, 3)], dim=-1)
    if sinks is not None:
        sunk = sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1).expand(num_rows, -1, -1, 1)
        scores = torch.cat([scores, sunk], dim=-1)
    at_least_float32 = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(at_least_float32).softmax(-1).to(values.dtype)
    text, drafts, _ = weights.tensor_split([num_tokens, num_tokens + num_own], dim=-1)
    text = text.reshape(num_texts, -1, *text.shape[1:]).transpose(1, 2).flatten(2, 3)
    output = _arrange_by_row(text @ values.transpose(1, 2), num_rows)
    if num_own:
        output = output + drafts @ own_values
    return output.reshape(num_rows, num_heads, size)


def _arrange_by_row(products: Tensor, num_rows: int) -> Tensor:
    """Arrange products [T, K, N / T * Q / K, .] by row: [N, K, Q / K, .]."""
    num_texts, num_kv_heads, _, width = products.shape
    split = products.view(num_texts, num_kv_heads, num_rows // num_texts, -1, width)
    return split.transpose(1, 2).flatten(0, 1)


class FlashBranchAttention(torch.autograd.Function):
    """Attention over documents and own draft tokens on CUDA, as derived in the module docstring.

    The kernel needs a query for every text token. Tokens that do not draft get zeros, whose outputs
    are not used.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, seen: CausalRange, *own: Tensor
    ) -> Tensor:
        """Attend from query [N, Q, d] to text [S, K, d] and J own keys, then values, [N, K, d]."""
        rows, documents = seen.anchors, seen.documents
        assert rows is not None
        assert documents is not None
        every = _scatter_rows(query, rows, len(keys))
        all_outputs, log_norm = flash_attention(every, keys, values, documents)
        output, log_norm = all_outputs.index_select(0, rows), log_norm.index_select(1, rows)
        log_norm = log_norm.T.contiguous()
        for part in _split_rows(keys, own):
            heads, texts = (_group_queries(each[part], keys) for each in (query, output))
            norms = _group_queries(log_norm[part].unsqueeze(-1), keys)
            joined = _merge_attention(heads, texts, norms, _stack_own(part, own))
            output[part] = joined.flatten(1, 2)
        ctx.save_for_backward(query, keys, values, output, log_norm, *own)
        ctx.seen = seen
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs of `forward`."""
        query, keys, values, output, log_norm, *own = ctx.saved_tensors
        rows, size = ctx.seen.anchors, len(keys)
        grad = grad.contiguous()
        every, outputs, grads = (_scatter_rows(each, rows, size) for each in (query, output, grad))
        # Without a query, scores, output and gradient are 0, and everything after them.
        norms = _scatter_rows(log_norm, rows, size).T
        text = (every, keys, values)
        d_every, *d_text = flash_attention_backward(
            grads, text, (outputs, norms), ctx.seen.documents
        )
        d_query = d_every.index_select(0, rows)
        d_own = keys.new_empty(2, len(own) // 2, len(query), *keys.shape[1:])
        for part in _split_rows(keys, own):
            heads = [_group_queries(each[part], keys) for each in (query, output, grad)]
            norm = _group_queries(log_norm[part].unsqueeze(-1), keys)
            more = _backward_own(heads, norm, _stack_own(part, own), d_own[:, :, part])
            d_query[part].add_(more.flatten(1, 2))
        return d_query, *d_text, None, *d_own.flatten(0, 1)


def _scatter_rows(states: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    """Scatter states [N, ...] to rows [N] of [S, ...], with 0 elsewhere."""
    return states.new_zeros(num_tokens, *states.shape[1:]).index_copy_(0, rows, states)


def _split_rows(keys: Tensor, own: Sequence[Tensor]) -> list[slice]:
    """Split rows with draft tokens into slices whose keys and values fit in `OWN_BYTES`."""
    if not own:
        return []
    size = max(1, OWN_BYTES // (4 * len(own) * keys[0].numel()))
    edges = [*range(0, len(own[0]), size), len(own[0])]
    return [slice(*each) for each in pairwise(edges)]


class ChunkedBranchAttention(torch.autograd.Function):
    """Attention over one text and own draft tokens on a CPU, as derived in the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        ranges: list[BranchRange],
        *own: Tensor,
    ) -> Tensor:
        """Attend from query [N, Q, d] to text [S, K, d] and J own keys, then values, [N, K, d]."""
        output, all_norms = torch.empty_like(query), []
        for row_range in ranges:
            rows, tokens, _ = row_range
            heads = _group_queries(query[rows], keys)
            text = _arrange_heads(heads, keys[tokens], values[tokens])
            chunk_output, norms = attend(*text, row_range.build_bias(keys.dtype))
            chunk_output = chunk_output.permute(2, 1, 0, 3)
            if own:
                chunk_output = _merge_attention(
                    heads, chunk_output, _view_norms(norms), _stack_own(rows, own)
                )
            output[rows] = chunk_output.flatten(1, 2)
            all_norms.append(norms)
        ctx.save_for_backward(query, keys, values, output, *own)
        # Not the branches, which will refer to this result and would form a cycle.
        ctx.ranges, ctx.all_norms = ranges, all_norms
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs of `forward`."""
        query, keys, values, output, *own = ctx.saved_tensors
        grad, d_query = grad.contiguous(), torch.empty_like(query)
        d_own = keys.new_empty(2, len(own) // 2, len(query), *keys.shape[1:])
        # A token's gradient is summed over many chunks, so in float32.
        d_text = [torch.zeros_like(each, dtype=torch.float32) for each in (keys, values)]
        for row_range, norms in zip(ctx.ranges, ctx.all_norms, strict=True):
            rows, tokens, _ = row_range
            heads = [_group_queries(each[rows], keys) for each in (query, output, grad)]
            text = _arrange_heads(heads[0], keys[tokens], values[tokens])
            joined, d_joined = (each.permute(2, 1, 0, 3) for each in heads[1:])
            bias = row_range.build_bias(keys.dtype)
            # The logsumexp of `forward` has been overwritten by the joined one.
            d_chunk, *parts = attend_backward(d_joined, text, bias, joined, norms)
            d_chunk = d_chunk.permute(2, 1, 0, 3)
            for whole, part in zip(d_text, parts, strict=True):
                whole[tokens] += part.sum(0, dtype=torch.float32).transpose(0, 1)
            if own:
                norm, own_here = _view_norms(norms), _stack_own(rows, own)
                d_chunk = d_chunk + _backward_own(heads, norm, own_here, d_own[:, :, rows])
            d_query[rows] = d_chunk.flatten(1, 2)
        d_keys, d_values = (each.to(keys.dtype) for each in d_text)
        return d_query, d_keys, d_values, None, *d_own.flatten(0, 1)


def _arrange_heads(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View [n, K, G, d] and [s, K, d] as G times K heads, so that a group shares keys in place."""
    heads = query.permute(2, 1, 0, 3)
    keys, values = (e.transpose(0, 1).expand(len(heads), -1, -1, -1) for e in (keys, values))
    return heads, keys, values


def _view_norms(norms: Tensor) -> Tensor:
    """View the kernel's logsumexp [G, K, n] as [n, K, G, 1]."""
    return norms.permute(2, 1, 0).unsqueeze(-1)


def _group_queries(states: Tensor, keys: Tensor) -> Tensor:
    """Group the heads of queries [n, Q, d] that share keys: [n, K, G, d]."""
    return states.unflatten(1, (keys.shape[1], -1))


def _stack_own(rows: slice, own: Sequence[Tensor]) -> Tensor:
    """Stack own keys and values of a slice of rows: [2, n, K, J, d] float32."""
    stacked = torch.stack([each[rows] for each in own]).float()
    return stacked.unflatten(0, (2, -1)).movedim(1, 3)


def _merge_attention(query: Tensor, output: Tensor, log_norm: Tensor, own: Tensor) -> Tensor:
    """Merge attention over the text with that over draft tokens: [n, K, G, d] float32.

    Args:
        query: [n, K, G, d].
        output: [n, K, G, d] over the text alone.
        log_norm: [n, K, G, 1] float32 logsumexp of the text's scores; overwritten by that of all.
        own: [2, n, K, J, d].
    """
    own_keys, own_values = own
    with torch.autocast(query.device.type, enabled=False):
        scores = query.float() @ own_keys.mT * query.shape[-1] ** -0.5
        joined = torch.cat([log_norm, scores], -1).logsumexp(-1, keepdim=True)
        output = output * (log_norm - joined).exp() + (scores - joined).exp() @ own_values
    log_norm.copy_(joined)
    return output


def _backward_own(rows: Sequence[Tensor], log_norm: Tensor, own: Tensor, d_own: Tensor) -> Tensor:
    """Compute the query's gradient [n, K, G, d] through the drafts; fill `d_own` with theirs.

    Args:
        rows: query, joined output and the gradient of that output, [n, K, G, d].
        log_norm: [n, K, G, 1] of all scores.
        own: [2, n, K, J, d].
        d_own: [2, J, n, K, d].
    """
    (own_keys, own_values), scale = own, own.shape[-1] ** -0.5
    query, output, grad = (each.float() for each in rows)
    with torch.autocast(own.device.type, enabled=False):
        weights = (query @ own_keys.mT * scale - log_norm).exp()
        inner = grad @ own_values.mT - (grad * output).sum(-1, keepdim=True)
        d_scores = weights * inner * scale
        d_own[0] = (d_scores.mT @ query).movedim(2, 0)
        d_own[1] = (weights.mT @ grad).movedim(2, 0)
        return d_scores @ own_keys
