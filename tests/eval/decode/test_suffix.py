import random
import time
from collections import Counter
from statistics import median

import pytest
from drafters import seen
from pytest import approx

from eval.decode.drafters.suffix import SuffixDrafter, SuffixTree
from heads.decoding.drafting import PAD, Roots


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
        ((2,), [1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8], 2),
        ((24, 2.0), [1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6, 1, 2], 6),
        ((24, 0.5), [1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9], 1),
        ((24, 2.0), [5, 6, 7, 8, 5, 6], [7, 8, 5, 6], 4),  # up to the root, not beyond
        # 1 was followed by 2 twice and by 3 once, and 1 2 by 7 and by 8.
        ((), [1, 2, 7, 1, 3, 1, 2, 8, 1], [2], 2 / 3),
        ((24, 2.0), [1, 2, 7, 1, 3, 1, 2, 8, 1], [2, 8], 2 / 3 + 1 / 3),
        ((24, 2.0, 0.5), [1, 2, 7, 1, 3, 1, 2, 8, 1], [2], 2 / 3),
        # 9 1 was followed by 2 and by 3, but 1 by 2 three times of four.
        ((1,), [9, 1, 2, 9, 1, 3, 1, 2, 1, 2, 5, 9, 1], [2], 3 / 4),
        ((1,), [9, 1, 2, 9, 1, 3, 5, 9, 1], [3], 1 / 2),  # of equals the latest
        ((), [1, 2, 3, 4], [], 0),
        ((), [4], [], 0),
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


def test_reading_on_equals_reading_all_at_once() -> None:
    luck = random.Random(1)
    text = luck.choices(range(4), k=60)
    one = suffix()
    one.observe(seen([text[:9]], read=False))
    place = 9
    while place < 50:
        # Nothing is found among the answers that is not found in the text.
        draft = one.draft_chains([text[place]])[0]
        assert draft[1] >= drafted(suffix(), text[: place + 1])[1]
        kept = luck.randint(1, 4)
        one.observe(seen([text[place : place + kept]]))
        place += kept


def test_earlier_answers_are_copied_and_their_prompts_are_not() -> None:
    answers = SuffixTree(24)
    first = SuffixDrafter(answers)
    assert drafted(first, [1, 2, 3, 7]) == ([], 0)
    first.observe(seen([[7, 8, 9]]))
    first.propose(Roots.from_ids([6]))
    assert drafted(SuffixDrafter(answers), [5, 7]) == ([8], 1)
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


def test_texts_that_find_less_are_filled_up() -> None:
    drafter = suffix()
    drafter.observe(seen([[1, 2, 3, 4, 1], [7, 8], [6]], read=False))
    draft = drafter.propose(Roots.from_ids([2, 7, 5]))
    assert draft.tokens.tolist() == [[3, 4], [8, PAD], [PAD, PAD]]


def test_texts_may_end_before_any_was_seen() -> None:
    drafter = suffix()
    drafter.select_rows([1])
    assert drafted(drafter, [1, 2, 1]) == ([2], 1)


@pytest.mark.parametrize("num_ids", [1, 3, 200])
def test_a_step_does_not_search_a_long_text(num_ids: int) -> None:
    luck = random.Random(0)
    seconds = []
    for length in (256, 8192):
        one = suffix()
        one.observe(seen([luck.choices(range(num_ids), k=length)], read=False))
        steps = []
        for _ in range(200):
            started = time.perf_counter()
            one.draft_chains([luck.randrange(num_ids)])
            steps.append(time.perf_counter() - started)
        seconds.append(median(steps))
    assert seconds[1] < 8 * seconds[0]
