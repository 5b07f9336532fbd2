"""Puts acceptance results of several heads side by side: a table and a picture.

`python scripts/compare.py results=[outputs/medusa-accept,outputs/eagle3-accept]`

Differences are taken prompt by prompt against the first result, so their intervals do not include
how hard the prompts are for every head. Results of `vllm bench serve` stand beside ours by the
definition that they share.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import CompareRun

COMMAND = Command(__doc__, CompareRun, "compare")
if __name__ == "__main__":
    COMMAND.parse_command_line()

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from conf.command.run_record import find_changed_keys, format_changes, make_fingerprint
from conf.errors import InputError
from conf.files import write_atomically
from eval.compare.acceptance_files import (
    RESULT_FILE_NAME,
    ReportedAcceptance,
    build_comparison_rows,
    check_comparable,
    find_result_file,
    load_acceptance_json,
    load_reported_acceptance,
)
from eval.measure.acceptance_stats import (
    LENGTH_DEFINITIONS,
    compare_tau,
    compute_tau,
    format_interval,
    select_tree_figures,
    sum_by_dialogue,
)
from eval.measure.data_statement import format_training_notes
from eval.measure.modes import group_passes
from eval.measure.results import (
    GOLDEN,
    build_markdown_table,
    format_conditions,
    format_golden_lengths,
)
from eval.report.plots import plot_comparison, plot_reported

# Facts that must agree before two rows can be compared.
SAME = (
    "mode", "num_prompts", "num_turns", "max_new_tokens", "temperature", "top_p", "top_k", "min_p",
    "stop", "ignore_eos", "generation_config",
)  # fmt: skip


def find_result_files(paths: list[str]) -> dict[str, Path]:
    """Find the file of each result, by the name of the result.

    Raises:
        InputError: fewer than two, a missing file, or equal names.
    """
    if len(paths) < 2:
        raise InputError(
            f"results={paths}: names fewer than two; name at least two folders with acceptance.json"
        )
    files_by_name: dict[str, Path] = {}
    for path in paths:
        name, file = find_result_file(path)
        if name in files_by_name:
            raise InputError(f"results: two folders have the name {name}; rename one")
        files_by_name[name] = file
    return files_by_name


def load_results(paths: list[str]) -> dict[str, dict[str, Any]]:
    """Read the `acceptance.json` of each folder, by the folder's name.

    Raises:
        InputError: fewer than two, a missing or broken file, equal names, or measurements of
            different things.
    """
    return load_result_files(find_result_files(paths))


def load_result_files(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Read results of `eval/acceptance.py`, and check that they measure the same thing.

    Raises:
        InputError: a missing or broken file, or measurements of different things.
    """
    results = {name: load_acceptance_json(path) for name, path in files.items()}
    (first, reference), *others = results.items()
    before = _build_fingerprint(reference)
    for name, result in others:
        now = _build_fingerprint(result)
        if keys := find_changed_keys(before, now):
            raise InputError(
                f"results: {first} and {name} measure different things: "
                f"{format_changes(before, now, keys)}"
            )
        if _list_texts(reference) != _list_texts(result):
            raise InputError(
                f"results: {first} and {name} have different texts, so one is damaged; measure "
                "again"
            )
    return results


def _list_texts(result: dict[str, Any]) -> list[tuple[int, int]]:
    """List the dialogue and turn of each text of chain and tree."""
    texts = [*result["prompts"], *select_tree_figures(result)["prompts"]]
    return [(text["dialogue"], text["turn"]) for text in texts]


def _build_fingerprint(result: dict[str, Any]) -> dict[str, Any]:
    data, config = result.get("data") or {}, result.get("config") or {}
    rendered = (config.get("data") or {}).get("chat_template_kwargs")
    target = result.get("target_identity") or {"name": result.get("target")}
    return {
        **make_fingerprint(target={**target, "dtype": result.get("target_dtype")}),
        **{key: result.get(key) for key in SAME},
        "seed": result.get("seed") if result.get("temperature") else None,
        "data.sha256": data.get("sha256"),
        "data.chat_template_kwargs": rendered,
    }


def build_acceptance_rows(results: dict[str, dict[str, Any]]) -> list[Sequence[str]]:
    """Build a header, and a row for each head: tau, differences from the first head, alpha."""
    first = next(iter(results))
    header = (
        "head", "tau, chain", "95% interval", f"more than {first}", "tau, tree",
        f"more than {first}", "alpha per depth of the chain",
    )  # fmt: skip
    lines: list[Sequence[str]] = [header]
    for name, result in results.items():
        tree, reference = select_tree_figures(result), results[first]
        lines.append(
            [
                name,
                f"{result['tau']:.3f}",
                format_interval(result["tau_ci95"], 3, " to "),
                ""
                if name == first
                else _format_difference(reference["prompts"], result["prompts"]),
                f"{tree['tau']:.3f}",
                ""
                if name == first
                else _format_difference(select_tree_figures(reference)["prompts"], tree["prompts"]),
                " ".join(f"{rate:.2f}" for rate in result["alpha"]),
            ]
        )
    return lines


