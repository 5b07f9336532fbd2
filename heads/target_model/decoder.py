"""Decoder of any architecture: how to call it, and its layers, found by structure.

Letters: B sequences, T tokens, D hidden, n streams of a residual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached_result
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import InputError

# Errors of a model with an unknown structure.
MODEL_ERRORS = (
    AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError
)  # fmt: skip


def find_decoder(model: Any) -> Any:
    """Transformers model without its output head.

    Usually `get_decoder`; but that of Llama 4 and Mllama has an output head, and ModernBERT calls
    its output head a decoder.
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
    """Run ids and positions [B, n]; arguments that an architecture lacks are left out.

    Masks are additive, by type of layer if there are several.
    """
    model_class: Any = type(getattr(decoder, "_orig_mod", decoder))
    known = _list_forward_arguments(model_class)
    given = {"position_ids": position_ids, "attention_mask": masks}
    # State spaces have no positions or masks, and name their cache differently.
    name = "past_key_values" if "past_key_values" in known else "cache_params"
    given = {key: value for key, value in given.items() if key in known}
    return decoder(input_ids=input_ids, use_cache=cache is not None, **{name: cache}, **given)


@cached_result
def _list_forward_arguments(model_class: Any) -> frozenset[str]:
    return frozenset(signature(model_class.forward).parameters)


def find_decoder_layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    """Find the list of layers that run one after another.

    It has as many modules as the config has layers, each with parts. Deeper lists hold experts, or
    belong to another model inside.

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
    blocks: nn.ModuleList, index: int, active: int | None, kept: dict[int, Tensor]
) -> None:
    """Keep a hidden state [B, T, D] of every pass.

    Args:
        blocks: the decoder layers.
        index: as in `output_hidden_states`: 0 is the input of the first layer, i the output of
            layer i - 1.
        active: see `state_of`.
        kept: dict that gets the state at its index.
    """

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[index] = extract_hidden_state(args or kwargs["hidden_states"], active)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        kept[index] = extract_hidden_state(output, active)

    if index == 0:
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    else:
        blocks[index - 1].register_forward_hook(leave)


def extract_hidden_state(given: Any, active: int | None) -> Tensor:
    """[B, T, D] hidden state among the inputs or outputs of a layer.

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
    """Number of outputs of each layer while `run` runs all; 0 for a state outside of a tuple.

    Raises:
        InputError: a layer reads more of another layer than its state, so none can be left out.
    """
    numbers: list[int] = []
    beside: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
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

    handles = [block.register_forward_hook(note, with_kwargs=True) for block in blocks]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return numbers


@contextmanager
def pause_layer(block: Any, number: int) -> Iterator[None]:
    """Context in which a decoder layer returns its input; `number` as from `num_outputs`."""

    def hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return (hidden_states, *[None] * (number - 1)) if number else hidden_states

    hooked = block.__dict__.get("forward")  # accelerate's, on a target over several devices
    block.forward = hand_on
    try:
        yield
    finally:
        del block.forward
        if hooked is not None:
            block.forward = hooked
