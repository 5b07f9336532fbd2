"""Heads over features: texts stay the target's own, in chains, trees and batches."""

import copy
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from feature_heads import (
    BLOCKS,
    EAGLES,
    MTPS,
    fresh,
    learnt,
    objective_of,
    observed,
    prompts,
    settings_of,
    shared_target,
    texts_of_target,
)
from torch import Tensor
from toys import packed

from eval.decode.engine import NoDraft, decode, decode_batch
from eval.measure.replay import replay_drafter, replay_response
from heads.blocks.block_head import BlockDrafter
from heads.decoding.drafting import PAD, CommittedTokens, Drafter, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.peagle import PEagleDrafter
from heads.target_model.model import TargetOutput
from train.batch.batch import STEP_TARGETS, SUPERVISION, add_supervision
from train.peagle import PEagleObjective, compute_kept_fraction, draw_step_anchors, split_segments

slow = pytest.mark.slow
QUICK = ("eagle1", "eagle3, reduced", "eagle3.1", "dflash2", "dspark, rnn", "peagle", *MTPS)
EVERY = [*EAGLES, *BLOCKS, *MTPS, "peagle"]
# Of each drafter, and of a head with a state of its own; drafters take forms of heads alike.
DRAFTERS = ("eagle1", "dflash2", "dspark, rnn", "peagle", "mtp")
CHAINS = [
    *(pytest.param(name, 4, marks=() if name in QUICK else slow) for name in EVERY),
    *(pytest.param(name, depth, marks=slow) for name in DRAFTERS for depth in (1, 2)),
]
FLAT = [(name, DynamicShape(1, 4, 4)) for name in ("eagle3.1", "dspark, rnn", "peagle")]
TREES = [*((name, DynamicShape(4, 3, 10)) for name in DRAFTERS), *FLAT]


NUM_TOKENS = 12
"""Of each text."""


@cache
def answers() -> list[list[int]]:
    """The target's own, without drafts."""
    return [
        decode(shared_target(), NoDraft(), prompt, NUM_TOKENS).token_ids for prompt in prompts()
    ]


@pytest.mark.parametrize(("name", "depth"), CHAINS)
def test_replay_equals_chain_decoding_step_for_step(name: str, depth: int) -> None:
    head, target, num_accepted = learnt(name), shared_target(), 0
    for prompt, text in zip(prompts(), answers(), strict=True):
        decoded = decode(target, head.drafter(head, depth), prompt, NUM_TOKENS)
        assert decoded.token_ids == text
        assert replay_response(target, head, Tree.make_chain(depth), prompt, text) == decoded.steps
        num_accepted += sum(step.num_accepted for step in decoded.steps)
    assert num_accepted >= NUM_TOKENS // 4


@pytest.mark.parametrize(("name", "shape"), TREES)
def test_trees_are_lossless_and_replayed_along_a_text(name: str, shape: DynamicShape) -> None:
    head, target = learnt(name), shared_target()
    for prompt, text in zip(prompts(), answers(), strict=True):
        decoded = decode(target, head.drafter(head, shape), prompt, NUM_TOKENS)
        assert decoded.token_ids == text
        output = target.encode_response(prompt, text, head.taps)
        found = replay_drafter(head.drafter(head, shape), output, prompt, text)
        assert found == (decoded.steps, decoded.drafted)
        assert any(step.num_accepted for step in decoded.steps) or prompt == prompts()[-1]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", ["tree", "sampled chain"])
def test_a_batch_gives_every_text_that_it_gives_alone(name: str, kind: str) -> None:
    head, target = learnt(name), shared_target()
    warm = Sampling(temperature=0.7) if kind == "sampled chain" else Sampling()

    def drafter(*seeds: int) -> Drafter:
        if kind == "tree":
            return head.drafter(head, DynamicShape(3, 3, 8))
        return head.drafter(head, 3, warm, seeds)

    batch = [*prompts(), prompts()[0][:2] * 5]
    together = decode_batch(target, drafter(10, 11, 12, 13), batch, 9, warm, range(4))
    for row, (prompt, found) in enumerate(zip(batch, together, strict=True)):
        alone = decode(target, drafter(10 + row), prompt, 9, warm, row)
        assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("name", ["eagle3.1", "dflash2", "dspark, rnn", "peagle"])
