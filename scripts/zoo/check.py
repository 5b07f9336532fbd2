"""Finds the architectures of transformers that work: makes each tiny, and tests all features.

`python scripts/zoo/check.py [model_types=[llama,qwen3_next]]` makes a random target of every model
type, compares decoding with `generate`, trains heads and replays them, and writes the table
`targets.md` and `targets.json`. A second start continues; to check a model type again, delete its
file in `out_dir/found`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import TargetsRun

COMMAND = Command(__doc__, TargetsRun, "check")
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
import multiprocessing
import os
import traceback
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from tqdm import tqdm

from conf.errors import InputError
from conf.files import write_atomically
from scripts.zoo.checks import COLUMNS, check_target
from scripts.zoo.families import NO_TARGET
from scripts.zoo.tiny import MADE_FILE, make_tiny_target, model_types

PROCESSES = multiprocessing.get_context("forkserver")
HEADINGS = {
    "medusa": "Medusa", "eagle": "EAGLE-3.1", "replay": "replay = decode",
}  # fmt: skip
STATES = ("works", "works with chains", "refused", "differs", "fails", "not made")
Results = dict[str, dict[str, Any]]
"""Result of a check, by model type."""


def main(config: TargetsRun) -> None:
    """Print how many work; write `targets.md` and `targets.json`."""
    names = choose_model_types(config.model_types)
    out_dir = Path(config.out_dir)
    try:
        (out_dir / "found").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: cannot write there: {error}") from error
    targets = [name for name in names if name not in NO_TARGET]
    left = [name for name in targets if not result_at(out_dir, name).is_file()]
    if left:
        PROCESSES.set_forkserver_preload(["scripts.zoo.checks"])
    with tqdm(left, unit="model type") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            check_in_process(out_dir, name, config.timeout)
    results = {
        n: json.loads(result_at(out_dir, n).read_text()) for n in names if n not in NO_TARGET
    }
    left_out = {name: NO_TARGET[name] for name in names if name in NO_TARGET}
    content = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "counts": count_states(results),
        "found": {
            name: {key: value for key, value in result.items() if key != "traceback"}
            for name, result in results.items()
        },
        "no_target": left_out,
    }
    write_atomically(out_dir / "targets.json", json.dumps(content, indent=1) + "\n")
    write_atomically(out_dir / "targets.md", build_table(results, left_out))
    print(format_counts(results))
    print(f"wrote {out_dir / 'targets.md'} and {out_dir / 'targets.json'}")


def choose_model_types(names: list[str]) -> list[str]:
    """Model types to check.

    Raises:
        InputError: transformers has no such causal or image-text-to-text model.
    """
    known = model_types()
    for name in names:
        if name not in known:
            raise InputError(f"model_types: {name} is unknown; allowed: {known}")
    return names or known


def result_at(out_dir: Path, name: str) -> Path:
    """File with the result of one model type."""
    return out_dir / "found" / f"{name}.json"


def check_in_process(out_dir: Path, name: str, timeout: float) -> None:
    """Check a model type in a separate process, which may crash or hang."""
    log = out_dir / "found" / f"{name}.log"
    process = PROCESSES.Process(target=check_one, args=(name, out_dir, log))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        why = f"took more than {timeout:g} s"
    elif not result_at(out_dir, name).is_file():
        why = f"its process ended with code {process.exitcode}"
    else:
        log.unlink(missing_ok=True)
        return
    result = {"state": "fails", "columns": {"loads": f"FAILED: {why}"}}
    write_atomically(result_at(out_dir, name), json.dumps(result, indent=1) + "\n")


def check_one(name: str, out_dir: Path, log: Path) -> None:
    """Make a target, check it and write the result, in a separate process."""
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # matrices this small take longer with more
    try:
        folder = make_tiny_target(name, out_dir / "made")
    except Exception as error:  # noqa: BLE001 any error of transformers
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        result = {"state": "not made", "why": why, "traceback": traceback.format_exc()}
    else:
        result = {**check_target(folder), "made": json.loads((folder / MADE_FILE).read_text())}
    write_atomically(result_at(out_dir, name), json.dumps(result, indent=1) + "\n")


def count_states(results: Results) -> dict[str, int]:
    """Number of model types in each state."""
    numbers = Counter(result["state"] for result in results.values())
    return {state: numbers[state] for state in STATES if numbers[state]}


def format_counts(results: Results) -> str:
    """Summarise on one line how many work, are refused and so on."""
    parts = ", ".join(f"{number} {state}" for state, number in count_states(results).items())
    return f"{len(results)} model types of transformers {transformers.__version__}: {parts}"


def build_table(results: Results, left_out: dict[str, str]) -> str:
    """Make Markdown: a row per model type, reasons for failures, and types that are no targets."""
    names = [HEADINGS.get(name, name) for name in COLUMNS]
    lines = [
        "# Targets",
        "",
        f"{format_counts(results)}. Written by `scripts/zoo/check.py`; each is a random model of 4 "
        "layers, hidden size 64, vocabulary 320. Texts of 48 tokens after prompts of 40 to 70, "
        "beyond windows of 12, chunks of 8 and RoPE switches at 64, are compared with `generate`.",
        "",
        f"| model type | {' | '.join(names)} | attention | how made |",
        f"|---|{'---|' * len(names)}---|---|",
        *(format_row(name, each) for name, each in results.items() if each["state"] != "not made"),
    ]
    reasons = {name: format_reason(result) for name, result in results.items()}
    for title, pairs in (("Why not", reasons), ("No targets", left_out)):
        rows = [f"| {name} | {why.replace('|', '/')} |" for name, why in pairs.items() if why]
        if rows:
            lines += ["", f"## {title}", "", "| model type | reason |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def format_row(name: str, result: dict[str, Any]) -> str:
    """Make a row of the table."""
    cells = [result["columns"].get(column, "").split(":")[0] for column in COLUMNS]
    for head, tau in result.get("tau", {}).items():
        cells[COLUMNS.index(head)] += f", tau {tau:.2f}"
    attention = result.get("attention", "").split(":")[0]
    made, how = result.get("made"), ""
    if made is not None:
        by_hand = "; ".join(
            ", ".join(f"{key}={value}" for key, value in settings.items())
            for settings in made["by_hand"].values()
        )
        shown = by_hand.replace("|", "/")
        how = f"{made['class']}, {made['layers']}" + (f"; {shown}" if shown else "")
    return f"| {name} | {' | '.join(cells)} | {attention} | {how} |"


def format_reason(result: dict[str, Any]) -> str:
    """Explain why a model type was not made, or list the checks that it failed."""
    if "why" in result:
        return f"not made: {result['why']}"
    reasons = [
        f"{HEADINGS.get(name, name)}: {result['columns'][name]}"
        for name in COLUMNS
        if result["columns"].get(name, "yes") != "yes"
    ]
    return "; ".join(dict.fromkeys(reasons))


if __name__ == "__main__":
    COMMAND.run(main)
