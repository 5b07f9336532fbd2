"""Attention kernels for any architecture, without a tensor of tokens by tokens.

Grouped heads are not copied: the queries of heads that share keys become rows of one head.

`SlotTexts` uses PyTorch's flash kernel over texts in cache slots whose lengths only the device
knows: tensors give the start of each text and its number of used slots. No pass then needs a mask
for unused slots, captured graphs included, and keys are read in place. Source: PyTorch,
`flash_attn/flash_api.cpp`, `mha_varlen_fwd`; `seqused_k` exists since 2.7.

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

from heads.layers.documents import can_use_flash

CHUNK_BYTES = 64 << 20  # of float32 scores
LONGEST_CHUNK = 256
MASK_MULTIPLE = 16  # numbers of a row


def choose_kernels(device: torch.device) -> None:
    """Choose the attention kernels of this process for a target on a GPU: all but cuDNN's.

    On GPUs of capability 9 and 10 PyTorch prefers cuDNN's attention, which plans each new shape (up
    to half a second), and lengths here are new in nearly every call. Source: PyTorch,
    `sdp_utils.cpp`, `check_prefer_cudnn_attention`; `cudnn/MHA.cpp`.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def kernel_notice(device: torch.device) -> list[str]:
    """Format lines about `choose_kernels` to print at the start of a command."""
    if device.type != "cuda":
        return []
    return ["attention on cuda: PyTorch's flash and memory-efficient kernels, cuDNN's is off"]


class ScoreRule(NamedTuple):
    """Rule by which a layer turns scores into weights.

    Attributes:
        window: tokens that a query sees, its own included; None for all before it.
        scale: factor of the scores; None for 1 / sqrt(d).
        cap: soft cap: scores become cap * tanh(score / cap); None for none.
        sinks: [Q] score per head of a key without value; None for no such key.
    """

    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Tell whether softmax over the scores suffices."""
        return self.cap is None and self.sinks is None


def causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, scores: ScoreRule, chunk: int | None = None
) -> Tensor:
    """Attend causally from the last n of m tokens to all m; [B, Q, n, d].

    Args:
        query: [B, Q, n, d].
        keys: [B, K, m, d].
        values: [B, K, m, d], or of another size than d, which the result then has.
        scores: rule of the layer.
        chunk: tokens per chunk, if earlier chunks are hidden.
    """
    num_texts, num_heads, num_queries = query.shape[:3]
    length = keys.shape[2]
    window = min(scores.window or length, length)
    everything = window == length and (chunk or length) >= length
    if everything and scores.is_plain and query.shape[-1] == values.shape[-1]:
        if num_queries == length:
            return _attend_causal(query, keys, values, scores)
        if query.device.type == "cpu" and not torch.is_grad_enabled():
            return _attend_continued(query, keys, values, scores)
    rows = max(1, min(LONGEST_CHUNK, CHUNK_BYTES // (4 * num_texts * num_heads * window)))
    parts = []
    for start in range(length - num_queries, length, rows):
        end, first = min(start + rows, length), max(0, start - window + 1)
        if chunk is not None:
            first = max(first, start // chunk * chunk)
        mask = _build_mask(
            range(start, end), range(first, end), window, chunk or length, query.device
        )
        own = query[:, :, start - length + num_queries : end - length + num_queries]
        seen = keys[:, :, first:end], values[:, :, first:end]
        parts.append(_attend_masked(own, *seen, mask, scores))
    return torch.cat(parts, dim=2)


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: ScoreRule
) -> Tensor:
    """Attend from queries to all keys, or to those that a mask shows; [B, Q, n, d].

    Args:
        query: [B, Q, n, d].
        keys: [B, K, m, d].
        values: [B, K, m, d], or of another size than d, which the result then has.
        mask: [B or 1, 1, Q / K * n, m], additive, as from `build_folded_mask`; None shows all keys.
        scores: rule of the layer.
    """
    rows = _fold_queries(query, keys)
    if scores.is_plain:
        output = scaled_dot_product_attention(rows, keys, values, mask, scale=scores.scale)
    else:
        output = _attend_with_scores(rows, keys, values, mask, scores)
    return output.reshape(*query.shape[:3], -1)


def build_folded_mask(allowed: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Build the additive mask [B or 1, 1, Q / K * n, m] of `masked_attention`.

    Args:
        allowed: [B or 1, n, m] bool, keys that each query sees.
        groups: number Q / K of heads that share keys.
        dtype: dtype of the mask.
    """
    num_rows, num_queries, num_keys = allowed.shape
    # Allocated in full size at once: a copy would take most of a pass's memory for a long text.
    # Rows not aligned for CUDA's kernel would be copied in each layer.
    width = num_keys + (-num_keys % MASK_MULTIPLE if allowed.is_cuda else 0)
    size = (num_rows, 1, groups, num_queries, width)
    mask = torch.full(size, torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
    mask = mask[..., :num_keys]
    return mask.masked_fill_(allowed[:, None, None], 0).flatten(2, 3)


def _fold_queries(query: Tensor, keys: Tensor) -> Tensor:
    """Concatenate the queries of heads that share keys: [B, K, Q / K * n, d]."""
    return query.reshape(len(query), keys.shape[1], -1, query.shape[3])


def _attend_continued(query: Tensor, keys: Tensor, values: Tensor, scores: ScoreRule) -> Tensor:
    """Attend causally from the last n of m tokens to earlier tokens and to themselves."""
    start = keys.shape[2] - query.shape[2]
    flash: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows = _fold_queries(query, keys)
    before, norm = flash(rows, keys[:, :, :start], values[:, :, :start], scale=scores.scale)
    groups = query.shape[1] // keys.shape[1]
    own = (states[:, :, start:].repeat_interleave(groups, 1) for states in (keys, values))
    behind, own_norm = flash(query, *own, is_causal=True, scale=scores.scale)
    share = torch.sigmoid(norm.reshape_as(own_norm) - own_norm).unsqueeze(-1).to(behind.dtype)
    return torch.lerp(behind, before.reshape_as(behind), share)


def _build_mask(
    queries: range, keys: range, window: int, chunk: int, device: torch.device
) -> Tensor:
    """Build a mask [n, m] bool of the tokens that each query sees."""
    query_places = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key_places = torch.arange(keys.start, keys.stop, device=device)
    distance, same = query_places - key_places, query_places // chunk == key_places // chunk
    return (distance >= 0) & (distance < window) & same


def _attend_masked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: ScoreRule
) -> Tensor:
    """Attend from some queries with a mask [n, m] bool; trained passes recompute the scores."""

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups = query.shape[1] // keys.shape[1]
        return masked_attention(
            query, keys, values, build_folded_mask(mask[None], groups, query.dtype), scores
        )

    if scores.is_plain or not torch.is_grad_enabled():
        return run(query, keys, values)
    # The scores of all parts, kept for gradients, would be tokens by tokens.
    output: Any = checkpoint(
        run, query, keys, values, use_reentrant=False, preserve_rng_state=False
    )
    return output


