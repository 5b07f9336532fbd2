"""Verdict of a measurement: one sentence from its figures, and the next command that fits."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from conf.command.forms import name_commands
from conf.command.run_record import (
    CHATS_PLACEHOLDER,
    PROMPTS_PLACEHOLDER,
    collect_changed_settings,
    print_next_command,
)
from conf.files import load_json
from conf.settings.measure import MeasureRun
from eval.measure.acceptance_stats import (
    FEWEST_DIALOGUES,
    LENGTH_DEFINITIONS,
    count_dialogues,
    format_interval,
    select_tree_figures,
)
from eval.measure.modes import find_fallen_modes
from eval.preflight_checks import METHODS

WEAK_TAU = 1.5
"""tau below which a head saves no seconds: a step with a chain of four drafts costs 1.46 times one
without (8B, H200)."""
COSTS = f"{WEAK_TAU}, about the plain steps that a step with four drafts costs (8B, H200)"
SUFFIXES = name_commands("eval/speedup.py compares it with suffixes, which need no training")
UNTRAINED = [name for name, needs in METHODS.items() if needs == "nothing"]
"""Methods that need neither training nor a second model."""
TREES = "vLLM and llama.cpp run chains alone, SGLang also trees of EAGLE heads."
"""Why a head is judged by its chain. No serving engine mixes a head with suffixes."""
NO_CHAIN = "Nothing says whether this head is worth serving, as no chain was measured"
UNMEASURED = name_commands(
    "No figures of this head lie beside it, so nothing says whether it is worth serving: measure "
    "it first (eval/acceptance.py)"
)


class Outcome(Enum):
    """What figures say about a head; the value leads to the next command.

    It is a key in `NEXT_COMMANDS`, with the name of the command that has ended in place of `ended`.
    """

    unclear = "{ended} again"
    """The interval includes the figure that would have to be reached, or there is none, as fewer
    than `FEWEST_DIALOGUES` dialogues were measured."""
    weak = "weak head"
    """tau and its interval are below `WEAK_TAU`, or the head is no faster than decoding without
    drafts or than a method without training."""
    no_chain = "{ended} chain"
    """A head was measured in a way that few engines serve."""
    alone = "{ended} alone"
    """A server was measured without one to compare it with."""
    worth = "{ended}"
    """None of the others."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a measurement, and the sentence that says why."""

    outcome: Outcome
    sentence: str


def judge_acceptance(result: Mapping[str, Any], pooled: Mapping[str, Any] | None = None) -> Verdict:
    """Judge an `acceptance.json` by tau of the chain; name that of the tree where it is larger.

    Args:
        result: content of the file.
        pooled: figures over several conditions, whose modes are judged in place of the result's.
    """
    verdict, tree = _judge_chain(result), select_tree_figures(dict(result))["tau"]
    more = f" The tree's tau is {tree:.2f}, but {TREES}" if tree > result["tau"] else ""
    verdict = replace(verdict, sentence=verdict.sentence + more)
    return _add_reservations(verdict, result, result if pooled is None else pooled)


def format_published(result: Mapping[str, Any]) -> str:
    """Format whether a head has the acceptance that it was published with; empty without figures.

    Args:
        result: content of `acceptance.json`.
    """
    found = result.get("published")
    if found is None:
        return ""
    source, length = found["source"], found["draft_tokens"]
    if found["published"] is None:
        known = ", ".join(map(str, found["published_for"]))
        return f"{source} knows drafts of {known} tokens, not of {length}: set depth to compare."
    dialogues = count_dialogues(result["prompts"])
    there = ", ".join(filter(None, [f"{found['num_prompts']} prompts", found["data"]]))
    here = [_format_basis(found["ci95"], dialogues), (result.get("conditions") or {}).get("data")]
    words = {True: "equal within the interval", False: "not equal", None: "too few to compare"}
    return (
        f"{source} and this measurement, {words[found['equal']]}: {found['published']:.3f} "
        f"({there}), {found['measured']:.3f} ({', '.join(filter(None, here))}); drafts of {length} "
        f"tokens, {LENGTH_DEFINITIONS[found['count']]}."
    )


