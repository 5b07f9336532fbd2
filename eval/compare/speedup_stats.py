"""Figures of `speedup.json`: speed and acceptance of methods, and their texts side by side.

Batch sizes are compared as well: throughput, latency, and the size from which drafting no longer
pays.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conf.settings.measure import SpeedupRun
from eval.compare.methods import Method
from eval.compare.timing import STEP_PARTS, PromptRun
from eval.decode.engine import count_common_prefix
from eval.measure.acceptance_stats import (
    PromptSteps,
    bootstrap_speedup,
    compute_waits_ms,
    format_interval,
    format_length_bucket,
    group_by,
    summarise_acceptance,
)
from eval.measure.measurement import Measurement
from eval.measure.modes import compute_mode_figures, find_text_spans
from eval.measure.prompts import Prompt
from eval.preflight_checks import BASELINES, VANILLA
from heads.target_model.model import Target

PARTS = ("prefill", *STEP_PARTS, "host")
TIMES = ("prefill", *STEP_PARTS, "total")
SHARED = (
    "draft_tokens", "tau", "tau_ci95", "acceptance_length", "alpha", "per_position", "histogram",
    "num_steps", "num_drafted", "num_accepted",
)  # fmt: skip
"""Figures of `acceptance.json` that each method has too."""
WAITS = ("first_token_ms", "between_tokens_ms")


def summarise_speedup(
    measurement: Measurement, config: SpeedupRun, methods: dict[str, Method], runs: list[PromptRun]
) -> dict[str, Any]:
    """Compute the content of `speedup.json`."""
    baseline = select_baseline(methods, runs)
    tokenizer = measurement.embeddings_and_output_head.tokenizer
    return {
        "methods": {
            name: _summarise_method(name, method, runs, baseline, tokenizer, config.seed)
            for name, method in methods.items()
        },
        "baseline": baseline,
        "baselines": [name for name in BASELINES if name in methods],
        # Sampled texts differ by chance; tests check their distribution.
        "lossless": compare_greedy_texts(measurement, methods, runs)
        if measurement.sampling.is_greedy
        else None,
        "batch_size": config.batch_size,
        "num_repeats": config.num_repeats,
        "texts": select_shown_texts(tokenizer, methods, runs, config.num_texts),
    }


def _summarise_method(
    name: str, method: Method, runs: list[PromptRun], baseline: str, tokenizer: Any, seed: int
) -> dict[str, Any]:
    texts = [run.texts[name][0] for run in runs]
    steps = [
        PromptSteps(
            run.prompt.category, text.steps, text.drafted, run.prompt.dialogue, run.prompt.turn,
            len(run.prompt.token_ids), find_text_spans(run.prompt, text.token_ids, tokenizer),
        )
        for run, text in zip(runs, texts, strict=True)
    ]  # fmt: skip
    depth = max((step.num_accepted for p in steps for step in p.steps), default=0)
    measured: dict[str, Any] = summarise_acceptance(steps, depth, seed)
    decode_speedup = compute_speedup(name, baseline, runs, "decode")
    figures: dict[str, Any] = {
        **{key: measured[key] for key in SHARED},
        "tokens_per_s": compute_tokens_per_s(name, runs, "total"),
        **compute_speedup_figures(name, baseline, runs, seed),
        "decode_tokens_per_s": compute_tokens_per_s(name, runs, "decode"),
        "decode_speedup": decode_speedup,
        "efficiency": None if decode_speedup is None else decode_speedup / measured["tau"],
        "num_tokens": sum(len(text.token_ids) for text in texts),
        "breakdown": _sum_part_seconds(name, runs),
        "lossy": method.lossy,
        "by_mode": compute_mode_figures([each.build_row() for each in steps], seed),
        "by_category": {},
        "by_input_length": {},
        **method.settings,
    }
    if "captured" in method.settings:  # no other time contains captures
        times = [text.times for run in runs for text in run.texts[name]]
        figures["captures"] = {
            "num": round(sum(each.num_captures for each in times)),
            "seconds": sum(each.capture for each in times),
        }
    groups = {
        "by_category": group_by(runs, lambda run: run.prompt.category),
        "by_input_length": group_by(
            runs, lambda run: format_length_bucket(len(run.prompt.token_ids))
        ),
    }
    for key, by_name in groups.items():
        for group, row in measured[key].items():
            members = by_name[group]
            figures[key][group] = {
                "tau": row["tau"],
                "tau_ci95": row["ci95"],
                "per_draft": row["per_draft"],
                **compute_speedup_figures(name, baseline, members, seed),
                "num_prompts": row["num_prompts"],
                "num_dialogues": row["num_dialogues"],
            }
    if (tree := method.tree) is not None and tree.num_nodes > 1:
        paths = [path for text in texts for path in text.paths]
        counts = Counter(node for path in paths for node in path)
        # The share of passes that accepted each node.
        rates = [1.0, *(counts[n] / max(1, len(paths)) for n in range(1, tree.num_nodes))]
        shape = {"parents": list(tree.parents), "ranks": list(tree.ranks)}
        figures["tree"] = shape | {"acceptance": rates}
    # One entry per prompt: its verify passes, and for each part the seconds of every repeat (the
    # text's share of its batch).
    figures["prompts"] = [
        {
            **passes.build_row(),
            "num_tokens": run.num_tokens(name),
            "seconds": {part: run.seconds_per_repeat(name, part) for part in TIMES},
        }
        for passes, run in zip(steps, runs, strict=True)
    ]
    return figures


def _sum_part_seconds(name: str, runs: list[PromptRun]) -> dict[str, float]:
    """Sum the seconds of each part; a GPU's idle time inside a part counts as the host's."""
    parts = {
        part: _median_total(run.seconds_per_repeat(name, part) for run in runs) for part in PARTS
    }
    for part in STEP_PARTS:
        profiled = [run for run in runs if name in run.busy]
        lasted_s = _median_total(run.seconds_per_repeat(name, part) for run in profiled)
        if lasted_s:
            worked_s = sum(run.busy[name].get(part, 0.0) for run in profiled)
            idle = parts[part] * max(0.0, 1 - worked_s / lasted_s)
            parts[part] -= idle
            parts["host"] += idle
    # Either the parts of a step, or the captured step.
    return {part: seconds for part, seconds in parts.items() if part != "step" or seconds}


def select_baseline(methods: Iterable[str], runs: list[PromptRun]) -> str:
    """Choose the faster method without drafting, which a user would run without a head."""
    speeds = {
        name: compute_tokens_per_s(name, runs, "total") for name in BASELINES if name in methods
    }
    return max(speeds, key=lambda name: speeds[name])


def compute_speedup(name: str, baseline: str, runs: list[PromptRun], part: str) -> float | None:
    """Divide a method's tokens/s by the baseline's; return None if the baseline decoded nothing."""
    base = compute_tokens_per_s(baseline, runs, part)
    return compute_tokens_per_s(name, runs, part) / base if base else None


def compute_speedup_figures(
    name: str, baseline: str, runs: list[PromptRun], seed: int
) -> dict[str, Any]:
    """Compute a speed-up, and its 95% bootstrap interval over dialogues and repeats."""
    ours, base = (
        [[(s, run.num_tokens(method)) for s in run.seconds_per_repeat(method)] for run in runs]
        for method in (name, baseline)
    )
    bounds = None  # of the baseline, which is 1 by definition
    if name != baseline:
        bounds = bootstrap_speedup([run.prompt.dialogue for run in runs], ours, base, seed)[1]
    return {
        "speedup": compute_speedup(name, baseline, runs, "total"), "speedup_ci95": bounds,
    }  # fmt: skip


def compute_tokens_per_s(name: str, runs: list[PromptRun], part: str) -> float:
    """Compute a method's tokens per second.

    `total` counts everything; `decode` leaves out the prompts' passes and their tokens.
    """
    counts = (run.num_tokens(name) if part == "total" else run.num_decoded(name) for run in runs)
    return sum(counts) / max(
        _median_total(run.seconds_per_repeat(name, part) for run in runs), 1e-9
    )


def _median_total(seconds: Iterable[list[float]]) -> float:
    """Sum the seconds of all prompts, each with its median over repeats."""
    return sum(map(statistics.median, seconds))


def compare_greedy_texts(
    measurement: Measurement, methods: dict[str, Method], runs: list[PromptRun]
) -> dict[str, Any]:
    """Count greedy texts that equal plain decoding under every method, and list the others."""
    divergences = []
    for index, run in enumerate(runs):
        expected = run.texts[VANILLA][0].token_ids
        for name in methods:
            text = run.texts[name][0].token_ids
            if text != expected:
                divergence = _find_divergence(measurement.target, run.prompt, expected, text)
                divergences.append({"prompt": index, "method": name, **divergence})
    differing = {each["prompt"] for each in divergences}
    return {
        "num_prompts": len(runs),
        "num_equal": len(runs) - len(differing),
        "first_divergences": divergences,
    }


@torch.no_grad()
def _find_divergence(
    target: Target, prompt: Prompt, expected: list[int], text: list[int]
) -> dict[str, Any]:
    """Place where two texts part, and the margin of the target's choice there."""
    position = count_common_prefix(expected, text)
    output = target.encode_text(prompt.token_ids + expected[:position])
    best, second = (
        target.compute_logits(output.hidden_states[0, -1]).float().topk(2).values.tolist()
    )
    return {"position": position, "top2_margin": best - second}


