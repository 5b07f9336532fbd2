"""Runs a fair contest of draft heads: the same target, texts, budget, prompts and machine for all.

`python scripts/contest/run.py target.path=... data.path=chats.jsonl tokens=4000000`

Trains every recipe of `recipes`, compares the heads and the methods without a head, and copies the
fastest head to `out_dir/winner/head`. Each part is a separate command whose result is kept, so a
stopped contest continues when started again.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import ContestRun
from data.rows.data_files import check_data_paths
from eval.preflight_checks import check_inputs, check_own_data


def check_contest(config: ContestRun) -> None:
    """Refuse missing inputs.

    Raises:
        InputError: names the setting and its allowed values.
    """
    check_data_paths(config.prompts, "prompts")
    check_inputs(config)
    check_own_data(config.target, config.prompts, "prompts")


COMMAND = Command(__doc__, ContestRun, "contest", check=check_contest)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import psutil
from omegaconf import OmegaConf

from conf.command.forms import ROOT, list_arguments
from conf.command.run_record import (
    check_unchanged,
    collect_changed_settings,
    flatten_settings,
    format_setting,
    to_json,
)
from conf.errors import InputError
from conf.files import LOCK_NAME, load_json, lock_file, make_folder, write_atomically
from conf.settings.data import DataRun, RowsConfig
from conf.settings.scripts import ContestPart
from conf.settings.target import TargetConfig
from data.embedded import fill_default_paths
from eval.measure.acceptance_stats import compare_tau, format_interval
from eval.measure.results import build_markdown_table
from eval.preflight_checks import check_methods
from heads.folders import PROVENANCE, write_folder
from heads.kinds import HEADS, build_variant_table
from scripts import compare
from scripts.quickstart import Stage

RECIPES = ROOT / "conf" / "head"
SETTLED = ("max_steps", "num_epochs", "batch_size", "batch_tokens", "micro_batch_size", "resume")
"""Settings of `train` that the contest sets for all heads."""
DRAFT_SHAPES = ("chain", "tree")
MARK = "HEADSMITH_CONTEST"
"""Environment variable that marks the commands of a contest; its value is the folder."""
TAIL = 15
"""Last lines of a log to show when a task fails."""
SAME = ("sha256", "num_train_sequences", "num_tokens")
"""Facts of the training data in which all heads must agree."""


def main(config: ContestRun) -> None:
    """Train and measure; write `contest.md`, `contest.json` and `winner`."""
    check_contest(config)
    entrants = parse_recipes(config.recipes)
    check_methods(config.untrained)
    num_steps = compute_num_steps(config)
    fill_default_paths(config)
    fill_default_paths(DataRun(config.target, config.prompts), prompts=True)
    out_dir = Path(config.out_dir).absolute()
    make_folder(out_dir)
    with lock_file(out_dir / LOCK_NAME), raise_on_sigterm():
        claim_folder(config, out_dir)
        end_orphans(out_dir)
        print(f"{', '.join(entrant.label for entrant in entrants)}: {num_steps} steps each")
        todo: list[Stage] = []
        if ContestPart.train in config.parts:
            todo += list_training_tasks(config, entrants, out_dir, num_steps)
        if ContestPart.measure in config.parts:
            todo += list_measurements(config, entrants, out_dir)
        run_missing(todo, out_dir)
        if ContestPart.report in config.parts:
            print(write_report(list_head_methods(entrants), out_dir, num_steps))


def compute_num_steps(config: ContestRun) -> int:
    """Compute the number of optimizer steps that `tokens` allow each recipe.

    Raises:
        InputError: they allow no step.
    """
    step_tokens = config.train.batch_size * config.data.max_length
    if config.tokens < step_tokens:
        raise InputError(
            f"tokens={config.tokens}: allows no step of {step_tokens} tokens; raise it"
        )
    return config.tokens // step_tokens


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the running command is stopped too."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def claim_folder(config: ContestRun, out_dir: Path) -> None:
    """Start a contest in a folder, or check that the folder holds this contest.

    Raises:
        InputError: the folder holds something else.
    """
    free = {"out_dir", "parts", "launch", "num_threads"}  # decide no result
    now = {key: value for key, value in to_json(config).items() if key not in free}
    path, now = out_dir / "settings.json", flatten_settings(now)
    if path.exists():
        before = json.loads(path.read_text())
        before.pop("probe_steps", None)  # of contests that planned
        check_unchanged(f"out_dir={out_dir} holds a contest", before, now)
        return
    if any(not each.name.startswith(LOCK_NAME) for each in out_dir.iterdir()):
        raise InputError(
            f"out_dir={out_dir}: is not empty and holds no contest; name another folder"
        )
    write_atomically(path, json.dumps(now, indent=1) + "\n")


@dataclass(frozen=True)
class Entrant:
    """Describe a head to train.

    Attributes:
        label: the head's name in the contest.
        kind: the name of its kind in `heads/kinds.py`.
        overrides: settings for the training command.
    """

    label: str
    kind: str
    overrides: tuple[str, ...]


def parse_recipes(entries: list[str]) -> list[Entrant]:
    """Parse the entries of `recipes` into the heads of a contest.

    Raises:
        InputError: no such recipe, or a setting that must be the same for all.
    """
    entrants: list[Entrant] = []
    counts: Counter[str] = Counter()
    for entry in entries:
        name, *overrides = shlex.split(entry) or [""]
        kind = name if name in HEADS else _find_recipe_kind(name)
        for override in overrides:
            key, equals, _ = override.partition("=")
            group, _, rest = key.partition(".")
            if not equals or group not in ("head", "train") or rest in ("", *SETTLED):
                raise InputError(
                    f"recipes: {entry!r}: {override} cannot differ between recipes; allowed: "
                    f"head.* and train.* except {', '.join(SETTLED)}"
                )
        counts[name] += 1
        label = name if counts[name] == 1 else f"{name}-{counts[name]}"
        chosen = [] if name in HEADS else [f"head={name}"]
        entrants.append(Entrant(label, kind, (*chosen, *overrides)))
    return entrants


def _find_recipe_kind(name: str) -> str:
    """Find the name in `heads/kinds.py` of the head that a recipe of `conf/head` trains."""
    known = sorted({*HEADS, *(path.stem for path in RECIPES.glob("*.yaml"))})
    if name not in known:
        raise InputError(f"recipes: {name!r} is no recipe; allowed: {', '.join(known)}")
    content: Any = {"defaults": [name]}
    while "form" not in content.get("head", {}):
        content = OmegaConf.load(RECIPES / f"{content['defaults'][0]}.yaml")
    return next(
        key for key, kind in HEADS.items() if kind is build_variant_table()[content.head.form]
    )


def list_head_methods(entrants: list[Entrant]) -> dict[str, dict[str, str]]:
    """List each head's methods in `eval/speedup.py`, by label and method."""
    counts: Counter[str] = Counter()
    methods = {}
    for entrant in entrants:
        counts[entrant.kind] += 1
        number = f"_{counts[entrant.kind]}" if counts[entrant.kind] > 1 else ""
        methods[entrant.label] = {way: f"{entrant.kind}_{way}{number}" for way in DRAFT_SHAPES}
    return methods


