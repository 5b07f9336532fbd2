"""The table over all architectures."""

from collections import Counter
from typing import Any

import torch
import transformers

from scripts.zoo.checks import COLUMNS

HEADINGS = {
    "medusa": "Medusa", "eagle": "EAGLE-3.1", "replay": "replay = decode",
}  # fmt: skip
STATES = ("works", "works with chains", "refused", "differs", "fails", "not made")

Rows = dict[str, dict[str, Any]]
"""What was found, by model type."""


def result(rows: Rows, left_out: dict[str, str]) -> dict[str, Any]:
    """JSON content: everything found, and what it was found with."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "counts": _counted(rows),
        "found": {
            name: {key: value for key, value in row.items() if key != "traceback"}
            for name, row in rows.items()
        },
        "no_target": left_out,
    }


def _counted(rows: Rows) -> dict[str, int]:
    counted = Counter(row["state"] for row in rows.values())
    return {state: counted[state] for state in STATES if counted[state]}


def counts(rows: Rows) -> str:
    """One line: how many work, are refused and so on."""
    parts = ", ".join(f"{number} {state}" for state, number in _counted(rows).items())
    return f"{len(rows)} model types of transformers {transformers.__version__}: {parts}"


def table(rows: Rows, left_out: dict[str, str]) -> str:
    """Markdown: a row a model type, the reasons of those that do not work, and who is no target."""
    names = [HEADINGS.get(name, name) for name in COLUMNS]
    lines = [
        "# Targets",
        "",
        f"{counts(rows)}. Written by `scripts/zoo/check.py`; each is a random model of 4 "
        "layers, hidden size 64, vocabulary 320. Texts of 48 tokens after prompts of 40 to 70, "
        "past windows of 12, chunks of 8 and RoPE switches at 64, are held to `generate`.",
        "",
        f"| model type | {' | '.join(names)} | attention | how made |",
        f"|---|{'---|' * len(names)}---|---|",
        *(_row(name, row) for name, row in rows.items() if row["state"] != "not made"),
    ]
    wrong = {name: why for name, row in rows.items() if (why := _why(row))}
    lines += _section("Why not", "model type | reason", wrong)
    lines += _section("No targets", "model type | reason", left_out)
    return "\n".join(lines) + "\n"


def _section(title: str, heading: str, reasons: dict[str, str]) -> list[str]:
    if not reasons:
        return []
    rows = [f"| {name} | {why.replace('|', '/')} |" for name, why in reasons.items()]
    return ["", f"## {title}", "", f"| {heading} |", "|---|---|", *rows]


def _row(name: str, row: dict[str, Any]) -> str:
    cells = [row["columns"].get(column, "").split(":")[0] for column in COLUMNS]
    for head in ("medusa", "eagle"):
        if head in row.get("tau", {}):
            cells[COLUMNS.index(head)] += f", tau {row['tau'][head]:.2f}"
    attention = row.get("attention", "").split(":")[0]
    return f"| {name} | {' | '.join(cells)} | {attention} | {_made(row.get('made'))} |"


def _made(made: dict[str, Any] | None) -> str:
    if made is None:
        return ""
    by_hand = "; ".join(
        ", ".join(f"{key}={value}" for key, value in settings.items())
        for settings in made["by_hand"].values()
    )
    shown = by_hand.replace("|", "/")
    return f"{made['class']}, {made['layers']}" + (f"; {shown}" if shown else "")


def _why(row: dict[str, Any]) -> str:
    if "why" in row:
        return f"not made: {row['why']}"
    reasons = [
        f"{HEADINGS.get(name, name)}: {row['columns'][name]}"
        for name in COLUMNS
        if row["columns"].get(name, "yes") != "yes"
    ]
    return "; ".join(dict.fromkeys(reasons))
