import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
import torch
from drafters import seen, suffix
from toys import endless_target

from eval.decode.drafters.lookup import (
    NgramModel,
    PromptLookup,
    Recycling,
    SuccessorTable,
    build_recycling_tree,
)
from eval.decode.engine import NoDraft, decode
from eval.decode.hf_generate import hf_generate
from heads.decoding.drafting import PAD, CommittedTokens, Drafter, Roots
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree

PROMPT = [5, 17, 40, 8, 77, 23, 61]
DRAFTERS = [PromptLookup, NgramModel]


def drafted(drafter: PromptLookup | NgramModel, text: list[int]) -> list[int]:
    """The draft behind a text, which ends in the root."""
    drafter.observe(seen([text[:-1]], read=False))
    draft = drafter.propose(Roots.from_ids(text[-1:]))
    assert draft.depth == draft.tokens.shape[1]
    assert draft.tokens.dtype == torch.int64
    return draft.tokens[0].tolist()


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ((3, 3, 1), [1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7]),
        ((10, 3, 1), [1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),  # up to the root, not beyond
        ((1, 2, 1), [2, 7, 1, 2, 8, 1, 2], [8]),  # a longer run before an earlier place
        ((5, 3, 2), [5, 6, 7, 5], []),
        ((5, 2, 1), [4, 4, 4], [4]),  # a run may overlap the one that it copies
    ],
)
def test_prompt_lookup_copies_what_followed(
    settings: tuple[int, int, int], text: list[int], expected: list[int]
) -> None:
    assert drafted(PromptLookup(*settings), text) == expected


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ((4, 1, 1), [1, 2, 1, 2, 1, 3, 1], [2, 1, 2, 1]),  # 2 followed 1 twice, 3 once
        ((2, 1, 1), [1, 2, 1, 3, 1], [3, 1]),  # of equals the latest
        ((1, 2, 1), [4, 1, 3, 1, 2, 1, 2, 4, 1], [3]),  # a longer run before a majority
        ((1, 1, 1), [4, 1, 3, 1, 2, 1, 2, 4, 1], [2]),
        ((6, 3, 1), [1, 2, 3, 1], [2, 3, 1, 2, 3, 1]),  # on beyond the end of the text
        ((6, 2, 2), [1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2]),
        ((6, 2, 2), [1, 2, 3, 1], []),
        ((5, 3, 1), [1, 2, 3, 4], []),
    ],
)
def test_ngrams_follow_the_majority_and_go_on(
    settings: tuple[int, int, int], text: list[int], expected: list[int]
) -> None:
    assert drafted(NgramModel(*settings), text) == expected


def test_texts_that_find_less_are_filled_up() -> None:
    drafter = PromptLookup(3)
    drafter.observe(seen([[1, 2, 3, 4], [7, 8], [6]], read=False))
    draft = drafter.propose(Roots.from_ids([1, 7, 5]))
    gap = PAD
    assert draft.tokens.tolist() == [[2, 3, 4], [8, 7, gap], [gap, gap, gap]]
    drafter.select_rows([1])
    drafter.observe(seen([[7, 8]]))
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[8, 7]]


def test_prompt_lookup_equals_a_search_through_the_text() -> None:
    luck = random.Random(0)
    for _ in range(300):
        text = luck.choices(range(luck.choice([2, 4, 8])), k=luck.randint(1, 40))
        low = luck.randint(1, 3)
        settings = (luck.randint(1, 6), luck.randint(low, 5), low)
        assert drafted(PromptLookup(*settings), text) == searched(text, *settings)


