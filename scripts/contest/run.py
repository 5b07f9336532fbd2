"""Runs a fair contest of draft heads: the same target, texts, budget, prompts and machine for all.

`python scripts/contest/run.py target.path=... data.path=chats.jsonl prompts.path=my.jsonl`

Trains every recipe of `recipes`, compares the heads and the methods without a head, and copies the
fastest head to `out_dir/winner/head`. Each part is a separate command whose result is kept, so a
stopped contest continues when started again.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import ContestRun
from scripts.refusals import check_contest

COMMAND = Command(__doc__, ContestRun, "contest", check=check_contest)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
from typing import Any

from conf.errors import InputError
from conf.files import lock_file
from conf.settings.data import DataRun
from conf.settings.scripts import ContestPart
from data.embedded import fill_default_paths
from eval.preflight_checks import check_methods
from scripts.contest import plan, report, tasks


def run_missing(
    todo: list[tasks.Task], out_dir: Path, took: tasks.TaskCosts, estimate: dict[str, Any]
) -> None:
    """Run the tasks without a result, and print the current task and the next ones."""
    missing = [task for task in todo if not task.result.exists()]
    for number, task in enumerate(missing, start=1):
        following = missing[number].name if number < len(missing) else "nothing more"
        about = estimate.get(task.name)
        words = "" if about is None else f", about {report.format_minutes(about['seconds'])} min"
        print(f"{task.name}{words}; then {following}", flush=True)
        tasks.run_task(task, out_dir, took)


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the running command is stopped too."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(config: ContestRun) -> None:
    """Plan, train, measure; write `contest.md`, `contest.html`, `contest.json` and `winner`."""
    check_contest(config)
    entrants = plan.parse_recipes(config.recipes)
    check_methods(config.untrained)
    fill_default_paths(config)
    fill_default_paths(DataRun(config.target, config.prompts), prompts=True)
    out_dir = Path(config.out_dir).absolute()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_file(out_dir / ".lock")
    except OSError as error:
        raise InputError(f"out_dir={config.out_dir}: cannot write there: {error}") from error
    with lock, raise_on_sigterm():
        plan.claim_folder(config, out_dir)
        tasks.end_orphans(out_dir)
        took, path = tasks.TaskCosts(out_dir), out_dir / "plan.json"
        if ContestPart.plan in config.parts and not path.exists():
            run_missing(plan.list_probe_tasks(config, entrants, out_dir), out_dir, took, {})
            plan.make_plan(config, entrants, out_dir, took)
        if not path.exists():
            raise InputError(f"parts: {path} is missing; run the part plan first")
        settled = json.loads(path.read_text())
        print(report.shown_plan(settled))
        todo: list[tasks.Task] = []
        if ContestPart.train in config.parts:
            todo += plan.list_training_tasks(config, entrants, out_dir, settled)
        if ContestPart.measure in config.parts:
            todo += plan.list_measurements(config, entrants, out_dir)
        run_missing(todo, out_dir, took, settled["estimate"])
        if ContestPart.report in config.parts:
            print(report.write_report(entrants, out_dir, settled, took))


if __name__ == "__main__":
    COMMAND.run(main)
