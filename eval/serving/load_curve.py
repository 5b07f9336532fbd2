"""Curve of a server's throughput against the speed of each user, and the load that ends drafting.

Model: `throughput_interactivity.py` of speculators 0.9, which draws InferenceX's chart and names
eight ways in which such a chart has been wrong. Here a window is the timed passes of one load on
one server (`eval.serving.server_load`). A window that fails a check is not valid: neither the
verdict nor the schedule reads it. A check that the servers tell nothing about is open.

Source of the schedule's form: vLLM 0.33 `v1/spec_decode/dynamic/utils.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.command.jsonl_store import JsonlStore
from conf.settings.measure import ServeRun
from data.servers.serving_engines import ServingEngine
from eval.compare.speedup_stats import format_wait
from eval.measure.acceptance_stats import FEWEST_DIALOGUES, format_interval
from eval.measure.measurement import print_notes
from eval.measure.prompts import Prompt
from eval.serving.server_load import WITH, measure_passes, summarise_load

LEAST_SECONDS = 5.0
"""Seconds of all passes of a window at least; shorter ones are noise."""
LEAST_ROUNDS = 2
"""Texts that end in each pass of a window at least, for each request in flight."""
MOST_DRIFT = 0.2
"""Share by which the tokens/s of the second halves may differ from those of the first."""
MOST_IDLE = 0.1
"""Share of the requests in flight, or running, that may be missing: one ends, the next follows."""
SLACK = 0.05
"""Share by which a figure may be off. speculators calls repeats that differ by more noise."""
MOST_OTHER_TOKENS = 0.01
"""Share by which the engine's count of generated tokens may differ from those received."""
MOST_OTHER_TEXTS = 0.5
"""Share of texts that may differ with drafts and without. In half precision the sums of a pass
depend on the batch, so texts part where two tokens are nearly equal; another model changes most."""
MOST_BUSY = 0.8
"""Share of a processor that the client may use; a busier one reads late what has long come."""
Check = tuple[bool | None, str]
"""Whether a window passes, None if nothing tells; and what was found, as the end of a sentence."""


def measure_curve(
    servers: Mapping[str, ServingEngine],
    prompts: Sequence[Prompt],
    config: ServeRun,
    journal: JsonlStore,
) -> dict[str, Any]:
    """Measure every load on every server, and check all windows.

    Ends at the first load that a server does not run at a time, as all larger ones wait too.

    Args:
        servers: servers by name.
        prompts: prompts of all turns.
        config: settings of the command.
        journal: store of finished passes.

    Returns:
        For each load the figures of both servers, with `checks` and `valid`.
    """
    loads: dict[str, Any] = {}
    sizes = sorted(set(config.concurrency))
    for place, size in enumerate(sizes):
        passes = measure_passes(servers, prompts, config, size, journal)
        load = loads[str(size)] = summarise_load(passes, prompts, config, size)
        waiting = [
            row["window"]["most_running"]
            for row in load["methods"].values()
            if _check_queue(row, size)[0] is False
        ]
        if waiting and sizes[place + 1 :]:
            print_notes(
                f"concurrency={sizes[place + 1 :]}: left out, as a server runs at most "
                f"{min(waiting)} requests at a time"
            )
            break
    check_windows(loads)
    return loads


def check_windows(loads: dict[str, Any]) -> None:
    """Add `checks` and `valid` to the figures of each load on each server."""
    rates = [_compute_draft_rate(load["methods"][WITH]) for load in loads.values()]
    for size, load in loads.items():
        baseline = load["methods"].get(load["baseline"])
        for name, row in load["methods"].items():
            checks = {key: check(row, int(size)) for key, check in CHECKS.items()}
            if name == WITH:
                found = _check_drafting(row, max(rates)), _check_texts(row)
                checks |= zip(PAIR_CHECKS, (*found, _check_lengths(row, baseline)), strict=True)
            row["checks"] = {
                key: {"passed": passed, "found": found} for key, (passed, found) in checks.items()
            }
            row["valid"] = all(passed is not False for passed, _ in checks.values())


