from dataclasses import replace

import torch
from drafters import draft_paths, seen

from eval.decode.drafters.lookahead import Lookahead
from heads.decoding.drafting import PAD, CommittedTokens, Roots


def answered(token_ids: list[list[int]], answers: list[dict[int, int]]) -> CommittedTokens:
    """As the engine shows a pass, with the target's answers at some nodes."""
    logits = torch.zeros(len(token_ids), 20, 50)
    for row, at in zip(logits, answers, strict=True):
        for node, token in at.items():
            row[node, token] = 1
    return replace(seen(token_ids), logits=logits)


def branches(drafter: Lookahead, roots: list[int]) -> list[list[tuple[int, ...]]]:
    """Per text its draft as the path to each node, in the order of the nodes."""
    draft = drafter.propose(Roots.from_ids(roots))
    assert draft.build_layout().depths.max() <= draft.depth
    return draft_paths(draft)


def test_guesses_come_from_the_prompt_and_share_their_beginning() -> None:
    drafter = Lookahead(window=1, level=4, num_guesses=3)
    drafter.observe(seen([[9, 1, 2, 3, 9, 1, 2, 4, 9, 5, 6, 7]], read=False))
    paths = branches(drafter, [9])[0]
    assert {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,), (5, 6), (5, 6, 7)} <= set(paths)
    assert len(paths) == len(set(paths))
    assert not {(1, 2, 3), (5, 6, 7)} & set(branches(drafter, [8])[0])


def test_only_the_latest_guesses_of_a_token_are_kept() -> None:
    drafter = Lookahead(window=1, level=3, num_guesses=2)
    # 1 2 is met again after 3 4, so that 3 4 goes when 5 6 comes.
    drafter.observe(seen([[9, 1, 2, 9, 3, 4, 9, 1, 2, 9, 5, 6]], read=False))
    paths = set(branches(drafter, [9])[0])
    assert {(1, 2), (5, 6)} <= paths
    assert (3, 4) not in paths


def test_smaller_trees_are_filled_up() -> None:
    drafter = Lookahead(window=1, level=3, num_guesses=2)
    drafter.observe(seen([[8, 8], [9, 9, 3, 4], [8, 8]], read=False))
    draft = drafter.propose(Roots.from_ids([5, 9, 6]))
    sizes = [sum(token != PAD for token in row) for row in draft.tokens.tolist()]
    assert sizes[0] == sizes[2] < sizes[1] == draft.tokens.shape[1]
    tokens = draft.tokens.tolist()[1]
    drafter.select_rows([1])
    assert drafter.propose(Roots.from_ids([9])).tokens.tolist() == [tokens]


def test_the_window_moves_up_a_row_and_fills_the_pool() -> None:
    drafter = Lookahead(window=2, level=3, num_guesses=2)
    drafter.observe(seen([[7, 7]], read=False))
    # The window is 7 everywhere: below row 0, the root and one node, row 1 adds one.
    assert branches(drafter, [5])[0] == [(7,), (7, 7)]
    # Row 1 are nodes 1 and 2; with what is answered there the columns are 5 7 8 and 7 7 9.
    drafter.observe(answered([[5]], [{1: 8, 2: 9}]))
    assert branches(drafter, [7])[0] == [(7,), (8,), (7, 9), (5,), (5, 7)]
    drafter.observe(answered([[7]], [{2: 10, 3: 11}]))
    assert branches(drafter, [5])[0] == [(9,), (10,), (9, 11), (7,), (7, 5), (7, 8)]


def test_the_texts_own_ngrams_are_guessed() -> None:
    drafter = Lookahead(window=1, level=3, num_guesses=4)
    drafter.observe(seen([[1, 2]], read=False))
    drafter.propose(Roots.from_ids([3]))
    drafter.observe(answered([[3, 4]], [{1: 30}]))
    assert {(2,), (2, 3)} <= set(branches(drafter, [1])[0])
    drafter.observe(answered([[1]], [{1: 31}]))
    assert {(4,), (4, 1)} <= set(branches(drafter, [3])[0])