def searched(text: list[int], num_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                return text[end : end + num_tokens]
    return []


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_reading_on_equals_reading_all_at_once(
    drafter: type[PromptLookup] | type[NgramModel],
) -> None:
    luck = random.Random(1)
    text = luck.choices(range(4), k=60)
    one = drafter(6)
    one.observe(seen([text[:9]], read=False))
    place = 9
    while place < 50:
        draft = one.propose(Roots.from_ids([text[place]])).tokens[0].tolist()
        assert draft == drafted(drafter(6), text[: place + 1])
        kept = luck.randint(1, 4)
        one.observe(seen([text[place : place + kept]]))
        place += kept


@pytest.mark.parametrize(("max_ngram", "num_tokens"), [(1, 10), (3, 3)])
def test_prompt_lookup_takes_as_many_passes_as_generate(max_ngram: int, num_tokens: int) -> None:
    target = endless_target()
    target.model.generation_config.eos_token_id = decode(target, NoDraft(), [9], 10).token_ids[9:]
    for prompt in (PROMPT[:3] * 3, [9]):
        ours = decode(target, PromptLookup(num_tokens, max_ngram), prompt, 50)
        text = ours.token_ids
        # The engine's first token comes from the prompt's pass, before anything is drafted.
        theirs = hf_generate(
            target, [prompt + text[:1]], 49, GREEDY, 0,
            prompt_lookup_num_tokens=num_tokens, max_matching_ngram_size=max_ngram,
        )[0]  # fmt: skip
        assert text[:1] + theirs.token_ids == ours.token_ids
        assert 1 + len(theirs.steps) == len(ours.steps)


@pytest.mark.parametrize("drafter", [*DRAFTERS, suffix])
def test_a_step_does_not_search_a_long_text(drafter: Callable[[], Drafter]) -> None:
    luck = random.Random(0)
    seconds = []
    for length in (256, 8192):
        one = drafter()
        one.observe(seen([luck.choices(range(200), k=length)], read=False))
        steps = []
        for _ in range(200):
            started = time.perf_counter()
            one.propose(Roots.from_ids([luck.randrange(200)]))
            steps.append(time.perf_counter() - started)
        seconds.append(median(steps))
    assert seconds[1] < 8 * seconds[0]


TREE = Tree.from_paths([[0], [1], [0, 0], [1, 0]])


def ranked(num_texts: int, best: list[list[list[int]]]) -> CommittedTokens:
    """As the engine shows a pass, with the target's best tokens after each node."""
    logits = torch.zeros(num_texts, len(best[0]), 50)
    for row, nodes in zip(logits, best, strict=True):
        for node, tokens in zip(row, nodes, strict=True):
            node[tokens] = torch.arange(9.0, 9.0 - len(tokens), -1)
    return replace(seen([[0]] * num_texts), logits=logits)


def test_a_draft_is_filled_from_what_was_ranked_before() -> None:
    drafter = Recycling(SuccessorTable(), TREE)
    drafter.observe(seen([[0]], read=False))
    nothing = [PAD] * 4
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [nothing]
    drafter.observe(ranked(1, [[[8, 9]] + [[1, 2]] * 4]))
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[8, 9, PAD, PAD]]
    # Where there was no node, nothing is learnt.
    assert drafter.propose(Roots.from_ids([1])).tokens.tolist() == [nothing]


def test_rejected_nodes_teach_too_and_the_latest_counts() -> None:
    drafter = Recycling(SuccessorTable(), TREE)
    drafter.observe(seen([[0]], read=False))
    drafter.propose(Roots.from_ids([7]))
    drafter.observe(ranked(1, [[[8, 9]] + [[]] * 4]))
    drafter.propose(Roots.from_ids([7]))
    drafter.observe(ranked(1, [[[9, 8], [3, 4], [5, 6], [], []]]))
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[9, 8, 5, 3]]
    assert drafter.propose(Roots.from_ids([8])).tokens.tolist() == [[3, 4, PAD, PAD]]
    drafter.observe(ranked(1, [[[6, 2]] + [[]] * 4]))
    # What was learnt of 7 and 9 before stays; of 8 the latest counts.
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[9, 8, 5, 6]]


def test_what_was_learnt_outlives_a_drafter_and_texts() -> None:
    successors = SuccessorTable()
    first = Recycling(successors, TREE)
    first.select_rows([0, 1])
    first.observe(seen([[0]] * 2, read=False))
    first.propose(Roots.from_ids([7, 8]))
    first.select_rows([1])
    first.observe(ranked(1, [[[3, 4]] + [[]] * 4]))
    second = Recycling(successors, TREE)
    second.observe(seen([[0]] * 2, read=False))
    draft = second.propose(Roots.from_ids([8, 7]))
    assert draft.tokens.tolist() == [[3, 4, PAD, PAD], [PAD] * 4]
    assert draft.draft_probs is None


def test_the_usual_tree_has_the_likeliest_nodes() -> None:
    tree = build_recycling_tree(8)
    # .6, .36, .216, .13, .1, .078, .06 twice
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3, 6, 7)
    assert tree.ranks == (-1, 0, 1, 0, 1, 0, 0, 0, 0)
    assert build_recycling_tree(80).num_nodes == 81
    assert build_recycling_tree(80).width <= 8
