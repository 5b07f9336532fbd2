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
from eval.measure.prompts import num_thinking
from eval.measure.replay import agreements, ranked_drafts, steps_along
from eval.measure.stats import PromptSteps, summary, tree_figures
from eval.report.figures import plot_acceptance
from heads.tree import Tree

Texts = dict[str, list[list[int]]]
Steps = dict[str, list[list[Step]]]


def measure(bench: Bench, config: AcceptanceRun) -> dict[str, Any]:
    """The contents of `acceptance.json`: the chain's figures, the tree's under its own key.

    What an EAGLE tree holds depends on all that was drawn, right or wrong, so it is decoded in
    either mode.
    """
    more: dict[str, Any] = {}
    if config.mode is Mode.replay:
        texts, steps, more["agreement"] = _replayed(bench, config)
    else:
        texts, steps = {}, {}
        texts["chain"], steps["chain"] = _decoded(bench, config, "chain")
    if "tree" not in steps:
        texts["tree"], steps["tree"] = _decoded(bench, config, "tree")
    prompts = {
        name: processes.gathered(_of_prompts(bench, texts[name], steps[name])) for name in steps
    }
    result = summary(prompts["chain"], bench.head.chain.depth, config.seed)
    tree = summary(prompts["tree"], bench.head.tree.depth, config.seed)
    return {"mode": config.mode.value, **result, **more, bench.head.tree_name: tree}


def _of_prompts(bench: Bench, texts: list[list[int]], steps: list[list[Step]]) -> list[PromptSteps]:
    columns = zip(bench.prompts, texts, steps, strict=True)
    tokenizer = bench.target.tokenizer
    return [PromptSteps(p.category, s, num_thinking(p, ids, tokenizer)) for p, ids, s in columns]


def _replayed(bench: Bench, config: AcceptanceRun) -> tuple[Texts, Steps, list[float]]:
    """Texts and steps per kind of draft and prompt, and the chain's agreement per depth."""
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
    return (
        dict.fromkeys(static, responses),
        steps,
        [sum(depth) / max(1, len(depth)) for depth in per_depth],
    )


def _decoded(
    bench: Bench, config: AcceptanceRun, kind: str
) -> tuple[list[list[int]], list[list[Step]]]:
    found = []
    for prompt in tqdm(bench.prompts, desc=f"decoding, {kind}", unit="prompt"):
        seed = seed_of(prompt, config.seed)
        drafter = bench.head.drafter(kind, bench.sampling, [seed])
        ids, length = prompt.token_ids, config.max_new_tokens
        found.append(decode(bench.target, drafter, ids, length, bench.sampling, seed))
    return [text.token_ids for text in found], [text.steps for text in found]


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
    for part, row in result["by_part"].items():
        in_part = tree["by_part"][part]["tau"]
        console.print(
            f"{part}: tau {row['tau']:.3f}, tree {in_part:.3f}, {row['num_tokens']} tokens"
        )


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
