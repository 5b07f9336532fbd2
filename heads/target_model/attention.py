"""Attention as a transformers model asks for it, without a mask; here of packed documents.

While a pass is `under_way`, every attention layer of a model calls `attend`, which asks the pass.
Documents are on a GPU one call of PyTorch's flash kernel; elsewhere, and for what the kernel does
not know, they take their turns.

Letters: B sequences, T tokens of one, S = B * T tokens, n queries, Q heads, K key-value heads, d
head size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from heads.layers.documents import Documents, fits_flash, flash, flash_backward
from heads.target_model.kernels import Scores, causal

NAME = "documents"
FLASH = "PyTorch's flash kernel for documents"
FUSED = "scaled_dot_product_attention, document by document"
PLAIN = "plain torch in chunks of documents, for its soft caps or sinks"

# What attention layers hand on beside the features that `attend` knows. Targets are in eval mode.
WITHOUT_EFFECT = {"position_ids", "cache_position", "dropout", "use_cache"}


class Reading:
    """A pass over documents.

    Args:
        config: of a model whose attention layers are to attend by documents; None leaves it to
            masks who sees whom, and recurrent layers alone go by documents.
        chunks: tokens of a chunk, by the number of a layer that sees no further.

    Attributes:
        documents: of its tokens.
        calls: window and kernel of each attention layer, in their order.
        runs: what recurrent layers made of the documents for a device, see `recurrent.py`.
    """

    def __init__(
        self, documents: Documents, config: Any = None, chunks: Mapping[int, int] | None = None
    ) -> None:
        self.documents, self.config, self.chunks = documents, config, chunks or {}
        self.calls: list[tuple[int | None, str]] = []
        self.runs: dict[torch.device, Any] = {}
        self._placed: dict[tuple[torch.device, int | None], Documents] = {}

    def on(self, device: torch.device, layer: int | None = None) -> Documents:
        """The documents for a layer on a device; a chunk is a document of its own."""
        chunk = None if layer is None else self.chunks.get(layer)
        if (device, chunk) not in self._placed:
            found = self.documents if chunk is None else self.documents.cut(chunk)
            self._placed[device, chunk] = found.on(device)
        return self._placed[device, chunk]

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """See `Pass`."""
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        kernel = _kernel(q, v, scores)
        documents = self.on(query.device, layer)
        self.calls.append((scores.window, kernel))
        if kernel is not FLASH:
            output = by_document(q, k, v, documents, scores)
        elif scores.sinks is not None:
            output = SinkFlash.apply(documents, scores, q, k, v, scores.sinks)
        else:
            output, _ = flash(q, k, v, documents, scores.window, scores.scale)
        return output.unflatten(0, (len(query), -1))


class SinkFlash(torch.autograd.Function):
    """`flash` with a key more under every softmax, which has a score per head and no value.

    With its score s the logsumexp of all is M = log(exp(L) + exp(s)), and the output O exp(L - M).
    From these the kernel makes all gradients but that of s: -sum(exp(s - M) dO O).
    """

    @staticmethod
    def forward(ctx: Any, documents: Documents, scores: Scores, *given: Tensor) -> Tensor:
        """[S, Q, d] of query [S, Q, d], keys and values [S, K, d], and sinks [Q]."""
        query, keys, values, sinks = given
        output, log_norm = flash(query, keys, values, documents, scores.window, scores.scale)
        whole = torch.logaddexp(log_norm, sinks.float().unsqueeze(1))
        share = (log_norm - whole).exp().t()
        output = (output * share.unsqueeze(-1)).to(output.dtype)
        ctx.save_for_backward(*given, output, whole)
        ctx.documents, ctx.scores = documents, scores
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what `forward` got."""
        *text, sinks, output, whole = ctx.saved_tensors
        window, scale = ctx.scores.window, ctx.scores.scale
        of_text = flash_backward(grad, text, (output, whole), ctx.documents, window, scale)
        inner = (grad.float() * output.float()).sum(-1).t()
        of_sinks = -((sinks.float().unsqueeze(1) - whole).exp() * inner).sum(1)
        return None, None, *of_text, of_sinks.to(sinks.dtype)


class Pass(Protocol):
    """A pass of a model whose attention layers need no mask, as it knows who sees whom.

    Attributes:
        config: of the model; None leaves attention to masks.
    """

    config: Any

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """[B, n, Q, d] of queries [B, Q, n, d] of a layer, and all its keys and values."""
        ...


_PASS: ContextVar[Pass | None] = ContextVar("pass", default=None)
_TRACED: list[Pass] = []


def current() -> Pass | None:
    """The pass that is under way."""
    if _TRACED:
        return _TRACED[-1]
    return None if torch.compiler.is_compiling() else _PASS.get()


@contextmanager
def under_way(found: Pass) -> Iterator[None]:
    """Inside, layers go by a pass, and where attention does, no model builds a mask."""
    token = _PASS.set(found)
    try:
        with without_masks(found.config):
            yield
    finally:
        _PASS.reset(token)


@contextmanager
def without_masks(config: Any) -> Iterator[None]:
    """Inside, a model of this config builds no mask; None changes nothing."""
    if config is None:
        yield
        return
    usual = config._attn_implementation
    # A name for which transformers knows no mask makes it build none.
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


@contextmanager
def under_way_traced(found: Pass) -> Iterator[None]:
    """`under_way` in what is compiled, where ContextVars are not known; see `without_masks`."""
    _TRACED.append(found)
    try:
        yield
    finally:
        _TRACED.pop()


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
    known = features.pop
    scores = Scores(
        known("sliding_window", None), known("scaling", None), known("softcap", None),
        known("s_aux", None),
    )  # fmt: skip
    _check_known(module, attention_mask, features)
    found = current()
    assert found is not None
    return found.attend(getattr(module, "layer_idx", None), query, key, value, scores), None


AttentionInterface.register(NAME, attend)


def _check_known(module: Any, mask: Tensor | None, features: dict[str, Any]) -> None:
    causal = features.pop("is_causal", None)
    if causal is None:
        causal = getattr(module, "is_causal", True)
    unknown = [
        name
        for name, value in (("attention_mask", mask), *features.items())
        if value is not None and value is not False and name not in WITHOUT_EFFECT
    ]
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
    rows = (each.transpose(0, 1).unsqueeze(0).split(lengths, 2) for each in (query, keys, values))
    found = torch.cat([causal(q, k, v, scores) for q, k, v in zip(*rows, strict=True)], dim=2)
    return found.squeeze(0).transpose(0, 1)
