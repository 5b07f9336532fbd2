"""Batch sizes side by side: throughput, latency, and where drafting stops paying."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.compare.figures import (
    compute_speedup,
    compute_speedup_interval,
    compute_tokens_per_s,
    select_baseline,
)
from eval.compare.timing import PromptRun
from eval.measure.stats import format_interval, percentiles_ms

WAITS = ("first_token_ms", "between_tokens_ms")


def summarise_batch_size(
    methods: Iterable[str], runs: list[PromptRun], seed: int
) -> dict[str, Any]:
    """Throughput and latency of texts of a batch size, by method.

    The time to the first token is from where a text gets its place to its first token; the time
    between tokens from what a step gave to what the next one did, as a reader of a stream sees it,
    of all texts together. In ms, the median of repeats; None where nobody waited.

    Args:
        methods: their names.
        runs: of all prompts.
        seed: of the intervals.
    """
    baseline, rows = select_baseline(methods, runs), {}
    for name in methods:
        repeats = list(zip(*(run.texts[name] for run in runs), strict=True))
        rows[name] = {
            "tokens_per_s": compute_tokens_per_s(name, runs, "total"),
            "speedup": compute_speedup(name, baseline, runs, "total"),
            "speedup_ci95": compute_speedup_interval(name, baseline, runs, seed),
            "first_token_ms": percentiles_ms(
                [[s for text in texts for s in text.arrivals[:1]] for texts in repeats]
            ),
            "between_tokens_ms": percentiles_ms(
                [
                    [after - s for text in texts for s, after in pairwise(text.arrivals)]
                    for texts in repeats
                ]
            ),
        }
    return {"baseline": baseline, "methods": rows}


def find_break_even_size(sizes: dict[str, Any], method: str) -> int | None:
    """Batch size from which a method is not faster than the baseline; None if it always is.

    Args:
        sizes: content of `concurrency` in `speedup.json`.
        method: name of the method.
    """
    stop = None
    for size in sorted(map(int, sizes), reverse=True):
        if sizes[str(size)]["methods"][method]["speedup"] > 1:
            break
        stop = size
    return stop


def build_concurrency_table(sizes: dict[str, Any]) -> Table:
    """A row per method and batch size of `concurrency` in a result."""
    table = Table(title="Texts at a time; ms to the first token and between tokens, p50 and p99")
    columns = ("texts", "method", "tokens/s", "speed-up, 95%", "first", "between")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for size, measured in sizes.items():
        for name, row in measured["methods"].items():
            gain, bounds = row["speedup"], row["speedup_ci95"]
            words = "-" if gain is None else f"{gain:.2f}"
            table.add_row(
                size, name, f"{row['tokens_per_s']:.1f}",
                words if bounds is None else f"{words} {format_interval(bounds)}",
                *(_format_wait(row[key]) for key in WAITS),
            )  # fmt: skip
        table.add_section()
    return table


def print_concurrency(result: dict[str, Any], console: Console) -> None:
    """Print the table, and the size from which each method no longer helps."""
    console.print(build_concurrency_table(result["concurrency"]))
    for name in result["methods"]:
        if name not in result["baselines"]:
            size = find_break_even_size(result["concurrency"], name)
            says = "pays at all of them" if size is None else f"no longer pays from {size} on"
            console.print(f"{name}: {says}", highlight=False)


def _format_wait(wait: dict[str, float] | None) -> str:
    if wait is None:
        return "-"
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in wait.values())
