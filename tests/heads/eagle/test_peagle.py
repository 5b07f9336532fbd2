"""P-EAGLE: what trains is what drafts, nothing leaks, texts stay the target's own."""

import pytest
import torch
from feature_heads import (
    fresh,
    learnt,
    observed,
    settings_of,
    shared_target,
    texts_of_target,
)
from toys import packed

from heads.decoding.drafting import Roots
from heads.decoding.tree import DynamicShape
from heads.eagle.peagle import PEagleDrafter, PEagleHead
from train.batch.batch import SUPERVISION, add_supervision
from train.peagle import PEagleObjective, compute_kept_fraction, draw_step_anchors, split_segments


@pytest.fixture(scope="module")
def head() -> PEagleHead:
    return learnt("peagle")


@torch.inference_mode()
def test_a_tree_holds_the_likeliest_paths_of_all(head) -> None:
    text, width, kept = texts_of_target(1, 12)[0], 5, 9
    drafter = PEagleDrafter(head, DynamicShape(3, width, kept))
    observed(drafter, text)
    draft = drafter.propose(Roots.from_ids(text[-1:]))
    observed(again := PEagleDrafter(head, DynamicShape(3, width, kept)), text)
    best = again._compute_logits(Roots.from_ids(text[-1:]))[0].log_softmax(-1).topk(width)
    rows = [
        list(zip(scores.tolist(), head.vocab.to_target_ids(ids).tolist(), strict=True))
        for scores, ids in zip(best.values, best.indices, strict=True)
    ]
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for row in rows:
        longest = max(map(len, paths))
        ends = [path for path in paths if len(path) == longest]
        paths |= {(*end, token): paths[end] + score for end in ends for score, token in row}
    del paths[()]
    found: dict[int, tuple[int, ...]] = {0: ()}
    edges = zip(draft.tree[0].tolist(), draft.tokens[0].tolist(), strict=True)
    for node, (parent, token) in enumerate(edges, start=1):
        found[node] = (*found[parent], token)
    expected = sorted(paths, key=lambda path: -paths[path])[:kept]
    assert set(found.values()) - {()} == set(expected)


@pytest.mark.parametrize("num_segments", [1, 3])
@torch.inference_mode()
def test_what_trains_is_what_drafts(head, num_segments: int) -> None:
    """Packed documents, drawn rows and no cache, against a text alone with one."""
    documents = texts_of_target(3, 14)
    config = settings_of("peagle", num_anchors=9, num_segments=num_segments)
    objective = PEagleObjective(head, shared_target(), config)
    batch = objective.prepare_batch(objective.index_batch(packed(documents)))
    steps = objective.compute_outputs(batch)
    drafts = draw_step_anchors(batch[SUPERVISION], batch["input_ids"].numel(), config, (0,))
    assert [len(each) for each in steps] == [len(each) for each in drafts]
    for step, (outputs, tokens) in enumerate(zip(steps, drafts, strict=True)):
        for row, token in enumerate(tokens.tolist()):
            document, place = divmod(token, len(documents[0]))
            text = documents[document][: place + 2]
            drafter = PEagleDrafter(head, 4)
            observed(drafter, text)
            logits = drafter._compute_logits(Roots.from_ids(text[-1:]))
            assert drafter.cache.prepared_slots.lengths == [place + 1]
            found = head.compute_logits(outputs[row])
            torch.testing.assert_close(found, logits[0, step], rtol=1e-4, atol=1e-4)


