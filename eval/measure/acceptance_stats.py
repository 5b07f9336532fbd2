"""tau, alpha, acceptance lengths and their intervals, from verify steps.

tau: mean tokens per verify pass, including the bonus token, over all passes of all prompts (micro
mean); the prefill's token is not counted. alpha_d: share of passes that kept depth d among the
passes that kept depth d - 1 and whose text was long enough to test depth d.

Acceptance lengths are figures as other tools define them: what they count, and how they average.
Every figure is a mean of ratios. One text has n verify passes that emit E tokens; d passes have
drafts, of which A tokens are accepted:

    passes       E / n              tau: what drafting saves, in passes of the target
    drafts       (d + A) / d        vLLM: its bonus token counts even where the text ends before it
    first_token  (E + 1) / n        SGLang: with the token that the prompt's pass gives
    first_pass   (E + 1) / (n + 1)  Model-Optimizer: with that pass as well

Pooled figures divide sums over all texts. The others average the ratios of turns, or of dialogues
(sums over their turns). Draft tokens beyond the end of a text are not counted here; vLLM and SGLang
count draft tokens that a text's last pass accepts there.

Sources: vLLM 0.32 `benchmarks/serve.py`, `v1/spec_decode/metrics.py`; SGLang
`managers/tokenizer_manager.py`; Model-Optimizer `examples/specdec_bench/specdec_bench/metrics`.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from eval.decode.engine import Step

Item = TypeVar("Item")
Key = TypeVar("Key")
Ratio = tuple[int, int]
Costs = Sequence[tuple[float, float]]
"""Seconds and tokens of a text, a pair for each repeat."""
Interval = tuple[float, float] | None
NUM_BOOTSTRAPS = 1000
FEWEST_DIALOGUES = 8
"""Dialogues from which tables show an interval: drawn from fewer, it is narrower than the truth."""
LENGTH_DEFINITIONS = {
    "passes": "tau: tokens per pass",
    "drafts": "1 + accepted / drafts, as vLLM",
    "first_token": "with the prompt's token, as SGLang",
    "first_pass": "with its pass too, as Model-Optimizer",
}
"""What an acceptance length counts, in words."""
MEANS = ("pooled", "turns", "dialogues")
"""What a mean is over."""
FEWEST = 725
"""Tokens from which a prompt's length has a name: the nearest power of two, from 1,024."""


@dataclass(frozen=True)
class PromptSteps:
    """Verify passes of one prompt.

    Attributes:
        category: category, for figures by category.
        steps: verify passes over the prompt's text.
        drafted: draft tokens that each pass verified, if counted.
        dialogue: number of the dialogue; intervals group its prompts, as they share a topic.
        turn: turn of the dialogue, from 1.
        prompt_tokens: tokens of the prompt; 0 if not counted.
        spans: thinking, tool calls and code blocks of the answer (`modes.find_text_spans`).
    """

    category: str
    steps: Sequence[Step]
    drafted: Sequence[int] = ()
    dialogue: int = 0
    turn: int = 1
    prompt_tokens: int = 0
    spans: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def build_row(self) -> dict[str, Any]:
        """Build the row of a results file: numbers per pass."""
        return {
            "dialogue": self.dialogue,
            "turn": self.turn,
            "category": self.category,
            "prompt_tokens": self.prompt_tokens,
            "spans": dict(self.spans),
            "drafted": list(self.drafted),
            "accepted": [step.num_accepted for step in self.steps],
            "emitted": [step.num_emitted for step in self.steps],
        }


def summarise_acceptance(
    prompts: Sequence[PromptSteps], depth: int, seed: int
) -> dict[str, object]:
    """Compute the figures of `acceptance.json` that only need the steps."""
    rows = [prompt.build_row() for prompt in prompts]

    def summarise_groups(
        key: Callable[[PromptSteps], Any], name_of: Callable[[Any], str]
    ) -> dict[str, object]:
        """Compute the figures of groups of prompts, in the order of their keys."""
        groups = group_by(sorted(prompts, key=key), lambda prompt: name_of(key(prompt)))
        return {
            name: {
                **_compute_group_figures(members, depth),
                "ci95": compute_tau_interval(members, seed),
                "num_prompts": len(members),
                "num_dialogues": len({prompt.dialogue for prompt in members}),
            }
            for name, members in groups.items()
        }

    counted = all(prompt.prompt_tokens for prompt in prompts)
    return {
        "draft_tokens": max((size for p in prompts for size in p.drafted), default=depth),
        "tau": tau(prompts),
        "tau_ci95": compute_tau_interval(prompts, seed),
        "acceptance_length": compute_acceptance_lengths(list(map(PassCounts.from_row, rows))),
        "alpha": alpha(prompts, depth),
        "per_position": compute_per_position(prompts, depth),
        "histogram": count_accepted_histogram(rows, depth),
        "by_category": summarise_groups(lambda prompt: prompt.category, str),
        "by_input_length": summarise_groups(
            lambda prompt: prompt.prompt_tokens, format_length_bucket
        )
        if counted
        else {},
        "num_prompts": len(prompts),
        "num_tokens": sum(step.num_emitted for prompt in prompts for step in prompt.steps),
        "num_steps": sum(len(prompt.steps) for prompt in prompts),
        "num_drafted": sum(sum(prompt.drafted) for prompt in prompts),
        "num_accepted": sum(step.num_accepted for prompt in prompts for step in prompt.steps),
        "prompts": rows,
    }


