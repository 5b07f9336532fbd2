"""Calibrates a head's confidence in its chains, and finds the chance below which cutting them pays.

`python eval/calibrate.py head.path=outputs/eagle/head data.path=prompts.jsonl`

Half of the dialogues relate confidence to acceptance; the other half checks the calibration in real
decoding. The result is written to the head's folder, where the methods `eagle_cut`, `medusa_cut`
and so on read it.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.measure import CalibrateRun
from eval.preflight_checks import check_measurement

CHECK = partial(check_measurement, result="calibrate.json")
COMMAND = Command(__doc__, CalibrateRun, "calibrate", check=CHECK)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.command.jsonl_store import JsonlStore
from conf.command.run_record import collect_changed_settings, print_next_command, prompts_for
from conf.errors import InputError
from eval.compare.halves import decode_with_drafters, open_split_measurement
from eval.decode.engine import Step, decode
from eval.measure.measured_head import CONFIDENCE_FILE, get_device_name, write_beside_head
from eval.measure.measurement import (
    Measurement,
    compute_prompt_seed,
    open_jsonl_store,
    write_result,
)
from eval.report.plots import plot_calibration
from eval.tune.confidence import (
    THRESHOLDS,
    ChainCosts,
    ChainForecast,
    ChainSteps,
    FixedLength,
    build_reliability_bins,
    by_depth,
    compute_ece,
    fit_calibration,
)
from eval.tune.step_costs import CostCurve, build_typical_context, measure_step_costs
from heads.decoding.drafting import Draft, Drafter, Roots
from heads.decoding.head_drafter import Calibration
from heads.decoding.tree import Tree

COSTS = -1
"""Row of a journal with the costs of drafts and passes."""
WHOLE, SHORTER, CUT = "whole", "shorter", "cut"


class ConfidenceRecorder:
    """Drafter that records the head's confidence in its chains."""

    num_static_nodes = None

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps = drafter, drafter.taps
        self.observe, self.select_rows = drafter.observe, drafter.select_rows
        self.logits: list[list[float]] = []

    def propose(self, roots: Roots) -> Draft:
        """Draft a chain for one text, and record the confidence in its tokens."""
        draft = self.drafter.propose(roots)
        if draft.confidence is None:
            raise InputError(
                "head.path: this head gives no confidence in its drafts; calibrate a head that "
                "does, e.g. an EAGLE head"
            )
        self.logits.append(draft.confidence[0].tolist())
        return draft

    def insert_row(self, row: int, other: "ConfidenceRecorder") -> None:
        """Take a row of another drafter."""
        self.drafter.insert_row(row, other.drafter)


def record_confidences(
    measurement: Measurement, config: CalibrateRun, journal: JsonlStore
) -> list[dict[str, Any]]:
    """Decode with whole chains; return one row per prompt, with the confidence of every step."""
    whole = replace(
        measurement.head, calibration=Calibration.make_neutral(measurement.head.chain.depth)
    )
    for number, prompt in enumerate(tqdm(measurement.prompts, desc="whole chains", unit="prompt")):
        if number in journal.done_ids:
            continue
        seed = compute_prompt_seed(prompt, config.seed)
        recorder = ConfidenceRecorder(whole.make_drafter(CUT, measurement.sampling, [seed]))
        length = config.max_new_tokens
        text = decode(
            measurement.target, recorder, prompt.token_ids, length, measurement.sampling, seed
        )
        row = {"steps": [asdict(step) for step in text.steps], "drafted": text.drafted}
        row |= {"token_ids": text.token_ids, "logits": recorder.logits}
        journal.append([{"id": number, **row}])
    return [row for row in journal.load_rows() if 0 <= row["id"] < len(measurement.prompts)]


