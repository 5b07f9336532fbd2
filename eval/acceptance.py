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
from eval.medusa import MedusaDrafter
from eval.replay import accepted_lengths, response_states, walk
from eval.stats import PromptSteps, summary
from heads.tree import Tree


def measure(bench: Bench, config: AcceptanceRun) -> dict[str, Any]:
    """The contents of `acceptance.json`: the chain's figures, the tree's as `static_tree`."""
    by_replay = config.mode is Mode.replay
    steps = _replayed(bench, config) if by_replay else _decoded(bench, config)
    prompts = {
        name: [PromptSteps(p.category, s) for p, s in zip(bench.prompts, lists, strict=True)]
        for name, lists in steps.items()
    }
    result = summary(prompts["chain"], bench.chain.depth, config.seed)
    tree = summary(prompts["tree"], bench.tree.depth, config.seed)
    return {"mode": config.mode.value, **result, "static_tree": tree}


def _replayed(bench: Bench, config: AcceptanceRun) -> dict[str, list[list[Step]]]:
    steps: dict[str, list[list[Step]]] = {"chain": [], "tree": []}
    responses = greedy_responses(bench, config.max_new_tokens)
    for prompt, response in zip(bench.prompts, responses, strict=True):
        states = response_states(bench.target, prompt.token_ids, response)
        for name, tree in (("chain", bench.chain), ("tree", bench.tree)):
            accepted = accepted_lengths(bench.head, tree, states, response)
            steps[name].append(walk(accepted, len(response)))
    return steps


def _decoded(bench: Bench, config: AcceptanceRun) -> dict[str, list[list[Step]]]:
    def steps(tree: Tree, name: str) -> list[list[Step]]:
        return [
            decode(
                bench.target,
                MedusaDrafter(bench.head, tree),
                prompt.token_ids,
                config.max_new_tokens,
            ).steps
            for prompt in tqdm(bench.prompts, desc=f"decoding, {name}", unit="prompt")
        ]

    return {"chain": steps(bench.chain, "chain"), "tree": steps(bench.tree, "tree")}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the figures as a table."""
    tree = result["static_tree"]
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