def test_a_sampled_token_has_the_probability_that_is_told(name: str) -> None:
    head, text, number = learnt(name), texts_of_target(1, 10)[0], 3000
    target, warm = shared_target(), Sampling(temperature=1.3)
    drafter = head.drafter(head, 2, warm, range(number))
    output = target.encode_response(text[:1], text[1:], head.taps)
    many = TargetOutput(
        output.hidden_states.expand(number, -1, -1),
        {index: each.expand(number, -1, -1) for index, each in output.layers.items()},
    )
    drafter.observe(CommittedTokens([text[:-1]] * number, many, target.new_cache(number)))
    draft = drafter.propose(Roots.from_ids([text[-1]] * number))
    assert draft.draft_probs is not None
    first, second = draft.tokens.unbind(1)
    told = draft.draft_probs[0, 0]
    counts = Counter(first.tolist())
    likely = told.topk(5)
    for share, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
        deviation = (share * (1 - share) / number) ** 0.5
        assert abs(counts[token] / number - share) < 4.5 * deviation
    # What the second is drawn from is the distribution behind the first.
    rows = first == likely.indices[0]
    share = draft.draft_probs[rows][0, 1].max().item()
    best = int(draft.draft_probs[rows][0, 1].argmax())
    spread = (share * (1 - share) / int(rows.sum())) ** 0.5
    assert abs((second[rows] == best).double().mean().item() - share) < 4.5 * spread


@pytest.mark.parametrize("name", ["eagle3.1", "dflash2", "peagle", "mtp"])
@torch.inference_mode()
def test_no_row_lies_beyond_the_window(name: str, monkeypatch) -> None:
    head, text = learnt(name), texts_of_target(1, 12)[0]
    # A block's root has a row of its own, and its first draft the next.
    monkeypatch.setattr(head, "max_positions", len(text) + (2 if name == "dflash2" else 0))
    drafter = head.drafter(head, 4)
    observed(drafter, text)
    tokens = drafter.propose(Roots.from_ids(text[-1:])).tokens[0].tolist()
    assert [token == PAD for token in tokens] == [False, False, True, True]
    output = shared_target().encode_response(text[:4], text[4:], head.taps)
    ranked = head.compute_candidates(output, text, len(text) - 2, 4, 2)
    assert (ranked == PAD).all(-1).flatten().tolist() == [False, False, True, True]
    assert ranked[:2, 0, 0].tolist() == tokens[:2]


# --- Heads that draft in one pass: what trains is what drafts, and nothing leaks.


FAST = ("dflash2", "dspark, rnn")
OF_BLOCKS = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS]


