"""Servers under load: throughput, waits and drafts by requests in flight.

A closed loop keeps a number of requests in flight: each that ends is followed by the next. What is
reported of a load on a server is its window: of each pass the time in which all of them are in
flight, from the last start of the first requests to the first end after which no other follows.
"""

import math
import random
import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from conf.command.jsonl_store import JsonlStore
from conf.settings.measure import ServeRun
from data.servers.serving_engines import (
    DraftCounts,
    LoadMeasurement,
    ServingEngine,
    StreamedText,
    TextRequest,
)
from eval.measure.acceptance_stats import (
    bootstrap_speedup,
    compute_percentiles_ms,
    compute_waits_ms,
)
from eval.measure.measurement import compute_prompt_seed
from eval.measure.prompts import Prompt

WITH, WITHOUT = "with drafts", "without"
ROUNDS = 4
"""Texts of a pass for each request in flight at least; prompts are asked several times for them."""
IDS_PER_SIZE = 1 << 20
"""Ids of passes that the journal reserves for each number of requests in flight."""
PassesByServer = dict[str, list[LoadMeasurement]]
"""Passes of each server, one per repeat; their texts are in the order of the prompts, the first
texts of all prompts before the second ones."""


def measure_passes(
    servers: Mapping[str, ServingEngine],
    prompts: Sequence[Prompt],
    config: ServeRun,
    size: int,
    journal: JsonlStore,
) -> PassesByServer:
    """Time all prompts on every server, after warm-ups.

    Each repeat draws the order of prompts and of servers. A load with fewer than `ROUNDS` prompts
    for each request in flight asks all prompts as often as needed. No request profits from an
    earlier one: each has a cache of its own.

    Args:
        servers: servers by name.
        prompts: prompts of all turns.
        config: settings of the command.
        size: number of requests in flight.
        journal: store of finished passes, which a second start does not repeat.
    """
    num_texts = len(prompts) * math.ceil(ROUNDS * size / len(prompts))
    finished = {row["id"]: _parse_pass(row["pass"]) for row in journal.load_rows() if "pass" in row}
    passes: PassesByServer = {name: [] for name in servers}
    length: float | None = None
    """Tokens of a text in the last warm-up; None before one."""
    for repeat in range(config.num_repeats):
        rng = random.Random(f"{config.seed} {size} {repeat}")
        order = rng.sample(range(num_texts), num_texts)
        names = rng.sample(sorted(servers), len(servers))
        for name in names:
            number = size * IDS_PER_SIZE + 2 * repeat + (name == WITHOUT)
            if number not in finished:
                if length is None:
                    length = config.max_new_tokens
                    for other in names * config.num_warmups:
                        jobs = _build_jobs(prompts, order[:size], config)
                        length = _count_tokens(servers[other].stream_texts(jobs, size)) / size
                words = f"{name}, {size} in flight, {repeat + 1} of {config.num_repeats}"
                jobs = _build_jobs(prompts, order, config)
                with tqdm(total=num_texts, desc=words, unit="text") as bar:
                    done = servers[name].stream_texts(jobs, size, bar.update, length / size)
                by_number = dict(zip(order, done.texts, strict=True))
                done = replace(done, texts=[by_number[place] for place in range(num_texts)])
                journal.append([{"id": number, "pass": asdict(done)}])
                finished[number] = done
            passes[name].append(finished[number])
    return passes


def _build_jobs(
    prompts: Sequence[Prompt], order: Sequence[int], config: ServeRun
) -> list[tuple[list[int], TextRequest]]:
    """Build the requests of texts by their numbers, which count on over the prompts."""
    nonce, jobs = secrets.token_hex(8), []
    for number in order:
        prompt = prompts[number % len(prompts)]
        fields: dict[str, float | int] = {"temperature": config.temperature}
        if config.temperature:
            fields |= {"top_p": config.top_p, "seed": compute_prompt_seed(prompt, config.seed)}
            fields |= {} if config.top_k is None else {"top_k": config.top_k}
            fields |= {"min_p": config.min_p} if config.min_p else {}
        salt = f"{nonce}-{number}"
        jobs.append((prompt.token_ids, TextRequest(config.max_new_tokens, fields, salt=salt)))
    return jobs


