"""The decoder of any architecture, and how it is called."""

from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

# In which a model fails that is not as those known here are.
EVERY_WAY = (
    AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError
)  # fmt: skip


def decoder_of(model: Any) -> Any:
    """A transformers model without its output head.

    `get_decoder` gives that of most; Llama 4's and Mllama's own has an output head, and ModernBERT
    calls its output head so.
    """
    decoder = model.get_decoder()
    if isinstance(decoder, nn.Linear):
        return model.model
    return decoder if decoder.get_output_embeddings() is None else decoder.model


def call_decoder(
    decoder: Any,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    masks: Tensor | dict[str, Any] | None = None,
    cache: Any = None,
) -> Any:
    """One pass; what an architecture has no argument for is left out.

    Args:
        decoder: a transformers model without its output head.
        input_ids: [B, n] int64.
        position_ids: [B, n] int64.
        masks: additive, by kind of layer where there are several.
        cache: of keys, values and states.
    """
    kind: Any = type(getattr(decoder, "_orig_mod", decoder))
    known = _arguments(kind)
    given = {"position_ids": position_ids, "attention_mask": masks}
    # State spaces have no positions and no masks, and call their cache by another name.
    name = "past_key_values" if "past_key_values" in known else "cache_params"
    given = {key: value for key, value in given.items() if key in known}
    return decoder(input_ids=input_ids, use_cache=cache is not None, **{name: cache}, **given)


@cache
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(signature(kind.forward).parameters)
