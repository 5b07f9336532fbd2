"""Attention inside documents, as a transformers model asks for it, without a mask.

While `reading` holds, every attention layer of a model calls `attend`. On a GPU that is one call
of PyTorch's flash kernel; elsewhere, and for what the kernel does not know, documents take their
turns, long ones in chunks of queries, so that no tensor is of tokens by tokens.

Letters: B sequences, T tokens of one, S = B * T tokens, n queries, m keys, Q heads, K key-value
heads, d head size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from heads.documents import Documents, fits_flash, flash

NAME = "documents"
FLASH = "PyTorch's flash kernel for documents"
FUSED = "scaled_dot_product_attention, document by document"
PLAIN = "plain torch in chunks of documents, for its soft caps or sinks"

CHUNK_BYTES = 64 << 20  # of float32 scores
LONGEST_CHUNK = 256

# What attention layers hand on beside the features that `attend` knows. Targets are in eval mode.
WITHOUT_EFFECT = {"position_ids", "cache_position", "dropout"}


class Reading:
    """A pass over documents.

    Args:
        config: of a model whose attention layers are to attend by documents; None leaves it to
            masks who sees whom, and recurrent layers alone go by documents.
        chunks: tokens of a chunk, by the number of a layer that sees no further.

    Attributes:
        documents: of its tokens.
        calls: window and kernel of each attention layer, in their order.
    """

    def __init__(
        self, documents: Documents, config: Any = None, chunks: Mapping[int, int] | None = None
    ) -> None:
        self.documents, self.config, self.chunks = documents, config, chunks or {}
        self.calls: list[tuple[int | None, str]] = []
        self._placed: dict[tuple[torch.device, int | None], Documents] = {}

    def on(self, device: torch.device, layer: int | None = None) -> Documents:
        """The documents for a layer on a device; a chunk is a document of its own."""
        chunk = None if layer is None else self.chunks.get(layer)
        if (device, chunk) not in self._placed:
            found = self.documents if chunk is None else self.documents.cut(chunk)
            self._placed[device, chunk] = found.on(device)
        return self._placed[device, chunk]


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)


def current() -> Reading | None:
    """The pass that is under way."""
    return _READING.get()


@contextmanager
def reading(found: Reading) -> Iterator[Reading]:
    """Inside, layers go by documents, and where attention does, no model builds a mask."""
    usual = getattr(found.config, "_attn_implementation", None)
    token = _READING.set(found)
    if found.config is not None:
        # A name for which transformers knows no mask makes it build none.
        found.config._attn_implementation = NAME
    try:
        yield found
    finally:
        if found.config is not None:
            found.config._attn_implementation = usual
        _READING.reset(token)


class Scores(NamedTuple):
    """How a layer scores keys, and which.

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
        """Whether softmax over them is all there is."""
        return self.cap is None and self.sinks is None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **features: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What an attention layer calls.

    Args:
        module: the layer.
        query: [B, Q, T, d].
        key: [B, K, T, d].
        value: [B, K, T, d].
        attention_mask: None.
        features: `scaling`, `sliding_window`, `softcap` and `s_aux`, and what has no effect.

    Returns:
        [B, T, Q, d], and no weights.

    Raises:
        NotImplementedError: a layer that wants more than this.
    """
    names = ("sliding_window", "scaling", "softcap", "s_aux")
    scores = Scores(*(features.pop(name, None) for name in names))
    _check_known(module, features | {"attention_mask": attention_mask})
    found = _READING.get()
    assert found is not None
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    kernel = _kernel(q, v, scores)
    documents = found.on(query.device, getattr(module, "layer_idx", None))
    found.calls.append((scores.window, kernel))
    if kernel is FLASH:
        output, log_norm = flash(q, k, v, documents, scores.window, scores.scale)
        if scores.sinks is not None:
            # A key more in the sum under every softmax.
            share = torch.sigmoid(log_norm.t() - scores.sinks)
            output = output * share.unsqueeze(-1).to(output.dtype)
    else:
        output = by_document(q, k, v, documents, scores)
    return output.unflatten(0, (len(query), -1)), None


AttentionInterface.register(NAME, attend)


def _check_known(module: Any, features: dict[str, Any]) -> None:
    causal = features.pop("is_causal", None)
    if causal is None:
        causal = getattr(module, "is_causal", True)
    unknown = {
        name
        for name, value in features.items()
        if name not in WITHOUT_EFFECT and value is not None and value is not False
    }
    if unknown or not causal:
        raise NotImplementedError(
            f"{type(module).__name__} attends with {sorted(unknown)}, is_causal={causal}"
        )


def _kernel(query: Tensor, values: Tensor, scores: Scores) -> str:
    same = query.shape[-1] == values.shape[-1]
    if scores.cap is None and same and fits_flash(query):
        return FLASH
    return FUSED if scores.plain else PLAIN


def dense(documents: Documents, num_sequences: int) -> Tensor:
    """[B, T, T] bool, whom each token sees: for models that know masks alone."""
    bounds = documents.bounds
    numbers = torch.arange(len(documents.lengths), device=bounds.device)
    total = sum(documents.lengths)
    owners = numbers.repeat_interleave(bounds.diff(), output_size=total).view(num_sequences, -1)
    same = owners.unsqueeze(2) == owners.unsqueeze(1)
    return same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()


def by_document(
    query: Tensor, keys: Tensor, values: Tensor, documents: Documents, scores: Scores
) -> Tensor:
    """Causal attention inside documents, one after another.

    Args:
        query: [S, Q, d].
        keys: [S, K, d].
        values: [S, K, d], or another size than d.
        documents: of the S tokens.
        scores: of the layer.

    Returns:
        [S, Q, d], d of the values.
    """
    lengths = list(documents.lengths)
    texts = zip(query.split(lengths), keys.split(lengths), values.split(lengths), strict=True)
    return torch.cat([_document(q, k, v, scores) for q, k, v in texts])


def _document(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    length, num_heads = query.shape[:2]
    window = min(scores.window or length, length)
    plain = window == length and scores.plain
    if plain and query.shape[-1] == values.shape[-1]:
        return _fused(query, keys, values, None, scores)
    rows = max(1, min(LONGEST_CHUNK, CHUNK_BYTES // (4 * num_heads * window)))
    chunks = []
    for start in range(0, length, rows):
        end, first = min(start + rows, length), max(0, start - window + 1)
        mask = _mask(range(start, end), range(first, end), window, query.device)
        seen = keys[first:end], values[first:end]
        chunks.append(_chunk(query[start:end], *seen, mask, scores))
    return torch.cat(chunks)


def _mask(queries: range, keys: range, window: int, device: torch.device) -> Tensor:
    """[n, m] bool, whom each query sees."""
    places = [torch.arange(each.start, each.stop, device=device) for each in (queries, keys)]
    distance = places[0].unsqueeze(1) - places[1]
    return (distance >= 0) & (distance < window)


def _chunk(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    if scores.plain:
        return _fused(query, keys, values, mask, scores)
    if not torch.is_grad_enabled():
        return _scored(query, keys, values, mask, scores)
    # Kept for a gradient, the scores of all chunks together would be tokens by tokens.
    found: Any = checkpoint(
        _scored, query, keys, values, mask, scores, use_reentrant=False, preserve_rng_state=False
    )
    return found


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """[n, Q, d] of queries [n, Q, d] and keys and values [m, K, d]; causal without a mask."""
    groups = query.shape[1] // keys.shape[1]
    if query.is_cuda and groups > 1:
        # There grouped heads in float32, or with a mask, have no kernel that writes no scores.
        keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
        groups = 1
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values))
    output = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=groups > 1,
    )
    return output.squeeze(0).transpose(0, 1)


def _scored(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """The same with soft caps and sinks, as transformers' own attention computes them."""
    groups, num_queries = query.shape[1] // keys.shape[1], len(query)
    grouped = query.unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)
    found = grouped @ keys.permute(1, 2, 0)
    found = found * (query.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.cap is not None:
        found = torch.tanh(found / scores.cap) * scores.cap
    found = found.unflatten(1, (groups, num_queries)).masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(found.dtype).view(-1, groups, 1, 1)
        found = torch.cat([found, sinks.expand(-1, -1, num_queries, 1)], dim=-1)
    weights = found.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : len(keys)]
    output = weights.flatten(1, 2) @ values.transpose(0, 1)
    return output.unflatten(1, (groups, num_queries)).permute(2, 0, 1, 3).flatten(1, 2)
