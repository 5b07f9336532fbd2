"""Suffix decoding: draft the followers of the longest last run of tokens, here and in answers.

Every known run of tokens is a path from the root of a tree whose nodes count followers. A draft
starts at a run that ends the text and follows the most frequent followers; longer runs give longer
drafts.

Source: SuffixDecoding, arXiv 2411.04975; snowflakedb/ArcticInference `suffix_decoding`. Differs:
runs met once are not unfolded, so a text costs a few nodes per token instead of one per token and
depth.

Hybrid drafts: per text and step, the suffix draft or the head's, whichever promises more tokens. A
head's accepted length is unknown in advance, so its promise is the mean of earlier steps. A step in
which every text uses its suffix draft costs the head nothing.

Source: snowflakedb/ArcticInference, which uses a suffix draft that expects as many tokens as the
head would draft. Here half of the expected tokens must reach the head's recent mean.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter, Roots

ACCEPTED_SHARE = 0.5
"""Share of the expected tokens of a suffix draft that was right, over 72 prompts of six kinds;
equal for drafts of 1 and of 20 tokens."""
MEMORY = 0.8
"""Weight of the mean of all earlier steps against one new step."""


class _Run:
    """Run of tokens.

    Attributes:
        token: last token of the run.
        count: number of occurrences.
        text: a text that contains the run.
        end: position after the run in `text`.
        followers: runs that are one token longer; None while `text` holds everything known.
        total: number of occurrences of all followers.
        best: most frequent follower, the latest among equals.
    """

    __slots__ = ("best", "count", "end", "followers", "text", "token", "total")

    def __init__(self, token: int, text: list[int], end: int) -> None:
        self.token, self.text, self.end = token, text, end
        self.count = 1
        self.followers: dict[int, _Run] | None = None
        self.total = 0
        self.best: _Run | None = None

    def add_followers(self) -> None:
        """Add the run that ends with the next token of `text`."""
        self.followers = {}
        if self.end < len(self.text):
            token = self.text[self.end]
            self.followers[token] = self.best = _Run(token, self.text, self.end + 1)
            self.total = 1

    def count_follower(self, text: list[int]) -> "_Run | None":
        """Count a text's last token as follower; return the longer run if it was known already."""
        assert self.followers is not None
        token = text[-1]
        known = run = self.followers.get(token)
        if run is None:
            run = self.followers[token] = _Run(token, text, len(text))
        else:
            run.count += 1
        self.total += 1
        if self.best is None or run.count >= self.best.count:
            self.best = run
        return known


class SuffixTree:
    """Runs of some texts, all of which may be growing.

    Args:
        max_ngram: tokens of the longest run.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.root = _Run(-1, [], 0)
        self.root.add_followers()

    def add_last_token(self, runs: list[_Run], text: list[int]) -> list[_Run]:
        """Add the last token of a text.

        Args:
            runs: known runs before the token, the empty run first.
            text: text that ends with the token.

        Returns:
            The known runs before the next token.
        """
        going = [self.root]
        for shorter in runs:
            run = shorter.count_follower(text)
            if run is None:
                continue
            if len(going) < self.max_ngram:
                if run.followers is None:
                    run.add_followers()
                going.append(run)
        return going


class SuffixDrafter(Drafter):
    """Drafts chains from prompt and answer, or from earlier answers, whichever promises more.

    Args:
        answers: tree shared with earlier and later drafters; growing answers are added to it.
        num_tokens: largest number of draft tokens.
        factor: largest number of draft tokens per token of the continued run.
        min_prob: probability below which a draft ends.
    """

    row_attributes = ("texts",)

    def __init__(
        self, answers: SuffixTree, num_tokens: int = 24, factor: float = 1.0, min_prob: float = 0.1
    ) -> None:
        self.answers, self.limits = answers, (num_tokens, factor, min_prob)
        self.texts: list[_Text] = []

    def observe(self, seen: CommittedTokens) -> None:
        """Append committed tokens; `propose` has appended the roots already."""
        self.device = seen.output.hidden_states.device
        if not self.texts:
            self.texts = [_Text(self.answers) for _ in seen.token_ids]
        for text, tokens in zip(self.texts, seen.token_ids, strict=True):
            for token in tokens if seen.logits is None else tokens[1:]:
                text.tokens.append(token)
                text.add_last_token(in_prompt=seen.logits is None)

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of at most `num_tokens`."""
        return Draft.from_chains(
            [tokens for tokens, _ in self.draft_chains(roots.ids)], self.device
        )

    def draft_chains(self, roots: list[int]) -> list[tuple[list[int], float]]:
        """Draft a chain for each text, with the number of its tokens expected to be right."""
        pairs = zip(self.texts, roots, strict=True)
        return [text.draft(root, self.limits) for text, root in pairs]


