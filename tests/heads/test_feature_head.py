"""Heads over features: texts stay the target's own, in chains, trees and batches."""

from collections import Counter
from functools import cache

import pytest
import torch
from feature_heads import (
    BLOCKS,
    EAGLES,
    MTPS,
    learnt,
    observed,
    prompts,
    shared_target,
    texts_of_target,
)

from eval.decode.engine import NoDraft, decode, decode_batch
from eval.measure.replay import replay_drafter, replay_response
from heads.decoding.drafting import PAD, CommittedTokens, Drafter, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Tree
from heads.target_model.model import TargetOutput

slow = pytest.mark.slow
QUICK = ("eagle1", "eagle3, reduced", "eagle3.1", "dflash2", "dspark, rnn", "peagle", *MTPS)
EVERY = [*EAGLES, *BLOCKS, *MTPS, "peagle"]
NAMES = [name if name in QUICK else pytest.param(name, marks=slow) for name in EVERY]


@cache
def answers() -> list[list[int]]:
    """The target's own, without drafts."""
    return [decode(shared_target(), NoDraft(), prompt, 40).token_ids for prompt in prompts()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [4, pytest.param(2, marks=slow), pytest.param(1, marks=slow)])
def test_replay_equals_chain_decoding_step_for_step(name, depth) -> None:
    head, target, num_accepted = learnt(name), shared_target(), 0
    for prompt, text in zip(prompts(), answers(), strict=True):
        decoded = decode(target, head.drafter(head, depth), prompt, 40)
        assert decoded.token_ids == text
        assert replay_response(target, head, Tree.make_chain(depth), prompt, text) == decoded.steps
        num_accepted += sum(step.num_accepted for step in decoded.steps)
    assert num_accepted > 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [DynamicShape(4, 3, 10), DynamicShape(1, 4, 4)])
def test_trees_are_lossless_and_replayed_along_a_text(name: str, shape: DynamicShape) -> None:
    head, target = learnt(name), shared_target()
    for prompt, text in zip(prompts(), answers(), strict=True):
        decoded = decode(target, head.drafter(head, shape), prompt, 20)
        assert decoded.token_ids == text[:20]
        output = target.encode_response(prompt, text[:20], head.taps)
        found = replay_drafter(head.drafter(head, shape), output, prompt, text[:20])
        assert found == (decoded.steps, decoded.drafted)
        assert any(step.num_accepted for step in decoded.steps) or prompt == prompts()[-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [pytest.param("chain", marks=slow), "tree", "sampled chain"])
def test_a_batch_gives_every_text_that_it_gives_alone(name: str, kind: str) -> None:
    head, target = learnt(name), shared_target()
    warm = Sampling(temperature=0.7) if kind == "sampled chain" else Sampling()

    def drafter(*seeds: int) -> Drafter:
        if kind == "tree":
            return head.drafter(head, DynamicShape(3, 3, 8))
        return head.drafter(head, 3, warm, seeds)

    batch = [*prompts(), prompts()[0][:2] * 5]
    together = decode_batch(target, drafter(10, 11, 12, 13), batch, 20, warm, range(4))
    for row, (prompt, found) in enumerate(zip(batch, together, strict=True)):
        alone = decode(target, drafter(10 + row), prompt, 20, warm, row)
        assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("name", ["dflash2", "dspark, rnn", "peagle"])
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
