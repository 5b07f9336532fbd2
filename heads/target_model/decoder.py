"""Language model inside any architecture: loaded without towers, called, and its layers found.

A tower turns images, sound or video into tokens. Plain models and wrappers are loaded alike: with
the class that transformers has for a config, whose instances drop their towers before reading
weights. Layers are found by structure.

Some layers depend on lengths and positions, and are changed to treat each text as if alone.
LongRoPE reads texts above a length with other frequencies, and transformers chooses by the longest
text of a batch. Llama 4's attention temperature rises with a query's position in layers without
RoPE, but transformers counts positions by cache slots, which is wrong in draft trees, in batches of
different lengths and in packed documents.

Source: LongRoPE, arXiv 2402.13753; transformers `modeling_rope_utils.py`, `dynamic_rope_update`,
and `modeling_llama4.py`, `Llama4TextAttention`.

Letters: B sequences, T or n tokens, D hidden, n streams of a residual.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto

from conf.errors import InputError

# Errors of a model with an unknown structure.
MODEL_ERRORS = (
    AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError
)  # fmt: skip
# Wrappers first: the last table has text classes for some of their configs.
WRITERS = (
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
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
        dropped: list[str] = []
        for module in list(decoder.modules()):  # towers among the layers, as in Phi-4-multimodal
            for name, child in list(module.named_children()):
                if isinstance(child, PreTrainedModel) and "text" not in child.input_modalities:
                    delattr(module, name)
                    dropped.append(name)
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


def find_decoder(model: Any) -> Any:
    """Find the transformers model without its output head.

    Usually `get_decoder` returns it. In Llama 4 and Mllama the result has an output head, and
    ModernBERT calls its output head a decoder.
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
    """Run a decoder; arguments that the architecture lacks are left out.

    Args:
        decoder: transformers model without its output head.
        input_ids: [B, n] int64.
        position_ids: [B, n] int64.
        masks: additive mask, or masks by type of layer.
        cache: cache of transformers' kind.
    """
    model_class: Any = type(getattr(decoder, "_orig_mod", decoder))
    arguments = _list_forward_arguments(model_class)
    given = {"position_ids": position_ids, "attention_mask": masks}
    # State spaces have no positions or masks.
    given = {key: value for key, value in given.items() if key in arguments}
    given[find_cache_argument(arguments)] = cache
    return decoder(input_ids=input_ids, use_cache=cache is not None, **given)


def find_cache_argument(names: Collection[str]) -> str:
    """Find the name of the cache among the arguments of a model's forward.

    transformers 5.24 calls it `cache`. Before, state spaces had a name of their own.
    """
    return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[-1])


