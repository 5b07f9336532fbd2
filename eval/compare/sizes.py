"""Batch sizes beside each other: throughput, latency, and where drafting stops paying."""

import statistics
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.compare.figures import baseline_of, ratio, speedup_interval, tokens_per_s
from eval.compare.timing import PromptRun

WAITS = ("first_token_ms", "between_tokens_ms")


def at_size(methods: Iterable[str], runs: list[PromptRun], seed: int) -> dict[str, Any]:
    """Throughput and latency of texts of a batch size, by method.

    The time to the first token is from where a text gets its place to its first token; the time
    between tokens from what a step gave to what the next one did, as a reader of a stream sees it,
    of all texts together. In ms, the median of repeats; None where nobody waited.

    Args:
        methods: their names.
        runs: of all prompts.
        seed: of the intervals.
    """
    baseline, rows = baseline_of(methods, runs), {}
    for name in methods:
        repeats = list(zip(*(run.texts[name] for run in runs), strict=True))
        rows[name] = {
            "tokens_per_s": tokens_per_s(name, runs, "total"),
            "speedup": ratio(name, baseline, runs, "total"),
            "speedup_ci95": speedup_interval(name, baseline, runs, seed),
            "first_token_ms": _percentiles(
                [[s for text in texts for s in text.arrivals[:1]] for texts in repeats]
            ),
            "between_tokens_ms": _percentiles(
                [
                    [after - s for text in texts for s, after in pairwise(text.arrivals)]
                    for texts in repeats
                ]
            ),
        }
    return {"baseline": baseline, "methods": rows}


def stops_paying(sizes: dict[str, Any], method: str) -> int | None:
    """The batch size from which on a method is no faster than the baseline; None if it stays so.

    Args:
        sizes: the contents of `concurrency` in `speedup.json`.
        method: its name.
    """
    stop = None
    for size in sorted(map(int, sizes), reverse=True):
        if sizes[str(size)]["methods"][method]["speedup"] > 1:
            break
        stop = size
    return stop


def show_sizes(result: dict[str, Any], console: Console) -> None:
    """Prints a row per method and batch size."""
    table = Table(title="Texts at a time; waits in ms, p50 and p99")
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


def _percentiles(repeats: list[list[float]]) -> dict[str, float] | None:
    """Medians over repeats, in ms of waits in s."""
    if not all(repeats):
        return None
    ordered = [sorted(1000 * seconds for seconds in waits) for waits in repeats]
    return {
        label: statistics.median(waits[int(share * (len(waits) - 1))] for waits in ordered)
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }
