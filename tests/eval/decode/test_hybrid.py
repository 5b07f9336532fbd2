from collections.abc import Callable
from functools import partial

import pytest
import torch
from drafters import seen
from pytest import approx
from toys import eagle_head, endless_target, noisy_head, texts

from conf.settings.eagle import EagleForm
from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import NoDraft, decode, decode_batch
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Tree, make_static_tree
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.model import FeatureLayers, Target

FORK = Tree.from_paths([[0], [1], [0, 0]])


class Forks:
    """A head that drafts the same three tokens below every root, and counts how often."""

    taps = FeatureLayers()

    def __init__(self) -> None:
        self.num_drafts = 0

    def observe(self, seen: CommittedTokens) -> None:
        self.num_texts = len(seen.token_ids)

    def propose(self, roots: Roots) -> Draft:
        self.num_drafts += 1
        return Draft.from_tree(FORK, torch.tensor([[30, 31, 32]] * len(roots)))

    def select_rows(self, rows: list[int]) -> None:
        self.num_texts = len(rows)


def hybrid(expected: float = 1.0) -> HybridDrafter:
    return HybridDrafter(Forks(), SuffixDrafter(SuffixTree(24)), expected)


def paths(draft: Draft) -> list[list[tuple[int, ...]]]:
    """Per text its nodes as the path to each."""
    layout, num_texts = draft.build_layout(), len(draft.tokens)
    parents = layout.parents.expand(num_texts, -1)[:, 1:].tolist()
    depths = layout.depths.expand(num_texts, -1).tolist()
    found = []
    for tokens, above, depth in zip(draft.tokens.tolist(), parents, depths, strict=True):
        nodes: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, above, strict=True):
            nodes.append((*nodes[parent], token))
        assert [len(node) for node in nodes] == depth
        found.append([node for node in nodes[1:] if PAD not in node])
    return found


def test_half_of_what_a_suffix_counts_on_must_be_what_the_head_gets() -> None:
    drafter = hybrid(expected=1.5)
    drafter.observe(seen([[1, 2, 3, 4, 5, 1, 2]], read=False))
    # A run of 3 promises 3 tokens: as many as the head, counted half.
    assert paths(drafter.propose(Roots.from_ids([3]))) == [[(4,), (4, 5), (4, 5, 1)]]
    assert drafter.head.num_drafts == 0
    drafter = hybrid(expected=1.6)
    drafter.observe(seen([[1, 2, 3, 4, 5, 1, 2]], read=False))
    assert paths(drafter.propose(Roots.from_ids([3]))) == [[(30,), (31,), (30, 32)]]


def test_no_copy_is_no_draft_of_the_suffix() -> None:
    drafter = hybrid(expected=0.0)
    drafter.observe(seen([[1, 2]], read=False))
    assert paths(drafter.propose(Roots.from_ids([3]))) == [[(30,), (31,), (30, 32)]]


def test_the_head_is_expected_to_get_what_it_got() -> None:
    drafter = hybrid(expected=1.0)
    drafter.observe(seen([[1, 2, 8, 9]], read=False))
    drafter.propose(Roots.from_ids([3]))
    drafter.observe(seen([[3, 30, 32]]))
    assert drafter.means == [approx(0.8 * 1 + 0.2 * 2)]
    drafter.propose(Roots.from_ids([4]))
    drafter.observe(seen([[4]]))
    assert drafter.means == [approx(0.8 * 1.2)]


def test_what_a_copy_gets_says_nothing_about_the_head() -> None:
    drafter = hybrid(expected=1.0)
    drafter.observe(seen([[1, 2, 8, 9, 1]], read=False))
    assert paths(drafter.propose(Roots.from_ids([2]))) == [[(8,), (8, 9)]]
    drafter.observe(seen([[2, 8, 9]]))
    assert drafter.means == [1.0]


def test_a_batch_has_chains_beside_trees() -> None:
    drafter = hybrid(expected=1.0)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], [9], [1, 2, 6, 6, 1]]
    drafter.observe(seen(prompts, read=False))
    draft = drafter.propose(Roots.from_ids([5, 9, 2]))
    fork = [(30,), (31,), (30, 32)]
    chain = [(6,), (6, 7), (6, 7, 1), (6, 7, 1, 2), (6, 7, 1, 2, 3)]
    assert paths(draft) == [chain, fork, [(6,), (6, 6)]]
    drafter.select_rows([1, 2])
    drafter.observe(seen([[9, 30], [2]]))
    assert drafter.means == [approx(1.0), 1.0]


def making(target: Target, kind: str) -> Callable[[], Drafter]:
    if kind == "eagle":
        return partial(EagleDrafter, eagle_head(target, EagleForm.eagle3), DynamicShape(3, 3, 8))
    return partial(MedusaDrafter, noisy_head(target), make_static_tree(3, 8))


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_batch_gives_the_targets_texts_by_both(kind: str) -> None:
    target = endless_target(num_hidden_layers=4)
    long = texts(target, 1, 40)[0]
    prompts = [long[:4], long[4:] + long[:4], [61, 23, 77]]
    stop = decode(target, NoDraft(), prompts[0], 14).token_ids[-1]
    target.model.generation_config.eos_token_id = [stop]
    expected = [decode(target, NoDraft(), prompt, 40).token_ids for prompt in prompts]
    assert len({len(text) for text in expected}) > 1
    make = making(target, kind)
    for how in (Sampling(), Sampling(temperature=0.7, top_k=1)):
        drafter = HybridDrafter(make(), SuffixDrafter(SuffixTree(24)), 1.5)
        chosen: list[list[bool]] = []
        watch(drafter, chosen)
        found = decode_batch(target, drafter, prompts, 40, how, [0, 1, 2])
        assert [one.token_ids for one in found] == expected
        assert any(len(set(row)) > 1 for row in chosen)  # steps of both at once
        assert any(all(row) for row in chosen)  # and without the head
        assert any(not any(row) for row in chosen)


def watch(drafter: HybridDrafter, chosen: list[list[bool]]) -> None:
    """Notes who drafted in each step."""
    propose = drafter.propose

    def watched(roots: Roots) -> Draft:
        draft = propose(roots)
        chosen.append(drafter.copied)
        return draft

    drafter.propose = watched