def build_chain_steps(rows: Sequence[dict[str, Any]], depth: int) -> ChainSteps:
    """Build the steps of whole chains from the recorded rows of some prompts.

    Raises:
        InputError: the answers have no steps.
    """
    steps = [Step(**step) for row in rows for step in row["steps"]]
    if not steps:
        raise InputError(
            "data.path: every answer ends with its first token, so nothing is drafted; name other "
            "prompts"
        )
    logits, drafted = ([x for row in rows for x in row[name]] for name in ("logits", "drafted"))
    return ChainSteps.from_logits(logits, steps, drafted, depth)


def measure_costs(measurement: Measurement, context: list[int], journal: JsonlStore) -> ChainCosts:
    """Time passes, whole chains of every length, and chains that end at every length."""
    if COSTS not in journal.done_ids:
        head, depth = measurement.head, measurement.head.chain.depth
        whole, cut = range(1, depth + 1), range(depth + 1)
        sampling = measurement.sampling
        drafters = {
            (WHOLE, n): replace(head, chain=Tree.make_chain(n)).make_drafter("chain", sampling, [0])
            for n in whole
        } | {
            (CUT, n): replace(head, calibration=FixedLength.from_num_tokens(n)).make_drafter(
                CUT, sampling, [0]
            )
            for n in cut
        }
        curve, drafts = measure_step_costs(
            measurement.target, drafters, context, sizes=range(2, depth + 2)
        )
        costs = ChainCosts(curve, [drafts[WHOLE, n] for n in whole], [drafts[CUT, n] for n in cut])
        journal.append([{"id": COSTS, **asdict(costs)}])
    (row,) = (row for row in journal.load_rows() if row["id"] == COSTS)
    return ChainCosts(CostCurve(**row["curve"]), row["whole"], row["cut"])


def build_report(fitted: ChainSteps, checked: ChainSteps, costs: ChainCosts) -> dict[str, Any]:
    """Fit temperatures and threshold on one half of the prompts, and check them on the other."""
    depth = fitted.logits.shape[1]
    calibration, without_offsets = fit_calibration(fitted), fit_calibration(fitted, [0.0])
    before, alone, after = (
        by_depth(checked, tried)
        for tried in (Calibration.make_neutral(depth), without_offsets, calibration)
    )
    whole = [ChainForecast.from_whole_chains(fitted, n, costs) for n in range(1, depth + 1)]
    cut = [
        ChainForecast.from_cut_chains(fitted, calibration, chance, costs) for chance in THRESHOLDS
    ]
    shorter, best = (max(tried, key=lambda f: f.tokens_per_s) for tried in (whole, cut))
    pays = best.tokens_per_s > whole[-1].tokens_per_s
    calibration = replace(calibration, threshold=(best.threshold or 0.0) if pays else 0.0)
    forecasts = {
        WHOLE: ChainForecast.from_whole_chains(checked, depth, costs),
        SHORTER: ChainForecast.from_whole_chains(checked, shorter.most_tokens, costs),
        CUT: ChainForecast.from_cut_chains(checked, calibration, calibration.threshold, costs),
    }
    return {
        **asdict(calibration),
        "ece": {
            "before": [compute_ece(*row) for row in before],
            "temperatures_alone": [compute_ece(*row) for row in alone],
            "after": [compute_ece(*row) for row in after],
        },
        "reliability": {
            "before": [build_reliability_bins(*row) for row in before],
            "after": [build_reliability_bins(*row) for row in after],
        },
        "num_steps": {"fitted": len(fitted.logits), "checked": len(checked.logits)},
        "lengths": [asdict(forecast) for forecast in whole],
        "thresholds": [asdict(forecast) for forecast in cut],
        "checked": {name: asdict(forecast) for name, forecast in forecasts.items()},
        "costs": asdict(costs),
    }


