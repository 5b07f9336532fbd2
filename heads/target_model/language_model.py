"""Language model inside any architecture of transformers, loaded without towers.

A tower turns images, sound or video into tokens. Plain models and wrappers are loaded alike: with
the class that transformers has for a config, whose instances drop their towers before reading
weights.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.models.auto import modeling_auto

# Wrappers first: the last table has text classes for some of their configs.
WRITERS = (
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
ENCODER = "MODEL_FOR_MASKED_LM_MAPPING"
REFUSED = {"paligemma": "it reads its prompt in both directions, and what follows it in one"}


def find_language_class(model_config: Any, towers: bool = False) -> Any:
    """Find the class that loads the language model of a config, optionally with towers.

    Raises:
        ValueError: the config has no language model, with the reason.
    """
    whole = _find_class(WRITERS, model_config)
    if whole is None and "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or ()):
        return AutoModelForCausalLM  # code of the repository
    reason = REFUSED.get(model_config.model_type) or _find_reason(model_config, whole)
    if reason:
        raise ValueError(f"{model_config.model_type} cannot be a target: {reason}")
    return whole if towers else make_text_only_class(whole)


def _find_class(tables: tuple[str, ...], model_config: Any) -> Any:
    mappings = (getattr(modeling_auto, name) for name in tables)
    config_class = type(model_config)
    return next((mapping[config_class] for mapping in mappings if config_class in mapping), None)


def _find_reason(model_config: Any, whole: Any) -> str:
    """Find the reason why heads cannot draft for a config's model; empty without one."""
    if model_config.is_encoder_decoder:
        return "an encoder-decoder, whose text depends on an input that draft heads do not read"
    if _find_class((ENCODER,), model_config) and not getattr(model_config, "is_decoder", False):
        return "an encoder, whose tokens see later tokens (its config has no is_decoder=true)"
    if whole is None:
        # Table names tell what transformers does with the classes.
        start, end = "MODEL_FOR_", "_MAPPING"
        names = [n for n in dir(modeling_auto) if n.startswith(start) and n.endswith(end)]
        tables = [name for name in names if _find_class((name,), model_config)]
        uses = [name.removeprefix(start).removesuffix(end).lower() for name in tables]
        listed = ", ".join(use.replace("_", " ") for use in uses)
        known = f"; it supports {listed}" if uses else ", but knows it as a part of other models"
        return f"transformers generates no text with it{known}"
    if not issubclass(whole, GenerationMixin):
        return f"{whole.__name__} does not generate token by token"
    if "pixel_values" in inspect.signature(whole.generate).parameters:
        return f"{whole.__name__} only generates text about an image"
    return ""


@cache
def make_text_only_class(whole: Any) -> Any:
    """Make the subclass of a whole model's class whose instances have no towers."""
    # transformers recognises its own classes, with conversions of weights, by the module.
    return type(whole.__name__, (_TextOnly, whole), {"__module__": whole.__module__})


class _TextOnly:
    """Mixin before a model's class. See `make_text_only_class`."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with skip_missing_towers(config.get_text_config()):
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def post_init(self: Any) -> None:
        """Drop towers before weights are read, tied or placed."""
        decoder = self.get_decoder()
        dropped = _drop_inside(decoder)
        if self.config.get_text_config() is not self.config:
            dropped += _drop_beside(self, decoder, self.get_output_embeddings())
        # Otherwise transformers lists each of their weights as unused.
        known = self._keys_to_ignore_on_load_unexpected or ()
        names = (rf"(^|\.){re.escape(name)}\." for name in dropped)
        self._keys_to_ignore_on_load_unexpected = [*known, *names]
        super().post_init()  # type: ignore[misc]

    def get_decoder(self: Any) -> Any:
        """Return embedding and layers; transformers may stop at a causal model instead."""
        decoder: Any = super().get_decoder()  # type: ignore[misc]
        if not isinstance(decoder, PreTrainedModel):
            decoder = self  # ModernBERT calls its output head a decoder
        while True:
            if decoder.get_output_embeddings() is None:
                inner = decoder.get_decoder()
            else:
                inner = next(m for m in decoder.children() if isinstance(m, PreTrainedModel))
            if inner is decoder:
                return decoder
            decoder = inner

    def get_output_embeddings(self: Any) -> Any:
        """Return the output head, including that of a causal model inside."""
        own = super().get_output_embeddings()  # type: ignore[misc]
        if own is not None:
            return own
        inner = [module for module in self.modules() if isinstance(module, PreTrainedModel)][1:]
        heads = (module.get_output_embeddings() for module in inner)
        return next((head for head in heads if head is not None), None)


def _drop_beside(model: nn.Module, decoder: nn.Module, head: nn.Module) -> list[str]:
    """Drop the modules beside the language model; return their names."""
    dropped = []
    for name, child in list(model.named_children()):
        inside = set(child.modules())
        if decoder in inside and child is not decoder:
            dropped += _drop_beside(child, decoder, head)
        elif not {decoder, head} & inside and not _serves_text(child):
            delattr(model, name)
            dropped.append(name)
    return dropped


def _drop_inside(decoder: nn.Module) -> list[str]:
    """Drop towers among the layers of a decoder, as in Phi-4-multimodal."""
    dropped = []
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PreTrainedModel) and "text" not in child.input_modalities:
                delattr(module, name)
                dropped.append(name)
    return dropped


def _serves_text(module: nn.Module) -> bool:
    """Tell whether text needs a module beside the language model: scalings, other embeddings.

    The further embeddings of Gemma 3n embed their own ranges of the vocabulary.
    """
    if isinstance(module, PreTrainedModel):
        return False
    has_weights = next(module.parameters(), None) is not None
    return not has_weights or any(isinstance(part, nn.Embedding) for part in module.children())


@contextmanager
def skip_missing_towers(text: Any) -> Iterator[None]:
    """Make towers without an installed library empty modules inside this context."""
    usual, class_attribute = AutoModel.from_config, vars(AutoModel)["from_config"]

    def from_config(config: Any, **options: Any) -> Any:
        try:
            return usual(config, **options)
        except ImportError:
            if config is text:
                raise
            return nn.Module()

    AutoModel.from_config = from_config  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoModel.from_config = class_attribute  # type: ignore[method-assign]