def select_shown_texts(
    tokenizer: Any, methods: dict[str, Method], runs: list[PromptRun], num_texts: int
) -> list[dict[str, Any]]:
    """Choose the texts that the report shows: of each category in turn, the first prompts."""
    drafting = [
        name
        for name in methods
        if name == VANILLA or any(sum(run.texts[name][0].drafted) for run in runs)
    ]
    by_category = group_by(runs, lambda run: run.prompt.category).values()
    rounds = [run for turn in zip_longest(*by_category) for run in turn if run is not None]
    return [
        _color_by_depth(n, run, drafting, tokenizer) for n, run in enumerate(rounds[:num_texts])
    ]


def _color_by_depth(
    index: int, run: PromptRun, methods: list[str], tokenizer: Any
) -> dict[str, Any]:
    """Split a prompt's texts into tokens, each with the depth at which it was accepted.

    The depth of the target's own tokens is 0.
    """
    texts, prompt = {}, run.prompt
    for name in methods:
        text = run.texts[name][0]
        # The prompt's pass gives one token, or more if transformers drafts in it.
        num_first = len(text.token_ids) - sum(step.num_emitted for step in text.steps)
        depths = [*range(1, num_first), 0]
        for step in text.steps:
            depths += [*range(1, step.num_accepted + 1), 0][: step.num_emitted]
        pieces = _decode_token_pieces(tokenizer, text.token_ids)
        texts[name] = list(zip(pieces, depths, strict=True))
    return {
        "prompt": index,
        "category": prompt.category,
        "turn": prompt.turn,
        "question": prompt.question,
        "methods": texts,
    }