def print_calibration(result: dict[str, Any], console: Console) -> None:
    """Print calibration errors by depth, and thresholds with the chosen one."""
    table = Table(title="Expected calibration error on the checking half")
    errors = (name.replace("_", " ") for name in result["ece"])
    for column in ("depth", "temperature", "offset", *errors):
        table.add_column(column, justify="right")
    columns = (result["temperatures"], result["offsets"], *result["ece"].values())
    for depth, (temperature, offset, *row) in enumerate(zip(*columns, strict=True), start=1):
        shares = (f"{error:.3f}" for error in row)
        table.add_row(str(depth), f"{temperature:.2f}", f"{offset:.1f}", *shares)
    console.print(table)
    table = Table(title=f"Whole chains, and cut ones by their threshold, {get_device_name()}")
    for column in ("chains", "draft tokens", "accepted", "tau", "predicted", "measured"):
        table.add_column(column, justify="right")
    for part in ("lengths", "thresholds"):
        for row in result[part]:
            table.add_row(*_format_cells(row, result["lengths"][-1]), "")
        table.add_section()
    speeds = {n: row["decode_tokens_per_s"] for n, row in result["measured"]["methods"].items()}
    for name, row in result["checked"].items():
        _, *cells = _format_cells(row, result["checked"][WHOLE])
        table.add_row(f"checked: {name}", *cells, f"{speeds[name] / speeds[WHOLE]:.3f}")
    console.print(table)


def _format_cells(row: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    threshold = row["threshold"]
    return [
        f"whole, {row['most_tokens']}" if threshold is None else f"below {threshold:.2f}",
        f"{row['num_drafted']:.2f}",
        f"{row['share_accepted']:.3f}",
        f"{row['tau']:.3f}",
        f"{row['tokens_per_s'] / whole['tokens_per_s']:.3f}",
    ]


def main(config: CalibrateRun) -> None:
    """Calibrate, check, and write the calibration, `calibrate.json` and a picture."""
    measurement, *halves = open_split_measurement(config, "calibrate.json", "calibrating")
    with open_jsonl_store(config, "calibrate.json", measurement) as journal:
        rows = record_confidences(measurement, config, journal)
        depth = measurement.head.chain.depth
        fitted, checked = (build_chain_steps([rows[n] for n in half], depth) for half in halves)
        prompts, texts = (
            [p.token_ids for p in measurement.prompts],
            [row["token_ids"] for row in rows],
        )
        costs = measure_costs(measurement, build_typical_context(prompts, texts), journal)
        result = build_report(fitted, checked, costs)
        calibration, head = Calibration.from_json(result), measurement.head
        shorter = Tree.make_chain(result["checked"][SHORTER]["most_tokens"])
        drafters = {
            WHOLE: (partial(head.make_drafter, "chain", measurement.sampling), head.chain),
            SHORTER: (
                partial(replace(head, chain=shorter).make_drafter, "chain", measurement.sampling),
                shorter,
            ),
            CUT: (
                partial(
                    replace(head, calibration=calibration).make_drafter, CUT, measurement.sampling
                ),
                head.chain,
            ),
        }
        others = replace(measurement, prompts=[measurement.prompts[number] for number in halves[1]])
        result["measured"] = decode_with_drafters(others, config, drafters, journal)
    console = Console()
    print_calibration(result, console)
    console.print(f"calibrated on {len(halves[0])} prompts, checked on {len(halves[1])} others")
    path = write_result(config, "calibrate.json", result, measurement)
    plot_calibration(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")
    content = {
        **asdict(calibration), "device": get_device_name(), "data": measurement.data["sha256"],
        "temperature": config.temperature,
    }  # fmt: skip
    path = write_beside_head(measurement.head, CONFIDENCE_FILE, content, Path(config.out_dir))
    console.print(f"wrote {path}, which decoding uses if it lies beside the head's weights")
    # On other prompts, as the prompts of the calibration would flatter its result.
    same = collect_changed_settings(config, "head", "target")
    print_next_command("calibrate", same | prompts_for(measurement.embeddings_and_output_head.name))


if __name__ == "__main__":
    COMMAND.run(main)
