"""The decoder of any architecture: how it is called, and its layers, found by what they are.

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
    """Run ids and positions [B, n]; what an architecture has no argument for is left out.

    Masks are additive, by type of layer where there are several.
    """
    model_class: Any = type(getattr(decoder, "_orig_mod", decoder))
    known = _arguments(model_class)
    given = {"position_ids": position_ids, "attention_mask": masks}
    # State spaces have no positions and no masks, and call their cache by another name.
    name = "past_key_values" if "past_key_values" in known else "cache_params"
    given = {key: value for key, value in given.items() if key in known}
    return decoder(input_ids=input_ids, use_cache=cache is not None, **{name: cache}, **given)


@cached_result
def _arguments(model_class: Any) -> frozenset[str]:
    return frozenset(signature(model_class.forward).parameters)


def find_blocks(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    """The list of layers that run one after another.

    That is the list of as many modules as the config has layers, each of parts of its own. Lists
    that lie deeper are of experts, or of another model in the same one.

    Raises:
        InputError: there is none, or more than one (XLM keeps attentions and MLPs apart).
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
            f"{num_layers} layers where one list is needed, so no state between layers can be read "
            "and no layer left out; allowed: heads that read the last state alone (Medusa, EAGLE-1)"
        )
    return next(iter(lists.values()))


def tap(blocks: nn.ModuleList, index: int, active: int | None, kept: dict[int, Tensor]) -> None:
    """Makes every pass keep a hidden state [B, T, D].

    Args:
        blocks: the decoder layers.
        index: as `output_hidden_states` counts: 0 is what the first layer reads, i the output of
            layer i - 1.
        active: see `state_of`.
        kept: gets the state, under its index.
    """

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[index] = state_of(args or kwargs["hidden_states"], active)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        kept[index] = state_of(output, active)

    if index == 0:
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    else:
        blocks[index - 1].register_forward_hook(leave)


def state_of(given: Any, active: int | None) -> Tensor:
    """[B, T, D] of what a layer is given or gives: the state, alone or before other values.

    Of several residual streams it is the one that layers read and write ([n, B, T, D], AltUp of
    Gemma 3n), or where they mix all of them ([B, T, n, D], hyper-connections) their mean.

    Args:
        given: a tensor, or a list that begins with it.
        active: index of the stream that is read; None without AltUp.
    """
    state: Tensor = given[0] if isinstance(given, (tuple, list)) else given
    if state.dim() == 3:
        return state
    return state.mean(2) if active is None else state[active]


@torch.no_grad()
def num_outputs(blocks: nn.ModuleList, run: Callable[[], Any], name: str) -> list[int]:
    """The number of values that each layer gives as `run` runs all: 0 for the state and no tuple.

    Raises:
        InputError: a layer reads more of another one than its state, so that none can be left out.
    """
    numbers: list[int] = []
    beside: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = {id(value) for value in (*args, *kwargs.values())}
        if given & {id(value) for value in beside}:
            raise InputError(
                f"target.path={name}: {type(module).__name__} reads more of the layer before than "
                "its state, so that none can be left out; allowed: methods that run all layers"
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
def skipped(block: Any, number: int) -> Iterator[None]:
    """Inside, a decoder layer hands on its input; `number` is that of `num_outputs`."""

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