def list_training_tasks(
    config: ContestRun, entrants: list[Entrant], out_dir: Path, num_steps: int
) -> list[Stage]:
    """List the tasks that train every head, and evaluate it once, at the end, without replay."""
    launcher = ["-m", "accelerate.commands.launch", *config.launch] if config.launch else []
    settings = [
        *format_overrides("target", config.target), *format_overrides("data", config.data),
        f"train.batch_size={config.train.batch_size}",
        f"train.micro_batch_size={config.train.micro_batch_size}", "train.num_checkpoints=1",
        "train.num_replay_prompts=0", "train.resume=auto", f"seed={config.seed}",
    ]  # fmt: skip
    tasks = []
    for entrant in entrants:
        folder = out_dir / "heads" / entrant.label
        command = [
            sys.executable, *launcher, *list_arguments(f"train/{entrant.kind}.py"), *settings,
            *entrant.overrides, f"train.max_steps={num_steps}", f"train.eval_steps={num_steps}",
            _format_argument("out_dir", folder),
        ]  # fmt: skip
        tasks.append(Stage(f"train {entrant.label}", folder / "head/config.json", command))
    return tasks


def list_measurements(config: ContestRun, entrants: list[Entrant], out_dir: Path) -> list[Stage]:
    """List the tasks that measure each head's acceptance, and the speed of all methods."""
    heads = [out_dir / "heads" / entrant.label / "head" for entrant in entrants]
    tasks = []
    for entrant, head in zip(entrants, heads, strict=True):
        folder = out_dir / "acceptance" / entrant.label
        command = build_measuring_command(config, "eval/acceptance.py", [head], folder)
        tasks.append(Stage(f"acceptance {entrant.label}", folder / "acceptance.json", command))
    folder = out_dir / "speed"
    sizes = sorted(set(config.concurrency))
    ways = list_head_methods(entrants).values()
    methods = [*(name for names in ways for name in names.values()), *config.untrained]
    command = build_measuring_command(
        config, "eval/speedup.py", heads, folder, f"batch_size={sizes[0]}",
        f"concurrency=[{','.join(map(str, sizes))}]", f"num_repeats={config.num_repeats}",
        "num_warmups=1", f"methods=[{','.join(methods)}]",
    )  # fmt: skip
    return [*tasks, Stage("speed", folder / "speedup.json", command)]


