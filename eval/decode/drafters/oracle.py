"""Drafts of known acceptance, at no cost: what the engine itself loses shows in the rest."""

import random
from collections.abc import Sequence

from heads.cache import upload
from heads.drafting import Draft, Seen
from heads.target.model import Reads
from heads.tree import Tree


class Oracle:
    """Drafts the target's own text, known beforehand, with mistakes at a set rate.

    Below a right node, one child is right with probability `rate`: the first of a chain, any
    of several. All other tokens are wrong.

    Args:
        texts: per text the target's own tokens after the prompt.
        tree: the shape drafted.
        rate: of acceptance, from 0 to 1.
        vocab_size: V.
        seed: of the mistakes, which depend on nothing else but text and place.
    """

    reads = Reads()

    def __init__(
        self,
        texts: Sequence[list[int]],
        tree: Tree,
        rate: float,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self.texts = list(enumerate(texts))
        self.tree, self.rate, self.vocab_size, self.seed = tree, rate, vocab_size, seed
        self.places: list[int] = []

    def observe(self, seen: Seen) -> None:
        """Counts what was committed."""
        self.device = seen.output.hidden_states.device
        if seen.logits is None:
            self.places = [0] * len(seen.token_ids)
        else:
            counts = map(len, seen.token_ids)
            self.places = [old + new for old, new in zip(self.places, counts, strict=True)]

    def propose(self, roots: list[int]) -> Draft:  # noqa: ARG002
        """The tree, filled from the text after the root."""
        rows = [
            self._fill(number, text, place)
            for (number, text), place in zip(self.texts, self.places, strict=True)
        ]
        return Draft.of(self.tree, upload(rows, self.device))

    def _fill(self, number: int, text: list[int], place: int) -> list[int]:
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

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        self.texts = [self.texts[row] for row in rows]
        if self.places:
            self.places = [self.places[row] for row in rows]

    def take(self, row: int, other: "Oracle") -> None:
        """A row goes on with the one text of another drafter."""
        self.texts[row], self.places[row] = other.texts[0], other.places[0]
