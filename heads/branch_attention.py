"""The attention of rows that draft side by side.

Every use of an EAGLE layer is the same picture. A text was read with true features, which
gives keys and values for all of its S tokens. From some of its tokens, N rows draft on: a row
sees the text up to its own token, and what it drafted itself. That is the training-time test
of EAGLE-3 (causal block plus diagonals), the alignment of HASS, a chain while decoding (N = 1)
and a level of a dynamic tree (a row is a path). No row ever sees another, so J steps cost J
times N scores more, not a mask of [N, J * N].

In training the scores over the text, which are nearly all, never leave a fused kernel. What
the kernel gives, an output o and the logsumexp l of its scores, is joined with the few scores
s_j of the row's own drafts to the one distribution over both:

    L = logsumexp(l, s_1, ..., s_J)    O = o exp(l - L) + sum_j v_j exp(s_j - L)

The kernel's backward pass needs no more than these: from scores S that it computes anew it
takes P = exp(S - L) and dS = P (dO v - sum(dO O)). Given the joined O and L it therefore
returns exactly the text's share of the gradients, and the drafts' share is the same formula.

Letters: T texts, S tokens of a text, N rows, n rows of a chunk, s tokens of a span, J earlier
drafts of a row, Q heads, K key-value heads, G = Q / K heads of a group, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_efficient_attention
from torch.utils.checkpoint import checkpoint

ROWS_PER_CHUNK = 256


class Span(NamedTuple):
    """A chunk of rows and the stretch of the text that they look at.

    Attributes:
        rows: n of them.
        tokens: s of them, from the first to the last that any of the rows may look at.
        bias: [n, s], 0 where a row may look and -inf elsewhere, in the dtype of the keys.
    """

    rows: slice
    tokens: slice
    bias: Tensor


@dataclass
class Branches:
    """What N rows look at: a text, and the drafts of each row.

    Each text has N / T rows, one text's after another's.

    Attributes:
        keys, values: [T, S, K, d], of the texts.
        allowed: [N, S] bool, the tokens of its text that a row may look at; at least one.
        own_keys, own_values: J tensors [N, K, d], of the row's drafts so far.
    """

    keys: Tensor
    values: Tensor
    allowed: Tensor
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    def select(self, rows: Tensor) -> "Branches":
        """The branches of other rows: [M] int64 indices, equally many of each text in order."""
        return Branches(
            self.keys,
            self.values,
            self.allowed[rows],
            [keys[rows] for keys in self.own_keys],
            [values[rows] for values in self.own_values],
        )

    @cached_property
    def spans(self) -> list[Span]:
        """All rows in chunks, made once for every step; this waits for the device.

        Rows in the order of the text see little of it together: half of the work falls away in
        one causal text, most of it where documents are packed.
        """
        chunks = self.allowed.split(ROWS_PER_CHUNK)
        seen = torch.stack([chunk.any(0) for chunk in chunks])
        places = torch.arange(seen.shape[1], device=seen.device)
        first = torch.where(seen, places, seen.shape[1]).amin(1)
        last = torch.where(seen, places, -1).amax(1)
        stretches = [slice(*ends) for ends in torch.stack([first, last + 1], 1).tolist()]
        found, start = [], 0
        for chunk, tokens in zip(chunks, stretches, strict=True):
            rows = slice(start, start + len(chunk))
            found.append(Span(rows, tokens, _bias(chunk[:, tokens], self.keys.dtype)))
            start = rows.stop
        return found


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, s] of [n, s] bool, rows a multiple of 8 apart as the CUDA kernel wants them."""
    num_rows, num_tokens = allowed.shape
    shape = (num_rows, num_tokens + -num_tokens % 8)
    bias = torch.full(shape, float("-inf"), dtype=dtype, device=allowed.device)[:, :num_tokens]
    return bias.masked_fill_(allowed, 0.0)


def causal_rows(document_ids: Tensor, rows: Tensor) -> Tensor:
    """[N, S] bool: a row sees the tokens of its document up to its own, so always that one.

    Args:
        document_ids: [S] int64 of a packed text.
        rows: [N] int64, the token that a row drafts from.
    """
    places = torch.arange(len(document_ids), device=rows.device)
    same = document_ids[rows].unsqueeze(1) == document_ids.unsqueeze(0)
    return same & (places.unsqueeze(0) <= rows.unsqueeze(1))


def branch_attention(query: Tensor, branches: Branches) -> Tensor:
    """Softmax attention of each row over its text and its own drafts, in one distribution.

    With gradients and over one text it is fused, where a kernel takes the dtype and head size;
    decoding, with few rows and no gradients, goes by `plain_attention`.

    Args:
        query: [N, Q, d], rotated.
        branches: keys rotated; everything in the dtype of `query`.

    Returns:
        [N, Q, d].
    """
    if torch.is_grad_enabled() and _fits_kernel(query, branches):
        own = (*branches.own_keys, *branches.own_values)
        return _Fused.apply(query, branches.keys[0], branches.values[0], branches.spans, *own)
    return plain_attention(query, branches)