@pytest.mark.parametrize("name", [*OF_BLOCKS, "peagle"])
@torch.inference_mode()
def test_a_tree_holds_the_likeliest_paths_of_all(name: str) -> None:
    head, text = learnt(name), texts_of_target(1, 12)[0]
    roots, width, kept = Roots.from_ids(text[-1:]), 7, 9
    observed(drafter := head.drafter(head, DynamicShape(3, width, kept)), text)
    draft = drafter.propose(roots)
    observed(again := head.drafter(head, DynamicShape(3, width, kept)), text)
    slots = again._compute_logits(roots) if name == "peagle" else again._compute_slots(roots)
    paths: dict[tuple[int, ...], float] = {}

    def logits(path: tuple[int, ...], state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if name == "peagle":
            return slots[:, len(path)], None
        base, outputs = (each[:, len(path)] for each in slots)
        before = torch.tensor([path[-1] if path else text[-1]])
        return head.compute_slot_logits(base, outputs, before, state)

    def follow(path: tuple[int, ...], score: float, state: Tensor | None) -> None:
        found, after = logits(path, state)
        best = found[0].log_softmax(-1).topk(width)
        for log_q, index in zip(best.values.tolist(), best.indices, strict=True):
            longer = (*path, int(head.vocab.to_target_ids(index)))
            paths[longer] = score + log_q
            if len(longer) < 3:
                follow(longer, paths[longer], after)

    follow((), 0.0, None)
    found: dict[int, tuple[int, ...]] = {0: ()}
    edges = zip(draft.tree[0].tolist(), draft.tokens[0].tolist(), strict=True)
    for node, (parent, token) in enumerate(edges, start=1):
        found[node] = (*found[parent], token)
    assert set(found.values()) - {()} == set(sorted(paths, key=lambda p: -paths[p])[:kept])


@pytest.mark.parametrize("name", OF_BLOCKS)
@torch.inference_mode()
def test_what_trains_is_what_drafts(name: str) -> None:
    """Packed documents, drawn anchors and no cache, against a text alone with one."""
    documents = texts_of_target(3, 14)
    objective = objective_of(learnt(name), shared_target(), settings_of(name, num_anchors=9))
    batch = objective.prepare_batch(objective.index_batch(packed(documents)))
    anchors = batch[STEP_TARGETS].anchors
    assert len(anchors) == 9
    trained = objective.compute_outputs(batch)
    for row, anchor in enumerate(anchors.tolist()):
        document, place = divmod(anchor, len(documents[0]))
        text = documents[document][: place + 2]
        drafter = BlockDrafter(learnt(name), 4 if name.startswith("dflash") else 5)
        observed(drafter, text)
        assert drafter.cache.prepared_slots.lengths == [place + 1]
        _, outputs = drafter._compute_slots(Roots.from_ids(text[-1:]))
        torch.testing.assert_close(trained[row], outputs[0], rtol=1e-4, atol=1e-4)


def outputs_and_roots(objective: Any, text: list[int], config: Any) -> list[tuple[Tensor, Tensor]]:
    """Outputs of each step or of all slots, and the token before each row's root."""
    batch = objective.prepare_batch(objective.index_batch(packed([text])))
    found = objective.compute_outputs(batch)
    if isinstance(objective, PEagleObjective):
        drafts = draw_step_anchors(batch[SUPERVISION], len(text), config, (0,))
        return list(zip(found, drafts, strict=True))
    return [(found, batch[STEP_TARGETS].anchors)]


@pytest.mark.parametrize("name", [*OF_BLOCKS, "peagle"])
def test_nothing_leaks_from_behind_the_text_that_a_row_sees(name: str) -> None:
    config = settings_of(name)
    head = fresh(shared_target(), config).eval()
    objective = objective_of(head, shared_target(), config)
    document = texts_of_target(1, 20)[0]
    other = [*document[:12], *(5 + token % 80 for token in document[12:])]
    ours, theirs = (outputs_and_roots(objective, text, config) for text in (document, other))
    for (one, roots), (two, _) in zip(ours, theirs, strict=True):
        rows = roots < 11  # whose root is token 11 at most
        assert rows.sum() > 1
        torch.testing.assert_close(one[rows], two[rows], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["dflash2", "dspark, rnn"])
@torch.inference_mode()
def test_a_chain_takes_the_best_token_after_the_one_before(name: str) -> None:
    head, text = copy.deepcopy(learnt(name)), texts_of_target(1, 12)[0]
    for matrix in head.find_embeddings():  # so that the token before decides
        matrix.copy_(torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0)))
    drafter = BlockDrafter(head, 4)
    observed(drafter, text)
    tokens = drafter.propose(Roots.from_ids(text[-1:])).tokens[0].tolist()
    roots = Roots.from_ids(text[-1:])
    before, (base, outputs) = roots.tokens, drafter._compute_slots(roots)
    expected: list[int] = []
    state: Tensor | None = None
    for slot in range(4):
        logits, state = head.compute_slot_logits(base[:, slot], outputs[:, slot], before, state)
        before = head.vocab.to_target_ids(logits.argmax(-1))
        expected.append(int(before))
    assert tokens == expected
    assert tokens != head.vocab.to_target_ids(base[0, :4].argmax(-1)).tolist()


# --- P-EAGLE.


@pytest.mark.parametrize("num_segments", [1, 3])
@torch.inference_mode()
def test_what_trains_a_peagle_head_is_what_drafts(num_segments: int) -> None:
    """Packed documents, drawn rows and no cache, against a text alone with one."""
    head, documents = learnt("peagle"), texts_of_target(3, 14)
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
