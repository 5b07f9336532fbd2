"""How sure a head is of its chains, made into chances, and the chance from which they are cut.

`python eval/calibrate.py head.path=outputs/eagle/head data.path=prompts.jsonl`

Half of the dialogues show what became of drafts of which the head was so sure, the other half
checks what was found, in real decoding. What is found is written into the head's folder, where
the methods `eagle_cut`, `medusa_cut` and so on look for it.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.measure import CalibrateRun
from eval.refusals import check_measure

CHECK = partial(check_measure, result="calibrate.json")
COMMAND = Command(__doc__, CalibrateRun, "calibrate", check=CHECK)
if __name__ == "__main__":
    COMMAND.begin()

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.command.journal import Journal
from conf.errors import InputError
from conf.settings.measure import SpeedupRun
from eval.compare.figures import summarise
from eval.compare.methods import Method
from eval.compare.names import VANILLA
from eval.compare.timing import time_methods
from eval.decode.engine import Generation, NoDraft, Step, decode, decode_batch
from eval.measure import processes
from eval.measure.bench import Bench, open_bench, open_journal, seed_of, write_result
from eval.measure.heads import CONFIDENCE_FILE, BenchHead, device_name, write_beside
from eval.measure.prompts import Prompt
from eval.report.figures import plot_calibration
from eval.tune.confidence import (
    THRESHOLDS,
    Costs,
    Expected,
    Told,
    Until,
    bins,
    by_depth,
    ece,
    fit,
)
from eval.tune.cost import CostCurve, time_steps, typical_context
from heads.decoding.chains import Calibration
from heads.decoding.drafting import Draft, Drafter, Roots
from heads.decoding.tree import Tree

COSTS = -1
"""The row of a journal that holds what drafts and passes cost."""
WHOLE, SHORTER, CUT = "whole", "shorter", "cut"


class _Recorder:
    """Keeps what a chain says of itself."""

    static_nodes = None

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps = drafter, drafter.taps
        self.observe, self.keep = drafter.observe, drafter.keep
        self.logits: list[list[float]] = []

    def propose(self, roots: Roots) -> Draft:
        """The drafter's own, of one text."""
        draft = self.drafter.propose(roots)
        if draft.confidence is None:
            raise InputError("head.path: such a head does not say how sure it is of its drafts")
        self.logits.append(draft.confidence[0].tolist())
        return draft

    def take(self, row: int, other: "_Recorder") -> None:
        """Nobody waits for its place."""
        self.drafter.take(row, other.drafter)


def record(bench: Bench, config: CalibrateRun, journal: Journal) -> list[dict[str, Any]]:
    """Decodes with whole chains; per prompt its text, and per step what its chain was told by."""
    whole = replace(bench.head, calibration=Calibration.none(bench.head.chain.depth))
    for number, prompt in enumerate(tqdm(bench.prompts, desc="whole chains", unit="prompt")):
        if number in journal.done:
            continue
        seed = seed_of(prompt, config.seed)
        recorder = _Recorder(whole.drafter(CUT, bench.sampling, [seed]))
        length = config.max_new_tokens
        text = decode(bench.target, recorder, prompt.token_ids, length, bench.sampling, seed)
        row = {"steps": [asdict(step) for step in text.steps], "drafted": text.drafted}
        row |= {"token_ids": text.token_ids, "logits": recorder.logits}
        journal.append([{"id": number, **row}])
    return [row for row in journal.rows() if 0 <= row["id"] < len(bench.prompts)]


def told(rows: Sequence[dict[str, Any]], depth: int) -> Told:
    """All steps of some prompts, with chains of so many tokens.

    Raises:
        InputError: there are none.
    """
    steps = [Step(**step) for row in rows for step in row["steps"]]
    if not steps:
        raise InputError("data.path: every answer ends with its first token; nothing is drafted")
    logits = [each for row in rows for each in row["logits"]]
    return Told.of(logits, steps, [number for row in rows for number in row["drafted"]], depth)


def measure_costs(bench: Bench, context: list[int], journal: Journal) -> Costs:
    """Times passes, and chains that have any number of tokens or end after it."""
    if COSTS not in journal.done:
        head, depth = bench.head, bench.head.chain.depth
        whole, cut = range(1, depth + 1), range(depth + 1)
        heads = {(WHOLE, n): replace(head, chain=Tree.chain(n)) for n in whole}
        heads |= {(CUT, n): replace(head, calibration=Until.after(n)) for n in cut}
        drafters = {
            key: each.drafter("chain" if key[0] == WHOLE else CUT, bench.sampling, [0])
            for key, each in heads.items()
        }
        curve, drafts = time_steps(bench.target, drafters, context, sizes=range(2, depth + 2))
        costs = Costs(curve, [drafts[WHOLE, n] for n in whole], [drafts[CUT, n] for n in cut])
        journal.append([{"id": COSTS, **asdict(costs)}])
    (row,) = (row for row in journal.rows() if row["id"] == COSTS)
    return Costs(CostCurve(**row["curve"]), row["whole"], row["cut"])


def measure(
    bench: Bench,
    config: CalibrateRun,
    prompts: list[Prompt],
    heads: dict[str, BenchHead],
    journal: Journal,
) -> dict[str, Any]:
    """Real decoding with each head's chains, interleaved with the engine without drafts."""

    def method(name: str) -> Method:
        def decoded(
            ids: Sequence[list[int]], seeds: Sequence[int], _batch_size: int
        ) -> list[Generation]:
            own, shape = list(seeds), CUT if name == CUT else "chain"
            drafter: Drafter = NoDraft()
            if name in heads:
                drafter = heads[name].drafter(shape, bench.sampling, own)
            return decode_batch(
                bench.target, drafter, ids, config.max_new_tokens, bench.sampling, own
            )

        return Method(decoded, heads[name].chain if name in heads else None)

    methods = {name: method(name) for name in (VANILLA, *heads)}
    settings = SpeedupRun(seed=config.seed, num_repeats=config.num_repeats, num_texts=0)
    checked = replace(bench, prompts=prompts)
    runs = time_methods(checked, settings, methods, journal=journal)
    return summarise(checked, settings, methods, runs)


