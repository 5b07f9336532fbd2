"""Acceptance figures in files of Headsmith, vLLM, Model-Optimizer and speculators.

All are read into one form: one figure per definition of `eval/measure/lengths.py` that the tool
has, with the conditions that the file states. Conditions that a file omits are not compared.

Sources: vLLM 0.32 `benchmarks/serve.py`; Model-Optimizer `examples/specdec_bench` (`run.py`,
`specdec_bench/metrics/acceptance_rate.py`, `utils.py`); speculators `scripts/evaluate/evaluate.py`
and `perf_utils.py`.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from conf.errors import InputError
from data.rows.values import MalformedRowError, format_found_value
from eval.compare.checks import (
    check_fits,
    if_there,
    items_of,
    number_of,
    object_of,
    share_of,
    text_of,
    whole_of,
)
from eval.measure.lengths import COUNTS, MEANS

Definition = tuple[str, str]
"""What is counted, and what the mean is over."""
NAMES = ("acceptance.json", "acceptance_rate.json", "acceptance.csv")
"""Names of files that each tool writes anew for every measurement."""
LONGEST = 10_000
"""Largest number of tokens of a pass, above any draft."""
FIRST, ALL = "first alone", "all"
TREES = ("static_tree", "dynamic_tree")
CONDITIONS = (
    "data", "turns", "sampling", "draft_tokens", "draft_sample_method", "rejection_sample_method",
    "max_new_tokens", "chat_template",
)  # fmt: skip


@dataclass(frozen=True)
class Reported:
    """Figures of a file.

    Attributes:
        tool: tool that wrote the file.
        lengths: acceptance lengths by definition.
        per_position: share of passes with drafts that accepted each depth; empty if unknown.
        stated: conditions that the file states, by name.
    """

    tool: str
    lengths: dict[Definition, float]
    per_position: list[float] = field(default_factory=list)
    stated: dict[str, Any] = field(default_factory=dict)


def find(path: str) -> tuple[str, Path]:
    """Find the file of a path, and its name in the table.

    Args:
        path: file, or folder with one.

    Raises:
        InputError: no file, or several.
    """
    given = Path(path)
    if given.suffix in (".json", ".csv") and not given.is_dir():
        return given.parent.resolve().name if given.name in NAMES else given.stem, given
    if not given.is_dir():
        return given.name, given / NAMES[0]  # reading it will report that it is missing
    found = [given / name for name in NAMES if (given / name).is_file()]
    found = found or sorted(given.glob("*.json"))
    if len(found) != 1:
        there = ", ".join(file.name for file in found) or "none"
        raise InputError(
            f"results={given}: must hold one of {', '.join(NAMES)} or the JSON file of vllm bench "
            f"serve, but holds {there}; name the file"
        )
    return given.resolve().name, found[0]


def read(file: Path) -> Reported:
    """Read the figures of a file.

    Raises:
        InputError: the file cannot be read, is of none of these tools, or is damaged.
    """
    try:
        if file.suffix == ".csv":
            return _speculators(file.read_text(encoding="utf-8-sig"))
        content = _json(file)
        if isinstance(content, list):
            beside = file.with_name("configuration.json")
            return _model_optimizer(content, _configured(beside))
        whole = object_of(content, "(whole file)", "an object, or Model-Optimizer's list")
        return _ours(whole) if "prompts" in whole else _vllm(whole)
    except MalformedRowError as error:
        raise InputError(f"results: {file}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"results: cannot read {file}: {error}") from error


def read_own(file: Path) -> dict[str, Any]:
    """Read an `acceptance.json`, and check everything that a comparison reads.

    Raises:
        InputError: the file cannot be read, or is damaged.
    """
    row = _json(file)
    if not isinstance(row, dict) or "prompts" not in row:
        raise InputError(f"results={file}: holds no prompts; measure again")
    try:
        _check_own(row)
    except MalformedRowError as error:
        raise InputError(f"results: {file}: {error}") from None
    return row


def _check_own(row: dict[str, Any]) -> None:
    _check_figures(row, "")
    items_of(row.get("alpha"), "alpha", share_of)
    ends = row.get("tau_ci95", "nothing")
    if ends is not None and len(items_of(ends, "tau_ci95", number_of)) != 2:
        raise MalformedRowError("tau_ci95", format_found_value(ends), "two ends, or null")
    tree = next((name for name in TREES if name in row), TREES[0])
    _check_figures(object_of(row.get(tree), tree, "the tree's figures"), f"{tree}.")
    whole_of(row.get("num_prompts"), "num_prompts", 1)
    for name in ("data", "config", "config.data", "target_identity", "conditions"):
        if_there(row, name, object_of, "an object")
    if_there(row, "config.data.chat_template_kwargs", object_of, "an object")
    for name in ("head", "data.path"):
        if_there(row, name, text_of)
    if_there(row, "temperature", number_of, 0)
    if_there(row, "agreement", items_of, share_of)
    told = row.get("conditions") or dict.fromkeys(CONDITIONS)
    if missing := [name for name in CONDITIONS if name not in told]:
        raise MalformedRowError(f"conditions.{missing[0]}", "nothing", "words")
    if "draft_tokens" in row:  # present if a reference file may be made of it
        length = whole_of(row["draft_tokens"], "draft_tokens", 1, LONGEST)
        object_of(row.get("by_part"), "by_part", "figures by part")
        items_of(row["prompts"], "prompts", _golden_row(length))


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"results: cannot read {file}: {error}") from error


def check_comparable(results: Mapping[str, Reported]) -> list[Definition]:
    """Refuse results that cannot be compared.

    Args:
        results: results by name.

    Returns:
        Definitions that at least two results have, in order.

    Raises:
        InputError: conditions differ, or a result shares no definition with another.
    """
    for (one, first), (other, second) in combinations(results.items(), 2):
        differ = [
            f"{key} {first.stated[key]} and {second.stated[key]}"
            for key in first.stated
            if key in second.stated and first.stated[key] != second.stated[key]
        ]
        if differ:
            raise InputError(
                f"results: {one} ({first.tool}) and {other} ({second.tool}) were measured "
                f"differently: {'; '.join(differ)}; compare results of equal conditions"
            )
    counts: dict[Definition, int] = {}
    for result in results.values():
        for definition in result.lengths:
            counts[definition] = counts.get(definition, 0) + 1
    shared = [(c, m) for c in COUNTS for m in MEANS if counts.get((c, m), 0) > 1]
    for name, result in results.items():
        if not {*shared} & {*result.lengths}:
            own = "; ".join(f"{COUNTS[count]} ({mean})" for count, mean in result.lengths)
            raise InputError(
                f"results: {name} ({result.tool}) has an acceptance length that no other result "
                f"has: {own}; add an acceptance.json of eval/acceptance.py, which has all of them"
            )
    return shared


def _check_figures(row: Mapping[str, Any], prefix: str) -> None:
    """Check a chain's or a tree's part of an `acceptance.json`."""
    number_of(row.get("tau"), f"{prefix}tau")
    if not items_of(row.get("prompts"), f"{prefix}prompts", _text_row):
        raise MalformedRowError(f"{prefix}prompts", "no texts", "one at least")


def _text_row(value: object, name: str) -> dict[str, Any]:
    row = object_of(value, name, "a text")
    whole_of(row.get("dialogue"), f"{name}.dialogue")
    whole_of(row.get("turn"), f"{name}.turn", 1)
    items_of(row.get("emitted"), f"{name}.emitted", whole_of)
    return row


def _golden_row(draft_tokens: int) -> Callable[[object, str], None]:
    """Make a check of a text's passes, with this many draft tokens."""

    def check(value: object, name: str) -> None:
        row = _text_row(value, name)
        lists = {
            key: items_of(row.get(key), f"{name}.{key}", whole_of)
            for key in ("accepted", "drafted")
        }
        longest = max((n for values in lists.values() for n in values), default=0)
        if longest > draft_tokens:
            raise MalformedRowError(
                name, f"{longest} tokens", f"draft_tokens={draft_tokens} at most"
            )
        lengths = [len(row["emitted"]), *map(len, lists.values())]
        if lengths[1] != lengths[0] or lengths[2] not in (0, lengths[0]):
            raise MalformedRowError(name, f"lists of {lengths} values", "one for every pass")

    return check


