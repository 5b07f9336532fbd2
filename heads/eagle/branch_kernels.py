"""Training attention over a text and own draft tokens, with scores only inside a fused kernel.

One call for all documents on CUDA, one per chunk of rows on a CPU. For the text, a kernel returns
output o and the logsumexp l of its scores. These are joined with the few scores s_j of the row's
own draft tokens into one distribution:

    L = logsumexp(l, s_1, ..., s_J)    O = o exp(l - L) + sum_j v_j exp(s_j - L)

The kernel's backward pass needs no more: from recomputed scores S it takes P = exp(S - L) and dS =
P (dO v - sum(dO O)). With the joined O and L it therefore returns exactly the text's share of the
gradients; the drafts' share follows from the same formula.

Letters: S tokens of a text, N rows, n rows of a chunk, s tokens of a span, J earlier draft tokens
of a row, Q heads, K key-value heads, G = Q / K heads of a group, d head size.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads.eagle.branches import BranchRange, CausalRange
from heads.layers.documents import flash_attention, flash_attention_backward

OWN_BYTES = 64 * 2**20
"""Largest float32 bytes of the drafts' keys and values, for rows joined at a time."""


class FlashBranchAttention(torch.autograd.Function):
    """Attention over documents and own draft tokens on CUDA, as derived in the module docstring.

    The kernel needs a query for every text token. Tokens that do not draft get zeros, whose outputs
    are not used.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, seen: CausalRange, *own: Tensor
    ) -> Tensor:
        """[N, Q, d] of query [N, Q, d], text [S, K, d] and J own keys, then values, [N, K, d]."""
        rows, documents = seen.anchors, seen.documents
        assert rows is not None
        assert documents is not None
        every = _scatter_rows(query, rows, len(keys))
        found, log_norm = flash_attention(every, keys, values, documents)
        output, log_norm = found.index_select(0, rows), log_norm.index_select(1, rows)
        log_norm = log_norm.T.contiguous()
        for part in _joined_rows(keys, own):
            heads, texts = (_group_queries(each[part], keys) for each in (query, output))
            norms = _group_queries(log_norm[part].unsqueeze(-1), keys)
            output[part] = _merge_attention(heads, texts, norms, _own_of(part, own)).flatten(1, 2)
        ctx.save_for_backward(query, keys, values, output, log_norm, *own)
        ctx.seen = seen
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of `forward`."""
        query, keys, values, output, log_norm, *own = ctx.saved_tensors
        rows, size = ctx.seen.anchors, len(keys)
        grad = grad.contiguous()
        every, outputs, grads = (_scatter_rows(each, rows, size) for each in (query, output, grad))
        # Without a query, scores, output and gradient are 0, and everything after them.
        norms = _scatter_rows(log_norm, rows, size).T
        text = (every, keys, values)
        found, *d_text = flash_attention_backward(grads, text, (outputs, norms), ctx.seen.documents)
        d_query = found.index_select(0, rows)
        d_own = keys.new_empty(2, len(own) // 2, len(query), *keys.shape[1:])
        for part in _joined_rows(keys, own):
            heads = [_group_queries(each[part], keys) for each in (query, output, grad)]
            norm = _group_queries(log_norm[part].unsqueeze(-1), keys)
            more = _own_backward(heads, norm, _own_of(part, own), d_own[:, :, part])
            d_query[part].add_(more.flatten(1, 2))
        return d_query, *d_text, None, *d_own.flatten(0, 1)


def _scatter_rows(states: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    """[S, ...] with states [N, ...] at rows [N], and 0 elsewhere."""
    return states.new_zeros(num_tokens, *states.shape[1:]).index_copy_(0, rows, states)


def _joined_rows(keys: Tensor, own: Sequence[Tensor]) -> list[slice]:
    """Rows with draft tokens, in slices whose keys and values fit in `OWN_BYTES`."""
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
        spans: list[BranchRange],
        *own: Tensor,
    ) -> Tensor:
        """[N, Q, d] of query [N, Q, d], text [S, K, d] and J own keys, then values, [N, K, d]."""
        output, kept = torch.empty_like(query), []
        for span in spans:
            rows, tokens, _ = span
            heads = _group_queries(query[rows], keys)
            text = (keys[tokens], values[tokens], span.build_bias(keys.dtype))
            found, norms = _text_forward(heads, text)
            if own:
                found = _merge_attention(heads, found, _by_row_and_head(norms), _own_of(rows, own))
            output[rows] = found.flatten(1, 2)
            kept.append(norms)
        ctx.save_for_backward(query, keys, values, output, *own)
        # Not the branches, which will refer to this result and would form a cycle.
        ctx.spans, ctx.kept = spans, kept
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of `forward`."""
        query, keys, values, output, *own = ctx.saved_tensors
        grad, d_query = grad.contiguous(), torch.empty_like(query)
        d_own = keys.new_empty(2, len(own) // 2, len(query), *keys.shape[1:])
        # A token's gradient is summed over many chunks, so in float32.
        d_text = [torch.zeros_like(each, dtype=torch.float32) for each in (keys, values)]
        for span, norms in zip(ctx.spans, ctx.kept, strict=True):
            rows, tokens, _ = span
            heads = [_group_queries(each[rows], keys) for each in (query, output, grad)]
            text = (keys[tokens], values[tokens], span.build_bias(keys.dtype))
            found, *parts = _text_backward(heads, text, norms)
            for whole, part in zip(d_text, parts, strict=True):
                whole[tokens] += part
            if own:
                norm, own_here = _by_row_and_head(norms), _own_of(rows, own)
                found = found + _own_backward(heads, norm, own_here, d_own[:, :, rows])
            d_query[rows] = found.flatten(1, 2)
        d_keys, d_values = (each.to(keys.dtype) for each in d_text)
        return d_query, d_keys, d_values, None, *d_own.flatten(0, 1)


def _group_queries(states: Tensor, keys: Tensor) -> Tensor:
    """[n, K, G, d] of [n, Q, d]."""
    return states.unflatten(1, (keys.shape[1], -1))


def _own_of(rows: slice, own: Sequence[Tensor]) -> Tensor:
    """[2, n, K, J, d] float32 own keys and values of a slice of rows."""
    found = torch.stack([each[rows] for each in own]).float()
    return found.unflatten(0, (2, -1)).movedim(1, 3)


def _merge_attention(query: Tensor, found: Tensor, log_norm: Tensor, own: Tensor) -> Tensor:
    """[n, K, G, d] float32 attention over text and draft tokens.

    Args:
        query: [n, K, G, d].
        found: [n, K, G, d] over the text alone.
        log_norm: [n, K, G, 1] float32 logsumexp of the text's scores; overwritten by that of all.
        own: [2, n, K, J, d].
    """
    own_keys, own_values = own
    with torch.autocast(query.device.type, enabled=False):
        scores = query.float() @ own_keys.mT * query.shape[-1] ** -0.5
        joined = torch.cat([log_norm, scores], -1).logsumexp(-1, keepdim=True)
        found = found * (log_norm - joined).exp() + (scores - joined).exp() @ own_values
    log_norm.copy_(joined)
    return found


def _own_backward(rows: Sequence[Tensor], log_norm: Tensor, own: Tensor, d_own: Tensor) -> Tensor:
    """Gradient [n, K, G, d] of the query through the drafts, whose own goes into `d_own`.

    Args:
        rows: query, joined output and its gradient, [n, K, G, d].
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


def _by_row_and_head(norms: Tensor) -> Tensor:
    """[n, K, G, 1] view of the kernel's logsumexp [G, K, n]."""
    return norms.permute(2, 1, 0).unsqueeze(-1)


def _text_forward(query: Tensor, text: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The kernel's output [n, K, G, d] and its logsumexp [G, K, n] float32.

    Args:
        query: [n, K, G, d].
        text: keys and values [s, K, d], bias [n, s].
    """
    *heads, bias = _kernel_layout(query, *text)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found, norms = kernel(*heads, attn_mask=bias)
    return found.permute(2, 1, 0, 3), norms


def _text_backward(
    rows: Sequence[Tensor], text: Sequence[Tensor], norms: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query [n, K, G, d], and of keys and values [s, K, d] in float32.

    Args:
        rows: query, joined output and its gradient, [n, K, G, d].
        text: keys and values [s, K, d], bias [n, s].
        norms: logsumexp of `forward`, overwritten by the joined one.
    """
    *heads, bias = _kernel_layout(rows[0], *text)
    output, grad = (each.permute(2, 1, 0, 3) for each in rows[1:])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = kernel(grad, *heads, output, norms, 0.0, False, attn_mask=bias)
    d_text = (each.sum(0, dtype=torch.float32).transpose(0, 1) for each in found[1:3])
    return found[0].permute(2, 1, 0, 3), *d_text


def _kernel_layout(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Views of a batch of G and K heads, so that keys are shared in a group without a copy."""
    heads = query.permute(2, 1, 0, 3)
    text = (each.transpose(0, 1).expand(len(heads), -1, -1, -1) for each in (keys, values))
    return heads, *text, bias.expand(*heads.shape[:2], -1, -1)
