"""Conditions of a result in words, and its figures in formats of other tools.

The formats are vLLM's acceptance per request, and files of golden lengths.

Sources: vLLM 0.32 `entrypoints/generate/base/protocol.py`, `v1/metrics/stats.py`
(`RequestSpecDecodeMetrics`), `config/speculative.py`; SGLang `speculative/spec_utils.py`;
InferenceX `golden_al_distribution/`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import write_atomically
from eval.measure.acceptance_stats import (
    compute_mean_acceptance_length,
    count_accepted_histogram,
    select_tree_figures,
)
from eval.measure.modes import THINKING

SHORT = 8
"""Digits of a checksum to show."""
GOLDEN = "golden.yaml"
"""Name of a file of golden lengths."""
PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
"""Words that YAML reads as text without quotes."""
SIMULATED = (
    "SGLANG_SIMULATE_ACC_METHOD=match-expected SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token"
)


def build_markdown_table(lines: Sequence[Sequence[Any]]) -> str:
    """Build a Markdown table, its header first; bars and line breaks of cells are escaped."""
    header, *others = (
        "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
        for cells in lines
    )
    return "\n".join([header, "|---" * len(lines[0]) + "|", *others])


def describe_conditions(result: Mapping[str, Any]) -> dict[str, str | int | None]:
    """Describe the conditions that figures of acceptance depend on, besides target and head.

    Args:
        result: other contents of `acceptance.json` or `speedup.json`.

    Returns:
        Conditions by name. `draft_sample_method` and `rejection_sample_method` are vLLM's words: a
        `greedy` draft token is the drafter's likeliest, a `probabilistic` draft token was sampled,
        and `standard` accepts it by p/q, one token after the other.
    """
    temperature, asked = result["temperature"], result["num_turns"]
    sampling, turns = "greedy", "all turns"
    if temperature:
        usual = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
        changed = [f"{key} {result[key]:g}" for key, value in usual.items() if result[key] != value]
        sampling = ", ".join([f"temperature {temperature:g}", *changed])
    most = result["data"].get("most_turns")
    if most is None or asked < most:  # vLLM asks the first turn alone, Model-Optimizer asks all
        turns = "first turns alone" if asked == 1 else f"first {asked} turns"
        turns += "" if most is None else f" of up to {most}"
    chains = "probabilistic in chains, greedy in trees and copies"
    trees = "standard; in trees the rule for candidates that were not drawn"
    return {
        "data": _format_data(result["data"]),
        "turns": turns,
        "draft_tokens": result.get("draft_tokens"),  # speedup.json has each method's own
        "sampling": sampling,
        "draft_sample_method": chains if temperature else "greedy",
        "rejection_sample_method": trees if temperature else "standard",
        "max_new_tokens": result["max_new_tokens"],
        "chat_template": (result.get("target_identity") or {}).get("template"),
    }


def format_conditions(result: Mapping[str, Any]) -> str:
    """Format a result's conditions on one line; empty for old results."""
    conditions = result.get("conditions")
    if not conditions:
        return ""
    template = str(conditions["chat_template"] or "none")[:SHORT]
    length = conditions["draft_tokens"]
    return "; ".join(
        [
            f"{conditions['data']}, {conditions['turns']}",
            str(conditions["sampling"]),
            *([] if length is None else [f"chains of {length} draft tokens"]),
            f"drafts {conditions['draft_sample_method']}",
            f"rejection {conditions['rejection_sample_method']}",
            f"at most {conditions['max_new_tokens']} new tokens",
            f"chat template {template}",
        ]
    )


def _format_data(data: Mapping[str, Any]) -> str:
    """Name the data, e.g. `nvidia/SPEED-Bench qualitative, test, version a1b2c3d4`.

    Of a local path, the last part is named.
    """
    path = str(data["path"])
    name = Path(path).name if Path(path).exists() else path
    parts = [" ".join(filter(None, (name, data.get("subset"))))]
    if data.get("split") not in (None, "train"):
        parts.append(data["split"])
    digits = data.get("version") or data["sha256"]
    word = "version" if data.get("version") else "sha256"
    return ", ".join([*parts, f"{word} {digits[:SHORT]}"])