def build_measuring_command(
    config: ContestRun, script: str, heads: list[Path], out_dir: Path, *more: str
) -> list[str]:
    """Build a command that measures heads on the prompts."""
    first, *others = map(str, heads)
    return [
        sys.executable, *list_arguments(script),
        *format_overrides("target", config.target), *format_overrides("data", config.prompts),
        _format_argument("head.path", first),
        *([_format_argument("heads", others)] if others else []),
        f"max_new_tokens={config.max_new_tokens}", f"num_turns={config.num_turns}",
        f"seed={config.seed}", *more, _format_argument("out_dir", out_dir),
    ]  # fmt: skip


def format_overrides(prefix: str, config: TargetConfig | RowsConfig) -> list[str]:
    """Format the settings of a group that differ from the schema's, for a command line."""
    changed = collect_changed_settings(config)
    return [_format_argument(f"{prefix}.{key}", value) for key, value in changed.items()]


def _format_argument(key: str, value: Any) -> str:
    return shlex.split(format_setting(key, value))[0]


def run_missing(todo: list[Stage], out_dir: Path) -> None:
    """Run the tasks without a result, and print the current task and the next one."""
    missing = [task for task in todo if not task.result.exists()]
    for number, task in enumerate(missing, start=1):
        following = missing[number].name if number < len(missing) else "nothing more"
        print(f"{task.name}; then {following}", flush=True)
        run_task(task, out_dir)


def run_task(task: Stage, out_dir: Path) -> None:
    """Run a task, whose output goes to its log.

    Raises:
        InputError: it left no result; the message has the last lines of its log.
    """
    log = out_dir / "logs" / f"{task.name.replace(' ', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    environ = os.environ | {MARK: str(out_dir.resolve())}
    with log.open("ab") as file:
        child = subprocess.Popen(task.command, stdout=file, stderr=file, env=environ)
        try:
            code = child.wait()
        except BaseException:  # a signal: the command saves its state
            child.terminate()
            child.wait()
            raise
    if not task.result.exists():
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-TAIL:]
        tail = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            f"{task.name} ended with code {code}, but without {task.result}; {log} ends:\n{tail}"
        )


def end_orphans(out_dir: Path) -> None:
    """End processes that a killed contest left in this folder, and wait for their end."""
    while orphans := list(iter_orphans(out_dir)):
        for process in orphans:
            with suppress(psutil.Error):
                process.terminate()
        time.sleep(1)


