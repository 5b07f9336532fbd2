"""Acceptance of a head on any prompts: tau, alpha per depth, by category.

`python eval/acceptance.py head.path=outputs/medusa/head data.path=prompts.jsonl`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.entry import run
from conf.schema import AcceptanceRun, Mode
from eval.bench import Bench, greedy_responses, open_bench, write_result
from eval.engine import Step, decode
from eval.figures import plot_acceptance
from eval.replay import accepted_lengths, agreements, ranked_drafts, walk
from eval.stats import PromptSteps, summary, tree_figures
from heads.tree import Tree


def measure(bench: Bench, config: AcceptanceRun) -> dict[str, Any]:
    """The contents of `acceptance.json`: the chain's figures, the tree's under its own key.

    What an EAGLE tree holds depends on all that was drawn, right or wrong, so it is decoded in
    either mode.
    """
    more: dict[str, Any] = {}
    if config.mode is Mode.replay:
        steps, more["agreement"] = _replayed(bench, config)
    else:
        steps = {"chain": _decoded(bench, config, "chain")}
    if "tree" not in steps:
        steps["tree"] = _decoded(bench, config, "tree")
    prompts = {
        name: [PromptSteps(p.category, s) for p, s in zip(bench.prompts, lists, strict=True)]
        for name, lists in steps.items()
    }
    result = summary(prompts["chain"], bench.chain.depth, config.seed)
    tree = summary(prompts["tree"], bench.tree.depth, config.seed)
    return {"mode": config.mode.value, **result, **more, bench.tree_name: tree}


def _replayed(
    bench: Bench, config: AcceptanceRun
) -> tuple[dict[str, list[list[Step]]], list[float]]:
    """Steps per kind of draft and prompt, and the chain's agreement per depth."""
    static = {"chain": bench.chain}
    if isinstance(bench.tree, Tree):
        static["tree"] = bench.tree
    steps: dict[str, list[list[Step]]] = {name: [] for name in static}
    agreeing: list[list[bool]] = [[] for _ in range(bench.chain.depth)]
    responses = greedy_responses(bench, config.max_new_tokens)
    for prompt, response in zip(bench.prompts, responses, strict=True):
        output = bench.target.read_text(prompt.token_ids + response[:-1], bench.head.reads)
        for name, tree in static.items():
            ranked = ranked_drafts(bench.head, tree, output, prompt.token_ids, response)
            steps[name].append(walk(accepted_lengths(tree, ranked, response), len(response)))
            if name == "chain":
                for found, more in zip(agreeing, agreements(ranked, response), strict=True):
                    found.extend(more)
    return steps, [sum(found) / max(1, len(found)) for found in agreeing]


def _decoded(bench: Bench, config: AcceptanceRun, kind: str) -> list[list[Step]]:
    return [
        decode(
            bench.target,
            bench.drafter(kind, config.seed),
            prompt.token_ids,
            config.max_new_tokens,
            bench.sampling,
            config.seed,
        ).steps
        for prompt in tqdm(bench.prompts, desc=f"decoding, {kind}", unit="prompt")
    ]


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the figures as a table."""
    tree = tree_figures(result)
    table = Table(title=f"Acceptance ({result['mode']}, {result['num_prompts']} prompts)")
    for column in ("category", "prompts", "tau chain", "95% interval", "tau tree", "alpha"):
        table.add_column(column, justify="left" if column == "category" else "right")
    rows = {**result["by_category"], "all": {**result, "ci95": result["tau_ci95"]}}
    for name, row in rows.items():
        in_tree = tree if name == "all" else tree["by_category"][name]
        low, high = row["ci95"]
        table.add_row(
            name, str(row["num_prompts"]), f"{row['tau']:.3f}", f"{low:.2f}-{high:.2f}",
            f"{in_tree['tau']:.3f}", " ".join(f"{rate:.2f}" for rate in row["alpha"]),
        )  # fmt: skip
    console.print(table)


def main(config: AcceptanceRun) -> None:
    """Measures, prints, writes `acceptance.json` and `acceptance.png`."""
    bench = open_bench(config, "acceptance.json")
    result = measure(bench, config)
    console = Console()
    show(result, console)
    path = write_result(config, "acceptance.json", result, bench)
    plot_acceptance(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    run(main, AcceptanceRun, "acceptance")
