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
from scripts.preflight_checks import check_contest

COMMAND = Command(__doc__, ContestRun, "contest", check=check_contest)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from omegaconf import OmegaConf

from conf.command.run_record import check_unchanged, flatten_settings, to_json
from conf.errors import InputError
from conf.files import LOCK_NAME, lock_file, write_atomically
from conf.settings.data import DataRun, RowsConfig
from conf.settings.scripts import ContestPart
from conf.settings.target import TargetConfig
from data.embedded import fill_default_paths
from data.rows.records import load_records
from eval.preflight_checks import check_methods
from heads.kinds import HEADS, build_variant_table
from scripts.contest import report

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "conf" / "head"
SETTLED = ("max_steps", "num_epochs", "batch_size", "batch_tokens", "micro_batch_size", "resume")
"""Settings of `train` that the contest sets for all heads."""
DRAFT_SHAPES = ("chain", "tree")
SAVED_EVERY_S = 300.0
NUM_PROBED = 2
"""Dialogues of the measurement that estimates the time of measuring."""
USUAL_TAU = 1.7
"""tau of trained heads, for estimates, as a probe's head is not trained yet."""
MARK = "HEADSMITH_CONTEST"
"""Environment variable that marks the commands of a contest; its value is the folder."""
TAIL = 15
"""Last lines of a log to show when a task fails."""


def main(config: ContestRun) -> None:
    """Plan, train, measure; write `contest.md`, `contest.html`, `contest.json` and `winner`."""
    check_contest(config)
    entrants = parse_recipes(config.recipes)
    check_methods(config.untrained)
    fill_default_paths(config)
    fill_default_paths(DataRun(config.target, config.prompts), prompts=True)
    out_dir = Path(config.out_dir).absolute()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_file(out_dir / LOCK_NAME)
    except OSError as error:
        raise InputError(f"out_dir={config.out_dir}: cannot write there: {error}") from error
    with lock, raise_on_sigterm():
        claim_folder(config, out_dir)
        end_orphans(out_dir)
        took, path = TaskCosts(out_dir), out_dir / "plan.json"
        if ContestPart.plan in config.parts and not path.exists():
            run_missing(list_probe_tasks(config, entrants, out_dir), out_dir, took, {})
            make_plan(config, entrants, out_dir, took)
        if not path.exists():
            raise InputError(f"parts: {path} is missing; run the part plan first")
        settled = json.loads(path.read_text())
        print(report.format_plan(settled))
        todo: list[Task] = []
        if ContestPart.train in config.parts:
            todo += list_training_tasks(config, entrants, out_dir, settled)
        if ContestPart.measure in config.parts:
            todo += list_measurements(config, entrants, out_dir)
        run_missing(todo, out_dir, took, settled["estimate"])
        if ContestPart.report in config.parts:
            ways, spent = list_head_methods(entrants), collect_task_costs(settled, took, out_dir)
            print(report.write_report(ways, out_dir, settled, spent))


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
    path, now = out_dir / "settings.json", list_deciding_settings(config)
    if path.exists():
        before = json.loads(path.read_text())
        check_unchanged(f"out_dir={out_dir} holds a contest", before, now)
        return
    if any(not each.name.startswith(LOCK_NAME) for each in out_dir.iterdir()):
        raise InputError(
            f"out_dir={out_dir}: is not empty and holds no contest; name another folder"
        )
    write_atomically(path, json.dumps(now, indent=1) + "\n")


def list_deciding_settings(config: ContestRun) -> dict[str, Any]:
    """Return the settings that affect the result of a contest, by dotted key."""
    free = {"out_dir", "parts", "launch", "num_threads"}
    return flatten_settings(
        {key: value for key, value in to_json(config).items() if key not in free}
    )


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


@dataclass(frozen=True)
class Task:
    """Describe a command that is not run again if its result exists.

    Attributes:
        name: name of the task in logs and costs.
        command: program and arguments.
        result: file that exists once the task is done.
        fresh: folder to delete before the task starts; None for a task that can continue.
    """

    name: str
    command: list[str]
    result: Path
    fresh: Path | None = None