def _fits_kernel(query: Tensor, branches: Branches) -> bool:
    if len(branches.keys) > 1 or query.dtype is torch.float64:
        return False
    if query.is_cuda:
        heads = query.transpose(0, 1).unsqueeze(0)
        return can_use_efficient_attention(SDPAParams(heads, heads, heads, None, 0.0, False, False))
    return query.device.type == "cpu"


class _Fused(torch.autograd.Function):
    """Attention over one text and own drafts, as derived at the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, spans: list[Span], *own: Tensor
    ) -> Tensor:
        """[N, Q, d] of query [N, Q, d], text [S, K, d] and J own keys, then values, [N, K, d]."""
        output, kept = torch.empty_like(query), []
        for rows, tokens, bias in spans:
            heads = _grouped(query[rows], keys)
            found, *of_kernel = _text_forward(heads, (keys[tokens], values[tokens], bias))
            log_norm = _log_norm(of_kernel, found)
            output[rows] = _join(heads, found, log_norm, _own_of(rows, own, keys)).flatten(1, 2)
            kept.append(of_kernel)
        ctx.save_for_backward(query, keys, values, output, *own)
        ctx.spans, ctx.kept = spans, kept
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what `forward` got."""
        query, keys, values, output, *own = ctx.saved_tensors
        grad, d_query = grad.contiguous(), torch.empty_like(query)
        d_own = [torch.empty_like(each) for each in own]
        # A token's gradient comes in parts from many chunks: summed in float32.
        d_text = [torch.zeros_like(each, dtype=torch.float32) for each in (keys, values)]
        for (rows, tokens, bias), of_kernel in zip(ctx.spans, ctx.kept, strict=True):
            heads = [_grouped(each[rows], keys) for each in (query, output, grad)]
            text = (keys[tokens], values[tokens], bias)
            found, *parts = _text_backward(heads, text, of_kernel)
            for whole, part in zip(d_text, parts, strict=True):
                whole[tokens] += part
            log_norm = _log_norm(of_kernel, found)
            more, *parts = _own_backward(heads, log_norm, _own_of(rows, own, keys))
            d_query[rows] = (found + more).flatten(1, 2)
            for whole, part in zip(d_own, parts, strict=True):
                whole[rows] = part
        return d_query, d_text[0].to(keys.dtype), d_text[1].to(values.dtype), None, *d_own


def _grouped(states: Tensor, keys: Tensor) -> Tensor:
    """[n, K, G, d] of [n, Q, d]."""
    return states.unflatten(1, (keys.shape[1], -1))


