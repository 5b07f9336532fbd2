"""Readings of a head: what its files would mean if a setting in them were another.

Writers count layers, lay out features and turn positions in several ways, and files say only in
part in which. A reading is a head with the same weights, shared unless their order changes, and
words for what it takes otherwise. Here is what all kinds with features and a layer may doubt.
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
"""Tensors whose last dimension is the features, side by side."""
USUAL_THETAS = (1e4, 1e6)
"""Values of theta that readers take where files say none."""
ALL_ORDERS = 3
"""Features up to which every order is tried."""
Readings = Iterator[tuple[str, Any]]


def reread(
    head: Any,
    vocab: DraftVocab | None = None,
    tensors: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Any:
    """The same weights under other settings.

    Args:
        head: attached to its target.
        vocab: another of as many ids.
        tensors: in place of those of the same name in `state_dict`.
        settings: fields of its config.
    """
    other = type(head)(replace(head.config, **settings), vocab or head.vocab)
    other.load_state_dict(head.state_dict() | (tensors or {}), assign=True)
    return other.attach(head.target).eval()


def layers(head: Any, usual: Callable[[int], Sequence[int]]) -> Readings:
    """Features counted otherwise: all, or the last, one off; or those that fresh heads read.

    Args:
        head: attached to its target.
        usual: those, of a target of so many layers; an `InputError` where it has too few.
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
            yield f"hidden states {_listed(each)}, not {_listed(stated)}", reread(head, layers=each)


def orders(head: Any) -> Readings:
    """Features side by side in another order; of many, rising, falling, or with an end moved."""
    stated = head.config.layers
    rising = tuple(sorted(stated))
    moved = (rising, rising[::-1], (*rising[1:], rising[0]), (rising[-1], *rising[:-1]))
    every = permutations(rising) if len(rising) <= ALL_ORDERS else moved
    for order in dict.fromkeys(every):
        if order != stated:
            yield f"features in the order {_listed(order)}", _reordered(head, order)


def _reordered(head: Any, order: Sequence[int]) -> Any:
    """Part j of what is fused is hidden state `order[j]`; the parts are put in rising order."""
    places, state = sorted(range(len(order)), key=order.__getitem__), head.state_dict()
    tensors = {name: parts(state[name], places) for name in FUSED if name in state}
    for place, old in enumerate(places):
        name = f"fc_norm.{old}.weight"
        if name in state:
            tensors[f"fc_norm.{place}.weight"] = state[name]
    return reread(head, tensors=tensors, layers=tuple(sorted(order)))


def parts(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """[..., n * size] with its n parts in another order."""
    chunks = tensor.chunk(len(places), dim=-1)
    return torch.cat([chunks[place] for place in places], dim=-1)


def flipped(head: Any, name: str) -> tuple[str, Any]:
    """A reading with the opposite of a setting that is true or false."""
    other: dict[str, Any] = {name: not getattr(head.config, name)}
    return f"{name}={str(other[name]).lower()}", reread(head, **other)


def rotations(head: Any) -> Readings:
    """The target's RoPE, the head's without its scaling, or with a theta that readers take."""
    stated: dict[str, Any] = head.config.llama.rope_parameters
    theirs, plain = sizes.rope(head.target.config), {"rope_type": "default"}
    found = {
        f"the target's RoPE ({_shown(theirs)})": theirs,
        "RoPE without scaling": {**plain, "rope_theta": stated["rope_theta"]},
        **{f"RoPE with theta {theta:g}": {**stated, "rope_theta": theta} for theta in USUAL_THETAS},
    }
    tried = [stated]
    for words, rope in found.items():
        if rope not in tried:
            tried.append(rope)
            llama = deepcopy(head.config.llama)
            llama.rope_parameters = rope
            yield words, reread(head, llama=llama)


def vocabularies(head: Any) -> Readings:
    """A map of draft ids that holds target ids, where it could be read as offsets."""
    vocab = head.vocab
    ids = vocab.offsets()
    if not vocab.full and bool((ids.diff() > 0).all()):
        yield "d2t holds target ids, not offsets", reread(head, DraftVocab(ids, vocab.size))


def _shown(rope: dict[str, Any]) -> str:
    return f"{rope['rope_type']}, theta {rope['rope_theta']:g}"


def _listed(layers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, layers))}]"
