"""The plan of a contest: how long each recipe trains, and what everything is going to take."""

import json
import shutil
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from conf.command.statement import check_unchanged
from conf.errors import InputError
from conf.files import write_whole
from conf.settings.scripts import ContestRun
from data.rows.records import load_data
from scripts.contest import parts
from scripts.contest.parts import Part, Took
from scripts.contest.recipes import Recipe, measuring, methods_of, settings, training

SAVED_EVERY_S = 300.0
NUM_PROBED = 2
"""Dialogues of the measurement that tells what measuring takes."""
USUAL_TAU = 1.7
"""Of heads once they are trained; those of a probe draft in vain."""
Plan = dict[str, Any]


def check_folder(config: ContestRun, out_dir: Path) -> None:
    """Begins a contest in a folder, or makes sure that it is this one that goes on.

    Raises:
        InputError: the folder holds something else.
    """
    path, now = out_dir / "settings.json", settings(config)
    if path.exists():
        before = json.loads(path.read_text())
        check_unchanged(f"out_dir={out_dir} holds a contest", before, now)
        return
    if any(each.name != ".lock" for each in out_dir.iterdir()):
        raise InputError(f"out_dir={out_dir} is not empty and holds no contest: name another")
    write_whole(path, json.dumps(now, indent=1) + "\n")


def probes(config: ContestRun, recipes: list[Recipe], out_dir: Path) -> list[Part]:
    """A few steps of every recipe, then a look at the prompts with what came of them."""
    steps = config.probe_steps
    more = [f"train.{name}={steps}" for name in ("max_steps", "eval_steps", "save_steps")]
    more += ["train.log_steps=1", "train.warmup_steps=0"]
    found = []
    for recipe in recipes:
        folder = probe_of(out_dir, recipe.label)
        command = training(config, recipe, folder, *more)
        found.append(Part(f"probe {recipe.label}", command, folder / "head/config.json", folder))
    folder = probe_of(out_dir, "speed")
    heads = [probe_of(out_dir, recipe.label) / "head" for recipe in recipes]
    once = ["num_repeats=1", "num_warmups=0", _methods(config, recipes)]
    num_prompts = min(NUM_PROBED, config.prompts.num_prompts or NUM_PROBED)
    command = measuring(config, "eval/speedup.py", heads, folder, *once)
    command.append(f"data.num_prompts={num_prompts}")
    found.append(Part("probe speed", command, folder / "speedup.json", folder))
    return [*found, timing(config, heads, probe_of(out_dir, "costs"), "probe costs")]


def timing(config: ContestRun, heads: list[Path], folder: Path, name: str) -> Part:
    """What steps with these heads cost at each batch size."""
    sizes = ",".join(map(str, sorted({1, *config.concurrency})))
    command = measuring(config, "scripts/contest/costs.py", heads, folder, f"concurrency=[{sizes}]")
    return Part(name, command, folder / "costs.json")


def probe_of(out_dir: Path, name: str) -> Path:
    """The folder of a probe."""
    return out_dir / "probes" / name


def _methods(config: ContestRun, recipes: list[Recipe]) -> str:
    ways = [name for each in methods_of(recipes).values() for name in each.values()]
    return f"methods=[{','.join([*ways, *config.untrained])}]"


def make_plan(config: ContestRun, recipes: list[Recipe], out_dir: Path, took: Took) -> Plan:
    """Taps the probes, writes `plan.json`, which never changes again, and drops the probes.

    Raises:
        InputError: the budget buys a recipe no step.
    """
    step_s = {
        each.label: seconds_per_step(probe_of(out_dir, each.label) / "metrics.jsonl")
        for each in recipes
    }
    steps = {label: num_steps(config, label, each, len(recipes)) for label, each in step_s.items()}
    estimate = {}
    for label, number in steps.items():
        row = took.rows[f"probe {label}"]
        around = max(0.0, row["seconds"] - config.probe_steps * step_s[label])
        estimate[f"train {label}"] = {
            "seconds": around + number * step_s[label],
            "bytes": parts.bytes_of(probe_of(out_dir, label)),
            "memory": row["memory"],
            **parts.device_memory(out_dir, f"probe {label}"),
        }
    num_prompts = len(load_data(str(config.prompts.path), config.prompts).records)
    num_prompts = min(num_prompts, config.prompts.num_prompts or num_prompts)
    estimate |= measuring_takes(config, recipes, out_dir, num_prompts, took)
    plan = {
        "steps": steps,
        "seconds_per_step": step_s,
        "save_steps": {label: max(1, int(SAVED_EVERY_S / each)) for label, each in step_s.items()},
        "estimate": estimate,
    }
    write_whole(out_dir / "plan.json", json.dumps(plan, indent=1) + "\n")
    shutil.rmtree(out_dir / "probes")
    return plan