def list_probe_tasks(config: ContestRun, entrants: list[Entrant], out_dir: Path) -> list[Task]:
    """List the tasks of a few steps of every head, and of a short measurement of the results."""
    more = [
        f"train.{name}={config.probe_steps}" for name in ("max_steps", "eval_steps", "save_steps")
    ]
    more += ["train.log_steps=1", "train.warmup_steps=0"]
    tasks = []
    for entrant in entrants:
        folder = get_probe_folder(out_dir, entrant.label)
        command = build_training_command(config, entrant, folder, *more)
        tasks.append(Task(f"probe {entrant.label}", command, folder / "head/config.json", folder))
    folder = get_probe_folder(out_dir, "speed")
    heads = [get_probe_folder(out_dir, entrant.label) / "head" for entrant in entrants]
    num_prompts = min(NUM_PROBED, config.prompts.num_prompts or NUM_PROBED)
    command = build_measuring_command(
        config, "eval/speedup.py", heads, folder, "num_repeats=1", "num_warmups=0",
        _format_methods(config, entrants),
    )  # fmt: skip
    command.append(
        f"data.num_prompts={num_prompts}"
    )  # after the number in `prompts`, which it replaces
    tasks.append(Task("probe speed", command, folder / "speedup.json", folder))
    return [
        *tasks,
        build_timing_task(config, heads, get_probe_folder(out_dir, "costs"), "probe costs"),
    ]


def list_training_tasks(
    config: ContestRun, entrants: list[Entrant], out_dir: Path, plan: dict[str, Any]
) -> list[Task]:
    """List the tasks that train every head, according to the plan."""
    tasks = []
    for entrant in entrants:
        label, folder = entrant.label, out_dir / "heads" / entrant.label
        steps = plan["steps"][label]
        command = build_training_command(
            config, entrant, folder, f"train.max_steps={steps}", f"train.eval_steps={steps}",
            f"train.save_steps={plan['save_steps'][label]}",
        )  # fmt: skip
        tasks.append(Task(f"train {label}", command, folder / "head/config.json"))
    return tasks


def list_measurements(config: ContestRun, entrants: list[Entrant], out_dir: Path) -> list[Task]:
    """List the tasks that measure each head's acceptance, the cost of steps, and all methods."""
    heads = [out_dir / "heads" / entrant.label / "head" for entrant in entrants]
    tasks = []
    for entrant, head in zip(entrants, heads, strict=True):
        folder = out_dir / "acceptance" / entrant.label
        command = build_measuring_command(config, "eval/acceptance.py", [head], folder)
        tasks.append(Task(f"acceptance {entrant.label}", command, folder / "acceptance.json"))
    tasks.append(build_timing_task(config, heads, out_dir / "costs", "costs"))
    folder = out_dir / "speed"
    sizes = sorted(set(config.concurrency))
    command = build_measuring_command(
        config, "eval/speedup.py", heads, folder, f"batch_size={sizes[0]}",
        f"concurrency=[{','.join(map(str, sizes))}]", f"num_repeats={config.num_repeats}",
        "num_warmups=1", _format_methods(config, entrants),
    )  # fmt: skip
    return [*tasks, Task("speed", command, folder / "speedup.json")]


def build_timing_task(config: ContestRun, heads: list[Path], folder: Path, name: str) -> Task:
    """Build the task that times steps with these heads at each batch size."""
    sizes = ",".join(map(str, sorted({1, *config.concurrency})))
    command = build_measuring_command(
        config, "scripts/contest/costs.py", heads, folder, f"concurrency=[{sizes}]"
    )
    return Task(name, command, folder / "costs.json")


def get_probe_folder(out_dir: Path, name: str) -> Path:
    """Return the folder of a probe."""
    return out_dir / "probes" / name


def _format_methods(config: ContestRun, entrants: list[Entrant]) -> str:
    names = [name for ways in list_head_methods(entrants).values() for name in ways.values()]
    return f"methods=[{','.join([*names, *config.untrained])}]"


