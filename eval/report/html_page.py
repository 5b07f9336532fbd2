"""Self-contained HTML page of a speed-up measurement: no script, no network.

A result may contain a model's output, so all of it is escaped, and the page's own policy forbids
scripts and requests.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from conf.command.run_record import flatten_settings
from conf.files import write_atomically
from eval.measure.acceptance_stats import format_interval
from eval.measure.modes import CATEGORY, list_modes
from eval.report.plots import DEEPEST, STEP_PARTS, compute_step_ms
from heads.decoding.tree import Tree

NOT_SETTINGS = ("methods", "baseline", "baselines", "lossless", "texts", "concurrency")
# Heading, key and format; the key with the suffix `_ci95` has the interval.
COLUMNS = (
    ("tokens/s", "tokens_per_s", "{:,.1f}"),
    ("tau", "tau", "{:.2f}"),
    ("efficiency", "efficiency", "{:.2f}"),
    ("tokens/s, decoding", "decode_tokens_per_s", "{:,.1f}"),
    ("speed-up, decoding", "decode_speedup", "{:.2f}\u00d7"),
    ("equal texts", "num_equal", "{:,}"),
    ("tokens", "num_tokens", "{:,}"),
    ("passes", "num_steps", "{:,}"),
)


@dataclass(frozen=True)
class Axis:
    """A linear scale; a call turns a figure into a position."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, figure: float) -> float:
        """Compute the position of a figure."""
        share = (figure - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        """Choose at most four round figures."""
        least = (self.high - self.low) / 3.5
        unit = 10.0 ** math.floor(math.log10(least))
        step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= least)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 6) for number in range(first, last + 1)]


def write_html_page(result: dict[str, Any], path: Path) -> None:
    """Write the page completely or not at all.

    Args:
        result: contents of `speedup.json`.
        path: HTML file to write.

    Raises:
        OSError: the file cannot be written.
    """
    page = _load_template().render(_build_view(result))
    write_atomically(path, page.encode(errors="replace"))


@cache
def _load_template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        # A bare carriage return would break the line.
        "verbatim": lambda text: (
            escape(text).replace("\r", Markup("&#13;")).replace("\0", "\ufffd")
        ),
        # A narrow column may split a name at its underscores.
        "breakable": lambda name: Markup("_<wbr>").join(name.split("_")),
        "shown": format_interval,
    }
    return environment.get_template("page.html.j2")


def _build_view(result: dict[str, Any]) -> dict[str, Any]:
    methods, equality = _count_equal_texts(result)
    target, baselines = result["target"], result["baselines"]
    name = target if isinstance(target, str) else target.get("path") or target.get("name")
    timed = {name: times for name, row in methods.items() if (times := compute_step_ms(row))}
    parts = [part for part in STEP_PARTS if any(part in times for times in timed.values())]
    passes = {n: {part: times.get(part, 0.0) for part in parts} for n, times in timed.items()}
    return {
        "result": result,
        "methods": methods,
        "labels": {n: f"{n} (lossy)" if row.get("lossy") else n for n, row in methods.items()},
        "lossy": any(row.get("lossy") for row in methods.values()),
        "target": Path(name).name if name.startswith(("/", "~", ".")) else name,
        "best": max(
            (n for n, row in methods.items() if n not in baselines and not row.get("lossy")),
            key=lambda name: methods[name]["speedup"],
            default=None,
        ),
        "equality": equality,
        "columns": [
            c for c in COLUMNS if any(row.get(c[1]) is not None for row in methods.values())
        ],
        "speedup_axis": make_interval_axis(list(methods.values()), "speedup", 6, 134),
        "sizes": result.get("concurrency", {}),
        "categories": _build_category_panels(methods, baselines),
        "modes": _build_mode_cells(methods, baselines),
        "alpha": _place_alpha_lines(methods),
        "passes": passes,
        "ms_axis": Axis(0, max((sum(t.values()) for t in passes.values()), default=1), 0, 400),
        "parts": parts,
        "undivided": {name: row for name, row in methods.items() if name not in passes},
        "trees": {
            n: _place_tree_nodes(row["tree"]) for n, row in methods.items() if row.get("tree")
        },
        "texts": result.get("texts", []),
        "text_methods": [
            name for name in methods if any(name in t["methods"] for t in result.get("texts", []))
        ],
        "deepest": DEEPEST,
        "settings": flatten_settings({k: v for k, v in result.items() if k not in NOT_SETTINGS}),
    }