def report(fitted: Told, checked: Told, costs: Costs) -> dict[str, Any]:
    """Temperatures and threshold by one half, and what they do on the other."""
    own, found = Calibration.none(fitted.logits.shape[1]), fit(fitted)
    before, alone, after = (by_depth(checked, by) for by in (own, fit(fitted, [0.0]), found))
    depth = fitted.logits.shape[1]
    whole = [Expected.whole(fitted, n, costs) for n in range(1, depth + 1)]
    cut = [Expected.cut(fitted, found, each, costs) for each in THRESHOLDS]
    shorter, best = (max(each, key=lambda of: of.tokens_per_s) for each in (whole, cut))
    pays = best.tokens_per_s > whole[-1].tokens_per_s
    found = replace(found, threshold=(best.threshold or 0.0) if pays else 0.0)
    others = {
        WHOLE: Expected.whole(checked, depth, costs),
        SHORTER: Expected.whole(checked, shorter.most_tokens, costs),
        CUT: Expected.cut(checked, found, found.threshold, costs),
    }
    return {
        **asdict(found),
        "ece": {
            "before": [ece(*depth) for depth in before],
            "temperatures_alone": [ece(*depth) for depth in alone],
            "after": [ece(*depth) for depth in after],
        },
        "reliability": {
            "before": [bins(*depth) for depth in before],
            "after": [bins(*depth) for depth in after],
        },
        "num_steps": {"fitted": len(fitted.logits), "checked": len(checked.logits)},
        "lengths": [asdict(each) for each in whole],
        "thresholds": [asdict(each) for each in cut],
        "checked": {name: asdict(each) for name, each in others.items()},
        "costs": asdict(costs),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints calibration errors by depth, thresholds, and the one that was chosen."""
    table = Table(title="Expected calibration error on the checking half")
    errors = (name.replace("_", " ") for name in result["ece"])
    for column in ("depth", "temperature", "offset", *errors):
        table.add_column(column, justify="right")
    columns = (result["temperatures"], result["offsets"], *result["ece"].values())
    for depth, (temperature, offset, *row) in enumerate(zip(*columns, strict=True), start=1):
        shares = (f"{each:.3f}" for each in row)
        table.add_row(str(depth), f"{temperature:.2f}", f"{offset:.1f}", *shares)
    console.print(table)
    table = Table(title=f"Whole chains, and cut ones by their threshold, {device_name()}")
    for column in ("chains", "draft tokens", "accepted", "tau", "predicted", "measured"):
        table.add_column(column, justify="right")
    for part in ("lengths", "thresholds"):
        for row in result[part]:
            table.add_row(*_cells(row, result["lengths"][-1]), "")
        table.add_section()
    speeds = {n: row["decode_tokens_per_s"] for n, row in result["measured"]["methods"].items()}
    for name, row in result["checked"].items():
        _, *cells = _cells(row, result["checked"][WHOLE])
        table.add_row(f"checked: {name}", *cells, f"{speeds[name] / speeds[WHOLE]:.3f}")
    console.print(table)


def _cells(row: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    threshold = row["threshold"]
    return [
        f"whole, {row['most_tokens']}" if threshold is None else f"below {threshold:.2f}",
        f"{row['num_drafted']:.2f}",
        f"{row['share_accepted']:.3f}",
        f"{row['tau']:.3f}",
        f"{row['tokens_per_s'] / whole['tokens_per_s']:.3f}",
    ]


def main(config: CalibrateRun) -> None:
    """Calibrates, checks, writes the calibration, `calibrate.json` and a picture."""
    num_processes = processes.start().num_processes
    if num_processes > 1:
        raise InputError(f"{num_processes} processes: one measures the times; start just that")
    bench = open_bench(config, "calibrate.json")
    # By dialogue: its second turn holds the first.
    halves = [[n for n, p in enumerate(bench.prompts) if p.dialogue % 2 == odd] for odd in (0, 1)]
    if not halves[1]:
        raise InputError("data.num_prompts=1: calibrating and checking need a prompt each")
    with open_journal(config, "calibrate.json", bench) as journal:
        rows = record(bench, config, journal)
        depth = bench.head.chain.depth
        fitted, checked = (told([rows[number] for number in half], depth) for half in halves)
        prompts, texts = [p.token_ids for p in bench.prompts], [row["token_ids"] for row in rows]
        costs = measure_costs(bench, typical_context(prompts, texts), journal)
        result = report(fitted, checked, costs)
        found, head = Calibration.of(result), bench.head
        shorter = Tree.chain(result["checked"][SHORTER]["most_tokens"])
        heads = {
            WHOLE: head,
            SHORTER: replace(head, chain=shorter),
            CUT: replace(head, calibration=found),
        }
        others = [bench.prompts[number] for number in halves[1]]
        result["measured"] = measure(bench, config, others, heads, journal)
    console = Console()
    show(result, console)
    path = write_result(config, "calibrate.json", result, bench)
    plot_calibration(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")
    content = {
        **asdict(found), "device": device_name(), "data": bench.data["sha256"],
        "temperature": config.temperature,
    }  # fmt: skip
    where = write_beside(bench.head, CONFIDENCE_FILE, content, Path(config.out_dir))
    console.print(f"wrote {where}, which decoding uses if it lies beside the head's weights")


if __name__ == "__main__":
    COMMAND.run(main)
