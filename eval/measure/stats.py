"""tau, alpha and their intervals, from verify steps.

tau: mean tokens emitted per verify pass, bonus token included, over all passes of all prompts
(micro mean); the token that the prefill gives is not counted. alpha_d: share of passes that
kept depth d among those that kept depth d - 1 and whose text was long enough to test depth d.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from eval.decode.engine import Step

Item = TypeVar("Item")
NUM_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class PromptSteps:
    """The verify passes of one prompt."""

    category: str
    steps: Sequence[Step]
    num_thinking: int = 0
    """Tokens of its response, from the first on, that are thinking."""


def tau(prompts: Sequence[PromptSteps]) -> float:
    """Tokens per verify pass; 1.0 where nothing was to be verified."""
    steps = [step for prompt in prompts for step in prompt.steps]
    return sum(step.num_emitted for step in steps) / len(steps) if steps else 1.0


def alpha(prompts: Sequence[PromptSteps], depth: int) -> list[float]:
    """Conditional acceptance per depth, 0.0 for a depth never reached."""
    steps = [step for prompt in prompts for step in prompt.steps]
    rates = []
    for d in range(1, depth + 1):
        reached = [step for step in steps if step.num_accepted >= d - 1 and step.num_left >= d]
        kept = sum(step.num_accepted >= d for step in reached)
        rates.append(kept / len(reached) if reached else 0.0)
    return rates


def per_position(prompts: Sequence[PromptSteps], depth: int) -> list[float]:
    """Share of all verify passes that kept depth d (vLLM's per-position acceptance)."""
    steps = [step for prompt in prompts for step in prompt.steps]
    return [
        sum(step.num_accepted >= d for step in steps) / len(steps) if steps else 0.0
        for d in range(1, depth + 1)
    ]


def by_part(prompts: Sequence[PromptSteps]) -> dict[str, dict[str, float]]:
    """tau and tokens of thinking and of answers; empty where nothing thinks.

    A pass belongs to the part of the first token that it gives.
    """
    if not any(prompt.num_thinking for prompt in prompts):
        return {}
    parts: dict[str, list[Step]] = {"thinking": [], "answer": []}
    for prompt in prompts:
        place = 1  # the prompt's own pass gives the first token
        for step in prompt.steps:
            parts["thinking" if place < prompt.num_thinking else "answer"].append(step)
            place += step.num_emitted
    return {
        name: {
            "tau": tau([PromptSteps("", steps)]),
            "num_tokens": sum(step.num_emitted for step in steps),
        }
        for name, steps in parts.items()
    }


def interval(
    items: Sequence[Item], figure: Callable[[Sequence[Item]], float], seed: int
) -> tuple[float, float]:
    """95% bootstrap interval of a figure.

    Args:
        items: what is drawn from with replacement, as often as there are items.
        figure: of drawn items, in their order.
        seed: of the draws.

    Returns:
        The 2.5th and 97.5th percentile, in the unit of the figure.
    """
    rng = random.Random(seed)
    draws = sorted(figure(rng.choices(items, k=len(items))) for _ in range(NUM_BOOTSTRAPS))
    return draws[int(0.025 * NUM_BOOTSTRAPS)], draws[int(0.975 * NUM_BOOTSTRAPS)]


def tau_interval(prompts: Sequence[PromptSteps], seed: int) -> tuple[float, float]:
    """95% bootstrap interval of tau over prompts, in tokens per verify pass."""
    return interval(prompts, tau, seed)


def tree_figures(result: dict[str, Any]) -> dict[str, Any]:
    """The tree's part of an `acceptance.json`."""
    return result["static_tree"] if "static_tree" in result else result["dynamic_tree"]


def summary(prompts: Sequence[PromptSteps], depth: int, seed: int) -> dict[str, object]:
    """The figures of `acceptance.json` that come from the steps alone."""
    categories = sorted({prompt.category for prompt in prompts})
    by_category = {name: [p for p in prompts if p.category == name] for name in categories}
    return {
        "tau": tau(prompts),
        "tau_ci95": tau_interval(prompts, seed),
        "alpha": alpha(prompts, depth),
        "per_position": per_position(prompts, depth),
        "by_category": {
            name: {
                "tau": tau(members),
                "ci95": tau_interval(members, seed),
                "alpha": alpha(members, depth),
                "num_prompts": len(members),
            }
            for name, members in by_category.items()
        },
        "by_part": by_part(prompts),
        "num_prompts": len(prompts),
        "num_tokens": sum(step.num_emitted for prompt in prompts for step in prompt.steps),
        "num_steps": sum(len(prompt.steps) for prompt in prompts),
    }
