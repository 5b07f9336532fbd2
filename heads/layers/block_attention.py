"""Attention of blocks that draft in parallel: each over its text, and over itself.

From token p of a text, a block of R rows drafts in one pass. Its rows see the text's hidden states
up to p and each other, never another block's. A blocks therefore cost A times (text + R). Fused
kernels take some rows at a time over the text, and all blocks over themselves; both results are
joined into one distribution by their logsumexp, as at the top of
`heads/layers/branch_attention.py`.

`attend` and `attend_backward` call the fused kernels, or do the same in plain products. A kernel
returns an output and the logsumexp of the scores. Its backward pass takes both, possibly of more
keys than its own: from recomputed scores S it takes P = exp(S - L) and dS = P (dO v - sum(dO O)).
The kernels are called by name, because `scaled_dot_product_attention` hides the logsumexp and turns
booleans into a bias at every call. FlexAttention would launch less and skip hidden tiles, but needs
a compiler, recompiles for new sizes and runs on no emulated GPU.

Letters: T texts, S tokens of a text, A blocks, R rows of a block, N = A * R rows, n rows and s
tokens of a chunk, Q heads, K key-value heads, G = Q / K heads of a group, d head size. In the
kernels: B texts, H heads, M queries, N keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

HIDDEN_BIAS = -3e4
"""Bias of a hidden key. Not -inf, so that a row without keys gives no NaN."""
ALIGNED_BYTES = 16
LOG_NORM_MULTIPLE = 32
EFFICIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS_PER_CHUNK = 128
"""Rows per chunk on a CPU, where a chunk costs little and may skip tokens."""
ROWS_PER_LAUNCH = 1024
"""Rows per launch on other devices; with several heads they fill a GPU."""
SHORT_LENGTH_STEP, LENGTH_STEP = 128, 512
"""Units of the chunk lengths on other devices, which keep the lengths few: multiples of the second,
from 8 times that on 4 lengths per octave; for short texts, multiples of the first."""


@dataclass(frozen=True)
class BlockRange:
    """Stretch of a text that each block sees.

    Each text has A / T blocks; blocks are ordered by text.

    Attributes:
        first: [A] int64, first token of its text that a block sees.
        end: [A] int64, one after the last token seen: the position of the block's first row.
        num_rows: number R of rows.
        causal: whether rows see no later rows of their block.
        window: tokens that a row sees, its own included; None for all.
        bounds_on_cpu: `first` and `end` on the CPU, for a single text.
    """

    first: Tensor
    end: Tensor
    num_rows: int
    causal: bool = False
    window: int | None = None
    bounds_on_cpu: tuple[Tensor, Tensor] | None = None
    _found: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def make_chunk_plan(self, query: Tensor, num_tokens: int, group: int) -> "ChunkPlan":
        """Plan the attention of blocks over one text, once for all layers."""
        key = query.dtype, num_tokens, group
        if key not in self._found:
            self._found[key] = ChunkPlan(self, query, num_tokens, group)
        return self._found[key]

    def build_masks(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Build the masks of texts [A, R, S] and blocks [R, R] bool, once for all layers.

        Args:
            num_tokens: S.
        """
        if num_tokens not in self._found:
            context = self.build_context_mask(slice(0, len(self.end)), slice(0, num_tokens))
            self._found[num_tokens] = context, self.build_block_mask()
        return self._found[num_tokens]

    def build_context_mask(self, blocks: slice, tokens: slice) -> Tensor:
        """Build a mask [c, R, s] bool of the tokens that each row of c blocks sees."""
        places = torch.arange(tokens.start, tokens.stop, device=self.end.device)
        first, end = (each[blocks, None, None] for each in (self.first, self.end))
        seen = (places >= first) & (places < end)
        if self.window is None:
            return seen.expand(-1, self.num_rows, -1)
        rows = torch.arange(self.num_rows, device=self.end.device).unsqueeze(1)
        return seen & (end + rows - places < self.window)

    def build_block_mask(self) -> Tensor:
        """Build a mask [R, R] bool of the rows that each row of a block sees."""
        rows = torch.arange(self.num_rows, device=self.end.device)
        distance = rows.unsqueeze(1) - rows
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if self.window is None else seen & (distance.abs() < self.window)


def block_attention(
    query: Tensor, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], block_range: BlockRange
) -> Tensor:
    """Attend from each row to its text and its block, with one softmax over both.

    Args:
        query: [A, R, Q, d], rotated.
        text: keys, rotated, and values [T, S, K, d].
        own: the blocks' keys and values [A, R, K, d].
        block_range: stretch of the text that each block sees.

    Returns:
        [A, R, Q, d].
    """
    if len(text[0]) == 1:
        # Not `[0]`, whose gradient fills a tensor of zeros.
        return _BlockAttention.apply(block_range, query, *(each.squeeze(0) for each in text), *own)
    return plain_block_attention(query, text, own, block_range)