def build_training_command(
    config: ContestRun, entrant: Entrant, out_dir: Path, *more: str
) -> list[str]:
    """Build the command that trains a head and evaluates it once, at the end, without replay."""
    launcher = ["-m", "accelerate.commands.launch", *config.launch] if config.launch else []
    size = config.train
    return [
        sys.executable, *launcher, str(ROOT / "train" / f"{entrant.kind}.py"),
        *format_overrides("target", config.target), *format_overrides("data", config.data),
        f"train.batch_size={size.batch_size}", f"train.micro_batch_size={size.micro_batch_size}",
        "train.num_checkpoints=1", "train.num_replay_prompts=0", "train.resume=auto",
        f"seed={config.seed}", *entrant.overrides, *more,
        f"out_dir={_format_setting_value(str(out_dir))}",
    ]  # fmt: skip


def build_measuring_command(
    config: ContestRun, script: str, heads: list[Path], out_dir: Path, *more: str
) -> list[str]:
    """Build a command that measures heads on the prompts."""
    first, *others = map(str, heads)
    return [
        sys.executable, str(ROOT / script),
        *format_overrides("target", config.target), *format_overrides("data", config.prompts),
        f"head.path={_format_setting_value(first)}",
        *([f"heads={_format_setting_value(others)}"] if others else []),
        f"max_new_tokens={config.max_new_tokens}", f"num_turns={config.num_turns}",
        f"seed={config.seed}", *more, f"out_dir={_format_setting_value(str(out_dir))}",
    ]  # fmt: skip


def format_overrides(prefix: str, config: TargetConfig | RowsConfig) -> list[str]:
    """Format the settings of a group that differ from the schema's, for a command line."""
    usual = to_json(type(config)())
    return [
        f"{prefix}.{key}={_format_setting_value(value)}"
        for key, value in to_json(config).items()
        if value != usual[key]
    ]


