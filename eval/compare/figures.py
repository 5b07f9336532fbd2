"""Turns what methods did into the figures of `speedup.json`."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from conf.schema_measure import SpeedupRun
from eval.compare.methods import BASELINES, Method
from eval.compare.texts import lossless, texts_shown
from eval.compare.timing import BatchRun
from eval.decode.engine import Generation
from eval.measure.bench import Bench
from eval.measure.prompts import num_thinking
from eval.measure.stats import Interval, PromptSteps, interval, summary, tau
from heads.tree import Tree

PARTS = ("prefill", "draft", "verify", "accept", "host")
TIMES = ("prefill", "draft", "verify", "accept", "total")


def summarise(
    bench: Bench, config: SpeedupRun, methods: dict[str, Method], found: list[BatchRun]
) -> dict[str, Any]:
    """The contents of `speedup.json`."""
    # Whatever is faster of what drafts nothing is what a user would take without a head.
    speeds = {name: _tokens_per_s(name, found, "total") for name in BASELINES if name in methods}
    baseline = max(speeds, key=lambda name: speeds[name])
    return {
        "methods": {
            name: _figures(name, method, found, baseline, bench.target.tokenizer, config.seed)
            for name, method in methods.items()
        },
        "baseline": baseline,
        "baselines": list(speeds),
        # Sampled texts differ by chance; that they keep the distribution is a matter of tests.
        "lossless": lossless(bench, methods, found) if bench.sampling.greedy else None,
        "batch_size": config.batch_size,
        "num_repeats": config.num_repeats,
        "texts": texts_shown(bench.target, methods, found, config.num_texts),
    }


def _figures(
    name: str, method: Method, found: list[BatchRun], baseline: str, tokenizer: Any, seed: int
) -> dict[str, Any]:
    texts = [g for batch in found for g in batch.runs[name][0]]
    of_batches = [_steps(name, batch, tokenizer) for batch in found]
    steps = [each for batch in of_batches for each in batch]
    depth = max((step.num_accepted for p in steps for step in p.steps), default=0)
    measured = summary(steps, depth, seed)
    mean, ratio = tau(steps), _ratio(name, baseline, found, "decode")
    figures = {
        "tau": mean,
        "tau_ci95": measured["tau_ci95"],
        "tokens_per_s": _tokens_per_s(name, found, "total"),
        "speedup": _ratio(name, baseline, found, "total"),
        "speedup_ci95": _speedup_interval(name, baseline, found, seed),
        "decode_tokens_per_s": _tokens_per_s(name, found, "decode"),
        "decode_speedup": ratio,
        "efficiency": None if ratio is None else ratio / mean,
        "alpha": measured["alpha"],
        "per_position": measured["per_position"],
        "num_tokens": sum(len(text.token_ids) for text in texts),
        "num_passes": sum(max(len(g.steps) for g in batch.runs[name][0]) for batch in found),
        **{key: measured[key] for key in ("num_steps", "num_drafted", "num_accepted")},
        "breakdown": _breakdown(name, found),
        "lossy": method.lossy,
        "by_category": _by_category(name, found, measured, baseline, seed),
        "by_part": measured["by_part"],
        **method.settings,
    }
    if method.tree is not None and method.tree.num_nodes > 1:
        figures["tree"] = _tree(method.tree, texts)
    return figures | {"prompts": _rows(name, found, of_batches)}


def _steps(name: str, batch: BatchRun, tokenizer: Any) -> list[PromptSteps]:
    return [
        PromptSteps(
            prompt.category, text.steps, text.drafted, prompt.dialogue, prompt.turn,
            num_thinking(prompt, text.token_ids, tokenizer),
        )
        for prompt, text in zip(batch.prompts, batch.runs[name][0], strict=True)
    ]  # fmt: skip


def _rows(name: str, found: list[BatchRun], steps: list[list[PromptSteps]]) -> list[dict[str, Any]]:
    """Per prompt its passes, and per repeat the seconds of the batch in which it was decoded."""
    return [
        {
            **own.row(),
            "num_tokens": len(text.token_ids),
            "batch": number,
            "seconds": {part: batch.seconds(name, part) for part in TIMES},
        }
        for number, batch in enumerate(found)
        for own, text in zip(steps[number], batch.runs[name][0], strict=True)
    ]


def _breakdown(name: str, found: list[BatchRun]) -> dict[str, float]:
    """Seconds per part; what a GPU stood still inside a part is the host's."""
    parts = {part: _median_total(b.seconds(name, part) for b in found) for part in PARTS}
    for part in ("draft", "verify", "accept"):
        profiled = [batch for batch in found if name in batch.busy]
        lasted = _median_total(batch.seconds(name, part) for batch in profiled)
        if lasted:
            worked = sum(batch.busy[name].get(part, 0.0) for batch in profiled)
            idle = parts[part] * max(0.0, 1 - worked / lasted)
            parts[part] -= idle
            parts["host"] += idle
    return parts


