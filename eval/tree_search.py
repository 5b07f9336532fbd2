"""Finds the draft tree with the most expected tokens/s, for one head, dataset and machine.

`python eval/tree_search.py head.path=outputs/medusa/head data.path=prompts.jsonl`

Half of the prompts show how often each node would be right; the other half checks the best tree in
real decoding. The tree is written to the head's folder, where decoding reads it.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.measure import TreeSearchRun
from eval.preflight_checks import VANILLA, check_measurement

CHECK = partial(check_measurement, result="tree_search.json")
COMMAND = Command(__doc__, TreeSearchRun, "tree_search", check=CHECK)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.command.run_record import collect_changed_settings, print_next_command, prompts_for
from conf.errors import InputError
from conf.settings.measure import SpeedupRun
from eval.compare.methods import Method, PromptDecoder
from eval.compare.speedup_stats import summarise_speedup
from eval.compare.timing import measure_methods
from eval.decode.engine import DrafterFactory, NoDraft
from eval.measure.acceptance_stats import FEWEST_DIALOGUES, PromptSteps, tau
from eval.measure.measured_head import store_shape
from eval.measure.measurement import Measurement, join_processes, open_measurement, write_result
from eval.report.plots import plot_tree_search
from eval.tune.batch_size_advice import Advice, estimate_advice, measure_advice
from eval.tune.step_costs import (
    CostCurve,
    build_typical_context,
    load_cost_curve,
    measure_step_costs,
)
from eval.tune.tree_acceptance import (
    DynamicTreeReplay,
    StaticTreeReplay,
    build_best_trees,
    build_widest_tree,
    compute_node_values,
)
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import (
    DraftShape,
    DynamicShape,
    Tree,
    make_default_tree,
    make_dynamic_shape,
)

NUM_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Numbers of draft tokens of the dynamic trees to try."""
LONGEST = 8
"""Depth of the deepest trees to try, if the head drafts that deep."""
MOST_OVER_TAU = 1.1
"""Ratio of speed-up and tau above which the clock is not believed."""
TreeReplay = StaticTreeReplay | DynamicTreeReplay


def count_draft_tokens(shape: DraftShape) -> int:
    """Count the draft tokens that a shape verifies."""
    return shape.num_nodes - 1 if isinstance(shape, Tree) else shape.num_tokens


def describe_shape(shape: DraftShape) -> dict[str, Any]:
    """Describe a shape in the form of SHAPE_FILE."""
    if isinstance(shape, DynamicShape):
        return {"dynamic_tree": asdict(shape)}
    paths: list[list[int]] = [[]]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        paths.append([*paths[parent], rank])
    return {"tree": paths[1:]}


@dataclass(frozen=True)
class ShapeCosts:
    """Seconds of drafts and passes.

    Attributes:
        curve: seconds of passes, on this machine or recorded on another.
        drafts: seconds of drafts here: of the widest tree per depth, or of dynamic trees of depth 1
            and of the largest depth per top-k.
        scale: factor that turns seconds of drafts here into seconds on the recorded machine: its
            pass over one token divided by ours. This is right if the same resource limits both
            machines, and if the recorded target is as large relative to the head as this one. A
            curve with `draft_seconds` is not scaled.
    """

    curve: CostCurve
    drafts: dict[DraftShape, float]
    scale: float = 1.0

    def draft_s(self, shape: DraftShape) -> float:
        """Estimate the seconds of a draft; each depth of a dynamic tree costs the same."""
        if self.curve.draft_seconds is not None:
            return self.curve.draft_seconds * (1 if isinstance(shape, Tree) else shape.depth)
        if isinstance(shape, Tree):
            return self.scale * self.drafts[build_widest_tree(shape.depth)]
        longest = max(timed.depth for timed in self.drafts)
        first, last = (self.drafts[replace(shape, depth=d, num_tokens=1)] for d in (1, longest))
        share = (shape.depth - 1) / max(1, longest - 1)
        return self.scale * (first + (last - first) * share)

    def step_s(self, shape: DraftShape) -> float:
        """Estimate the seconds of a draft and its verify pass."""
        return self.draft_s(shape) + self.curve.estimate_seconds(count_draft_tokens(shape) + 1)


