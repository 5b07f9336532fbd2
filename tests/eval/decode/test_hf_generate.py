"""Steps of transformers' own loops, and counts of any drafter's tokens."""

import copy

import pytest
import torch
from toys import endless_target, random_target

from conf.command.clock import DecodingTimes
from eval.decode.engine import NoDraft, Step, decode, decode_batch
from eval.decode.hf_generate import hf_generate
from heads.decoding.drafting import PAD, Draft, Roots
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.target_model.model import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return endless_target()


def test_generate_takes_one_pass_a_token_after_the_prompts_own(target) -> None:
    one, other = hf_generate(target, [[5, 6, 7], [5, 6]], 4, GREEDY, 0)
    for text in (one, other):
        assert len(text.token_ids) == 4
        assert text.steps == [Step(0, 1, 3), Step(0, 1, 2), Step(0, 1, 1)]
        assert text.drafted == [0, 0, 0]
    # The engine counts the same.
    assert decode(target, NoDraft(), [5, 6, 7], 4).steps == one.steps


def test_a_text_that_ends_before_its_batch_has_no_more_steps() -> None:
    target = random_target()
    stop = decode(target, NoDraft(), [9, 8], 8).token_ids[2]
    target.model.generation_config.eos_token_id = stop
    found = hf_generate(target, [[5, 6, 7], [9, 8]], 8, GREEDY, 0)
    assert [text.token_ids.index(stop) for text in found] == [4, 2]
    assert [len(text.steps) for text in found] == [4, 2]


def test_an_assistant_that_is_always_right_gives_all_it_drafts(target) -> None:
    """Chains of 3: 4 tokens with the prompt's own pass, then 4 a pass; the last has room for 2."""
    assistant = copy.deepcopy(target.model)
    how = assistant.generation_config
    how.num_assistant_tokens, how.num_assistant_tokens_schedule = 3, "constant"
    how.assistant_confidence_threshold = 0.0
    [text] = hf_generate(target, [[5, 6, 7]], 14, GREEDY, 0, assistant_model=assistant)
    assert text.token_ids == decode(target, NoDraft(), [5, 6, 7], 14).token_ids
    assert text.steps == [Step(3, 4, 10), Step(3, 4, 6), Step(1, 2, 2)]
    assert text.drafted == [3, 3, 1]


def test_reading_the_prompt_lasts_until_the_next_pass_begins(target, monkeypatch) -> None:
    """A prompt's pass of 5 s, 2 s to choose its token, passes of 1 s."""
    now, took = [0.0], iter([5.0, 1.0, 1.0])
    monkeypatch.setattr("conf.command.clock.time.perf_counter", lambda: now[0])

    def work(*_) -> None:
        now[0] += next(took)

    def choose(*_) -> None:
        now[0] += 2.0

    hooks = [
        target.decoder.register_forward_hook(work),
        target.model.get_output_embeddings().register_forward_hook(choose),
    ]
    [text] = hf_generate(target, [[5, 6, 7]], 3, GREEDY, 0)
    for hook in hooks:
        hook.remove()
    assert text.times == DecodingTimes(prefill=7.0, total=13.0)


class Rising:
    """Drafts a wrong token more each time; the text in row n has n empty places."""

    def __init__(self) -> None:
        self.plain, self.taps, self.size = NoDraft(), NoDraft().taps, 3
        self.rows = [0, 1]

    def observe(self, seen) -> None:
        self.plain.observe(seen)

    def propose(self, roots: Roots) -> Draft:
        self.size += 1
        rows = [[0] * (self.size - row) + [PAD] * row for row in self.rows]
        return Draft.from_tree(Tree.make_chain(self.size), torch.tensor(rows))

    def select_rows(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def test_drafts_are_counted_per_text_and_step() -> None:
    target = random_target()
    long, short = [decode(target, NoDraft(), ids, 5).token_ids for ids in ([5, 6, 7], [9, 8])]
    assert 0 not in (*long, *short)
    target.model.generation_config.eos_token_id = long[2]
    found = decode_batch(target, Rising(), [[5, 6, 7], [9, 8]], 5)
    assert [text.token_ids for text in found] == [long[:3], short]
    assert [text.drafted for text in found] == [[4, 5], [3, 4, 5, 6]]