def tau(prompts: Sequence[PromptSteps]) -> float:
    """Compute the mean tokens per verify pass; 1.0 without passes."""
    return compute_tau([(s.num_emitted, 1) for prompt in prompts for s in prompt.steps])


def alpha(prompts: Sequence[PromptSteps], depth: int) -> list[float]:
    """Compute the conditional acceptance per depth; 0.0 for a depth that was never reached."""
    steps = [step for prompt in prompts for step in prompt.steps]
    return [
        compute_share(
            s.num_accepted >= d for s in steps if s.num_accepted >= d - 1 and s.num_left >= d
        )
        for d in range(1, depth + 1)
    ]


def compute_per_position(prompts: Sequence[PromptSteps], depth: int) -> list[float]:
    """Compute the share of all passes that kept depth d: vLLM's per-position acceptance."""
    steps = [step for prompt in prompts for step in prompt.steps]
    return [compute_share(s.num_accepted >= d for s in steps) for d in range(1, depth + 1)]


def compute_share(facts: Iterable[bool]) -> float:
    """Compute the share of facts that hold; 0.0 without facts."""
    values = list(facts)
    return sum(values) / max(1, len(values))


def _compute_group_figures(prompts: Sequence[PromptSteps], depth: int) -> dict[str, Any]:
    return {
        "tau": tau(prompts),
        "per_draft": compute_mean_acceptance_length([prompt.build_row() for prompt in prompts]),
        "alpha": alpha(prompts, depth),
    }


def select_tree_figures(result: dict[str, Any]) -> dict[str, Any]:
    """Return the tree's part of an `acceptance.json`."""
    return result["static_tree"] if "static_tree" in result else result["dynamic_tree"]


def count_accepted_histogram(rows: Iterable[Mapping[str, Any]], depth: int) -> list[int]:
    """Count passes by their accepted draft tokens, bonus token excluded: [depth + 1]."""
    passes = Counter(accepted for row in rows for accepted in row["accepted"])
    return [passes[accepted] for accepted in range(depth + 1)]


def format_length_bucket(prompt_tokens: int) -> str:
    """Name the length of a prompt by the nearest power of two: `8k` for 5,793 to 11,585 tokens."""
    if prompt_tokens < FEWEST:
        return "<1k"
    return f"{2 ** round(math.log2(prompt_tokens) - 10)}k"


@dataclass(frozen=True)
class PassCounts:
    """Sums of a text, from which its acceptance lengths follow.

    Attributes:
        dialogue: dialogue of the text.
        num_passes: number of verify passes.
        num_drafts: number of verify passes with drafts.
        num_accepted: number of accepted draft tokens.
        num_emitted: number of tokens of the text after the first.
    """

    dialogue: int
    num_passes: int
    num_drafts: int
    num_accepted: int
    num_emitted: int

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "PassCounts":
        """Sum a row of `PromptSteps.build_row`."""
        n = len(row["emitted"])
        # A pass without draft tokens is no draft; without counts of draft tokens, every pass is.
        drafts = sum(map(bool, row["drafted"])) if row["drafted"] else n
        return cls(row["dialogue"], n, drafts, sum(row["accepted"]), sum(row["emitted"]))

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Return numerator and denominator of the acceptance length under each definition."""
        drafts, n, emitted = self.num_drafts, self.num_passes, self.num_emitted
        return {
            "passes": (emitted, n),
            "drafts": (drafts + self.num_accepted, drafts),
            "first_token": (emitted + 1, n),
            "first_pass": (emitted + 1, n + 1),
        }


def compute_acceptance_lengths(texts: Sequence[PassCounts]) -> dict[str, dict[str, float | None]]:
    """Compute acceptance lengths by definition and mean; None if nothing was counted."""
    return {count: _compute_means(count, texts) for count in LENGTH_DEFINITIONS}


def compute_mean_acceptance_length(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Compute 1 + accepted / drafts over rows of `PromptSteps.build_row`, as vLLM prints it."""
    return _compute_means("drafts", list(map(PassCounts.from_row, rows)))["pooled"]