def _count_equal_texts(
    result: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, int] | None]:
    """Add the number of equal texts to methods; count texts equal under all lossless methods."""
    lossless, methods = result["lossless"], result["methods"]
    if lossless is None:
        return methods, None
    num_prompts, divergences = lossless["num_prompts"], lossless["first_divergences"]
    differing = Counter(each["method"] for each in divergences)
    broken = {each["prompt"] for each in divergences if not methods[each["method"]].get("lossy")}
    counted = {
        name: {**row, "num_equal": num_prompts - differing[name]} for name, row in methods.items()
    }
    return counted, {"num_prompts": num_prompts, "num_equal": num_prompts - len(broken)}


def make_interval_axis(rows: list[dict[str, Any]], key: str, start: float, end: float) -> Axis:
    """Make an axis that contains 1, and all figures and intervals of rows, with a margin."""
    ends = [bound for row in rows for bound in row.get(f"{key}_ci95") or ()]
    figures = [1.0, *ends, *(row[key] for row in rows)]
    low, high = min(figures), max(figures)
    margin = 0.06 * (high - low) or 0.1
    return Axis(low - margin, high + margin, start, end)


def _build_category_panels(
    methods: dict[str, dict[str, Any]], baselines: list[str]
) -> dict[str, Any] | None:
    """Build rows per drafting method on shared axes, so that panels are comparable."""
    panels = {
        name: row["by_category"]
        for name, row in methods.items()
        if name not in baselines and row.get("by_category")
    }
    rows = [row for panel in panels.values() for row in panel.values()]
    if not rows:
        return None
    return {
        "panels": panels,
        "names": list(dict.fromkeys(name for panel in panels.values() for name in panel)),
        "axes": {
            "speedup": make_interval_axis(rows, "speedup", 104, 226),
            "tau": make_interval_axis(rows, "tau", 242, 364),
        },
    }


def _build_mode_cells(
    methods: dict[str, dict[str, Any]], baselines: list[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Build a row per value of each mode but categories: the figures of each drafting method."""
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for name in (name for name in methods if name not in baselines):
        for mode, values in list_modes(methods[name]).items():
            for value, row in values.items() if mode != CATEGORY else ():
                cells.setdefault(f"{mode}: {value}", {})[name] = row
    return cells


def _place_alpha_lines(methods: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Place the lines and their labels, spread so that no label covers another."""
    rates = {name: row["alpha"][:DEEPEST] for name, row in methods.items() if row.get("alpha")}
    if not rates:
        return None
    height, gap = max(230, 16 * len(rates)), 15
    depth = max(map(len, rates.values()))
    x, y = Axis(1, max(depth, 2), 36, 236), Axis(0, 1, height + 10, 10)
    places = _spread_labels([y(line[-1]) for line in rates.values()], gap, height + 10)
    lines = {
        name: {"points": [(x(d), y(a), a) for d, a in enumerate(line, start=1)], "label_y": place}
        for (name, line), place in zip(rates.items(), places, strict=True)
    }
    width = 266 + 6.5 * max(len(name) + 8 * bool(methods[name].get("lossy")) for name in rates)
    return {"lines": lines, "depth": depth, "height": height, "width": width, "x": x, "y": y}


def _spread_labels(wanted: list[float], gap: float, limit: float) -> list[float]:
    """Spread positions near the wanted ones, at least `gap` apart, none beyond `limit`."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed, last = list(wanted), -math.inf
    for index in order:
        placed[index] = last = max(wanted[index], last + gap)
    last = limit + gap
    for index in reversed(order):
        placed[index] = last = min(placed[index], last - gap)
    return placed


def _place_tree_nodes(tree: dict[str, Any]) -> dict[str, Any]:
    """Place the nodes: depth to the right, a best child level with its parent."""
    parents, ranks, rates = tree["parents"], tree["ranks"], tree["acceptance"]
    shape = Tree(tuple(parents), tuple(ranks))
    depths, levels, level, waiting = shape.depths, [0] * len(parents), -1, [0]
    while waiting:
        node = waiting.pop()
        if not node or node != shape.children[parents[node]][0]:
            level += 1
        levels[node] = level
        waiting += reversed(shape.children[node])
    nodes = [
        {
            "x": 12 + 84 * depths[n],
            "y": 14 + 18 * levels[n],
            "radius": round(1.5 + 6 * math.sqrt(rates[n]), 1),
            "depth": depths[n],
            "parent": parents[n],
            "rank": ranks[n],
            "rate": rates[n],
            "given_parent": rates[n] / rates[parents[n]] if n and rates[parents[n]] else None,
        }
        for n in range(len(parents))
    ]
    return {"nodes": nodes, "width": 56 + 84 * max(depths), "height": 28 + 18 * level}
