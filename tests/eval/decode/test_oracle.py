import pytest
import torch
from toys import endless_target

from eval.decode.drafters.oracle import Oracle
from eval.decode.engine import NoDraft, decode, decode_batch
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import CommittedTokens, Roots
from heads.decoding.tree import Tree
from heads.target_model.model import TargetOutput

PROMPT = [5, 17, 40, 8, 77, 23, 61]
PROMPTS = [PROMPT, PROMPT[:2], PROMPT[::-1] * 2, [9]]
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]])


def seen(*token_ids: list[int], first: bool = False) -> CommittedTokens:
    output = TargetOutput(torch.zeros(len(token_ids), 1, 1))
    cache = TreeCache(len(token_ids), torch.device("cpu"), 1)
    return CommittedTokens(list(token_ids), output, cache, logits=None if first else torch.zeros(1))


def right(tree: Tree, tokens: list[int], ahead: list[int]) -> list[list[int]]:
    """Per node that is right, the root first, its children that are."""
    nodes, found = [0], []
    while nodes:
        node = nodes.pop()
        truth = ahead[tree.depths[node]]
        found.append([child for child in tree.children[node] if tokens[child - 1] == truth])
        nodes += found[-1]
    return found


def test_all_right_and_all_wrong() -> None:
    text = [11, 12, 13, 14, 15]
    chain = Tree.make_chain(3)
    always = Oracle([text], chain, 1.0, 96)
    always.observe(seen(PROMPT, first=True))
    assert always.propose(Roots.from_ids([11])).tokens.tolist() == [[12, 13, 14]]
    always.observe(seen([11]))
    assert always.propose(Roots.from_ids([12])).tokens.tolist() == [[13, 14, 15]]
    never = Oracle([text], chain, 0.0, 96)
    never.observe(seen(PROMPT, first=True))
    wrong = never.propose(Roots.from_ids([11])).tokens[0].tolist()
    assert all(draft != truth for draft, truth in zip(wrong, text[1:], strict=False))


@pytest.mark.parametrize("tree", [Tree.make_chain(3), TREE], ids=["chain", "tree"])
def test_a_child_of_a_right_node_is_right_at_the_rate(tree: Tree) -> None:
    text = [(7 * place) % 90 for place in range(3000)]
    oracle = Oracle([text], tree, 0.7, 96)
    oracle.observe(seen(PROMPT, first=True))
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
        oracle.observe(seen([text[place]]))
    for wrong, lucky in counts.values():
        assert wrong + lucky == 0 or abs(lucky / (wrong + lucky) - 0.7) < 0.04
    assert chosen == set(range(1, tree.num_nodes))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "qwen3_moe"])
def test_a_batch_gives_the_targets_texts(family: str) -> None:
    target = endless_target(family)
    first = decode(target, NoDraft(), PROMPTS[1], 40).token_ids
    target.model.generation_config.eos_token_id = [first[9]]
    texts = [decode(target, NoDraft(), prompt, 40).token_ids for prompt in PROMPTS]
    for tree in (Tree.make_chain(4), TREE):
        found = decode_batch(target, Oracle(texts, tree, 0.6, 96), PROMPTS, 40)
        assert [one.token_ids for one in found] == texts
        assert any(step.num_accepted == tree.depth for one in found for step in one.steps)
        assert any(step.num_accepted == 0 for one in found for step in one.steps)


def test_a_perfect_draft_takes_the_fewest_passes() -> None:
    target = endless_target()
    text = decode(target, NoDraft(), PROMPT, 41).token_ids
    found = decode(target, Oracle([text], Tree.make_chain(4), 1.0, 96), PROMPT, 41)
    assert [step.num_accepted for step in found.steps] == [4] * 8


def test_mistakes_depend_on_seed_text_and_place_alone() -> None:
    text = [(7 * place) % 90 for place in range(60)]
    chain = Tree.make_chain(3)

    def drafts(seed: int, *counts: int) -> dict[int, list[list[int]]]:
        oracle = Oracle([text, text], chain, 0.5, 96, seed)
        oracle.observe(seen(PROMPT, PROMPT, first=True))
        found, place = {0: oracle.propose(Roots.from_ids([0, 0])).tokens.tolist()}, 0
        for count in counts:
            oracle.observe(seen(text[place : place + count], text[place : place + count]))
            place += count
            found[place] = oracle.propose(Roots.from_ids([0, 0])).tokens.tolist()
        return found

    small, large = drafts(0, *[1] * 40), drafts(0, *[4] * 10)
    assert all(small[place] == tokens for place, tokens in large.items())
    assert any(one != other for one, other in small.values())
    assert small != drafts(1, *[1] * 40)


def test_a_text_that_goes_on_alone_is_drafted_as_in_the_batch() -> None:
    texts = [[(factor * place) % 90 for place in range(30)] for factor in (7, 11)]
    batch, single = (Oracle(texts, TREE, 0.5, 96) for _ in range(2))
    for oracle in (batch, single):
        oracle.observe(seen(PROMPT, PROMPT, first=True))
    single.select_rows([1])
    batch.observe(seen(texts[0][:3], texts[1][:5]))
    single.observe(seen(texts[1][:5]))
    both, alone = batch.propose(Roots.from_ids([0, 0])), single.propose(Roots.from_ids([0]))
    assert both.tokens[1].tolist() == alone.tokens[0].tolist()
