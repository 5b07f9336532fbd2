"""Finds known faults in the files of a head, by what the head would accept without them.

`python scripts/repair.py head.path=somebody/eagle3 target.path=Qwen/Qwen3-8B data.path=my.jsonl`

Most faults of a head's config change no text, but lower its acceptance. So the head is read as its
files state and in every other way that its weights allow; each variant is replayed over the
target's own answers. If variants are significantly better, the best is written as a new head; among
equally good ones, the likeliest.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import RepairRun
from eval.preflight_checks import check_measurement

CHECK = partial(check_measurement, result="repair.json")
COMMAND = Command(__doc__, RepairRun, "repair", check=CHECK)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.command.run_record import collect_provenance
from conf.errors import InputError
from eval.measure.acceptance_stats import PromptSteps, compare_tau, tau
from eval.measure.measurement import (
    Measurement,
    gather_items,
    open_measurement,
    write_result,
)
from eval.measure.replay import replay_response
from eval.measure.target_answers import generate_greedy_answers
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.kinds import load_head

DECLARED = "as its files say"
LEAST_GAIN_FRACTION = 0.02
"""Smallest gain in tau that counts, as a fraction of tau. Among many variants a smaller gain may be
chance, and it would be worth little."""


@dataclass(frozen=True)
class HeadVariant:
    """Hold a head that was read from its files in one way.

    Attributes:
        changes: differences from the files, one after the other.
        head: head attached to the target.
        prompts: passes over each prompt.
    """

    changes: tuple[str, ...]
    head: DraftHead
    prompts: list[PromptSteps]

    @property
    def name(self) -> str:
        """Return the changes as text."""
        return "; ".join(self.changes) or DECLARED

    def compare_with(self, other: "HeadVariant") -> tuple[float, Any]:
        """Compute the difference in tau from another variant, and its interval over dialogues."""
        first, second = ([p.build_row() for p in variant.prompts] for variant in (other, self))
        return compare_tau(first, second, seed=0)

    def is_better_than(self, other: "HeadVariant") -> bool:
        """Tell whether this variant is significantly better, by a relevant amount."""
        more, interval = self.compare_with(other)
        return (
            interval is not None
            and interval[0] > 0
            and more >= LEAST_GAIN_FRACTION * tau(other.prompts)
        )

    def build_row(self, declared: "HeadVariant") -> dict[str, Any]:
        """Build the row of this variant in the results file."""
        more, interval = self.compare_with(declared)
        return {"reading": self.name, "tau": tau(self.prompts), "more": more, "more_ci95": interval}


@torch.no_grad()
def find_best_variant(
    bench: Measurement, config: RepairRun
) -> tuple[list[dict[str, Any]], HeadVariant | None]:
    """Measure all variants; return their rows, and the best unless it is the files' own.

    A better variant is varied in every way again, as files may have several faults.
    """
    target, head = bench.target, bench.head.draft_head
    asked = [prompt.token_ids for prompt in bench.prompts]
    responses = generate_greedy_answers(target, asked, config.max_new_tokens)
    texts = list(zip(bench.prompts, responses, strict=True))
    most = [other.max_draft_tokens for _, other in head.iter_config_variants()]
    depth = min(bench.head.chain.depth, *(limit or sys.maxsize for limit in most))
    chain = Tree.make_chain(depth)

    def replayed(changes: tuple[str, ...], head: DraftHead) -> HeadVariant:
        prompts, label = [], changes[-1] if changes else DECLARED
        for prompt, answer in tqdm(texts, desc=label, unit="prompt", leave=False):
            steps = replay_response(target, head, chain, prompt.token_ids, answer)
            drafted, place = [depth] * len(steps), (prompt.dialogue, prompt.turn)
            prompts.append(PromptSteps(prompt.category, steps, drafted, *place))
        return HeadVariant(changes, head, gather_items(prompts))

    best = declared = replayed((), head)
    rows = [declared.build_row(declared)]
    while True:
        variants = [
            replayed((*best.changes, label), other)
            for label, other in best.head.iter_config_variants()
        ]
        rows += [variant.build_row(declared) for variant in variants]
        better = [variant for variant in variants if variant.is_better_than(best)]
        if not better:
            return rows, None if best is declared else best
        leader = max(better, key=lambda variant: tau(variant.prompts))
        best = next(variant for variant in better if not leader.is_better_than(variant))


def save_variant(variant: HeadVariant, config: RepairRun, bench: Measurement, folder: Path) -> None:
    """Write the head of a variant, with weights as exact as in the files."""
    ref = config.head
    assert ref.path is not None
    head: Any = load_head(ref.path, ref.revision, ref.layers).attach(bench.target)
    for change in variant.changes:
        head = next(other for name, other in head.iter_config_variants() if name == change)
    history = collect_provenance(config, bench.target.name, bench.data) | {"repaired": variant.name}
    head.save(folder, history)


def main(config: RepairRun) -> None:
    """Measure the variants; write `repair.json`, and `out_dir/head` if a fault was found."""
    bench = open_measurement(config, "repair.json")
    head = bench.head.draft_head
    if next(head.iter_config_variants(), None) is None:
        raise InputError(
            f"head.path={config.head.path}: {head.name_with_article} has no settings with known "
            "silent faults; measure it with eval/acceptance.py"
        )
    rows, best = find_best_variant(bench, config)
    if not bench.is_main_process:
        return
    console = Console()
    table = Table("read", title="tau of chains, replayed over the target's own answers")
    for column in ("tau", "more", "95% interval"):
        table.add_column(column, justify="right")
    for row in rows:
        interval = row["more_ci95"]
        bounds = "-" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}"
        table.add_row(row["reading"], f"{row['tau']:.3f}", f"{row['more']:+.3f}", bounds)
    console.print(table)
    if best is None:
        console.print("no other reading is significantly better, so the files are right")
    else:
        folder = Path(config.out_dir) / "head"
        save_variant(best, config, bench, folder)
        console.print(
            f"the files should say: {best.name}; wrote such a head to {folder}", markup=False
        )
    path, _ = write_result(config, "repair.json", {"readings": rows}, bench)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    COMMAND.run(main)