@dataclass(frozen=True)
class Candidate:
    """Shape with its expected figures on some texts.

    Attributes:
        shape: shape of the drafts.
        tau: tokens per verify pass.
        draft_s: seconds of a draft.
        step_s: seconds of a draft and the verify pass over it.
        speedup: speed-up over passes of one token, without prompts.
    """

    shape: DraftShape
    tau: float
    draft_s: float
    step_s: float
    speedup: float

    @classmethod
    def from_replay(cls, shape: DraftShape, texts: TreeReplay, costs: ShapeCosts) -> "Candidate":
        """Compute the figures of a shape by an exact replay of texts."""
        texts_steps = texts.replay_shape(shape)  # type: ignore[arg-type]
        expected = tau([PromptSteps("", steps) for steps in texts_steps])
        step_s = costs.step_s(shape)
        speedup = expected / step_s * costs.curve.estimate_seconds(1)
        return cls(shape, expected, costs.draft_s(shape), step_s, speedup)

    def summarise_candidate(self) -> dict[str, float]:
        """Return the candidate's figures for a results file."""
        return {
            "num_tokens": count_draft_tokens(self.shape),
            "tau": self.tau,
            "tokens_per_s": self.tau / self.step_s,
            "speedup": self.speedup,
        }


def replay_target_texts(measurement: Measurement, config: TreeSearchRun) -> TreeReplay:
    """Let the target answer the prompts, and record the head's drafts along its answers."""
    head, length = measurement.head, config.max_new_tokens
    if isinstance(head.tree, Tree):
        tree = build_widest_tree(head.draft_head.max_chain_depth)
        return StaticTreeReplay.from_prompts(
            measurement.target, head.draft_head, measurement.prompts, length, tree
        )

    def make(shape: DynamicShape) -> Any:
        return replace(head, tree=shape).make_drafter("tree", GREEDY, [0])

    top_ks = sorted({*config.top_ks, make_dynamic_shape(_is_gpu_curve(config)).top_k})
    longest = min(LONGEST, head.draft_head.max_chain_depth)
    return DynamicTreeReplay.from_prompts(
        measurement.target, make, measurement.prompts, length, longest, top_ks
    )


def measure_shape_costs(
    measurement: Measurement, texts: TreeReplay, context: list[int], recorded: CostCurve | None
) -> ShapeCosts:
    """Time passes and drafts here, and convert to a recorded curve if given."""
    head, target = measurement.head, measurement.target
    probes: list[DraftShape] = (
        [build_widest_tree(depth) for depth in range(1, head.draft_head.max_chain_depth + 1)]
        if isinstance(texts, StaticTreeReplay)
        else [DynamicShape(depth, k, 1) for k in texts.top_ks for depth in {1, texts.depth}]
    )
    drafters = {
        shape: replace(head, tree=shape).make_drafter("tree", GREEDY, [0]) for shape in probes
    }
    own, drafts = measure_step_costs(target, drafters, context)
    if recorded is None:
        return ShapeCosts(own, drafts)
    return ShapeCosts(recorded, drafts, recorded.estimate_seconds(1) / own.estimate_seconds(1))


def build_candidate_shapes(
    texts: TreeReplay, config: TreeSearchRun
) -> tuple[DraftShape, list[DraftShape]]:
    """List the shapes to compare: the default one, and all others.

    Raises:
        InputError: no shape is useful.
    """
    if isinstance(texts, DynamicTreeReplay):
        usual = make_dynamic_shape(_is_gpu_curve(config))
        return replace(usual, depth=min(usual.depth, texts.depth)), [
            DynamicShape(depth, top_k, size)
            for top_k in config.top_ks
            for depth in range(1, texts.depth + 1)
            for size in NUM_TOKENS
            if depth <= size <= min(config.max_nodes, top_k + (depth - 1) * top_k**2)
        ]
    values, longest = compute_node_values(texts), len(texts.ranked[0][0])
    if not values:
        raise InputError(
            "head.path: none of its draft tokens was right on half of these prompts; train the "
            "head further, or name other prompts"
        )
    trees = [
        tree
        for depth in range(1, longest + 1)
        for tree in build_best_trees(values, depth, config.max_nodes)
    ]
    return make_default_tree(longest, _is_gpu_curve(config)), list(dict.fromkeys(trees))


def _is_gpu_curve(config: TreeSearchRun) -> bool | None:
    """Return True for a recorded curve, which comes from a GPU, and None for this machine."""
    return True if config.curve else None


