"""Seconds of a step with each head on this machine, by batch size: `costs.json`.

`scripts/contest/run.py` starts it, with settings of `eval/speedup.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.entry import Command
from conf.settings.measure import SpeedupRun

COMMAND = Command(__doc__, SpeedupRun, "costs")
if __name__ == "__main__":
    COMMAND.parse_command_line()

from typing import Any

import torch

from conf.command.clock import measure_seconds
from eval.measure.measurement import Measurement, open_measurement, write_result
from eval.measure.target_answers import generate_greedy_answers
from eval.tune.step_costs import build_typical_context, measure_step_costs
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.target_model.model import prefill


def measure_step_seconds(bench: Measurement, context: list[int], size: int) -> dict[str, Any]:
    """Measure the seconds of a step over `size` texts.

    Returns:
        `plain`: a pass without drafts; `heads`: for each head, draft and pass by method.
    """
    plain, heads = [], []
    for head in bench.heads:
        tree = head.tree
        widths = {
            "chain": head.chain.num_nodes,
            "tree": tree.num_nodes if isinstance(tree, Tree) else tree.num_tokens + 1,
        }
        drafters = {way: head.make_drafter(way, GREEDY, [0] * size) for way in widths}
        curve, drafts = measure_step_costs(
            bench.target, drafters, context, size, sorted(set(widths.values()))
        )
        plain.append(curve.estimate_seconds(1))
        heads.append(
            {way: drafts[way] + curve.estimate_seconds(width) for way, width in widths.items()}
        )
    return {"plain": min(plain), "heads": heads}


@torch.no_grad()
def main(config: SpeedupRun) -> None:
    """Time the steps of all heads, and write `costs.json`."""
    bench = open_measurement(config, "costs.json", config.heads)
    prompt = sorted(bench.prompts, key=lambda each: len(each.token_ids))[len(bench.prompts) // 2]
    (answer,) = generate_greedy_answers(bench.target, [prompt.token_ids], config.max_new_tokens)
    context = build_typical_context([prompt.token_ids], [answer])

    def read_prompt() -> None:
        prefill(bench.target, bench.target.new_cache(1), [prompt.token_ids])

    costs = {
        "prompt": min(measure_seconds(read_prompt, bench.target.device) for _ in range(4)),
        "sizes": {
            str(size): measure_step_seconds(bench, context, size) for size in config.batch_sizes
        },
    }
    write_result(config, "costs.json", costs, bench)


if __name__ == "__main__":
    COMMAND.run(main)
