"""Kernels of attention for any architecture, never with a tensor of tokens by tokens.

Grouped heads are never copied: the queries of those that share keys are rows of one head.

`SlotTexts` is PyTorch's flash kernel over texts in the slots of a cache, whose lengths the device
alone knows: tensors tell where a text begins and how many of its slots hold tokens. So no pass
needs a mask for slots that are not written yet, a captured one neither, and keys are read where
they lie. Source: PyTorch, `flash_attn/flash_api.cpp`, `mha_varlen_fwd`; it has `seqused_k` since
2.7.

Letters: B texts, n queries of one, the last of P pending tokens, m keys or slots, Q heads, K
key-value heads, d head size.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from heads.layers.documents import fits_flash

CHUNK_BYTES = 64 << 20  # of float32 scores
LONGEST_CHUNK = 256
MASK_MULTIPLE = 16  # numbers of a row


def choose_kernels(device: torch.device) -> None:
    """Chooses how this process attends from now on, where a target lies on a GPU: not by cuDNN.

    On GPUs of capability 9 and 10 PyTorch takes cuDNN's attention first, which makes a plan for
    each new shape (up to half a second), and here lengths are new in nearly every call.
    Source: PyTorch, `sdp_utils.cpp`, `check_prefer_cudnn_attention`; `cudnn/MHA.cpp`.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def kernel_notice(device: torch.device) -> list[str]:
    """The lines that a command prints of `choose_kernels` at its start."""
    if device.type != "cuda":
        return []
    return ["attention on cuda: PyTorch's flash and memory-efficient kernels, cuDNN's is off"]


class Scores(NamedTuple):
    """The scores of a layer: of which keys, and by what rule.

    Attributes:
        window: tokens that a query sees, its own included; None for all before it.
        scale: of the scores; None for 1 / sqrt(d).
        cap: scores become cap * tanh(score / cap); None leaves them.
        sinks: [Q], the score per head of a key that has no value; None for no such key.
    """

    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True where softmax over the scores is all there is."""
        return self.cap is None and self.sinks is None


def causal(
    query: Tensor, keys: Tensor, values: Tensor, scores: Scores, chunk: int | None = None
) -> Tensor:
    """Attention [B, Q, n, d] of the last n of m tokens, each of which sees those before and itself.

    Args:
        query: [B, Q, n, d].
        keys: [B, K, m, d].
        values: [B, K, m, d], or another size than d, which the result then has.
        scores: of the layer.
        chunk: tokens of a chunk, if nothing before its own is seen.
    """
    num_texts, num_heads, num_queries = query.shape[:3]
    length = keys.shape[2]
    window = min(scores.window or length, length)
    everything = window == length and (chunk or length) >= length
    if everything and scores.plain and query.shape[-1] == values.shape[-1]:
        if num_queries == length:
            return _whole(query, keys, values, scores)
        if query.device.type == "cpu" and not torch.is_grad_enabled():
            return _joined(query, keys, values, scores)
    rows = max(1, min(LONGEST_CHUNK, CHUNK_BYTES // (4 * num_texts * num_heads * window)))
    parts = []
    for start in range(length - num_queries, length, rows):
        end, first = min(start + rows, length), max(0, start - window + 1)
        if chunk is not None:
            first = max(first, start // chunk * chunk)
        mask = _mask(range(start, end), range(first, end), window, chunk or length, query.device)
        own = query[:, :, start - length + num_queries : end - length + num_queries]
        seen = keys[:, :, first:end], values[:, :, first:end]
        parts.append(_by_mask(own, *seen, mask, scores))
    return torch.cat(parts, dim=2)


def masked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Attention of queries that each see some keys, or all; shapes are those of `causal`.

    The mask is [B or 1, 1, Q / K * n, m] additive, as `folded_mask` makes it; None sees all.
    """
    rows = _folded(query, keys)
    if scores.plain:
        output = scaled_dot_product_attention(rows, keys, values, mask, scale=scores.scale)
    else:
        output = _scored(rows, keys, values, mask, scores)
    return output.reshape(*query.shape[:3], -1)