def test_nothing_leaks_from_behind_the_text_that_a_row_sees() -> None:
    config = settings_of("peagle")
    head = fresh(shared_target(), config).eval()
    objective = PEagleObjective(head, shared_target(), config)
    document = texts_of_target(1, 20)[0]
    other = [*document[:12], *(5 + token % 80 for token in document[12:])]
    found = []
    for text in (document, other):
        batch = objective.prepare_batch(objective.index_batch(packed([text])))
        drafts = draw_step_anchors(batch[SUPERVISION], len(text), config, (0,))
        rows = [each < 11 for each in drafts]  # that read token 11 at most
        assert min(int(each.sum()) for each in rows) > 1
        pairs = zip(objective.compute_outputs(batch), rows, strict=True)
        found.append(torch.cat([outputs[mine] for outputs, mine in pairs]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_segments_give_the_same_gradients() -> None:
    found = []
    for num_segments in (1, 3):
        config = settings_of("peagle", num_anchors=12, num_segments=num_segments, num_layers=3)
        head = fresh(shared_target(), config)
        objective = PEagleObjective(head, shared_target(), config)
        batch = objective.prepare_batch(objective.index_batch(packed(texts_of_target(2, 16))))
        sums = objective(batch, objective.term_weights / objective.compute_divisors(batch))
        sums.total.backward()
        grads = [each.grad for each in head.parameters() if each.requires_grad]
        found.append([sums.total, sums.terms, *grads])
    assert all(each is not None and each.any() for each in found[0])
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-6)


def test_fewer_tokens_draft_at_every_step() -> None:
    """Two sequences of 12 tokens, the first in two documents."""
    batch = packed([[*range(7)], [*range(5)]], 1)
    batch = {name: each.repeat(2, 1) for name, each in batch.items()}
    learnt = add_supervision(batch, 4)[SUPERVISION]
    config = settings_of("peagle", num_anchors=6, kept_share=0.5, least_share=0.3)
    found = draw_step_anchors(learnt, 12, config, (5, 6))
    # All that draft one token, whatever the number of anchors.
    assert found[0].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 14, 15, 16, 19, 20, 21]
    # Of 6 in each: (6 - 1) * 0.5, (6 - 2) * 0.3 (not 0.25), (6 - 3) * 0.3 (not 0.125).
    for step, most in ((1, 2), (2, 1), (3, 1)):
        assert set(found[step].tolist()) <= set(found[step - 1].tolist())
        assert set(found[step].tolist()) <= set(learnt.depths[step + 1].output_indices.tolist()) | {
            int(found[step - 1][0])
        }
        for begin in (0, 12):
            mine = (found[step] >= begin) & (found[step] < begin + 12)
            assert int(mine.sum()) <= most
    assert len(found[1]) == 4
    assert [compute_kept_fraction(config, step) for step in (1, 2, 3)] == [0.5, 0.3, 0.3]
    # Each sequence by itself, others with another seed.
    alone = add_supervision({name: each[:1] for name, each in batch.items()}, 4)[SUPERVISION]
    assert draw_step_anchors(alone, 12, config, (5,))[1].tolist() == found[1][:2].tolist()
    others = {
        tuple(draw_step_anchors(learnt, 12, config, (5, s))[1][2:].tolist()) for s in range(20)
    }
    assert len(others) > 3
    # Of all 8 of the first: (8 - 1) * 0.75.
    most = settings_of("peagle", num_anchors=99, kept_share=0.75)
    drawn = [draw_step_anchors(learnt, 12, most, (s, 6))[1].tolist() for s in range(20)]
    firsts = {tuple(token for token in each if token < 12) for each in drawn}
    assert {len(each) for each in firsts} == {5}
    assert len(firsts) > 1


def test_every_step_has_a_row() -> None:
    """So that every parameter has a gradient, whatever may be learnt."""
    batch, config = packed([[*range(4)]], 1), settings_of("peagle", kept_share=1.0)
    found = draw_step_anchors(add_supervision(batch, 4)[SUPERVISION], 4, config, (0,))
    assert [each.tolist() for each in found] == [[0, 1], [0], [0], [0]]
    nothing = add_supervision({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}, 4)
    found = draw_step_anchors(nothing[SUPERVISION], 4, config, (0,))
    assert [each.tolist() for each in found] == [[0]] * 4


def test_segments_hold_all_rows_behind_their_tokens() -> None:
    drafts = [torch.tensor(each) for each in ([2, 3, 5, 8, 9], [3, 8, 9], [9])]
    first, second = split_segments(drafts, 2)
    assert [each.last_tokens.tolist() for each in first] == [[2, 3, 5], [3]]
    assert [each.parent_rows.tolist() for each in first] == [[0, 1, 2], [1]]
    assert [each.last_tokens.tolist() for each in second] == [[8, 9], [8, 9], [9]]
    assert [each.parent_rows.tolist() for each in second] == [[0, 1], [0, 1], [1]]
    assert len(split_segments(drafts, 9)) == 5
