"""What a target's generation config asks of its logits, whether or not they are sampled.

transformers' own processors do it, on rows of ids whose next token is asked for. Every node of a
draft is such a row, its text and its path from the root, so that drafts are checked by what
`generate` would choose there.

Letters: B texts, L tokens, N tree nodes (root included), V vocab.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from heads.decoding.drafting import TreeLayout, tree_layout
from heads.decoding.tree import Tree

Processor = Callable[[Tensor, Tensor], Tensor]
"""Scores [R, V] for the token after rows of ids [R, L], from the logits [R, V]."""

PROCESSORS: dict[str, Callable[[Any, list[int]], Processor]] = {
    "sequence_bias": lambda bias, _: SequenceBiasLogitsProcessor(bias),
    "repetition_penalty": lambda penalty, _: RepetitionPenaltyLogitsProcessor(float(penalty)),
    "no_repeat_ngram_size": lambda size, _: NoRepeatNGramLogitsProcessor(size),
    "bad_words_ids": lambda words, stops: NoBadWordsLogitsProcessor(words, stops or None),
    "suppress_tokens": lambda tokens, _: SuppressTokensLogitsProcessor(tokens),
}
"""How each is made of its value and the stop tokens, in the order in which `generate` does."""
FIRST = "begin_suppress_tokens"
APPLIED = (*PROCESSORS, FIRST)


class Rules:
    """The processors that a target's generation config names.

    Args:
        asked: values by their names, all of them in APPLIED; perhaps nothing.
        stop_ids: of the target.

    Raises:
        ValueError: a value means nothing; a TypeError likewise.
    """

    def __init__(self, asked: dict[str, Any], stop_ids: list[int]) -> None:
        self.always = [make(asked[n], stop_ids) for n, make in PROCESSORS.items() if n in asked]
        first = [SuppressTokensLogitsProcessor(asked[FIRST])] if FIRST in asked else []
        self.first: list[Processor] = [*self.always, *first]

    def begin(self, logits: Tensor, prompts: list[list[int]]) -> Tensor:
        """[B, V] of the first tokens after prompts, from the logits [B, V]."""
        if not self.first:
            return logits
        longest = max(map(len, prompts))
        filled = [ids[:-1] + [0] * (longest - len(ids)) for ids in prompts]
        device, none = logits.device, logits.shape[1]
        committed = torch.tensor([[len(ids) - 1] for ids in prompts], device=device)
        last = torch.tensor([ids[-1:] for ids in prompts], device=device)
        history = torch.tensor(filled, device=device, dtype=torch.int64)
        rows = node_rows(history, committed, last, tree_layout(Tree.chain(0), device), none)
        return _processed(logits.unsqueeze(1), rows, self.first)[:, 0]

    def apply(
        self,
        logits: Tensor,
        history: Tensor,
        committed: Tensor,
        tokens: Tensor,
        layout: TreeLayout,
    ) -> Tensor:
        """[B, N, V] of the tokens after every node, in float32 where there are rules.

        Args:
            logits: [B, N, V].
            history: [B, L] int64, the tokens before the root; a shorter text is filled up.
            committed: [B, 1] int64, how many they are.
            tokens: [B, N] int64, of the trees; negative where there is no node.
            layout: of the trees.
        """
        rows = node_rows(history, committed, tokens, layout, logits.shape[2])
        return _processed(logits, rows, self.always)


def _processed(logits: Tensor, rows: Tensor, processors: list[Processor]) -> Tensor:
    """[B, N, V] by rows [B, N, L] of ids, of which V stands for none."""
    scores = pad(logits.float(), (0, 1)).flatten(0, 1)
    for process in processors:
        scores = process(rows.flatten(0, 1), scores)
    return scores[:, :-1].view(logits.shape)


def node_rows(
    history: Tensor, committed: Tensor, tokens: Tensor, layout: TreeLayout, none: int
) -> Tensor:
    """[B, N, L + N] int64, the text up to each node at the right; `none` is left of it.

    Args:
        history: [B, L] int64.
        committed: [B, 1] int64, tokens of it that count.
        tokens: [B, N] int64; negative where there is no node.
        layout: of the trees.
        none: in place of negative tokens, too.
    """
    num_texts, num_nodes = tokens.shape
    shape = (num_texts, num_nodes, num_nodes)
    depths = layout.depths.unsqueeze(1).expand(shape)
    known = torch.where(tokens < 0, none, tokens).unsqueeze(1).expand(shape)
    # What is not on the path of a node goes to a column of its own.
    place = torch.where(layout.mask, depths, num_nodes)
    path = tokens.new_full((num_texts, num_nodes, num_nodes + 1), none).scatter_(2, place, known)
    length, before = history.shape[1], committed.unsqueeze(2)
    texts = history.unsqueeze(1).expand(-1, num_nodes, -1)
    source = torch.cat([texts, path[:, :, :num_nodes]], dim=2)
    width = length + num_nodes
    # Column c of a row holds the token at that position of the node's text, its own at the end.
    own = before + layout.depths.unsqueeze(2)
    position = torch.arange(1 - width, 1, device=tokens.device) + own
    at = torch.where(position < before, position, position - before + length)
    return source.gather(2, at.clamp_min(0)).masked_fill(position < 0, none)
