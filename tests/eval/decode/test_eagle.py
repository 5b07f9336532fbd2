from typing import Any

import pytest
import torch
from drafters import draft_paths
from feature_heads import learnt, prompts, shared_target, texts_of_target

from eval.decode.engine import decode
from heads.decoding.drafting import CommittedTokens, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.layers import branch_attention
from heads.layers.branch_attention import BranchCache, CausalRange
from heads.target_model.model import Target, TargetOutput


@pytest.fixture(scope="module")
def target() -> Target:
    return shared_target()


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_drafts_read_texts_of_few_lengths(target, monkeypatch, kind: str) -> None:
    widths: list[int] = []
    usual = branch_attention.plain_branch_attention

    def plain_attention(query: torch.Tensor, branches: BranchCache, *more: Any) -> torch.Tensor:
        widths.append(branches.keys.shape[1])
        return usual(query, branches, *more)

    monkeypatch.setattr(branch_attention, "plain_branch_attention", plain_attention)
    head = learnt("eagle3")
    drafter = (
        EagleDrafter(head, 3) if kind == "chain" else EagleDrafter(head, DynamicShape(3, 2, 4))
    )
    decode(target, drafter, prompts()[0] * 14, 20)  # from 56 tokens to 76
    assert set(widths) == {64, 128}


def log_probs(head: EagleHead, committed: list[int], path: list[int]) -> list[float]:
    """[W] log q after a path of target ids, from a head that reads everything anew."""
    target = head._target[0]
    features = head.fuse(head.collect_features(target.encode_text(committed[:-1], head.taps))[0])
    length = len(committed) - 1
    text = head.encode_context(features, torch.tensor(committed[1:]), torch.arange(length))
    branches = BranchCache(
        text.keys[None], text.values[None], CausalRange.from_ends(torch.tensor([length]))
    )
    outputs = head.draft(text, torch.tensor([length - 1]), branches)
    for depth, token in enumerate(path):
        place = torch.tensor([length + depth])
        outputs = head.advance(outputs, torch.tensor([token]), place, branches)
    return head.compute_logits(outputs)[0].log_softmax(-1).tolist()


@torch.no_grad()
def literal_tree(head: EagleHead, committed: list[int], shape: DynamicShape) -> set[tuple]:
    """EAGLE-2 by the book: paths of the tree, each expanded on its own."""
    ids = head.vocab.ids.tolist()
    frontier: list[tuple[float, list[int]]] = [(0.0, [])]
    drawn: list[tuple[float, list[int]]] = []
    for _ in range(shape.depth):
        children = []
        for score, path in frontier:
            ranked = sorted(zip(log_probs(head, committed, path), ids, strict=True), reverse=True)
            children += [(score + log_q, [*path, token]) for log_q, token in ranked[: shape.top_k]]
        drawn += children
        frontier = sorted(children, reverse=True)[: shape.top_k]
    drawn.sort(key=lambda node: -node[0])
    return {tuple(path) for _, path in drawn[: shape.num_tokens]}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("eagle1", DynamicShape(3, 3, 8)),
        ("eagle3, reduced", DynamicShape(4, 2, 40)),
        ("eagle3.1", DynamicShape(3, 3, 8)),
    ],
)
@torch.no_grad()
def test_the_tree_is_eagle2s(target, name: str, shape: DynamicShape) -> None:
    head = learnt(name)
    committed = texts_of_target(1, 9)[0]
    drafter = EagleDrafter(head, shape)
    cache = target.new_cache(1)
    # In two pieces, as a prompt and an accepted run come.
    for part in (slice(0, 6), slice(6, len(committed) - 1)):
        output = target.encode_text(committed[:-1], head.taps)
        output.hidden_states = output.hidden_states[:, part]
        output.layers = {i: states[:, part] for i, states in output.layers.items()}
        drafter.observe(CommittedTokens([committed[:-1][part]], output, cache))
        if part.start == 0:
            drafter.propose(Roots.from_ids([committed[6]]))
    draft = drafter.propose(Roots.from_ids([committed[-1]]))
    assert set(draft_paths(draft)[0]) == literal_tree(head, committed, shape)


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle1", "eagle3, reduced"])
def test_a_sampled_chain_says_what_it_was_drawn_from(target, name: str) -> None:
    head, warm = learnt(name), Sampling(temperature=0.7)
    drafter = EagleDrafter(head, 3, warm, [4])
    committed = texts_of_target(1, 9)[0]
    output = target.encode_text(committed[:-1], head.taps)
    drafter.observe(CommittedTokens([committed[:-1]], output, target.new_cache(1)))
    draft = drafter.propose(Roots.from_ids([committed[-1]]))
    path = draft.tokens[0].tolist()
    for depth in range(3):
        expected = torch.zeros(target.vocab_size)
        logits = torch.tensor(log_probs(head, committed, path[:depth])) / 0.7
        expected[head.vocab.ids] = logits.softmax(-1)
        torch.testing.assert_close(draft.draft_probs[0, depth], expected, rtol=1e-4, atol=1e-6)
        assert expected[path[depth]] > 0


def piece(
    target: Target, head: EagleHead, texts: list[list[int]], start: int, end: int
) -> CommittedTokens:
    """As the engine shows texts of one length when it has read on."""
    outputs = [target.encode_text(text, head.taps) for text in texts]
    shown = TargetOutput(
        torch.cat([output.hidden_states[:, start:end] for output in outputs]),
        {
            i: torch.cat([output.layers[i][:, start:end] for output in outputs])
            for i in head.taps.layers
        },
    )
    return CommittedTokens([text[start:end] for text in texts], shown, target.new_cache(len(texts)))


@torch.no_grad()
def test_what_was_seen_without_a_draft_is_read_later(target) -> None:
    head, both = learnt("eagle3.1"), texts_of_target(2, 11)
    whole, later = (EagleDrafter(head, DynamicShape(3, 3, 8)) for _ in range(2))
    whole.observe(piece(target, head, both[1:], 0, 14))
    later.observe(piece(target, head, both, 0, 5))
    later.observe(piece(target, head, both, 5, 8))
    later.select_rows([1])
    later.observe(piece(target, head, both[1:], 8, 14))
    expected, found = (
        drafter.expand_trees(Roots.from_ids(both[1][14:15])) for drafter in (whole, later)
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_different_lengths_are_joined() -> None:
    def states(*rows: list[float]) -> TargetOutput:
        return TargetOutput(torch.tensor(rows).unsqueeze(2))

    first = CommittedTokens([[1, 2], [3]], states([0.1, 0.2], [0.3, 9.0]), None)
    second = CommittedTokens([[4], [5, 6]], states([0.4, 9.0], [0.5, 0.6]), None)
    joined = first.concat(second)
    assert joined.token_ids == joined.tokens.tolist() == [[1, 2, 4], [3, 5, 6]]
    assert joined.counts.tolist() == [3, 3]
    expected = torch.tensor([[0.1, 0.2, 0.4], [0.3, 0.5, 0.6]])
    assert torch.equal(joined.output.hidden_states[:, :, 0], expected)
