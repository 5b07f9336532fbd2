"""Puts acceptance results of several heads side by side: a table and a picture.

`python scripts/compare.py results=[outputs/medusa-accept,outputs/eagle3-accept]`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import json
from typing import Any

from conf.schema import InputError
from conf.schema_measure import CompareRun
from eval.entry import run
from eval.measure.stats import tree_figures
from eval.report.figures import plot_comparison

# What must agree for two rows to say anything about each other.
SAME = ("num_prompts", "max_new_tokens", "temperature", "target_dtype")


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
    _check_alike(found)
    return found


def _check_alike(results: dict[str, dict[str, Any]]) -> None:
    (first, reference), *others = results.items()
    for name, result in others:
        facts = [(key, reference.get(key), result.get(key)) for key in SAME]
        data = (result.get("data") or {}).get("sha256")
        facts.append(("data.sha256", (reference.get("data") or {}).get("sha256"), data))
        for key, wanted, got in facts:
            if wanted != got:
                raise InputError(f"results: {first} has {key}={wanted}, {name} has {got}")


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: tau of the chain with its interval, of the tree, alpha per depth."""
    lines = [
        "| head | tau, chain | 95% interval | tau, tree | alpha per depth of the chain |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        low, high = result["tau_ci95"]
        alpha = " ".join(f"{rate:.2f}" for rate in result["alpha"])
        lines.append(
            f"| {name} | {result['tau']:.3f} | {low:.3f} to {high:.3f} "
            f"| {tree_figures(result)['tau']:.3f} | {alpha} |"
        )
    return "\n".join(lines)


def main(config: CompareRun) -> None:
    """Prints the table; writes `comparison.md` and `comparison.png`."""
    results = load_results(config.results)
    text = table(results)
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
    run(main, CompareRun, "compare")