def _check_steadiness(row: Mapping[str, Any], size: int) -> Check:
    window = row["window"]
    first, second = window["halves"]
    least = min(window["in_flight"])
    passed = least >= (1 - MOST_IDLE) * size and abs(second - first) <= MOST_DRIFT * first
    return passed, (
        f"{least:.1f} requests of {size} in flight; {first:.1f} tokens/s in first halves, "
        f"{second:.1f} in second ones"
    )


def _check_length(row: Mapping[str, Any], size: int) -> Check:
    seconds, fewest = sum(row["window"]["seconds"]), min(row["window"]["num_texts"])
    passed = seconds >= LEAST_SECONDS and fewest >= LEAST_ROUNDS * size
    return passed, (
        f"{seconds:.1f} s in all, {fewest} texts end in the shortest pass; at least "
        f"{LEAST_SECONDS:g} s and {LEAST_ROUNDS * size} texts are needed"
    )


def _check_endings(row: Mapping[str, Any], _size: int) -> Check:
    num_cut = sum(row["window"]["num_cut"])
    return not num_cut, f"the server cut {num_cut} texts off"


def _check_cache(row: Mapping[str, Any], _size: int) -> Check:
    cached, asked = row["window"]["num_cached"], row["window"]["num_prompt_tokens"]
    if None in cached:
        return None, "the server tells nothing of its prefix cache"
    share = max(cached) / asked
    return share <= SLACK, f"{share:.0%} of the prompt tokens came from the prefix cache"


def _check_queue(row: Mapping[str, Any], size: int) -> Check:
    running = row["window"]["most_running"]
    if running is None:
        return None, "the server does not tell how many requests it runs"
    return running >= (1 - MOST_IDLE) * size, f"the server runs {running} requests at a time"


def _check_others(row: Mapping[str, Any], _size: int) -> Check:
    generated, received = row["window"]["num_generated"], row["num_tokens"]
    if None in generated:
        return None, "the server does not count generated tokens"
    others = max((abs(a - b) / b, a - b) for a, b in zip(generated, received, strict=True))
    return others[0] <= MOST_OTHER_TOKENS, f"the server counts {others[1]:+} tokens of others"


def _check_client(row: Mapping[str, Any], _size: int) -> Check:
    busy = max(row["window"]["busy"])
    return busy <= MOST_BUSY, f"this client is busy for {busy:.0%} of the time"


CHECKS: dict[str, Callable[[Mapping[str, Any], int], Check]] = {
    "steady": _check_steadiness,
    "long_enough": _check_length,
    "whole_texts": _check_endings,
    "no_prefix_cache": _check_cache,
    "no_queue": _check_queue,
    "nobody_else": _check_others,
    "fast_client": _check_client,
}
"""Checks of each window."""
PAIR_CHECKS = ("drafting", "same_texts", "same_lengths")
"""Further checks of the server with drafts, against its other loads and the server without."""


def _compute_draft_rate(row: Mapping[str, Any]) -> float:
    """Compute drafts per token of the pass with the fewest."""
    return min(a / b for a, b in zip(row["num_drafts"], row["num_tokens"], strict=True))


def _check_drafting(row: Mapping[str, Any], most: float) -> Check:
    """Check that the head drafts, and not much less often than under another load.

    A server with a schedule of its own stops to draft at some load.
    """
    rate = _compute_draft_rate(row)
    return rate > most / 2, f"{rate:.2f} drafts per token, {most:.2f} under another load"


def _check_texts(row: Mapping[str, Any]) -> Check:
    others = row["window"]["num_other_texts"]
    if others is None:
        return None, "no greedy texts without drafts to compare with"
    num_texts = row["window"]["num_asked"]
    share = max(others) / num_texts
    return share <= MOST_OTHER_TEXTS, f"{max(others)} of {num_texts} texts differ without drafts"


