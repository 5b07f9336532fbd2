"""Pictures of measurements: what is drawn of each."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report.plots import (
    compute_step_ms,
    plot_acceptance,
    plot_comparison,
    plot_concurrency,
    plot_load_curve,
    plot_pruning,
    plot_reported,
    plot_speedup,
    plot_tree_search,
)
from tests.eval.report.test_report import large, sizes, small


def test_time_of_a_pass() -> None:
    row = {"num_steps": 10, "breakdown": dict.fromkeys(("draft", "verify", "accept", "host"), 0.5)}
    assert compute_step_ms(row) == {"draft": 50.0, "verify": 50.0, "accept": 50.0, "host": 50.0}
    assert compute_step_ms({**row, "num_steps": 0}) == {}
    assert compute_step_ms({"breakdown": row["breakdown"]}) == {}


@pytest.fixture
def drawn(monkeypatch, tmp_path) -> Callable[..., list[Axes]]:
    """The axes of a picture that was written, by name alone."""
    figures: list[Figure] = []

    def keep(figure: Figure, path: Path, **_: Any) -> None:
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(plot: Callable[[Any, Path], None], result: Any) -> list[Axes]:
        plot(result, tmp_path / "picture.png")
        assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
        return figures.pop().axes

    return draw


def bars(axes: Axes) -> list[float]:
    return [patch.get_width() for patch in axes.patches]


def lines(axes: Axes) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.lines]


def words(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def said(*panels: Axes) -> list[str]:
    """Words below panels, and beside those that have any, on one line each."""
    both = [text for panel in panels for text in (panel.get_xlabel(), panel.get_ylabel())]
    return [text.replace("\n", " ") for text in both if text]


def named(panel: Axes) -> list[str]:
    """Words of a legend."""
    return [text.get_text() for text in panel.get_legend().get_texts()]


def ticks(panel: Axes) -> list[str]:
    return [label.get_text() for label in panel.get_xticklabels()]


def test_a_picture_of_acceptance(drawn) -> None:
    own = {"tau": 1.5, "ci95": [1.25, 1.75], "alpha": [0.5, 0.25], "num_prompts": 2}
    tree = {"tau": 2.0, "by_category": {"math": {"tau": 2.25}}}
    whole = {"tau": 1.75, "tau_ci95": [1.5, 2.0], "alpha": [0.75, 0.5], "static_tree": tree}
    left, right = drawn(plot_acceptance, {**whole, "by_category": {"math": own}})
    assert words(left) == ["math", "all"]
    assert bars(left) == [1.5, 1.75]
    assert lines(left) == [
        [(1.25, 0), (1.75, 0)], [(2.25, 0)], [(1.5, 1), (2.0, 1)], [(2.0, 1)], [(1, 0), (1, 1)],
    ]  # fmt: skip
    assert lines(right) == [[(1, 0.5), (2, 0.25)], [(1, 0.75), (2, 0.5)]]
    assert said(left, right) == [
        "tau, tokens per verify pass (bar: chain, 95% interval; diamond: tree)",
        "depth", "alpha, acceptance per depth",
    ]  # fmt: skip


def test_a_picture_of_acceptance_has_a_row_of_each_mode(drawn) -> None:
    own = {"tau": 1.5, "ci95": [1.25, 1.75], "alpha": [0.5], "num_prompts": 2}
    texts = {
        "tool call": {"tau": 1.25, "tau_ci95": None}, "prose": {"tau": 2.0, "tau_ci95": [1.5, 2.5]},
    }  # fmt: skip
    tree = {"tau": 2.0, "by_category": {"math": own}, "by_mode": {"text": {"prose": own}}}
    whole = {"tau": 1.75, "tau_ci95": None, "alpha": [0.75], "by_category": {"math": own}}
    tree["by_mode"]["text"]["thinking"] = own | {"tau": 3.0}
    left, right = drawn(
        plot_acceptance,
        {**whole, "static_tree": tree, "by_mode": {"text": texts, "turn": {"1": own}}},
    )
    assert words(left) == ["math", "all", "text: tool call", "text: prose"]
    assert bars(left) == [1.5, 1.75, 1.25, 2.0]
    # The tree's text has no tool call.
    assert lines(left)[4:-1] == [[(1.25, 2), (1.25, 2)], [(1.5, 3), (2.5, 3)], [(1.5, 3)]]
    assert len(lines(right)) == 2


@pytest.mark.parametrize("make", [large, small])
def test_a_picture_of_speed(make, drawn) -> None:
    methods = make()["methods"]
    speed, times, taus, *others = drawn(plot_speedup, make())
    names = [f"{name} (lossy)" if row.get("lossy") else name for name, row in methods.items()]
    assert words(speed) == words(times) == words(taus) == names
    assert bars(speed) == [row["tokens_per_s"] for row in methods.values()]
    assert [t.get_text() for t in speed.texts] == [
        f" {row['speedup']:.2f}x" for row in methods.values()
    ]
    parts = [compute_step_ms(row).values() for row in methods.values()]
    assert bars(times) == pytest.approx([ms for row in parts for ms in row])
    assert [line[0][0] for line in lines(taus)[::2]] == [row["tau"] for row in methods.values()]
    rates = [row["alpha"] for row in methods.values() if row.get("alpha")]
    assert [[[y for _, y in line] for line in lines(alphas)] for alphas in others] == (
        [rates] if rates else []
    )
    assert said(speed, times, taus, *others) == [
        "tokens per second, prompt included, and speed-up over the baseline, vanilla",
        "ms per verify pass", "tau, tokens per verify pass (95% interval)",
        *(["depth", "alpha, acceptance per depth"] if rates else []),
    ]  # fmt: skip


DEVICE = "NVIDIA H100 80GB HBM3, with a very long name of its slice, MIG 1g.10gb"
CANDIDATES = [
    {"num_tokens": size, "tokens_per_s": speed}
    for size, speed in [(1, 10.0), (2, 12.0), (2, 15.0), (4, 11.0)]
]
CURVE = {"device": DEVICE, "sizes": [1, 2, 4], "seconds": [0.5, 0.75, 1.0]}
SEARCHED = {
    "candidates": CANDIDATES, "default": CANDIDATES[3], "found": CANDIDATES[2], "curve": CURVE
}  # fmt: skip


def test_a_picture_of_a_search(drawn) -> None:
    left, right = drawn(plot_tree_search, SEARCHED | {"curve": CURVE | {"device": "gpu"}})
    assert lines(left) == [[(1, 10.0), (2, 15.0), (4, 11.0)], [(4, 11.0)], [(2, 15.0)]]
    assert lines(right) == [[(1, 1.0), (2, 1.5), (4, 2.0)]]
    assert named(left) == ["best of each size", "default", "found"]
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert right.get_title() == "gpu"
    assert said(left, right) == [
        "draft tokens of a pass", "expected tokens per second",
        "tokens of a pass", "cost in passes over one token",
    ]  # fmt: skip


def test_a_picture_of_heads_side_by_side(drawn) -> None:
    one = {"tau": 1.5, "tau_ci95": [1.25, 1.75], "alpha": [0.5], "static_tree": {"tau": 2.0}}
    two = {
        "tau": 2.5, "tau_ci95": [2.25, 2.75], "alpha": [0.75, 0.5], "dynamic_tree": {"tau": 3.0},
        "agreement": [0.875, 0.625],
    }  # fmt: skip
    left, middle, right = drawn(plot_comparison, {"one": one, "two": two})
    assert words(left) == ["one", "two"]
    assert bars(left) == [1.5, 2.5]
    assert lines(left) == [[(1.25, 0), (1.75, 0)], [(2.0, 0)], [(2.25, 1), (2.75, 1)], [(3.0, 1)]]
    assert lines(middle) == [[(1, 0.5)], [(1, 0.75), (2, 0.5)]]
    assert lines(right) == [[(1, 0.875), (2, 0.625)]]
    assert right.lines[0].get_color() == middle.lines[1].get_color()
    assert said(left, middle, right) == [
        "tau, tokens per verify pass (bar: chain, 95% interval; diamond: tree)",
        "depth", "alpha, acceptance per depth", "depth", "first choice agrees with the target",
    ]  # fmt: skip
    assert left.get_xlim()[0] == 1
    for panel in (middle, right):
        assert (panel.get_ylim(), ticks(panel)) == ((0, 1), ["1", "2"])
    [legend] = left.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_a_picture_of_tools_side_by_side(drawn) -> None:
    def plot(results: Any, path: Path) -> None:
        plot_reported(results, "acceptance length", "greedy", path)

    left, right = drawn(plot, {"ours": (2.5, [0.75, 0.5]), "theirs": (None, [])})
    assert words(left) == ["ours", "theirs"]
    assert bars(left) == [2.5, 0]
    assert lines(right) == [[(1, 0.75), (2, 0.5)]]
    assert said(left, right) == [
        "acceptance length", "position", "share of drafts accepted that far",
    ]  # fmt: skip


def pruned(num_ids: int, figure: float) -> dict[str, Any]:
    interval = [figure - 0.25, figure + 0.25]
    return {
        "num_ids": num_ids, "tau": figure, "tau_ci95": interval, "coverage": figure / 4,
        "speedup": figure / 2,
    }  # fmt: skip


PRUNED = {
    "pruned": [pruned(16, 1.5), pruned(32, 2.0)], "before": pruned(64, 2.5) | {"tau_ci95": None},
    "low_rank": [{**pruned(64, 2.25), "rank": 8}], "device": DEVICE,
}  # fmt: skip


def test_a_picture_of_pruning(drawn) -> None:
    axes = drawn(plot_pruning, PRUNED | {"device": "gpu"})
    for axis, share in zip(axes, (1, 4, 2), strict=True):
        curve = [(16, 1.5 / share), (32, 2.0 / share), (64, 2.5 / share)]
        level = [] if share == 4 else [[(0, 2.25 / share), (1, 2.25 / share)]]
        assert lines(axis) == [curve, curve[2:], *level]
        assert (axis.get_xscale(), ticks(axis)) == ("log", ["16", "32", "64"])
        assert named(axis) == ["before", *["rank 8, all ids"] * len(level)]
    assert axes[1].get_ylim() == (0, 1.02)
    ids = "ids that can be drafted"
    assert said(*axes) == [
        ids, "tau of the chain, tokens per verify pass (95% interval)",
        ids, "share of the target's choices that can be drafted", ids, "expected speed-up, gpu",
    ]  # fmt: skip


def of_methods(names: Iterable[str]) -> dict[str, Any]:
    """Figures of `speedup.json`, the same for all methods but the baselines."""
    known = large()["methods"]
    rows = {name: known[name if name in known else "medusa_tree"] for name in names}
    return {**large(), "methods": rows}


def accepted(categories: Iterable[str]) -> dict[str, Any]:
    own = {"tau": 1.5, "ci95": [1.25, 1.75], "alpha": [0.5, 0.25], "num_prompts": 2}
    tree = {"tau": 2.0, "by_category": dict.fromkeys(categories, own)}
    return {**own, "tau_ci95": None, "static_tree": tree, "by_category": tree["by_category"]}


def without_waits() -> dict[str, Any]:
    """Sizes of texts of one token, which have no waits between tokens."""
    found = sizes(of_methods(["vanilla", "eagle_tree"])["methods"])
    for size in found.values():
        for row in size["methods"].values():
            row["between_tokens_ms"] = None
    return {"concurrency": found}


def served(
    sizes_: Sequence[int] = (1, 4, 16), alone: bool = False, off_from: int | None = 5
) -> dict[str, Any]:
    """A `serve.json`: at each load our server is at half the last gain; one window is not valid."""
    loads = {}
    for place, size in enumerate(sizes_):
        gain = 2.0 / 2**place
        row = {
            "tokens_per_s": 8.0 * size, "tokens_per_s_per_user": 8.0 - place, "speedup": 1.0,
            "speedup_ci95": None, "valid": True,
        }  # fmt: skip
        ours = {
            **row, "tokens_per_s": 8.0 * size * gain, "tokens_per_s_per_user": 16.0 - place,
            "speedup": None if alone else gain,
            "speedup_ci95": None if alone else [gain / 2, gain * 2],
        }  # fmt: skip
        methods = {"with drafts": ours} if alone else {"with drafts": ours, "without": row}
        loads[str(size)] = {"baseline": None if alone else "without", "methods": methods}
    loads[str(sizes_[-1])]["methods"]["with drafts"]["valid"] = False
    return {"concurrency": loads, "off_from": off_from}


def hollow(panel: Axes) -> list[tuple[float, float]]:
    """Places of the points that are not filled."""
    found = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    return [(float(x), float(y)) for line in found for x, y in line.get_xydata()]


def test_a_picture_of_a_load_curve(drawn) -> None:
    curve, gain = drawn(plot_load_curve, served())
    ours, base = [(16, 16), (15, 32), (14, 64)], [(8, 8), (7, 32), (6, 128)]
    assert [line for line in lines(curve) if len(line) == 3] == [ours, base]
    assert [text.get_text() for text in curve.texts] == ["1", "4", "16"] * 2
    assert hollow(curve) == [(14, 64)]
    marks = {line.get_label(): line.get_xydata().tolist() for line in curve.lines}
    assert marks["off from 5 in flight"] == [[14, 64]]
    assert lines(gain)[0] == [(1, 2), (4, 1), (16, 0.5)]
    assert hollow(gain) == [(16, 0.5)]
    assert lines(gain)[-2:] == [[(0, 1), (1, 1)], [(5, 0), (5, 1)]]
    assert (gain.get_xscale(), ticks(gain)) == ("log", ["1", "4", "16"])
    assert said(curve, gain) == [
        "tokens per second per user", "tokens per second of the server",
        "requests in flight", "speed-up over the server without drafts (95%)",
    ]  # fmt: skip


def test_a_picture_of_a_server_alone_has_the_curve_alone(drawn) -> None:
    (curve,) = drawn(plot_load_curve, served(alone=True, off_from=None))
    assert lines(curve)[0] == [(16, 16), (15, 32), (14, 64)]


CONDITIONS = {
    "data": "nvidia/SPEED-Bench throughput_16k, test, version 0123abcd",
    "turns": "first 2 turns of up to 7",
    "draft_tokens": 15,
    "sampling": "temperature 0.7, top_p 0.95, top_k 20, min_p 0.05",
    "draft_sample_method": "probabilistic in chains, greedy in trees and copies",
    "rejection_sample_method": "standard; in trees the rule for candidates that were not drawn",
    "max_new_tokens": 4096,
    "chat_template": "ab" * 32,
}


LONG = [f"a_method_whose_very_long_name_has_the_number_{n}_tree_typical" for n in range(10)]
LABELLED: dict[str, tuple[Callable[[Any, Path], None], Callable[[], Any], int]] = {
    "12 methods": (plot_speedup, lambda: of_methods(["vanilla", "generate", *LONG]), 4),
    "no depth": (plot_speedup, lambda: of_methods(["vanilla", "generate"]), 3),
    "texts at a time": (plot_concurrency, large, 3),
    "no waits": (plot_concurrency, without_waits, 2),
    "loads": (plot_load_curve, lambda: served([2**n for n in range(8)]), 2),
    "long categories": (plot_acceptance, lambda: accepted(LONG), 2),
    "heads": (
        plot_comparison,
        lambda: {key: {**accepted(["math"]), "conditions": CONDITIONS} for key in LONG},
        2,
    ),
    "pruning": (plot_pruning, lambda: PRUNED, 3),
    "search": (plot_tree_search, lambda: SEARCHED, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_all_words_are_within_the_picture_and_clear_of_other_panels(name: str, monkeypatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr(Path, "replace", lambda *_: None)
    plot, make, num_panels = LABELLED[name]
    results = make() if plot is plot_comparison else {**make(), "conditions": CONDITIONS}
    plot(results, Path("picture.png"))
    (figure,) = figures
    captions = {
        plot_acceptance, plot_speedup, plot_concurrency, plot_load_curve, plot_comparison,
    }  # fmt: skip
    assert (figure._supxlabel is not None) == (plot in captions)
    assert len(figure.axes) == num_panels
    assert all(panel.has_data() for panel in figure.axes)
    (left, bottom), (right, top) = figure.get_tightbbox().get_points()
    width, height = figure.get_size_inches()
    assert min(left, bottom, width - right, height - top) >= 0
    boxes = [each.get_tightbbox() for each in (*figure.axes, *figure.legends)]
    if figure._supxlabel is not None:
        boxes.append(figure._supxlabel.get_window_extent())
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
