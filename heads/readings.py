"""Readings of a head: the same weights under another setting that its files may mean.

Writers differ in how they count layers, order hidden states and rotate positions, and files say
this only in part. A reading is a head with the same weights (copied only if reordered) and a
description of what differs. This module has the readings shared by heads that fuse hidden states.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError
from heads.target_model import sizes
from heads.vocab import DraftVocab

FUSED = ("fc.weight", "input_norm.weight", "mask_hidden")
"""Tensors whose last dimension concatenates the hidden states."""
USUAL_THETAS = (1e4, 1e6)
"""Values of theta that readers assume if files name none."""
ALL_ORDERS = 3
"""Largest number of hidden states of which every order is tried."""
ConfigVariants = Iterator[tuple[str, Any]]


def make_config_variant(
    head: Any,
    vocab: DraftVocab | None = None,
    tensors: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Any:
    """Put the same weights under other settings.

    Args:
        head: attached head.
        vocab: another draft vocabulary of the same size.
        tensors: replacements of tensors in `state_dict`.
        settings: fields of the config.
    """
    other = type(head)(replace(head.config, **settings), vocab or head.vocab)
    other.load_state_dict(head.state_dict() | (tensors or {}), assign=True)
    return other.attach(head.target).eval()


def iter_layer_variants(head: Any, usual: Callable[[int], Sequence[int]]) -> ConfigVariants:
    """Other hidden states: all, or the last, off by one; or those of new heads.

    Args:
        head: attached head.
        usual: function that gives a new head's hidden states by the number of layers; raises an
            `InputError` for too few.
    """
    try:
        fresh = tuple(usual(head.target.num_layers))
    except InputError:
        fresh = ()
    stated, known = head.config.layers, range(head.target.num_layers)
    near = [tuple(index + step for index in stated) for step in (-1, 1)]
    ends = [(*stated[:-1], stated[-1] + step) for step in (-1, 1)]
    tried = {stated}
    for each in (*near, *ends, fresh):
        fits = len(set(each)) == len(stated) and set(each) <= set(known)
        if fits and each not in tried:
            tried.add(each)
            yield (
                f"hidden states {_format_layers(each)}, not {_format_layers(stated)}",
                make_config_variant(head, layers=each),
            )


def iter_order_variants(head: Any) -> ConfigVariants:
    """Other orders of the hidden states; if many: rising, falling, or with an end moved."""
    stated = head.config.layers
    rising = tuple(sorted(stated))
    moved = (rising, rising[::-1], (*rising[1:], rising[0]), (rising[-1], *rising[:-1]))
    every = permutations(rising) if len(rising) <= ALL_ORDERS else moved
    for order in dict.fromkeys(every):
        if order != stated:
            yield f"features in the order {_format_layers(order)}", _reorder_features(head, order)


def _reorder_features(head: Any, order: Sequence[int]) -> Any:
    """Reorder so that fused part j is hidden state `order[j]`; parts end up in rising order."""
    places, state = sorted(range(len(order)), key=order.__getitem__), head.state_dict()
    tensors = {name: reorder_parts(state[name], places) for name in FUSED if name in state}
    for place, old in enumerate(places):
        name = f"fc_norm.{old}.weight"
        if name in state:
            tensors[f"fc_norm.{place}.weight"] = state[name]
    return make_config_variant(head, tensors=tensors, layers=tuple(sorted(order)))


def reorder_parts(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """[..., n * size] with its n parts reordered."""
    chunks = tensor.chunk(len(places), dim=-1)
    return torch.cat([chunks[place] for place in places], dim=-1)


def flip_setting(head: Any, name: str) -> tuple[str, Any]:
    """Reading with the opposite of a boolean setting."""
    other: dict[str, Any] = {name: not getattr(head.config, name)}
    return f"{name}={str(other[name]).lower()}", make_config_variant(head, **other)


def iter_rope_variants(head: Any) -> ConfigVariants:
    """The target's RoPE, the head's without scaling, and usual values of theta."""
    stated: dict[str, Any] = head.config.llama.rope_parameters
    theirs, plain = sizes.find_rope(head.target.config), {"rope_type": "default"}
    found = {
        f"the target's RoPE ({_format_rope(theirs)})": theirs,
        "RoPE without scaling": {**plain, "rope_theta": stated["rope_theta"]},
        **{f"RoPE with theta {theta:g}": {**stated, "rope_theta": theta} for theta in USUAL_THETAS},
    }
    tried = [stated]
    for words, rope in found.items():
        if rope not in tried:
            tried.append(rope)
            llama = deepcopy(head.config.llama)
            llama.rope_parameters = rope
            yield words, make_config_variant(head, llama=llama)


def iter_vocab_variants(head: Any) -> ConfigVariants:
    """A map of draft ids as target ids, if it could be read as offsets."""
    vocab = head.vocab
    ids = vocab.compute_offsets()
    if not vocab.is_full and bool((ids.diff() > 0).all()):
        yield (
            "d2t holds target ids, not offsets",
            make_config_variant(head, DraftVocab(ids, vocab.size)),
        )


def _format_rope(rope: dict[str, Any]) -> str:
    return f"{rope['rope_type']}, theta {rope['rope_theta']:g}"


def _format_layers(layers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, layers))}]"
