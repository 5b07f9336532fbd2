"""P-EAGLE: what trains is what drafts, nothing leaks, texts stay the target's own."""

from collections import Counter

import pytest
import torch
from peagle_heads import fresh, peagle_head, settings_of
from toys import packed, random_target, texts

from eval.decode.engine import NoDraft, Request, decode, decode_batch, decode_many
from eval.measure.replay import replay
from heads.decoding.drafting import PAD, Committed, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Tree
from heads.peagle.drafter import PEagleChain, PEagleTree
from heads.peagle.head import PEagleHead
from heads.target_model.model import Target, TargetOutput
from train.batch.supervision import SUPERVISION, indexed
from train.peagle import PEagleObjective, lineages, segmented, share


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(num_hidden_layers=4)
    target.model.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Two that the head has learnt from, and one that it has not."""
    return [*(text[:4] for text in texts(target, 2, 1)), [61, 23, 77]]


@pytest.fixture(scope="module")
def answers(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """The target's own, without drafts."""
    return [decode(target, NoDraft(), prompt, 40).token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def head(target: Target) -> PEagleHead:
    return peagle_head(target, num_updates=40, num_texts=2)


@pytest.mark.parametrize("depth", [4, pytest.param(2, marks=pytest.mark.slow), 1])
def test_replay_equals_chain_decoding_step_for_step(
    target, prompts, answers, head, depth: int
) -> None:
    num_accepted = 0
    for prompt, text in zip(prompts, answers, strict=True):
        decoded = decode(target, PEagleChain(head, depth), prompt, 40)
        assert decoded.token_ids == text
        assert replay(target, head, Tree.chain(depth), prompt, text) == decoded.steps
        num_accepted += sum(step.num_accepted for step in decoded.steps)
    assert num_accepted > 20


@pytest.mark.parametrize("shape", [DynamicShape(4, 3, 10), DynamicShape(1, 4, 4)])
def test_trees_are_lossless(target, prompts, answers, head, shape: DynamicShape) -> None:
    for prompt, text in zip(prompts, answers, strict=True):
        decoded = decode(target, PEagleTree(head, shape), prompt, 20)
        assert decoded.token_ids == text[:20]
        assert any(step.num_accepted for step in decoded.steps) or prompt == prompts[-1]


def observed(target: Target, drafter: PEagleChain | PEagleTree, text: list[int]) -> None:
    """Gives a drafter a text, whose last token is the root of what it drafts next."""
    output = target.read_response(text[:1], text[1:], drafter.taps)
    drafter.observe(Committed([text[:-1]], output, target.new_cache(1)))


@torch.inference_mode()
def test_a_tree_holds_the_likeliest_paths_of_all(target, head) -> None:
    text, width, kept = texts(target, 1, 12)[0], 5, 9
    drafter = PEagleTree(head, DynamicShape(3, width, kept))
    observed(target, drafter, text)
    draft = drafter.propose(Roots.of(text[-1:]))
    observed(target, again := PEagleTree(head, DynamicShape(3, width, kept)), text)
    best = again._logits(Roots.of(text[-1:]))[0].log_softmax(-1).topk(width)
    rows = [
        list(zip(scores.tolist(), head.vocab.to_target(ids).tolist(), strict=True))
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


@pytest.mark.parametrize(
    "kind", [pytest.param("chain", marks=pytest.mark.slow), "tree", "sampled chain"]
)
def test_a_batch_gives_every_text_that_it_gives_alone(target, prompts, head, kind: str) -> None:
    warm = Sampling(temperature=0.7) if kind == "sampled chain" else Sampling()

    def drafter(*seeds: int) -> PEagleChain | PEagleTree:
        if kind == "tree":
            return PEagleTree(head, DynamicShape(3, 3, 8))
        return PEagleChain(head, 3, warm, seeds)

    batch = [*prompts, prompts[0][:2] * 5]
    together = decode_batch(target, drafter(10, 11, 12, 13), batch, 20, warm, range(4))
    for row, (prompt, found) in enumerate(zip(batch, together, strict=True)):
        alone = decode(target, drafter(10 + row), prompt, 20, warm, row)
        assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


def test_a_text_that_takes_a_place_draws_as_alone(target, prompts, head) -> None:
    warm = Sampling(temperature=1.5)
    requests = [Request(prompts[row % 3], 10 + row) for row in range(4)]
    found = decode_many(
        target, lambda seeds: PEagleChain(head, 3, warm, seeds), requests, 20, 2, warm
    )
    for each, request in zip(found, requests, strict=True):
        drafter = PEagleChain(head, 3, warm, [request.seed])
        alone = decode(target, drafter, request.prompt_ids, 20, warm, request.seed)
        assert (each.token_ids, each.steps) == (alone.token_ids, alone.steps)


def test_a_sampled_token_has_the_probability_that_is_told(target, head) -> None:
    text, number = texts(target, 1, 10)[0], 3000
    warm = Sampling(temperature=1.3)
    drafter = PEagleChain(head, 2, warm, range(number))
    output = target.read_response(text[:1], text[1:], head.taps)
    many = TargetOutput(
        output.hidden_states.expand(number, -1, -1),
        {index: each.expand(number, -1, -1) for index, each in output.layers.items()},
    )
    drafter.observe(Committed([text[:-1]] * number, many, target.new_cache(number)))
    draft = drafter.propose(Roots.of([text[-1]] * number))
    assert draft.draft_probs is not None
    for level in range(2):
        told = draft.draft_probs[0, level]
        counts = Counter(draft.tokens[:, level].tolist())
        likely = told.topk(5)
        for part, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
            deviation = (part * (1 - part) / number) ** 0.5
            assert abs(counts[token] / number - part) < 4.5 * deviation


@pytest.mark.parametrize("num_segments", [1, 3])
@torch.inference_mode()
def test_what_trains_is_what_drafts(target, head, num_segments: int) -> None:
    """Packed documents, drawn rows and no cache, against a text alone with one."""
    documents = texts(target, 3, 14)
    config = settings_of(num_anchors=9, num_segments=num_segments)
    objective = PEagleObjective(head, target, config)
    batch = objective.prepare(objective.indexed(packed(documents)))
    steps = list(objective._unrolled(batch))
    drafts = lineages(batch[SUPERVISION], batch["input_ids"].numel(), config, (0,))
    assert [len(each) for each in steps] == [len(each) for each in drafts]
    for step, (outputs, tokens) in enumerate(zip(steps, drafts, strict=True)):
        for row, token in enumerate(tokens.tolist()):
            document, place = divmod(token, len(documents[0]))
            text = documents[document][: place + 2]
            drafter = PEagleChain(head, 4)
            observed(target, drafter, text)
            logits = drafter._logits(Roots.of(text[-1:]))
            assert drafter.cache.opened.lengths == [place + 1]
            found = head.logits(outputs[row])
            torch.testing.assert_close(found, logits[0, step], rtol=1e-4, atol=1e-4)


def test_nothing_leaks_from_behind_the_text_that_a_row_sees(target) -> None:
    config = settings_of()
    head = fresh(target, config).eval()
    objective = PEagleObjective(head, target, config)
    document = texts(target, 1, 20)[0]
    other = [*document[:12], *(5 + token % 80 for token in document[12:])]
    found = []
    for text in (document, other):
        batch = objective.prepare(objective.indexed(packed([text])))
        drafts = lineages(batch[SUPERVISION], len(text), config, (0,))
        rows = [each < 11 for each in drafts]  # that read token 11 at most
        assert min(int(each.sum()) for each in rows) > 1
        pairs = zip(objective._unrolled(batch), rows, strict=True)
        found.append(torch.cat([outputs[mine] for outputs, mine in pairs]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_segments_give_the_same_gradients(target) -> None:
    found = []
    for num_segments in (1, 3):
        config = settings_of(num_anchors=12, num_segments=num_segments, num_layers=3)
        head = fresh(target, config)
        objective = PEagleObjective(head, target, config)
        batch = objective.prepare(objective.indexed(packed(texts(target, 2, 16))))
        sums = objective(batch, objective.weights / objective.counts(batch))
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
    learnt = indexed(batch, 4)[SUPERVISION]
    config = settings_of(num_anchors=6, kept_share=0.5, least_share=0.3)
    found = lineages(learnt, 12, config, (5, 6))
    # All that draft one token, whatever the number of anchors.
    assert found[0].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 14, 15, 16, 19, 20, 21]
    # Of 6 in each: (6 - 1) * 0.5, (6 - 2) * 0.3 (not 0.25), (6 - 3) * 0.3 (not 0.125).
    for step, most in ((1, 2), (2, 1), (3, 1)):
        assert set(found[step].tolist()) <= set(found[step - 1].tolist())
        assert set(found[step].tolist()) <= set(learnt.depths[step + 1].places.tolist()) | {
            int(found[step - 1][0])
        }
        for begin in (0, 12):
            mine = (found[step] >= begin) & (found[step] < begin + 12)
            assert int(mine.sum()) <= most
    assert len(found[1]) == 4
    assert [share(config, step) for step in (1, 2, 3)] == [0.5, 0.3, 0.3]
    # Each sequence by itself, others with another seed.
    alone = indexed({name: each[:1] for name, each in batch.items()}, 4)[SUPERVISION]
    assert lineages(alone, 12, config, (5,))[1].tolist() == found[1][:2].tolist()
    others = {tuple(lineages(learnt, 12, config, (5, s))[1][2:].tolist()) for s in range(20)}
    assert len(others) > 3
    # Of all 8 of the first: (8 - 1) * 0.75.
    most = settings_of(num_anchors=99, kept_share=0.75)
    drawn = [lineages(learnt, 12, most, (s, 6))[1].tolist() for s in range(20)]
    firsts = {tuple(token for token in each if token < 12) for each in drawn}
    assert {len(each) for each in firsts} == {5}
    assert len(firsts) > 1


def test_every_step_has_a_row() -> None:
    """So that every parameter has a gradient, whatever may be learnt."""
    batch, config = packed([[*range(4)]], 1), settings_of(kept_share=1.0)
    found = lineages(indexed(batch, 4)[SUPERVISION], 4, config, (0,))
    assert [each.tolist() for each in found] == [[0, 1], [0], [0], [0]]
    nothing = indexed({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}, 4)
    found = lineages(nothing[SUPERVISION], 4, config, (0,))
    assert [each.tolist() for each in found] == [[0]] * 4


def test_segments_hold_all_rows_behind_their_tokens() -> None:
    drafts = [torch.tensor(each) for each in ([2, 3, 5, 8, 9], [3, 8, 9], [9])]
    first, second = segmented(drafts, 2)
    assert [each.tokens.tolist() for each in first] == [[2, 3, 5], [3]]
    assert [each.kept.tolist() for each in first] == [[0, 1, 2], [1]]
    assert [each.tokens.tolist() for each in second] == [[8, 9], [8, 9], [9]]
    assert [each.kept.tolist() for each in second] == [[0, 1], [0, 1], [1]]
    assert len(segmented(drafts, 9)) == 5


@torch.inference_mode()
def test_no_row_lies_beyond_the_window(target, head) -> None:
    text = texts(target, 1, 12)[0]
    last = len(text) - 2  # the row of the text that drafts
    head.window, window = last + 2, head.window
    try:
        drafter = PEagleChain(head, 4)
        observed(target, drafter, text)
        tokens = drafter.propose(Roots.of(text[-1:])).tokens[0].tolist()
        assert [token == PAD for token in tokens] == [False, False, True, True]
        output = target.read_response(text[:4], text[4:], head.taps)
        ranked = head.candidates(output, text, last, 4, 2)
        assert (ranked == PAD).all(-1).flatten().tolist() == [False, False, True, True]
        assert ranked[:2, 0, 0].tolist() == tokens[:2]
    finally:
        head.window = window
