"""What came of a contest: the winner, a table, a page, and the estimates beside what it took."""

import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf.command.statement import check_unchanged
from conf.errors import InputError
from conf.files import write_whole
from eval.measure.stats import shown, tau_difference, tree_figures
from eval.report.page import Axis
from heads.folders import PROVENANCE
from heads.storage import write_folder
from scripts import compare
from scripts.contest.parts import Took, bytes_of, device_memory
from scripts.contest.recipes import Recipe, methods_of

Rows = list[Sequence[str]]
SAME = ("sha256", "num_train_sequences", "num_tokens")
"""Of the data that heads were trained on."""


def minutes(seconds: float) -> str:
    """For people."""
    return f"{seconds / 60:.1f}"


def shown_plan(plan: dict[str, Any]) -> str:
    """The steps of each recipe, and what the parts are going to take."""
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


def write(recipes: list[Recipe], out_dir: Path, plan: dict[str, Any], took: Took) -> str:
    """Writes `contest.json`, `contest.md`, `contest.html` and `winner/head`; returns the table.

    Raises:
        InputError: something is not measured yet, or heads were not trained on the same texts.
    """
    check_alike(recipes, out_dir)
    speed, costs = (_read(out_dir, name) for name in ("speed/speedup.json", "costs/costs.json"))
    ways = methods_of(recipes)
    label, method = winner(speed, ways)
    others = [recipe.label for recipe in recipes if recipe.label != label]
    folders = [str(out_dir / "acceptance" / each) for each in (label, *others)]
    heads = compare.load_results(folders) if others else {}
    results = {name: _read(out_dir, f"acceptance/{name}/acceptance.json") for name in ways}
    found = methods(speed, costs, results, ways, method)
    parts = taken(plan, took, out_dir)
    words = verdict(label, method, found)
    tables = [
        ("Speed", "tokens/s, prompts included, predicted > measured; speed-up over the faster "
         "loop that drafts nothing, with 95% intervals", speed_rows(found)),
        ("Acceptance", "replayed over the target's own texts; differences prompt by prompt",
         compare.rows(heads) if heads else []),
        ("Cost", "estimated > took", cost_rows(plan, parts)),
    ]  # fmt: skip
    tables = [each for each in tables if each[2]]
    content = {"winner": label, "method": method, "verdict": words, "methods": found}
    content |= {"steps": plan["steps"], "estimate": plan["estimate"], "took": parts}
    text = "\n\n".join([words, *(_markdown(*each) for each in tables)]) + "\n"
    write_whole(out_dir / "contest.json", json.dumps(content, indent=1) + "\n")
    write_whole(out_dir / "contest.md", text)
    write_whole(out_dir / "contest.html", _page(words, tables, found))
    source = out_dir / "heads" / label / "head"
    write_folder(out_dir / "winner" / "head", partial(shutil.copytree, source, dirs_exist_ok=True))
    return f"{text}\nwrote {out_dir / 'contest.html'}; the winner is in {out_dir / 'winner/head'}"


def check_alike(recipes: list[Recipe], out_dir: Path) -> None:
    """Refuses heads of different data: a file that changed between two trainings.

    Raises:
        InputError: with the heads and what differs.
    """
    data = {
        each.label: _read(out_dir, f"heads/{each.label}/head/{PROVENANCE}")["data"]
        for each in recipes
    }
    (first, known), *others = data.items()
    for label, found in others:
        check_unchanged(
            f"out_dir={out_dir} holds the heads {first} and {label}, whose training data were",
            {key: known[key] for key in SAME},
            {key: found[key] for key in SAME},
        )


def _read(out_dir: Path, name: str) -> dict[str, Any]:
    path = out_dir / name
    if not path.exists():
        raise InputError(f"parts: {path} is not there; run the parts before report first")
    return dict(json.loads(path.read_text()))


def winner(speed: dict[str, Any], ways: dict[str, dict[str, str]]) -> tuple[str, str]:
    """The head that is fastest over all batch sizes, and its faster way to draft."""
    scores = {
        (label, method): score(speed, method)
        for label, names in ways.items()
        for method in names.values()
    }
    return max(scores, key=lambda each: scores[each])


def score(speed: dict[str, Any], method: str) -> float:
    """The geometric mean of tokens/s over batch sizes: no size counts for more than another."""
    rates = [each["methods"][method]["tokens_per_s"] for each in speed["concurrency"].values()]
    return math.exp(sum(map(math.log, rates)) / len(rates))


def methods(
    speed: dict[str, Any],
    costs: dict[str, Any],
    results: dict[str, dict[str, Any]],
    ways: dict[str, dict[str, str]],
    first: str,
) -> dict[str, dict[str, Any]]:
    """Per way to decode its figures, the fastest first.

    Args:
        speed: `speedup.json`.
        costs: `costs.json`.
        results: `acceptance.json` of each head by label.
        ways: methods of each head by label and way.
        first: the method with which tau is compared.
    """
    expected = predicted(costs, results, ways)
    reference, found = speed["methods"][first]["prompts"], {}
    for name in sorted(speed["methods"], key=partial(score, speed), reverse=True):
        row = speed["methods"][name]
        more, ends = tau_difference(reference, row["prompts"], seed=0)
        found[name] = {
            "label": next((label for label in ways if name in ways[label].values()), None),
            "tau": row["tau"],
            "more": more,
            "more_ci95": ends,
            "sizes": {
                size: {
                    "predicted": expected.get(name, {}).get(size),
                    "measured": each["methods"][name]["tokens_per_s"],
                    "speedup": each["methods"][name]["speedup"],
                    "speedup_ci95": each["methods"][name]["speedup_ci95"],
                }
                for size, each in speed["concurrency"].items()
            },
        }
    return found


