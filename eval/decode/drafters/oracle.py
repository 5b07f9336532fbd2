"""Drafts of known acceptance at no cost, which show the engine's own overhead."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.tree import Tree


class Oracle(Drafter):
    """Drafts the target's own text, known in advance, with mistakes at a set rate.

    Below a right node, one child is right with probability `rate`: the first in a chain, any of
    several otherwise. All other tokens are wrong.

    Args:
        texts: the target's own tokens after the prompt, per text.
        tree: shape to draft.
        rate: rate of acceptance, from 0 to 1.
        vocab_size: size V of the vocabulary.
        seed: seed of the mistakes, which otherwise depend only on text and position.
    """

    row_attributes = ("texts", "table", "places")

    def __init__(
        self,
        texts: Sequence[list[int]],
        tree: Tree,
        rate: float,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self.num_static_nodes: int | None = tree.num_nodes
        self.texts = list(enumerate(texts))
        self.tree, self.rate, self.vocab_size, self.seed = tree, rate, vocab_size, seed
        length = 1 + max(map(len, texts))
        rows = [
            [self._draw_tree_tokens(number, text, place) for place in range(length)]
            for number, text in self.texts
        ]
        # [B, positions of a text, N - 1]; computed in advance, so that drafting costs almost
        # nothing.
        self.table = torch.tensor(rows, dtype=torch.int64).view(len(texts), length, -1)
        self.places: Tensor | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Count committed tokens."""
        if self.places is None:
            device = seen.output.hidden_states.device
            self.table = self.table.to(device)
            self.places = torch.zeros(len(self.table), dtype=torch.int64, device=device)
        if seen.logits is not None:
            self.places += seen.counts

    def propose(self, roots: Roots) -> Draft:
        """Draft the tree, filled from the text after the root."""
        assert self.places is not None
        rows = torch.arange(len(roots), device=self.places.device)
        places = self.places.clamp_max(self.table.shape[1] - 1)
        return Draft.from_tree(self.tree, self.table[rows, places])

    def _draw_tree_tokens(self, number: int, text: list[int], place: int) -> list[int]:
        rng = random.Random(f"{self.seed} {number} {place}")
        tokens, right = [0] * self.tree.num_nodes, {0}
        for node, children in enumerate(self.tree.children):
            after = place + 1 + self.tree.depths[node]
            truth = text[after] if after < len(text) else 0
            right_below = bool(children) and rng.random() < self.rate
            chosen = rng.choice(children) if right_below and node in right else None
            for offset, child in enumerate(children):
                tokens[child] = (truth + 1 + offset) % self.vocab_size
            if chosen is not None:
                tokens[chosen] = truth
                right.add(chosen)
        return tokens[1:]

    def _prepare_insert(self, other: "Oracle") -> None:
        longest = max(self.table.shape[1], other.table.shape[1])
        for each in (self, other):
            # Captured steps read the table at its address.
            if each.table.shape[1] < longest:
                each.table = pad(each.table, (0, 0, 0, longest - each.table.shape[1]))
