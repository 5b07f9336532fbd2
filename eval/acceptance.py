"""Acceptance of a head on any prompts: tau, alpha per depth, by category.

`python eval/acceptance.py head.path=outputs/medusa/head data.path=prompts.jsonl`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.measure import AcceptanceRun
from eval.preflight_checks import (
    CONDITIONS_FILE,
    adopt_head_target,
    build_condition_runs,
    check_inputs,
    check_measurement,
)

RESULT = "acceptance.json"


def check_acceptance_run(config: AcceptanceRun) -> None:
    """Refuse, before heavy imports, settings that no head can use."""
    check_measurement(config, CONDITIONS_FILE if config.conditions else RESULT)
    for run in build_condition_runs(config).values():
        check_inputs(run)


COMMAND = Command(__doc__, AcceptanceRun, "acceptance", check=check_acceptance_run)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.command.jsonl_store import JsonlStore
from conf.command.run_record import collect_changed_settings, to_json
from conf.errors import InputError
from conf.files import load_json
from conf.settings.measure import AcceptanceRun, Mode, SpeedupRun
from data.embedded import fill_default_paths
from eval.decode.engine import Step, decode
from eval.measure.acceptance_stats import (
    PromptSteps,
    compute_share,
    compute_tau,
    count_dialogues,
    format_interval,
    format_shown_interval,
    print_acceptance_lengths,
    select_tree_figures,
    sum_by_dialogue,
    summarise_acceptance,
)
from eval.measure.measurement import (
    Measurement,
    compute_prompt_seed,
    gather_items,
    open_jsonl_store,
    open_measurement,
    print_notes,
    write_result,
)
from eval.measure.modes import (
    build_mode_rows,
    compute_mode_figures,
    find_text_spans,
)
from eval.measure.prompts import Prompt
from eval.measure.replay import compare_first_choices, rank_candidates, replay_drafter, replay_tree
from eval.measure.results import export_results, format_conditions, write_files
from eval.measure.speculation_profile import compare_with_published
from eval.measure.target_answers import AnswerWithStates
from eval.measure.verdict import format_published, judge_acceptance, print_verdict
from eval.report.plots import plot_acceptance, plot_comparison
from heads.decoding.tree import Tree
from heads.folders import locate_head


def main(config: AcceptanceRun) -> None:
    """Measure a head, once or under each of several conditions."""
    if not config.conditions:
        with open_measurement(config, RESULT, may_use_engines=True) as measurement:
            if result := measure_and_report(measurement, config):
                print_conclusion(config, result)
        return
    print_notes(adopt_head_target(config))
    fill_default_paths(config, prompts=True)
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        first: Measurement | None = None
        for name, run in build_condition_runs(config).items():
            path = Path(run.out_dir) / RESULT
            if (finished := load_json(path)) is not None:  # by an earlier start
                if finished.get("config") != to_json(run):
                    raise InputError(
                        f"out_dir: {path} is of other settings; choose another out_dir"
                    )
                results[name] = finished
                continue
            measurement = stack.enter_context(
                open_measurement(run, RESULT, may_use_engines=True, like=first)
            )
            first = first or measurement
            if measurement.is_main_process:
                Console().rule(name or "as given")
            results[name] = measure_and_report(measurement, run)
    if first is None or first.is_main_process:
        console = Console()
        console.print(build_conditions_table(results))
        pooled = pool_conditions(results, config.seed)
        print_modes(build_mode_rows(pooled), console)
        path = Path(config.out_dir) / CONDITIONS_FILE
        content = {
            "head": config.head.path, "target": config.target.path,
            "conditions": build_condition_rows(results), **pooled,
        }  # fmt: skip
        write_files({path: json.dumps(content, indent=2) + "\n"}, f"out_dir={config.out_dir}")
        plot_comparison(results, picture := path.with_suffix(".png"), "")
        console.print(f"wrote {path}, {picture}", highlight=False, soft_wrap=True)
        print_conclusion(config, next(iter(results.values())), pooled)


def print_conclusion(
    config: AcceptanceRun, result: Mapping[str, Any], pooled: Mapping[str, Any] | None = None
) -> None:
    """Print the verdict of a result (of the first condition), and the command that is next.

    For a head that is worth it, the command measures the same drafts in seconds.

    Args:
        config: settings of the command.
        result: result to judge.
        pooled: figures over all conditions, whose modes are judged in place of the result's own.
    """
    if published := format_published(result):
        Console().print(published, highlight=False, markup=False, soft_wrap=True)
    same = collect_changed_settings(config, *(field.name for field in fields(SpeedupRun)))
    verdict = judge_acceptance(result, pooled)
    print_verdict("acceptance", verdict, config, same | {"out_dir": config.out_dir})


def measure_and_report(measurement: Measurement, config: AcceptanceRun) -> dict[str, Any]:
    """Measure, print, and write `acceptance.json`, its picture and files for other tools.

    Returns:
        The contents of `acceptance.json`; empty in all processes but the first.
    """
    with open_jsonl_store(config, RESULT, measurement) as journal:
        result = measure_acceptance(measurement, config, journal)
    if not measurement.is_main_process:
        return {}
    place = locate_head(str(config.head.path), config.head.revision)
    folder = place if place.is_dir() else place.parent
    result["published"] = compare_with_published(result, folder, config.seed)
    console = Console()
    print_acceptance(result, console)
    Console(stderr=True).print("writing the figures and their picture")
    path, written = write_result(config, RESULT, result, measurement)
    plot_acceptance(written, path.with_suffix(".png"))
    console.print(format_conditions(written), highlight=False, markup=False)
    files = [path, path.with_suffix(".png"), *export_results(written, path.parent)]
    console.print("wrote " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    return written


def measure_acceptance(
    measurement: Measurement, config: AcceptanceRun, journal: JsonlStore
) -> dict[str, Any]:
    """Measure the content of `acceptance.json`: the chain's figures, the tree's under its key."""
    numbers = range(len(measurement.prompts))
    with tqdm(total=len(numbers), desc=config.mode.value, unit="prompt") as bar:
        size = measurement.answer_source.preferred_batch_size
        for first in numbers[::size]:
            group = numbers[first : first + size]
            remaining = [number for number in group if number not in journal.done_ids]
            bar.update(len(group) - len(remaining))
            answers: list[AnswerWithStates | None] = [None for _ in group]
            if remaining and config.mode is Mode.replay:
                # The whole group: in rare ties an answer depends on those written beside it.
                token_ids = [measurement.prompts[number].token_ids for number in group]
                taps, length = measurement.head.draft_head.taps, config.max_new_tokens
                answers = [*measurement.answer_source.answer_with_states(token_ids, length, taps)]
            for number in remaining:
                row = _build_prompt_row(
                    measurement, config, measurement.prompts[number], answers[number - first]
                )
                journal.append([{"id": number, **row}])
                bar.update()
    rows = gather_items(journal.load_rows())
    rows.sort(key=lambda row: (row["chain"]["turn"], row["chain"]["dialogue"]))

    def figures(name: str, depth: int) -> dict[str, object]:
        prompts = [
            PromptSteps(**row[name] | {"steps": [Step(**step) for step in row[name]["steps"]]})
            for row in rows
        ]
        by_mode = compute_mode_figures([p.build_row() for p in prompts], config.seed)
        return {**summarise_acceptance(prompts, depth, config.seed), "by_mode": by_mode}

    head = measurement.head
    chain, tree = figures("chain", head.chain.depth), figures("tree", head.tree.depth)
    tree_name = "static_tree" if isinstance(head.tree, Tree) else "dynamic_tree"
    result = {"mode": config.mode.value, **chain, tree_name: tree}
    if config.mode is Mode.replay:
        depths = zip(*(row["agreement"] for row in rows), strict=True)
        result["agreement"] = [compute_share(a for text in texts for a in text) for texts in depths]
    return result


def _build_prompt_row(
    measurement: Measurement,
    config: AcceptanceRun,
    prompt: Prompt,
    answered: AnswerWithStates | None,
) -> dict[str, Any]:
    """Collect the steps of chain and tree on a prompt, and for a replay the chain's agreement.

    Args:
        measurement: measurement with target and head.
        config: settings of the command.
        prompt: prompt of the measurement.
        answered: the target's own answer and hidden states, for a replay; None to decode.
    """
    head, length = measurement.head, config.max_new_tokens

    def row(response: list[int], steps: list[Step], drafted: list[int]) -> dict[str, Any]:
        spans = find_text_spans(prompt, response, measurement.embeddings_and_output_head.tokenizer)
        place = (prompt.dialogue, prompt.turn, len(prompt.token_ids), spans)
        return asdict(PromptSteps(prompt.category, steps, drafted, *place))

    def decoded(name: str) -> dict[str, Any]:
        seed = compute_prompt_seed(prompt, config.seed)
        drafter = head.make_drafter(name, measurement.sampling, [seed])
        text = decode(
            measurement.target, drafter, prompt.token_ids, length, measurement.sampling, seed
        )
        return row(text.token_ids, text.steps, text.drafted)

    if answered is None:
        return {name: decoded(name) for name in ("chain", "tree")}
    answer, output = answered
    measured: dict[str, Any] = {}
    for name, shape in (("chain", head.chain), ("tree", head.tree)):
        if not isinstance(shape, Tree):
            drafter = head.make_drafter(name, measurement.sampling, [config.seed])
            steps, drafted = replay_drafter(drafter, output, prompt.token_ids, answer)
            measured[name] = row(answer, steps, drafted)
            continue
        ranked = rank_candidates(head.draft_head, shape, output, prompt.token_ids, answer)
        steps = replay_tree(shape, ranked, answer)
        measured[name] = row(answer, steps, [shape.num_nodes - 1] * len(steps))
        if name == "chain":
            measured["agreement"] = compare_first_choices(ranked, answer)
    return measured


def print_acceptance(result: dict[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    tree = select_tree_figures(result)
    table = Table(title=f"Acceptance ({result['mode']}, {result['num_prompts']} prompts)")
    for column in ("category", "prompts", "tau chain", "95% interval", "tau tree", "alpha"):
        table.add_column(column, justify="left" if column == "category" else "right")
    rows = {**result["by_category"], "all": {**result, "ci95": result["tau_ci95"]}}
    dialogues = count_dialogues(result["prompts"])
    for name, row in rows.items():
        interval = format_shown_interval(row["ci95"], min(dialogues, row["num_prompts"]))
        in_tree = tree if name == "all" else tree["by_category"][name]
        table.add_row(
            name, str(row["num_prompts"]), f"{row['tau']:.3f}", interval,
            f"{in_tree['tau']:.3f}", " ".join(f"{rate:.2f}" for rate in row["alpha"]),
        )  # fmt: skip
    console.print(table)
    print_modes(build_mode_rows(result, tree), console)
    print_acceptance_lengths(result["acceptance_length"], console)


def print_modes(lines: list[list[str]], console: Console) -> None:
    """Print the rows of `build_mode_rows` as a table, if there are any."""
    if lines:
        table = Table(title="tau by mode")
        for column in lines[0]:
            table.add_column(column, justify="left" if column == "mode" else "right")
        for line in lines[1:]:
            table.add_row(*line)
        console.print(table)


def build_conditions_table(results: Mapping[str, dict[str, Any]]) -> Table:
    """Build a table with a row per condition; its `tokens` are the median of prompt tokens."""
    rows = build_condition_rows(results)
    table = Table(title="Acceptance by condition")
    table.add_column("condition", overflow="fold")
    for column in ("prompts", "tokens", "tau, 95%", "as vLLM", "tree"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        bounds = "" if row["tau_ci95"] is None else f" {format_interval(row['tau_ci95'])}"
        table.add_row(
            name or "as given", str(row["num_prompts"]), f"{row['prompt_tokens']:.0f}",
            f"{row['tau']:.2f}{bounds}",
            *(
                "-" if figure is None else f"{figure:.2f}"
                for figure in (row["per_draft"], row["tau_tree"])
            ),
        )  # fmt: skip
    return table


def build_condition_rows(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Build the figures of `conditions.json` for each condition, by its name."""
    rows = {}
    for name, result in results.items():
        rows[name] = {
            "num_prompts": result["num_prompts"],
            "prompt_tokens": statistics.median(row["prompt_tokens"] for row in result["prompts"]),
            "tau": result["tau"],
            "tau_ci95": result["tau_ci95"],
            "per_draft": result["acceptance_length"]["drafts"]["pooled"],
            "tau_tree": select_tree_figures(result)["tau"],
            "by_mode": result["by_mode"],
            "alpha": result["alpha"],
            "mode": result["mode"],
            "conditions": result["conditions"],
        }
    return rows


def pool_conditions(results: Mapping[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Compute tau of the chain over all conditions, and by mode; a condition is a mode too.

    Dialogues of the same data are the same dialogues under each condition.
    """
    numbers: dict[tuple[str, int], int] = {}
    rows = [
        {
            **row,
            "condition": name or "as given",
            "dialogue": numbers.setdefault(
                (result["data"]["sha256"], row["dialogue"]), len(numbers)
            ),
        }
        for name, result in results.items()
        for row in result["prompts"]
    ]
    by_mode = compute_mode_figures(rows, seed, left_out=())
    return {"tau": compute_tau(sum_by_dialogue(rows)), "by_mode": by_mode}


if __name__ == "__main__":
    COMMAND.run(main)