def _drafts(row: Mapping[str, Any], names: tuple[str, str, str]) -> tuple[int, int]:
    """Read drafts and accepted tokens, and check the tool's length against them."""
    drafts = whole_of(row.get(names[0]), names[0], 1)
    accepted = whole_of(row.get(names[1]), names[1])
    length = number_of(row.get(names[2]), names[2], 1)
    check_fits(length, 1 + accepted / drafts, names[2], f"{names[1]} and {names[0]}")
    return drafts, accepted


def _target(value: object, name: str) -> str:
    return text_of(value, name).rstrip("/").rsplit("/", 1)[-1].lower()


def _vllm(row: Mapping[str, Any]) -> Reported:
    names = ("num_drafts", "accepted_tokens", "acceptance_length")
    prefixed = tuple(f"spec_decode_{name}" for name in names)
    if prefixed[2] not in row:
        raise MalformedRowError(
            prefixed[2], "nothing", "a result of vllm bench serve against a server that drafts, "
            "or an acceptance.json of eval/acceptance.py",
        )  # fmt: skip
    drafts, accepted = _drafts(row, (prefixed[0], prefixed[1], prefixed[2]))
    key = "spec_decode_per_position_acceptance_rates"
    rates = items_of(row.get(key), key, share_of)
    check_fits(sum(rates), accepted / drafts, f"sum of {key}", f"{prefixed[1]} and {prefixed[0]}")
    if failed := whole_of(row.get("failed", 0), "failed"):
        raise MalformedRowError("failed", f"{failed} requests", "0, as others answered them")
    stated = {
        "draft tokens": len(rates),
        "texts": whole_of(row.get("completed"), "completed", 1),
        "turns": FIRST,
        "target": _target(row.get("model_id"), "model_id"),
    }
    return Reported("vLLM", {("drafts", "pooled"): 1 + accepted / drafts}, rates, stated)


