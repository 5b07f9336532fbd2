"""CUDA's kernels where they do or demand what the CPU's do not, or the CPU has none.

Each is computed in float32 by its definition; what the kernel on CUDA assumes about memory
without looking is read from memory in the same way, so what is wrong there is wrong here.

Sources in PyTorch: `aten/src/ATen/native/transformers/cuda/attention.cu` and
`attention_backward.cu`, `mem_eff_attention/kernel_forward.h` and `kernel_backward.h`,
`flash_attn/flash_api.cpp`, `native/cuda/Blas.cpp`, `native/cuda/layer_norm_kernel.cu`; GPUs of
compute capability 8.0 and more.
Not emulated: dropout, nor the rounding of a kernel's inner products.

Letters: B texts, Q heads, K key-value heads, M queries, N keys, S tokens of all texts, d head size.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
LOG_NORM_MULTIPLE = 32
LARGEST_FLASH_HEAD = 256


class KernelError(RuntimeError):
    """A kernel does not take what it is given."""


def check(holds: bool, demand: str) -> None:
    """Raises `KernelError` naming what does not hold."""
    if not holds:
        raise KernelError(demand)


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _compute_log_norm: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Output [B, Q, M, d], rows of all heads together in memory; logsumexp, padded to 32s."""
    check(dropout == 0.0, "dropout is not emulated")
    _check_heads(query, key, value, bias, 16 // query.element_size())
    scores = _scores(query, key, bias, is_causal, scale)
    log_norm = scores.logsumexp(-1)
    found = (scores - log_norm.unsqueeze(-1)).exp() @ value.float()
    padding = -query.shape[2] % LOG_NORM_MULTIPLE
    log_norm = torch.nn.functional.pad(log_norm, (0, padding), value=float("inf"))
    return _rows_first(found.to(query.dtype)), log_norm, *_seeds()


def efficient_attention_backward(  # noqa: PLR0917
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_norm: Tensor,
    _seed: Tensor,
    _offset: Tensor,
    dropout: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and value [B, Q, ., d].

    Of 16-bit numbers the kernel itself sums `grad * out` and takes it that a row of `out` begins
    Q * d numbers after the one before; of float32 it is given the sum (`kKernelComputesDelta`).
    """
    check(dropout == 0.0 and not wanted[3], "dropout and the bias's gradient are not emulated")
    _check_heads(query, key, value, bias, 4)
    check(log_norm.dtype is torch.float32, "logsumexp must be float32")
    for place in (0, 1):
        many = log_norm.shape[place] > 1
        check(not many or log_norm.stride(place) % 8 == 0, "LSE is not correctly aligned")
    scores = _scores(query, key, bias, is_causal, scale)
    weights = (scores - log_norm[..., : query.shape[2], None]).exp()
    seen = _as_read(out) if query.dtype in HALVES else out
    found = _gradients(grad, (query, key, value), weights, seen, scale)
    return *(_rows_first(each.to(query.dtype)) for each in found), None


def _gradients(
    grad: Tensor, heads: tuple[Tensor, ...], weights: Tensor, out: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value [..., ., d] in float32; `weights` are [..., M, N]."""
    query, key, value = (each.float() for each in heads)
    d_out = grad.float()
    inner = (d_out * out.float()).sum(-1, keepdim=True)
    d_scores = weights * (d_out @ value.mT - inner) * _scale(query, scale)
    return d_scores @ key, d_scores.mT @ query, weights.mT @ d_out


def _check_heads(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, alignment: int
) -> None:
    for name, each in (("query", query), ("key", key), ("value", value)):
        check(each.dim() == 4, f"{name} must have 4 dimensions")
        check(each.dtype == query.dtype, f"{name} must have the query's dtype")
        check(each.shape[:2] == query.shape[:2], f"{name}: as many texts and heads as the query")
        check(each.stride(-1) == 1, f"{name} must have contiguous last dimension")
        check(_aligned(each, alignment), f"{name} is not correctly aligned: {each.stride()}")
    if bias is None:
        return
    shape = (*query.shape[:3], key.shape[2])
    check(bias.dtype == query.dtype, "invalid dtype for bias - should match query's dtype")
    check(tuple(bias.shape) == shape, f"attn_bias: {tuple(bias.shape)}, should be {shape}")
    check(bias.stride(-1) == 1, "attn_bias must have contiguous last dimension")
    check(_aligned(bias, alignment), f"attn_bias is not correctly aligned: {bias.stride()}")


def _aligned(tensor: Tensor, alignment: int) -> bool:
    sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(size == 1 or stride % alignment == 0 for size, stride in sizes)


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    scores = query.float() @ key.float().mT * _scale(query, scale)
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _rows_first(heads: Tensor) -> Tensor:
    """[B, Q, M, d] that lies as [B, M, Q, d]."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _as_read(out: Tensor) -> Tensor:
    """[B, Q, M, d] from where the kernel looks for it."""
    _, num_heads, _, size = out.shape
    strides = (out.stride(0), out.stride(1), num_heads * size, 1)
    last = sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True))
    numbers = out.untyped_storage().nbytes() // out.element_size()
    check(out.storage_offset() + last < numbers, f"out is read beyond its end: {out.stride()}")
    return out.as_strided(out.shape, strides, out.storage_offset())


def _seeds() -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def flash_of_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Output [B, Q, M, d], rows of all heads together in memory; logsumexp [B, Q, M] float32."""
    check(dropout == 0.0 and not return_debug_mask, "dropout is not emulated")
    check(query.dtype in HALVES, "FlashAttention only support fp16 and bf16 data type")
    check(query.shape[1] % key.shape[1] == 0, "key-value heads must divide the query's")
    check(not is_causal or query.shape[2] == key.shape[2], "causal of a square alone")
    scores = _scores(query, _of_heads(key, query), None, is_causal, scale)
    log_norm = scores.logsumexp(-1)
    found = (scores - log_norm.unsqueeze(-1)).exp() @ _of_heads(value, query).float()
    bounds = torch.zeros(0, dtype=torch.int32)
    longest = query.shape[2], key.shape[2]
    of_draw = torch.zeros(2, dtype=torch.uint64), _seeds()[0], torch.empty(0)
    return _rows_first(found.to(query.dtype)), log_norm, bounds, bounds, *longest, *of_draw


def flash_of_heads_backward(  # noqa: PLR0917
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_norm: Tensor,
    _bounds: Tensor,
    _key_bounds: Tensor,
    _max_queries: int,
    _max_keys: int,
    dropout: float,
    is_causal: bool,
    _seed: Tensor,
    _offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    check(dropout == 0.0, "dropout is not emulated")
    keys, values = (_of_heads(each, query) for each in (key, value))
    weights = (_scores(query, keys, None, is_causal, scale) - log_norm.unsqueeze(-1)).exp()
    d_query, *d_text = _gradients(grad, (query, keys, values), weights, out, scale)
    # The kernel gives each query head's part, rounded; PyTorch sums a group's.
    summed = (each.to(query.dtype).unflatten(1, (key.shape[1], -1)).sum(2) for each in d_text)
    return _rows_first(d_query.to(query.dtype)), *map(_rows_first, summed)


def _of_heads(states: Tensor, query: Tensor) -> Tensor:
    """[B, Q, N, d] of [B, K, N, d]: each head of a group sees its group's."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)


def cudnn_attention(query: Tensor, key: Tensor, *_args: Any, **_options: Any) -> Any:
    """Takes time for every new shape, and has given wrong numbers: nothing of ours may call it."""
    raise KernelError(f"cuDNN's attention was chosen: {tuple(query.shape)}, {tuple(key.shape)}")


def flash_attention(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | None,
    key_bounds: Tensor | None,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    _debug: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Output [S, Q, d] and logsumexp [Q, S] float32 of texts one after another."""
    check(dropout == 0.0, "dropout is not emulated")
    used = options.pop("seqused_k", None)
    texts = _Texts((query, key, value), (bounds, key_bounds), (max_queries, max_keys), used)
    window = _window(is_causal, options)
    found = torch.empty_like(query)
    log_norm = torch.empty(query.shape[1], query.shape[0])
    for rows, columns in texts:
        scores = _text_scores(query[rows], key[columns], window, options.get("scale"))
        norm = scores.logsumexp(-1)
        weights = (scores - norm.unsqueeze(-1)).exp().nan_to_num()  # rows that see nothing give 0
        found[rows] = (weights @ _spread(value[columns], query)).transpose(0, 1).to(query.dtype)
        log_norm[:, rows] = norm
    return found, log_norm, torch.zeros(2, dtype=torch.uint64), *_seeds()[:1], torch.empty(0)


def flash_attention_backward(  # noqa: PLR0917
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_norm: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    _state: Tensor,
    _unused: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [S, ., d] for whatever `out` and logsumexp are given."""
    check(dropout == 0.0, "dropout is not emulated")
    texts = _Texts((query, key, value), (bounds, key_bounds), (max_queries, max_keys))
    for each in (grad, out):
        check(each.dtype == query.dtype, "out and its gradient must have the query's dtype")
        check(each.shape == query.shape, "out and its gradient must have the query's shape")
    check(log_norm.dtype is torch.float32, "logsumexp must be float32")
    # Read as rows of S numbers, whatever its strides.
    log_norm = log_norm.as_strided((query.shape[1], query.shape[0]), (query.shape[0], 1))
    window, scale = _window(is_causal, options), options.get("scale")
    d_query, d_text = torch.zeros_like(query), [torch.zeros_like(key), torch.zeros_like(value)]
    for rows, columns in texts:
        scores = _text_scores(query[rows], key[columns], window, scale)
        weights = (scores - log_norm[:, rows].unsqueeze(-1)).exp().nan_to_num()
        d_out, queries, given = (each[rows].transpose(0, 1) for each in (grad, query, out))
        heads = (queries, *(_spread(each[columns], query) for each in (key, value)))
        of_query, *parts = _gradients(d_out, heads, weights, given, scale)
        d_query[rows] = of_query.transpose(0, 1).to(query.dtype)
        for whole, part in zip(d_text, parts, strict=True):
            # The kernel gives each query head's part, rounded; PyTorch sums a group's.
            of_heads = part.to(query.dtype).unflatten(0, (key.shape[1], -1))
            whole[columns] = of_heads.float().sum(1).transpose(0, 1).to(query.dtype)
    return d_query, *d_text


class _Texts:
    """Bounds of texts, after the checks that the kernel begins with."""

    def __init__(
        self,
        heads: tuple[Tensor, ...],
        bounds: tuple[Tensor | None, Tensor | None],
        longest: tuple[int, int],
        used: Tensor | None = None,
    ) -> None:
        query, key, value = heads
        size = query.shape[-1]
        check(query.dtype in HALVES, "FlashAttention only support fp16 and bf16 data type")
        check(size % 8 == 0 and size <= LARGEST_FLASH_HEAD, f"head size {size}")
        check(query.shape[1] % key.shape[1] == 0, "key-value heads must divide the query's")
        check(key.shape == value.shape and key.shape[2] == size, "shapes of key and value")
        for each in heads:
            check(each.dim() == 3, "only texts one after another, [S, ., d], are emulated")
            check(each.dtype == query.dtype, "query, key and value must have the same dtype")
            check(each.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        self.places: list[list[slice]] = []
        for ends, tokens, most in zip(bounds, (query, key), longest, strict=True):
            check(ends is not None, "only texts one after another, [S, ., d], are emulated")
            assert ends is not None
            check(ends.dtype is torch.int32, "cu_seqlens must have dtype int32")
            check(ends.is_contiguous(), "cu_seqlens must be contiguous")
            places = [slice(*each) for each in pairwise(ends.tolist())]
            if tokens is key and used is not None:
                # Of each text, from where it begins; where it ends is not read.
                check(used.dtype is torch.int32, "seqused_k must have dtype int32")
                check(used.is_contiguous(), "seqused_k must be contiguous")
                check(used.shape == (len(places),), "seqused_k: one number for each text")
                counts = zip(places, used.tolist(), strict=True)
                places = [slice(each.start, each.start + count) for each, count in counts]
            check(max(each.stop for each in places) <= len(tokens), "a text ends behind the tokens")
            longest_text = max(each.stop - each.start for each in places)
            check(longest_text <= most, "a text is longer than max_seqlen")
            self.places.append(places)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        return iter(zip(*self.places, strict=True))


def _window(is_causal: bool, options: dict[str, Any]) -> tuple[int, int]:
    """Keys to the left and to the right that a query sees; -1 for all."""
    unknown = {name for name, value in options.items() if value is not None} - {
        "scale", "window_size_left", "window_size_right",
    }  # fmt: skip
    check(not unknown, f"not emulated: {sorted(unknown)}")
    sides = [options.get(f"window_size_{side}") for side in ("left", "right")]
    left, right = (-1 if size is None else size for size in sides)
    return left, 0 if is_causal else right


def _text_scores(
    query: Tensor, key: Tensor, window: tuple[int, int], scale: float | None
) -> Tensor:
    """[Q, M, N] float32; the last query stands at the last key."""
    scores = query.transpose(0, 1).float() @ _spread(key, query).mT * _scale(query, scale)
    places = torch.arange(len(query)).unsqueeze(1) + len(key) - len(query)
    ahead = torch.arange(len(key)) - places
    left, right = window
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    return scores.masked_fill(hidden, float("-inf"))


def _spread(states: Tensor, query: Tensor) -> Tensor:
    """[Q, N, d] float32 of [N, K, d]: each head of a group sees its group's."""
    group = query.shape[1] // states.shape[1]
    return states.transpose(0, 1).float().repeat_interleave(group, 0)


def product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`mm` that is not rounded to the dtype of its operands."""
    check(left.dtype == right.dtype, "input dtypes must be the same")
    wider = out_dtype is torch.float32 and left.dtype in HALVES
    check(wider or out_dtype == left.dtype, "out_dtype must be the input dtype, or fp32 of halves")
    return left.to(out_dtype) @ right.to(out_dtype)


def rms_norm(states: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normed states, and what each row [..., 1] was scaled by."""
    check(shape == [states.shape[-1]], "norms of more than one dimension are not emulated")
    check(states.dtype == weight.dtype, "states and weight must have the same dtype")
    scale = (states.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (states.float() * scale * weight.float()).to(states.dtype), scale


def rms_norm_backward(
    grad: Tensor,
    states: Tensor,
    shape: list[int],
    scale: Tensor,
    weight: Tensor,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of states and weight."""
    check(grad.dtype == states.dtype == weight.dtype, "all must have the same dtype")
    check(scale.dtype is torch.float32, "the scale must be float32")
    normed, weighed = states.float() * scale, grad.float() * weight.float()
    d_states = scale * (weighed - normed * (weighed * normed).mean(-1, keepdim=True))
    d_weight = (grad.float() * normed).flatten(0, -2).sum(0)
    found = (d_states.to(states.dtype), d_weight.to(weight.dtype))
    return found[0] if wanted[0] else None, found[1] if wanted[1] else None


def histogram(numbers: Tensor, bins: int = 100, least: float = 0, most: float = 0) -> Tensor:
    """`histc`, of integers too."""
    return torch.histc(numbers.float(), bins, least, most).to(numbers.dtype)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
    aten._scaled_dot_product_flash_attention.default: flash_of_heads,
    aten._scaled_dot_product_flash_attention_backward.default: flash_of_heads_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
    aten._flash_attention_forward.default: flash_attention,
    aten._flash_attention_backward.default: flash_attention_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten.histc.default: histogram,
    aten.mm.dtype: product,
}


def without_numbers(func: Any) -> Callable[..., Any]:
    """The kernel of an operation on tensors that have shapes alone; what the host reads is 0."""
    return SHAPES.get(func, func)


def _copied_down(given: Tensor, *args: Any, **options: Any) -> Tensor:
    if given.is_meta and options.get("device") == torch.device("cpu"):
        return torch.zeros_like(given, dtype=options.get("dtype"), device="cpu")
    return aten._to_copy.default(given, *args, **options)


def _copied_into(into: Tensor, given: Tensor, *args: Any) -> Tensor:
    return into.zero_() if given.is_meta and not into.is_meta else into.copy_(given, *args)


SHAPES: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
    aten._to_copy.default: _copied_down,
    aten.copy_.default: _copied_into,
    aten._local_scalar_dense.default: lambda given: torch.zeros((), dtype=given.dtype).item(),
    aten.equal.default: lambda *_args: True,
    aten.mm.dtype: product,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
}
OF_CUDA_ALONE = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
"""Kernels that PyTorch composes of others where a device is not known to have them."""
