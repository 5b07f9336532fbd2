"""Verdict of a measurement: one sentence from its figures, and the next command that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from conf.command.run_record import (
    PROMPTS_PLACEHOLDER,
    collect_changed_settings,
    print_next_command,
)
from conf.settings.measure import MeasureRun
from eval.measure.acceptance_stats import (
    FEWEST_DIALOGUES,
    count_dialogues,
    format_interval,
    select_tree_figures,
)
from eval.preflight_checks import METHODS

WEAK_TAU = 1.5
"""tau that drafts by n-grams and suffixes reach without training. A step with a chain of four
drafts costs 1.46 times one without (8B, H200), so a head below this saves no seconds."""
UNTRAINED = [name for name, needs in METHODS.items() if needs == "nothing"]
"""Methods that need neither training nor a second model."""
SERVED_WAYS = ("chain", "tree")
"""Ways of a head to draft by itself. No serving engine runs the others."""


class Outcome(Enum):
    """What figures say about a head."""

    too_few = auto()
    """Fewer than `FEWEST_DIALOGUES` dialogues, so there is no interval to judge by."""
    unclear = auto()
    """The interval includes the figure that would have to be reached."""
    weak = auto()
    """tau and its interval are below `WEAK_TAU`."""
    slower = auto()
    """No faster than decoding without drafts."""
    beaten = auto()
    """No faster than a method without training."""
    alone = auto()
    """A server was measured without one to compare it with."""
    worth = auto()
    """None of the others."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a measurement, and the sentence that says why."""

    outcome: Outcome
    sentence: str


NEXT = {
    Outcome.too_few: "{ended} again",
    Outcome.unclear: "{ended} again",
    Outcome.alone: "{ended} alone",
    Outcome.weak: "weak head",
    Outcome.slower: "weak head",
    Outcome.beaten: "weak head",
    Outcome.worth: "{ended}",
}
"""Key in `NEXT_COMMANDS` by outcome, for the command that has ended."""


def judge_acceptance(result: Mapping[str, Any]) -> Verdict:
    """Judge an `acceptance.json` by tau of the chain or the tree, whichever is larger."""
    tree = select_tree_figures(dict(result))
    shape, row = max((("chain", result), ("tree", tree)), key=lambda each: each[1]["tau"])
    number = count_dialogues(result["prompts"])
    figure = f"tau {row['tau']:.2f} ({shape}, {_format_basis(row['tau_ci95'], number)})"
    if number < FEWEST_DIALOGUES:
        return Verdict(Outcome.too_few, f"Too few prompts to judge this head: {figure}.")
    free = f"{figure}, where n-grams and suffixes often reach {WEAK_TAU} without training"
    if (row["tau_ci95"] or (0.0, row["tau"]))[1] < WEAK_TAU:
        return Verdict(Outcome.weak, f"This head is not worth serving yet: {free}.")
    if row["tau"] < WEAK_TAU:
        return Verdict(
            Outcome.unclear, f"The figures do not tell whether this head is worth it: {free}."
        )
    return Verdict(
        Outcome.worth,
        f"The target accepts enough drafts to measure seconds: {figure} tokens per pass.",
    )


def judge_speedup(result: Mapping[str, Any], kinds: Sequence[str]) -> Verdict | None:
    """Judge a `speedup.json` by the fastest way of a head to draft; None without any.

    Args:
        result: content of the file.
        kinds: kinds of the measured heads, after which their methods are named.
    """
    methods = result["methods"]
    ways = tuple(f"{kind}_{way}" for kind in kinds for way in SERVED_WAYS)
    own = [name for name in methods if name.startswith(ways)]
    if not own:
        return None
    speed = {name: row["speedup"] for name, row in methods.items()}
    best = max(own, key=lambda name: speed[name])
    number = count_dialogues(methods[best]["prompts"])
    bounds = methods[best]["speedup_ci95"]
    figure = f"{best} decodes at {speed[best]:.2f} of the baseline's speed"
    figure += f" ({_format_basis(bounds, number)})"
    others = [name for name in UNTRAINED if name in methods]
    other = max(others, key=lambda name: speed[name], default=best)
    if number < FEWEST_DIALOGUES:
        return Verdict(Outcome.too_few, f"Too few prompts to judge this head: {figure}.")
    if speed[other] > max(1.0, speed[best]):
        return Verdict(
            Outcome.beaten,
            f"This head is not worth serving: {figure}, but {other} at {speed[other]:.2f} "
            f"({_format_basis(methods[other]['speedup_ci95'], number)}) without any training.",
        )
    return _judge_bounds(speed[best], bounds, figure)


def judge_serving(result: Mapping[str, Any], num_dialogues: int) -> Verdict | None:
    """Judge a `serve.json` by the speed-up at each number of requests; None if none was timed."""
    sizes = result["concurrency"]
    if not sizes:
        return None
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
    if num_dialogues < FEWEST_DIALOGUES:
        return Verdict(Outcome.too_few, f"Too few prompts to judge this head: {figure}.")
    return _judge_bounds(speedup, bounds, figure)


def _judge_bounds(speedup: float, bounds: Sequence[float] | None, figure: str) -> Verdict:
    low, high = bounds or (speedup, speedup)
    if speedup <= 1 and high <= 1:
        return Verdict(Outcome.slower, f"This head is not worth serving: {figure}.")
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
    key = NEXT[verdict.outcome].format(ended=ended)
    settings: Mapping[str, Any] | None = onward
    if key == "weak head":
        settings = collect_changed_settings(run, "target") | {"data.path": PROMPTS_PLACEHOLDER}
    elif key != ended:
        settings = collect_changed_settings(run) | {"out_dir": f"{run.out_dir}-again"}
        if verdict.outcome is Outcome.alone:
            settings |= {"baseline": "http://localhost:8001"}
        else:
            settings |= {"data.path": PROMPTS_PLACEHOLDER}
            settings.pop("data.num_prompts", None)
    if settings is not None:
        print_next_command(key, settings)
