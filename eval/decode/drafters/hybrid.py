"""Hybrid drafts: per text and step, the suffix draft or the head's, whichever promises more tokens.

A head's accepted length is unknown in advance, so its promise is the mean of earlier steps. A step
in which every text uses its suffix draft costs the head nothing.

Source: snowflakedb/ArcticInference, which uses a suffix draft that expects as many tokens as the
head would draft. Here half of the expected tokens must reach the head's recent mean.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.decode.drafters.suffix import SuffixDrafter
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter, Roots

KEPT = 0.5
"""Share of the expected tokens of a suffix draft that was right, over 72 prompts of six kinds;
equal for drafts of 1 and of 20 tokens."""
MEMORY = 0.8
"""Weight of the mean of all earlier steps against one new step."""


class HybridDrafter:
    """Chooses the draft with more expected accepted tokens.

    Args:
        head: drafter that ranks its candidates and may skip steps.
        suffix: suffix drafter for the same texts.
        expected: assumed accepted tokens of a head's draft before any are known.
    """

    num_static_nodes = None

    def __init__(self, head: Drafter, suffix: SuffixDrafter, expected: float) -> None:
        self.head, self.suffix, self.expected = head, suffix, expected
        self.taps = head.taps
        self.means: list[float] = []
        self.copied: list[bool] = []

    def observe(self, seen: CommittedTokens) -> None:
        """Let both observe, and update the head's mean per text."""
        self.head.observe(seen)
        self.suffix.observe(seen)
        self.device = seen.output.hidden_states.device
        if seen.logits is None:
            self.means = [self.expected] * len(seen.token_ids)
            return
        for row, tokens in enumerate(seen.token_ids):
            if not self.copied[row]:
                num_accepted = len(tokens) - 1
                self.means[row] = MEMORY * self.means[row] + (1 - MEMORY) * num_accepted

    def propose(self, roots: Roots) -> Draft:
        """Draft chains where the suffix promises more, the head's trees elsewhere."""
        drafts = self.suffix.draft_chains(roots.ids)
        pairs = zip(drafts, self.means, strict=True)
        self.copied = [KEPT * score >= mean and bool(tokens) for (tokens, score), mean in pairs]
        chains = [tokens for tokens, _ in drafts]
        if all(self.copied):
            return Draft.from_chains(chains, self.device)
        draft = self.head.propose(roots)
        return _replace_by_chains(draft, chains, self.copied) if any(self.copied) else draft

    def select_rows(self, rows: list[int]) -> None:
        """Keep some texts only."""
        self.head.select_rows(rows)
        self.suffix.select_rows(rows)
        if self.means:
            self.means = [self.means[row] for row in rows]
        if self.copied:
            self.copied = [self.copied[row] for row in rows]

    def insert_row(self, row: int, other: "HybridDrafter") -> None:
        """Start the single text of another drafter in a row."""
        self.head.insert_row(row, other.head)
        self.suffix.insert_row(row, other.suffix)
        self.means[row] = other.means[0]


def _replace_by_chains(draft: Draft, chains: list[list[int]], copied: list[bool]) -> Draft:
    """Replace some texts' trees by chains."""
    assert draft.draft_probs is None
    rows = [chain if own else [] for chain, own in zip(chains, copied, strict=True)]
    others = Draft.from_chains(rows, draft.tokens.device)
    width = max(draft.tokens.shape[1], others.tokens.shape[1])
    here = others.tokens[:, :1] != PAD
    tokens = torch.where(
        here, _pad_width(others.tokens, width, PAD), _pad_width(draft.tokens, width, PAD)
    )
    parents = torch.where(
        here,
        _pad_width(_list_parents(others), width, 0),
        _pad_width(_list_parents(draft), width, 0),
    )
    return Draft(parents, tokens, max(draft.depth, others.depth))


def _list_parents(draft: Draft) -> Tensor:
    """[B or 1, N - 1] parents of the nodes without the root."""
    return draft.tree if isinstance(draft.tree, Tensor) else draft.build_layout().parents[:, 1:]


def _pad_width(rows: Tensor, width: int, value: int) -> Tensor:
    return pad(rows, (0, width - rows.shape[1]), value=value)