def plain_block_attention(
    query: Tensor, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], block_range: BlockRange
) -> Tensor:
    """Compute `block_attention` by its definition, for any number of texts."""
    num_texts, num_tokens, num_kv_heads, size = text[0].shape
    blocks = query.unflatten(0, (num_texts, -1)).unflatten(-2, (num_kv_heads, -1)) * size**-0.5
    scores = torch.einsum("tarkgd,tskd->takgrs", blocks, text[0]).flatten(0, 1)
    block_scores = torch.einsum("arkgd,aukd->akgru", blocks.flatten(0, 1), own[0])
    seen, block_seen = block_range.build_masks(num_tokens)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    block_scores = block_scores.masked_fill(~block_seen, -torch.inf)
    joined = torch.cat([scores, block_scores], -1)
    weights = joined.to(torch.promote_types(joined.dtype, torch.float32)).softmax(-1).to(query)
    of_text, of_block = weights.split([num_tokens, block_range.num_rows], -1)
    from_text = torch.einsum("takgrs,tskd->tarkgd", of_text.unflatten(0, (num_texts, -1)), text[1])
    from_block = torch.einsum("akgru,aukd->arkgd", of_block, own[1])
    return (from_text.flatten(0, 1) + from_block).flatten(2, 3)


class _BlockAttention(torch.autograd.Function):
    """Attention over one text, a chunk of rows at a time, and over blocks."""

    @staticmethod
    def forward(ctx: Any, block_range: BlockRange, query: Tensor, *both: Tensor) -> Tensor:
        """Attend from query [A, R, Q, d] to `both`: keys and values of text, then of blocks."""
        num_kv_heads, group = both[0].shape[1], query.shape[2] // both[0].shape[1]
        plan = block_range.make_chunk_plan(query, len(both[0]), group)
        rows, own = plan.arrange_rows(query, num_kv_heads), _put_heads_first(both[2:])
        keys, values = (plan.arrange_context(each, group) for each in both[:2])
        parts = [
            attend(rows[:, :, c.rows], keys[:, :, c.tokens], values[:, :, c.tokens], c.bias)
            for c in plan.chunks
        ]
        text_output = torch.cat([output.transpose(1, 2) for output, _ in parts], 1).transpose(1, 2)
        norms = torch.cat([log_norm for _, log_norm in parts], 2)
        block_output, own_norms = attend(
            _gather_blocks(query, group), own[0], own[1], plan.block_bias
        )
        of_text, of_own = _view_rows(text_output, query), _view_blocks(block_output, group)
        norm, own_norm = _view_rows(norms, query), _view_blocks(own_norms, group)
        block_share = (own_norm - norm).sigmoid_().unsqueeze(-1).to(query.dtype)
        output = torch.lerp(of_text, of_own, block_share, out=query.new_empty(of_text.shape))
        torch.logaddexp(norm, own_norm, out=norm)
        output = output.flatten(2, 3)
        ctx.save_for_backward(query, *both, output, norms)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs of `forward`."""
        plan, (query, keys, values, *own, output, norms) = ctx.plan, ctx.saved_tensors
        num_kv_heads, group = keys.shape[1], query.shape[2] // keys.shape[1]
        rows, grads, outputs = (
            plan.arrange_rows(each, num_kv_heads) for each in (query, grad.contiguous(), output)
        )
        outputs = outputs.transpose(1, 2).contiguous().transpose(1, 2)
        text = [plan.arrange_context(each, group) for each in (keys, values)]
        # A token's gradient is summed over many chunks, so in float32 at least.
        wide = torch.promote_types(query.dtype, torch.float32)
        d_text = [torch.zeros_like(each[0], dtype=wide) for each in text]
        parts = []
        for c in plan.chunks:
            inputs = rows[:, :, c.rows], *(each[:, :, c.tokens] for each in text)
            saved = [each[:, :, c.rows] for each in (outputs, norms)]
            part, *both = attend_backward(grads[:, :, c.rows], inputs, c.bias, *saved)
            parts.append(part.transpose(1, 2))
            for whole, each in zip(d_text, both, strict=True):
                whole[:, c.tokens].add_(each.sum(0, dtype=wide))
        d_rows = _view_rows(torch.cat(parts, 1).transpose(1, 2), query)
        blocks, grads, outputs = (_gather_blocks(each, group) for each in (query, grad, output))
        norms = _view_rows(norms, query).permute(0, 2, 3, 1).flatten(2, 3)
        inputs = blocks, *_put_heads_first(own)
        part, *d_own = attend_backward(grads, inputs, plan.block_bias, outputs, norms)
        d_blocks = _view_blocks(part, group)
        d_query = torch.add(d_rows, d_blocks, out=query.new_empty(d_blocks.shape)).flatten(2, 3)
        d_text = [each[:, : len(keys)].transpose(0, 1).to(query.dtype) for each in d_text]
        return None, d_query, *d_text, *_put_heads_first(d_own)


def _gather_blocks(states: Tensor, group: int) -> Tensor:
    """Copy rows [A, R, Q, d] to [A, K, G * R, d], with the rows of a block contiguous."""
    heads = states.unflatten(2, (-1, group)).permute(0, 3, 1, 2, 4)
    return heads.reshape(len(states), -1, *heads.shape[3:]).transpose(1, 2)


def _view_blocks(states: Tensor, group: int) -> Tensor:
    """View results of blocks [A, K, G * R, ...] as [A, R, K, G, ...]."""
    return states.unflatten(2, (group, -1)).movedim(3, 1)


def _view_rows(states: Tensor, query: Tensor) -> Tensor:
    """View results of rows [G, K, N, ...] as [A, R, K, G, ...], for a query [A, R, Q, d]."""
    num_blocks, size = query.shape[:2]
    rows = states[:, :, : num_blocks * size].unflatten(2, (num_blocks, size))
    return rows.movedim((2, 3), (0, 1)).transpose(2, 3)


def _put_heads_first(both: Sequence[Tensor]) -> list[Tensor]:
    return [each.transpose(1, 2) for each in both]


class Chunk(NamedTuple):
    """Rows that attend to the same stretch of a text.

    Attributes:
        rows: the n rows; padding may follow the last.
        tokens: the s tokens; padding may follow the last.
        bias: [n, s] to add to the scores.
    """

    rows: slice
    tokens: slice
    bias: Tensor


class ChunkPlan:
    """Chunks of the rows of blocks over one text, with their masks.

    The biases take N times the tokens of a document: 38 MB in bfloat16 for 512 blocks of 16 rows in
    4,096 tokens. All layers and their backward passes share them.

    Args:
        block_range: stretch of the text that each block sees.
        query: tensor that gives dtype and device.
        num_tokens: number S of text tokens.
        group: number G of heads per group.

    Attributes:
        chunks: chunks in the order of the rows.
        block_bias: [G * R, R] to add to the scores inside a block; None for nothing.
        num_rows: number N of rows, padded to the end of the last possible chunk.
        num_tokens: number S of tokens, padded likewise.
    """

    def __init__(self, block_range: BlockRange, query: Tensor, num_tokens: int, group: int) -> None:
        self.block_range, self.exact = block_range, is_on_cpu(query)
        self.num_tokens = num_tokens if self.exact else _round_up(num_tokens, SHORT_LENGTH_STEP)
        number, size = len(block_range.end), block_range.num_rows
        most = max(1, (ROWS_PER_CHUNK if self.exact else ROWS_PER_LAUNCH) // size)
        if not self.exact:
            # Powers of two: whole tiles of rows, and few shapes.
            most = 1 << min(most.bit_length() - 1, (number - 1).bit_length())
        self.num_rows = (number if self.exact else _round_up(number, most)) * size
        self.chunks = [self._build_chunk(start, most, query) for start in range(0, number, most)]
        self.block_bias: Tensor | None = None
        if block_range.causal or block_range.window is not None:
            self.block_bias = make_aligned_bias(query, group * size, size)
            self.block_bias.masked_fill_(
                ~block_range.build_block_mask().repeat(group, 1), HIDDEN_BIAS
            )

    def _build_chunk(self, start: int, num_blocks: int, query: Tensor) -> Chunk:
        """Build the chunk of `num_blocks` blocks from `start` on, with the tokens that they see."""
        size, blocks = self.block_range.num_rows, slice(start, start + num_blocks)
        rows = slice(start * size, min((start + num_blocks) * size, self.num_rows))
        tokens = self._find_visible_tokens(blocks)
        bias = make_aligned_bias(query, rows.stop - rows.start, tokens.stop - tokens.start)
        hidden = ~self.block_range.build_context_mask(blocks, tokens)
        bias[: len(hidden) * size].unflatten(0, (-1, size)).masked_fill_(hidden, HIDDEN_BIAS)
        return Chunk(rows, tokens, bias)

    def _find_visible_tokens(self, blocks: slice) -> slice:
        assert self.block_range.bounds_on_cpu is not None
        first, end = (each[blocks] for each in self.block_range.bounds_on_cpu)
        window = self.block_range.window
        stop = int(end.max())
        # A row without text tokens sees only its block.
        start = int(first.min() if window is None else first.maximum(end + 1 - window).min())
        start = min(start, stop - 1)
        if self.exact:
            return slice(start, stop)
        length = min(_round_up_length(stop - start), self.num_tokens)
        start = min(start, self.num_tokens - length)
        return slice(start, start + length)

    def arrange_rows(self, states: Tensor, num_kv_heads: int) -> Tensor:
        """Arrange rows [A, R, Q, d] as a view [G, K, N, d], padded to `num_rows`.

        Groups thus share keys without a copy.
        """
        rows = _pad_length(states.flatten(0, 1), self.num_rows)
        return rows.unflatten(1, (num_kv_heads, -1)).permute(2, 1, 0, 3)

    def arrange_context(self, states: Tensor, group: int) -> Tensor:
        """View a text's keys or values [S, K, d] as [G, K, S, d], padded to `num_tokens`."""
        return _pad_length(states, self.num_tokens).transpose(0, 1).expand(group, -1, -1, -1)


