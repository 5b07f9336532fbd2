"""The attention of blocks that draft side by side: each over its text, and over itself.

From a token p of a text a block of R rows drafts in one pass. Its rows see the text's features up
to p and each other, never another block's. So A blocks cost A times (text + R), in pieces of some
rows whose scores live in a fused kernel where there is one, and nothing is of tokens by tokens.

Letters: T texts, S tokens of a text, A blocks, R rows of a block, c blocks of a chunk, s tokens of
a chunk, Q heads, K key-value heads, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

ROWS_PER_CHUNK = 128


@dataclass(frozen=True)
class Sight:
    """What blocks see.

    Each text has A / T blocks, one text's after another's.

    Attributes:
        first: [A] int64, the first token of its text that a block sees.
        end: [A] int64, one more than the last: the place of the block's first row.
        size: R.
        causal: a row sees no later row of its block.
        window: tokens that a row sees, its own included; None for all.
        host: `first` and `end` on the CPU, if there is one text.
    """

    first: Tensor
    end: Tensor
    size: int
    causal: bool = False
    window: int | None = None
    host: tuple[Tensor, Tensor] | None = None

    @cached_property
    def chunks(self) -> list[tuple[slice, slice]]:
        """Blocks and the tokens that any of them sees, chunk by chunk; of one text."""
        assert self.host is not None
        number, found = max(1, ROWS_PER_CHUNK // self.size), []
        for start in range(0, len(self.first), number):
            blocks = slice(start, min(start + number, len(self.first)))
            tokens = slice(int(self.host[0][blocks].min()), int(self.host[1][blocks].max()))
            found.append((blocks, tokens))
        return found

    def of_text(self, blocks: slice, tokens: slice) -> Tensor:
        """[c, R, s] bool, the tokens that each row sees."""
        places = torch.arange(tokens.start, tokens.stop, device=self.end.device)
        first, end = (each[blocks, None, None] for each in (self.first, self.end))
        seen = (places >= first) & (places < end)
        if self.window is None:
            return seen.expand(-1, self.size, -1)
        rows = torch.arange(self.size, device=self.end.device).unsqueeze(1)
        return seen & (end + rows - places < self.window)

    def of_block(self) -> Tensor:
        """[R, R] bool, the rows that each row sees."""
        rows = torch.arange(self.size, device=self.end.device)
        distance = rows.unsqueeze(1) - rows
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if self.window is None else seen & (distance.abs() < self.window)


def block_attention(
    query: Tensor, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], sight: Sight
) -> Tensor:
    """Softmax attention of each row over its text and its block, in one distribution.

    Args:
        query: [A, R, Q, d], rotated.
        text: keys, rotated, and values [T, S, K, d].
        own: the blocks' keys and values [A, R, K, d].
        sight: of the blocks.

    Returns:
        [A, R, Q, d].
    """
    if len(text[0]) == 1:
        # Not `[0]`, whose gradient is written into zeros.
        return _Chunked.apply(sight, query, *(each.squeeze(0) for each in text), *own)
    return plain_attention(query, text, own, sight)


def plain_attention(
    query: Tensor, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], sight: Sight
) -> Tensor:
    """`block_attention` by its definition, for any number of texts."""
    num_texts, num_tokens, num_kv_heads, size = text[0].shape
    blocks = query.unflatten(0, (num_texts, -1)).unflatten(-2, (num_kv_heads, -1)) * size**-0.5
    scores = torch.einsum("tarkgd,tskd->takgrs", blocks, text[0]).flatten(0, 1)
    within = torch.einsum("arkgd,aukd->akgru", blocks.flatten(0, 1), own[0])
    everything = slice(0, len(query)), slice(0, num_tokens)
    seen = sight.of_text(*everything)[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    within = within.masked_fill(~sight.of_block(), -torch.inf)
    joined = torch.cat([scores, within], -1)
    weights = joined.to(torch.promote_types(joined.dtype, torch.float32)).softmax(-1).to(query)
    of_text, of_block = weights.split([num_tokens, sight.size], -1)
    found = torch.einsum("takgrs,tskd->tarkgd", of_text.unflatten(0, (num_texts, -1)), text[1])
    more = torch.einsum("akgru,aukd->arkgd", of_block, own[1])
    return (found.flatten(0, 1) + more).flatten(2, 3)


class _Chunked(torch.autograd.Function):
    """Attention over one text, a chunk of blocks at a time, in the backward pass too.

    Chunks see stretches of the text that overlap; autograd would write the gradient of each into
    zeros of the whole.
    """

    @staticmethod
    def forward(ctx: Any, sight: Sight, query: Tensor, *both: Tensor) -> Tensor:
        """[A, R, Q, d] of query [A, R, Q, d]; `both` are keys and values of text and blocks."""
        ctx.save_for_backward(query, *both)
        ctx.sight = sight
        parts = []
        for blocks, tokens in sight.chunks:
            here = _here(query, both, blocks, tokens)
            parts.append(_attend(here, _mask(sight, blocks, tokens)))
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what `forward` got; a chunk is computed again."""
        query, *both = ctx.saved_tensors
        d_query, *d_own = (torch.empty_like(each) for each in (query, *both[2:]))
        # A token's gradient comes in parts from many chunks: summed in float32 at least.
        wide = torch.promote_types(query.dtype, torch.float32)
        d_text = [torch.zeros_like(each, dtype=wide) for each in both[:2]]
        for blocks, tokens in ctx.sight.chunks:
            here = _here(query, both, blocks, tokens)
            inputs = [each.detach().requires_grad_() for each in here]
            with torch.enable_grad():
                found = _attend(inputs, _mask(ctx.sight, blocks, tokens))
            d_query[blocks], *parts = torch.autograd.grad(found, inputs, grad[blocks])
            for whole, part in zip(d_text, parts[:2], strict=True):
                whole[tokens] += part
            for whole, part in zip(d_own, parts[2:], strict=True):
                whole[blocks] = part
        return None, d_query, *(each.to(query.dtype) for each in d_text), *d_own


def _here(
    query: Tensor, both: Sequence[Tensor], blocks: slice, tokens: slice
) -> tuple[Tensor, ...]:
    """What a chunk needs: rows, and keys and values of its tokens and of its own."""
    keys, values, *own = both
    return query[blocks], keys[tokens], values[tokens], *(each[blocks] for each in own)


def _mask(sight: Sight, blocks: slice, tokens: slice) -> Tensor:
    """[c * R, s + c * R] bool."""
    number = blocks.stop - blocks.start
    mine = torch.block_diag(*[sight.of_block()] * number)
    return torch.cat([sight.of_text(blocks, tokens).flatten(0, 1), mine.bool()], 1)


def _attend(here: Sequence[Tensor], mask: Tensor) -> Tensor:
    """[c, R, Q, d] of rows over text [s, K, d] and blocks [c, R, K, d] where `mask` allows."""
    query, *text, own_keys, own_values = here
    num_heads = own_keys.shape[2]
    rows = query.flatten(0, 1).unflatten(1, (num_heads, -1)).permute(2, 1, 0, 3)
    # A batch of Q / K and K heads, so that keys are shared in a group without a copy.
    keys, values = (
        torch.cat([of_text, own.flatten(0, 1)]).transpose(0, 1).expand(len(rows), -1, -1, -1)
        for of_text, own in zip(text, (own_keys, own_values), strict=True)
    )
    found = functional.scaled_dot_product_attention(rows, keys, values, mask)
    return found.permute(2, 1, 0, 3).reshape(query.shape)
