"""Keys and values of rows that draft side by side: a stretch of a text, and their own drafts.

Letters: T texts, S tokens of a text, N rows, n rows of a chunk, s tokens of a span, J earlier
drafts of a row, K key-value heads, d head size.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from heads.layers.documents import Documents

ROWS_PER_CHUNK = 256


class Stretch(NamedTuple):
    """The stretch of its text that each row sees.

    Attributes:
        first: [N] int64, the first token.
        end: [N] int64, one more than the last; above `first`.
        rows: [N] int64, the token that a row drafts from, if it sees just its document up to that.
        documents: of the text, beside `rows`.
    """

    first: Tensor
    end: Tensor
    rows: Tensor | None = None
    documents: Documents | None = None

    @classmethod
    def up_to(cls, end: Tensor) -> "Stretch":
        """Everything before some tokens, [N] int64."""
        return cls(torch.zeros_like(end), end)

    def allowed(self, num_tokens: int) -> Tensor:
        """[N, S] bool, where a row may look."""
        places = torch.arange(num_tokens, device=self.end.device)
        return (places >= self.first.unsqueeze(1)) & (places < self.end.unsqueeze(1))


def causal_rows(documents: Documents, rows: Tensor) -> Stretch:
    """A row sees the tokens of its document up to its own, so always that one.

    Args:
        documents: of a packed text.
        rows: [N] int64, the token that a row drafts from.
    """
    bounds = documents.bounds.long()
    first = bounds[torch.searchsorted(bounds, rows, right=True) - 1]
    return Stretch(first, rows + 1, rows, documents)


class Span(NamedTuple):
    """A chunk of rows and the stretch of the text that they look at.

    Attributes:
        rows: n of them.
        tokens: s of them, from the first to the last that any of the rows may look at.
        seen: what each row sees of the text.
    """

    rows: slice
    tokens: slice
    seen: Stretch

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[n, s] on the CPU, 0 where a row may look and -inf elsewhere."""
        first, end = (each.unsqueeze(1) for each in self.seen[:2])
        places = torch.arange(self.tokens.start, self.tokens.stop)
        hidden = (places < first) | (places >= end)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


@dataclass
class Branches:
    """The keys and values that N rows look at: a text, and the drafts of each row.

    Each text has N / T rows, one text's after another's.

    Attributes:
        keys, values: [T, S, K, d], of the texts.
        seen: what the rows see of their texts.
        own_keys, own_values: J tensors [N, K, d], of the row's drafts so far.
    """

    keys: Tensor
    values: Tensor
    seen: Stretch
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    def select(self, rows: Tensor) -> "Branches":
        """The branches of other rows: [M] int64 indices, equally many of each text in order."""
        seen = Stretch(self.seen.first[rows], self.seen.end[rows])
        own = [[each[rows] for each in drafts] for drafts in (self.own_keys, self.own_values)]
        return Branches(self.keys, self.values, seen, *own)

    @cached_property
    def spans(self) -> list[Span]:
        """All rows in chunks, found once for every step; on a CPU, as it asks for numbers.

        Rows in the order of the text see little of it together: half of the work falls away in
        one causal text, most of it where documents are packed.
        """
        found, start = [], 0
        chunks = zip(*(each.split(ROWS_PER_CHUNK) for each in self.seen[:2]), strict=True)
        for first, end in chunks:
            rows = slice(start, start + len(first))
            tokens = slice(int(first.min()), int(end.max()))
            found.append(Span(rows, tokens, Stretch(first, end)))
            start = rows.stop
        return found
