"""Attention without masks: each attention layer asks the open pass which tokens it sees.

While a pass is open, every attention layer of a model calls `attend`, which asks the pass. A
`DocumentPass` reads packed documents: on a GPU with one call of PyTorch's flash kernel; otherwise,
and for features that the kernel lacks, document by document. A `CachedPass` runs draft trees and
certain tokens after the tokens in a cache.

Letters: B sequences or texts, T tokens of one, S tokens of all documents or slots of a cache, n new
tokens or queries, the last of P pending ones, Q heads, K key-value heads, d head size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

from heads.decoding.cache import TreeCache
from heads.layers.documents import (
    Documents,
    can_use_flash,
    flash_attention,
    flash_attention_backward,
)
from heads.target_model.architecture import restrict_visibility
from heads.target_model.kernels import (
    ScoreRule,
    SlotTexts,
    build_folded_mask,
    causal_attention,
    fits_slots,
    masked_attention,
)

ATTENTION_NAME = "documents"
FLASH = "PyTorch's flash kernel for documents"
FUSED = "scaled_dot_product_attention, document by document"
PLAIN = "plain torch in chunks of documents, for its soft caps or sinks"
LONG = 1024
"""Slots above which draft tokens attend to the text separately, with a few more launches per
layer."""

# Arguments of attention layers that `attend` may ignore, as targets are in eval mode.
WITHOUT_EFFECT = {"position_ids", "cache_position", "dropout", "use_cache"}


class AttentionPass(Protocol):
    """Pass of a model whose attention layers need no mask.

    Attributes:
        config: config of the model; None leaves attention to masks.
    """

    config: Any

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Attend in a layer from queries [B, Q, n, d] to all keys and values; [B, n, Q, d]."""
        ...


_RUNNING: ContextVar[AttentionPass | None] = ContextVar("running", default=None)
_TRACED: list[AttentionPass] = []


def current_pass() -> AttentionPass | None:
    """Return the open pass, if any."""
    if _TRACED:
        return _TRACED[-1]
    return None if torch.compiler.is_compiling() else _RUNNING.get()


@contextmanager
def open_attention_pass(attention_pass: AttentionPass) -> Iterator[None]:
    """Let layers use a pass inside this context, and let their model build no mask."""
    token = _RUNNING.set(attention_pass)
    try:
        with pause_masks(attention_pass.config):
            yield
    finally:
        _RUNNING.reset(token)


@contextmanager
def pause_masks(config: Any) -> Iterator[None]:
    """Keep a model with this config from building masks inside this context; None does nothing."""
    if config is None:
        yield
        return
    usual = config._attn_implementation
    # transformers builds no mask for a name it does not know.
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


@contextmanager
def open_traced_pass(attention_pass: AttentionPass) -> Iterator[None]:
    """Open a pass inside compiled code, which has no ContextVars. See `pause_masks`."""
    _TRACED.append(attention_pass)
    try:
        yield
    finally:
        _TRACED.pop()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **features: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend in a layer by the open pass; return [B, T, Q, d], and no weights.

    Queries are [B, Q, T, d], keys and values [B, K, T, d]. Supported features are `scaling`,
    `sliding_window`, `softcap` and `s_aux`.

    Raises:
        NotImplementedError: a layer uses other features.
    """
    scores = ScoreRule(
        window=features.pop("sliding_window", None),
        scale=features.pop("scaling", None),
        cap=features.pop("softcap", None),
        sinks=features.pop("s_aux", None),
    )
    is_causal = features.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    unknown = [
        name
        for name, value in (("attention_mask", attention_mask), *features.items())
        if value is not None and value is not False and name not in WITHOUT_EFFECT
    ]
    if unknown or not is_causal:
        raise NotImplementedError(
            f"{type(module).__name__} attends with {sorted(unknown)}, is_causal={is_causal}"
        )
    now = current_pass()
    assert now is not None
    return now.attend(getattr(module, "layer_idx", None), query, key, value, scores), None


AttentionInterface.register(ATTENTION_NAME, attend)


class DocumentPass:
    """Pass over packed documents.

    Args:
        config: config of a model whose attention layers attend by documents; None leaves them to
            masks, so only recurrent layers go by documents.
        chunks: tokens per chunk, by the index of each chunked layer.

    Attributes:
        documents: documents of the tokens.
        calls: window and kernel of each attention layer that has attended, in order.
        runs: runs of documents per device, for recurrent layers (`recurrent.py`).
    """

    def __init__(
        self, documents: Documents, config: Any = None, chunks: Mapping[int, int] | None = None
    ) -> None:
        self.documents, self.config, self.chunks = documents, config, chunks or {}
        self.calls: list[tuple[int | None, str]] = []
        self.runs: dict[torch.device, Any] = {}
        self._placed: dict[tuple[torch.device, int | None], Documents] = {}

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Attend inside documents. See `AttentionPass`."""
        q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
        kernel = FUSED if scores.is_plain else PLAIN
        if scores.cap is None and q.shape[-1] == v.shape[-1] and can_use_flash(q):
            kernel = FLASH
        place = query.device, None if layer is None else self.chunks.get(layer)
        if place not in self._placed:  # chunks count as documents
            cut = self.documents.split_documents(place[1]) if place[1] else self.documents
            self._placed[place] = cut.to_device(query.device)
        documents = self._placed[place]
        self.calls.append((scores.window, kernel))
        if kernel is not FLASH:
            output = attend_by_document(q, k, v, documents, scores)
        elif scores.sinks is not None:
            output = SinkFlash.apply(documents, scores, q, k, v, scores.sinks)
        else:
            output, _ = flash_attention(q, k, v, documents, scores.window, scores.scale)
        return output.unflatten(0, (len(query), -1))