def build_mode_comparison(results: dict[str, dict[str, Any]]) -> list[Sequence[str]]:
    """Build a header, and a row per mode that divides the prompts or texts: tau of each head.

    A dialogue counts where any head has passes in it; sampled texts of heads may differ.
    """
    (first, reference), *others = results.items()
    header = ["mode, tau of chains", "dialogues", first]
    for name, _ in others:
        header += [name, f"more than {first}"]
    lines: list[Sequence[str]] = [header]
    groups = [group_passes(result["prompts"]) for result in results.values()]
    for mode, values in groups[0].items():
        shared = [
            value for value in values if all(value in group.get(mode, {}) for group in groups)
        ]
        for value in shared if len(values) > 1 else ():
            known = {row["dialogue"] for group in groups for row in group[mode][value]}
            one, *rest = (
                _fill_rows(group[mode][value], reference["prompts"], known) for group in groups
            )
            cells = [f"{compute_tau(sum_by_dialogue(one)):.3f}"]
            for rows in rest:
                figure = f"{compute_tau(sum_by_dialogue(rows)):.3f}"
                cells += [figure, _format_difference(one, rows)]
            lines.append([f"{mode}: {value}", str(len(known)), *cells])
    return lines


def _fill_rows(
    rows: Sequence[dict[str, Any]], texts: Sequence[dict[str, Any]], dialogues: set[int]
) -> list[dict[str, Any]]:
    """List a row for each text of some dialogues; a text without passes of its own has no pass."""
    own = {(row["dialogue"], row["turn"]): row for row in rows}
    places = [(text["dialogue"], text["turn"]) for text in texts if text["dialogue"] in dialogues]
    return [
        own.get(place, {"dialogue": place[0], "turn": place[1], "emitted": []}) for place in places
    ]


def _describe_prompts(results: dict[str, dict[str, Any]]) -> str:
    """Describe the prompts that all results share."""
    first = next(iter(results.values()))
    data = Path(str((first.get("data") or {}).get("path") or "the embedded default")).name
    turns = "first turns" if first.get("num_turns") == 1 else "all turns"
    heat = first.get("temperature") or 0
    choice = f"temperature {heat:g}" if heat else "greedy"
    return f"{first['num_prompts']} prompts of {data}, {turns}, {choice}:"


def _format_difference(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> str:
    figure, interval = compare_tau(first, second, seed=0)
    return (
        f"{figure:+.3f} ({'-' if interval is None else ' to '.join(f'{e:+.3f}' for e in interval)})"
    )


def build_golden_lengths(results: dict[str, dict[str, Any]]) -> str | None:
    """Build the golden file of one head with chains of several lengths; None for other results."""
    rows = {result.get("draft_tokens", 0): result for result in results.values()}
    heads = {result.get("head") for result in results.values()}
    if len(heads) > 1 or 0 in rows or len(rows) < len(results):
        return None
    return format_golden_lengths(rows, next(iter(results.values())))


def compare_own_results(
    results: dict[str, dict[str, Any]],
) -> tuple[str, dict[str, Callable[..., None]]]:
    """Compare results of `eval/acceptance.py`.

    Returns:
        The text, and a writer for each file beside it.
    """
    notes = [
        f"\n{note}."
        for name, result in results.items()
        for trained in (result.get("data") or {}).get("trained_on") or ()
        for note in format_training_notes(result["data"], trained, name)
    ]
    tables = [build_markdown_table(build_acceptance_rows(results))]
    if len(modes := build_mode_comparison(results)) > 1:
        tables.append(build_markdown_table(modes))
    text = "\n".join(["\n\n".join([_describe_prompts(results), *tables]), *notes])
    files: dict[str, Callable[..., None]] = {"comparison.png": partial(plot_comparison, results)}
    if lengths := build_golden_lengths(results):
        files[GOLDEN] = lambda path: write_atomically(path, lengths)
    return text, files


def compare_reported_results(
    files: Mapping[str, Path],
) -> tuple[str, dict[str, Callable[..., None]]]:
    """Compare results of several tools.

    Returns:
        The text, and a writer for each file beside it.
    """
    results: dict[str, ReportedAcceptance] = {
        name: load_reported_acceptance(file) for name, file in files.items()
    }
    ours = {name: files[name] for name, each in results.items() if each.tool == "Headsmith"}
    own_results = load_result_files(ours) if ours else {}
    shared = check_comparable(results)
    conditions = format_conditions(next(iter(own_results.values()))) if own_results else ""
    table = build_markdown_table(build_comparison_rows(results, shared))
    text = f"{conditions}:\n\n{table}" if conditions else table
    figures = {
        name: (each.lengths.get(shared[0]), each.per_position) for name, each in results.items()
    }
    count, mean = shared[0]
    axis_label = f"acceptance length: {LENGTH_DEFINITIONS[count]} ({mean})"
    return text, {"comparison.png": partial(plot_reported, figures, axis_label, conditions)}


def main(config: CompareRun) -> None:
    """Print the table; write `comparison.md` and `comparison.png`."""
    result_files = find_result_files(config.results)
    if all(file.name == RESULT_FILE_NAME for file in result_files.values()):
        text, files = compare_own_results(load_result_files(result_files))
    else:
        text, files = compare_reported_results(result_files)
    print(text)
    out_dir = Path(config.out_dir)
    files = {"comparison.md": lambda path: write_atomically(path, text + "\n"), **files}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, write in files.items():
            write(out_dir / name)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: cannot write there: {error}") from error
    print("wrote " + ", ".join(str(out_dir / name) for name in files))


if __name__ == "__main__":
    COMMAND.run(main)
