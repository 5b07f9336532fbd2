"""Pictures of measurements: each function draws the contents of a results file into a PNG file."""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from cycler import cycler
from matplotlib import pyplot as plt

from eval.measure.acceptance_stats import select_tree_figures
from eval.measure.modes import CATEGORY, list_modes
from eval.measure.results import format_conditions

BLUE, ORANGE, GREEN, RED, PINK, SKY, BLACK = INKS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#222222"),
)
"""Colors that also differ in grey and for the colour-blind: Okabe and Ito, 2008."""
GREY = "#777777"
mpl.rcParams |= {
    "axes.prop_cycle": cycler(color=INKS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 11,
    "legend.frameon": False,
}
STEP_PARTS = ("draft", "verify", "accept", "step", "host")
"""Parts of a step; `step` is the first three if they are captured as one."""
COLORS = dict(zip(STEP_PARTS, (ORANGE, BLUE, BLACK, GREEN, PINK), strict=True))
DEEPEST = 8
"""Last depth of pictures, as only copied text reaches deeper ones often."""
LINE = 30
"""Letters of a name on one line."""
LETTERS_AN_INCH = 16
"""Average letters of small text per inch."""
STYLES = list(
    cycler(linestyle=["-", "--", ":"]) * (cycler(color=INKS) + cycler(marker=list("os^DvPX")))
)
"""Styles of curves; there are more than colors."""


def plot_acceptance(result: dict[str, Any], path: Path) -> None:
    """Draw tau per category and mode with intervals, and alpha per depth per category."""
    rows = {**result["by_category"], "all": {**result, "ci95": result["tau_ci95"]}}
    modes, in_tree = list_modes(result), list_modes(select_tree_figures(result), least=1)
    split = [(mode, value) for mode in modes if mode != CATEGORY for value in modes[mode]]
    names, height = _wrap_names([*rows, *(f"{mode}: {value}" for mode, value in split)])
    size = (12, max(4.2, 1 + height))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    tree = select_tree_figures(result)
    trees = {**tree["by_category"], "all": tree}
    for place, (name, row) in enumerate(rows.items()):
        is_whole = name == "all"
        color = GREY if is_whole else BLUE
        _draw_tau_row(left, place, row["tau"], row["ci95"], trees[name]["tau"], color)
        style: dict[str, Any] = {"color": GREY, "linewidth": 3} if is_whole else {"linewidth": 1}
        _draw_curve(right, place, names[place], row["alpha"], **style)
    for place, (mode, value) in enumerate(split, start=len(rows)):
        row = modes[mode][value]
        tree_tau = in_tree.get(mode, {}).get(value, {}).get("tau")
        _draw_tau_row(left, place, row["tau"], row["tau_ci95"], tree_tau, GREEN)
    _label_tau_axis(left, names)
    left.axvline(1, color="black", linewidth=0.8)
    right.set(xlabel="depth", ylabel="alpha, acceptance per depth", ylim=(0, 1))
    right.set_xticks(range(1, len(result["alpha"]) + 1))
    _draw_legend(figure, right)
    _save_figure(figure, path, format_conditions(result))


def plot_speedup(result: dict[str, Any], path: Path) -> None:
    """Draw speed, tau and alpha of every method, and the parts of the time of a verify pass."""
    methods = result["methods"]
    labels, height = _wrap_names(
        f"{name} (lossy)" if row.get("lossy") else name for name, row in methods.items()
    )
    size = (12, 3.6 + 2 * height)
    figure, ((speed, times), (taus, alphas)) = plt.subplots(
        2, 2, figsize=size, layout="constrained"
    )
    for place, (label, row) in enumerate(zip(labels, methods.values(), strict=True)):
        speed.barh(place, row["tokens_per_s"], color=BLUE)
        speed.text(row["tokens_per_s"], place, f" {row['speedup']:.2f}x", va="center")
        end = 0.0
        for part, ms in compute_step_ms(row).items():
            times.barh(place, ms, left=end, color=COLORS[part], label=part)
            end += ms
        if not end:
            total = sum(row["breakdown"].values())
            times.text(0, place, f" undivided, {total:.1f} s in all", va="center")
        taus.plot(row["tau"], place, "o", color=BLUE)
        taus.plot(row.get("tau_ci95") or [row["tau"]] * 2, [place, place], color=BLUE)
        _draw_curve(alphas, place, label, (row.get("alpha") or [])[:DEEPEST])
    for axis in (speed, times, taus):
        axis.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    speed.margins(x=0.15)
    baseline = f"the baseline, {result['baseline']}"
    speed.set_xlabel(f"tokens per second, prompt included, and speed-up over {baseline}")
    times.set_xlabel("ms per verify pass")
    taus.set_xlabel("tau, tokens per verify pass (95% interval)")
    alphas.set(xlabel="depth", ylabel="alpha, acceptance per depth", ylim=(0, 1))
    alphas.xaxis.get_major_locator().set_params(integer=True)
    for axis in (times, alphas):
        lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        if lines:
            axis.legend(lines.values(), lines.keys(), fontsize="small")
    _save_figure(figure, path, format_conditions(result))


def plot_concurrency(result: dict[str, Any], path: Path) -> None:
    """Draw throughput, speed-up and waits of every method by the number of texts at a time."""
    sizes = result["concurrency"]
    figure, (speed, gain, waits) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    numbers = [int(size) for size in sizes]
    for place, name in enumerate(next(iter(sizes.values()))["methods"]):
        rows = [measured["methods"][name] for measured in sizes.values()]
        between = [row["between_tokens_ms"] for row in rows]
        for panel, figures in (
            (speed, [row["tokens_per_s"] for row in rows]),
            (gain, [row["speedup"] for row in rows if row["speedup"] is not None]),
            (waits, [wait["p50"] for wait in between] if all(between) else []),
        ):
            _draw_curve(panel, place, _wrap_name(name), figures, numbers)
    gain.axhline(1, color="black", linewidth=0.8)
    speed.set_ylabel("tokens per second, prompts included")
    gain.set_ylabel("speed-up over the baseline")
    waits.set_ylabel("ms between tokens, p50")
    for axis in (speed, gain, waits):
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.minorticks_off()
        axis.set(xlabel="texts at a time", ylim=(0, None))
    _draw_legend(figure, speed)
    _save_figure(figure, path, format_conditions(result))


def plot_load_curve(result: dict[str, Any], path: Path) -> None:
    """Draw a `serve.json`: throughput against the speed of each user, and speed-up by load.

    Points have their number of requests in flight. A hollow point is a window that is not valid; of
    a speed-up one of the two.
    """
    loads = {int(size): load for size, load in result["concurrency"].items()}
    off_from = result["off_from"]
    figure, (curve, gain) = plt.subplots(1, 2, figsize=(15, 5), layout="constrained")
    names = next(iter(loads.values()))["methods"]
    for name, color, side in zip(names, (BLUE, ORANGE), ("left", "right"), strict=False):
        rows = {size: load["methods"][name] for size, load in loads.items()}
        points = {n: (row["tokens_per_s_per_user"], row["tokens_per_s"]) for n, row in rows.items()}
        curve.plot(*zip(*points.values(), strict=True), color=color, label=_wrap_name(name))
        for size, point in points.items():
            _draw_point(curve, *point, color, rows[size]["valid"])
            curve.annotate(
                str(size), point, xytext=(7 if side == "left" else -7, 3), color=color,
                textcoords="offset points", horizontalalignment=side, fontsize="small",
            )  # fmt: skip
        bounds = {size: row["speedup_ci95"] for size, row in rows.items() if row["speedup_ci95"]}
        if bounds:
            sizes = list(bounds)
            gain.vlines(sizes, *zip(*bounds.values(), strict=True), color=color, linewidth=1)
            gain.plot(sizes, [rows[size]["speedup"] for size in bounds], color=color)
        for size in bounds:
            valid = all(row["valid"] for row in loads[size]["methods"].values())
            _draw_point(gain, size, rows[size]["speedup"], color, valid)
    if gain.has_data():
        gain.axhline(1, color="black", linewidth=0.8)
    if off_from is not None:
        first_off = min(size for size in loads if size >= off_from)
        row = next(iter(loads[first_off]["methods"].values()))
        label = f"off from {off_from} in flight"
        curve.plot(
            row["tokens_per_s_per_user"], row["tokens_per_s"], "X", color=RED, markersize=13,
            zorder=1.5, label=label,
        )  # fmt: skip
        gain.axvline(off_from, color=RED, linestyle="--")
    curve.set(xlabel="tokens per second per user", ylabel="tokens per second of the server")
    curve.set(xlim=(0, None), ylim=(0, None))
    gain.set(xlabel="requests in flight", ylabel="speed-up over the server without drafts (95%)")
    gain.set_xscale("log", base=2)
    gain.set_xticks(list(loads), [str(size) for size in loads])
    gain.minorticks_off()
    gain.set_ylim(bottom=0)
    curve.plot([], [], "o", color=GREY, markerfacecolor="white", label="not valid")
    _draw_legend(figure, curve)
    _save_figure(figure, path, format_conditions(result))


def _draw_point(panel: Any, x: float, y: float, color: str, is_valid: bool) -> None:
    panel.plot(x, y, "o", color=color, markerfacecolor=color if is_valid else "white")


def compute_step_ms(row: dict[str, Any]) -> dict[str, float]:
    """Compute milliseconds of each part of a mean verify pass; in a batch one text's share.

    Args:
        row: a method of `speedup.json`.

    Returns:
        Milliseconds by part; empty for another library's loop, which is timed from outside.
    """
    num_steps = row.get("num_steps")
    parts = row["breakdown"]
    if not num_steps or not parts["verify"] + parts.get("step", 0.0):
        return {}
    return {part: 1000 * parts[part] / num_steps for part in STEP_PARTS if part in parts}


def plot_tree_search(result: dict[str, Any], path: Path) -> None:
    """Draw expected tokens/s by draft tokens, and the cost of a pass."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = sorted(result["candidates"], key=lambda row: row["tokens_per_s"])
    best = sorted({row["num_tokens"]: row["tokens_per_s"] for row in rows}.items())
    left.plot(*zip(*best, strict=True), "o-", label="best of each size")
    for name, marker in (("default", "D"), ("found", "*")):
        row = result[name]
        left.plot(row["num_tokens"], row["tokens_per_s"], marker, markersize=11, label=name)
    left.margins(y=0.1)
    left.set(xlabel="draft tokens of a pass", ylabel="expected tokens per second")
    left.set_ylim(bottom=0)
    left.legend(fontsize="small")
    curve = result["curve"]
    costs = [seconds / curve["seconds"][0] for seconds in curve["seconds"]]
    right.plot(curve["sizes"], costs, "o-")
    right.set(
        xlabel="tokens of a pass", ylabel="cost in passes over one token", ylim=(0, None),
        title=curve["device"],
    )  # fmt: skip
    _save_figure(figure, path)


def plot_comparison(
    results: dict[str, dict[str, Any]], path: Path, under: str | None = None
) -> None:
    """Draw tau per head or condition, alpha per depth of the chain, and agreement if replayed.

    At depth d a head has read d - 1 of its own states, so alpha is EAGLE's n-alpha, n = d - 1.

    Reads `acceptance.json`; `under` is the text below, by default the conditions of the first
    result.
    """
    names, height = _wrap_names(results)
    size = (15, max(4.2, 1 + height))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=size, layout="constrained")
    for place, result in enumerate(results.values()):
        tree_tau = select_tree_figures(result)["tau"]
        _draw_tau_row(left, place, result["tau"], result["tau_ci95"], tree_tau, BLUE)
        for axis, rates in ((middle, result["alpha"]), (right, result.get("agreement", []))):
            _draw_curve(axis, place, names[place], rates)
    _label_tau_axis(left, names)
    left.set_xlim(left=1)
    middle.set(xlabel="depth", ylabel="alpha, acceptance per depth")
    right.set(xlabel="depth", ylabel="first choice agrees with the target")
    deepest = max(len(result["alpha"]) for result in results.values())
    for axis in (middle, right):
        axis.set(ylim=(0, 1), xticks=range(1, deepest + 1))
    _draw_legend(figure, middle)
    _save_figure(
        figure, path, format_conditions(next(iter(results.values()))) if under is None else under
    )


def plot_reported(
    results: dict[str, tuple[float | None, list[float]]], what: str, under: str, path: Path
) -> None:
    """Draw an acceptance length per result, and the acceptance of each position.

    Args:
        results: the two figures by name; the length is None if missing.
        what: definition of the length.
        under: conditions; may be empty.
        path: path of the picture.
    """
    names, height = _wrap_names(results)
    size = (12, max(4.2, 1 + height))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    for place, (length, rates) in enumerate(results.values()):
        left.barh(place, length or 0, color=BLUE)
        _draw_curve(right, place, names[place], rates)
    left.set(yticks=range(len(names)), yticklabels=names, xlabel=what, xlim=(1, None))
    left.invert_yaxis()
    right.set(xlabel="position", ylabel="share of drafts accepted that far", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    if any(rates for _, rates in results.values()):
        _draw_legend(figure, right)
    _save_figure(figure, path, under)


def plot_pruning(result: dict[str, Any], path: Path) -> None:
    """Draw tau, coverage and expected speed-up by the size of the draft vocabulary."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    rows = [*result["pruned"], result["before"]]
    sizes = [row["num_ids"] for row in rows]
    ends = [row["tau_ci95"] or [row["tau"]] * 2 for row in rows]
    left.vlines(sizes, *zip(*ends, strict=True), color=GREY)
    for axis, name in ((left, "tau"), (middle, "coverage"), (right, "speedup")):
        axis.plot(sizes, [row[name] for row in rows], "o-")
        axis.plot(sizes[-1], result["before"][name], "D", markersize=9, label="before")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
        axis.minorticks_off()
        axis.set_xlabel("ids that can be drafted")
    left.set_ylabel("tau of the chain, tokens per verify pass (95% interval)")
    for row in result["low_rank"]:
        for axis, name in ((left, "tau"), (right, "speedup")):
            axis.axhline(row[name], linestyle=":", label=f"rank {row['rank']}, all ids")
    for axis in (left, middle, right):
        axis.legend(fontsize="small")
    middle.set(ylabel="share of the target's choices that can be drafted", ylim=(0, 1.02))
    right.set_ylabel(f"expected speed-up, {result['device']}")
    _save_figure(figure, path)


def _draw_tau_row(
    panel: Any, place: int, tau: float, ends: list[float] | None, tree_tau: float | None, color: str
) -> None:
    """Draw a row: a bar for the chain with its interval, a diamond for the tree, if known."""
    panel.barh(place, tau, color=color)
    panel.plot(ends or [tau] * 2, [place, place], color="black")
    if tree_tau is not None:
        panel.plot(tree_tau, place, "D", color=ORANGE)


def _label_tau_axis(panel: Any, names: list[str]) -> None:
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel("tau, tokens per verify pass (bar: chain, 95% interval; diamond: tree)")


def _wrap_name(name: str) -> str:
    """Split a name into lines, between its parts."""
    lines = [""]
    for part in re.split(r"(?<=[ _/-])", name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > LINE:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _wrap_names(names: Iterable[str]) -> tuple[list[str], float]:
    """Wrap names into lines; return also the height in inches of a panel with a row for each."""
    names = list(map(_wrap_name, names))
    num_lines = 1 + max(name.count("\n") for name in names)
    return names, len(names) * (0.1 + 0.16 * num_lines)


def _draw_curve(
    panel: Any,
    place: int,
    name: str,
    figures: list[float],
    over: Sequence[int] | None = None,
    **style: Any,
) -> None:
    """Draw a curve, in the same style in every panel, over depths by default."""
    if figures:
        style = {**STYLES[place % len(STYLES)], "label": name, **style}
        panel.plot(over or range(1, len(figures) + 1), figures, **style)


def _close_gaps(figure: Any) -> None:
    """Remove empty panels; the others of their row get the space."""
    rows: dict[int, list[Any]] = {}
    for panel in figure.axes:
        if panel.has_data() or panel.texts:
            rows.setdefault(panel.get_subplotspec().rowspan.start, []).append(panel)
        else:
            panel.remove()
    num_columns = math.lcm(*map(len, rows.values()))
    grid = figure.add_gridspec(len(rows), num_columns)
    for place, row in enumerate(rows.values()):
        width = num_columns // len(row)
        for number, panel in enumerate(row):
            panel.set_subplotspec(grid[place, number * width : (number + 1) * width])


def _fit_labels(figure: Any) -> None:
    """Split labels that are longer than their panel, whose size depends on all other labels."""
    labels = [
        (panel.bbox, side, label, label.get_text())
        for panel in figure.axes
        for label, side in (
            (panel.title, "width"), (panel.xaxis.label, "width"), (panel.yaxis.label, "height"),
        )
        if label.get_text()
    ]  # fmt: skip
    for _ in range(3):  # lines take room from panels
        figure.draw_without_rendering()
        shares = [
            getattr(room, side) / getattr(label.get_window_extent(), side)
            for room, side, label, _ in labels
        ]
        if min(shares) >= 1:
            # Drawing would lay out again, which takes as long as drawing itself.
            figure.set_layout_engine("none")
            return
        for share, (_, _, label, text) in zip(shares, labels, strict=True):
            if share < 1:
                longest = max(map(len, label.get_text().split("\n")))
                lines = textwrap.wrap(text, int(share * longest), break_on_hyphens=False)
                label.set_text("\n".join(lines))


def _draw_legend(figure: Any, panel: Any) -> None:
    """Draw one panel's legend beside all panels, as inside a panel it would cover curves."""
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", fontsize="small")


def _save_figure(figure: Any, path: Path, under: str = "") -> None:
    """Write a picture, with a line of text below it if given."""
    if under:
        width = int(LETTERS_AN_INCH * figure.get_figwidth())
        figure.supxlabel(textwrap.fill(under, width, break_on_hyphens=False), fontsize="small")
    _close_gaps(figure)
    _fit_labels(figure)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(path)