def _speculators(text: str) -> Reported:
    reader = csv.DictReader(text.splitlines(), strict=True)
    header = reader.fieldnames or []
    if missing := [name for name in ("subset", *DRAFTED) if name not in header]:
        raise MalformedRowError(missing[0], "no such column", "speculators' acceptance.csv")
    positions = [name for name in header if name.startswith("acceptance_at_pos_")]
    rows = []
    for number, cells in enumerate(reader, 2):
        try:
            rows.append(_subset(cells, positions))
        except MalformedRowError as error:
            name = f"{error.name} of line {number}"
            raise MalformedRowError(name, error.found, error.allowed) from None
    if not rows:
        raise MalformedRowError("(whole file)", "no rows", "a row for every subset")
    drafts = sum(row[0] for row in rows)
    return Reported(
        "speculators",
        {("drafts", "pooled"): 1 + sum(row[1] for row in rows) / drafts},
        [sum(row[0] * row[2][place] for row in rows) / drafts for place in range(len(positions))],
        {"draft tokens": len(positions), "turns": FIRST},
    )


DRAFTED = ("num_drafts", "num_accepted_tokens", "acceptance_length")


def _subset(cells: Mapping[str, Any], positions: list[str]) -> tuple[int, int, list[float]]:
    """Read drafts, accepted tokens and rates per position of a row."""
    if None in cells:
        raise MalformedRowError("(whole row)", "more cells than columns", "one for each")
    row = {name: _cell(cells[name], name) for name in (*DRAFTED, *positions)}
    drafts, kept = _drafts(row, DRAFTED)
    rates = [share_of(row[name], name) for name in positions]
    check_fits(
        sum(rates), kept / drafts, "sum of acceptance_at_pos_", f"{DRAFTED[1]} and {DRAFTED[0]}"
    )
    return drafts, kept, rates


