"""Results of one head under several conditions: a table, a file."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from conf.command.run_record import to_json
from conf.errors import InputError
from conf.files import write_atomically
from conf.settings.measure import AcceptanceRun
from eval.measure.stats import format_interval, select_tree_figures
from eval.measure.under import CONDITIONS_FILE


def load_finished_result(run: AcceptanceRun) -> dict[str, Any] | None:
    """Read the result of a condition that an earlier start measured; None if there is none.

    Raises:
        InputError: the result has other settings.
    """
    path = Path(run.out_dir) / "acceptance.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("config") != to_json(run):
        raise InputError(f"out_dir: {path} is of other settings; choose another out_dir")
    return found


def build_conditions_table(results: Mapping[str, dict[str, Any]]) -> Table:
    """Make a table with a row per condition; `tokens` is the median of the prompts' tokens."""
    rows = _build_condition_rows(results)
    parts = [
        part for part in ("thinking", "answer") if any(r[f"tau_{part}"] for r in rows.values())
    ]
    table = Table(title="Acceptance by condition")
    table.add_column("condition", overflow="fold")
    for column in ("prompts", "tokens", "tau, 95%", "as vLLM", "tree", *parts):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        bounds = "" if row["tau_ci95"] is None else f" {format_interval(row['tau_ci95'])}"
        keys = ("per_draft", "tau_tree", *(f"tau_{part}" for part in parts))
        figures = (row[key] for key in keys)
        table.add_row(
            name or "as given", str(row["num_prompts"]), f"{row['prompt_tokens']:.0f}",
            f"{row['tau']:.2f}{bounds}",
            *("-" if figure is None else f"{figure:.2f}" for figure in figures),
        )  # fmt: skip
    return table


def write_conditions(config: AcceptanceRun, results: Mapping[str, dict[str, Any]]) -> list[Path]:
    """Write `conditions.json`, a row per condition.

    Returns:
        The file, and the picture that goes beside it.

    Raises:
        InputError: it cannot be written.
    """
    path = Path(config.out_dir) / CONDITIONS_FILE
    rows = _build_condition_rows(results)
    content = {"head": config.head.path, "target": config.target.path, "conditions": rows}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"out_dir={config.out_dir}: cannot write {path}: {error}") from error
    return [path, path.with_suffix(".png")]


def _build_condition_rows(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    rows = {}
    for name, result in results.items():
        parts = {part: figures["tau"] for part, figures in result["by_part"].items()}
        rows[name] = {
            "num_prompts": result["num_prompts"],
            "prompt_tokens": statistics.median(row["prompt_tokens"] for row in result["prompts"]),
            "tau": result["tau"],
            "tau_ci95": result["tau_ci95"],
            "per_draft": result["acceptance_length"]["drafts"]["pooled"],
            "tau_tree": select_tree_figures(result)["tau"],
            "tau_thinking": parts.get("thinking"),
            "tau_answer": parts.get("answer"),
            "alpha": result["alpha"],
            "mode": result["mode"],
            "conditions": result["conditions"],
        }
    return rows