def folded_mask(allowed: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The mask that `masked` takes, of [B or 1, n, m] bool: where a query may look."""
    num_rows, num_queries, num_keys = allowed.shape
    # Made at once in its full size: behind a long text a copy would be most of a pass's memory.
    # A row that does not begin where CUDA's kernel may read it is copied in each layer.
    width = num_keys + (-num_keys % MASK_MULTIPLE if allowed.is_cuda else 0)
    size = (num_rows, 1, groups, num_queries, width)
    mask = torch.full(size, torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
    mask = mask[..., :num_keys]
    return mask.masked_fill_(allowed[:, None, None], 0).flatten(2, 3)


def _folded(query: Tensor, keys: Tensor) -> Tensor:
    """[B, K, Q / K * n, d], the queries of the heads that share keys behind each other."""
    return query.reshape(len(query), keys.shape[1], -1, query.shape[3])


def _joined(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """Causal attention of the last n of m tokens: to those before, and to themselves."""
    start = keys.shape[2] - query.shape[2]
    flash: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows = _folded(query, keys)
    before, norm = flash(rows, keys[:, :, :start], values[:, :, :start], scale=scores.scale)
    groups = query.shape[1] // keys.shape[1]
    own = (states[:, :, start:].repeat_interleave(groups, 1) for states in (keys, values))
    behind, own_norm = flash(query, *own, is_causal=True, scale=scores.scale)
    share = torch.sigmoid(norm.reshape_as(own_norm) - own_norm).unsqueeze(-1).to(behind.dtype)
    return torch.lerp(behind, before.reshape_as(behind), share)


def _mask(queries: range, keys: range, window: int, chunk: int, device: torch.device) -> Tensor:
    """[n, m] bool, whom each query sees."""
    at = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key_at = torch.arange(keys.start, keys.stop, device=device)
    distance, same = at - key_at, at // chunk == key_at // chunk
    return (distance >= 0) & (distance < window) & same


def _by_mask(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """`masked` for a part of the queries, by a mask [n, m] bool."""

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups = query.shape[1] // keys.shape[1]
        return masked(query, keys, values, folded_mask(mask[None], groups, query.dtype), scores)

    if scores.plain or not torch.is_grad_enabled():
        return run(query, keys, values)
    # Kept for a gradient, the scores of all parts together would be tokens by tokens.
    output: Any = checkpoint(
        run, query, keys, values, use_reentrant=False, preserve_rng_state=False
    )
    return output


def _whole(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """Causal attention of as many queries as keys, by PyTorch's own kernels."""
    groups = query.shape[1] // keys.shape[1]
    if query.is_cuda and groups > 1:
        # There grouped heads in float32 have no kernel that writes no scores.
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        groups = 1
    return scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scores.scale, enable_gqa=groups > 1
    )


