"""Describes the conditions of a result, for its file, its table and its pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHORT = 8
"""Digits of a checksum to show."""


def describe_conditions(result: Mapping[str, Any]) -> dict[str, str | int | None]:
    """Collect the conditions that figures of acceptance depend on, besides target and head.

    Args:
        result: other contents of `acceptance.json` or `speedup.json`.

    Returns:
        `draft_sample_method` and `rejection_sample_method` are vLLM's words. A `greedy` draft token
        is the drafter's likeliest, a `probabilistic` one was sampled, and `standard` accepts it by
        p/q, one token after the other.
    """
    temperature = result["temperature"]
    chains = "probabilistic in chains, greedy in trees and copies"
    trees = "standard; in trees the rule for candidates that were not drawn"
    return {
        "data": _format_data(result["data"]),
        "turns": _format_turns(result["num_turns"], result["data"].get("most_turns")),
        "draft_tokens": result.get("draft_tokens"),  # speedup.json has each method's own
        "sampling": _format_sampling(result),
        "draft_sample_method": chains if temperature else "greedy",
        "rejection_sample_method": trees if temperature else "standard",
        "max_new_tokens": result["max_new_tokens"],
        "chat_template": (result.get("target_identity") or {}).get("template"),
    }


def format_conditions(result: Mapping[str, Any]) -> str:
    """Show a result's conditions on one line; empty for old results."""
    found = result.get("conditions")
    if not found:
        return ""
    template = str(found["chat_template"] or "none")[:SHORT]
    length = found["draft_tokens"]
    return "; ".join(
        [
            f"{found['data']}, {found['turns']}",
            str(found["sampling"]),
            *([] if length is None else [f"chains of {length} draft tokens"]),
            f"drafts {found['draft_sample_method']}",
            f"rejection {found['rejection_sample_method']}",
            f"at most {found['max_new_tokens']} new tokens",
            f"chat template {template}",
        ]
    )


def _format_data(data: Mapping[str, Any]) -> str:
    """`nvidia/SPEED-Bench qualitative, test, version a1b2c3d4`; of a local path the last part."""
    path = str(data["path"])
    name = Path(path).name if Path(path).exists() else path
    parts = [" ".join(filter(None, (name, data.get("subset"))))]
    if data.get("split") not in (None, "train"):
        parts.append(data["split"])
    digits = data.get("version") or data["sha256"]
    word = "version" if data.get("version") else "sha256"
    return ", ".join([*parts, f"{word} {digits[:SHORT]}"])


def _format_turns(asked: int, most: int | None) -> str:
    """Describe the turns asked: vLLM asks only the first, Model-Optimizer asks all."""
    if most is not None and asked >= most:
        return "all turns"
    beyond = "" if most is None else f" of up to {most}"
    return f"first turns alone{beyond}" if asked == 1 else f"first {asked} turns{beyond}"


def _format_sampling(result: Mapping[str, Any]) -> str:
    if not result["temperature"]:
        return "greedy"
    usual = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
    changed = [f"{key} {result[key]:g}" for key, value in usual.items() if result[key] != value]
    return ", ".join([f"temperature {result['temperature']:g}", *changed])
