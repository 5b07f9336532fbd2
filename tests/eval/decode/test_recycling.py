import pytest
import torch
from toys import random_target

from eval.decode.drafters.recycling import Recycling, Successors, recycling_tree
from eval.decode.engine import NoDraft, decode, decode_batch
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, Committed, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import Tree
from heads.target_model.model import Target, TargetOutput

PROMPT = [5, 17, 40, 8, 77, 23, 61]
PROMPTS = [PROMPT, PROMPT[:3] * 3, PROMPT[::-1] * 2, [9]]
TREE = Tree.from_paths([[0], [1], [0, 0], [1, 0]])


def seen(num_texts: int, best: list[list[list[int]]] | None = None) -> Committed:
    """What the engine would show, with the target's best tokens after each node."""
    output = TargetOutput(torch.zeros(num_texts, 1, 1))
    cache = TreeCache(num_texts, torch.device("cpu"), 1)
    logits = None
    if best is not None:
        logits = torch.zeros(num_texts, len(best[0]), 50)
        for row, nodes in zip(logits, best, strict=True):
            for node, tokens in zip(row, nodes, strict=True):
                node[tokens] = torch.arange(9.0, 9.0 - len(tokens), -1)
    return Committed([[0]] * num_texts, output, cache, logits=logits)


def test_a_draft_is_filled_from_what_was_ranked_before() -> None:
    drafter = Recycling(Successors(), TREE)
    drafter.observe(seen(1))
    nothing = [PAD] * 4
    assert drafter.propose(Roots.of([7])).tokens.tolist() == [nothing]
    drafter.observe(seen(1, [[[8, 9]] + [[1, 2]] * 4]))
    assert drafter.propose(Roots.of([7])).tokens.tolist() == [[8, 9, PAD, PAD]]
    # Where there was no node, nothing is learnt.
    assert drafter.propose(Roots.of([1])).tokens.tolist() == [nothing]


def test_rejected_nodes_teach_too_and_the_latest_counts() -> None:
    drafter = Recycling(Successors(), TREE)
    drafter.observe(seen(1))
    drafter.propose(Roots.of([7]))
    drafter.observe(seen(1, [[[8, 9]] + [[]] * 4]))
    drafter.propose(Roots.of([7]))
    drafter.observe(seen(1, [[[9, 8], [3, 4], [5, 6], [], []]]))
    assert drafter.propose(Roots.of([7])).tokens.tolist() == [[9, 8, 5, 3]]
    assert drafter.propose(Roots.of([8])).tokens.tolist() == [[3, 4, PAD, PAD]]


def test_what_was_learnt_outlives_a_drafter_and_texts() -> None:
    successors = Successors()
    first = Recycling(successors, TREE)
    first.keep([0, 1])
    first.observe(seen(2))
    first.propose(Roots.of([7, 8]))
    first.keep([1])
    first.observe(seen(1, [[[3, 4]] + [[]] * 4]))
    second = Recycling(successors, TREE)
    second.observe(seen(2))
    draft = second.propose(Roots.of([8, 7]))
    assert draft.tokens.tolist() == [[3, 4, PAD, PAD], [PAD] * 4]
    assert draft.draft_probs is None


def test_the_usual_tree_has_the_likeliest_nodes() -> None:
    tree = recycling_tree(8)
    # .6, .36, .216, .13, .1, .078, .06 twice
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3, 6, 7)
    assert tree.ranks == (-1, 0, 1, 0, 1, 0, 0, 0, 0)
    assert recycling_tree(80).num_nodes == 81
    assert recycling_tree(80).width <= 8


def with_a_stop(target: Target) -> list[list[int]]:
    """Sets a stop token that ends one of the texts early; gives the texts."""
    target.model.generation_config.eos_token_id = None
    first = decode(target, NoDraft(), PROMPTS[1], 10).token_ids
    target.model.generation_config.eos_token_id = [first[9]]
    return [decode(target, NoDraft(), prompt, 50).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "qwen3_moe"])
def test_a_batch_gives_the_targets_texts(family: str) -> None:
    target = random_target(family)
    texts = with_a_stop(target)
    assert len({len(text) for text in texts}) > 1
    successors = Successors()
    for num_nodes in (1, 20):
        drafter = Recycling(successors, recycling_tree(num_nodes))
        found = decode_batch(target, drafter, PROMPTS, 50)
        assert [one.token_ids for one in found] == texts
    assert max(step.num_accepted for one in found for step in one.steps) > 3


def test_sampling_the_likeliest_is_greedy() -> None:
    target = random_target()
    texts = with_a_stop(target)

    def drafter() -> Recycling:
        return Recycling(Successors(), recycling_tree(12))

    found = decode_batch(
        target, drafter(), PROMPTS, 50, Sampling(temperature=0.7, top_k=1), [3, 4, 5, 6]
    )
    greedy = decode_batch(target, drafter(), PROMPTS, 50)
    assert [one.token_ids for one in found] == texts
    assert [one.steps for one in found] == [one.steps for one in greedy]