def search_shapes(
    texts: TreeReplay, costs: ShapeCosts, config: TreeSearchRun
) -> tuple[Candidate, Candidate, list[Candidate]]:
    """Search for the fastest shape: return the default one, the best one, and all compared."""
    first, others = build_candidate_shapes(texts, config)
    usual = Candidate.from_replay(first, texts, costs)
    candidates = [Candidate.from_replay(shape, texts, costs) for shape in others]
    best = max([usual, *candidates], key=lambda candidate: candidate.speedup)
    return usual, best, candidates


def build_report(
    predicted: dict[str, Candidate],
    simulated: dict[str, Candidate],
    measured: dict[str, Any] | None,
) -> dict[str, Any]:
    """Collect the figures of each shape: predicted, on other prompts, and gained over the default.

    Args:
        predicted: shapes `default` and `found` on the prompts of the search.
        simulated: both shapes on the other prompts, with real acceptance and the curve's costs.
        measured: real decoding of both shapes, on the machine of the curve.
    """
    rows = measured["methods"] if measured else {}
    result: dict[str, Any] = {}
    for name, candidate in predicted.items():
        result[name] = {
            **describe_shape(candidate.shape),
            **candidate.summarise_candidate(),
            "draft_s": candidate.draft_s,
            "step_s": candidate.step_s,
            "simulated_tau": simulated[name].tau,
            "simulated_speedup": simulated[name].speedup,
            "measured_tau": rows[name]["tau"] if rows else None,
            "measured_speedup": rows[name]["decode_speedup"] if rows else None,
        }
    best, usual = result["found"], result["default"]
    result["predicted_gain"] = best["speedup"] / usual["speedup"]
    for way in ("simulated", "measured"):
        speedups = [row[f"{way}_speedup"] for row in (best, usual)]
        result[f"{way}_gain"] = speedups[0] / speedups[1] if all(speedups) else None
    return result


def open_split_measurement(
    config: TreeSearchRun,
) -> tuple[Measurement, Measurement, Measurement]:
    """Open a measurement in one process, and halve its prompts: for searching, and for checking.

    Dialogues are divided, not prompts, as a second turn includes the first.

    Raises:
        InputError: several processes, or too few prompts.
    """
    num_processes = join_processes().num_processes
    if num_processes > 1:
        raise InputError(
            f"{num_processes} processes: times are measured by one process; start a single one"
        )
    measurement = open_measurement(config, "tree_search.json")
    searched, checked = (
        replace(measurement, prompts=[p for p in measurement.prompts if p.dialogue % 2 == odd])
        for odd in (0, 1)
    )
    if not checked.prompts:
        raise InputError(
            "data.num_prompts=1: searching and checking need one prompt each; set "
            "data.num_prompts=2 or more"
        )
    return measurement, searched, checked


def decode_with_shapes(
    measurement: Measurement, config: TreeSearchRun, shapes: dict[str, DraftShape]
) -> dict[str, Any]:
    """Decode with each shape, interleaved with decoding without drafts.

    Args:
        measurement: measurement with the prompts.
        config: settings of the command.
        shapes: shapes of the head's drafts by name.

    Returns:
        The content of `speedup.json`.
    """

    def make_method(make: DrafterFactory, tree: DraftShape | None = None) -> Method:
        target, length = measurement.target, config.max_new_tokens
        run = PromptDecoder(target, make, length, measurement.sampling, capture=False)
        return Method(run, tree if isinstance(tree, Tree) else None)

    methods = {VANILLA: make_method(lambda _: NoDraft())}
    for name, shape in shapes.items():
        head = replace(measurement.head, tree=shape)
        methods[name] = make_method(partial(head.make_drafter, "tree", GREEDY), shape)
    settings = SpeedupRun(seed=config.seed, num_repeats=config.num_repeats, num_texts=0)
    runs = measure_methods(measurement, settings, methods)
    return summarise_speedup(measurement, settings, methods, runs)


def print_tree_search(result: dict[str, Any], console: Console) -> None:
    """Print the figures of the default and the found shape, and the gain."""
    table = Table(title=f"Speed-up over passes of one token, {result['curve']['device']}")
    columns = ("shape", "draft tokens", "tau", "predicted", "tau, other prompts", "simulated",
               "measured")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "shape" else "right")
    for name in ("default", "found"):
        row = result[name]
        table.add_row(
            name, str(row["num_tokens"]), f"{row['tau']:.3f}", f"{row['speedup']:.3f}",
            f"{row['simulated_tau']:.3f}", f"{row['simulated_speedup']:.3f}",
            _format_figure(row["measured_speedup"]),
        )  # fmt: skip
    predicted, simulated = (f"{result[f'{way}_gain']:.3f}" for way in ("predicted", "simulated"))
    table.add_row("gain", "", "", predicted, "", simulated, _format_figure(result["measured_gain"]))
    console.print(table)


