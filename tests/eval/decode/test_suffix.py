import random
from collections import Counter

import pytest
import torch
from drafters import draft_paths, seen
from pytest import approx
from toys import endless_target

from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import Request, decode_many
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.tree import Tree


def suffix(max_ngram: int = 24, *limits) -> SuffixDrafter:
    return SuffixDrafter(SuffixTree(max_ngram), *limits)


def drafted(drafter: SuffixDrafter, text: list[int]) -> tuple[list[int], float]:
    """The draft behind a text, which ends in the root, and what it promises."""
    drafter.observe(seen([text[:-1]], read=False))
    return drafter.draft_chains(text[-1:])[0]


@pytest.mark.parametrize(
    ("limits", "text", "tokens", "score"),
    [
        # As many tokens as the run that is continued has.
        ((), [1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7], 3),
        ((24, 2.0), [1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6, 1, 2], 6),
        ((24, 2.0), [5, 6, 7, 8, 5, 6], [7, 8, 5, 6], 4),  # up to the root, not beyond
        # 1 was followed by 2 twice and by 3 once, and 1 2 by 7 and by 8.
        ((), [1, 2, 7, 1, 3, 1, 2, 8, 1], [2], 2 / 3),
        ((24, 2.0), [1, 2, 7, 1, 3, 1, 2, 8, 1], [2, 8], 2 / 3 + 1 / 3),
        # 9 1 was followed by 2 and by 3, but 1 by 2 three times of four.
        ((1,), [9, 1, 2, 9, 1, 3, 1, 2, 1, 2, 5, 9, 1], [2], 3 / 4),
        ((1,), [9, 1, 2, 9, 1, 3, 5, 9, 1], [3], 1 / 2),  # of equals the latest
        ((), [1, 2, 3, 4], [], 0),
    ],
)
def test_a_draft_follows_the_majority_behind_the_best_run(limits, text, tokens, score) -> None:
    assert drafted(suffix(24, *limits), text) == (tokens, approx(score))


def test_it_is_what_counting_through_the_text_gives() -> None:
    luck = random.Random(0)
    for _ in range(400):
        text = luck.choices(range(luck.choice([2, 3, 5])), k=luck.randint(1, 40))
        max_ngram = luck.randint(1, 6)
        limits = (luck.randint(1, 8), luck.choice([0.5, 1.0, 3.0]), luck.choice([0.0, 0.1, 0.4]))
        tokens, score = drafted(suffix(max_ngram, *limits), text)
        assert (tokens, approx(score)) == counted(text, max_ngram, *limits)


def counted(text: list[int], max_ngram: int, num_tokens: int, factor: float, min_prob: float):
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(min(max_ngram, len(text)), 0, -1):
        most = min(num_tokens, int(factor * length))
        found = continued(text, text[-length:], max_ngram, most, min_prob)
        best = max(best, found, key=lambda each: each[1])
    return best


def continued(text: list[int], run: list[int], max_ngram: int, most: int, min_prob: float):
    body, tokens, probability, score = text[:-1], [], 1.0, 0.0
    while len(tokens) < most:
        size = len(run)
        ends = [end for end in range(size, len(body) + 1) if body[end - size : end] == run]
        if not ends:
            break
        if len(ends) == 1 or size == max_ngram:
            copied = text[ends[0] :][: most - len(tokens)]
            return tokens + copied, score + probability * len(copied)
        counts: Counter[int] = Counter()
        leader = body[ends[0]]
        for follower in (body[end] for end in ends if end < len(body)):
            counts[follower] += 1
            leader = follower if counts[follower] >= counts[leader] else leader
        probability *= counts[leader] / counts.total()
        if probability < min_prob:
            break
        tokens.append(leader)
        score += probability
        run = [*run, leader]
    return tokens, score


def test_earlier_answers_are_copied_and_their_prompts_are_not() -> None:
    answers = SuffixTree(24)
    first = SuffixDrafter(answers)
    assert drafted(first, [1, 2, 3, 7]) == ([], 0)
    first.observe(seen([[7, 8, 9]]))
    first.propose(Roots.from_ids([6]))
    assert drafted(SuffixDrafter(answers), [5, 7]) == ([8], 1)
    # Not two tokens that its own text promises less: there 9 was followed by three, each once.
    assert drafted(SuffixDrafter(answers, 24, 2.0), [9, 4, 5, 9, 2, 5, 9, 3, 8, 9]) == ([6], 1)
    second = SuffixDrafter(answers)
    second.observe(seen([[5, 4, 4]], read=False))
    second.propose(Roots.from_ids([7]))
    second.observe(seen([[7]]))
    assert second.draft_chains([8]) == [([9, 6], 2)]
    assert drafted(SuffixDrafter(answers), [4, 2]) == ([], 0)