def _own_of(rows: slice, own: Sequence[Tensor], keys: Tensor) -> Tensor:
    """[2, n, K, J, d] float32 own keys and values of some rows."""
    shape = (2, len(own) // 2, rows.stop - rows.start, *keys.shape[1:])
    found = torch.empty(shape, dtype=torch.float32, device=keys.device)
    for place, each in zip(found.flatten(0, 1), own, strict=True):
        place.copy_(each[rows])
    return found.movedim(1, 3)


def _join(query: Tensor, found: Tensor, log_norm: Tensor, own: Tensor) -> Tensor:
    """[n, K, G, d] float32: attention over text and drafts.

    Args:
        query: [n, K, G, d].
        found: [n, K, G, d] over the text alone.
        log_norm: [n, K, G, 1] float32, of the text's scores; then of all scores.
        own: [2, n, K, J, d].
    """
    own_keys, own_values = own
    with torch.autocast(query.device.type, enabled=False):
        scores = query.float() @ own_keys.mT * query.shape[-1] ** -0.5
        joined = torch.cat([log_norm, scores], -1).logsumexp(-1, keepdim=True)
        found = found * (log_norm - joined).exp() + (scores - joined).exp() @ own_values
    log_norm.copy_(joined)
    return found


def _own_backward(rows: Sequence[Tensor], log_norm: Tensor, own: Tensor) -> tuple[Tensor, ...]:
    """The drafts' part of the query's gradient [n, K, G, d], then J keys', then J values'.

    Args:
        rows: query, joined output and its gradient, [n, K, G, d].
        log_norm: [n, K, G, 1] of all scores.
        own: [2, n, K, J, d].
    """
    (own_keys, own_values), scale = own, own.shape[-1] ** -0.5
    query, output, grad = (each.float() for each in rows)
    with torch.autocast(own.device.type, enabled=False):
        weights = (query @ own_keys.mT * scale - log_norm).exp()
        inner = grad @ own_values.mT - (grad * output).sum(-1, keepdim=True)
        d_scores = weights * inner * scale
        d_keys, d_values = d_scores.mT @ query, weights.mT @ grad
        return d_scores @ own_keys, *d_keys.unbind(2), *d_values.unbind(2)


def _log_norm(of_kernel: Sequence[Tensor], found: Tensor) -> Tensor:
    """[n, K, G, 1] float32 view of the kernel's logsumexp, whose rows are padded on CUDA."""
    return of_kernel[0][..., : len(found)].permute(2, 1, 0).unsqueeze(-1)


def _text_forward(query: Tensor, text: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The kernel's output [n, K, G, d], then its logsumexp and what else its backward reads.

    Args:
        query: [n, K, G, d].
        text: keys and values [s, K, d], bias [n, s].
    """
    *heads, bias = _kernel_layout(query, *text)
    if query.is_cuda:
        found, *rest = torch.ops.aten._scaled_dot_product_efficient_attention(*heads, bias, True)
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found, *rest = kernel(*heads, attn_mask=bias)
    return found.permute(2, 1, 0, 3), *rest


def _text_backward(
    rows: Sequence[Tensor], text: Sequence[Tensor], of_kernel: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of query [n, K, G, d], and of keys and values [s, K, d] in float32.

    Args:
        rows: query, joined output and its gradient, [n, K, G, d].
        text: keys and values [s, K, d], bias [n, s].
        of_kernel: what forward gave, with the joined logsumexp in it.
    """
    *heads, bias = _kernel_layout(rows[0], *text)
    output, grad = (each.permute(2, 1, 0, 3) for each in rows[1:])
    if grad.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        found = kernel(grad, *heads, bias, output, *of_kernel, 0.0, [True, True, True, False])
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(grad, *heads, output, *of_kernel, 0.0, False, attn_mask=bias)
    d_text = (each.sum(0, dtype=torch.float32).transpose(0, 1) for each in found[1:3])
    return found[0].permute(2, 1, 0, 3), *d_text


def _kernel_layout(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Views of a batch of G and K heads, so that keys are shared in a group without a copy."""
    heads = query.permute(2, 1, 0, 3)
    text = (each.transpose(0, 1).expand(len(heads), -1, -1, -1) for each in (keys, values))
    return heads, *text, bias.expand(*heads.shape[:2], -1, -1)


def plain_attention(query: Tensor, branches: Branches) -> Tensor:
    """`branch_attention` by its definition, for any dtype, device and number of texts.

    Scores of one text live for 256 rows at a time, in the backward pass too, so memory beyond
    the inputs does not grow with N * S.
    """
    chunks = []
    rows_per_chunk = ROWS_PER_CHUNK if len(branches.keys) == 1 else len(query)
    for start in range(0, len(query), rows_per_chunk):
        here = slice(start, start + rows_per_chunk)
        inputs = (query[here], branches.keys, branches.values, branches.allowed[here])
        own = [own[here] for own in (*branches.own_keys, *branches.own_values)]
        if torch.is_grad_enabled():
            chunks.append(
                checkpoint(_attend, *inputs, *own, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            chunks.append(_attend(*inputs, *own))
    return torch.cat(chunks)


def _attend(query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, *own: Tensor) -> Tensor:
    """`own` holds J keys, then J values, each [N, K, d]."""
    num_rows, num_heads, size = query.shape
    num_texts, num_tokens, num_kv_heads, _ = keys.shape
    grouped = query.view(num_rows, num_kv_heads, -1, size) * size**-0.5
    # [T, K, N / T * Q / K, S]: one matrix product per text and key-value head
    flat = grouped.view(num_texts, -1, *grouped.shape[1:]).transpose(1, 2).flatten(2, 3)
    scores = _by_row(flat @ keys.permute(0, 2, 3, 1), num_rows)
    scores = scores.masked_fill(~allowed[:, None, None], float("-inf"))
    num_own = len(own) // 2
    if num_own:
        own_keys, own_values = torch.stack(own[:num_own], 2), torch.stack(own[num_own:], 2)
        scores = torch.cat([scores, grouped @ own_keys.transpose(2, 3)], dim=-1)
    at_least_float32 = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(at_least_float32).softmax(-1).to(values.dtype)
    text, drafts = weights.split([num_tokens, num_own], dim=-1)
    text = text.reshape(num_texts, -1, *text.shape[1:]).transpose(1, 2).flatten(2, 3)
    found = _by_row(text @ values.transpose(1, 2), num_rows)
    if num_own:
        found = found + drafts @ own_values
    return found.reshape(num_rows, num_heads, size)


def _by_row(products: Tensor, num_rows: int) -> Tensor:
    """[N, K, Q / K, .] of [T, K, N / T * Q / K, .]."""
    num_texts, num_kv_heads, _, width = products.shape
    split = products.view(num_texts, num_kv_heads, num_rows // num_texts, -1, width)
    return split.transpose(1, 2).flatten(0, 1)
