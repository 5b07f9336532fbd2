"""More texts than go on together: who stands in which place, and what each of them took."""

import time
from collections.abc import Sequence

from toys import random_target

from eval.decode.drafters.draft_model import DraftModel
from eval.decode.engine import NoDraft, Request, decode, decode_many
from eval.decode.generation_config import StopRules
from heads.decoding.drafting import Draft, Roots
from heads.decoding.tree import Tree
from heads.target_model.model import Target


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

    def take_a_second(*_) -> None:
        now[0] += 1.0

    target.decoder.register_forward_pre_hook(take_a_second)
    first, second, third = decode_many(target, lambda _: NoDraft(), requests, 9, 2)
    assert first.arrivals == [1, 2, 3]
    # Between its third token and the next the third text's prompt was read.
    assert second.arrivals == [1, 2, 3, 5, 6]
    assert third.arrivals == [1, 2]
    assert [text.times.prefill for text in (first, second, third)] == [0.5, 0.5, 1.0]
    assert [text.times.verify for text in (first, second, third)] == [1.0, 2.5, 0.5]
    assert [text.times.total for text in (first, second, third)] == [1.5, 3.0, 1.5]
