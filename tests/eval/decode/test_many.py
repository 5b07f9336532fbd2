"""More texts than go on together: where one ends, the next takes its place."""

import time
from collections.abc import Sequence

import pytest
from drafters import EVERY_DRAFTER, Make, each_way, medusa, small_target
from toys import noisy_head, random_target

from eval.decode.drafters.draft_model import DraftModel
from eval.decode.drafters.lookup import Recycling, SuccessorTable, build_recycling_tree
from eval.decode.drafters.oracle import Oracle
from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import Generation, NoDraft, Request, Step, decode, decode_many
from eval.decode.generation_config import StopRules
from heads.decoding.drafting import Draft, Roots
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import Tree
from heads.medusa import MedusaDrafter
from heads.target_model.model import Target, TargetOutput
from tests.eval.decode.test_drafters import PROMPTS, WARM

STOPS = [286, 132, 210, 188, 247, 109]
REQUESTS = [
    Request(ids, seed) for seed, ids in enumerate([*PROMPTS, [9, 8, 7, 6], [5], [77, 8]], start=7)
]


def suffix() -> SuffixDrafter:
    return SuffixDrafter(SuffixTree(8))


REMEMBERING: dict[str, Make] = {
    "suffix": lambda *_: suffix(),
    "hybrid": lambda *_: HybridDrafter(MedusaDrafter(medusa(), Tree.make_chain(3)), suffix(), 0.4),
}


@pytest.fixture
def target(monkeypatch) -> Target:
    """Its texts end where they come to one of a few tokens."""
    found = small_target()
    monkeypatch.setattr(found.model.generation_config, "eos_token_id", STOPS)
    return found


def alone(target: Target, make: Make, request: Request, sampling: Sampling) -> Generation:
    drafter = make(sampling, [request.seed])
    return decode(target, drafter, request.prompt_ids, 20, sampling, request.seed)


EVERY = EVERY_DRAFTER | REMEMBERING


@pytest.mark.parametrize(
    ("name", "sampling"), [each for each in each_way(EVERY, WARM) if each.id != "hybrid-warm"]
)
def test_a_text_in_anothers_place_is_drafted_as_it_is_alone(
    name: str, sampling: Sampling, target: Target
) -> None:
    make = EVERY[name]
    expected = [alone(target, make, request, sampling) for request in REQUESTS]
    found = decode_many(target, lambda seeds: make(sampling, seeds), REQUESTS, 20, 2, sampling)
    for text, own in zip(found, expected, strict=True):
        assert (text.token_ids, text.steps) == (own.token_ids, own.steps)
    assert len({len(text.token_ids) for text in found}) > 1


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "lfm2", "falcon_h1"])
def test_windows_and_states_are_each_texts_own(family: str, monkeypatch) -> None:
    target = random_target(family)
    requests = ends_after([9, 24, 5, 16, 20], target, monkeypatch)
    head, tree = noisy_head(target), Tree.from_paths([[0], [1], [0, 0]])
    found = decode_many(target, lambda _: MedusaDrafter(head, tree), requests, 24, 2)
    for request, text in zip(requests, found, strict=True):
        own = decode(target, NoDraft(), request.prompt_ids, 24)
        assert text.token_ids == own.token_ids


def test_a_recurrent_draft_model_begins_a_prompt_of_one_token_in_anothers_place(
    monkeypatch,
) -> None:
    target = random_target("lfm2")
    requests = ends_after([9, 24, 16, 20], target, monkeypatch)
    draft = random_target("lfm2")  # always right

    def make(_seeds: list[int]) -> DraftModel:
        return DraftModel(draft, Tree.make_chain(3))

    found = decode_many(target, make, requests, 24, 2)
    for request, text in zip(requests, found, strict=True):
        own = decode(target, make([0]), request.prompt_ids, 24)
        assert (text.token_ids, text.steps) == (own.token_ids, own.steps)
        assert all(step.num_accepted == min(3, step.num_left) for step in text.steps)


def test_a_hybrid_copies_from_its_own_text(target: Target) -> None:
    """Two texts that repeat themselves, the second in the place of one of others."""
    requests = [Request([5, 6, 7, 5]), Request([9, 8]), Request([11, 12, 13, 14] * 3)]
    made: list[HybridDrafter] = []

    def make(_seeds: list[int]) -> HybridDrafter:
        made.append(HybridDrafter(MedusaDrafter(medusa(), Tree.make_chain(3)), suffix(), 0.4))
        return made[-1]

    decode_many(target, make, requests, 6, 2)
    prompts = [text.tokens[:12] for text in made[0].suffix.texts]
    assert [11, 12, 13, 14] * 3 in prompts