def _median_total(seconds: Iterable[list[float]]) -> float:
    """Seconds of all batches, each at its median over repeats."""
    return sum(map(statistics.median, seconds))


def _tokens_per_s(name: str, found: list[BatchRun], part: str) -> float:
    """In `total`, or in `decode`: without prompts and what reading them gives."""
    counts = (b.num_tokens(name) if part == "total" else b.num_decoded(name) for b in found)
    return sum(counts) / max(_median_total(batch.seconds(name, part) for batch in found), 1e-9)


def _ratio(name: str, baseline: str, found: list[BatchRun], part: str) -> float | None:
    """To the baseline's speed; None where that decoded nothing."""
    base = _tokens_per_s(baseline, found, part)
    return _tokens_per_s(name, found, part) / base if base else None


def _speedup_interval(name: str, baseline: str, found: list[BatchRun], seed: int) -> Interval:
    """95% bootstrap interval of the speed-up over dialogues and repeats."""
    if name == baseline:  # 1 by definition
        return None
    groups = _together(found)

    @cache
    def sums(runs: tuple[int, ...]) -> list[list[float]]:
        """Per group the tokens and seconds of the method, and those of the baseline."""
        return [
            [
                total
                for each in (name, baseline)
                for total in (
                    sum(batch.num_tokens(each) for batch in group),
                    _median_total([batch.seconds(each)[r] for r in runs] for batch in group),
                )
            ]
            for group in groups
        ]

    def speedup(drawn: Sequence[int], runs: Sequence[int]) -> float:
        cells = sums(tuple(sorted(runs)))
        tokens, time, base_tokens, base_time = (
            sum(cells[group][column] for group in drawn) for column in range(4)
        )
        return (tokens / time) / (base_tokens / base_time)

    num_runs = len(found[0].runs[name])
    return interval(range(len(groups)), speedup, seed, num_runs)


def _together(found: list[BatchRun]) -> list[list[BatchRun]]:
    """Batches that share a dialogue, or are tied by others that do."""
    groups: list[tuple[set[int], list[BatchRun]]] = []
    for batch in found:
        dialogues, members = {prompt.dialogue for prompt in batch.prompts}, [batch]
        tied = [group for group in groups if group[0] & dialogues]
        groups = [group for group in groups if not group[0] & dialogues]
        for others, theirs in tied:
            dialogues |= others
            members = theirs + members
        groups.append((dialogues, members))
    return [members for _, members in groups]


def _by_category(
    name: str, found: list[BatchRun], measured: dict[str, Any], baseline: str, seed: int
) -> dict[str, Any]:
    rows = {}
    for category, row in measured["by_category"].items():
        members = [batch for batch in found if batch.category == category]
        rows[category] = {
            "tau": row["tau"],
            "tau_ci95": row["ci95"],
            "speedup": _ratio(name, baseline, members, "total"),
            "speedup_ci95": _speedup_interval(name, baseline, members, seed),
            "num_prompts": row["num_prompts"],
        }
    return rows


def _tree(tree: Tree, texts: list[Generation]) -> dict[str, Any]:
    """A static shape with the share of passes that accepted each node."""
    counts = Counter(node for g in texts for path in g.paths for node in path)
    num_steps = max(1, sum(len(g.paths) for g in texts))
    rates = [1.0] + [counts[node] / num_steps for node in range(1, tree.num_nodes)]
    return {"parents": list(tree.parents), "ranks": list(tree.ranks), "acceptance": rates}
