"""Keys and values of rows that draft in parallel: a stretch of a text, and own draft tokens.

Letters: T texts, S tokens of a text, N rows, n rows of a chunk, s tokens of a span, J earlier draft
tokens of a row, K key-value heads, d head size.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from heads.layers.documents import Documents

ROWS_PER_CHUNK = 256


class CausalRange(NamedTuple):
    """Stretch of its text that each row sees.

    Attributes:
        first: [N] int64, first token seen.
        end: [N] int64, one after the last token seen; above `first`.
        anchors: [N] int64, token from which a row drafts, if it sees its document up to that token.
        documents: documents of the text, with `rows`.
    """

    first: Tensor
    end: Tensor
    anchors: Tensor | None = None
    documents: Documents | None = None

    @classmethod
    def from_ends(cls, end: Tensor) -> "CausalRange":
        """Everything before tokens [N] int64."""
        return cls(torch.zeros_like(end), end)

    def build_mask(self, num_tokens: int) -> Tensor:
        """[N, S] bool, tokens that a row sees."""
        places = torch.arange(num_tokens, device=self.end.device)
        return (places >= self.first.unsqueeze(1)) & (places < self.end.unsqueeze(1))


def build_causal_range(documents: Documents, rows: Tensor) -> CausalRange:
    """Let a row see the tokens of its document up to its own, included.

    Args:
        documents: documents of a packed text.
        rows: [N] int64, token from which a row drafts.
    """
    bounds = documents.cu_seqlens.long()
    first = bounds[torch.searchsorted(bounds, rows, right=True) - 1]
    return CausalRange(first, rows + 1, rows, documents)


class BranchRange(NamedTuple):
    """Chunk of rows, with the stretch of the text that they see.

    Attributes:
        rows: the n rows.
        tokens: the s tokens, from the first to the last that any of the rows sees.
        seen: stretch that each row sees.
    """

    rows: slice
    tokens: slice
    seen: CausalRange

    def build_bias(self, dtype: torch.dtype) -> Tensor:
        """[n, s] on the CPU: 0 for tokens that a row sees, -inf elsewhere."""
        first, end = (each.unsqueeze(1) for each in self.seen[:2])
        places = torch.arange(self.tokens.start, self.tokens.stop)
        hidden = (places < first) | (places >= end)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


@dataclass
class BranchCache:
    """Keys and values that N rows see: a text, and the draft tokens of each row.

    Each text has N / T rows; rows are ordered by text.

    Attributes:
        keys, values: [T, S, K, d] of the texts.
        context_range: stretch of the text that each row sees.
        draft_keys, draft_values: J tensors [N, K, d] of the row's draft tokens so far.
    """

    keys: Tensor
    values: Tensor
    context_range: CausalRange
    draft_keys: list[Tensor] = field(default_factory=list)
    draft_values: list[Tensor] = field(default_factory=list)

    def select_rows(self, rows: Tensor) -> "BranchCache":
        """Select the branches of rows [M] int64, equally many per text and in order."""
        seen = CausalRange(self.context_range.first[rows], self.context_range.end[rows])
        own = [[each[rows] for each in drafts] for drafts in (self.draft_keys, self.draft_values)]
        return BranchCache(self.keys, self.values, seen, *own)

    @cached_property
    def row_ranges(self) -> list[BranchRange]:
        """All rows in chunks, computed once for every step; only on a CPU, as it reads numbers.

        Rows in text order see little of the text together. This saves half of the work in one
        causal text, and most of it with packed documents.
        """
        found, start = [], 0
        chunks = zip(*(each.split(ROWS_PER_CHUNK) for each in self.context_range[:2]), strict=True)
        for first, end in chunks:
            rows = slice(start, start + len(first))
            tokens = slice(int(first.min()), int(end.max()))
            found.append(BranchRange(rows, tokens, CausalRange(first, end)))
            start = rows.stop
        return found
