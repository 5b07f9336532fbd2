"""The language model inside any architecture of transformers, loaded without towers.

A tower is what makes tokens of images, sound or video. Plain models and wrappers go one way: the
class that transformers has for a config, whose instances drop their towers before a weight is read.
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

# Wrappers first: for some of their configs the last table has the class of their text.
WRITERS = (
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
ENCODER = "MODEL_FOR_MASKED_LM_MAPPING"
REFUSED = {"paligemma": "it reads its prompt in both directions, and what follows it in one"}


def language_class(model_config: Any, towers: bool = False) -> Any:
    """The class whose `from_pretrained` loads the language model of a config, or its towers, too.

    Raises:
        ValueError: it has none, with the reason.
    """
    whole = _class_in(WRITERS, model_config)
    if whole is None and "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or ()):
        return AutoModelForCausalLM  # of the repository's own code
    reason = REFUSED.get(model_config.model_type) or _reason(model_config, whole)
    if reason:
        raise ValueError(f"{model_config.model_type} cannot be a target: {reason}")
    return whole if towers else text_only(whole)


def _class_in(tables: tuple[str, ...], model_config: Any) -> Any:
    mappings = (getattr(modeling_auto, name) for name in tables)
    own = type(model_config)
    return next((mapping[own] for mapping in mappings if own in mapping), None)


def _reason(model_config: Any, whole: Any) -> str:
    """The reason why a config has no language model that heads can draft for, or empty."""
    if model_config.is_encoder_decoder:
        return "an encoder-decoder, whose text hangs on an input that draft heads do not read"
    if _class_in((ENCODER,), model_config) and not getattr(model_config, "is_decoder", False):
        return "an encoder, whose tokens see those behind them (its config has no is_decoder=true)"
    if whole is None:
        # Tables of classes are called by what transformers does with them.
        start, end = "MODEL_FOR_", "_MAPPING"
        names = [n for n in dir(modeling_auto) if n.startswith(start) and n.endswith(end)]
        tables = [name for name in names if _class_in((name,), model_config)]
        uses = [name.removeprefix(start).removesuffix(end).lower() for name in tables]
        listed = ", ".join(use.replace("_", " ") for use in uses)
        known = f"; it has it for {listed}" if uses else ", but knows it as a part of other models"
        return f"transformers writes no text with it{known}"
    if not issubclass(whole, GenerationMixin):
        return f"{whole.__name__} does not write token after token"
    if "pixel_values" in inspect.signature(whole.generate).parameters:
        return f"{whole.__name__} writes about an image, and nothing without"
    return ""


@cache
def text_only(whole: Any) -> Any:
    """A class like that of a whole model whose instances have no towers."""
    # By its module transformers tells a class of its own, whose weights it knows to convert.
    return type(whole.__name__, (_TextOnly, whole), {"__module__": whole.__module__})


class _TextOnly:
    """Stands before a model's class; see `text_only`."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with without_libraries(config.get_text_config()):
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def post_init(self: Any) -> None:
        """Drops towers where weights are neither read nor tied nor placed yet."""
        decoder = self.get_decoder()
        dropped = _drop_inside(decoder)
        if self.config.get_text_config() is not self.config:
            dropped += _drop_beside(self, decoder, self.get_output_embeddings())
        # Or transformers lists each of their weights as one it has no use for.
        known = self._keys_to_ignore_on_load_unexpected or ()
        names = (rf"(^|\.){re.escape(name)}\." for name in dropped)
        self._keys_to_ignore_on_load_unexpected = [*known, *names]
        super().post_init()  # type: ignore[misc]

    def get_decoder(self: Any) -> Any:
        """The embedding and the layers, for which transformers may stop at a causal model."""
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
        """The output head, also that of a causal model inside."""
        own = super().get_output_embeddings()  # type: ignore[misc]
        if own is not None:
            return own
        inner = [module for module in self.modules() if isinstance(module, PreTrainedModel)][1:]
        heads = (module.get_output_embeddings() for module in inner)
        return next((head for head in heads if head is not None), None)


def _drop_beside(model: nn.Module, decoder: nn.Module, head: nn.Module) -> list[str]:
    """Drops the modules beside the language model; returns their names."""
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
    """Drops towers among the layers of a decoder, where Phi-4-multimodal has them."""
    dropped = []
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PreTrainedModel) and "text" not in child.input_modalities:
                delattr(module, name)
                dropped.append(name)
    return dropped


def _serves_text(module: nn.Module) -> bool:
    """True where text needs a module beside the language model: scalings, other embeddings.

    Those of Gemma 3n look up tokens in ranges of the vocabulary that are theirs.
    """
    if isinstance(module, PreTrainedModel):
        return False
    has_weights = next(module.parameters(), None) is not None
    return not has_weights or any(isinstance(part, nn.Embedding) for part in module.children())


@contextmanager
def without_libraries(text: Any) -> Iterator[None]:
    """A tower whose library is not installed is made an empty module: it is dropped anyway."""
    usual, stored = AutoModel.from_config, vars(AutoModel)["from_config"]

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
        AutoModel.from_config = stored  # type: ignore[method-assign]
