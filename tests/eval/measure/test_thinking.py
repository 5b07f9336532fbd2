"""Thinking and answer, told apart in what the target wrote."""

from pathlib import Path

import pytest
from toys import CHATML, random_target, tokenizer

from conf.command.clock import DecodingTimes
from conf.settings.measure import SpeedupRun
from data.rows.records import Record
from data.templates.record_encoder import RecordEncoder
from eval.compare.methods import Method
from eval.compare.speedup_stats import summarise_speedup
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation, Step
from eval.measure.acceptance_stats import PromptSteps, compute_part_figures, summarise_acceptance
from eval.measure.measurement import Measurement
from eval.measure.prompts import count_thinking_tokens, render_first_turns
from heads.decoding.sampling import GREEDY

THINKS, CHANNELS = (
    Path(__file__).with_name(f"{name}.jinja").read_text() for name in ("thinks", "channels")
)


@pytest.mark.parametrize(
    ("template", "kwargs", "thinking", "answer"),
    [
        (THINKS, {}, "<think>\nhow are you?\n</think>", "\n\nfine<|im_end|>"),
        (THINKS, {}, "<think>\nhow are you", ""),
        (THINKS, {}, "", "fine</think><|im_end|>"),
        (THINKS, {"opens": True}, "how are you?\n</think>", "\n\nfine<|im_end|>"),
        (THINKS, {"enable_thinking": False}, "", "fine<|im_end|>"),
        (CHANNELS, {}, "[think]how are you?[/think]", "fine<|im_end|>"),
        (CHATML, {}, "", "fine<|im_end|>"),
    ],
)
def test_thinking_ends_with_what_the_template_puts_behind_it(
    template: str, kwargs: dict, thinking: str, answer: str
) -> None:
    made = tokenizer(template)
    messages = [{"role": "user", "content": "hello"}]
    prompt = render_first_turns([Record(messages, None, "here")], RecordEncoder(made, kwargs))[0]
    before, after = (made(text, add_special_tokens=False).input_ids for text in (thinking, answer))
    assert count_thinking_tokens(prompt, before + after, made) == len(before)


def test_a_pass_belongs_to_the_part_of_its_first_token() -> None:
    steps = [Step(1, 2, 9), Step(2, 3, 7), Step(0, 1, 4), Step(2, 3, 3)]  # at 1, 3, 6 and 7
    both = [PromptSteps("a", steps, num_thinking=4), PromptSteps("a", steps[2:])]
    assert compute_part_figures(both, 2) == {
        "thinking": {"tau": 2.5, "per_draft": 2.5, "alpha": [1.0, 0.5], "num_tokens": 5},
        "answer": {"tau": 2.0, "per_draft": 2.0, "alpha": [0.5, 1.0], "num_tokens": 8},
    }
    assert summarise_acceptance(both, 2, 0)["by_part"] == compute_part_figures(both, 2)
    assert compute_part_figures([PromptSteps("a", steps, num_thinking=3)], 1)["thinking"] == {
        "tau": 2.0,
        "per_draft": 2.0,
        "alpha": [1.0],
        "num_tokens": 2,
    }
    assert compute_part_figures([PromptSteps("a", steps)], 2) == {}


def test_passes_without_a_draft_are_none_of_a_part() -> None:
    steps = [Step(1, 2, 9), Step(0, 1, 7), Step(0, 1, 6), Step(2, 3, 5)]
    parts = compute_part_figures([PromptSteps("a", steps, [2, 0, 2, 2], num_thinking=4)], 2)
    assert [row["per_draft"] for row in parts.values()] == [2.0, 2.0]  # of one and of two drafts


def test_a_speedup_tells_thinking_from_answers_too() -> None:
    target = random_target()
    target.tokenizer = made = tokenizer(THINKS)
    record = Record([{"role": "user", "content": "hello"}], None, "here")
    [prompt] = render_first_turns([record], RecordEncoder(made, {"opens": True}))
    before, after = (made(t, add_special_tokens=False).input_ids for t in ("hi</think>", "fine"))
    steps = [Step(1, len(before), 9), Step(0, 1, 2)]  # the second after all of the thinking
    text = Generation([*before, *after], steps, times=DecodingTimes(total=1.0))
    bench = Measurement(target, [], [prompt], GREEDY, {}, True)
    found = [PromptRun(prompt, {"vanilla": [text]})]
    methods = {"vanilla": Method(lambda *_: [text])}
    [row] = summarise_speedup(bench, SpeedupRun(num_texts=0), methods, found)["methods"].values()
    own = PromptSteps("", steps, num_thinking=len(before))
    assert row["by_part"] == compute_part_figures([own], 1)
    assert len(row["by_part"]) == 2
