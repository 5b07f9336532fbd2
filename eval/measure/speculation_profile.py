"""Measured acceptance that travels with a head, and the number of draft tokens that follows.

`speculation_profile.json` has the keys of Model-Optimizer's `examples/specdec_bench`, schema 1.0:
entry i of both lists of rates concerns draft token i + 1; lengths count the target's own token.

Sources: NVIDIA/Model-Optimizer `examples/specdec_bench/specdec_bench/speculation_profile.py` and
`examples/speculative_decoding/scripts/attach_speculation_profile.py` (pull requests 2247, 2313).
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import load_json
from eval.measure.acceptance_stats import (
    FEWEST_DIALOGUES,
    PassCounts,
    compute_length_interval,
    count_dialogues,
)
from heads.draft_head import DraftHead, EngineAdvice
from heads.folders import PROFILE

SCHEMA_VERSION = "1.0"
PRODUCER = "Headsmith"
NEEDED = ("per_position", "histogram", "acceptance_length", "by_category", "num_prompts", "mode")
"""Keys of an `acceptance.json` that a profile is made of; files of old versions lack some."""
DRAFT_COST = 0.115
"""Time of a draft token, drafting and checking, over a step without drafts: four take 0.46 (EAGLE-3
for an 8B target, H200: docs/results/gpu.md)."""
TOLERANCE = 0.02
"""Largest distance of the mean from its rates that Model-Optimizer lets pass."""
CHAIN = "chain_analytic"
"""Model of lengths by which a measurement tells of shorter drafts as well."""
OURS, THEIRS = "drafts", "first_pass"
"""What mean lengths of Headsmith and of Model-Optimizer count, as in `LENGTH_DEFINITIONS`."""
CARD = "README.md"
CARD_TAU = re.compile(r"is \*\*([\d.]+)\*\* for the top-1 chain over (\d+) prompts")
CARD_DEPTHS = re.compile(r"^\| depth \| .*\n\|[-|]+\n((?:\| \d+ \| .*\n?)+)", re.MULTILINE)
"""The sentence with tau, and the rows by depth, of a model card (scripts/publish/model_card.py)."""


def build_profile(
    head: DraftHead, name: str, provenance: dict[str, Any], result: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Build the content of `speculation_profile.json` from a head's `acceptance.json`.

    Args:
        head: the measured head.
        name: Hub id or folder of the head.
        provenance: content of the head's `headsmith.json`.
        result: content of `acceptance.json`.

    Returns:
        The content; None if `acceptance.json` lacks figures.
    """
    if any(key not in result for key in NEEDED):
        return None
    facts, stated = head.build_card_facts(provenance), result.get("conditions") or {}
    rates = list(result["per_position"])
    num_tokens, before = len(rates), [1.0, *rates]
    counts = {1 + accepted: count for accepted, count in enumerate(result["histogram"]) if count}
    num_passes = sum(counts.values())
    mean = sum(length * count for length, count in counts.items()) / max(1, num_passes)
    implied = 1 + sum(rates)
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": num_passes > 0,
        "method": facts.vllm_method or facts.tag,
        "draft_checkpoint": {"name": name},
        "target_model": {"name": head.target_name},
        "num_speculative_tokens": num_tokens,
        "block_size": vars(head.config).get("block_size"),
        "max_supported_k": head.max_draft_tokens or num_tokens,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [
            round(rate / last, 6) if last else 0.0 for last, rate in pairwise(before)
        ],
        "marginal_accept_rates": [round(rate, 6) for rate in rates],
        "mean_accept_length": round(mean, 6),
        "mean_accept_length_per_request": result["acceptance_length"][OURS]["turns"],
        "accept_length_model": CHAIN if drafts_in_turn(head) else "measured_per_k",
        "accept_length_by_k": {str(num_tokens): round(mean, 6)},
        "acceptance_length_histogram": {str(length): count for length, count in counts.items()},
        "per_category": {
            category: {"mean_accept_length": row.get("per_draft")}
            for category, row in result["by_category"].items()
        },
        "measurement_conditions": {
            "engine": PRODUCER,
            "dataset": stated.get("data"),
            "num_samples": result["num_prompts"],
            "osl": result.get("max_new_tokens"),
            "validation": result["mode"],
            **{key: stated.get(key) for key in ("turns", "sampling", "chat_template")},
            **{key: result.get(key) for key in ("target_dtype", "device")},
        },
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            "marginal_monotonicity": {
                "passed": not any(rate > last for last, rate in pairwise(before)),
                "violations": [
                    {"position": place, "value": rate, "previous": last}
                    for place, (last, rate) in enumerate(pairwise(before))
                    if rate > last
                ],
            },
        },
    }


def drafts_in_turn(head: DraftHead) -> bool:
    """Tell whether a head drafts token by token, so that a short draft begins a longer one.

    A head that drafts in one pass may draft other tokens if it drafts fewer.
    """
    return head.max_draft_tokens is None