def summarise_load(
    passes: PassesByServer, prompts: Sequence[Prompt], config: ServeRun, size: int
) -> dict[str, Any]:
    """Compute throughput, waits and drafts of every server, and what tells whether they hold.

    Speed-up: seconds per token of all requests without drafts, divided by seconds per token of all
    requests with drafts; medians over repeats. A text counts by its part within the window.
    Tokens/s per user: one token divided by the mean over texts of seconds per token, after the
    first piece. Throughput, waits and this speed are those of the windows, counts those of passes.

    Args:
        passes: the repeats of each server.
        prompts: the prompts of the texts.
        config: settings of the command.
        size: number of requests in flight.
    """
    rows = {}
    for name, repeats in passes.items():
        speedup, bounds = (1.0 if name == WITHOUT else None), None
        if WITHOUT in passes and name != WITHOUT:
            costs = _list_costs(repeats, size), _list_costs(passes[WITHOUT], size)
            dialogues = [p.dialogue for p in prompts] * (len(costs[0]) // len(prompts))
            speedup, bounds = bootstrap_speedup(dialogues, *costs, config.seed)
        drafts = sum(each.counts.drafts for each in repeats)
        accepted = [sum(each.counts.accepted) for each in repeats]
        windows = [find_window(each.texts, size) for each in repeats]
        within = [
            _select_texts(each.texts, *window)
            for each, window in zip(repeats, windows, strict=True)
        ]
        arrivals = [[text.arrivals_s for text in texts] for texts in within]
        figures = _describe_windows(repeats, windows, prompts)
        if name != WITHOUT and WITHOUT in passes and not config.temperature:
            figures["num_other_texts"] = [
                sum(a.digest != b.digest for a, b in zip(ours.texts, theirs.texts, strict=True))
                for ours, theirs in zip(repeats, passes[WITHOUT], strict=True)
            ]
        rows[name] = {
            "tokens_per_s": statistics.median(
                tokens / seconds
                for tokens, seconds in zip(figures["num_tokens"], figures["seconds"], strict=True)
            ),
            "tokens_per_s_per_user": compute_user_speed(within),
            "speedup": speedup,
            "speedup_ci95": bounds,
            **compute_waits_ms(arrivals),
            "request_ms": compute_percentiles_ms(
                [[text[-1] for text in texts] for texts in arrivals]
            ),
            "num_tokens": [_count_tokens(each) for each in repeats],
            "per_draft": None if not drafts else 1 + sum(accepted) / drafts,
            "num_drafts": [each.counts.drafts for each in repeats],
            "num_accepted": accepted,
            "window": figures,
        }
    return {"baseline": WITHOUT if WITHOUT in passes else None, "methods": rows}


def _count_tokens(each: LoadMeasurement) -> int:
    return sum(text.num_tokens for text in each.texts)


def find_window(texts: Sequence[StreamedText], size: int) -> tuple[float, float]:
    """Find the time of a pass in which `size` requests are in flight, in seconds from its start.

    A pass that never has so many is its own window.
    """
    changes = sorted(
        change for text in texts for change in ((text.started_s, 1), (text.ended_s, -1))
    )
    num_in_flight, begin, end = 0, None, changes[-1][0]
    for at_s, change in changes:  # at one time ends come before starts
        if num_in_flight == size and begin is not None:
            end = at_s
        num_in_flight += change
        if num_in_flight == size and begin is None:
            begin = at_s
    return (changes[0][0] if begin is None else begin), end


def _select_texts(texts: Sequence[StreamedText], begin: float, end: float) -> list[StreamedText]:
    """Select the texts within a window; all of them if none begins and ends there."""
    within = [text for text in texts if begin <= text.started_s and text.ended_s <= end]
    return within or list(texts)


def compute_user_speed(repeats: Sequence[Sequence[StreamedText]]) -> float:
    """Compute tokens/s per user, the median over repeats.

    Of each text the seconds per token after the first piece; of a text in one piece all seconds.
    Source: InferenceX's interactivity, 1 / mean TPOT (speculators 0.9,
    `docs/user_guide/tutorials/throughput_interactivity.md`), whose first piece is one token.
    """

    def measure_token(text: StreamedText) -> float:
        first, *others = text.pieces
        if not others:
            return text.arrivals_s[-1] / first
        return (text.arrivals_s[-1] - text.arrivals_s[0]) / sum(others)

    means = [statistics.fmean(map(measure_token, texts)) for texts in repeats]
    return statistics.median(1 / max(mean, 1e-9) for mean in means)


def _describe_windows(
    repeats: Sequence[LoadMeasurement],
    windows: Sequence[tuple[float, float]],
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    """Count what the checks of a window need; each list has an entry for each pass.

    `halves` are the tokens/s of the first and of the second halves of all windows.
    """
    halves: list[list[float]] = [[], []]
    figures: dict[str, list[Any]] = {key: [] for key in ("num_tokens", "num_texts", "in_flight")}
    for each, (begin, end) in zip(repeats, windows, strict=True):
        arrivals = [
            (text.started_s + at, size)
            for text in each.texts
            for at, size in zip(text.arrivals_s, text.pieces, strict=True)
            if begin < text.started_s + at <= end
        ]
        middle = (begin + end) / 2
        halves[0].append(sum(size for at, size in arrivals if at <= middle))
        halves[1].append(sum(size for at, size in arrivals if at > middle))
        figures["num_tokens"].append(sum(size for _, size in arrivals))
        figures["num_texts"].append(sum(begin < text.ended_s <= end for text in each.texts))
        overlaps = (_measure_overlap(text, begin, end) for text in each.texts)
        figures["in_flight"].append(sum(overlaps) / (end - begin))
    seconds = [end - begin for begin, end in windows]
    num_copies = len(repeats[0].texts) // len(prompts)
    return {
        "seconds": seconds,
        **figures,
        "halves": [2 * sum(half) / sum(seconds) for half in halves],
        "busy": [each.processor_s / each.seconds for each in repeats],
        "num_cut": [sum(not text.is_whole for text in each.texts) for each in repeats],
        "num_generated": [each.num_generated for each in repeats],
        "num_cached": [each.num_cached for each in repeats],
        "num_asked": len(repeats[0].texts),
        "num_prompt_tokens": num_copies * sum(len(prompt.token_ids) for prompt in prompts),
        "most_running": max(
            (each.most_running for each in repeats if each.most_running is not None), default=None
        ),
        "num_other_texts": None,
    }


def _measure_overlap(text: StreamedText, begin: float, end: float) -> float:
    """Measure the seconds of a request within a window."""
    return max(0.0, min(text.ended_s, end) - max(text.started_s, begin))


def _list_costs(repeats: Sequence[LoadMeasurement], size: int) -> list[list[tuple[float, float]]]:
    """List seconds and tokens of each text within the window, a pair for each repeat."""
    rows = []
    for each in repeats:
        begin, end = find_window(each.texts, size)
        row = []
        for text in each.texts:
            # Never 0, as texts that were never in a window may be drawn alone.
            seconds = max(_measure_overlap(text, begin, end), 1e-9)
            row.append((seconds, seconds / text.arrivals_s[-1] * text.num_tokens))
        rows.append(row)
    return [list(pairs) for pairs in zip(*rows, strict=True)]


def _parse_pass(row: dict[str, Any]) -> LoadMeasurement:
    """Read a pass from the result of `asdict`."""
    texts = [StreamedText(**text) for text in row["texts"]]
    return LoadMeasurement(**row | {"texts": texts, "counts": DraftCounts(**row["counts"])})
