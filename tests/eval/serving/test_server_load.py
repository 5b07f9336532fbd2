"""Throughput, waits, speed-up and windows by hand."""

import pytest

from conf.settings.measure import ServeRun
from data.servers.serving_engines import DraftCounts, LoadMeasurement, StreamedText
from eval.measure.prompts import Prompt
from eval.serving.server_load import WITH, WITHOUT, find_window, summarise_load

PROMPTS = [Prompt("all", [1], dialogue, turn) for dialogue, turn in ((0, 1), (0, 2), (1, 1))]


def streamed(
    started: float, first: float, *gaps: float, num_tokens: int = 10, digest: str = "a"
) -> StreamedText:
    """A text whose first piece is one token and whose others are as large as each other."""
    arrivals, pieces = [first], [1] if gaps else [num_tokens]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
        pieces.append((num_tokens - 1) // len(gaps))
    pieces[-1] += num_tokens - sum(pieces)
    return StreamedText(started, arrivals, pieces, [], digest)


def of(texts: list[StreamedText], drafts: int = 0, accepted: int = 0) -> LoadMeasurement:
    seconds = max(text.ended_s for text in texts)
    counts = DraftCounts([], drafts, 3 * drafts, [accepted, 0, 0])
    return LoadMeasurement(texts, seconds, counts, seconds / 4, 30, 0, 1)


def test_figures_of_two_repeats() -> None:
    first = [streamed(0, 0.1, 0.2, 0.3), streamed(0.6, 0.3, 0.1), streamed(1.0, 0.2, 0.2)]
    slower = [streamed(1.2, 0.3, 0.2, 0.3), streamed(0.6, 0.5, 0.1), streamed(0, 0.4, 0.2)]
    base = [streamed(n, 0.5, 0.5, num_tokens=5, digest="aab"[n]) for n in range(3)]
    passes = {WITH: [of(first, 10, 5), of(slower, 20, 10)], WITHOUT: [of(base), of(base)]}
    found = summarise_load(passes, PROMPTS, ServeRun(), 1)
    assert found["baseline"] == WITHOUT
    ours, theirs = found["methods"][WITH], found["methods"][WITHOUT]
    assert ours["tokens_per_s"] == pytest.approx((30 / 1.4 + 30 / 2.0) / 2)
    assert theirs["tokens_per_s"] == 15 / 3.0
    # Of nine tokens after the first: 0.5, 0.1 and 0.2 s, then 0.5, 0.1 and 0.2 s again.
    assert ours["tokens_per_s_per_user"] == pytest.approx(27 / 0.8)
    assert theirs["tokens_per_s_per_user"] == pytest.approx(4 / 0.5)
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
    # By the middle of 1.4 s: the first text and the first token of the second come in 0.7 s.
    window = ours["window"]
    assert window["seconds"] == [pytest.approx(1.4), pytest.approx(2.0)]
    assert window["halves"] == [pytest.approx(2 * 20 / 3.4), pytest.approx(2 * 40 / 3.4)]
    assert window["in_flight"] == [pytest.approx(1), pytest.approx(1)]
    assert (window["num_texts"], window["num_other_texts"]) == ([3, 3], [1, 1])
    assert (window["num_cut"], window["busy"]) == ([0, 0], [0.25, 0.25])
    assert (window["num_generated"], window["num_cached"]) == ([30, 30], [0, 0])
    assert (window["num_asked"], window["num_prompt_tokens"], window["most_running"]) == (3, 3, 1)
    assert theirs["window"]["num_other_texts"] is None


def test_a_window_has_all_requests_in_flight() -> None:
    """Two in flight: one text from 0 s to 3 s; others from 1 to 3, 3 to 5, 3 to 7 s."""
    spans = [(0.0, 3.0), (1.0, 3.0), (3.0, 5.0), (3.0, 7.0)]
    texts = [streamed(begin, 0.5, end - begin - 0.5, num_tokens=9) for begin, end in spans]
    assert find_window(texts, 2) == (1.0, 5.0)
    prompts = PROMPTS[1:]  # asked twice
    found = summarise_load({WITH: [of(texts, 4, 2)]}, prompts, ServeRun(), 2)["methods"][WITH]
    # 8 tokens of the first text, 9 of the next two, the first of the last.
    assert found["window"]["num_tokens"] == [8 + 9 + 9 + 1]
    assert found["tokens_per_s"] == 27 / 4
    assert found["window"]["in_flight"] == [2.0]
    assert (found["window"]["num_texts"], found["window"]["num_asked"]) == ([3], 4)
    assert found["window"]["num_prompt_tokens"] == 4
    # Of the two texts within: 8 tokens in 1.5 s.
    assert found["tokens_per_s_per_user"] == pytest.approx(8 / 1.5)
    assert found["first_token_ms"]["p50"] == pytest.approx(500)


def test_a_speedup_is_of_the_windows() -> None:
    """The last text of our server, when the others have ended, takes ten times as long."""
    base = [streamed(started, 0.5, 0.5) for started in (0, 0, 1)]
    ours = [streamed(0, 0.25, 0.25), streamed(0, 0.5, 0.5), streamed(0.5, 0.5, 9.5)]
    found = summarise_load({WITH: [of(ours)], WITHOUT: [of(base)]}, PROMPTS, ServeRun(), 2)
    # Windows of 1 s: 2 s of requests each, 10 + 10 + 10 / 20 tokens here, 20 there.
    assert found["methods"][WITH]["speedup"] == pytest.approx(20.5 / 20)


def test_a_pass_that_never_has_all_requests_in_flight_is_its_own_window() -> None:
    texts = [streamed(n, 0.5) for n in range(3)]
    assert find_window(texts, 2) == (0, 2.5)


def test_a_server_alone_has_no_speedup() -> None:
    texts = [streamed(0, 0.1, 0.2) for _ in PROMPTS]
    found = summarise_load({WITH: [of(texts, 4, 2)]}, PROMPTS, ServeRun(), 3)
    assert (found["baseline"], found["methods"][WITH]["speedup"]) == (None, None)
    # A text that came in one piece has no waits between tokens, and its user waits for all of it.
    alone = summarise_load({WITH: [of([streamed(0, 0.1)] * 3)]}, PROMPTS, ServeRun(), 3)
    assert alone["methods"][WITH]["between_tokens_ms"] is None
    assert alone["methods"][WITH]["tokens_per_s_per_user"] == pytest.approx(100)


def test_drawn_texts_are_not_compared() -> None:
    passes = {name: [of([streamed(0, 0.1)] * 3)] for name in (WITH, WITHOUT)}
    rows = summarise_load(passes, PROMPTS, ServeRun(temperature=0.7), 3)["methods"]
    assert rows[WITH]["window"]["num_other_texts"] is None