def seconds_per_step(metrics: Path) -> float:
    """The median of a run's steps but the first two, from how far it had come at each."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    ends = [
        row["train/tokens"] / row["train/tokens_per_s"]
        for row in rows
        if "train/tokens_per_s" in row
    ]
    return statistics.median(after - end for end, after in pairwise(ends[1:]))


def num_steps(config: ContestRun, label: str, step_s: float, num_recipes: int) -> int:
    """Optimizer steps that the budget buys.

    Args:
        config: the settings.
        label: of the recipe.
        step_s: seconds of one of its steps.
        num_recipes: that share the minutes.

    Raises:
        InputError: none.
    """
    if config.tokens is not None:
        a_step = config.train.batch_size * config.data.max_length
        number, key, cost = config.tokens // a_step, f"tokens={config.tokens}", f"{a_step} tokens"
    else:
        assert config.minutes is not None
        number = int(config.minutes * 60 / num_recipes / step_s)
        key, cost = f"minutes={config.minutes:g}", f"{step_s:.2f} s"
    if number < 1:
        raise InputError(f"{key}: buys {label} no step of {cost}; raise it")
    return number


def measuring_takes(
    config: ContestRun, recipes: list[Recipe], out_dir: Path, num_prompts: int, took: Took
) -> dict[str, dict[str, Any]]:
    """What the parts behind the trainings take.

    Args:
        config: the settings.
        recipes: that compete.
        out_dir: with probes.
        num_prompts: dialogues that are measured.
        took: by the probes.
    """
    speed = json.loads((probe_of(out_dir, "speed") / "speedup.json").read_text())
    costs = json.loads((probe_of(out_dir, "costs") / "costs.json").read_text())
    ways, rows = methods_of(recipes), [took.rows[f"probe {each}"] for each in ("speed", "costs")]
    decoding = sum(sum(_seconds(row)) for row in speed["methods"].values())
    start = max(0.0, rows[0]["seconds"] - decoding)
    each_s = seconds_per_dialogue(speed["methods"], costs, ways)
    found = {
        f"acceptance {label}": start
        + num_prompts * (each_s["vanilla", 1] + each_s[names["tree"], 1])
        for label, names in ways.items()
    }
    found["costs"] = rows[1]["seconds"]
    found["speed"] = start + sum(
        each_s[name, size] * (config.num_repeats * num_prompts + size)
        for name in speed["methods"]
        for size in set(config.concurrency)
    )
    memory = max(row["memory"] for row in rows)
    return {name: {"seconds": each, "memory": memory} for name, each in found.items()}


def _seconds(row: dict[str, Any]) -> list[float]:
    return [each["seconds"]["total"][0] for each in row["prompts"]]


def seconds_per_dialogue(
    methods: dict[str, Any], costs: dict[str, Any], ways: dict[str, dict[str, str]]
) -> dict[tuple[str, int], float]:
    """What a dialogue is going to take by each method at each batch size.

    As long as in the probe, less what heads learn until then; in a batch as its steps do.

    Args:
        methods: of `speedup.json` of the probe, one text at a time.
        costs: `costs.json` of the probe.
        ways: methods of each head by label and way.
    """
    heads = {
        name: (place, way)
        for place, names in enumerate(ways.values())
        for way, name in names.items()
    }
    found = dict[tuple[str, int], float]()
    for name, row in methods.items():
        steps = {size: each["plain"] / int(size) for size, each in costs["sizes"].items()}
        alone = statistics.mean(_seconds(row))
        if name in heads:
            (place, way), alone = heads[name], alone * row["tau"] / USUAL_TAU
            sizes = costs["sizes"].items()
            steps = {size: each["heads"][place][way] / int(size) for size, each in sizes}
        found |= {(name, int(size)): alone * each / steps["1"] for size, each in steps.items()}
    return found


def trainings(config: ContestRun, recipes: list[Recipe], out_dir: Path, plan: Plan) -> list[Part]:
    """Every recipe, as the plan has it."""
    found = []
    for recipe in recipes:
        label, folder = recipe.label, out_dir / "heads" / recipe.label
        number = plan["steps"][label]
        more = [f"train.max_steps={number}", f"train.eval_steps={number}"]
        more.append(f"train.save_steps={plan['save_steps'][label]}")
        command = training(config, recipe, folder, *more)
        result = folder / "head/config.json"
        found.append(Part(f"train {label}", command, result, folder=folder))
    return found


def measurements(config: ContestRun, recipes: list[Recipe], out_dir: Path) -> list[Part]:
    """Acceptance of each head, what steps cost, and the speed of all ways to draft."""
    heads = [out_dir / "heads" / recipe.label / "head" for recipe in recipes]
    found = []
    for recipe, head in zip(recipes, heads, strict=True):
        folder = out_dir / "acceptance" / recipe.label
        command = measuring(config, "eval/acceptance.py", [head], folder)
        found.append(Part(f"acceptance {recipe.label}", command, folder / "acceptance.json"))
    found.append(timing(config, heads, out_dir / "costs", "costs"))
    folder = out_dir / "speed"
    sizes = sorted(set(config.concurrency))
    more = [f"batch_size={sizes[0]}", f"concurrency=[{','.join(map(str, sizes))}]"]
    more += [f"num_repeats={config.num_repeats}", "num_warmups=1", _methods(config, recipes)]
    command = measuring(config, "eval/speedup.py", heads, folder, *more)
    return [*found, Part("speed", command, folder / "speedup.json")]