def iter_orphans(out_dir: Path) -> Iterator[psutil.Process]:
    """Yield the processes that contests in this folder started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or just gone
            if process.environ().get(MARK) == str(out_dir.resolve()):
                yield process


def write_report(ways: dict[str, dict[str, str]], out_dir: Path, num_steps: int) -> str:
    """Write `contest.json`, `contest.md` and `winner/head`; return the tables.

    Args:
        ways: methods of each head, by label and method.
        out_dir: folder of the contest, with its heads and measurements.
        num_steps: optimizer steps of each head.

    Raises:
        InputError: a measurement is missing, or heads were trained on different texts.
    """
    data = {
        label: _load_result(out_dir / f"heads/{label}/head" / PROVENANCE)["data"] for label in ways
    }
    (first, reference), *others = data.items()
    for label, facts in others:  # a file may have changed between two trainings
        check_unchanged(
            f"out_dir={out_dir} holds the heads {first} and {label}, whose training data were",
            {key: reference[key] for key in SAME},
            {key: facts[key] for key in SAME},
        )
    figures = collect_method_figures(_load_result(out_dir / "speed/speedup.json"), ways)
    method, label = next((name, row["label"]) for name, row in figures.items() if row["label"])
    order = [label, *(name for name in ways if name != label)]
    for name in order:
        _load_result(out_dir / f"acceptance/{name}/acceptance.json")
    verdict = f"{label} wins, drafting by {method}."
    faster = list(figures)[: list(figures).index(method)]
    if faster:
        verdict += f" Faster over all batch sizes, without training: {', '.join(faster)}."
    text = (
        f"{verdict}\n\n**Speed**: tokens/s, prompts included, and the speed-up over the faster "
        "loop that drafts nothing (95% interval)\n\n"
        f"{build_markdown_table(build_speed_rows(figures))}\n"
    )
    if len(order) > 1:
        heads = compare.load_results([str(out_dir / "acceptance" / name) for name in order])
        text += (
            "\n**Acceptance**: replayed over the target's own texts; differences prompt by prompt"
            f"\n\n{build_markdown_table(compare.build_acceptance_rows(heads))}\n"
        )
    content = {"winner": label, "method": method, "verdict": verdict, "methods": figures}
    content["steps"] = dict.fromkeys(ways, num_steps)
    write_atomically(out_dir / "contest.json", json.dumps(content, indent=1) + "\n")
    write_atomically(out_dir / "contest.md", text)
    source = out_dir / "heads" / label / "head"
    write_folder(out_dir / "winner" / "head", partial(shutil.copytree, source, dirs_exist_ok=True))
    return f"{text}\nwrote {out_dir / 'contest.md'}; winner: {out_dir / 'winner/head'}"


def _load_result(path: Path) -> dict[str, Any]:
    content = load_json(path)
    if content is None:
        raise InputError(f"parts: {path} is missing; run the other parts before report")
    return content


def collect_method_figures(
    speed: dict[str, Any], ways: dict[str, dict[str, str]]
) -> dict[str, dict[str, Any]]:
    """Collect the figures of each decoding method, the fastest first.

    The speed of a method is the geometric mean of tokens/s over batch sizes: each size counts the
    same. Its tau is compared with that of the fastest method of a head.

    Args:
        speed: contents of `speedup.json`.
        ways: methods of each head, by label and method.
    """
    labels = {name: label for label, names in ways.items() for name in names.values()}
    sizes = {size: each["methods"] for size, each in speed["concurrency"].items()}

    def compute_speed(name: str) -> float:
        return geometric_mean(methods[name]["tokens_per_s"] for methods in sizes.values())

    order = sorted(speed["methods"], key=compute_speed, reverse=True)
    winner, figures = next(name for name in order if name in labels), {}
    for name in order:
        row, reference = speed["methods"][name], speed["methods"][winner]
        more, interval = compare_tau(reference["prompts"], row["prompts"], seed=0)
        figures[name] = {
            "label": labels.get(name), "tau": row["tau"], "more": more, "more_ci95": interval,
            "sizes": {
                size: {"measured": methods[name]["tokens_per_s"]}
                | {key: methods[name][key] for key in ("speedup", "speedup_ci95")}
                for size, methods in sizes.items()
            },
        }  # fmt: skip
    return figures


def build_speed_rows(figures: dict[str, dict[str, Any]]) -> list[Sequence[str]]:
    """Build a header, and a row for each decoding method."""
    sizes = list(next(iter(figures.values()))["sizes"])
    lines: list[Sequence[str]] = [
        ("head", "method", "tau", "tau, less the winner's", *(f"{s} at a time" for s in sizes))
    ]
    for name, row in figures.items():
        interval = row["more_ci95"]
        difference = "-" if interval is None else " to ".join(f"{end:+.3f}" for end in interval)
        cells = [f"{row['tau']:.3f}", f"{row['more']:+.3f} ({difference})"]
        for cell in row["sizes"].values():
            bounds = cell["speedup_ci95"] and f" ({format_interval(cell['speedup_ci95'])})"
            cells.append(f"{cell['measured']:.0f}, {cell['speedup']:.2f}x{bounds or ''}")
        lines.append((row["label"] or "-", name, *cells))
    return lines


if __name__ == "__main__":
    COMMAND.run(main)