class _Text:
    """Text with its own tree, and its answer in the shared tree."""

    def __init__(self, answers: SuffixTree) -> None:
        self.answers, self.own = answers, SuffixTree(answers.max_ngram)
        self.tokens: list[int] = []
        self.runs, self.answer_runs = [self.own.root], [answers.root]

    def add_last_token(self, in_prompt: bool = False) -> None:
        """Add the last token to the trees; prompts stay out of the shared one."""
        self.runs = self.own.add_last_token(self.runs, self.tokens)
        if not in_prompt:
            self.answer_runs = self.answers.add_last_token(self.answer_runs, self.tokens)

    def draft(self, root: int, limits: tuple[int, float, float]) -> tuple[list[int], float]:
        """Append the root and draft. The run that ends the answer must not find itself."""
        self.tokens.append(root)
        drafts = [_draft_best_chain(runs, root, *limits) for runs in (self.runs, self.answer_runs)]
        self.add_last_token()
        return max(drafts, key=lambda draft: draft[1])


def _draft_best_chain(
    runs: list[_Run], root: int, num_tokens: int, factor: float, min_prob: float
) -> tuple[list[int], float]:
    """Draft a chain after `root`, with the number of its tokens expected to be right.

    Args:
        runs: runs of a text that ends before `root`, see `SuffixTree.add_last_token`.
        root: next token of the text.
        num_tokens: largest number of draft tokens.
        factor: largest number of draft tokens per token of the continued run.
        min_prob: probability below which the draft ends.
    """
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(len(runs), 0, -1):
        longest = min(num_tokens, int(factor * length))
        if longest <= best[1]:
            break
        followers = runs[length - 1].followers
        assert followers is not None
        run = followers.get(root)
        if run is not None:
            drafted = _draft_after_run(run, longest, min_prob)
            best = max(best, drafted, key=lambda draft: draft[1])
    return best


def _draft_after_run(run: _Run, most: int, min_prob: float) -> tuple[list[int], float]:
    """Draft at most `most` tokens after a run, with the sum of their probabilities."""
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while run.followers is not None and run.best is not None and len(tokens) < most:
        probability *= run.best.count / run.total
        if probability < min_prob:
            return tokens, score
        run = run.best
        tokens.append(run.token)
        score += probability
    if run.followers is None:
        copied = run.text[run.end : run.end + most - len(tokens)]
        score += probability * len(copied)
        tokens += copied
    return tokens, score


class HybridDrafter(Drafter):
    """Chooses the draft with more expected accepted tokens.

    Args:
        head: drafter of a head, greedy, which may skip steps.
        suffix: suffix drafter for the same texts.
        expected: assumed accepted tokens of a head's draft before any are known.
    """

    row_attributes = ("head", "suffix", "means", "copied")

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
        """Draft a chain for texts whose suffix promises more, and the head's tree for others."""
        drafts = self.suffix.draft_chains(roots.ids)
        pairs = zip(drafts, self.means, strict=True)
        self.copied = [
            ACCEPTED_SHARE * score >= mean and bool(tokens) for (tokens, score), mean in pairs
        ]
        chains = [tokens for tokens, _ in drafts]
        if all(self.copied):
            return Draft.from_chains(chains, self.device)
        draft = self.head.propose(roots)
        return _replace_by_chains(draft, chains, self.copied) if any(self.copied) else draft


def _replace_by_chains(draft: Draft, chains: list[list[int]], copied: list[bool]) -> Draft:
    """Replace some texts' trees by chains."""
    assert draft.draft_probs is None
    rows = [chain if is_copied else [] for chain, is_copied in zip(chains, copied, strict=True)]
    others = Draft.from_chains(rows, draft.tokens.device)
    width = max(draft.tokens.shape[1], others.tokens.shape[1])
    has_chain = others.tokens[:, :1] != PAD

    def merge(of_chains: Tensor, of_trees: Tensor, missing: int) -> Tensor:
        of_chains, of_trees = (
            pad(each, (0, width - each.shape[1]), value=missing) for each in (of_chains, of_trees)
        )
        return torch.where(has_chain, of_chains, of_trees)

    tokens = merge(others.tokens, draft.tokens, PAD)
    parents = merge(_list_parents(others), _list_parents(draft), 0)
    return Draft(parents, tokens, max(draft.depth, others.depth))


def _list_parents(draft: Draft) -> Tensor:
    """Return the [B or 1, N - 1] parents of all nodes but the root."""
    return draft.tree if isinstance(draft.tree, Tensor) else draft.build_layout().parents[:, 1:]
