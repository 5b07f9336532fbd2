"""Servers under load: throughput, waits and drafts by requests in flight."""

import random
import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
IDS_PER_SIZE = 1 << 20
"""Ids of passes that the journal reserves for each number of requests in flight."""
PassesByServer = dict[str, list[LoadMeasurement]]
"""Passes of each server, one per repeat; their texts are in the order of the prompts."""


def measure_passes(
    servers: Mapping[str, ServingEngine],
    prompts: Sequence[Prompt],
    config: ServeRun,
    size: int,
    journal: JsonlStore,
) -> PassesByServer:
    """Time all prompts on every server, after warm-ups.

    Each repeat draws the order of prompts and of servers. Within a pass, the prompts of a dialogue
    share the server's cache of prompt beginnings. No pass profits from an earlier one.

    Args:
        servers: servers by name.
        prompts: prompts of all turns.
        config: settings of the command.
        size: number of requests in flight.
        journal: store of finished passes, which a second start does not repeat.
    """
    finished = {row["id"]: _parse_pass(row["pass"]) for row in journal.load_rows() if "pass" in row}
    passes: PassesByServer = {name: [] for name in servers}
    warm = False
    for repeat in range(config.num_repeats):
        rng = random.Random(f"{config.seed} {size} {repeat}")
        order = rng.sample(range(len(prompts)), len(prompts))
        names = rng.sample(sorted(servers), len(servers))
        for name in names:
            number = size * IDS_PER_SIZE + 2 * repeat + (name == WITHOUT)
            if number not in finished:
                for other in [] if warm else names * config.num_warmups:
                    _measure_pass(servers[other], prompts, order[:size], config, size)
                warm, words = (
                    True,
                    f"{name}, {size} in flight, {repeat + 1} of {config.num_repeats}",
                )
                done = _measure_pass(servers[name], prompts, order, config, size, words)
                journal.append([{"id": number, "pass": asdict(done)}])
                finished[number] = done
            passes[name].append(finished[number])
    return passes


def _measure_pass(
    server: ServingEngine,
    prompts: Sequence[Prompt],
    order: Sequence[int],
    config: ServeRun,
    size: int,
    words: str | None = None,
) -> LoadMeasurement:
    """Run one pass over all prompts; the texts come in the order of the prompts."""
    nonce, jobs = secrets.token_hex(8), []
    for prompt in (prompts[number] for number in order):
        fields: dict[str, float | int] = {"temperature": config.temperature}
        if config.temperature:
            fields |= {"top_p": config.top_p, "seed": compute_prompt_seed(prompt, config.seed)}
            fields |= {} if config.top_k is None else {"top_k": config.top_k}
            fields |= {"min_p": config.min_p} if config.min_p else {}
        salt = f"{nonce}-{prompt.dialogue}"
        jobs.append((prompt.token_ids, TextRequest(config.max_new_tokens, fields, salt=salt)))
    with tqdm(total=len(jobs), desc=words, unit="text", disable=words is None) as bar:
        done = server.stream_texts(jobs, size, bar.update)
    by_prompt = dict(zip(order, done.texts, strict=True))
    return LoadMeasurement(
        [by_prompt[number] for number in sorted(by_prompt)], done.seconds, done.counts
    )


def summarise_load(passes: PassesByServer, prompts: Sequence[Prompt], seed: int) -> dict[str, Any]:
    """Compute throughput, waits and drafts of every server.

    Speed-up: seconds per token of all requests without drafts, divided by seconds per token of all
    requests with drafts; medians over repeats.

    Args:
        passes: the repeats of each server.
        prompts: the prompts of the texts.
        seed: seed of the intervals.
    """
    rows = {}
    for name, repeats in passes.items():
        speedup, bounds = (1.0 if name == WITHOUT else None), None
        if WITHOUT in passes and name != WITHOUT:
            costs = _list_costs(repeats), _list_costs(passes[WITHOUT])
            speedup, bounds = bootstrap_speedup([p.dialogue for p in prompts], *costs, seed)
        drafts = sum(each.counts.drafts for each in repeats)
        accepted = [sum(each.counts.accepted) for each in repeats]
        arrivals = [[text.arrivals_s for text in each.texts] for each in repeats]
        rows[name] = {
            "tokens_per_s": statistics.median(
                _count_tokens(each) / each.seconds for each in repeats
            ),
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
        }
    return {"baseline": WITHOUT if WITHOUT in passes else None, "methods": rows}


def _count_tokens(each: LoadMeasurement) -> int:
    return sum(text.num_tokens for text in each.texts)


def _list_costs(repeats: Sequence[LoadMeasurement]) -> list[list[tuple[float, float]]]:
    """List seconds and tokens of each text, a pair for each repeat."""
    texts = zip(*(each.texts for each in repeats), strict=True)
    return [[(each.arrivals_s[-1], each.num_tokens) for each in text] for text in texts]


def _parse_pass(row: dict[str, Any]) -> LoadMeasurement:
    """Read a pass from the result of `asdict`."""
    texts = [StreamedText(**text) for text in row["texts"]]
    return LoadMeasurement(texts, row["seconds"], DraftCounts(**row["counts"]))
