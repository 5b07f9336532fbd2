"""Batch sizes beside each other: throughput, latency, and where drafting stops paying."""

import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.compare.figures import baseline_of, ratio, speedup_interval, tokens_per_s
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation

WAITS = ("first_token_ms", "between_tokens_ms")


def at_size(methods: Iterable[str], found: list[PromptRun], seed: int) -> dict[str, Any]:
    """What texts of a batch size got: throughput and latency by method.

    The time to the first token is from where a text gets its place to its first token; the time
    between tokens from what a step gave to what the next one did, as a reader of a stream sees it,
    of all texts together. In ms, the median of repeats; None where nobody waited.

    Args:
        methods: their names.
        found: of all prompts.
        seed: of the intervals.
    """
    baseline, rows = baseline_of(methods, found), {}
    for name in methods:
        first, between = (_percentiles(name, found, waits) for waits in (_first, _between))
        rows[name] = {
            "tokens_per_s": tokens_per_s(name, found, "total"),
            "speedup": ratio(name, baseline, found, "total"),
            "speedup_ci95": speedup_interval(name, baseline, found, seed),
            "first_token_ms": first,
            "between_tokens_ms": between,
        }
    return {"baseline": baseline, "methods": rows}


def stops_paying(sizes: dict[str, Any], method: str) -> int | None:
    """The batch size from which on a method is no faster than the baseline; None if it stays so.

    Args:
        sizes: the contents of `concurrency` in `speedup.json`.
        method: its name.
    """
    found = None
    for size in sorted(map(int, sizes), reverse=True):
        if sizes[str(size)]["methods"][method]["speedup"] > 1:
            break
        found = size
    return found


def show_sizes(result: dict[str, Any], console: Console) -> None:
    """Prints a row per method and batch size."""
    title = "Texts at a time; waits in ms, p50 and p99"
    table = Table(title=title)
    columns = ("texts", "method", "tokens/s", "speed-up", "first token", "between tokens")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for size, measured in result["concurrency"].items():
        for name, row in measured["methods"].items():
            table.add_row(
                size, name, f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}",
                *(_words(row[key]) for key in WAITS),
            )  # fmt: skip
        table.add_section()
    console.print(table)
    for name in result["methods"]:
        if name not in result["baselines"]:
            size = stops_paying(result["concurrency"], name)
            says = "pays at all of them" if size is None else f"no longer pays from {size} on"
            console.print(f"{name}: {says}", highlight=False)


def _words(wait: dict[str, float] | None) -> str:
    if wait is None:
        return "-"
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in wait.values())


def _first(text: Generation) -> list[float]:
    return text.arrivals[:1]


def _between(text: Generation) -> list[float]:
    return [after - before for before, after in pairwise(text.arrivals)]


def _percentiles(
    name: str, found: list[PromptRun], waits: Callable[[Generation], list[float]]
) -> dict[str, float] | None:
    of_repeats = [
        sorted(1000 * each for text in texts for each in waits(text))
        for texts in zip(*(run.runs[name] for run in found), strict=True)
    ]
    if not all(of_repeats):
        return None
    return {
        label: statistics.median(each[int(share * (len(each) - 1))] for each in of_repeats)
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }
