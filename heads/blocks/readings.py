"""Settings that files of block drafters may have wrong. See `heads/readings.py`."""

from functools import partial
from typing import Any

from conf.errors import InputError
from heads.blocks.config import default_layers, mask_token
from heads.blocks.network import BlockNetwork
from heads.readings import Readings, flipped, layers, orders, reread, rotations, vocabularies
from heads.target_model.embeddings_and_head import EmbeddingsAndHead


def readings(head: BlockNetwork) -> Readings:
    """Readings for any block drafter."""
    yield from layers(head, partial(default_layers, number=len(head.config.layers)))
    yield from orders(head)
    yield flipped(head, "causal")
    yield from windows(head)
    yield from masks(head)
    yield from rotations(head)
    yield from vocabularies(head)


def windows(head: BlockNetwork) -> Readings:
    """No sliding window, or the target's."""
    stated, theirs = head.config.window, getattr(head.target.config, "sliding_window", None)
    for window in dict.fromkeys((None, theirs)):
        if window != stated:
            words = "no sliding window" if window is None else f"a sliding window of {window}"
            yield words, reread(head, window=window)


def masks(head: Any) -> Readings:
    """Other mask tokens: the default of a new head, the tokenizer's own, first and last ids."""
    target: EmbeddingsAndHead = head.target
    tokenizer, size = target.tokenizer, len(target.embedding.weight)
    names = ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id", "bos_token_id")
    own = [getattr(tokenizer, name, None) for name in names]
    try:
        free = mask_token(target, None)
    except InputError:
        free = None
    for token in dict.fromkeys((free, *own, 0, size - 1)):
        if token not in (None, head.config.mask_token_id):
            yield f"mask token {token}", reread(head, mask_token_id=token)
