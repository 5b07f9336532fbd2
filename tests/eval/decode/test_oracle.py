import pytest
from drafters import seen
from toys import endless_target

from eval.decode.drafters.oracle import Oracle
from eval.decode.engine import NoDraft, Request, decode, decode_many
from heads.decoding.drafting import Roots
from heads.decoding.tree import Tree

PROMPT = [5, 17, 40, 8, 77, 23, 61]
PROMPTS = [PROMPT, PROMPT[:2], PROMPT[::-1] * 2, [9]]
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]])


def right(tree: Tree, tokens: list[int], ahead: list[int]) -> list[list[int]]:
    """Per node that is right, the root first, its children that are."""
    nodes, found = [0], []
    while nodes:
        node = nodes.pop()
        truth = ahead[tree.depths[node]]
        found.append([child for child in tree.children[node] if tokens[child - 1] == truth])
        nodes += found[-1]
    return found


@pytest.mark.parametrize("tree", [Tree.make_chain(3), TREE], ids=["chain", "tree"])
def test_a_child_of_a_right_node_is_right_at_the_rate(tree: Tree) -> None:
    text = [(7 * place) % 90 for place in range(3000)]
    oracle = Oracle([text], tree, 0.7, 96)
    oracle.observe(seen([PROMPT], read=False))
    counts = {depth: [0, 0] for depth in range(tree.depth)}
    chosen = set()
    for place in range(len(text) - 4):
        tokens = oracle.propose(Roots.from_ids([text[place]])).tokens[0].tolist()
        for depth, children in enumerate(right(tree, tokens, text[place + 1 :])):
            assert len(children) <= 1
            chosen |= set(children)
            # Of a tree only the root surely has children, and a chain has no leaf but the last.
            if depth == 0 or (tree.width == 1 and depth < tree.depth):
                counts[depth][len(children)] += 1
        oracle.observe(seen([[text[place]]]))
    for wrong, lucky in counts.values():
        assert wrong + lucky == 0 or abs(lucky / (wrong + lucky) - 0.7) < 0.04
    assert chosen == set(range(1, tree.num_nodes))


def test_texts_are_the_targets_and_a_perfect_draft_takes_the_fewest_passes() -> None:
    """Also of texts whose neighbours have ended, or that took the place of others."""
    target = endless_target()
    target.model.generation_config.eos_token_id = decode(target, NoDraft(), [9], 8).token_ids[7:]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS[::-1])]
    texts = [decode(target, NoDraft(), each.prompt_ids, 30).token_ids for each in requests]
    assert len({len(text) for text in texts}) > 1
    for tree, rate in ((Tree.make_chain(4), 1.0), (TREE, 0.6)):

        def make(seeds: list[int], tree: Tree = tree, rate: float = rate) -> Oracle:
            return Oracle([texts[seed] for seed in seeds], tree, rate, 96)

        found = decode_many(target, make, requests, 30, 3)
        assert [one.token_ids for one in found] == texts
        steps = [step for one in found for step in one.steps if step.num_left > 4]
        counts = {step.num_accepted for step in steps}
        assert counts == {4} if rate == 1 else counts >= {0, 1, 2}


def test_mistakes_depend_on_seed_text_and_place_alone() -> None:
    text = [(7 * place) % 90 for place in range(60)]
    chain = Tree.make_chain(3)

    def drafts(seed: int, *counts: int) -> dict[int, list[list[int]]]:
        oracle = Oracle([text, text], chain, 0.5, 96, seed)
        oracle.observe(seen([PROMPT, PROMPT], read=False))
        found, place = {0: oracle.propose(Roots.from_ids([0, 0])).tokens.tolist()}, 0
        for count in counts:
            oracle.observe(seen([text[place : place + count]] * 2))
            place += count
            found[place] = oracle.propose(Roots.from_ids([0, 0])).tokens.tolist()
        return found

    small, large = drafts(0, *[1] * 40), drafts(0, *[4] * 10)
    assert all(small[place] == tokens for place, tokens in large.items())
    assert any(one != other for one, other in small.values())
    assert small != drafts(1, *[1] * 40)