def _decode_token_pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Decode the text that each token adds; a character split over tokens goes to the last one."""
    pieces, decoded = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end])
        whole = end == len(token_ids) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        grown = text if whole and text.startswith(decoded) else decoded
        pieces.append(grown[len(decoded) :])
        decoded = grown
    return pieces


def summarise_batch_size(
    methods: Iterable[str], runs: list[PromptRun], seed: int
) -> dict[str, Any]:
    """Compute throughput and latency of every method at one batch size.

    Time to the first token: from the moment a text gets a row of the batch to its first token. Time
    between tokens: from one step that gave the text tokens to the next such step, over all texts.
    Both in ms, as medians over the repeats; None if a repeat has no such time.

    Args:
        methods: names of the methods.
        runs: runs of all prompts.
        seed: seed of the intervals.
    """
    baseline, rows = select_baseline(methods, runs), {}
    for name in methods:
        repeats = list(zip(*(run.texts[name] for run in runs), strict=True))
        rows[name] = {
            "tokens_per_s": compute_tokens_per_s(name, runs, "total"),
            **compute_speedup_figures(name, baseline, runs, seed),
            **compute_waits_ms([[text.arrivals for text in texts] for texts in repeats]),
        }
    return {"baseline": baseline, "methods": rows}


def find_break_even_size(sizes: dict[str, Any], method: str) -> int | None:
    """Find the batch size from which a method is no faster than the baseline.

    Args:
        sizes: content of `concurrency` in `speedup.json`.
        method: name of the method.

    Returns:
        None if the method is faster at every size.
    """
    speedups = {int(size): row["methods"][method]["speedup"] for size, row in sizes.items()}
    pays = max((size for size, speedup in speedups.items() if speedup > 1), default=0)
    return min((size for size in speedups if size > pays), default=None)


def print_concurrency(result: dict[str, Any], console: Console) -> None:
    """Print the table, and the size from which each method no longer helps."""
    console.print(build_concurrency_table(result["concurrency"]))
    for name in result["methods"]:
        if name not in result["baselines"]:
            size = find_break_even_size(result["concurrency"], name)
            verdict = "pays at all of them" if size is None else f"no longer pays from {size} on"
            console.print(f"{name}: {verdict}", highlight=False)


def build_concurrency_table(sizes: dict[str, Any]) -> Table:
    """Build a table of `concurrency` in a result: a row per method and batch size."""
    table = Table(title="Texts at a time; ms to the first token and between tokens, p50 and p99")
    columns = ("texts", "method", "tokens/s", "speed-up, 95%", "first", "between")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for size, measured in sizes.items():
        for name, row in measured["methods"].items():
            speedup, bounds = row["speedup"], row["speedup_ci95"]
            speedup_text = "-" if speedup is None else f"{speedup:.2f}"
            table.add_row(
                size, name, f"{row['tokens_per_s']:.1f}",
                speedup_text if bounds is None else f"{speedup_text} {format_interval(bounds)}",
                *(format_wait(row[key]) for key in WAITS),
            )  # fmt: skip
        table.add_section()
    return table


def format_wait(wait: dict[str, float] | None) -> str:
    """Format the percentiles of a wait in ms for a table; a dash if there are none."""
    if wait is None:
        return "-"
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in wait.values())
