"""Measures the wall-clock speed-up of real decoding, against the faster of two plain loops.

`python eval/speedup.py head.path=outputs/medusa/head data.path=prompts.jsonl methods=all`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.command.environment import check_compile
from conf.settings.measure import SpeedupRun
from eval.preflight_checks import check_measurement, check_methods


def check_speedup_run(run: SpeedupRun) -> None:
    """Refuse, before heavy imports, settings that no head can use."""
    check_methods(run.methods, before_imports=True)
    check_measurement(run, "speedup.json")


COMMAND = Command(__doc__, SpeedupRun, "speedup", check=check_speedup_run)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from typing import Any

from rich.console import Console
from rich.table import Table

from conf.command.run_record import collect_changed_settings
from eval.compare.methods import build_methods, choose_methods
from eval.compare.speedup_stats import print_concurrency, summarise_batch_size, summarise_speedup
from eval.compare.timing import measure_methods
from eval.decode.cuda_graphs import compute_num_slots
from eval.measure.acceptance_stats import count_dialogues, format_shown_interval
from eval.measure.measurement import (
    compute_weight_checksums,
    join_processes,
    open_jsonl_store,
    open_measurement,
    write_result,
)
from eval.measure.results import export_results, format_conditions
from eval.measure.verdict import judge_speedup, print_verdict
from eval.report.html_page import write_html_page
from eval.report.plots import plot_concurrency, plot_speedup
from heads.draft_head import DraftHead
from heads.export.writer import choose_engine, format_dtype
from heads.kinds import find_kind_name
from heads.mtp.checkpoint import find_mtp_layers

MAX_NODES = 256  # of any tree


def print_speedup(result: dict[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    dialogues = count_dialogues(result["methods"][result["baseline"]]["prompts"])
    table = Table(
        title=f"Speed-up over the baseline, {result['baseline']} (medians, {dialogues} dialogues)"
    )
    columns = ("method", "tau", "tokens/s", "speed-up", "95% interval", "efficiency")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name, row in result["methods"].items():
        table.add_row(
            f"{name} (lossy)" if row["lossy"] else name, f"{row['tau']:.3f}",
            f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}",
            format_shown_interval(row["speedup_ci95"], dialogues),
            "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}",
        )  # fmt: skip
    console.print(table)
    lossless = result["lossless"]
    if lossless is None:
        return
    console.print(
        f"{lossless['num_equal']} of {lossless['num_prompts']} texts equal to the target's "
        "greedy text under every method"
    )
    for divergence in lossless["first_divergences"][:5]:
        console.print(f"  {divergence}", highlight=False)


def find_own_mtp_layer(config: SpeedupRun) -> list[str]:
    """Use the target's own MTP layer as a head, if it has one and the methods ask for it."""
    path, given = config.target.path, [config.head.path, *config.heads]
    asked = any(name == "all" or name.startswith("mtp_") for name in config.methods)
    there = asked and path is not None and find_mtp_layers(path, config.target.revision)[1]
    return [str(path)] if there and path not in given else []


def main(config: SpeedupRun) -> None:
    """Measure, print, and write `speedup.json`, pictures, page and files for other tools."""
    check_methods(config.methods)
    check_compile("compile", config.compile, join_processes().device.type)
    heads = [*config.heads, *find_own_mtp_layer(config)]
    measurement = open_measurement(config, "speedup.json", heads)
    chosen = choose_methods(measurement, config)
    draft = compute_weight_checksums(config.draft.path) if config.draft.path else None
    with open_jsonl_store(config, "speedup.json", measurement, draft_weights=draft) as journal:
        methods = build_methods(measurement, config, chosen, journal)
        if config.compile:
            longest = max(len(prompt.token_ids) for prompt in measurement.prompts)
            measurement.target.compile(
                compute_num_slots(longest + config.max_new_tokens, MAX_NODES)
            )
        runs = {
            size: measure_methods(measurement, config, methods, size, journal)
            for size in config.batch_sizes
        }
    if not measurement.is_main_process:
        return
    Console(stderr=True).print("everything is decoded; intervals and pictures take seconds more")
    result = summarise_speedup(measurement, config, methods, runs[config.batch_size])
    result["concurrency"] = {
        str(size): summarise_batch_size(methods, of_size, config.seed)
        for size, of_size in runs.items()
    }
    console = Console()
    print_speedup(result, console)
    if config.concurrency:
        print_concurrency(result, console)
    path, written = write_result(config, "speedup.json", result, measurement)
    plot_speedup(written, path.with_suffix(".png"))
    if config.concurrency:
        plot_concurrency(written, path.with_name("concurrency.png"))
    write_html_page(written, path.with_suffix(".html"))
    console.print(format_conditions(written), highlight=False, markup=False)
    files = [path, path.with_suffix(".png"), path.with_suffix(".html")]
    files += export_results(written, path.parent)
    console.print("wrote " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    verdict = judge_speedup(result, [find_kind_name(head.draft_head) for head in measurement.heads])
    if config.head.path is not None and verdict is not None:
        onward = build_export_settings(measurement.head.draft_head, config)
        print_verdict("speedup", verdict, config, onward)


def build_export_settings(head: DraftHead, config: SpeedupRun) -> dict[str, Any] | None:
    """Build the settings that export a head for the first engine that serves it; None if none."""
    engine = choose_engine(head)
    if engine is None:
        return None
    path = Path(str(config.head.path))
    own = path.parent if path.name == "head" else Path("outputs") / path.name
    return collect_changed_settings(config, "head", "target") | {
        "format": engine.value,
        # As it was measured.
        "dtype": format_dtype(head),
        "out_dir": f"{own}-{engine.value}",
    }


if __name__ == "__main__":
    COMMAND.run(main)