def _format_setting_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {_format_setting_value(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(_format_setting_value, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower()


class TaskCosts:
    """Count seconds and peak memory of each task over all starts, stored in `took.json`."""

    def __init__(self, out_dir: Path) -> None:
        self.path = out_dir / "took.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())
        for name, row in self.rows.items():
            if row["since"] is not None:  # killed: it worked until its last output
                log = get_log_path(out_dir, name)
                last = log.stat().st_mtime if log.exists() else row["since"]
                row["seconds"] += max(0.0, last - row["since"])
                row["since"] = None

    def start_task(self, name: str) -> None:
        """Start to count the seconds of a task."""
        row = self.rows.setdefault(name, {"seconds": 0.0, "memory": 0})
        row["since"] = time.time()
        self._write_rows()

    def end_task(self, name: str, memory: int) -> None:
        """Stop to count the seconds of a task; record the peak bytes of one of its processes."""
        row = self.rows[name]
        row["seconds"] += time.time() - row["since"]
        row |= {"memory": max(row["memory"], memory), "since": None}
        self._write_rows()

    def _write_rows(self) -> None:
        write_atomically(self.path, json.dumps(self.rows, indent=1) + "\n")


def make_plan(
    config: ContestRun, entrants: list[Entrant], out_dir: Path, took: TaskCosts
) -> dict[str, Any]:
    """Read the probes, write `plan.json`, which never changes again, and delete the probes.

    Raises:
        InputError: the budget allows a head no step.
    """
    step_s = {
        entrant.label: compute_step_seconds(
            get_probe_folder(out_dir, entrant.label) / "metrics.jsonl"
        )
        for entrant in entrants
    }
    steps = {
        label: compute_num_steps(config, label, s, len(entrants)) for label, s in step_s.items()
    }
    estimate = {}
    for label, number in steps.items():
        row = took.rows[f"probe {label}"]
        around = max(0.0, row["seconds"] - config.probe_steps * step_s[label])
        estimate[f"train {label}"] = {
            "seconds": around + number * step_s[label],
            "bytes": measure_folder_bytes(get_probe_folder(out_dir, label)),
            "memory": row["memory"],
            **parse_device_memory(out_dir, f"probe {label}"),
        }
    num_prompts = len(load_records(str(config.prompts.path), config.prompts).records)
    num_prompts = min(num_prompts, config.prompts.num_prompts or num_prompts)
    estimate |= estimate_measuring_costs(
        config, list_head_methods(entrants), out_dir, num_prompts, took
    )
    plan = {
        "steps": steps,
        "seconds_per_step": step_s,
        "save_steps": {label: max(1, int(SAVED_EVERY_S / s)) for label, s in step_s.items()},
        "estimate": estimate,
    }
    write_atomically(out_dir / "plan.json", json.dumps(plan, indent=1) + "\n")
    shutil.rmtree(out_dir / "probes")
    return plan


def compute_step_seconds(metrics: Path) -> float:
    """Compute the median seconds per step of a run, without its first two steps."""
    rows = map(json.loads, metrics.read_text().splitlines())
    times = [
        row["train/tokens"] / row["train/tokens_per_s"]
        for row in rows
        if "train/tokens_per_s" in row
    ]
    return statistics.median(after - before for before, after in pairwise(times[1:]))


def compute_num_steps(config: ContestRun, label: str, step_s: float, num_entrants: int) -> int:
    """Compute the number of optimizer steps that the budget allows.

    Args:
        config: settings of the command.
        label: label of the head.
        step_s: seconds of a step of the head.
        num_entrants: heads that share the minutes.

    Raises:
        InputError: the budget allows no step.
    """
    if config.tokens is not None:
        a_step = config.train.batch_size * config.data.max_length
        number, key, cost = config.tokens // a_step, f"tokens={config.tokens}", f"{a_step} tokens"
    else:
        assert config.minutes is not None
        number = int(config.minutes * 60 / num_entrants / step_s)
        key, cost = f"minutes={config.minutes:g}", f"{step_s:.2f} s"
    if number < 1:
        raise InputError(f"{key}: allows {label} no step of {cost}; raise it")
    return number


def estimate_measuring_costs(
    config: ContestRun,
    ways: dict[str, dict[str, str]],
    out_dir: Path,
    num_prompts: int,
    took: TaskCosts,
) -> dict[str, dict[str, Any]]:
    """Estimate seconds and memory of the tasks after training.

    Args:
        config: settings of the command.
        ways: methods of each head, by label and method.
        out_dir: folder with the probes.
        num_prompts: number of dialogues to measure.
        took: costs of the probes.
    """
    speed, costs = (
        json.loads((get_probe_folder(out_dir, folder) / name).read_text())
        for folder, name in (("speed", "speedup.json"), ("costs", "costs.json"))
    )
    probed = [took.rows[f"probe {name}"] for name in ("speed", "costs")]
    decoding = sum(sum(_list_seconds(row)) for row in speed["methods"].values())
    start = max(0.0, probed[0]["seconds"] - decoding)
    dialogue_s = estimate_dialogue_seconds(speed["methods"], costs, ways)
    seconds = {
        f"acceptance {label}": start
        + num_prompts * (dialogue_s["vanilla", 1] + dialogue_s[names["tree"], 1])
        for label, names in ways.items()
    }
    seconds["costs"] = probed[1]["seconds"]
    seconds["speed"] = start + sum(
        dialogue_s[name, size] * (config.num_repeats * num_prompts + size)
        for name in speed["methods"]
        for size in set(config.concurrency)
    )
    memory = max(row["memory"] for row in probed)
    return {name: {"seconds": value, "memory": memory} for name, value in seconds.items()}


def estimate_dialogue_seconds(
    methods: dict[str, Any], costs: dict[str, Any], ways: dict[str, dict[str, str]]
) -> dict[tuple[str, int], float]:
    """Estimate the seconds per dialogue, by method and batch size.

    The probe's time is scaled to the tau of a trained head, and for a batch by the time of its
    steps.

    Args:
        methods: methods of the probe's `speedup.json`, one text at a time.
        costs: contents of `costs.json` of the probe.
        ways: methods of each head, by label and method.
    """
    heads = {
        name: (place, way)
        for place, names in enumerate(ways.values())
        for way, name in names.items()
    }
    seconds = dict[tuple[str, int], float]()
    for name, row in methods.items():
        alone = statistics.mean(_list_seconds(row))
        steps = {size: cost["plain"] for size, cost in costs["sizes"].items()}
        if name in heads:
            (place, way), alone = heads[name], alone * row["tau"] / USUAL_TAU
            steps = {size: cost["heads"][place][way] for size, cost in costs["sizes"].items()}
        for size, step_s in steps.items():
            seconds[name, int(size)] = alone * step_s / int(size) / steps["1"]
    return seconds


def _list_seconds(method: dict[str, Any]) -> list[float]:
    return [prompt["seconds"]["total"][0] for prompt in method["prompts"]]


def collect_task_costs(
    plan: dict[str, Any], took: TaskCosts, out_dir: Path
) -> dict[str, dict[str, Any]]:
    """Collect each task's seconds over all starts, bytes on disk, and peak memory of a process."""
    spent = {}
    for name in plan["estimate"]:
        act, _, label = name.partition(" ")
        size = {"bytes": measure_folder_bytes(out_dir / "heads" / label)} if act == "train" else {}
        row = took.rows.get(name, {"seconds": 0.0, "memory": 0})
        spent[name] = {"seconds": row["seconds"], "memory": row["memory"], **size}
        spent[name] |= parse_device_memory(out_dir, name)
    return spent


def run_missing(todo: list[Task], out_dir: Path, took: TaskCosts, estimate: dict[str, Any]) -> None:
    """Run the tasks without a result, and print the current task and the next ones."""
    missing = [task for task in todo if not task.result.exists()]
    for number, task in enumerate(missing, start=1):
        following = missing[number].name if number < len(missing) else "nothing more"
        expected = estimate.get(task.name)
        duration = (
            "" if expected is None else f", about {report.format_minutes(expected['seconds'])} min"
        )
        print(f"{task.name}{duration}; then {following}", flush=True)
        run_task(task, out_dir, took)


def run_task(task: Task, out_dir: Path, took: TaskCosts) -> None:
    """Run a task, and count its seconds and memory.

    Raises:
        InputError: it left no result; the message has the last lines of its log.
    """
    if task.fresh is not None:
        shutil.rmtree(task.fresh, ignore_errors=True)
    log = get_log_path(out_dir, task.name)
    log.parent.mkdir(exist_ok=True)
    environ = os.environ | {MARK: str(out_dir.resolve())}
    took.start_task(task.name)
    with log.open("ab") as file:
        child = subprocess.Popen(task.command, stdout=file, stderr=file, env=environ)
        try:
            code, memory = _wait_for_task(child)
        except BaseException:  # a signal: the command saves its state
            child.terminate()
            took.end_task(task.name, _wait_for_task(child)[1])
            raise
    took.end_task(task.name, memory)
    if not task.result.exists():
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-TAIL:]
        tail = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            f"{task.name} ended with code {code}, but without {task.result}; {log} ends:\n{tail}"
        )


def _wait_for_task(child: "subprocess.Popen[bytes]") -> tuple[int, int]:
    """Wait for a process; return its exit code, and the bytes of its largest process."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def get_log_path(out_dir: Path, name: str) -> Path:
    """Return the file for a task's output."""
    return out_dir / "logs" / f"{name.replace(' ', '-')}.log"


def parse_device_memory(out_dir: Path, name: str) -> dict[str, float]:
    """Parse the most bytes of a training on each GPU from its log.

    Returns:
        `device`: bytes; empty if the log states none.
    """
    log = get_log_path(out_dir, name)
    text = log.read_text(errors="replace") if log.exists() else ""
    figures = re.findall(r"([\d.]+) GB measured at most", text)
    return {"device": float(figures[-1]) * 1e9} if figures else {}


def measure_folder_bytes(folder: Path) -> int:
    """Return the size in bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def end_orphans(out_dir: Path) -> None:
    """End processes that a killed contest left in this folder, and wait for their end."""
    while pids := list(iter_orphan_pids(out_dir)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(1)


def iter_orphan_pids(out_dir: Path) -> Iterator[int]:
    """Yield the ids of processes that contests in this folder started."""
    wanted = f"{MARK}={out_dir.resolve()}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or just gone
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


if __name__ == "__main__":
    COMMAND.run(main)