def _cell(value: object, name: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise MalformedRowError(name, format_found_value(value), "a number") from None


def _model_optimizer(runs: list[Any], configured: dict[str, Any]) -> Reported:
    if len(runs) != 1:
        allowed = "one: a folder of its own for every run (--save_dir)"
        raise MalformedRowError("(whole file)", f"{len(runs)} runs", allowed)
    run = object_of(runs[0], "[0]", "Model-Optimizer's acceptance_rate.json")
    own = object_of(run.get("Request_AL"), "Request_AL", "lengths by request")
    by_turn = all(isinstance(value, dict) for value in own.values())
    turns = [
        number_of(length, f"Request_AL.{request}", 0)
        for request, value in own.items()
        for length in (value.values() if isinstance(value, dict) else [value])
    ]
    if not turns:
        raise MalformedRowError("Request_AL", "no requests", "lengths by request")
    average = number_of(run.get("Average_AL"), "Average_AL", 0)
    check_fits(average, sum(turns) / len(turns), "Average_AL", "Request_AL")
    key = "Acceptance_Length_Histogram"
    passes = {
        whole_of(_cell(length, key), key, 0, LONGEST): whole_of(count, f"{key}.{length}")
        for length, count in object_of(run.get(key), key, "passes by tokens").items()
    }
    if not (number := sum(passes.values())):
        raise MalformedRowError(key, "no passes", "passes by tokens")
    tokens = sum(length * count for length, count in passes.items())
    lengths: dict[Definition, float] = {("first_pass", "pooled"): tokens / number}
    stated = {"dialogues": len(own), "turns": ALL, **configured}
    rates: list[float] = []
    if not by_turn:
        lengths["first_pass", "dialogues"] = average
    else:
        lengths["first_pass", "turns"] = average
        stated["texts"] = len(turns)
        if len(turns) == len(own):
            lengths["first_pass", "dialogues"] = average
            del stated["turns"]  # of dialogues of one turn each
        # The first pass of each text is the prompt's, which gives one token.
        if number > len(turns):
            own_passes = number - len(turns)
            lengths["passes", "pooled"] = (tokens - len(turns)) / own_passes
            rates = [
                sum(count for length, count in passes.items() if length > depth) / own_passes
                for depth in range(1, max(passes))
            ]
    return Reported("Model-Optimizer", lengths, rates, stated)


def _configured(file: Path) -> dict[str, Any]:
    """Read Model-Optimizer's notes beside a result, if any."""
    if not file.is_file():
        return {}
    noted = _json(file)
    if not isinstance(noted, dict):
        raise InputError(f"results: {file}: found {format_found_value(noted)}; allowed: an object")
    stated: dict[str, Any] = {}
    # Engines count a block differently for block drafters.
    if noted.get("speculative_algorithm") not in ("DFLASH", None):
        stated["draft tokens"] = noted.get("draft_length")
    stated["temperature"] = noted.get("temperature")
    stated["new tokens"] = noted.get("output_length")
    known = {key: value for key, value in stated.items() if type(value) in (int, float)}
    model = noted.get("model_dir")
    return {**known, "target": _target(model, "model_dir")} if isinstance(model, str) else known


def _ours(row: Mapping[str, Any]) -> Reported:
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
    table = object_of(row["acceptance_length"], "acceptance_length", "figures by definition")
    lengths: dict[Definition, float] = {}
    for count in COUNTS:
        means = object_of(table.get(count), f"acceptance_length.{count}", "figures by mean")
        for mean in MEANS:
            if means.get(mean) is not None:
                name = f"acceptance_length.{count}.{mean}"
                lengths[count, mean] = number_of(means[mean], name, 0)
    texts = items_of(row["prompts"], "prompts", _dialogue)
    data = object_of(row.get("data"), "data", "what was measured on")
    asked, most = whole_of(row.get("num_turns"), "num_turns", 1), data.get("most_turns")
    most = whole_of(most, "data.most_turns", 1)
    identity = object_of(row.get("target_identity"), "target_identity", "the target")
    stated = {
        "draft tokens": whole_of(row.get("draft_tokens"), "draft_tokens", 1, LONGEST),
        "texts": len(texts),
        "dialogues": len({*texts}),
        "turns": ALL if asked >= most else FIRST if asked == 1 else f"first {asked}",
        "target": _target(identity.get("name"), "target_identity.name"),
        "temperature": number_of(row.get("temperature"), "temperature", 0),
        "new tokens": whole_of(row.get("max_new_tokens"), "max_new_tokens", 1),
    }
    if most == 1:
        del stated["turns"]
    rates = items_of(row.get("per_position"), "per_position", share_of)
    return Reported("Headsmith", lengths, rates, stated)


def _dialogue(text: object, name: str) -> int:
    return whole_of(object_of(text, name, "a text").get("dialogue"), f"{name}.dialogue")


def table(results: Mapping[str, Reported], shared: Iterable[Definition]) -> list[list[str]]:
    """Make a header and one row per result; figures that a tool omits stay empty."""
    shared = list(shared)
    header = ["result", "tool", "draft tokens", "texts"]
    lines = [header + [f"{COUNTS[count]} ({mean})" for count, mean in shared] + ["per position"]]
    for name, result in results.items():
        stated = (result.stated.get(key) for key in ("draft tokens", "texts"))
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