def _compute_means(count: str, texts: Sequence[PassCounts]) -> dict[str, float | None]:
    dialogues = group_by(texts, lambda text: text.dialogue).values()
    groups: list[list[Sequence[PassCounts]]] = [[texts], [[text] for text in texts], [*dialogues]]

    def average_ratios(groups: Sequence[Sequence[PassCounts]]) -> float | None:
        """Average ratios, except of texts of one token: no pass, and no figure in engines."""
        ratios = [[text.ratios[count] for text in group] for group in groups]
        sums = [(sum(a for a, _ in group), sum(b for _, b in group)) for group in ratios]
        values = [above / below for above, below in sums if below]
        return sum(values) / len(values) if values else None

    return dict(zip(MEANS, map(average_ratios, groups), strict=True))


def compute_length_interval(texts: Sequence[PassCounts], count: str, seed: int) -> Interval:
    """Compute the 95% bootstrap interval of a pooled acceptance length over dialogues.

    Args:
        texts: sums of each text.
        count: key of `LENGTH_DEFINITIONS`.
        seed: seed of the resampling.
    """
    dialogues = group_by(texts, lambda text: text.dialogue).values()
    ratios = [[text.ratios[count] for text in dialogue] for dialogue in dialogues]
    sums = [(sum(a for a, _ in group), sum(b for _, b in group)) for group in ratios]
    return bootstrap_interval(sums, lambda drawn, _: compute_tau(drawn), seed)


def print_acceptance_lengths(
    lengths: dict[str, dict[str, float | None]], console: Console, whose: str = "the chain"
) -> None:
    """Print acceptance lengths: a row per definition, a column per mean."""
    table = Table(title=f"Acceptance length of {whose}, as others define it")
    table.add_column("counted")
    for name in ("pooled", "mean over turns", "over dialogues"):
        table.add_column(name, justify="right")
    for count, means in lengths.items():
        row = (means[mean] for mean in MEANS)
        table.add_row(
            LENGTH_DEFINITIONS[count], *("-" if each is None else f"{each:.3f}" for each in row)
        )
    console.print(table)


def bootstrap_interval(
    groups: Sequence[Item],
    figure: Callable[[Sequence[Item], Sequence[int]], float],
    seed: int,
    num_runs: int = 1,
) -> Interval:
    """Compute a 95% bootstrap interval of a figure.

    Args:
        groups: groups, resampled with replacement. Prompts that depend on each other, as in a
            dialogue, are one group.
        figure: computes the figure from sampled groups and the numbers of sampled runs.
        seed: seed of the resampling.
        num_runs: number of runs, resampled with replacement and alike for all groups.

    Returns:
        2.5th and 97.5th percentile, in the unit of the figure; None for a single group, which says
        nothing about other groups.
    """
    if len(groups) < 2:
        return None
    rng, runs = random.Random(seed), range(num_runs)
    draws = sorted(
        figure(rng.choices(groups, k=len(groups)), rng.choices(runs, k=num_runs))
        for _ in range(NUM_BOOTSTRAPS)
    )
    return draws[int(0.025 * NUM_BOOTSTRAPS)], draws[int(0.975 * NUM_BOOTSTRAPS)]


def compute_tau_interval(prompts: Sequence[PromptSteps], seed: int) -> Interval:
    """Compute the 95% bootstrap interval of tau over dialogues, in tokens per verify pass."""
    return bootstrap_tau(sum_by_dialogue([prompt.build_row() for prompt in prompts]), seed)


