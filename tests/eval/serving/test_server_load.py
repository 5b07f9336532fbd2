"""Throughput, waits and speed-up by hand."""

import pytest

from data.servers.serving_engines import DraftCounts, LoadMeasurement, StreamedText
from eval.measure.prompts import Prompt
from eval.serving.server_load import WITH, WITHOUT, summarise_load

PROMPTS = [Prompt("all", [1], dialogue, turn) for dialogue, turn in ((0, 1), (0, 2), (1, 1))]


def streamed(first: float, *gaps: float, num_tokens: int = 10) -> StreamedText:
    arrivals = [first]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    return StreamedText(num_tokens, arrivals, [])


def of(
    seconds: float, texts: list[StreamedText], drafts: int = 0, accepted: int = 0
) -> LoadMeasurement:
    return LoadMeasurement(texts, seconds, DraftCounts([], drafts, 3 * drafts, [accepted, 0, 0]))


def test_figures_of_two_repeats() -> None:
    first = [streamed(0.1, 0.2, 0.3), streamed(0.3, 0.1), streamed(0.2, 0.2)]
    slower = [streamed(0.3, 0.2, 0.3), streamed(0.5, 0.1), streamed(0.4, 0.2)]
    base = [streamed(0.5, 0.5, num_tokens=5) for _ in range(3)]
    passes = {
        WITH: [of(1.0, first, 10, 5), of(2.0, slower, 20, 10)],
        WITHOUT: [of(3.0, base), of(3.0, base)],
    }
    found = summarise_load(passes, PROMPTS, seed=0)
    assert found["baseline"] == WITHOUT
    ours, theirs = found["methods"][WITH], found["methods"][WITHOUT]
    assert ours["tokens_per_s"] == (30 / 1.0 + 30 / 2.0) / 2
    assert theirs["tokens_per_s"] == 15 / 3.0
    assert ours["num_tokens"] == [30, 30]
    # Medians of 0.2 and 0.4, of 0.2 and 0.2; the greatest of three is no p99 yet.
    assert ours["first_token_ms"] == {"p50": pytest.approx(300), "p99": pytest.approx(300)}
    assert ours["between_tokens_ms"]["p50"] == pytest.approx(200)
    assert ours["per_draft"] == 1 + 15 / 30
    # Requests last 0.7, 0.5 and 0.5 s in the median of both repeats, ten tokens each.
    assert ours["speedup"] == pytest.approx((3.0 / 15) / (1.7 / 30))
    # Of dialogue 0 alone 1.2 s and 20 tokens, of dialogue 1 0.5 s and 10.
    low, high = ours["speedup_ci95"]
    assert low < ours["speedup"] < high
    assert (theirs["speedup"], theirs["speedup_ci95"]) == (1.0, None)


def test_a_server_alone_has_no_speedup() -> None:
    texts = [streamed(0.1, 0.2) for _ in PROMPTS]
    found = summarise_load({WITH: [of(1.0, texts, 4, 2)]}, PROMPTS, seed=0)
    assert (found["baseline"], found["methods"][WITH]["speedup"]) == (None, None)
    # A text that came in one piece has no waits between tokens.
    alone = summarise_load({WITH: [of(1.0, [streamed(0.1)] * 3)]}, PROMPTS, seed=0)
    assert alone["methods"][WITH]["between_tokens_ms"] is None