def _check_lengths(row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> Check:
    if baseline is None:
        return None, "no texts without drafts to compare with"
    ours, theirs = sum(row["num_tokens"]), sum(baseline["num_tokens"])
    return abs(ours - theirs) <= SLACK * theirs, f"{ours} tokens, {theirs} without drafts"


def build_schedule(loads: Mapping[str, Any], depth: int, num_dialogues: int) -> dict[str, Any]:
    """Find the load from which on the head should be off, and build vLLM's schedule.

    A load gains if the interval of its speed-up lies above 1, and loses if it lies below. The head
    is on up to the largest load that gains, whatever lies between, and off above, if one of the
    loads above loses. Behind the last gain a load that is undecided gives drafts nothing to win.

    Args:
        loads: content of `concurrency`, with checks.
        depth: draft tokens of the server.
        num_dialogues: dialogues of the prompts.

    Returns:
        `schedule`, [[first batch size, last batch size, draft tokens], ...] from 1 to the largest
        valid load, or None; `off_from`, the first batch size without drafts, or None; and
        `schedule_basis`, the sentence that says why.
    """

    def describe(sentence: str, schedule: Any = None, off_from: int | None = None) -> dict:
        return {"schedule": schedule, "off_from": off_from, "schedule_basis": sentence}

    if not loads or any(load["baseline"] is None for load in loads.values()):
        return describe("No schedule: no load was timed beside a server without drafts.")
    if num_dialogues < FEWEST_DIALOGUES:
        return describe(
            f"No schedule: {num_dialogues} dialogues are too few, {FEWEST_DIALOGUES} are needed."
        )
    bounds = {
        int(size): load["methods"][WITH]["speedup_ci95"]
        for size, load in loads.items()
        if all(row["valid"] for row in load["methods"].values())
    }
    if not bounds:
        return describe("No schedule: no load has valid windows on both servers.")
    largest = max(bounds)
    last_gain = max((size for size, (low, _) in bounds.items() if low > 1), default=0)
    losing = [size for size, (_, high) in bounds.items() if high < 1 and size > last_gain]
    drafting = [[1, last_gain, depth]] if last_gain else []
    if losing:
        off_from = last_gain + 1
        gains = f"gains up to {last_gain} in flight" if last_gain else "gains at no load"
        return describe(
            f"The head {gains} and loses from {min(losing)} on: it should be off from batches of "
            f"{off_from} on.",
            [*drafting, [off_from, largest, 0]],
            off_from,
        )
    if not drafting:
        return describe("No schedule: the head neither gains nor loses at any load, for certain.")
    return describe(
        f"The head gains up to {last_gain} in flight and loses at no load up to {largest}: it may "
        "stay on.",
        [[1, largest, depth]],
    )


def print_curve(result: Mapping[str, Any], console: Console) -> None:
    """Print the table of all loads, the windows that are not valid, and the off-switch."""
    loads = result["concurrency"]
    console.print(_build_load_table(loads))
    opened = set[str]()
    for size, load in loads.items():
        for name, row in load["methods"].items():
            for key, check in row["checks"].items():
                if check["passed"] is False:
                    words = f"* {size} in flight, {name}: not valid ({key}): {check['found']}"
                    console.print(words, highlight=False, markup=False)
                elif check["passed"] is None:
                    opened.add(f"{key} ({check['found']})")
    if opened:
        console.print(f"not checked: {'; '.join(sorted(opened))}", highlight=False, markup=False)
    console.print(result["schedule_basis"], highlight=False, markup=False)
    if result["schedule"] is not None:
        words = f"num_speculative_tokens_per_batch_size: {result['schedule']}"
        console.print(words, highlight=False, markup=False)


def _build_load_table(loads: Mapping[str, Any]) -> Table:
    table = Table(
        title="In flight; tokens/s of server and user; ms to the first token, p50 and p99"
    )
    columns = ("load", "server", "tokens/s", "per user", "speed-up, 95%", "first")
    for column in columns:
        table.add_column(column, justify="left" if column == "server" else "right", no_wrap=True)
    for size, load in loads.items():
        for name, row in load["methods"].items():
            speedup, bounds, user = (
                row[key] for key in ("speedup", "speedup_ci95", "tokens_per_s_per_user")
            )
            gain = "-" if speedup is None else f"{speedup:.2f}"
            table.add_row(
                size if row["valid"] else f"{size}*",
                name,
                f"{row['tokens_per_s']:.1f}",
                f"{user:.1f}",
                gain if bounds is None else f"{gain} {format_interval(bounds)}",
                format_wait(row["first_token_ms"]),
            )
        table.add_section()
    return table
