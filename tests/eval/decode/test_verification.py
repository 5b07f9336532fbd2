"""Sampling and acceptance: by hand, as papers write them, and by what they keep of the target.

Papers walk down from the root in a loop over one text; `accept_paths` does all texts and nodes at
once. With the same uniforms both must keep the same nodes, and with the same draws give the same
bonus. Texts of drafters are for test_drafters.py.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from drafters import fits, next_probs  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toys import accept, tree_of
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eval.decode.verification import AcceptedPaths
from heads.decoding.drafting import PAD, Draft, build_tree_layout
from heads.decoding.sampling import GREEDY, Generators, Sampling, Typical
from heads.decoding.tree import Tree, make_static_tree

V = 6
NUM_TEXTS = 60
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
PLAIN = Sampling(temperature=1.0)
WARPED = Sampling(temperature=0.8, top_p=0.9, top_k=4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(num_texts: int) -> Generators:
    return Generators.from_seeds(range(num_texts), torch.device("cpu"))


def verified(draft: Draft, logits: Tensor, sampling: Sampling = PLAIN) -> AcceptedPaths:
    """The outcome of the same draft and logits [N, V] in every text."""
    root = torch.zeros(len(draft.tokens), 1, dtype=torch.int64)
    every = logits.expand(len(root), -1, -1)
    return accept(draft, torch.cat([root, draft.tokens], 1), every, sampling, seeded(len(root)))


def drafted(tree: Tree, tokens: list[int], *probs: list[float], num_texts: int = 1) -> Draft:
    """The same tokens in every text, and the probabilities they were drawn from, if they were."""
    rows = torch.tensor(probs).expand(num_texts, -1, -1) if probs else None
    return Draft.from_tree(tree, torch.tensor(tokens).repeat(num_texts, 1), rows)


def outcomes(accepted: AcceptedPaths) -> set[tuple[tuple[int, ...], int]]:
    """All pairs of accepted nodes, without the root, and bonus."""
    columns = (accepted.nodes.tolist(), accepted.num_accepted.tolist(), accepted.bonus.tolist())
    return {(tuple(nodes[1 : n + 1]), bonus) for nodes, n, bonus in zip(*columns, strict=True)}


@given(
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 5, 50, 1000]),
    top_p=st.sampled_from([0.0, 0.4, 0.95, 1.0]),
)
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p) -> None:
    logits = 3 * torch.randn(32, 50, generator=generator())
    logits[8:16] = logits[8:16].round()  # ties, inside and at the edge of what is kept
    logits[16] = 0.0
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    if top_k is not None:
        warpers.insert(1, TopKLogitsWarper(top_k))
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    found = Sampling(temperature, top_p, top_k).compute_probabilities(logits.view(4, 8, 50))
    assert torch.equal(found.flatten(0, 1), expected.softmax(-1))


def test_half_precision_logits_are_warped_in_single() -> None:
    logits = torch.randn(2, V, generator=generator()).bfloat16()
    found = Sampling(0.7).compute_probabilities(logits)
    assert torch.equal(found, (logits.float() / 0.7).softmax(-1))


def test_the_greedy_walk_follows_the_targets_choices() -> None:
    draft = drafted(TREE, [4, 5, 3, 2, 4, 1])  # 4 5 3 below the root, 2 4 below 4, 1 below 5
    for choices, expected in [
        ([4, 4, 0, 0, 0, 3, 0], ((1, 5), 3)),
        ([5, 0, 2, 0, 0, 0, 0], ((2,), 2)),
        ([1, 0, 0, 0, 0, 0, 0], ((), 1)),
    ]:
        assert outcomes(verified(draft, torch.eye(V)[choices], GREEDY)) == {expected}


def test_what_is_not_there_is_not_accepted_and_takes_nothing_away() -> None:
    draft = drafted(tree_of((0, 0, 1)), [PAD, 1, PAD], num_texts=200)
    certain = 200 * torch.eye(3)[[0, 1, 1, 1]]  # token 0 is what PAD might be taken for
    for sampling in (GREEDY, PLAIN, replace(PLAIN, typical=Typical())):
        assert outcomes(verified(draft, certain, sampling)) == {((), 0)}
    assert outcomes(verified(draft, torch.zeros(4, 2))) == {((2,), 0), ((2,), 1), ((), 0)}
    q = torch.full((200, 1, 2), 0.5)
    # p = q: the first that is there is always kept.
    sampled = replace(draft, draft_probs=torch.cat([q, q], 1))
    assert outcomes(verified(sampled, torch.zeros(4, 2))) == {((2,), 0), ((2,), 1)}


@pytest.mark.parametrize("q", [(), ([0.0, 1.0],)], ids=["ranked", "drawn"])
def test_when_rounding_leaves_nothing_the_bonus_comes_from_p(q, monkeypatch) -> None:
    # Half of p's mass is lost, to see it often.
    lost = torch.tensor([[0.0, 0.5], [1.0, 0.0]]).expand(100, -1, -1)
    monkeypatch.setattr(Sampling, "compute_probabilities", lambda self, logits: lost)
    draft = drafted(Tree.make_chain(1), [1], *q, num_texts=100)
    assert outcomes(verified(draft, torch.zeros(2, 2))) == {((1,), 0), ((), 1)}


def random_parents(num_nodes: int, num_texts: int = NUM_TEXTS) -> Tensor:
    """[B, N - 1], another tree in every text."""
    rng = torch.rand(num_texts, num_nodes - 1, generator=generator())
    return (rng * torch.arange(1, num_nodes)).long()


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(
    lambda drawn: tree_of([parent % (node + 1) for node, parent in enumerate(drawn)])
)
"""Any tree of up to six drafted nodes."""


def test_the_layout_that_a_graph_has_captured_stays_however_many_trees_come_after_it() -> None:
    tree, device = Tree.from_paths([[1], [0], [1, 2]]), torch.device("cpu")
    captured = build_tree_layout(tree, device)
    for size in range(1, 100):
        build_tree_layout(Tree.from_paths([[rank] for rank in range(size)]), device)
    again = build_tree_layout(Tree.from_paths([[1], [0], [1, 2]]), device)
    for one, other in zip(vars(captured).values(), vars(again).values(), strict=True):
        assert one.data_ptr() == other.data_ptr()


def random_draft(sampled: bool, tree: Tree | Tensor) -> tuple[Draft, Tensor, Tensor]:
    """Tokens by chance, a fifth of them missing: the draft, its tokens [B, N], logits [B, N, V]."""
    num_texts = NUM_TEXTS if isinstance(tree, Tree) else len(tree)
    num_nodes = tree.num_nodes if isinstance(tree, Tree) else tree.shape[1] + 1
    rng, shape = generator(num_nodes), (num_texts, num_nodes)
    tokens = torch.randint(V, shape, generator=rng)
    if sampled:  # V nodes in a row hold V tokens
        order = torch.rand(num_texts, V, generator=rng).argsort(1)
        tokens = order[:, torch.arange(num_nodes) % V]
    tokens[torch.rand(shape, generator=rng) < 0.2] = PAD
    tokens[:, 0] = 0
    logits = torch.randn(*shape, V, generator=rng)
    depth = tree.depth if isinstance(tree, Tree) else num_nodes - 1
    draft = Draft(tree, tokens[:, 1:], depth)
    if sampled:
        near = logits + torch.randn(*shape, V, generator=rng)
        draft = replace(draft, draft_probs=near.softmax(-1)[:, : max(tree.parents) + 1])
    return draft, tokens, logits


def children_of(draft: Draft, text: int) -> list[list[int]]:
    """Per node those that are there."""
    shape = draft.tree.parents[1:] if isinstance(draft.tree, Tree) else draft.tree[text].tolist()
    children: list[list[int]] = [[] for _ in range(len(shape) + 1)]
    for node, parent in enumerate(shape, start=1):
        if draft.tokens[text, node - 1] != PAD:
            children[parent].append(node)
    return children


def walked(draft: Draft, text: int, p_rows: np.ndarray, uniforms: np.ndarray):
    """The accepted path of one text, and what its bonus is drawn from, as papers write it."""
    tokens, children, path = [0, *draft.tokens[text].tolist()], children_of(draft, text), [0]
    while True:
        p = p_rows[path[-1]]
        q = None if draft.draft_probs is None or not children[path[-1]] else (
            draft.draft_probs[text, path[-1]].double().numpy()
        )  # fmt: skip
        for child in children[path[-1]]:
            x = tokens[child]
            if draft.draft_probs is None:
                q = np.eye(V)[x]
            if uniforms[child] * q[x] < p[x]:
                path.append(child)
                break
            p = np.maximum(p - q, 0)
            p = p / p.sum()
            if draft.draft_probs is not None:
                q = np.where(np.arange(V) == x, 0, q)
                q = q / q.sum()
        else:
            return path, p


def same(
    accepted: AcceptedPaths, paths: list[list[int]], rests: list[np.ndarray], generators: Generators
) -> None:
    for nodes, n, path in zip(
        accepted.nodes.tolist(), accepted.num_accepted.tolist(), paths, strict=True
    ):
        assert nodes[: n + 1] == path
        assert not any(nodes[n + 1 :])
    assert torch.equal(
        accepted.bonus, generators.sample_indices(torch.from_numpy(np.stack(rests)).float())
    )


def check_rule(sampled: bool, tree: Tree | Tensor, sampling: Sampling) -> set[int]:
    """Compares the rule with what papers write; the lengths of the paths."""
    draft, tokens, logits = random_draft(sampled, tree)
    num_texts = len(tokens)
    accepted = accept(draft, tokens, logits, sampling, seeded(num_texts))
    generators, p = seeded(num_texts), sampling.compute_probabilities(logits).double().numpy()
    if sampling.typical is None:
        uniforms = generators.draw_uniform(tokens.shape[1]).double().numpy()
        found = [walked(draft, text, p[text], uniforms[text]) for text in range(num_texts)]
    else:
        paths = [likeliest_typical(draft, n, p[n], sampling.typical) for n in range(num_texts)]
        found = [(path, p[text, path[-1]]) for text, path in enumerate(paths)]
    same(accepted, [path for path, _ in found], [rest for _, rest in found], generators)
    return {len(path) for path, _ in found}


@given(tree=SHAPES, sampled=st.booleans(), sampling=st.sampled_from([PLAIN, WARPED]))
def test_the_same_is_accepted_as_by_the_rule_as_papers_write_it(tree, sampled, sampling) -> None:
    check_rule(sampled, tree, sampling)


@given(tree=SHAPES, rule=st.sampled_from([Typical(), Typical(threshold=0.3, alpha=0.7)]))
def test_typical_acceptance_keeps_the_longest_typical_path(tree: Tree, rule: Typical) -> None:
    check_rule(False, tree, replace(WARPED, typical=rule))


@pytest.mark.parametrize("rule", [None, Typical()], ids=["standard", "typical"])
def test_every_text_may_have_a_tree_of_its_own(rule: Typical | None) -> None:
    lengths = check_rule(False, random_parents(9, 400), replace(WARPED, typical=rule))
    assert lengths >= {1, 2, 3}


def likeliest_typical(draft: Draft, text: int, p: np.ndarray, rule: Typical) -> list[int]:
    """The longest typical prefix among the paths to all leaves, the likelier of equal ones."""
    tokens, children = [0, *draft.tokens[text].tolist()], children_of(draft, text)
    best, paths = (0, 0.0, [0]), [[0]]
    while paths:
        path = paths.pop(0)
        paths += [[*path, child] for child in children[path[-1]]]
        length, log_prob = 0, 0.0
        for parent, node in pairwise(path):
            entropy = -(p[parent] * np.log(p[parent] + 1e-5)).sum()
            if p[parent][tokens[node]] <= min(rule.threshold, rule.alpha * np.exp(-entropy)):
                break
            length, log_prob = length + 1, log_prob + np.log(p[parent][tokens[node]])
        if (length, log_prob) > best[:2] or length > best[0]:
            best = (length, log_prob, path[: length + 1])
    return best[2]


def test_a_token_is_typical_above_the_threshold_that_the_entropy_sets() -> None:
    even = torch.zeros(2, 4)  # entropy log 4: alpha / 4 = 0.075 is below the threshold of 0.09
    sure = torch.tensor([0.915, 0.085]).log().expand(2, -1)  # alpha * exp(-0.29) is above it
    chain = Tree.make_chain(1)
    for logits, token, rule, kept in [
        (even, 1, Typical(), 1),
        (even, 1, Typical(threshold=0.2, alpha=1.1), 1),
        (even, 1, Typical(threshold=0.3, alpha=1.1), 0),
        (sure, 1, Typical(), 0),
        (sure, 1, Typical(threshold=0.08), 1),
        (sure, 0, Typical(), 1),
    ]:
        found = verified(drafted(chain, [token]), logits, replace(PLAIN, typical=rule))
        assert found.num_accepted.tolist() == [kept]


@pytest.mark.parametrize("tree", [Tree.make_chain(23), make_static_tree(3, 23)])
def test_a_layout_is_one_for_passes_in_and_outside_of_inference_mode(tree: Tree) -> None:
    with torch.inference_mode():
        layout = build_tree_layout(tree, torch.device("cpu"))
    found = (layout.parents, layout.mask, layout.depths)
    assert not any(each.is_inference() for each in found)


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.7)], ids=["plain", "warm"])
@pytest.mark.parametrize("drawn", [False, True], ids=["ranked", "drawn"])
def test_texts_keep_the_targets_distribution(drawn: bool, sampling: Sampling) -> None:
    """The next token depends on the last alone, so that the first two behind token 0 are known."""
    rng, num_texts, num_inner = generator(3), 20_000, max(TREE.parents) + 1
    logits = torch.randn(V, V, generator=rng)
    near = logits + torch.randn(V, V, generator=rng)
    p, q = sampling.compute_probabilities(logits), sampling.compute_probabilities(near)
    tokens = torch.zeros(num_texts, TREE.num_nodes, dtype=torch.int64)
    for parent, children in enumerate(TREE.children[:num_inner]):
        rows, most = q[tokens[:, parent]], len(children)
        by_luck = torch.multinomial(rows, most, generator=rng)
        tokens[:, children] = by_luck if drawn else rows.topk(most).indices
    draft = Draft.from_tree(TREE, tokens[:, 1:], q[tokens[:, :num_inner]] if drawn else None)
    found = accept(draft, tokens, logits[tokens], sampling, seeded(num_texts))
    path = torch.cat([tokens.gather(1, found.nodes[:, 1:3]), torch.zeros(num_texts, 1).long()], 1)
    path.scatter_(1, found.num_accepted.unsqueeze(1), found.bonus.unsqueeze(1))
    assert fits(path[:, 0].bincount(minlength=V), p[0])
    first, second, _ = path[found.num_accepted > 0].unbind(1)
    joint = (first * V + second).bincount(minlength=V * V).view(V, V)
    assert fits(joint, joint.sum(1, keepdim=True) / joint.sum() * p)
