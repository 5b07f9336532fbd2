"""Acceptance figures in files of Headsmith, and of vLLM's own benchmark.

Both are read into one form: one figure per definition of `eval/measure/acceptance_stats.py` that
the tool has, with the conditions that the file states. Conditions that a file omits are not
compared. Checks of fields raise `MalformedRowError`.

Source: vLLM 0.32 `benchmarks/serve.py`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

from conf.errors import InputError
from data.rows.field_checks import MalformedRowError, format_found_value, parse_text
from eval.measure.acceptance_stats import LENGTH_DEFINITIONS, MEANS, count_dialogues

Definition = tuple[str, str]
"""Definition of an acceptance length: a key of LENGTH_DEFINITIONS and one of MEANS."""
RESULT_FILE_NAME = "acceptance.json"
"""Name of the file that `eval/acceptance.py` writes anew for every measurement."""
LONGEST = 10_000
"""Largest number of tokens of a pass, above any draft."""
ROUNDING = 1e-6
"""Relative difference of a figure from its sources that rounding explains."""
MOST = 1e15
"""Upper bound of every count; larger values are errors."""
FIRST, ALL = "first alone", "all"
"""Turns that were asked."""
TREES = ("static_tree", "dynamic_tree")
"""Keys of the tree's figures in an `acceptance.json`."""
CONDITIONS = (
    "data", "turns", "sampling", "draft_tokens", "draft_sample_method", "rejection_sample_method",
    "max_new_tokens", "chat_template",
)  # fmt: skip
"""Keys of `conditions` in an `acceptance.json`."""


@dataclass(frozen=True)
class ReportedAcceptance:
    """Figures of a file.

    Attributes:
        tool: tool that wrote the file.
        lengths: acceptance lengths by definition.
        per_position: share of passes with drafts that accepted each depth; empty if unknown.
        conditions: conditions that the file states, by name.
    """

    tool: str
    lengths: dict[Definition, float]
    per_position: list[float] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)