def _add_reservations(
    verdict: Verdict, result: Mapping[str, Any], figures: Mapping[str, Any]
) -> Verdict:
    """Add where drafts fail, and what makes figures too good or too bad, or llama.cpp slow.

    Args:
        verdict: verdict so far.
        result: content of the file.
        figures: figures of the judged drafts by mode.
    """
    if fallen := find_fallen_modes(figures):
        more = (
            " In some modes the target accepts at most half as many draft tokens as on average "
            f"({figures['tau'] - 1:.2f} per pass): {'; '.join(fallen)}."
        )
        verdict = replace(verdict, sentence=verdict.sentence + more)
    data = result.get("data") or {}
    trained = data.get("trained_on") or []
    known = max(((each["num_trained"] or 0, each["num_dialogues"]) for each in trained), default=())
    if known and known[0]:
        outcome = Outcome.unclear if verdict.outcome is Outcome.worth else verdict.outcome
        more = (
            " {} of {} dialogues begin with prompts that the head was trained on, so these figures"
        )
        verdict = Verdict(outcome, f"{verdict.sentence}{more.format(*known)} are too good.")
    if data.get("target_changes"):
        outcome = Outcome.unclear if verdict.outcome is Outcome.worth else verdict.outcome
        more = "The head was trained for another target: measure it with that target."
        verdict = Verdict(outcome, f"{verdict.sentence} {more}")
    if str(result.get("target")).endswith(".gguf"):
        more = (
            "llama.cpp serves this target; on a CPU no head pays there (docs/serving/llama_cpp.md)."
        )
        verdict = replace(verdict, sentence=f"{verdict.sentence} {more}")
    return verdict


def _judge_chain(row: Mapping[str, Any]) -> Verdict:
    number = count_dialogues(row["prompts"])
    figure = f"tau {row['tau']:.2f} (chain, {_format_basis(row['tau_ci95'], number)})"
    if number < FEWEST_DIALOGUES:
        return Verdict(Outcome.unclear, f"Too few prompts to judge this head: {figure}.")
    if (row["tau_ci95"] or (0.0, row["tau"]))[1] < WEAK_TAU:
        start = f"This head is not worth serving yet: {figure} lies below {COSTS}"
        return Verdict(Outcome.weak, f"{start}; {SUFFIXES}.")
    if row["tau"] < WEAK_TAU:
        start = "The figures do not tell whether this head is worth it"
        return Verdict(Outcome.unclear, f"{start}: {figure} should exceed {COSTS}; {SUFFIXES}.")
    return Verdict(
        Outcome.worth,
        f"The target accepts enough drafts to measure seconds: {figure} tokens per pass.",
    )


def judge_speedup(result: Mapping[str, Any], kinds: Sequence[str]) -> Verdict | None:
    """Judge a `speedup.json` by the fastest chain of a head; name a tree that is faster.

    Args:
        result: content of the file.
        kinds: kinds of the measured heads, after which their methods are named.

    Returns:
        The verdict; None without a chain or a tree of a head.
    """
    methods = result["methods"]
    chain, tree = (
        max(
            (name for name in methods if name.startswith(tuple(f"{kind}_{way}" for kind in kinds))),
            key=lambda name: methods[name]["speedup"],
            default=None,
        )
        for way in ("chain", "tree")
    )
    beside = "" if tree is None else f"{_format_speed(tree, methods[tree])}, but {TREES}"
    if chain is None:
        return Verdict(Outcome.no_chain, f"{NO_CHAIN}: {beside}") if beside else None
    verdict = _judge_method(chain, methods)
    if tree is not None and methods[tree]["speedup"] > methods[chain]["speedup"]:
        verdict = replace(verdict, sentence=f"{verdict.sentence} {beside}")
    return _add_reservations(verdict, result, methods[chain])


def _judge_method(name: str, methods: Mapping[str, Any]) -> Verdict:
    row, figure = methods[name], _format_speed(name, methods[name])
    others = [each for each in UNTRAINED if each in methods]
    other = max(others, key=lambda each: methods[each]["speedup"], default=name)
    rival, num_dialogues = methods[other], count_dialogues(row["prompts"])
    if num_dialogues >= FEWEST_DIALOGUES and rival["speedup"] > max(1.0, row["speedup"]):
        return Verdict(
            Outcome.weak,
            f"This head is not worth serving: {figure}, but {other} at {rival['speedup']:.2f} "
            f"({_format_basis(rival['speedup_ci95'], count_dialogues(rival['prompts']))}) without "
            "any training.",
        )
    return _judge_bounds(row["speedup"], row["speedup_ci95"], num_dialogues, figure)


def _format_speed(name: str, row: Mapping[str, Any]) -> str:
    basis = _format_basis(row["speedup_ci95"], count_dialogues(row["prompts"]))
    return f"{name} decodes at {row['speedup']:.2f} of the baseline's speed ({basis})"


def judge_serving(result: Mapping[str, Any], num_dialogues: int) -> Verdict | None:
    """Judge a `serve.json` by the speed-up at each valid load; None if none was timed."""
    if not result["concurrency"]:
        return None
    sizes = {
        size: each
        for size, each in result["concurrency"].items()
        if all(row.get("valid", True) for row in each["methods"].values())
    }
    if not sizes:
        return Verdict(
            Outcome.unclear, "No load has valid windows, so nothing says whether drafts pay."
        )
    rows = {
        size: next(row for name, row in each["methods"].items() if name != each["baseline"])
        for size, each in sizes.items()
    }
    best = max(rows, key=lambda size: rows[size]["speedup"] or 0.0)
    speedup, bounds = rows[best]["speedup"], rows[best]["speedup_ci95"]
    if speedup is None:
        return Verdict(
            Outcome.alone, "No server without drafts was given, so nothing says whether drafts pay."
        )
    figure = f"with {best} in flight the server answers at {speedup:.2f} of the baseline's "
    figure += f"speed ({_format_basis(bounds, num_dialogues)})"
    if len(rows) > 1:
        slower = [size for size, row in rows.items() if row["speedup"] <= 1]
        figure += f", and is no faster with {', '.join(slower)}" if slower else ", its best"
    return _judge_bounds(speedup, bounds, num_dialogues, figure)


