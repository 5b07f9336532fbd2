"""Pictures of the measurements, as PNG files."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from eval.stats import tree_figures

PARTS = ("prefill", "draft", "verify", "accept", "host")
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def plot_acceptance(result: dict[str, Any], path: Path) -> None:
    """tau per category with intervals, and alpha per depth per category.

    Args:
        result: the contents of `acceptance.json`.
        path: the PNG file to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = {**result["by_category"], "all": {**result, "ci95": result["tau_ci95"]}}
    tree = tree_figures(result)
    trees = {**tree["by_category"], "all": tree}
    for place, (name, row) in enumerate(rows.items()):
        low, high = row["ci95"]
        left.barh(place, row["tau"], color="tab:blue" if name != "all" else "tab:gray")
        left.plot([low, high], [place, place], color="black")
        left.plot(trees[name]["tau"], place, "D", color="tab:orange")
        depths = range(1, len(row["alpha"]) + 1)
        right.plot(depths, row["alpha"], "o-", label=name, linewidth=3 if name == "all" else 1)
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("tau, tokens per verify pass (bar: chain, 95% interval; diamond: tree)")
    right.set(xlabel="depth", ylabel="alpha, acceptance given the depth was reached", ylim=(0, 1))
    right.set_xticks(range(1, len(result["alpha"]) + 1))
    right.legend(fontsize="small")
    _save(figure, path)


def plot_speedup(result: dict[str, Any], path: Path) -> None:
    """Tokens per second per method, and where the seconds went.

    Args:
        result: the contents of `speedup.json`.
        path: the PNG file to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for place, row in enumerate(result["methods"].values()):
        left.barh(place, row["tokens_per_s"], color="tab:blue")
        left.text(row["tokens_per_s"], place, f" {row['speedup']:.2f}x", va="center")
        _stack(right, place, row["breakdown"])
    left.margins(x=0.12)
    for axis in (left, right):
        axis.set_yticks(range(len(result["methods"])), list(result["methods"]))
        axis.invert_yaxis()
    left.set_xlabel("tokens per second, prompt included")
    right.set_xlabel("seconds for all prompts")
    bars = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    right.legend(bars.values(), bars.keys(), fontsize="small")
    _save(figure, path)


def plot_comparison(results: dict[str, dict[str, Any]], path: Path) -> None:
    """tau per head; per depth of its chain alpha, and agreement where it was replayed.

    At depth d a head has read d - 1 features of its own: alpha is EAGLE's n-alpha, n = d - 1.

    Args:
        results: the contents of `acceptance.json` by the head's name.
        path: the PNG file to write.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for place, (name, result) in enumerate(results.items()):
        low, high = result["tau_ci95"]
        left.barh(place, result["tau"], color="tab:blue")
        left.plot([low, high], [place, place], color="black")
        left.plot(tree_figures(result)["tau"], place, "D", color="tab:orange")
        for axis, rates in ((middle, result["alpha"]), (right, result.get("agreement", []))):
            axis.plot(range(1, len(rates) + 1), rates, "o-", label=name)
    left.set_yticks(range(len(results)), list(results))
    left.invert_yaxis()
    left.set_xlim(left=1)
    left.set_xlabel("tau, tokens per verify pass (bar: chain, 95% interval; diamond: tree)")
    middle.set(xlabel="depth", ylabel="alpha, acceptance given the depth was reached")
    right.set(xlabel="depth", ylabel="first choice agrees with the target's, at every token")
    deepest = max(len(result["alpha"]) for result in results.values())
    for axis in (middle, right):
        axis.set(ylim=(0, 1), xticks=range(1, deepest + 1))
        axis.legend(fontsize="small")
    _save(figure, path)


def _stack(axis: Any, place: int, breakdown: dict[str, float]) -> None:
    if breakdown["verify"] == 0:  # somebody else's loop, timed from outside
        axis.barh(place, breakdown["host"], color="lightgray", label="undivided")
        return
    start = 0.0
    for part, color in zip(PARTS, COLORS, strict=True):
        axis.barh(place, breakdown[part], left=start, color=color, label=part)
        start += breakdown[part]


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(path)