def find_result_file(path: str) -> tuple[str, Path]:
    """Find the file that a path names, and its name in the table.

    Args:
        path: file, or folder with one.

    Raises:
        InputError: no file, or several.
    """
    given = Path(path)
    if given.suffix == ".json" and not given.is_dir():
        return given.parent.resolve().name if given.name == RESULT_FILE_NAME else given.stem, given
    own = given / RESULT_FILE_NAME
    if not given.is_dir():
        return given.name, own  # reading it will report that it is missing
    files = [own] if own.is_file() else sorted(given.glob("*.json"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise InputError(
            f"results={given}: must hold {RESULT_FILE_NAME} or the JSON file of vllm bench serve, "
            f"but holds {names}; name the file"
        )
    return given.resolve().name, files[0]


def load_reported_acceptance(file: Path) -> ReportedAcceptance:
    """Read the figures of a file.

    Raises:
        InputError: the file cannot be read, is of no known tool, or is damaged.
    """
    try:
        whole = parse_object(_load_json(file), "(whole file)")
        return _parse_own_result(whole) if "prompts" in whole else _parse_vllm_result(whole)
    except MalformedRowError as error:
        raise InputError(f"results: {file}: {error}") from None


def _load_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"results: cannot read {file}: {error}") from error


def _parse_own_result(row: Mapping[str, Any]) -> ReportedAcceptance:
    if "served" in row:
        raise MalformedRowError(
            "served",
            "a result of eval/serve.py",
            "acceptance.json; serve.json holds its own comparison, under served and replayed",
        )
    if "acceptance_length" not in row:
        raise MalformedRowError(
            "acceptance_length",
            "nothing",
            "a result of the current eval/acceptance.py; measure again",
        )
    table = parse_object(row["acceptance_length"], "acceptance_length", "figures by definition")
    lengths: dict[Definition, float] = {}
    for count in LENGTH_DEFINITIONS:
        means = parse_object(table.get(count), f"acceptance_length.{count}", "figures by mean")
        for mean in MEANS:
            if means.get(mean) is not None:
                name = f"acceptance_length.{count}.{mean}"
                lengths[count, mean] = parse_number(means[mean], name, 0)
    texts = parse_items(row["prompts"], "prompts", _parse_text_row)
    data = parse_object(row.get("data"), "data", "what was measured on")
    asked, most = parse_whole_number(row.get("num_turns"), "num_turns", 1), data.get("most_turns")
    most = parse_whole_number(most, "data.most_turns", 1)
    identity = parse_object(row.get("target_identity"), "target_identity", "the target")
    stated = {
        "draft tokens": parse_whole_number(row.get("draft_tokens"), "draft_tokens", 1, LONGEST),
        "texts": len(texts),
        "dialogues": count_dialogues(texts),
        "turns": ALL if asked >= most else FIRST if asked == 1 else f"first {asked}",
        "target": _parse_target_name(identity.get("name"), "target_identity.name"),
        "temperature": parse_number(row.get("temperature"), "temperature", 0),
        "new tokens": parse_whole_number(row.get("max_new_tokens"), "max_new_tokens", 1),
    }
    if most == 1:
        del stated["turns"]
    rates = parse_items(row.get("per_position"), "per_position", parse_fraction)
    return ReportedAcceptance("Headsmith", lengths, rates, stated)


def _parse_vllm_result(row: Mapping[str, Any]) -> ReportedAcceptance:
    names = ("num_drafts", "accepted_tokens", "acceptance_length")
    prefixed = tuple(f"spec_decode_{name}" for name in names)
    if prefixed[2] not in row:
        raise MalformedRowError(
            prefixed[2], "nothing", "a result of vllm bench serve against a server that drafts, "
            "or an acceptance.json of eval/acceptance.py",
        )  # fmt: skip
    drafts = parse_whole_number(row.get(prefixed[0]), prefixed[0], 1)
    accepted = parse_whole_number(row.get(prefixed[1]), prefixed[1])
    length = parse_number(row.get(prefixed[2]), prefixed[2], 1)
    sources = f"{prefixed[1]} and {prefixed[0]}"
    check_consistent(length, 1 + accepted / drafts, prefixed[2], sources)
    key = "spec_decode_per_position_acceptance_rates"
    rates = parse_items(row.get(key), key, parse_fraction)
    check_consistent(sum(rates), accepted / drafts, f"sum of {key}", sources)
    if failed := parse_whole_number(row.get("failed", 0), "failed"):
        raise MalformedRowError("failed", f"{failed} requests", "0, as others answered them")
    stated = {
        "draft tokens": len(rates),
        "texts": parse_whole_number(row.get("completed"), "completed", 1),
        "turns": FIRST,
        "target": _parse_target_name(row.get("model_id"), "model_id"),
    }
    return ReportedAcceptance("vLLM", {("drafts", "pooled"): 1 + accepted / drafts}, rates, stated)


def _parse_target_name(value: object, name: str) -> str:
    return parse_text(value, name).rstrip("/").rsplit("/", 1)[-1].lower()


def check_comparable(results: Mapping[str, ReportedAcceptance]) -> list[Definition]:
    """Refuse results that cannot be compared.

    Args:
        results: results by name.

    Returns:
        Definitions that at least two results have, in the order of LENGTH_DEFINITIONS and MEANS.

    Raises:
        InputError: conditions differ, or a result shares no definition with another.
    """
    for (one, first), (other, second) in combinations(results.items(), 2):
        differ = [
            f"{key} {first.conditions[key]} and {second.conditions[key]}"
            for key in first.conditions
            if key in second.conditions and first.conditions[key] != second.conditions[key]
        ]
        if differ:
            raise InputError(
                f"results: {one} ({first.tool}) and {other} ({second.tool}) were measured "
                f"differently: {'; '.join(differ)}; compare results of equal conditions"
            )
    counts = Counter(definition for result in results.values() for definition in result.lengths)
    shared = [each for each in product(LENGTH_DEFINITIONS, MEANS) if counts[each] > 1]
    for name, result in results.items():
        if not {*shared} & {*result.lengths}:
            own = "; ".join(
                f"{LENGTH_DEFINITIONS[count]} ({mean})" for count, mean in result.lengths
            )
            raise InputError(
                f"results: {name} ({result.tool}) has an acceptance length that no other result "
                f"has: {own}; add an acceptance.json of eval/acceptance.py, which has all of them"
            )
    return shared


def build_comparison_rows(
    results: Mapping[str, ReportedAcceptance], shared: Sequence[Definition]
) -> list[list[str]]:
    """Build a header and one row per result; figures that a tool omits stay empty."""
    definitions = [f"{LENGTH_DEFINITIONS[count]} ({mean})" for count, mean in shared]
    lines = [["result", "tool", "draft tokens", "texts", *definitions, "per position"]]
    for name, result in results.items():
        stated = (result.conditions.get(key) for key in ("draft tokens", "texts"))
        figures = (result.lengths.get(definition) for definition in shared)
        lines.append(
            [
                name,
                result.tool,
                *("" if value is None else f"{value:g}" for value in stated),
                *("" if figure is None else f"{figure:.3f}" for figure in figures),
                " ".join(f"{rate:.2f}" for rate in result.per_position),
            ]
        )
    return lines


def load_acceptance_json(file: Path) -> dict[str, Any]:
    """Read an `acceptance.json`, and check everything that a comparison reads.

    Raises:
        InputError: the file cannot be read, or is damaged.
    """
    row = _load_json(file)
    if not isinstance(row, dict) or "prompts" not in row:
        raise InputError(f"results={file}: holds no prompts; measure again")
    try:
        _check_own(row)
    except MalformedRowError as error:
        raise InputError(f"results: {file}: {error}") from None
    return row


def _check_own(row: dict[str, Any]) -> None:
    _check_figures(row, "")
    parse_items(row.get("alpha"), "alpha", parse_fraction)
    ends = row.get("tau_ci95", "nothing")
    if ends is not None and len(parse_items(ends, "tau_ci95", parse_number)) != 2:
        raise MalformedRowError("tau_ci95", format_found_value(ends), "two ends, or null")
    tree = next((name for name in TREES if name in row), TREES[0])
    _check_figures(parse_object(row.get(tree), tree, "the tree's figures"), f"{tree}.")
    parse_whole_number(row.get("num_prompts"), "num_prompts", 1)
    for name in ("data", "config", "config.data", "target_identity", "conditions"):
        check_optional(row, name, parse_object, "an object")
    check_optional(row, "config.data.chat_template_kwargs", parse_object, "an object")
    for name in ("head", "data.path"):
        check_optional(row, name, parse_text)
    check_optional(row, "temperature", parse_number, 0)
    check_optional(row, "agreement", parse_items, parse_fraction)
    conditions = row.get("conditions") or dict.fromkeys(CONDITIONS)
    if missing := [name for name in CONDITIONS if name not in conditions]:
        raise MalformedRowError(f"conditions.{missing[0]}", "nothing", "words")
    if "draft_tokens" in row:  # present if a reference file may be made of it
        length = parse_whole_number(row["draft_tokens"], "draft_tokens", 1, LONGEST)
        parse_items(row["prompts"], "prompts", partial(_check_golden_row, length))


def _check_figures(row: Mapping[str, Any], prefix: str) -> None:
    """Check a chain's or a tree's part of an `acceptance.json`."""
    parse_number(row.get("tau"), f"{prefix}tau")
    if not parse_items(row.get("prompts"), f"{prefix}prompts", _parse_text_row):
        raise MalformedRowError(f"{prefix}prompts", "no texts", "one at least")


def _parse_text_row(value: object, name: str) -> dict[str, Any]:
    row = parse_object(value, name, "a text")
    parse_whole_number(row.get("dialogue"), f"{name}.dialogue")
    parse_whole_number(row.get("turn"), f"{name}.turn", 1)
    parse_items(row.get("emitted"), f"{name}.emitted", parse_whole_number)
    return row


def _check_golden_row(draft_tokens: int, value: object, name: str) -> None:
    """Check a text's passes of at most `draft_tokens` draft tokens."""
    row = _parse_text_row(value, name)
    lists = {
        key: parse_items(row.get(key), f"{name}.{key}", parse_whole_number)
        for key in ("accepted", "drafted")
    }
    longest = max((n for values in lists.values() for n in values), default=0)
    if longest > draft_tokens:
        raise MalformedRowError(name, f"{longest} tokens", f"draft_tokens={draft_tokens} at most")
    lengths = [len(row["emitted"]), *map(len, lists.values())]
    if lengths[1] != lengths[0] or lengths[2] not in (0, lengths[0]):
        raise MalformedRowError(name, f"lists of {lengths} values", "one for every pass")


def parse_number(value: object, name: str, least: float = 0, most: float = MOST) -> float:
    """Check that a value is a number within limits."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        limits = f"of at least {least:g}" if most == MOST else f"from {least:g} to {most:g}"
        raise MalformedRowError(name, format_found_value(value), f"a number {limits}")
    return float(value)  # type: ignore[arg-type]


def parse_whole_number(value: object, name: str, least: int = 0, most: float = MOST) -> int:
    """Check that a value is an integer, which counters may write as 12.0."""
    number = parse_number(value, name, least, most)
    if number != int(number):
        raise MalformedRowError(name, format_found_value(value), "a whole number")
    return int(number)


parse_fraction = partial(parse_number, most=1)
"""Check that a value is a number from 0 to 1."""


def parse_object(value: object, name: str, what: str = "an object") -> dict[str, Any]:
    """Check that a value is a JSON object."""
    if not isinstance(value, dict):
        raise MalformedRowError(name, format_found_value(value), what)
    return value


def parse_items(value: object, name: str, check: Callable[[object, str], Any]) -> list[Any]:
    """Check each item of a list."""
    if not isinstance(value, list):
        raise MalformedRowError(name, format_found_value(value), "a list")
    return [check(item, f"{name}[{place}]") for place, item in enumerate(value)]


def check_optional(row: Mapping[str, Any], path: str, check: Callable[..., Any], *how: Any) -> None:
    """Check a field named by a path, of which any part may be missing or null."""
    value: Any = row
    for name in path.split("."):
        value = None if value is None else value.get(name)
    if value is not None:
        check(value, path, *how)


def check_consistent(value: float, expected: float, name: str, sources: str) -> None:
    """Refuse a figure that contradicts the figures it is computed from."""
    if abs(value - expected) > ROUNDING * max(1.0, abs(expected)):
        raise MalformedRowError(name, f"{value:g}", f"{expected:g}, as {sources} give")
