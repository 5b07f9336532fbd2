"""Attention of rows that draft in parallel.

Every use of an EAGLE layer has the same form. The text was read with true hidden states, which give
keys and values for its S tokens. From some of its tokens, N rows draft on: a row sees the text up
to its own token, and its own draft tokens, never another row. This covers the training-time test of
EAGLE-3 (causal block plus diagonals), the alignment of HASS, a chain in decoding (N = 1) and a
level of a dynamic tree (a row is a path). J steps cost J times N more scores, not a mask of [N, J *
N].

Letters: T texts, S tokens of a text, N rows, n rows of a chunk, s tokens of a span, J earlier draft
tokens of a row, Q heads, K key-value heads, d head size.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heads.eagle.branch_kernels import ChunkedBranchAttention, FlashBranchAttention
from heads.eagle.branches import ROWS_PER_CHUNK, BranchCache, CausalRange
from heads.layers.documents import can_use_flash


def branch_attention(
    query: Tensor, branches: BranchCache, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention of each row over its text and its own draft tokens, in one distribution.

    With gradients and over one text, it uses a fused kernel if the kernel supports the dtype and
    head size. Decoding (few rows, no gradients), windows and sinks use `plain_attention`.

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
    """`branch_attention` by its definition, for any dtype, device and number of texts.

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
        own = [own[here] for own in (*drafts[0], *drafts[1])]
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
    """Attention whose `own` has J keys, then J values, each [N, K, d]."""
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
    if sinks is not None:
        sunk = sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1).expand(num_rows, -1, -1, 1)
        scores = torch.cat([scores, sunk], dim=-1)
    at_least_float32 = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(at_least_float32).softmax(-1).to(values.dtype)
    text, drafts, _ = weights.tensor_split([num_tokens, num_tokens + num_own], dim=-1)
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
