"""Batch sizes beside each other, by hand."""

from io import StringIO
from typing import Any

import pytest
from pytest import approx
from rich.console import Console

from conf.command.clock import DecodingTimes
from conf.errors import InputError
from conf.settings.measure import SpeedupRun
from eval.compare.speedup_stats import find_break_even_size, print_concurrency, summarise_batch_size
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation, Step
from eval.measure.prompts import Prompt
from eval.report.plots import plot_concurrency
from tests.eval.report.test_plots import drawn, lines  # noqa: F401


def text(seconds: float, *arrivals: float) -> Generation:
    steps = [Step(0, 1, 9)] * (len(arrivals) - 1)
    return Generation([1, 2, 3, 4], steps, [], DecodingTimes(total=seconds), [], list(arrivals))


def test_waits_are_of_all_texts_and_the_median_of_repeats() -> None:
    """Three repeats; in each 200 waits of 1 to 200 ms, and first tokens after 1 and 2 s or so."""
    walk = [0.0]
    for number in range(1, 101):
        walk.append(walk[-1] + number / 1000)
    later = [walk[-1]]
    for number in range(101, 201):
        later.append(later[-1] + number / 1000)
    found = []
    for number, path in enumerate([walk, later]):
        runs = [
            text(2.0, *(first + factor * (at - path[0]) for at in path))
            for first, factor in ((1.0 + number, 1), (9.0, 9), (0.5 + number, 0.5))
        ]
        silent = [text(4.0)] * 3
        found.append(PromptRun(Prompt("a", [5], number, 1), {"vanilla": silent, "tree": runs}))
    result = summarise_batch_size(["vanilla", "tree"], found, 0)
    assert result["baseline"] == "vanilla"
    row = result["methods"]["tree"]
    assert (row["tokens_per_s"], row["speedup"]) == (2.0, 2.0)
    assert row["first_token_ms"] == {"p50": approx(1000.0), "p99": approx(1000.0)}
    assert row["between_tokens_ms"] == {"p50": approx(100.0), "p99": approx(198.0)}
    plain = result["methods"]["vanilla"]
    assert (plain["first_token_ms"], plain["between_tokens_ms"]) == (None, None)


def sizes(**speedups: list[float]) -> dict[str, Any]:
    waits = {"p50": 12.25, "p99": 1234.5}
    return {
        str(size): {
            "methods": {
                name: {
                    "speedup": gains[place], "tokens_per_s": size * gains[place],
                    "speedup_ci95": None if name == "vanilla" else (0.4, 2.6),
                    "first_token_ms": waits, "between_tokens_ms": waits,
                }
                for name, gains in speedups.items()
            }
        }
        for place, size in enumerate((1, 4, 16))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [([2, 1.5, 1.1], None), ([2, 1.5, 1.0], 16), ([2, 0.9, 0.8], 4), ([0.9] * 3, 1),
     ([0.9, 0.8, 1.1], None), ([2, 0.9, 1.1], None)],
)  # fmt: skip
def test_where_drafting_stops_paying(speedups: list[float], expected: int | None) -> None:
    assert find_break_even_size(sizes(tree=speedups), "tree") == expected


def test_the_table_says_what_pays_and_what_does_not() -> None:
    out = StringIO()
    found = sizes(vanilla=[1, 1, 1], tree=[2, 1.5, 0.5], copy=[2, 2, 2])
    result = {"concurrency": found, "methods": found["1"]["methods"], "baselines": ["vanilla"]}
    print_concurrency(result, Console(file=out, width=80))
    shown = out.getvalue()
    assert "│    16 │ tree    │      8.0 │ 0.50 0.40-2.60 │ 12.2 1234 │ 12.2 1234 │\n" in shown
    assert "│    16 │ vanilla │     16.0 │           1.00 │ 12.2 1234 │ 12.2 1234 │\n" in shown
    assert shown.endswith("tree: no longer pays from 16 on\ncopy: pays at all of them\n")


def test_a_picture_of_sizes(drawn) -> None:  # noqa: F811
    speed, gain, waits = drawn(
        plot_concurrency, {"concurrency": sizes(vanilla=[1, 1, 1], tree=[2, 1.5, 0.5])}
    )
    assert lines(speed) == [[(1, 1), (4, 4), (16, 16)], [(1, 2), (4, 6), (16, 8)]]
    assert lines(gain)[1] == [(1, 2), (4, 1.5), (16, 0.5)]
    assert lines(waits)[0] == [(1, 12.25), (4, 12.25), (16, 12.25)]


def test_every_size_is_measured_once() -> None:
    assert SpeedupRun(batch_size=4, concurrency=[16, 1, 4]).batch_sizes == [1, 4, 16]
    assert SpeedupRun().batch_sizes == [1]
    with pytest.raises(InputError, match=r"concurrency=\[4, 0\]"):
        SpeedupRun(concurrency=[4, 0])
