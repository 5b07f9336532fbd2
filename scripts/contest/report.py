"""Report a contest: the winner, a table, a page, and the estimates beside the actual costs."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf.command.run_record import check_unchanged
from conf.errors import InputError
from conf.files import write_atomically
from eval.measure.acceptance_stats import compare_tau, format_interval, select_tree_figures
from eval.report.html_page import Axis
from heads.folders import PROVENANCE, write_folder
from scripts import compare

TableRows = list[Sequence[str]]
"""Rows of a table, each a sequence of cells. The first row is the header."""
ARROW = " \N{RIGHTWARDS ARROW} "
SAME = ("sha256", "num_train_sequences", "num_tokens")
"""Facts of the training data in which all heads must agree."""


def format_minutes(seconds: float) -> str:
    """Format seconds as minutes."""
    return f"{seconds / 60:.1f}"


def format_plan(plan: dict[str, Any]) -> str:
    """Format the steps of each head, and the estimates of time, disk and memory."""
    lines = [
        f"{label}: {number} steps of {plan['seconds_per_step'][label]:.2f} s"
        for label, number in plan["steps"].items()
    ]
    rows = plan["estimate"].values()
    hours = sum(row["seconds"] for row in rows) / 3600
    disk = sum(row.get("bytes", 0) for row in rows) / 1e6
    memory = max(row["memory"] for row in rows) / 1e9
    lines.append(f"estimated: {hours:.2f} h, {disk:.0f} MB on disk, {memory:.2f} GB of memory")
    return "\n".join(lines)


def write_report(
    ways: dict[str, dict[str, str]],
    out_dir: Path,
    plan: dict[str, Any],
    spent: dict[str, dict[str, Any]],
) -> str:
    """Write `contest.json`, `contest.md`, `contest.html` and `winner/head`; return the table.

    Args:
        ways: methods of each head, by label and method.
        out_dir: folder of the contest, with its heads and measurements.
        plan: contents of `plan.json`.
        spent: costs of each task, by its name.

    Raises:
        InputError: a measurement is missing, or heads were trained on different texts.
    """
    check_same_data(list(ways), out_dir)
    speed, costs = (
        _load_result(out_dir, name) for name in ("speed/speedup.json", "costs/costs.json")
    )
    label, method = find_winner(speed, ways)
    order = [label, *(name for name in ways if name != label)]
    folders = [str(out_dir / "acceptance" / name) for name in order]
    heads = compare.load_results(folders) if len(order) > 1 else {}
    results = {name: _load_result(out_dir, f"acceptance/{name}/acceptance.json") for name in ways}
    figures = collect_method_figures(speed, costs, results, ways, method)
    verdict = f"{label} wins, drafting by {method}."
    faster = list(figures)[: list(figures).index(method)]
    if faster:
        verdict += f" Faster over all batch sizes, without training: {', '.join(faster)}."
    tables = [
        ("Speed", "tokens/s, prompts included [as predicted], and the speed-up over the faster "
         "loop that drafts nothing (95% interval)", build_speed_rows(figures)),
        ("Acceptance", "replayed over the target's own texts; differences prompt by prompt",
         compare.build_acceptance_rows(heads) if heads else []),
        ("Cost", f"estimated{ARROW}taken", build_cost_rows(plan, spent)),
    ]  # fmt: skip
    tables = [table for table in tables if table[2]]
    content = {"winner": label, "method": method, "verdict": verdict, "methods": figures}
    content |= {"steps": plan["steps"], "estimate": plan["estimate"], "took": spent}
    text = verdict + "\n"
    for title, about, lines in tables:
        text += f"\n**{title}**: {about}\n\n{compare.build_markdown_table(lines)}\n"
    write_atomically(out_dir / "contest.json", json.dumps(content, indent=1) + "\n")
    write_atomically(out_dir / "contest.md", text)
    write_atomically(out_dir / "contest.html", _render_page(verdict, tables, figures))
    source = out_dir / "heads" / label / "head"
    write_folder(out_dir / "winner" / "head", partial(shutil.copytree, source, dirs_exist_ok=True))
    return f"{text}\nwrote {out_dir / 'contest.html'}; winner: {out_dir / 'winner/head'}"


def check_same_data(labels: list[str], out_dir: Path) -> None:
    """Refuse heads of different data, as when a file changed between two trainings.

    Args:
        labels: labels of the heads.
        out_dir: folder of the contest.

    Raises:
        InputError: the data differ; names the heads and the differences.
    """
    data = {
        label: _load_result(out_dir, f"heads/{label}/head/{PROVENANCE}")["data"] for label in labels
    }
    (first, reference), *others = data.items()
    for label, facts in others:
        check_unchanged(
            f"out_dir={out_dir} holds the heads {first} and {label}, whose training data were",
            {key: reference[key] for key in SAME},
            {key: facts[key] for key in SAME},
        )


def _load_result(out_dir: Path, name: str) -> dict[str, Any]:
    path = out_dir / name
    if not path.exists():
        raise InputError(f"parts: {path} is missing; run the other parts before report")
    return dict(json.loads(path.read_text()))


def find_winner(speed: dict[str, Any], ways: dict[str, dict[str, str]]) -> tuple[str, str]:
    """Find the head that is fastest over all batch sizes, and its faster method."""
    drafting = [(label, method) for label, names in ways.items() for method in names.values()]
    return max(drafting, key=lambda pair: compute_score(speed, pair[1]))


def compute_score(speed: dict[str, Any], method: str) -> float:
    """Compute the geometric mean of tokens/s over batch sizes: each size counts the same."""
    sizes = speed["concurrency"].values()
    return geometric_mean(size["methods"][method]["tokens_per_s"] for size in sizes)


def collect_method_figures(
    speed: dict[str, Any],
    costs: dict[str, Any],
    results: dict[str, dict[str, Any]],
    ways: dict[str, dict[str, str]],
    first: str,
) -> dict[str, dict[str, Any]]:
    """Collect the figures of each decoding method, the fastest first.

    Args:
        speed: contents of `speedup.json`.
        costs: contents of `costs.json`.
        results: contents of `acceptance.json` of each head, by label.
        ways: methods of each head, by label and method.
        first: the method whose tau the others are compared with.
    """
    expected = predict_rates(costs, results, ways)
    labels = {name: label for label, names in ways.items() for name in names.values()}
    reference, figures = speed["methods"][first]["prompts"], {}
    for name in sorted(speed["methods"], key=partial(compute_score, speed), reverse=True):
        row = speed["methods"][name]
        more, interval = compare_tau(reference, row["prompts"], seed=0)
        sizes = {}
        for size, at_size in speed["concurrency"].items():
            measured = at_size["methods"][name]
            sizes[size] = {
                "predicted": expected.get(name, {}).get(size),
                "measured": measured["tokens_per_s"],
                "speedup": measured["speedup"],
                "speedup_ci95": measured["speedup_ci95"],
            }
        figures[name] = {
            "label": labels.get(name), "tau": row["tau"], "more": more, "more_ci95": interval,
            "sizes": sizes,
        }  # fmt: skip
    return figures


def predict_rates(
    costs: dict[str, Any],
    results: dict[str, dict[str, Any]],
    ways: dict[str, dict[str, str]],
) -> dict[str, dict[str, float]]:
    """Predict tokens/s by method and batch size, for full batches.

    See `collect_method_figures` for the arguments.

    A text takes the time of its prompt, plus its share of (its tokens / tau) steps. tau does not
    depend on the batch.
    """

    def rate(step_s: float, size: str, tau: float) -> float:
        text_s = costs["prompt"] + num_tokens / tau * step_s / int(size)
        return (1 + num_tokens) / text_s

    first = next(iter(results.values()))
    num_tokens = first["num_tokens"] / first["num_prompts"]
    sizes = costs["sizes"].items()
    rates = {"vanilla": {size: rate(cost["plain"], size, 1.0) for size, cost in sizes}}
    for number, (label, names) in enumerate(ways.items()):
        taus = {"chain": results[label]["tau"], "tree": select_tree_figures(results[label])["tau"]}
        for way, name in names.items():
            rates[name] = {
                size: rate(cost["heads"][number][way], size, taus[way]) for size, cost in sizes
            }
    return rates


def build_speed_rows(figures: dict[str, dict[str, Any]]) -> TableRows:
    """Build a header, and a row for each decoding method."""
    sizes = list(next(iter(figures.values()))["sizes"])
    lines: TableRows = [
        ("head", "method", "tau", "tau, less the winner's", *(f"{s} at a time" for s in sizes))
    ]
    for name, row in figures.items():
        interval = row["more_ci95"]
        difference = "-" if interval is None else " to ".join(f"{end:+.3f}" for end in interval)
        cells = []
        for cell in row["sizes"].values():
            guess = "" if cell["predicted"] is None else f" [{cell['predicted']:.0f}]"
            bounds = (
                ""
                if cell["speedup_ci95"] is None
                else f" ({format_interval(cell['speedup_ci95'])})"
            )
            cells.append(f"{cell['measured']:.0f}{guess}, {cell['speedup']:.2f}x{bounds}")
        tau, more = f"{row['tau']:.3f}", f"{row['more']:+.3f} ({difference})"
        lines.append((row["label"] or "-", name, tau, more, *cells))
    return lines


def build_cost_rows(plan: dict[str, Any], spent: dict[str, dict[str, Any]]) -> TableRows:
    """Build a header, a row for each task, and their sum."""
    gpu = any("device" in row for row in plan["estimate"].values())
    on_device = ["GB on each device"] if gpu else []
    lines: TableRows = [["part", "minutes", "MB on disk", "GB of memory", *on_device]]
    estimated, took = (
        {
            "seconds": sum(row["seconds"] for row in rows),
            "bytes": sum(row.get("bytes", 0) for row in rows),
            "memory": max(row["memory"] for row in rows),
            "device": max(row.get("device", 0) for row in rows),
        }
        for rows in (plan["estimate"].values(), spent.values())
    )
    pairs = [(name, plan["estimate"][name], row) for name, row in spent.items()]
    for name, *both in [*pairs, ("all", estimated, took)]:
        lines.append([
            name,
            ARROW.join(format_minutes(row["seconds"]) for row in both),
            ARROW.join(f"{row['bytes'] / 1e6:.0f}" for row in both if "bytes" in row) or "-",
            *(
                ARROW.join(f"{row[key] / 1e9:.2f}" if row.get(key) else "-" for row in both)
                for key in ("memory", "device")[: 1 + gpu]
            ),
        ])  # fmt: skip
    return lines


def _render_page(
    words: str, tables: list[tuple[str, str, TableRows]], figures: dict[str, dict[str, Any]]
) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    cells = [cell for row in figures.values() for cell in row["sizes"].values()]
    bounds = [bound for cell in cells for bound in cell["speedup_ci95"] or ()]
    axis = Axis.from_figures([1.0, *bounds, *(cell["speedup"] for cell in cells)], 150, 380)
    return environment.get_template("page.html.j2").render(
        words=words, tables=tables, found=figures, axis=axis,
        sizes=list(next(iter(figures.values()))["sizes"]),
    )  # fmt: skip
