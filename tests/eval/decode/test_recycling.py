import torch

from eval.decode.drafters.lookup import Recycling, SuccessorTable, build_recycling_tree
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, CommittedTokens, Roots
from heads.decoding.tree import Tree
from heads.target_model.model import TargetOutput

TREE = Tree.from_paths([[0], [1], [0, 0], [1, 0]])


def seen(num_texts: int, best: list[list[list[int]]] | None = None) -> CommittedTokens:
    """As the engine shows a pass, with the target's best tokens after each node."""
    output = TargetOutput(torch.zeros(num_texts, 1, 1))
    cache = TreeCache(num_texts, torch.device("cpu"), 1)
    logits = None
    if best is not None:
        logits = torch.zeros(num_texts, len(best[0]), 50)
        for row, nodes in zip(logits, best, strict=True):
            for node, tokens in zip(row, nodes, strict=True):
                node[tokens] = torch.arange(9.0, 9.0 - len(tokens), -1)
    return CommittedTokens([[0]] * num_texts, output, cache, logits=logits)


def test_a_draft_is_filled_from_what_was_ranked_before() -> None:
    drafter = Recycling(SuccessorTable(), TREE)
    drafter.observe(seen(1))
    nothing = [PAD] * 4
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [nothing]
    drafter.observe(seen(1, [[[8, 9]] + [[1, 2]] * 4]))
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[8, 9, PAD, PAD]]
    # Where there was no node, nothing is learnt.
    assert drafter.propose(Roots.from_ids([1])).tokens.tolist() == [nothing]


def test_rejected_nodes_teach_too_and_the_latest_counts() -> None:
    drafter = Recycling(SuccessorTable(), TREE)
    drafter.observe(seen(1))
    drafter.propose(Roots.from_ids([7]))
    drafter.observe(seen(1, [[[8, 9]] + [[]] * 4]))
    drafter.propose(Roots.from_ids([7]))
    drafter.observe(seen(1, [[[9, 8], [3, 4], [5, 6], [], []]]))
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[9, 8, 5, 3]]
    assert drafter.propose(Roots.from_ids([8])).tokens.tolist() == [[3, 4, PAD, PAD]]


def test_what_was_learnt_outlives_a_drafter_and_texts() -> None:
    successors = SuccessorTable()
    first = Recycling(successors, TREE)
    first.select_rows([0, 1])
    first.observe(seen(2))
    first.propose(Roots.from_ids([7, 8]))
    first.select_rows([1])
    first.observe(seen(1, [[[3, 4]] + [[]] * 4]))
    second = Recycling(successors, TREE)
    second.observe(seen(2))
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
