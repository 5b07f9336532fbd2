"""Fused attention kernels of blocks, and the same in plain products.

Each kernel returns an output and the logsumexp of the scores. Its backward pass takes both,
possibly of more keys than its own: from recomputed scores S it takes P = exp(S - L) and dS = P (dO
v - sum(dO O)), see `heads/eagle/branch_kernels.py`.

The kernels are called by name, because `scaled_dot_product_attention` hides the logsumexp and turns
booleans into a bias at every call. FlexAttention would launch less and skip hidden tiles, but needs
a compiler, recompiles for new sizes and runs on no emulated GPU.

Letters: B texts, H heads, M queries, N keys, d head size.
"""

import torch
from torch import Tensor
from torch.nn import functional

HIDDEN_BIAS = -3e4
"""Bias of a hidden key. Not -inf, so that a row without keys gives no NaN."""
ALIGNED_BYTES = 16
LOG_NORM_MULTIPLE = 32
EFFICIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Output [B, H, M, d] with contiguous queries, and logsumexp [B, H, M].

    Args:
        query: [B, H, M, d].
        keys: [B, H, N, d]; if expanded, N must not be 1 above a multiple of 32, for which CUDA's
            kernel gives wrong numbers (pytorch#191937).
        values: as the keys.
        bias: [M, N] of `bias_like`.
    """
    bias = _expand_bias(bias, query)
    if _fits_efficient(query):
        found, log_norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, bias, True
        )
        return found, log_norm[..., : query.shape[2]]
    if is_on_cpu(query):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, attn_mask=bias)
    scores = _compute_scores(query, keys, bias)
    log_norm = scores.logsumexp(-1)
    return (scores - log_norm.unsqueeze(-1)).exp().to(values) @ values, log_norm


def attend_backward(
    grad: Tensor, text: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, found: Tensor,
    log_norm: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, keys and values, [B, H, ., d].

    Args:
        grad: [B, H, M, d], gradient of the output.
        text: query, keys and values as given to `attend`.
        bias: bias as given to `attend`.
        found: output [B, H, M, d], with query m + 1 at H d numbers after query m, as CUDA's kernel
            assumes.
        log_norm: [B, H, M] float32.
    """
    query, bias = text[0], _expand_bias(bias, text[0])
    if _fits_efficient(query):
        # Random state for dropout, which is not used.
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        wanted = [True, True, True, False]
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        return kernel(
            grad, *text, bias, found, _whole_tiles(log_norm), unused, unused, 0.0, wanted
        )[:3]
    if is_on_cpu(query):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, *text, found, log_norm, 0.0, False, attn_mask=bias)
    query, keys, values = (each.to(log_norm) for each in text)
    weights = (_compute_scores(query, keys, bias) - log_norm.unsqueeze(-1)).exp()
    inner = (grad * found).sum(-1, keepdim=True, dtype=log_norm.dtype)
    d_scores = weights * (grad.to(log_norm) @ values.mT - inner) * query.shape[-1] ** -0.5
    parts = d_scores @ keys, d_scores.mT @ query, weights.mT @ grad.to(log_norm)
    return tuple(each.to(grad.dtype) for each in parts)


def is_on_cpu(states: Tensor) -> bool:
    """Tell whether a tensor lies on a CPU, which has its own kernels."""
    return states.device.type == "cpu"


def make_aligned_bias(query: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """[M, N] zeros, with rows aligned for CUDA's kernel."""
    width = num_keys + -num_keys % ALIGNED_BYTES
    return query.new_zeros(num_queries, width)[:, :num_keys]


def _expand_bias(bias: Tensor | None, query: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:2], -1, -1)


def _fits_efficient(query: Tensor) -> bool:
    """Tell whether CUDA's memory-efficient kernel accepts the queries."""
    aligned = query.shape[-1] * query.element_size() % ALIGNED_BYTES == 0
    return query.is_cuda and aligned and query.dtype in EFFICIENT_DTYPES


def _whole_tiles(log_norm: Tensor) -> Tensor:
    """[B, H, .] padded to the tile of queries that the kernel reads."""
    padding = -log_norm.shape[2] % LOG_NORM_MULTIPLE
    return functional.pad(log_norm, (0, padding), value=torch.inf) if padding else log_norm


def _compute_scores(query: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """[B, H, M, N] scores, at least in float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ keys.to(wide).mT * query.shape[-1] ** -0.5
    return scores if bias is None else scores + bias
