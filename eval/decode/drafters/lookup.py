"""Draft tokens looked up in tables: prompt lookup, an n-gram model of the text, and recycling.

Prompt lookup copies from the text so far; the n-gram model follows the majority in the text so far.

Token recycling keeps, for each token, the target's best candidates when it last read that token in
any draft, accepted or rejected. A draft is a static tree filled from this table.

Source of recycling: Luo et al., arXiv 2408.08696; hemingkx/Spec-Bench `model/recycling`. Differs: a
token not read yet has no successors, and a tree may have any number of nodes.
Letters: B texts, N tree nodes (root included), V vocabulary.
"""

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter, Roots
from heads.decoding.tree import Tree

NUM_SUCCESSORS = 8
"""Candidates that the table of recycling keeps after a token."""
CPU_NODES, GPU_NODES = 8, 80
"""Nodes of recycling's default tree: as many as pay on a core, and the paper's."""
DEPTH = 6
"""Depth of recycling's tree."""
ACCURACY = [0.6, 0.1, 0.04, 0.02, 0.015, 0.01, 0.01, 0.01]
"""Rates at which each successor was right below a right token, for a small chat model; equal at
every depth."""


class _Table:
    """One text, with the token that followed each of its n-grams.

    Args:
        max_ngram: longest run of tokens to look up.
        min_ngram: shortest run of tokens to look up.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.text: list[int] = []

    def append_token(self, token: int) -> None:
        """Append a token, which is the follower of the n-grams that ended the text."""
        for size in self.sizes:
            if size <= len(self.text):
                self.record_follower(tuple(self.text[-size:]), token)
        self.text.append(token)

    def record_follower(self, ngram: tuple[int, ...], follower: int) -> None:
        """Record that `follower` continues the text after an n-gram."""
        raise NotImplementedError

    def draft(self, num_tokens: int) -> list[int]:
        """Draft tokens that may follow the text."""
        raise NotImplementedError


class _FirstPlaces(_Table):
    """First place of each n-gram."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        super().__init__(max_ngram, min_ngram)
        self.places: dict[tuple[int, ...], int] = {}

    def record_follower(self, ngram: tuple[int, ...], follower: int) -> None:  # noqa: ARG002
        """Remember the follower's place, if the n-gram is new."""
        self.places.setdefault(ngram, len(self.text))

    def draft(self, num_tokens: int) -> list[int]:
        """Draft the tokens after the first place of the longest run that ends the text."""
        for size in self.sizes:
            place = self.places.get(tuple(self.text[-size:]))
            if place is not None and size <= len(self.text):
                return self.text[place : place + num_tokens]
        return []


class _Followers(_Table):
    """Counts of the tokens that followed each n-gram."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        super().__init__(max_ngram, min_ngram)
        self.counts: dict[tuple[tuple[int, ...], int], int] = {}
        self.best: dict[tuple[int, ...], int] = {}

    def record_follower(self, ngram: tuple[int, ...], follower: int) -> None:
        """Count a follower; the most frequent one leads, the latest among equals."""
        self.counts[ngram, follower] = self.counts.get((ngram, follower), 0) + 1
        leader = self.best.get(ngram, follower)
        if self.counts[ngram, follower] >= self.counts[ngram, leader]:
            self.best[ngram] = follower

    def draft(self, num_tokens: int) -> list[int]:
        """Draft token by token the leader after the longest known run."""
        tail = self.text[-self.sizes[0] :]
        drafted: list[int] = []
        while len(drafted) < num_tokens:
            runs = (tuple(tail[-size:]) for size in self.sizes if size <= len(tail))
            follower = next((self.best[run] for run in runs if run in self.best), None)
            if follower is None:
                break
            drafted.append(follower)
            tail.append(follower)
        return drafted


class _FromText(Drafter):
    """Keeps a table per text and drafts chains from it, all on the host.

    Args:
        num_tokens: largest number of draft tokens.
        max_ngram: longest run of last tokens to look up, tried first.
        min_ngram: shortest run of last tokens to look up.
    """

    row_attributes = ("tables",)
    table: type[_Table]

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.num_tokens = num_tokens
        self.limits = (max_ngram, min_ngram)
        self.tables: list[_Table] = []

    def observe(self, seen: CommittedTokens) -> None:
        """Append committed tokens; `propose` has appended the roots already."""
        self.device = seen.output.hidden_states.device
        if not self.tables:
            self.tables = [self.table(*self.limits) for _ in seen.token_ids]
        for table, tokens in zip(self.tables, seen.token_ids, strict=True):
            for token in tokens if seen.logits is None else tokens[1:]:
                table.append_token(token)

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of at most `num_tokens`."""
        for table, root in zip(self.tables, roots.ids, strict=True):
            table.append_token(root)
        return Draft.from_chains(
            [table.draft(self.num_tokens) for table in self.tables], self.device
        )


class PromptLookup(_FromText):
    """Copies the tokens after the first occurrence of the last tokens in prompt or answer.

    Drafts as transformers' `prompt_lookup_num_tokens`, with `max_matching_ngram_size` as
    `max_ngram`, and as vLLM's method `ngram`.

    Source: github.com/apoorvumang/prompt-lookup-decoding.
    """

    table = _FirstPlaces


class NgramModel(_FromText):
    """Drafts with an n-gram model of prompt and answer, backing off to shorter n-grams.

    Unlike a copy, it follows the majority and continues where a copied passage ends.
    """

    table = _Followers


class SuccessorTable:
    """Best candidates after each token, shared by the drafters of a target."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def record_successors(self, tokens: Tensor, logits: Tensor) -> None:
        """Record the best tokens of the target's logits [B, N, V] after tokens [B, N].

        PAD gets none.
        """
        if self.table is None:
            size = (logits.shape[-1] + 1, NUM_SUCCESSORS)
            self.table = torch.full(size, PAD, device=logits.device)
        # PAD is the last row.
        self.table[tokens] = logits.topk(NUM_SUCCESSORS).indices
        self.table[PAD] = PAD

    def look_up(self, tokens: Tensor) -> Tensor:
        """Look up the [..., 8] int64 successors of tokens, best first; PAD if never read."""
        if self.table is None:
            return tokens.new_full((*tokens.shape, NUM_SUCCESSORS), PAD)
        return self.table[tokens]


class Recycling(Drafter):
    """Fills a static tree from a table of successors, on the device.

    Args:
        successors: table shared with earlier and later drafters.
        tree: tree with ranks below 8.
    """

    row_attributes = ("drafted",)

    def __init__(self, successors: SuccessorTable, tree: Tree) -> None:
        self.successors, self.tree = successors, tree
        self.num_static_nodes = tree.num_nodes
        self.drafted: Tensor | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Record the successors of every node of the last draft."""
        if seen.logits is not None:
            assert self.drafted is not None
            self.successors.record_successors(self.drafted, seen.logits)

    def propose(self, roots: Roots) -> Draft:
        """Draft successors of successors."""
        nodes = [roots.tokens]
        successors: dict[int, Tensor] = {}
        for parent, rank in zip(self.tree.parents[1:], self.tree.ranks[1:], strict=True):
            if parent not in successors:
                successors[parent] = self.successors.look_up(nodes[parent])
            nodes.append(successors[parent][:, rank])
        self.drafted = torch.stack(nodes, 1)
        return Draft.from_tree(self.tree, self.drafted[:, 1:])


def build_recycling_tree(num_tokens: int) -> Tree:
    """Build recycling's tree of the likeliest nodes."""
    return Tree.from_accuracies([ACCURACY] * DEPTH, num_tokens)
