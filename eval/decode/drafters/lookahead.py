"""Lookahead decoding: n-grams that the target guesses itself, in the same pass.

A window of W columns and N - 1 rows holds guesses about later tokens. Row 0 is a chain that begins
with the root; each node in row l hangs below row l - 1 of its column. The target reads all of them.
Its answers below the last row complete W n-grams and become the next last row (Jacobi iteration),
while the other rows move up by one, however many tokens were accepted. N-grams of the window and of
the text go to a pool by their first token; those that start with the root are verified as further
branches.

Source: Fu et al., arXiv 2402.02057, section 3; hao-ai-lab/LookaheadDecoding `lade/decoding.py` with
ALWAYS_FWD_ONE and POOL_FROM_PROMPT. Differs: the window starts with all rows, and guesses and the
window's own branches may be accepted whole.
Letters: B texts, W columns, N tokens of an n-gram.
"""

import random
from collections import OrderedDict

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter, Roots
from heads.devices import to_device

Ngram = tuple[int, ...]


class _Trie:
    """Nodes in which branches with a common start share it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.children: dict[tuple[int, int], int] = {}

    def add_child(self, parent: int, token: int) -> int:
        """Return the child of a node with this token, made if missing; node 0 is the root."""
        node = self.children.get((parent, token))
        if node is None:
            self.tokens.append(token)
            self.parents.append(parent)
            node = self.children[parent, token] = len(self.tokens)
        return node


class _Window:
    """Guesses of one text, and its pool: the latest few n-grams by their first token."""

    def __init__(self, prompt: list[int], size: tuple[int, int], num_guesses: int) -> None:
        self.width, self.level = size
        rng = random.Random(0)
        known = prompt or [0]
        self.rows = [[rng.choice(known) for _ in range(self.width)] for _ in range(self.level - 1)]
        self.num_guesses = num_guesses
        self.pool: dict[int, OrderedDict[Ngram, None]] = {}
        self.tail: list[int] = []
        self.last: list[int] = []

    def append_tokens(self, tokens: list[int]) -> None:
        """Append tokens to the text, and its n-grams to the pool."""
        for token in tokens:
            self.tail = [*self.tail, token][-self.level :]
            if len(self.tail) == self.level:
                self.add_ngram(tuple(self.tail))

    def add_ngram(self, ngram: Ngram) -> None:
        """Add an n-gram to the pool, as the latest with its first token."""
        tails = self.pool.setdefault(ngram[0], OrderedDict())
        tails.pop(ngram[1:], None)
        tails[ngram[1:]] = None
        if len(tails) > self.num_guesses:
            tails.popitem(last=False)

    def draft(self, root: int) -> _Trie:
        """Build the trie of window and guesses; `last` gets the nodes of the last row."""
        self.append_tokens([root])
        self.rows[0] = [root, *self.rows[0][1:]]
        trie = _Trie()
        above = [0]
        for token in self.rows[0][1:]:
            above.append(trie.add_child(above[-1], token))
        for row in self.rows[1:]:
            above = [
                trie.add_child(parent, token) for parent, token in zip(above, row, strict=True)
            ]
        self.last = above
        for tail in reversed(self.pool.get(root, OrderedDict())):
            node = 0
            for token in tail:
                node = trie.add_child(node, token)
        return trie

    def shift_rows(self, answers: list[int]) -> None:
        """Take the target's answers [W] below the last row."""
        for column in zip(*self.rows, answers, strict=True):
            self.add_ngram(column)
        self.rows = [*self.rows[1:], answers]


class Lookahead(Drafter):
    """Drafts window and guesses. Waits for the device once more per step, for the answers.

    Args:
        window: number W of columns.
        level: number N of tokens of an n-gram, at least 2.
        num_guesses: n-grams kept and verified per first token.
    """

    row_attributes = ("windows", "last")

    def __init__(self, window: int = 7, level: int = 5, num_guesses: int = 7) -> None:
        self.size, self.num_guesses = (window, level), num_guesses
        self.windows: list[_Window] = []
        self.last: Tensor | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Start the windows from the prompts, then advance the windows by committed tokens."""
        self.device = seen.output.hidden_states.device
        if not self.windows:
            self.windows = [_Window(p, self.size, self.num_guesses) for p in seen.token_ids]
        for window, tokens in zip(self.windows, seen.token_ids, strict=True):
            window.append_tokens(tokens if seen.logits is None else tokens[1:])
        if seen.logits is not None:
            assert self.last is not None
            places = torch.arange(len(self.last), device=self.device).unsqueeze(1)
            answers = seen.logits[places, self.last].argmax(-1).tolist()
            for window, row in zip(self.windows, answers, strict=True):
                window.shift_rows(row)

    def propose(self, roots: Roots) -> Draft:
        """Draft trees of different shapes, padded to the largest."""
        tries = [window.draft(root) for window, root in zip(self.windows, roots.ids, strict=True)]
        largest = max(len(trie.tokens) for trie in tries)
        rows = []
        for trie, window in zip(tries, self.windows, strict=True):
            gap = largest - len(trie.tokens)
            rows.append([*trie.tokens, *[PAD] * gap, *trie.parents, *[0] * gap, *window.last])
        width, level = self.size
        sizes = [largest, largest, width]
        tokens, parents, self.last = to_device(rows, self.device).split(sizes, dim=1)
        return Draft(parents, tokens, level - 1 + max(width - 2, 0))