def predicted(
    costs: dict[str, Any],
    results: dict[str, dict[str, Any]],
    ways: dict[str, dict[str, str]],
) -> dict[str, dict[str, float]]:
    """Tokens/s by method and batch size, of full batches; arguments as of `methods`.

    A text takes what its prompt takes alone, and its share of as many steps as its tokens over
    tau are; tau does not depend on the batch.
    """

    def rate(step_s: float, size: str, tau: float) -> float:
        text_s = costs["prompt"] + num_tokens / tau * step_s / int(size)
        return (1 + num_tokens) / text_s

    first = next(iter(results.values()))
    num_tokens = first["num_tokens"] / first["num_prompts"]
    found = {"vanilla": {s: rate(each["plain"], s, 1.0) for s, each in costs["sizes"].items()}}
    for number, (label, names) in enumerate(ways.items()):
        taus = {"chain": results[label]["tau"], "tree": tree_figures(results[label])["tau"]}
        for way, name in names.items():
            found[name] = {
                size: rate(each["heads"][number][way], size, taus[way])
                for size, each in costs["sizes"].items()
            }
    return found


def verdict(label: str, method: str, found: dict[str, dict[str, Any]]) -> str:
    """Who won, and who needs no training and is faster."""
    words = f"{label} wins, drafting by {method}."
    faster = list(found)[: list(found).index(method)]
    if faster:
        words += f" Faster over all batch sizes, without training: {', '.join(faster)}."
    return words


def speed_rows(found: dict[str, dict[str, Any]]) -> Rows:
    """A row per way to decode."""
    sizes = list(next(iter(found.values()))["sizes"])
    rows: Rows = [
        ("head", "method", "tau", "than the winner's", *(f"{s} at a time" for s in sizes))
    ]
    for name, row in found.items():
        ends = row["more_ci95"]
        interval = "-" if ends is None else " to ".join(f"{end:+.3f}" for end in ends)
        rows.append([
            row["label"] or "-", name, f"{row['tau']:.3f}", f"{row['more']:+.3f} ({interval})",
            *map(_at_size, row["sizes"].values()),
        ])  # fmt: skip
    return rows


def _at_size(row: dict[str, Any]) -> str:
    expected = "-" if row["predicted"] is None else f"{row['predicted']:.0f}"
    ends = shown(row["speedup_ci95"])
    return f"{expected} > {row['measured']:.0f}, {row['speedup']:.2f} ({ends})"


def taken(plan: dict[str, Any], took: Took, out_dir: Path) -> dict[str, dict[str, Any]]:
    """What each part took: seconds over all starts, bytes, and peak memory of a process."""
    found = {}
    for name in plan["estimate"]:
        kind, _, label = name.partition(" ")
        size = {"bytes": bytes_of(out_dir / "heads" / label)} if kind == "train" else {}
        row = took.rows.get(name, {"seconds": 0.0, "memory": 0})
        found[name] = {"seconds": row["seconds"], "memory": row["memory"], **size}
        found[name] |= device_memory(out_dir, name)
    return found


def cost_rows(plan: dict[str, Any], parts: dict[str, dict[str, Any]]) -> Rows:
    """A row per part, and their sum."""
    gpu = any("device" in each for each in plan["estimate"].values())
    on_device = ["GB on each device"] if gpu else []
    rows: Rows = [["part", "minutes", "MB on disk", "GB of memory", *on_device]]
    pairs = [(name, plan["estimate"][name], row) for name, row in parts.items()]
    sums: list[dict[str, Any]] = [
        {
            "seconds": sum(row["seconds"] for row in each),
            "bytes": sum(row.get("bytes", 0) for row in each),
            "memory": max(row["memory"] for row in each),
            "device": max(row.get("device", 0) for row in each),
        }
        for each in (plan["estimate"].values(), parts.values())
    ]
    for name, estimate, row in [*pairs, ("all", sums[0], sums[1])]:
        both = (estimate, row)
        rows.append([
            name,
            " > ".join(minutes(each["seconds"]) for each in both),
            " > ".join(f"{each['bytes'] / 1e6:.0f}" for each in both if "bytes" in each) or "-",
            *(
                " > ".join(f"{each[key] / 1e9:.2f}" if each.get(key) else "-" for each in both)
                for key in ("memory", "device")[: 1 + gpu]
            ),
        ])  # fmt: skip
    return rows


def _markdown(title: str, words: str, rows: Rows) -> str:
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"**{title}**: {words}", "", header, "|---" * len(rows[0]) + "|", *others])


def _page(words: str, tables: list[tuple[str, str, Rows]], found: dict[str, dict[str, Any]]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    cells = [each for row in found.values() for each in row["sizes"].values()]
    ends = [end for each in cells for end in each["speedup_ci95"] or ()]
    axis = Axis.around([1.0, *ends, *(each["speedup"] for each in cells)], 150, 380)
    sizes = list(next(iter(found.values()))["sizes"])
    template = environment.get_template("page.html.j2")
    return template.render(words=words, tables=tables, found=found, axis=axis, sizes=sizes)
