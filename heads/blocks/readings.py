"""Settings that files of block drafters may have wrong. See `heads/readings.py`."""

from functools import partial
from typing import Any

from conf.errors import InputError
from heads.blocks.config import choose_mask_token, default_layers
from heads.blocks.network import BlockNetwork
from heads.readings import (
    ConfigVariants,
    flip_setting,
    iter_layer_variants,
    iter_order_variants,
    iter_rope_variants,
    iter_vocab_variants,
    make_config_variant,
)
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead


def iter_block_variants(head: BlockNetwork) -> ConfigVariants:
    """Readings for any block drafter."""
    yield from iter_layer_variants(head, partial(default_layers, number=len(head.config.layers)))
    yield from iter_order_variants(head)
    yield flip_setting(head, "causal")
    yield from iter_window_variants(head)
    yield from iter_mask_token_variants(head)
    yield from iter_rope_variants(head)
    yield from iter_vocab_variants(head)


def iter_window_variants(head: BlockNetwork) -> ConfigVariants:
    """No sliding window, or the target's."""
    stated, theirs = head.config.window, getattr(head.target.config, "sliding_window", None)
    for window in dict.fromkeys((None, theirs)):
        if window != stated:
            words = "no sliding window" if window is None else f"a sliding window of {window}"
            yield words, make_config_variant(head, window=window)


def iter_mask_token_variants(head: Any) -> ConfigVariants:
    """Other mask tokens: the default of a new head, the tokenizer's own, first and last ids."""
    target: EmbeddingsAndOutputHead = head.target
    tokenizer, size = target.tokenizer, len(target.embedding.weight)
    names = ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id", "bos_token_id")
    own = [getattr(tokenizer, name, None) for name in names]
    try:
        free = choose_mask_token(target, None)
    except InputError:
        free = None
    for token in dict.fromkeys((free, *own, 0, size - 1)):
        if token not in (None, head.config.mask_token_id):
            yield f"mask token {token}", make_config_variant(head, mask_token_id=token)