def _pad_length(states: Tensor, length: int) -> Tensor:
    """Append zeros to states [., ., d] up to a length."""
    missing = length - len(states)
    return functional.pad(states, (0, 0, 0, 0, 0, missing)) if missing else states


def _round_up(number: int, multiple: int) -> int:
    return number + -number % multiple


def _round_up_length(num_tokens: int) -> int:
    """Round up a number of tokens to an allowed length."""
    return _round_up(num_tokens, max(LENGTH_STEP, 1 << max(0, (num_tokens - 1).bit_length() - 3)))


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Attend from each query to all keys; return output [B, H, M, d] and logsumexp [B, H, M].

    The output's queries are contiguous.

    Args:
        query: [B, H, M, d].
        keys: [B, H, N, d]; if expanded, N must not be 1 above a multiple of 32, for which CUDA's
            kernel gives wrong numbers (pytorch#191937).
        values: as the keys.
        bias: [M, N], made with `make_aligned_bias`; None for no bias.
    """
    bias = _expand_bias(bias, query)
    if _fits_efficient(query):
        output, log_norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, bias, True
        )
        return output, log_norm[..., : query.shape[2]]
    if is_on_cpu(query):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, attn_mask=bias)
    scores = _compute_scores(query, keys, bias)
    log_norm = scores.logsumexp(-1)
    return (scores - log_norm.unsqueeze(-1)).exp().to(values) @ values, log_norm


def attend_backward(
    grad: Tensor, text: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, output: Tensor,
    log_norm: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of query, keys and values, [B, H, ., d], from those of the output.

    Args:
        grad: [B, H, M, d], gradient of the output.
        text: query, keys and values as given to `attend`.
        bias: bias as given to `attend`.
        output: output [B, H, M, d], with query m + 1 at H d numbers after query m, as CUDA's kernel
            assumes.
        log_norm: [B, H, M] float32.
    """
    query, bias = text[0], _expand_bias(bias, text[0])
    if _fits_efficient(query):
        # Random state for dropout, which is not used.
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        wanted = [True, True, True, False]
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        # CUDA's kernel reads whole tiles of queries.
        padding = -log_norm.shape[2] % LOG_NORM_MULTIPLE
        norms = functional.pad(log_norm, (0, padding), value=torch.inf) if padding else log_norm
        return kernel(grad, *text, bias, output, norms, unused, unused, 0.0, wanted)[:3]
    if is_on_cpu(query):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, *text, output, log_norm, 0.0, False, attn_mask=bias)
    query, keys, values = (each.to(log_norm) for each in text)
    weights = (_compute_scores(query, keys, bias) - log_norm.unsqueeze(-1)).exp()
    inner = (grad * output).sum(-1, keepdim=True, dtype=log_norm.dtype)
    d_scores = weights * (grad.to(log_norm) @ values.mT - inner) * query.shape[-1] ** -0.5
    parts = d_scores @ keys, d_scores.mT @ query, weights.mT @ grad.to(log_norm)
    return tuple(each.to(grad.dtype) for each in parts)


def is_on_cpu(states: Tensor) -> bool:
    """Tell whether a tensor lies on a CPU, which has its own kernels."""
    return states.device.type == "cpu"


def make_aligned_bias(query: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Make a bias [M, N] of zeros, with rows aligned for CUDA's kernel."""
    width = num_keys + -num_keys % ALIGNED_BYTES
    return query.new_zeros(num_queries, width)[:, :num_keys]


def _expand_bias(bias: Tensor | None, query: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:2], -1, -1)


def _fits_efficient(query: Tensor) -> bool:
    """Tell whether CUDA's memory-efficient kernel accepts the queries."""
    aligned = query.shape[-1] * query.element_size() % ALIGNED_BYTES == 0
    return query.is_cuda and aligned and query.dtype in EFFICIENT_DTYPES


def _compute_scores(query: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the scores [B, H, M, N], at least in float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ keys.to(wide).mT * query.shape[-1] ** -0.5
    return scores if bias is None else scores + bias