class SinkFlash(torch.autograd.Function):
    """`flash_attention` with a further key in every softmax, with a score per head and no value.

    With the key's score s, the logsumexp becomes M = log(exp(L) + exp(s)) and the output O exp(L -
    M). From these the kernel makes all gradients but that of s: -sum(exp(s - M) dO O).
    """

    @staticmethod
    def forward(ctx: Any, documents: Documents, scores: ScoreRule, *given: Tensor) -> Tensor:
        """Attend from query [S, Q, d] to keys and values [S, K, d] and sinks [Q]; [S, Q, d]."""
        query, keys, values, sinks = given
        output, log_norm = flash_attention(
            query, keys, values, documents, scores.window, scores.scale
        )
        whole = torch.logaddexp(log_norm, sinks.float().unsqueeze(1))
        share = (log_norm - whole).exp().t()
        output = (output * share.unsqueeze(-1)).to(output.dtype)
        ctx.save_for_backward(*given, output, whole)
        ctx.documents, ctx.scores = documents, scores
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs of `forward`."""
        *text, sinks, output, whole = ctx.saved_tensors
        window, scale = ctx.scores.window, ctx.scores.scale
        text_grads = flash_attention_backward(
            grad, text, (output, whole), ctx.documents, window, scale
        )
        inner = (grad.float() * output.float()).sum(-1).t()
        sink_grad = -((sinks.float().unsqueeze(1) - whole).exp() * inner).sum(1)
        return None, None, *text_grads, sink_grad.to(sinks.dtype)


def build_dense_mask(documents: Documents, num_sequences: int) -> Tensor:
    """Build a mask [B, T, T] bool of the tokens that each token sees, for models with masks."""
    bounds = documents.cu_seqlens
    numbers = torch.arange(len(documents.lengths), device=bounds.device)
    total = sum(documents.lengths)
    owners = numbers.repeat_interleave(bounds.diff(), output_size=total).view(num_sequences, -1)
    same = owners.unsqueeze(2) == owners.unsqueeze(1)
    return same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()


def attend_by_document(
    query: Tensor, keys: Tensor, values: Tensor, documents: Documents, scores: ScoreRule
) -> Tensor:
    """Attend causally inside documents, one after another.

    Args:
        query: [S, Q, d].
        keys: [S, K, d].
        values: [S, K, d], or of another size than d, which the result then has.
        documents: documents of the S tokens.
        scores: rule of the layer.
    """
    lengths = list(documents.lengths)
    rows = (heads.transpose(0, 1)[None].split(lengths, 2) for heads in (query, keys, values))
    parts = [causal_attention(q, k, v, scores) for q, k, v in zip(*rows, strict=True)]
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)


class CachedPass:
    """Pass over new tokens after a cache, for layers without transformers' masks.

    Certain tokens, in texts of equal committed length, need no mask at all.

    Args:
        config: config of the model.
        cache: cache whose `start_pass` has set where the new tokens go.
        num_new: number n of new tokens.
        draft: mask [B or 1, n, P] bool and depths [B or 1, P] int64 of draft tokens; None for
            certain tokens, which see the tokens before them.
        chunks: tokens per chunk, by the index of each chunked layer.
        in_order: whether draft tokens also see just the tokens before them.
    """

    def __init__(
        self,
        config: Any,
        cache: TreeCache,
        num_new: int,
        draft: tuple[Tensor, Tensor] | None,
        chunks: Mapping[int, int],
        in_order: bool = False,
    ) -> None:
        self.config, self.cache, self.num_new, self.chunks = config, cache, num_new, chunks
        self.slots = cache.slots
        self.in_order = in_order or draft is None
        self.mask: Tensor | None = None
        self.depths = torch.arange(num_new, device=self.slots.device).unsqueeze(0)
        if draft is not None:
            self.mask, self.depths = draft
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self._texts: dict[torch.device, SlotTexts] = {}
        self._near: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """Return the positions [B, n] int64 of the new tokens."""
        return self.slots.committed + self.depths[:, -self.num_new :]

    @property
    def key_positions(self) -> Tensor:
        """Return the positions [B, S] int64 of the tokens in the slots."""
        return self.slots.compute_positions(self.depths, self.cache.read_width)

    @property
    def allowed(self) -> Tensor:
        """Return which slots new tokens see, [B, n, S] bool."""
        mask = self.mask
        if mask is None:
            mask = (self.depths.mT >= self.depths).unsqueeze(0)
        return self.slots.attention_mask(mask, self.cache.read_width)

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Attend from new tokens to the slots of the cache. See `AttentionPass`.

        Keys and values are those of all slots.
        """
        chunk = None if layer is None else self.chunks.get(layer)
        # Compiled masks cost no launches, and every pass has the same slots.
        if chunk is None and not torch.compiler.is_compiling():
            output = self._attend_slots(query, key, value, scores)
            if output is not None:
                return output
            reach = (scores.window or self.cache.read_width) + self.depths.shape[1]
            if self.mask is not None and query.is_cuda and reach < self.cache.read_width:
                return self._attend_window(query, key, value, scores)
        if self.mask is None and isinstance(self.cache.write_slots, int):
            end = self.cache.write_slots + self.num_new
            return causal_attention(
                query, key[:, :, :end], value[:, :, :end], scores, chunk
            ).transpose(1, 2)
        mask_key = (scores.window, chunk, query.shape[1] // key.shape[1], query.device)
        if mask_key not in self._masks:
            self._masks[mask_key] = self._build_mask(*mask_key, query.dtype)
        return masked_attention(query, key, value, self._masks[mask_key], scores).transpose(1, 2)

    def _attend_slots(
        self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor | None:
        """Attend without a mask over the text; None if the kernel does not support the layer."""
        width, window = self.cache.read_width, scores.window
        window = None if window is None or window >= width else window
        alone = self.depths.shape[1] == 1
        apart = self.mask is not None and not alone and window is None and width > LONG
        if not (apart or self.in_order or alone) or not fits_slots(query, key, value, scores):
            return None
        if query.device not in self._texts:
            committed = self.slots.committed[:, 0].to(query.device)
            mask = None if self.mask is None else self.mask.to(query.device)
            self._texts[query.device] = SlotTexts(committed, self.depths.shape[1], mask)
        texts = self._texts[query.device]
        if apart:
            return texts.attend_tree(query, key, value, scores)
        return texts.attend_in_order(query, key, value, scores, window)

    def _attend_window(
        self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Attend from draft tokens of a sliding layer to the slots in reach."""
        near_key = (scores.window, query.shape[1] // key.shape[1], query.device)
        if near_key not in self._near:
            assert scores.window is not None
            self._near[near_key] = self._build_window_slots(
                scores.window, *near_key[1:], query.dtype
            )
        texts, slots, mask = self._near[near_key]
        key, value = (states[texts, :, slots].transpose(1, 2) for states in (key, value))
        return masked_attention(query, key, value, mask, scores).transpose(1, 2)

    def _build_window_slots(
        self, window: int, groups: int, device: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build texts [B, 1], slots [B, window - 1 + P] and their mask for `masked_attention`."""
        assert self.mask is not None
        committed, num_pending = self.slots.committed, self.depths.shape[1]
        places = torch.arange(1 - window, num_pending, device=self.slots.device)
        slots, depths = committed + places, self.depths[:, -self.num_new :].unsqueeze(2)
        before, behind = slots[:, : window - 1] >= 0, depths - self.depths.unsqueeze(1) < window
        text = before.unsqueeze(1) & (places[: window - 1] > depths - window)
        own = (self.mask & behind).expand(len(slots), -1, -1)
        mask = build_folded_mask(torch.cat([text, own], 2).to(device), groups, dtype)
        texts = torch.arange(len(slots), device=device).unsqueeze(1)
        return texts, slots.clamp_min(0).to(device), mask

    def _build_mask(
        self, window: int | None, chunk: int | None, groups: int, device: Any, dtype: torch.dtype
    ) -> Tensor | None:
        """Build the mask for `masked_attention`; None for a single token that sees everything."""
        full = (
            self.cache.has_shared_slots
            and self.slots.count_used_slots(self.depths.shape[1]) == self.cache.read_width
        )
        whole = full and window is None and chunk is None
        if whole and self.depths.shape[1] == 1:
            return None
        if whole and self.mask is not None:
            # With equal lengths, only pending tokens may be hidden.
            own = build_folded_mask(self.mask.to(device), groups, dtype)
            return pad(own, (self.cache.read_width - own.shape[3], 0))
        allowed = self.allowed
        if window is not None or chunk is not None:
            allowed = restrict_visibility(
                allowed, self.positions, self.key_positions, window, chunk
            )
        return build_folded_mask(allowed.to(device), groups, dtype)