def test_recycled_candidates_go_on_in_other_texts(target: Target) -> None:
    known = SuccessorTable()
    tree = build_recycling_tree(6)
    found = decode_many(target, lambda _: Recycling(known, tree), REQUESTS, 20, 2)
    expected = decode_many(target, lambda _: NoDraft(), REQUESTS, 20, 1)
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    assert any(step.num_accepted for text in found for step in text.steps)


class Watched(NoDraft):
    """Notes the texts of each step, told by the seeds it was made for."""

    def __init__(self, seeds: Sequence[int], steps: list[list[int]]) -> None:
        self.seeds, self.steps = list(seeds), steps

    def propose(self, roots: Roots) -> Draft:
        self.steps.append(self.seeds.copy())
        return super().propose(roots)

    def select_rows(self, rows: list[int]) -> None:
        self.seeds = [self.seeds[row] for row in rows]

    def insert_row(self, row: int, other: "Watched") -> None:
        self.seeds[row] = other.seeds[0]


def ends_after(lengths: list[int], target: Target, monkeypatch) -> list[Request]:
    """Prompts of a token each, whose texts, told by their first, end after so many."""
    prompts = {decode(target, NoDraft(), [ids], 1).token_ids[0]: [ids] for ids in range(5, 60)}
    wanted = dict(zip(prompts, lengths, strict=False))
    monkeypatch.setattr(StopRules, "has_ended", lambda _, tokens: len(tokens) == wanted[tokens[0]])
    monkeypatch.setattr(
        StopRules,
        "cut_after_end",
        lambda _, before, tokens: tokens[: wanted[before[0]] - len(before)],
    )
    return [Request(prompts[first], seed) for seed, first in enumerate(wanted)]


def test_every_place_is_filled_again_at_once(monkeypatch) -> None:
    """Two at a time; a text of a single token needs no place, and the last is alone."""
    lengths = [3, 5, 2, 1, 2, 4]
    target = random_target()
    requests = ends_after(lengths, target, monkeypatch)
    steps: list[list[int]] = []
    found = decode_many(target, lambda seeds: Watched(seeds, steps), requests, 9, 2)
    assert [len(text.token_ids) for text in found] == lengths
    assert steps == [[0, 1], [0, 1], [2, 1], [4, 1], [5], [5], [5]]


def test_places_that_nobody_takes_are_given_up(monkeypatch) -> None:
    """All end at once, and one is left."""
    target = random_target()
    requests = ends_after([2, 2, 2, 3], target, monkeypatch)
    steps: list[list[int]] = []
    decode_many(target, lambda seeds: Watched(seeds, steps), requests, 9, 3)
    assert steps == [[0, 1, 2], [3], [3]]


def test_what_a_text_took_and_when_its_tokens_came(monkeypatch) -> None:
    """Passes of a second: a prompt's, and those that two texts share."""
    target, now = random_target(), [0.0]
    requests = ends_after([3, 5, 2], target, monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    extend = target.run_pending

    def slow(*args, **kwargs) -> TargetOutput:
        now[0] += 1.0
        return extend(*args, **kwargs)

    monkeypatch.setattr(target, "run_pending", slow)
    first, second, third = decode_many(target, lambda _: NoDraft(), requests, 9, 2)
    assert first.arrivals == [1, 2, 3]
    # Between its third token and the next the third text's prompt was read.
    assert second.arrivals == [1, 2, 3, 5, 6]
    assert third.arrivals == [1, 2]
    assert [text.times.prefill for text in (first, second, third)] == [0.5, 0.5, 1.0]
    assert [text.times.verify for text in (first, second, third)] == [1.0, 2.5, 0.5]
    assert [text.times.total for text in (first, second, third)] == [1.5, 3.0, 1.5]


def test_an_oracle_goes_on_in_anothers_place(target: Target) -> None:
    expected = [alone(target, lambda *_: NoDraft(), each, GREEDY).token_ids for each in REQUESTS]
    by_seed = {each.seed: text for each, text in zip(REQUESTS, expected, strict=True)}

    def make(seeds: list[int]) -> Oracle:
        return Oracle([by_seed[seed] for seed in seeds], Tree.make_chain(2), 1.0, target.vocab_size)

    found = decode_many(target, make, REQUESTS, 20, 2)
    assert [text.token_ids for text in found] == expected
    full = [step for text in found for step in text.steps if step.num_left > 2]
    assert all(step == Step(2, 3, step.num_left) for step in full)
    assert full