def test_texts_of_a_batch_copy_from_each_other() -> None:
    drafter = suffix()
    drafter.observe(seen([[1], [2], [3]], read=False))
    drafter.propose(Roots.from_ids([7, 4, 5]))
    drafter.observe(seen([[7, 8, 9], [4], [5]]))
    drafter.propose(Roots.from_ids([1, 6, 6]))
    drafter.select_rows([1, 2])
    drafter.observe(seen([[6], [6]]))
    draft = drafter.propose(Roots.from_ids([7, 5]))
    assert draft.tokens.tolist() == [[8], [6]]
    assert draft.draft_probs is None


FORK = Tree.from_paths([[0], [1], [0, 0]])


class Forks(Drafter):
    """A head that drafts the same three tokens below every root, and counts how often."""

    def __init__(self) -> None:
        self.num_drafts = 0

    def observe(self, seen: CommittedTokens) -> None:
        pass

    def propose(self, roots: Roots) -> Draft:
        self.num_drafts += 1
        return Draft.from_tree(FORK, torch.tensor([[30, 31, 32]] * len(roots)))


def hybrid(expected: float = 1.0) -> HybridDrafter:
    return HybridDrafter(Forks(), suffix(), expected)


def test_half_of_what_a_suffix_counts_on_must_be_what_the_head_gets() -> None:
    drafter = hybrid(expected=1.5)
    drafter.observe(seen([[1, 2, 3, 4, 5, 1, 2]], read=False))
    # A run of 3 promises 3 tokens: as many as the head, counted half.
    assert draft_paths(drafter.propose(Roots.from_ids([3]))) == [[(4,), (4, 5), (4, 5, 1)]]
    assert drafter.head.num_drafts == 0
    drafter = hybrid(expected=1.6)
    drafter.observe(seen([[1, 2, 3, 4, 5, 1, 2]], read=False))
    assert draft_paths(drafter.propose(Roots.from_ids([3]))) == [[(30,), (31,), (30, 32)]]


def test_no_copy_is_no_draft_of_the_suffix() -> None:
    drafter = hybrid(expected=0.0)
    drafter.observe(seen([[1, 2]], read=False))
    assert draft_paths(drafter.propose(Roots.from_ids([3]))) == [[(30,), (31,), (30, 32)]]


def test_the_head_is_expected_to_get_what_it_got() -> None:
    drafter = hybrid(expected=1.0)
    drafter.observe(seen([[1, 2, 8, 9]], read=False))
    drafter.propose(Roots.from_ids([3]))
    drafter.observe(seen([[3, 30, 32]]))
    assert drafter.means == [approx(0.8 * 1 + 0.2 * 2)]
    drafter.propose(Roots.from_ids([4]))
    drafter.observe(seen([[4]]))
    assert drafter.means == [approx(0.8 * 1.2)]


def test_a_batch_has_chains_beside_trees() -> None:
    drafter = hybrid(expected=1.0)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], [9], [1, 2, 6, 6, 1]]
    drafter.observe(seen(prompts, read=False))
    draft = drafter.propose(Roots.from_ids([5, 9, 2]))
    fork = [(30,), (31,), (30, 32)]
    chain = [(6,), (6, 7), (6, 7, 1), (6, 7, 1, 2), (6, 7, 1, 2, 3)]
    assert draft_paths(draft) == [chain, fork, [(6,), (6, 6)]]
    drafter.select_rows([1, 2])
    drafter.observe(seen([[9, 30], [2]]))
    assert drafter.means == [approx(1.0), 1.0]


def test_a_hybrid_copies_from_its_own_text() -> None:
    """Two texts that repeat themselves, the second in the place of one of others."""
    requests = [Request([5, 6, 7, 5]), Request([9, 8]), Request([11, 12, 13, 14] * 3)]
    made: list[HybridDrafter] = []

    def make(_seeds: list[int]) -> HybridDrafter:
        made.append(hybrid(0.4))
        return made[-1]

    decode_many(endless_target(), make, requests, 6, 2)
    assert [11, 12, 13, 14] * 3 in [text.tokens[:12] for text in made[0].suffix.texts]