@cache
def _list_forward_arguments(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def find_decoder_layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    """Find the list of layers that run one after another.

    The list has as many modules as the config has layers, each with parts. Deeper lists hold
    experts, or belong to another model inside.

    Raises:
        InputError: no such list, or several (XLM keeps attentions and MLPs apart).
    """
    lists = {
        path: module
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and all(len([*layer.children()]) for layer in module)
    }
    outermost = min((path.count(".") for path in lists), default=0)
    lists = {path: layers for path, layers in lists.items() if path.count(".") == outermost}
    if len(lists) != 1:
        raise InputError(
            f"target.path={name}: {type(decoder).__name__} has {sorted(lists) or 'no list'} of "
            f"{num_layers} layers where one list is needed, so hidden states between layers cannot "
            "be read and no layer can be left out; allowed: heads that only read the last hidden "
            "state (Medusa, EAGLE-1)"
        )
    return next(iter(lists.values()))


def record_hidden_state(
    blocks: nn.ModuleList, index: int, active: int | None, states: dict[int, Tensor]
) -> None:
    """Keep a hidden state [B, T, D] of every pass.

    Args:
        blocks: the decoder layers.
        index: as in `output_hidden_states`: 0 is the input of the first layer, i the output of
            layer i - 1.
        active: see `extract_hidden_state`.
        states: dict that gets the state at its index.
    """

    def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[index] = extract_hidden_state(args or kwargs["hidden_states"], active)

    def keep_output(_module: nn.Module, _args: Any, output: Any) -> None:
        states[index] = extract_hidden_state(output, active)

    if index == 0:
        blocks[0].register_forward_pre_hook(keep_input, with_kwargs=True)
    else:
        blocks[index - 1].register_forward_hook(keep_output)


def extract_hidden_state(given: Any, active: int | None) -> Tensor:
    """Extract the hidden state [B, T, D] from the inputs or outputs of a layer.

    Of several residual streams, take the one that layers read and write ([n, B, T, D], AltUp of
    Gemma 3n), or the mean if they mix all ([B, T, n, D], hyper-connections).

    Args:
        given: tensor, or list that begins with it.
        active: index of the stream to read; None without AltUp.
    """
    state: Tensor = given[0] if isinstance(given, (tuple, list)) else given
    if state.dim() == 3:
        return state
    return state.mean(2) if active is None else state[active]


@torch.no_grad()
def count_layer_outputs(blocks: nn.ModuleList, run: Callable[[], Any], name: str) -> list[int]:
    """Count the outputs of each layer during one call of `run`.

    A layer that returns its state alone, not in a tuple, counts 0.

    Raises:
        InputError: a layer reads more of another layer than its state, so none can be left out.
    """
    numbers: list[int] = []
    beside: list[Tensor] = []

    def count_outputs(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        given = {id(value) for value in (*args, *kwargs.values())}
        if given & {id(value) for value in beside}:
            raise InputError(
                f"target.path={name}: {type(module).__name__} reads more of the previous layer "
                "than its hidden state, so no layer can be left out; allowed: methods that run "
                "all layers"
            )
        parts = output if isinstance(output, (tuple, list)) else ()
        beside.extend(part for part in parts[1:] if isinstance(part, Tensor))
        numbers.append(len(parts))

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(block.register_forward_hook(count_outputs, with_kwargs=True).remove)
        run()
    return numbers


@contextmanager
def pause_layer(block: Any, number: int) -> Iterator[None]:
    """Let a decoder layer return its input inside this context.

    Args:
        block: the layer.
        number: number of the layer's outputs, from `count_layer_outputs`.
    """

    def return_input(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return (hidden_states, *[None] * (number - 1)) if number else hidden_states

    hooked = block.__dict__.get("forward")  # accelerate's, on a target over several devices
    block.forward = return_input
    try:
        yield
    finally:
        del block.forward
        if hooked is not None:
            block.forward = hooked


class LongRope:
    """Rotary embeddings of a decoder, which learn from the caller which texts are long.

    Args:
        decoder: transformers model, whose rotary embeddings get another `forward`.

    Attributes:
        switch: longest text, in tokens, with the short frequencies; None for a decoder without
            LongRoPE, which stays unchanged.
    """

    def __init__(self, decoder: Any) -> None:
        self.switch: int | None = None
        self._long: Tensor | None = None
        for module in decoder.modules():
            if getattr(module, "rope_type", None) == "longrope":
                rope = module.config.rope_parameters
                self.switch = int(rope["original_max_position_embeddings"])
                module.forward = self._rotate_by_length(module, module.forward, self.switch)

    @contextmanager
    def mark_long_texts(self, long: Tensor) -> Iterator[None]:
        """Mark tokens of long texts inside this context, where `long` [B, n or 1] bool is True."""
        self._long = long
        try:
            yield
        finally:
            self._long = None

    def _rotate_by_length(self, module: Any, forward: Callable[..., Any], switch: int) -> Any:
        # The module decides for all by the largest position of a call, for which some versions of
        # transformers wait. The unwrapped function computes with one set of frequencies.
        compute = inspect.unwrap(type(module).forward)
        frequencies: dict[torch.device, tuple[Tensor, Tensor]] = {}

        def rotate(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            if self._long is None:
                return forward(x, position_ids)
            if x.device not in frequencies:
                far, _ = ROPE_INIT_FUNCTIONS["longrope"](
                    module.config, x.device, seq_len=switch + 1
                )
                frequencies[x.device] = far, module.original_inv_freq.to(x.device, copy=True)
            turns: list[tuple[Tensor, Tensor]] = []
            usual = module.inv_freq
            for module.inv_freq in frequencies[x.device]:
                turns.append(compute(module, x, position_ids))
            module.inv_freq = usual  # some versions overwrite it
            long = self._long.unsqueeze(2)
            (far_cos, far_sin), (near_cos, near_sin) = turns
            return torch.where(long, far_cos, near_cos), torch.where(long, far_sin, near_sin)

        return rotate


def scale_by_position(decoder: Any) -> None:
    """Make Llama 4's layers scale their queries by position; other layers stay unchanged."""
    for layer in decoder.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            _Temperature(layer, attention)


class _Temperature:
    """Attention temperature that replaces a layer's own, applied after the query projection."""

    def __init__(self, layer: nn.Module, attention: Any) -> None:
        self.scale, self.floor = attention.attn_scale, attention.floor_scale
        self.position_ids = torch.empty(0)
        attention.attn_temperature_tuning = False
        layer.register_forward_pre_hook(self._store_positions, with_kwargs=True)
        attention.q_proj.register_forward_hook(self._scale_queries)

    def _store_positions(self, _layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs["position_ids"]

    def _scale_queries(self, _module: nn.Module, _args: Any, queries: Tensor) -> Tensor:
        rise = torch.log1p(torch.floor((self.position_ids.float() + 1.0) / self.floor))
        return (queries * (rise * self.scale + 1.0).unsqueeze(2)).to(queries.dtype)