def is_clock_disturbed(result: dict[str, Any]) -> bool:
    """Tell whether the found shape's speed-up, measured or simulated, is beyond its tau."""
    way = "simulated" if result["measured"] is None else "measured"
    found = result["found"]
    return bool(found[f"{way}_speedup"] > MOST_OVER_TAU * found[f"{way}_tau"])


def judge_tree(result: dict[str, Any], num_dialogues: int) -> str:
    """Say from real decoding whether the found shape pays; from a replay where none was timed.

    Args:
        result: content of `tree_search.json`.
        num_dialogues: dialogues that the shapes were checked on.
    """
    default, found = result["default"], result["found"]
    way = "simulated" if result["measured"] is None else "measured"
    gain, speedup = result[f"{way}_gain"], found[f"{way}_speedup"]
    plural = "" if num_dialogues == 1 else "s"
    figure = f"{gain:.2f} of the default's speed and {speedup:.2f} of plain decoding's"
    figure += f" ({way}, {num_dialogues} other dialogue{plural})"
    if is_clock_disturbed(result):
        return (
            "The clock was disturbed, as a step with drafts takes no less than one without: "
            f"{figure} at tau {found[f'{way}_tau']:.2f}; no shape is written, search again while "
            "the machine is idle."
        )
    if num_dialogues < FEWEST_DIALOGUES:
        return f"Too few prompts to judge this shape: {figure}."
    if speedup <= 1:
        return f"No shape makes drafts of this head pay here: {figure}."
    if all(found.get(key) == default.get(key) for key in ("tree", "dynamic_tree")):
        return f"No shape is better than the default: {figure}."
    if gain <= 1:
        return f"The found shape is no faster than the default, keep that: {figure}."
    return f"The found shape is faster than the default: {figure}."


def _format_figure(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}"


def main(config: TreeSearchRun) -> None:
    """Search, check, advise, and write the shape, `tree_search.json` and a picture."""
    recorded = None if config.curve is None else load_cost_curve(config.curve)
    measurement, searched, checked = open_split_measurement(config)
    texts = replay_target_texts(searched, config)
    context = build_typical_context([p.token_ids for p in searched.prompts], texts.responses)
    costs = measure_shape_costs(measurement, texts, context, recorded)
    usual, best, candidates = search_shapes(texts, costs, config)
    predicted, others = {"default": usual, "found": best}, replay_target_texts(checked, config)
    simulated = {
        name: Candidate.from_replay(c.shape, others, costs) for name, c in predicted.items()
    }
    measured: dict[str, Any] | None = None
    advice: Advice | None = None
    if recorded is None:
        measured = decode_with_shapes(checked, config, {n: c.shape for n, c in predicted.items()})
        advice = measure_advice(estimate_advice(searched, config, context), checked, config)
    result = {
        **build_report(predicted, simulated, measured),
        "curve": asdict(costs.curve),
        "candidates": [candidate.summarise_candidate() for candidate in candidates],
        "measured": measured,
        "advice": advice and advice.describe_advice(),
    }
    console = Console()
    print_tree_search(result, console)
    console.print(
        f"searched on {len(searched.prompts)} prompts, checked on {len(checked.prompts)} others"
    )
    if advice is not None:
        advice.print_advice(console)
    path, _ = write_result(config, "tree_search.json", result, measurement)
    plot_tree_search(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")
    if config.write and recorded is None and not is_clock_disturbed(result):
        content = {
            **describe_shape(best.shape),
            "device": costs.curve.device,
            "data": measurement.data["sha256"],
            "tau": best.tau,
        }
        path = store_shape(measurement.head, content, Path(config.out_dir))
        console.print(f"wrote {path}, which decoding uses if it lies beside the head's weights")
    dialogues = {prompt.dialogue for prompt in checked.prompts}
    print(f"\n{judge_tree(result, len(dialogues))}")  # noqa: T201
    # On other prompts, as the prompts of the search would flatter its result.
    same = collect_changed_settings(config, "head", "target")
    print_next_command(
        "tree_search", same | prompts_for(measurement.embeddings_and_output_head.name)
    )


if __name__ == "__main__":
    COMMAND.run(main)
