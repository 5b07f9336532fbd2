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

from conf.schema_measure import AcceptanceRun, Mode
from eval.decode.engine import Step, decode
from eval.entry import run
from eval.measure import processes
from eval.measure.bench import Bench, greedy_responses, open_bench, seed_of, write_result
from eval.measure.replay import agreements, ranked_drafts, steps_along
from eval.measure.stats import PromptSteps, summary, tree_figures
from eval.report.figures import plot_acceptance
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
        name: processes.gathered(
            [PromptSteps(p.category, s) for p, s in zip(bench.prompts, lists, strict=True)]
        )
        for name, lists in steps.items()
    }
    result = summary(prompts["chain"], bench.head.chain.depth, config.seed)
    tree = summary(prompts["tree"], bench.head.tree.depth, config.seed)
    return {"mode": config.mode.value, **result, **more, bench.head.tree_name: tree}


def _replayed(
    bench: Bench, config: AcceptanceRun
) -> tuple[dict[str, list[list[Step]]], list[float]]:
    """Steps per kind of draft and prompt, and the chain's agreement per depth."""
    head, target = bench.head, bench.target
    static = {"chain": head.chain}
    if isinstance(head.tree, Tree):
        static["tree"] = head.tree
    steps: dict[str, list[list[Step]]] = {name: [] for name in static}
    agreeing: list[list[list[bool]]] = []
    responses = greedy_responses(target, bench.prompts, config.max_new_tokens)
    for prompt, response in zip(bench.prompts, responses, strict=True):
        output = target.read_response(prompt.token_ids, response, head.head.reads)
        for name, tree in static.items():
            ranked = ranked_drafts(head.head, tree, output, prompt.token_ids, response)
            steps[name].append(steps_along(tree, ranked, response))
            if name == "chain":
                agreeing.append(agreements(ranked, response))
    found = processes.gathered(agreeing)
    per_depth = [[each for text in found for each in text[d]] for d in range(head.chain.depth)]
    return steps, [sum(depth) / max(1, len(depth)) for depth in per_depth]


def _decoded(bench: Bench, config: AcceptanceRun, kind: str) -> list[list[Step]]:
    found = []
    for prompt in tqdm(bench.prompts, desc=f"decoding, {kind}", unit="prompt"):
        seed = seed_of(prompt, config.seed)
        drafter = bench.head.drafter(kind, bench.sampling, [seed])
        ids, length = prompt.token_ids, config.max_new_tokens
        found.append(decode(bench.target, drafter, ids, length, bench.sampling, seed).steps)
    return found


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
    if not bench.main:
        return
    console = Console()
    show(result, console)
    path = write_result(config, "acceptance.json", result, bench)
    plot_acceptance(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    run(main, AcceptanceRun, "acceptance")
