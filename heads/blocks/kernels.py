"""The fused kernels under the attention of blocks, and the same in plain products.

Each gives, beside an output, the logsumexp of the scores, and takes both in its backward pass,
where they may be of more keys than its own: from scores S that it computes anew it takes
P = exp(S - L) and dS = P (dO v - sum(dO O)), see `heads/eagle/branch_kernels.py`.

They are called by name, as `scaled_dot_product_attention` keeps the logsumexp to itself and turns
booleans into a bias in every call. FlexAttention would launch less, and skip what no row of a tile
sees, but wants a compiler where it runs, compiles anew for new sizes, and runs on no emulated GPU.

Letters: B texts, H heads, M queries, N keys, d head size.
"""

import torch
from torch import Tensor
from torch.nn import functional

HIDDEN = -3e4
"""Added to the score of a key that is not seen. Not -inf: a row that sees no key gives no NaN."""
ALIGNED_BYTES = 16
LOG_NORM_MULTIPLE = 32
EFFICIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Output [B, H, M, d], whose queries lie one after another in memory, and logsumexp [B, H, M].

    Args:
        query: [B, H, M, d].
        keys: [B, H, N, d]; expanded ones not of a multiple of 32 and one more, of which CUDA's
            kernel is said to make wrong numbers (pytorch#191937).
        values: as the keys.
        bias: [M, N] of `bias_like`.
    """
    bias = _expanded(bias, query)
    if _fits_efficient(query):
        found, log_norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, bias, True
        )
        return found, log_norm[..., : query.shape[2]]
    if on_cpu(query):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, attn_mask=bias)
    scores = _scores(query, keys, bias)
    log_norm = scores.logsumexp(-1)
    return (scores - log_norm.unsqueeze(-1)).exp().to(values) @ values, log_norm


def attend_backward(
    grad: Tensor, text: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, found: Tensor,
    log_norm: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, keys and values, [B, H, ., d].

    Args:
        grad: [B, H, M, d], of the output.
        text: query, keys and values as `attend` took them.
        bias: as `attend` took it.
        found: output [B, H, M, d]; query m + 1 lies H d numbers behind query m, which CUDA's
            kernel takes for granted.
        log_norm: [B, H, M] float32.
    """
    query, bias = text[0], _expanded(bias, text[0])
    if _fits_efficient(query):
        # Drawn from by dropout only, which there is none of.
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        wanted = [True, True, True, False]
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        return kernel(
            grad, *text, bias, found, _whole_tiles(log_norm), unused, unused, 0.0, wanted
        )[:3]
    if on_cpu(query):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, *text, found, log_norm, 0.0, False, attn_mask=bias)
    query, keys, values = (each.to(log_norm) for each in text)
    weights = (_scores(query, keys, bias) - log_norm.unsqueeze(-1)).exp()
    inner = (grad * found).sum(-1, keepdim=True, dtype=log_norm.dtype)
    d_scores = weights * (grad.to(log_norm) @ values.mT - inner) * query.shape[-1] ** -0.5
    parts = d_scores @ keys, d_scores.mT @ query, weights.mT @ grad.to(log_norm)
    return tuple(each.to(grad.dtype) for each in parts)


def on_cpu(states: Tensor) -> bool:
    """True for states that lie on a CPU, which its own kernels take."""
    return states.device.type == "cpu"


def bias_like(query: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """[M, N] zeros whose rows begin where CUDA's kernel can read them."""
    width = num_keys + -num_keys % ALIGNED_BYTES
    return query.new_zeros(num_queries, width)[:, :num_keys]


def _expanded(bias: Tensor | None, query: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:2], -1, -1)


def _fits_efficient(query: Tensor) -> bool:
    """Tells whether CUDA's memory-efficient kernel takes such queries."""
    aligned = query.shape[-1] * query.element_size() % ALIGNED_BYTES == 0
    return query.is_cuda and aligned and query.dtype in EFFICIENT_DTYPES


def _whole_tiles(log_norm: Tensor) -> Tensor:
    """[B, H, .], of queries that give nothing too, up to what the kernel reads at once."""
    padding = -log_norm.shape[2] % LOG_NORM_MULTIPLE
    return functional.pad(log_norm, (0, padding), value=torch.inf) if padding else log_norm


def _scores(query: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """[B, H, M, N], float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ keys.to(wide).mT * query.shape[-1] ** -0.5
    return scores if bias is None else scores + bias