def _scored(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """`masked` for folded queries with soft caps and sinks, as transformers computes them."""
    logits = rows @ keys.mT
    logits = logits * (rows.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.cap is not None:
        logits = torch.tanh(logits / scores.cap) * scores.cap
    if mask is not None:
        logits = logits + mask
    if scores.sinks is not None:
        groups = scores.sinks.shape[0] // keys.shape[1]
        sinks = scores.sinks.to(logits.dtype).view(1, -1, groups, 1)
        sinks = sinks.expand(len(logits), -1, -1, logits.shape[2] // groups).flatten(2)
        logits = torch.cat([logits, sinks.unsqueeze(-1)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32).to(rows.dtype)[..., : keys.shape[2]]
    return weights @ values


def fits_slots(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> bool:
    """True where the kernel takes queries [B, Q, n, d] and texts [B, K, m, d] as they lie."""
    same = query.shape[-1] == values.shape[-1]
    if scores.cap is not None or not (same and fits_flash(query)):
        return False
    text, _, row, number = keys.stride()
    return number == 1 and text % row == 0 and keys.stride() == values.stride()


class SlotTexts:
    """Texts of a batch and what is pending behind them, for the layers on one device.

    Args:
        committed: [B] int64, tokens of each.
        num_pending: P.
        mask: [B or 1, n, P] bool, the pending tokens that each new one sees; None for those before
            it, and itself.
    """

    def __init__(self, committed: Tensor, num_pending: int, mask: Tensor | None) -> None:
        self.committed, self.num_pending, self.mask = committed, num_pending, mask
        self._used: dict[int, Tensor] = {}
        self._begins: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}

    def in_order(
        self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, window: int | None
    ) -> Tensor:
        """Attention [B, n, Q, d] of queries [B, Q, n, d] that see all slots before them.

        A token alone is to the kernel as many of one head as share its keys, and keys are divided
        among blocks. Keys and values are [B, K, m, d]; a window counts the query's own token.
        """
        text, used = (keys, values), self._seen(self.num_pending)
        left = -1 if window is None else window - 1
        output, norm = self._flash(query.transpose(1, 2), text, used, scores.scale, (True, left))
        if scores.sinks is None:
            return output
        return _sunk(output, norm.t().unflatten(0, output.shape[:2]), scores.sinks)

    def joined(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Attention of draft tokens to all that is committed, and to pending tokens by the mask.

        Over the text draft tokens are heads of one token, so that keys are divided among blocks.
        Arguments and result are those of `in_order`.
        """
        rows = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
        heads, text = rows.flatten(1, 2).unsqueeze(1), (keys, values)
        before, norm = self._flash(heads, text, self._seen(0), scores.scale)
        own, own_norm = self._own(rows, text, scores.scale)
        norm = norm.t().unflatten(1, rows.shape[1:3])
        share = torch.sigmoid(norm - own_norm).unsqueeze(-1).to(own.dtype)
        output = torch.lerp(own, before.view_as(rows), share)
        if scores.sinks is not None:
            sinks = scores.sinks.view(keys.shape[1], -1, 1).expand(-1, -1, query.shape[2])
            output = _sunk(output, torch.logaddexp(norm, own_norm), sinks.flatten(1))
        return output.reshape(query.shape).transpose(1, 2)

    def _flash(
        self, query: Tensor, text: tuple[Tensor, Tensor], used: Tensor, scale: float | None,
        causal: tuple[bool, int] = (False, -1),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output [B, n, Q, d] of queries [B, n, Q, d], and logsumexp [Q, B * n].

        `causal` is whether they are, and how far they see to the left.
        """
        num_texts, num_queries = query.shape[:2]
        begins = self._begin(num_queries), self._begin(_step(text[0]))
        output, log_norm, *_ = torch.ops.aten._flash_attention_forward(
            query.flatten(0, 1), *map(_rows, text), *begins, num_queries, text[0].shape[2],
            0.0, causal[0], False,
            # To the right nobody sees: told so here, the kernel would not divide keys.
            scale=scale, window_size_left=causal[1], window_size_right=-1, seqused_k=used,
        )  # fmt: skip
        return output.unflatten(0, (num_texts, num_queries)), log_norm

    def _own(
        self, rows: Tensor, text: tuple[Tensor, Tensor], scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output of rows [B, K, Q / K * n, d] over pending tokens, logsumexp [B, K, Q / K * n]."""
        num_texts, num_heads, num_rows, _ = rows.shape
        keys, values = (states[self._places].transpose(1, 2) for states in text)
        output, log_norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            rows, keys, values, self._bias(rows).expand(num_texts, num_heads, -1, -1), True,
            scale=scale,
        )  # fmt: skip
        return output, log_norm[..., :num_rows]

    @cached_property
    def _places(self) -> tuple[Tensor, slice, Tensor]:
        """The index of pending tokens in [B, K, m, d]."""
        device = self.committed.device
        pending = torch.arange(self.num_pending, device=device)
        texts = torch.arange(len(self.committed), device=device).unsqueeze(1)
        return texts, slice(None), self.committed.unsqueeze(1) + pending

    def _bias(self, rows: Tensor) -> Tensor:
        """[B or 1, 1, Q / K * n, P] of the mask."""
        assert self.mask is not None
        groups = rows.shape[2] // self.mask.shape[1]
        if groups not in self._biases:
            self._biases[groups] = folded_mask(self.mask, groups, rows.dtype)
        return self._biases[groups]

    def _seen(self, num_pending: int) -> Tensor:
        """[B] int32, slots with tokens, so many pending ones among them."""
        if num_pending not in self._used:
            self._used[num_pending] = (self.committed + num_pending).int()
        return self._used[num_pending]

    def _begin(self, step: int) -> Tensor:
        """[B + 1] int32, where texts begin that are so many rows apart."""
        if step not in self._begins:
            end, device = step * (len(self.committed) + 1), self.committed.device
            self._begins[step] = torch.arange(0, end, step, dtype=torch.int32, device=device)
        return self._begins[step]


def _sunk(output: Tensor, log_norm: Tensor, sinks: Tensor) -> Tensor:
    """Output [..., d] with a key more under its softmax, without a value and of scores `sinks`."""
    return output * torch.sigmoid(log_norm - sinks).unsqueeze(-1).to(output.dtype)


def _step(states: Tensor) -> int:
    """Rows of `_rows` from a text to the next; of one text any number will do."""
    return states.stride(0) // states.stride(2) if len(states) > 1 else 1


def _rows(states: Tensor) -> Tensor:
    """[., K, d] of texts [B, K, m, d]: a row for each slot of the first, and so on to the last."""
    num_texts, num_heads, num_slots, size = states.shape
    rows = (num_texts - 1) * _step(states) + num_slots
    return states.as_strided((rows, num_heads, size), (states.stride(2), states.stride(1), 1))
