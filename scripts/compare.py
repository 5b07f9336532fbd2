"""Puts acceptance results of several heads side by side: a table and a picture.

`python scripts/compare.py results=[outputs/medusa-accept,outputs/eagle3-accept]`

Differences are taken prompt by prompt against the first result, so that what makes prompts easy
or hard for every head is not in their intervals.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import CompareRun

COMMAND = Command(__doc__, CompareRun, "compare")
if __name__ == "__main__":
    COMMAND.begin()

import json
from collections.abc import Sequence
from typing import Any

from conf.command.statement import changed, differences, stated
from conf.errors import InputError
from eval.measure.stats import shown, tau_difference, tree_figures
from eval.report.figures import plot_comparison

# What must agree for two rows to say anything about each other.
SAME = (
    "mode", "num_prompts", "num_turns", "max_new_tokens", "temperature", "top_p", "top_k", "min_p",
    "stop", "ignore_eos", "generation_config",
)  # fmt: skip


def load_results(folders: list[str]) -> dict[str, dict[str, Any]]:
    """The `acceptance.json` of each folder, by the folder's name.

    Raises:
        InputError: none or fewer than two, a missing or broken file, equal names, or
            measurements of different things.
    """
    if len(folders) < 2:
        raise InputError(f"results={folders}: name at least two folders with acceptance.json")
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        path, name = Path(folder) / "acceptance.json", Path(folder).name
        if name in found:
            raise InputError(f"results: two folders are called {name}; rename one")
        try:
            found[name] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"results: cannot read {path}: {error}") from error
        if "prompts" not in found[name]:
            raise InputError(f"results: {path} holds no prompts; measure again")
    (first, reference), *others = found.items()
    before = _statement(reference)
    for name, result in others:
        now = _statement(result)
        if keys := changed(before, now):
            raise InputError(
                f"results: {first} and {name} are not of the same thing: "
                f"{differences(before, now, keys)}"
            )
    return found


def _statement(result: dict[str, Any]) -> dict[str, Any]:
    data, config = result.get("data") or {}, result.get("config") or {}
    rendered = (config.get("data") or {}).get("chat_template_kwargs")
    target = result.get("target_identity") or {"name": result.get("target")}
    return {
        **stated(target={**target, "dtype": result.get("target_dtype")}),
        **{key: result.get(key) for key in SAME},
        "seed": result.get("seed") if result.get("temperature") else None,
        "data.sha256": data.get("sha256"),
        "data.chat_template_kwargs": rendered,
    }


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table of cells, the header first."""
    header, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([header, "|---" * len(lines[0]) + "|", *others])


def rows(results: dict[str, dict[str, Any]]) -> list[Sequence[str]]:
    """A header; tau of chain and tree, how much more than the first's, alpha per depth."""
    first = next(iter(results))
    header = (
        "head", "tau, chain", "95% interval", f"more than {first}", "tau, tree",
        f"more than {first}", "alpha per depth of the chain",
    )  # fmt: skip
    lines: list[Sequence[str]] = [header]
    for name, result in results.items():
        tree, reference = tree_figures(result), results[first]
        cells = [
            name,
            f"{result['tau']:.3f}",
            shown(result["tau_ci95"], 3, " to "),
            "" if name == first else _difference(reference, result),
            f"{tree['tau']:.3f}",
            "" if name == first else _difference(tree_figures(reference), tree),
            " ".join(f"{rate:.2f}" for rate in result["alpha"]),
        ]
        lines.append(cells)
    return lines


def _about(results: dict[str, dict[str, Any]]) -> str:
    """The prompts that all results are of, in words."""
    first = next(iter(results.values()))
    data = Path(str((first.get("data") or {}).get("path") or "the embedded default")).name
    turns = "first turns" if first.get("num_turns") == 1 else "all turns"
    heat = first.get("temperature") or 0
    choice = f"temperature {heat:g}" if heat else "greedy"
    return f"{first['num_prompts']} prompts of {data}, {turns}, {choice}:"


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    figure, interval = tau_difference(first["prompts"], second["prompts"], seed=0)
    return (
        f"{figure:+.3f} ({'-' if interval is None else ' to '.join(f'{e:+.3f}' for e in interval)})"
    )


def main(config: CompareRun) -> None:
    """Prints the table; writes `comparison.md` and `comparison.png`."""
    results = load_results(config.results)
    text = f"{_about(results)}\n\n{markdown(rows(results))}"
    print(text)
    out_dir = Path(config.out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "comparison.md").write_text(text + "\n")
        plot_comparison(results, out_dir / "comparison.png")
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: cannot write there: {error}") from error
    print(f"wrote {out_dir / 'comparison.md'} and {out_dir / 'comparison.png'}")


if __name__ == "__main__":
    COMMAND.run(main)