def load_profile(folder: Path) -> dict[str, Any] | None:
    """Load the `speculation_profile.json` beside a head; None if nothing was measured.

    Raises:
        InputError: the file has no acceptance rates as Model-Optimizer writes them.
    """
    profile = load_json(folder / PROFILE)
    if profile is None or not profile.get("measured"):
        return None
    rates = profile.get("marginal_accept_rates")
    if rates is None:  # of an engine that accepts blocks as a whole
        return None
    whole = isinstance(rates, list) and rates and all(isinstance(r, int | float) for r in rates)
    if not whole or not all(0 <= rate <= 1 for rate in rates):
        raise InputError(
            f"{folder / PROFILE}: marginal_accept_rates={rates}: must be shares from 0 to 1, one "
            "per draft token; repair or remove the file"
        )
    return profile


def advise_engine(head: DraftHead, profile: dict[str, Any] | None) -> EngineAdvice:
    """Advise how many tokens an engine should draft with a head, after its measured acceptance.

    Of a chain of K tokens that are accepted in shares p_1 to p_K of all passes, the speed over
    steps without drafts is (1 + p_1 + ... + p_K) / (1 + K * DRAFT_COST). The fastest K is taken.

    Args:
        head: the head.
        profile: content of its `speculation_profile.json`; None without a measurement.
    """
    usual = head.default_depth
    if not drafts_in_turn(head):
        return EngineAdvice(
            usual, f"Draft tokens: {usual}, all of one pass of the head.", [], profile
        )
    if profile is None:
        reason = (
            f"Draft tokens: {usual}, the usual number, as nobody knows by depth what is accepted "
            "of this head."
        )
        return EngineAdvice(usual, reason)
    rates = profile["marginal_accept_rates"]
    speeds = [
        (1 + sum(rates[:number])) / (1 + number * DRAFT_COST) for number in range(1, len(rates) + 1)
    ]
    fastest = 1 + speeds.index(max(speeds))
    shares = ", ".join(f"{rate:.2f}" for rate in rates)
    reason = (
        f"Draft tokens: {fastest}. By depth, {shares} of all passes accepted a draft token, and "
        f"each costs {DRAFT_COST} of a step without drafts (8B, H200): {fastest} give the most, "
        f"{max(speeds):.2f} of the speed without drafts."
    )
    return EngineAdvice(fastest, reason, [], profile)


def compare_with_published(
    result: Mapping[str, Any], folder: Path, seed: int
) -> dict[str, Any] | None:
    """Compare a measurement with the figures that a head brings along.

    Args:
        result: figures of `acceptance.json`.
        folder: folder of the head, with its profile or its model card.
        seed: seed of the interval.

    Returns:
        Both figures for `published` in `acceptance.json`, `equal` being None where they cannot be
        compared; None if the head brings no figures.
    """
    found = _find_profile_figures(folder) or _find_card_figures(folder)
    if found is None:
        return None
    lengths, count = found.pop("lengths"), found["count"]
    texts = [PassCounts.from_row(row) for row in result["prompts"]]
    interval = compute_length_interval(texts, count, seed)
    told = lengths.get(result["draft_tokens"])
    judged = None
    if told is not None and interval and count_dialogues(result["prompts"]) >= FEWEST_DIALOGUES:
        judged = interval[0] <= told <= interval[1]
    return found | {
        "draft_tokens": result["draft_tokens"],
        "published_for": sorted(lengths),
        "published": told,
        "measured": result["acceptance_length"][count]["pooled"],
        "ci95": interval,
        "equal": judged,
    }


def _find_profile_figures(folder: Path) -> dict[str, Any] | None:
    """Find mean lengths by draft tokens in a profile, and what they count."""
    profile = load_profile(folder)
    if profile is None:
        return None
    rates, stated = profile["marginal_accept_rates"], profile.get("measurement_conditions") or {}
    lengths = {int(key): mean for key, mean in (profile.get("accept_length_by_k") or {}).items()}
    if profile.get("accept_length_model") == CHAIN:
        shorter = range(1, len(rates) + 1)
        lengths = {number: 1 + sum(rates[:number]) for number in shorter} | lengths
    return {
        "source": PROFILE,
        "lengths": lengths,
        "count": OURS if stated.get("engine") == PRODUCER else THEIRS,
        "num_prompts": stated.get("num_samples"),
        "data": stated.get("dataset"),
    }


def _find_card_figures(folder: Path) -> dict[str, Any] | None:
    """Find tau of chains in the model card of a head that `scripts/push.py` published."""
    if not (folder / CARD).is_file():
        return None
    text = (folder / CARD).read_text(encoding="utf-8")
    said, depths = CARD_TAU.search(text), CARD_DEPTHS.search(text)
    if said is None or depths is None:
        return None
    return {
        "source": "its model card",
        "lengths": {len(depths[1].splitlines()): float(said[1])},
        "count": "passes",
        "num_prompts": int(said[2]),
        "data": None,
    }