def _attend_causal(query: Tensor, keys: Tensor, values: Tensor, scores: ScoreRule) -> Tensor:
    """Attend causally with as many queries as keys, by PyTorch's own kernels."""
    groups = query.shape[1] // keys.shape[1]
    if query.is_cuda and groups > 1:
        # On CUDA, grouped float32 heads have no kernel that avoids writing scores.
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        groups = 1
    return scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scores.scale, enable_gqa=groups > 1
    )


def _attend_with_scores(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: ScoreRule
) -> Tensor:
    """Attend from folded queries with soft caps and sinks, computed as in transformers."""
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


def fits_slots(query: Tensor, keys: Tensor, values: Tensor, scores: ScoreRule) -> bool:
    """Tell whether the kernel supports queries [B, Q, n, d] and texts [B, K, m, d] in place."""
    same_size = query.shape[-1] == values.shape[-1]
    if scores.cap is not None or not (same_size and can_use_flash(query)):
        return False
    text, _, row, number = keys.stride()
    return number == 1 and text % row == 0 and keys.stride() == values.stride()


class SlotTexts:
    """Texts of a batch with their pending tokens, for the layers on one device.

    Args:
        committed: [B] int64 committed tokens per text.
        num_pending: number P of pending tokens.
        mask: [B or 1, n, P] bool, pending tokens that each new one sees; None for those before it
            and itself.
    """

    def __init__(self, committed: Tensor, num_pending: int, mask: Tensor | None) -> None:
        self.committed, self.num_pending, self.mask = committed, num_pending, mask
        self._used: dict[int, Tensor] = {}
        self._begins: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}

    def attend_in_order(
        self, query: Tensor, keys: Tensor, values: Tensor, scores: ScoreRule, window: int | None
    ) -> Tensor:
        """Attend from queries [B, Q, n, d] to all earlier slots; [B, n, Q, d].

        The kernel sees a single token as one head with several queries, because it then divides the
        keys among its blocks.

        Args:
            query: [B, Q, n, d].
            keys: [B, K, m, d].
            values: [B, K, m, d].
            scores: rule of the layer.
            window: tokens that a query sees, its own included; None for all before it.
        """
        text, used = (keys, values), self._count_used_slots(self.num_pending)
        left = -1 if window is None else window - 1
        output, norm = self._run_flash(
            query.transpose(1, 2), text, used, scores.scale, (True, left)
        )
        if scores.sinks is None:
            return output
        return _apply_sinks(output, norm.t().unflatten(0, output.shape[:2]), scores.sinks)

    def attend_tree(self, query: Tensor, keys: Tensor, values: Tensor, scores: ScoreRule) -> Tensor:
        """Attend from draft tokens to all committed tokens, and to pending ones by the mask.

        The kernel sees the draft tokens of a text as further heads of one token, because it then
        divides the keys among its blocks. Arguments and result as in `attend_in_order`.
        """
        rows = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
        heads, text = rows.flatten(1, 2).unsqueeze(1), (keys, values)
        before, norm = self._run_flash(heads, text, self._count_used_slots(0), scores.scale)
        own, own_norm = self._attend_pending(rows, text, scores.scale)
        norm = norm.t().unflatten(1, rows.shape[1:3])
        share = torch.sigmoid(norm - own_norm).unsqueeze(-1).to(own.dtype)
        output = torch.lerp(own, before.view_as(rows), share)
        if scores.sinks is not None:
            sinks = scores.sinks.view(keys.shape[1], -1, 1).expand(-1, -1, query.shape[2])
            output = _apply_sinks(output, torch.logaddexp(norm, own_norm), sinks.flatten(1))
        return output.reshape(query.shape).transpose(1, 2)

    def _run_flash(
        self, query: Tensor, text: tuple[Tensor, Tensor], used: Tensor, scale: float | None,
        causal: tuple[bool, int] = (False, -1),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the flash kernel from queries [B, n, Q, d] to used slots.

        Args:
            query: [B, n, Q, d].
            text: keys and values [B, K, m, d].
            used: [B] int32 number of used slots.
            scale: factor of the scores; None for 1 / sqrt(d).
            causal: whether the queries are causal, and how many tokens they see to the left; -1 for
                all.

        Returns:
            Output [B, n, Q, d] and logsumexp [Q, B * n].
        """
        num_texts, num_queries = query.shape[:2]
        begins = (
            self._get_text_starts(num_queries),
            self._get_text_starts(_compute_row_stride(text[0])),
        )
        output, log_norm, *_ = torch.ops.aten._flash_attention_forward(
            query.flatten(0, 1), *map(_view_rows, text), *begins, num_queries, text[0].shape[2],
            0.0, causal[0], False,
            # Unbounded on the right; with a bound, the kernel would not divide keys.
            scale=scale, window_size_left=causal[1], window_size_right=-1, seqused_k=used,
        )  # fmt: skip
        return output.unflatten(0, (num_texts, num_queries)), log_norm

    def _attend_pending(
        self, rows: Tensor, text: tuple[Tensor, Tensor], scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend from rows to pending tokens; return output [B, K, Q / K * n, d] and logsumexp."""
        num_texts, num_heads, num_rows, _ = rows.shape
        keys, values = (states[self._pending_index].transpose(1, 2) for states in text)
        output, log_norm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            rows, keys, values, self._get_bias(rows).expand(num_texts, num_heads, -1, -1), True,
            scale=scale,
        )  # fmt: skip
        return output, log_norm[..., :num_rows]

    @cached_property
    def _pending_index(self) -> tuple[Tensor, slice, Tensor]:
        """Return the index of pending tokens in [B, K, m, d]."""
        device = self.committed.device
        pending = torch.arange(self.num_pending, device=device)
        texts = torch.arange(len(self.committed), device=device).unsqueeze(1)
        return texts, slice(None), self.committed.unsqueeze(1) + pending

    def _get_bias(self, rows: Tensor) -> Tensor:
        """Get the bias [B or 1, 1, Q / K * n, P] of the mask, built once."""
        assert self.mask is not None
        groups = rows.shape[2] // self.mask.shape[1]
        if groups not in self._biases:
            self._biases[groups] = build_folded_mask(self.mask, groups, rows.dtype)
        return self._biases[groups]

    def _count_used_slots(self, num_pending: int) -> Tensor:
        """Count used slots [B] int32, with `num_pending` pending ones; computed once."""
        if num_pending not in self._used:
            self._used[num_pending] = (self.committed + num_pending).int()
        return self._used[num_pending]

    def _get_text_starts(self, step: int) -> Tensor:
        """Get the starts [B + 1] int32 of texts that are `step` rows apart; computed once."""
        if step not in self._begins:
            end, device = step * (len(self.committed) + 1), self.committed.device
            self._begins[step] = torch.arange(0, end, step, dtype=torch.int32, device=device)
        return self._begins[step]


def _apply_sinks(output: Tensor, log_norm: Tensor, sinks: Tensor) -> Tensor:
    """Add to the softmax of an output [..., d] a key without value, with scores `sinks`."""
    return output * torch.sigmoid(log_norm - sinks).unsqueeze(-1).to(output.dtype)


def _compute_row_stride(states: Tensor) -> int:
    """Count the rows of `_view_rows` from one text to the next; arbitrary for a single text."""
    return states.stride(0) // states.stride(2) if len(states) > 1 else 1


def _view_rows(states: Tensor) -> Tensor:
    """View texts [B, K, m, d] as [., K, d], with one row per slot from the first to the last."""
    num_texts, num_heads, num_slots, size = states.shape
    rows = (num_texts - 1) * _compute_row_stride(states) + num_slots
    return states.as_strided((rows, num_heads, size), (states.stride(2), states.stride(1), 1))