def export_results(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write files for other tools beside a result.

    Args:
        result: contents of `acceptance.json` or `speedup.json`.
        folder: folder of the result.

    Returns:
        The paths of the files: `requests.jsonl`, and `golden.yaml` if a chain was measured. For
            `speedup.json`, which may be in the same folder, `requests_speedup.jsonl` and a golden
            file per method with chains.

    Raises:
        InputError: the files cannot be written.
    """
    if "methods" in result:
        names = "requests_speedup.jsonl", "golden_{}.yaml"
        methods = {name: row for name, row in result["methods"].items() if row["num_drafted"]}
    else:
        names = "requests.jsonl", GOLDEN
        methods = {"chain": result, "tree": select_tree_figures(dict(result))}
    lines = [
        json.dumps(row) for name, row in methods.items() for row in iter_request_metrics(name, row)
    ]
    files = {folder / names[0]: "".join(line + "\n" for line in lines)}
    for name, row in methods.items():
        if is_chain(name, row):
            text = format_golden_lengths({row["draft_tokens"]: row}, result)
            files[folder / names[1].format(name)] = text
    return write_files(files, f"out_dir={folder}")


def write_files(files: Mapping[Path, str], setting: str) -> list[Path]:
    """Write files, each completely or not at all; return their paths.

    Args:
        files: texts by path.
        setting: setting that names the place, for messages.

    Raises:
        InputError: a file cannot be written.
    """
    try:
        for path, text in files.items():
            write_atomically(path, text)
    except OSError as error:
        raise InputError(f"{setting}: cannot write there: {error}") from error
    return list(files)


def is_chain(name: str, row: Mapping[str, Any]) -> bool:
    """Tell whether every draft was a chain of one length, as golden files require."""
    sizes = {size for text in row["prompts"] for size in text["drafted"]} - {0}
    parents = (row.get("tree") or {}).get("parents") if name != "chain" else [0]
    chain = parents is not None and list(parents[1:]) == list(range(len(parents) - 1))
    return chain and sizes <= {row["draft_tokens"]}


def iter_request_metrics(method: str, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield vLLM's answer fields per text, as under `--per-request-spec-decode-metrics detailed`.

    Args:
        method: name of the method.
        row: figures of the method.
    """
    for text in row["prompts"]:
        written = text.get("num_tokens", 1 + sum(text["emitted"]))
        usage = {"prompt_tokens": text["prompt_tokens"], "completion_tokens": written}
        yield {
            "id": f"{text['dialogue']}.{text['turn']}",
            "method": method,
            "category": text["category"],
            "usage": usage | {"total_tokens": sum(usage.values())},
            "metrics": {"speculative_decoding": build_vllm_metrics(text, row["draft_tokens"])},
        }


def build_vllm_metrics(text: Mapping[str, Any], draft_tokens: int) -> dict[str, Any]:
    """Build vLLM's object for a text, which covers only passes with drafts.

    Args:
        text: row of `PromptSteps.build_row`.
        draft_tokens: largest number of draft tokens per pass.
    """
    sizes = text["drafted"] or [draft_tokens] * len(text["accepted"])
    steps = [pair for pair in zip(text["accepted"], sizes, strict=True) if pair[1]]
    accepted, drafted = [num for num, _ in steps], [size for _, size in steps]
    proposed = sum(drafted)
    return {
        "mean_acceptance_length": compute_mean_acceptance_length([text]) or 1.0,
        "draft_acceptance_rate": sum(accepted) / proposed if proposed else 0.0,
        "acceptance_histogram": count_accepted_histogram([{"accepted": accepted}], draft_tokens),
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": proposed,
        "num_spec_tokens": draft_tokens,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def format_golden_lengths(rows: Mapping[int, Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    """Format a golden file: acceptance lengths by draft tokens, and settings to simulate them.

    Args:
        rows: figures of chains, by their number of draft tokens.
        result: result that contains one of these chains.
    """
    lengths = {
        size: compute_mean_acceptance_length(row["prompts"]) or 1.0
        for size, row in sorted(rows.items())
    }
    target = str((result.get("target_identity") or {}).get("name") or result.get("target"))
    spans = [text.get("spans", ()) for row in rows.values() for text in row["prompts"]]
    thinking = "thinking_on" if any(THINKING in each for each in spans) else "thinking_off"
    kwargs = ((result.get("config") or {}).get("data") or {}).get("chat_template_kwargs") or {}
    last, length = list(lengths.items())[-1]
    texts = [build_vllm_metrics(text, last) for text in rows[last]["prompts"]]
    drafts = sum(text["num_spec_steps"] for text in texts) or 1
    counts = [sum(c) for c in zip(*(text["acceptance_histogram"] for text in texts), strict=True)]
    # Of drafts accepted to each depth, the share; never rising, as vLLM requires.
    rates = [round(sum(counts[depth:]) / drafts, 4) for depth in range(1, last + 1)]
    model = Path(target).name.lower()
    comments = [
        f"Acceptance lengths, 1 + accepted / drafts, of {result.get('head') or 'drafts'} on "
        f"{target}, measured by Headsmith {result.get('git') or ''}".rstrip()
        + ".",
        f"{format_conditions(result)}",
        f"{thinking} chat_template_kwargs: {json.dumps(kwargs)}",
        "To make an engine accept the same share of any draft, use",
        f'vLLM: "num_speculative_tokens": {last}, "rejection_sample_method": "synthetic", '
        f'"synthetic_acceptance_length": {length:.4f} in --speculative-config',
        f'  or, depth by depth, "synthetic_acceptance_rates": {rates}',
        f"SGLang: SGLANG_SIMULATE_ACC_LEN={length:.4f} {SIMULATED} before its command, which "
        f"drafts {last} tokens",
        "key = num_speculative_tokens; value = acceptance length",
    ]
    lines = [
        *("# " + " ".join(line.splitlines()) for line in comments if line),
        f"{model if PLAIN.fullmatch(model) else json.dumps(model)}:",
        f"  {thinking}:",
        *(f"    {size}: {length:.4f}" for size, length in lengths.items()),
    ]
    return "\n".join(lines) + "\n"