def _judge_bounds(
    speedup: float, bounds: Sequence[float] | None, num_dialogues: int, figure: str
) -> Verdict:
    low, high = bounds or (speedup, speedup)
    if num_dialogues < FEWEST_DIALOGUES:
        return Verdict(Outcome.unclear, f"Too few prompts to judge this head: {figure}.")
    if speedup <= 1 and high <= 1:
        return Verdict(Outcome.weak, f"This head is not worth serving: {figure}.")
    if low <= 1:
        return Verdict(
            Outcome.unclear, f"The figures do not tell whether this head pays: {figure}."
        )
    return Verdict(Outcome.worth, f"This head is worth serving: {figure}.")


def _format_basis(bounds: Sequence[float] | None, num_dialogues: int) -> str:
    """Format the interval of a figure, and the number of dialogues that it rests on."""
    plural = "" if num_dialogues == 1 else "s"
    basis = f"{num_dialogues} dialogue{plural}"
    if bounds is None or num_dialogues < FEWEST_DIALOGUES:
        return basis
    return f"95% interval {format_interval(bounds)}, {basis}"


def judge_measured_head(folder: Path, kind: str, places: Sequence[Path]) -> str:
    """Judge a head by its `speedup.json`, or else by its `acceptance.json`.

    Args:
        folder: folder of the head.
        kind: kind of the head, after which its methods are named.
        places: folders with measurements; the first that has a file is used.

    Returns:
        The verdict, and the file that it rests on; empty if the files measure another head, lack
        figures, or are missing.
    """
    judges: dict[str, Callable[[dict[str, Any]], Verdict | None]] = {
        "speedup.json": partial(judge_speedup, kinds=[kind]),
        "acceptance.json": judge_acceptance,
    }
    for name, judge in judges.items():
        result = load_head_result(name, folder, places)
        if "methods" in result:  # eagle_tree_2 is another head's
            rows = result["methods"].items()
            numbered = re.compile(rf"{kind}_\w+_\d+")
            result["methods"] = {k: row for k, row in rows if not numbered.fullmatch(k)}
        try:
            verdict = judge(result)
        except KeyError:  # no file, or an old one
            continue
        if verdict is not None:
            return f"The verdict of {name}: {verdict.sentence}"
    return ""


def load_head_result(name: str, folder: Path, places: Sequence[Path]) -> dict[str, Any]:
    """Load a result of a head; empty if there is none, or the first measures another head.

    Args:
        name: name of the file.
        folder: folder of the head.
        places: folders with measurements; the first that has the file is used.
    """
    result = next(filter(None, (load_json(place / name) for place in places)), {})
    return {} if measures_another_head(result.get("head"), folder) else result


def measures_another_head(path: object, folder: Path) -> bool:
    """Tell whether a result's head, if it is a folder of this machine, is none of a given one."""
    return isinstance(path, str) and Path(path).is_dir() and not Path(path).samefile(folder)


def print_verdict(
    ended: str, verdict: Verdict, run: MeasureRun, onward: Mapping[str, Any] | None
) -> None:
    """Print the sentence of a verdict and the next command.

    Args:
        ended: name of the command that has ended, a key of `NEXT_COMMANDS`.
        verdict: its verdict.
        run: settings of the command.
        onward: settings of the next stage, for a head that is worth it; None without one.
    """
    print(f"\n{verdict.sentence}", flush=True)  # noqa: T201
    key = verdict.outcome.value.format(ended=ended)
    settings: Mapping[str, Any] | None = onward
    if verdict.outcome is Outcome.weak:
        settings = collect_changed_settings(run, "target") | {"data.path": CHATS_PLACEHOLDER}
    elif key != ended:
        settings = collect_changed_settings(run) | {"out_dir": f"{run.out_dir}-again"}
        if verdict.outcome is Outcome.alone:
            settings |= {"baseline": "http://localhost:8001"}
        elif verdict.outcome is Outcome.no_chain:
            chains = [name.replace("_tree", "_chain") for name in settings["methods"]]
            settings |= {"methods": chains}
        else:
            settings |= {"data.path": PROMPTS_PLACEHOLDER}
            settings.pop("data.num_prompts", None)
    if settings is not None:
        print_next_command(key, settings)
