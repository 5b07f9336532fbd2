"""Pictures of the measurements, as PNG files."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from eval.measure.stats import tree_figures

STEP_PARTS = ("draft", "verify", "accept", "step", "host")
"""`step` is the first three where they are captured as one."""
COLORS = ("tab:orange", "tab:green", "tab:red", "tab:brown", "tab:purple")


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
        left.barh(place, row["tau"], color="tab:blue" if name != "all" else "tab:gray")
        left.plot(row["ci95"] or [row["tau"]] * 2, [place, place], color="black")
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
    """Speed, tau and alpha of every method, and where the time of a verify pass went.

    Args:
        result: the contents of `speedup.json`.
        path: the PNG file to write.
    """
    methods = result["methods"]
    size = (12, 3.6 + 0.5 * len(methods))
    figure, ((speed, times), (taus, alphas)) = plt.subplots(
        2, 2, figsize=size, layout="constrained"
    )
    labels = [f"{name} (lossy)" if row.get("lossy") else name for name, row in methods.items()]
    for place, (label, row) in enumerate(zip(labels, methods.values(), strict=True)):
        speed.barh(place, row["tokens_per_s"], color="tab:blue")
        speed.text(row["tokens_per_s"], place, f" {row['speedup']:.2f}x", va="center")
        _stack(times, place, row)
        taus.plot(row["tau"], place, "o", color="tab:blue")
        taus.plot(row.get("tau_ci95") or [row["tau"]] * 2, [place, place], color="tab:blue")
        rates = row.get("alpha") or []
        if rates:
            alphas.plot(range(1, len(rates) + 1), rates, "o-", label=label)
    for axis in (speed, times, taus):
        axis.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    speed.margins(x=0.15)
    speed.set_xlabel(f"tokens per second, prompt included, and speed-up over {result['baseline']}")
    times.set_xlabel("ms per verify pass")
    taus.set_xlabel("tau, tokens per verify pass (95% interval)")
    alphas.set(xlabel="depth", ylabel="alpha, acceptance given the depth was reached", ylim=(0, 1))
    alphas.xaxis.get_major_locator().set_params(integer=True)
    for axis in (times, alphas):
        lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        if lines:
            axis.legend(lines.values(), lines.keys(), fontsize="small")
    _save(figure, path)


def plot_concurrency(sizes: dict[str, Any], path: Path) -> None:
    """Throughput, speed-up and waits of every method by the number of texts at a time.

    Args:
        sizes: the contents of `concurrency` in `speedup.json`.
        path: the PNG file to write.
    """
    figure, (speed, gain, waits) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    numbers = [int(size) for size in sizes]
    for name in next(iter(sizes.values()))["methods"]:
        rows = [each["methods"][name] for each in sizes.values()]
        speed.plot(numbers, [row["tokens_per_s"] for row in rows], "o-", label=name)
        gain.plot(numbers, [row["speedup"] for row in rows], "o-", label=name)
        ends = [row["between_tokens_ms"] for row in rows]
        if all(ends):
            waits.plot(numbers, [each["p50"] for each in ends], "o-", label=name)
    gain.axhline(1, color="black", linewidth=0.8)
    speed.set_ylabel("tokens per second, prompts included")
    gain.set_ylabel("speed-up over the faster baseline of each size")
    waits.set_ylabel("ms between tokens, p50")
    for axis in (speed, gain, waits):
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.minorticks_off()
        axis.set(xlabel="texts at a time", ylim=(0, None))
        axis.legend(fontsize="small")
    _save(figure, path)


def step_ms(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each part of a mean verify pass; in a batch a text's share of it.

    Args:
        row: a method of `speedup.json`.

    Returns:
        Nothing for somebody else's loop, timed from outside.
    """
    num_steps = row.get("num_steps")
    parts = row["breakdown"]
    if not num_steps or not parts["verify"] + parts.get("step", 0.0):
        return {}
    return {part: 1000 * parts[part] / num_steps for part in STEP_PARTS if part in parts}


def plot_tree_search(result: dict[str, Any], path: Path) -> None:
    """Expected tokens per second and tau by draft tokens, and what a pass costs.

    Args:
        result: the contents of `tree_search.json`.
        path: the PNG file to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    best: dict[int, float] = {}
    for row in result["candidates"]:
        size = row["num_tokens"]
        best[size] = max(best.get(size, 0.0), row["tokens_per_s"])
    sizes = sorted(best)
    left.plot(sizes, [best[size] for size in sizes], "o-", label="best of each size")
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
    _save(figure, path)


def plot_calibration(result: dict[str, Any], path: Path) -> None:
    """Shares accepted by the chance that was given, before and after; what each threshold promises.

    Args:
        result: the contents of `calibrate.json`.
        path: the PNG file to write.
    """
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for axis, (when, depths) in zip(axes, result["reliability"].items(), strict=False):
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        errors = result["ece"][when]
        for depth, (bins, error) in enumerate(zip(depths, errors, strict=True), start=1):
            axis.plot(
                [chance for chance, *_ in bins], [share for _, share, _ in bins], "o-",
                label=f"depth {depth}, error {error:.3f}",
            )  # fmt: skip
        axis.set(
            xlabel=f"chance of the path, {when} calibration", ylabel="share accepted",
            xlim=(0, 1), ylim=(0, 1),
        )  # fmt: skip
        axis.legend(fontsize="small")
    whole, rows = result["lengths"][-1]["tokens_per_s"], result["thresholds"]
    speeds = [row["tokens_per_s"] / whole for row in rows]
    axes[2].plot([row["threshold"] for row in rows], speeds, "o-", label="cut")
    best = max(row["tokens_per_s"] for row in result["lengths"]) / whole
    axes[2].axhline(1, color="black", linewidth=0.8, label="whole")
    axes[2].axhline(best, color="black", linewidth=0.8, linestyle=":", label="best length")
    axes[2].set(xlabel="chance below which chains are cut", ylabel="speed over whole chains")
    axes[2].legend(fontsize="small")
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
        left.barh(place, result["tau"], color="tab:blue")
        left.plot(result["tau_ci95"] or [result["tau"]] * 2, [place, place], color="black")
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


def plot_pruning(result: dict[str, Any], path: Path) -> None:
    """tau, coverage and expected speed-up by the size of the draft vocabulary.

    Args:
        result: the contents of `prune.json`.
        path: the PNG file to write.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    rows = [*result["pruned"], result["before"]]
    sizes = [row["num_ids"] for row in rows]
    ends = [row["tau_ci95"] or [row["tau"]] * 2 for row in rows]
    left.vlines(sizes, *zip(*ends, strict=True), color="tab:gray")
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
    _save(figure, path)


def _stack(axis: Any, place: int, row: dict[str, Any]) -> None:
    start = 0.0
    colors = dict(zip(STEP_PARTS, COLORS, strict=True))
    for part, time in step_ms(row).items():
        axis.barh(place, time, left=start, color=colors[part], label=part)
        start += time
    if not start:
        total = sum(row["breakdown"].values())
        axis.text(0, place, f" undivided, {total:.1f} s in all", va="center")


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(path)