def bootstrap_tau(sums: Sequence[Ratio], seed: int) -> Interval:
    """Compute `compute_tau_interval` from emitted tokens and verify passes of each dialogue."""
    return bootstrap_interval(sums, lambda drawn, _: compute_tau(drawn), seed)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key; keys are in the order in which they first occur."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def bootstrap_speedup(
    dialogues: Sequence[int], ours: Sequence[Costs], base: Sequence[Costs], seed: int
) -> tuple[float, Interval]:
    """Compute a speed-up, and its 95% bootstrap interval over dialogues and repeats.

    Args:
        dialogues: number of each text's dialogue.
        ours: seconds and tokens of each text, a pair for each repeat.
        base: seconds and tokens of the baseline.
        seed: seed of the resampling.

    Returns:
        Our tokens per second divided by the baseline's, each text at its medians over repeats; and
        the interval.
    """
    members = group_by(range(len(dialogues)), lambda number: dialogues[number]).values()
    num_repeats = len(ours[0])

    @cache
    def sums(repeats: tuple[int, ...]) -> list[list[float]]:
        """Sum seconds and tokens of both, per dialogue."""
        return [
            [
                sum(statistics.median(costs[n][r][part] for r in repeats) for n in numbers)
                for costs in (ours, base)
                for part in (0, 1)
            ]
            for numbers in members
        ]

    def speedup(drawn: Sequence[int], repeats: Sequence[int]) -> float:
        cells = sums(tuple(sorted(repeats)))
        seconds, tokens, base_seconds, base_tokens = (
            sum(cells[dialogue][column] for dialogue in drawn) for column in range(4)
        )
        return (tokens / seconds) / (base_tokens / base_seconds)

    everything = range(len(members))
    return speedup(everything, range(num_repeats)), bootstrap_interval(
        everything, speedup, seed, num_repeats
    )


def count_dialogues(rows: Iterable[Mapping[str, Any]]) -> int:
    """Count the dialogues of rows of a results file."""
    return len({row["dialogue"] for row in rows})


def compare_tau(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], seed: int
) -> tuple[float, Interval]:
    """Compute tau of the second minus the first, and its 95% interval over paired dialogues.

    Args:
        first: rows of `PromptSteps.build_row`.
        second: rows of the same prompts, in the same order.
        seed: seed of the resampling.
    """
    for one, other in zip(first, second, strict=True):
        assert (one["dialogue"], one["turn"]) == (other["dialogue"], other["turn"])
    return compare_tau_sums(sum_by_dialogue(first), sum_by_dialogue(second), seed)


def compare_tau_sums(
    first: Sequence[Ratio], second: Sequence[Ratio], seed: int
) -> tuple[float, Interval]:
    """Compute `compare_tau` from emitted tokens and passes of each dialogue."""
    pairs = list(zip(first, second, strict=True))

    def difference(drawn: Sequence[tuple[Ratio, Ratio]], _runs: object = None) -> float:
        return compute_tau([new for _, new in drawn]) - compute_tau([old for old, _ in drawn])

    return difference(pairs), bootstrap_interval(pairs, difference, seed)


def sum_by_dialogue(rows: Sequence[Mapping[str, Any]]) -> list[Ratio]:
    """Sum emitted tokens and passes over each dialogue's rows of `PromptSteps.build_row`."""
    dialogues = group_by(rows, lambda row: row["dialogue"]).values()
    emitted = [[tokens for row in group for tokens in row["emitted"]] for group in dialogues]
    return [(sum(tokens), len(tokens)) for tokens in emitted]


def compute_tau(sums: Iterable[Ratio]) -> float:
    """Compute tau from emitted tokens and verify passes; 1.0 without passes."""
    sums = list(sums)
    num_steps = sum(passes for _, passes in sums)
    return sum(tokens for tokens, _ in sums) / num_steps if num_steps else 1.0


def compute_waits_ms(
    repeats: Sequence[Sequence[Sequence[float]]],
) -> dict[str, dict[str, float] | None]:
    """Compute the waits for the first token of a text, and from one arrival to the next, in ms.

    Args:
        repeats: seconds from a text's start to its arrivals, of each text in each repeat.
    """
    gaps = [[b - a for text in texts for a, b in pairwise(text)] for texts in repeats]
    first = [[seconds for text in texts for seconds in text[:1]] for texts in repeats]
    return {
        "first_token_ms": compute_percentiles_ms(first),
        "between_tokens_ms": compute_percentiles_ms(gaps),
    }


def compute_percentiles_ms(repeats: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Compute `p50` and `p99` in ms of waits in s: of each the median over repeats.

    None if a repeat has no waits.
    """
    if not all(repeats):
        return None
    ordered = [sorted(1000 * seconds for seconds in waits) for waits in repeats]
    return {
        label: statistics.median(waits[int(share * (len(waits) - 1))] for waits in ordered)
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def format_shown_interval(bounds: Sequence[float] | None, num_dialogues: int) -> str:
    """Format an interval for a table; `few` for fewer than `FEWEST_DIALOGUES` dialogues."""
    few = bounds is not None and num_dialogues < FEWEST_DIALOGUES
    return "few" if few else format_interval(bounds)


def format_interval(bounds: Sequence[float] | None, digits: int = 2, between: str = "-") -> str:
    """Format an interval; a dash if there is none."""
    return "-" if bounds is None else between.join(f"{bound:.{digits}f}" for bound in bounds)
