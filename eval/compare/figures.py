"""Turns what methods did into the figures of `speedup.json`."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from conf.settings.measure import SpeedupRun
from eval.compare.methods import Method
from eval.compare.names import BASELINES
from eval.compare.texts import lossless, texts_shown
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation
from eval.measure.bench import Bench
from eval.measure.prompts import Prompt, num_thinking
from eval.measure.stats import Interval, PromptSteps, interval, summary, tau
from heads.decoding.tree import Tree

PARTS = ("prefill", "draft", "verify", "accept", "step", "host")
TIMES = ("prefill", "draft", "verify", "accept", "step", "total")


def summarise(
    bench: Bench, config: SpeedupRun, methods: dict[str, Method], found: list[PromptRun]
) -> dict[str, Any]:
    """The contents of `speedup.json`."""
    baseline = baseline_of(methods, found)
    return {
        "methods": {
            name: _figures(name, method, found, baseline, bench.target.tokenizer, config.seed)
            for name, method in methods.items()
        },
        "baseline": baseline,
        "baselines": [name for name in BASELINES if name in methods],
        # Sampled texts differ by chance; that they keep the distribution is a matter of tests.
        "lossless": lossless(bench, methods, found) if bench.sampling.greedy else None,
        "batch_size": config.batch_size,
        "num_repeats": config.num_repeats,
        "texts": texts_shown(bench.target, methods, found, config.num_texts),
    }


def baseline_of(methods: Iterable[str], found: list[PromptRun]) -> str:
    """Whatever is faster of what drafts nothing: what a user would take without a head."""
    speeds = {name: tokens_per_s(name, found, "total") for name in BASELINES if name in methods}
    return max(speeds, key=lambda name: speeds[name])


def _figures(
    name: str, method: Method, found: list[PromptRun], baseline: str, tokenizer: Any, seed: int
) -> dict[str, Any]:
    texts = [run.runs[name][0] for run in found]
    steps = [_steps(run.prompt, run.runs[name][0], tokenizer) for run in found]
    depth = max((step.num_accepted for p in steps for step in p.steps), default=0)
    measured = summary(steps, depth, seed)
    mean, decode_speedup = tau(steps), ratio(name, baseline, found, "decode")
    figures = {
        "tau": mean,
        "tau_ci95": measured["tau_ci95"],
        "tokens_per_s": tokens_per_s(name, found, "total"),
        "speedup": ratio(name, baseline, found, "total"),
        "speedup_ci95": speedup_interval(name, baseline, found, seed),
        "decode_tokens_per_s": tokens_per_s(name, found, "decode"),
        "decode_speedup": decode_speedup,
        "efficiency": None if decode_speedup is None else decode_speedup / mean,
        "alpha": measured["alpha"],
        "per_position": measured["per_position"],
        "num_tokens": sum(len(text.token_ids) for text in texts),
        **{key: measured[key] for key in ("num_steps", "num_drafted", "num_accepted")},
        "breakdown": _breakdown(name, found),
        "lossy": method.lossy,
        "by_category": _by_category(name, found, measured, baseline, seed),
        "by_part": measured["by_part"],
        **method.settings,
    }
    if method.tree is not None and method.tree.num_nodes > 1:
        figures["tree"] = _tree(method.tree, texts)
    return figures | {"prompts": _rows(name, found, steps)}


def _steps(prompt: Prompt, text: Generation, tokenizer: Any) -> PromptSteps:
    return PromptSteps(
        prompt.category, text.steps, text.drafted, prompt.dialogue, prompt.turn,
        num_thinking(prompt, text.token_ids, tokenizer),
    )  # fmt: skip


def _rows(name: str, found: list[PromptRun], steps: list[PromptSteps]) -> list[dict[str, Any]]:
    """Per prompt its passes, and per repeat its shares of the seconds of its batches."""
    return [
        {
            **own.row(),
            "num_tokens": run.num_tokens(name),
            "seconds": {part: run.seconds(name, part) for part in TIMES},
        }
        for own, run in zip(steps, found, strict=True)
    ]


def _breakdown(name: str, found: list[PromptRun]) -> dict[str, float]:
    """Seconds per part; what a GPU stood still inside a part is the host's."""
    parts = {part: _median_total(run.seconds(name, part) for run in found) for part in PARTS}
    for part in ("draft", "verify", "accept", "step"):
        profiled = [run for run in found if name in run.busy]
        lasted = _median_total(run.seconds(name, part) for run in profiled)
        if lasted:
            worked = sum(run.busy[name].get(part, 0.0) for run in profiled)
            idle = parts[part] * max(0.0, 1 - worked / lasted)
            parts[part] -= idle
            parts["host"] += idle
    # Either the parts of a step, or the step as it is captured.
    return {part: seconds for part, seconds in parts.items() if part != "step" or seconds}


def _median_total(seconds: Iterable[list[float]]) -> float:
    """Seconds of all prompts, each at its median over repeats."""
    return sum(map(statistics.median, seconds))


def tokens_per_s(name: str, found: list[PromptRun], part: str) -> float:
    """In `total`, or in `decode`: without prompts and what reading them gives."""
    counts = (run.num_tokens(name) if part == "total" else run.num_decoded(name) for run in found)
    return sum(counts) / max(_median_total(run.seconds(name, part) for run in found), 1e-9)


def ratio(name: str, baseline: str, found: list[PromptRun], part: str) -> float | None:
    """To the baseline's speed; None where that decoded nothing."""
    base = tokens_per_s(baseline, found, part)
    return tokens_per_s(name, found, part) / base if base else None


def speedup_interval(name: str, baseline: str, found: list[PromptRun], seed: int) -> Interval:
    """95% bootstrap interval of the speed-up over dialogues and repeats."""
    if name == baseline:  # 1 by definition
        return None
    groups = _dialogues(found)

    @cache
    def sums(runs: tuple[int, ...]) -> list[list[float]]:
        """Per group the tokens and seconds of the method, and those of the baseline."""
        return [
            [
                total
                for each in (name, baseline)
                for total in (
                    sum(run.num_tokens(each) for run in group),
                    _median_total([run.seconds(each)[r] for r in runs] for run in group),
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


def _dialogues(found: list[PromptRun]) -> list[list[PromptRun]]:
    """The prompts of each dialogue."""
    groups: dict[int, list[PromptRun]] = {}
    for run in found:
        groups.setdefault(run.prompt.dialogue, []).append(run)
    return list(groups.values())


def _by_category(
    name: str, found: list[PromptRun], measured: dict[str, Any], baseline: str, seed: int
) -> dict[str, Any]:
    rows = {}
    for category, row in measured["by_category"].items():
        members = [run for run in found if run.prompt.category == category]
        rows[category] = {
            "tau": row["tau"],
            "tau_ci95": row["ci95"],
            "speedup": ratio(name, baseline, members, "total"),
            "speedup_ci95": speedup_interval(name, baseline, members, seed),
            "num_prompts": row["num_prompts"],
        }
    return rows


def _tree(tree: Tree, texts: list[Generation]) -> dict[str, Any]:
    """A static shape with the share of passes that accepted each node."""
    counts = Counter(node for g in texts for path in g.paths for node in path)
    num_steps = max(1, sum(len(g.paths) for g in texts))
    rates = [1.0] + [counts[node] / num_steps for node in range(1, tree.num_nodes)]
    return {"parents": list(tree.parents), "ranks": list(tree.ranks), "acceptance": rates}
