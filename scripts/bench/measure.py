"""The cases that are measured: speed, memory and ratios to a baseline, each a few figures.

`python scripts/bench/measure.py CASE [...] [--size small|cpu|8b]` runs cases one after another, and
prints each figure as soon as it is known, then all in a table. `scripts/bench/gpu.py` runs some of
these cases as stages.

| case | what is measured |
|---|---|
| ceilings | FLOP/s, bytes/s and launches of this device |
| train HEAD | the training loop: tokens/s, utilisation, memory, shares of its parts |
| stored HEAD | the same on stored hidden states; `8b` takes a target of Llama-3-70B's shape |
| memory HEAD | the estimate on 8 processes by part; estimates beside peaks measured on a CPU |
| decode | steps without drafts, with drafts, and with drafts of known acceptance |
| loss, documents, unroll | parts of a training step beside plain forms |
| eagle3, eagle3_7, medusa | training steps beside speculators, and beside the original Medusa |
| capture | stored hidden states beside the target's bare forward pass |
| servers | hidden states from servers: bytes per second, processor seconds |

`HEADSMITH_SPECULATORS_PYTHON` names a Python that has speculators; without it speculators is left
out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
import os
import statistics
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conf.command.clock import Stopwatch, measure_seconds
from conf.errors import InputError
from heads.kinds import build_variant_table
from scripts.bench.capture import measure_capture
from scripts.bench.decoding import SHAPES, measure_decoding
from scripts.bench.harness import (
    ROOT,
    Figures,
    best_device,
    format_device,
    format_figure,
    run_worker,
)
from scripts.bench.parts import measure_documents, measure_loss, measure_unroll
from scripts.bench.servers import measure_servers
from scripts.bench.training import SIZES, measure_matmul_flops, measure_memory, measure_training

Row = dict[str, Any]

SPECULATORS = "HEADSMITH_SPECULATORS_PYTHON"
PEER_SIZES = {
    "small": {
        "tokens": 256, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
        "intermediate": 96, "vocab": 512, "draft_vocab": 256,
    },
    "cpu": {
        "tokens": 1024, "hidden": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64,
        "intermediate": 1536, "vocab": 8192, "draft_vocab": 4096,
    },
    "8b": {
        "tokens": 4096, "hidden": 2048, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128,
        "intermediate": 5632, "vocab": 32000, "draft_vocab": 32000,
    },
}  # fmt: skip
"""Sizes of `peer_steps.py`. The shortest prompt is longer than any depth: speculators and the
original read beyond the end of a document, except where the next document's mask stops them."""
TOLERANCE = 1e-4
"""Relative tolerance between first losses of peers."""
FLOORS: dict[str, dict[str, float]] = {
    "loss": {"textbook's time over ours": 1.0, "textbook's memory over ours": 6.0},
    "documents": {"time of a written mask over ours": 1.5, "its memory over ours": 1.2},
    "unroll": {"time of full masks over ours, 7 steps": 1.5, "their memory over ours": 20.0},
    "eagle3": {"eager over compiled, 3 steps": 1.2},
    "eagle3_7": {"eager over compiled, 7 steps": 1.2},
    "medusa": {"original's time over ours": 1.5, "original's memory over ours": 1.8},
    "train medusa": {"FLOP/s over those of a matmul": 0.25},
    "train eagle1": {"FLOP/s over those of a matmul": 0.2},
    "train eagle3": {"FLOP/s over those of a matmul": 0.45},
    "train dflash": {"FLOP/s over those of a matmul": 0.45},
    "train peagle": {"FLOP/s over those of a matmul": 0.1},
    "decode": {
        "same tokens, captured or not": 1.0,
        **{f"speed-up / tau, {head} chain": 0.55 for head in SHAPES},
        **{f"speed-up / tau, {head} tree": 0.4 for head in ("eagle3", "dflash")},
    },
    "capture": {"int8, hidden over the bare pass": 0.7, "int8, top_k over pass and logits": 0.7},
}
"""Lowest allowed values by case at 8B sizes; other figures are printed only. Ratios compare
measurements of one process, so they hold on any GPU. Those of memory lie below what torch's
allocator counts where nothing is computed: 8.9, 1.27, 52.8 and 2.0."""
PREDICTED: dict[str, dict[str, float]] = json.loads(
    (ROOT / "scripts/bench/predicted.json").read_text()
)
"""Figures by case for an H100, written by `tests/emulated/predict_gpu.py --save`."""


def measure_ceilings(size: str) -> Figures:
    """Measure the card's most FLOP/s and bytes/s, and the cost of a launch and a graph's node."""
    device, large = best_device(), size == "8b"
    dtype = torch.bfloat16 if large else torch.float32
    yield "matmul, TFLOP/s", measure_matmul_flops(device, dtype) / 1e12
    source = torch.empty(1 << 30 if large else 1 << 20, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(
        measure_seconds(lambda: target.copy_(source), device) for _ in range(20)
    )
    yield "copy, TB/s read and written", 2 * source.nbytes / seconds / 1e12
    number = torch.zeros(1, device=device)
    watch = Stopwatch(device)
    for _ in range(2000):
        number.add_(1)
    yield "launch, microseconds of the host", 1e6 * watch.host_seconds() / 2000
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                number.add_(1)
        seconds = statistics.median(measure_seconds(graph.replay, device) for _ in range(10))
        yield "node of a graph, microseconds", 1e6 * seconds / 1000


def measure_peers(
    paths: dict[str, str], depth: int, size: str
) -> Generator[tuple[str, float], None, dict[str, Row]]:
    """Measure a training step of each path on the same stored states, ours first.

    Args:
        paths: the path's Python, by a key of `STEPS_BY_NAME` in `peer_steps.py`.
        depth: steps of EAGLE's training-time test, or Medusa heads.
        size: a key of `PEER_SIZES`.

    Returns:
        The results by path.

    Raises:
        InputError: a first loss differs from ours, so the steps are not the same.
    """
    results: dict[str, Row] = {}
    job = PEER_SIZES[size] | {"depth": depth, "threads": torch.get_num_threads(), "repeats": 3}
    for path, python in paths.items():
        found = results[path] = run_worker("peer_steps", job | {"path": path}, [python])
        ours = next(iter(results.values()))["loss"]
        # NaN compares as false, so it is refused too.
        if not abs(found["loss"] - ours) <= TOLERANCE * abs(ours):
            raise InputError(
                f"{path}: first loss {found['loss']}, but ours is {ours}; the two do not train the "
                "same step"
            )
        yield f"ms per step, {path}", 1000 * found["seconds"]
        yield f"peak, MiB, {path}", found["peak_bytes"] / 2**20
    return results


def measure_eagle3(depth: int, size: str) -> Figures:
    """Compare EAGLE-3 steps on stored states, at a given depth: eager, compiled, speculators.

    Raises:
        InputError: the variable of speculators' Python names no file.
    """
    paths = {"eagle3": sys.executable, "eagle3_compiled": sys.executable}
    if python := os.environ.get(SPECULATORS):
        if not Path(python).is_file():
            raise InputError(
                f"{SPECULATORS}={python}: no such file; set it to the path of a Python"
            )
        paths["speculators"] = python
    results = yield from measure_peers(paths, depth, size)
    compiled = results["eagle3_compiled"]
    seconds, peak = compiled["seconds"], compiled["peak_bytes"]
    yield f"eager over compiled, {depth} steps", results["eagle3"]["seconds"] / seconds
    if (peer := results.get("speculators")) is not None:
        yield f"speculators' over compiled, {depth} steps", peer["seconds"] / seconds
        yield f"speculators' memory over compiled, {depth} steps", peer["peak_bytes"] / peak


def measure_medusa(size: str) -> Figures:
    """Compare a Medusa step on stored states with the step of the original repository."""
    paths = dict.fromkeys(("medusa", "original_medusa"), sys.executable)
    ours, original = (yield from measure_peers(paths, 4, size)).values()
    yield "original's time over ours", original["seconds"] / ours["seconds"]
    yield "original's memory over ours", original["peak_bytes"] / ours["peak_bytes"]


MAIN: dict[str, Callable[[str], Figures]] = {
    "ceilings": measure_ceilings,
    "train eagle3": partial(measure_training, "eagle3"),
    "decode": measure_decoding,
    "train dflash": partial(measure_training, "dflash"),
    "train medusa": partial(measure_training, "medusa"),
}
"""Cases of the group `figures` of `scripts/bench/gpu.py`, most important first."""
MORE: dict[str, Callable[[str], Figures]] = {
    "loss": measure_loss,
    "documents": measure_documents,
    "unroll": measure_unroll,
    "eagle3": partial(measure_eagle3, 3),
    "eagle3_7": partial(measure_eagle3, 7),
    "medusa": measure_medusa,
    "train eagle1": partial(measure_training, "eagle1"),
    "train peagle": partial(measure_training, "peagle"),
    "capture": measure_capture,
}
"""Cases of its group `more`."""
FIGURES = MAIN | MORE
CASES: dict[str, Callable[[str], Figures]] = {
    **FIGURES,
    "servers": measure_servers,
    **{f"train {head}": partial(measure_training, head) for head in build_variant_table()},
    **{
        f"stored {head}": partial(measure_training, head, stored=True)
        for head in build_variant_table()
    },
    **{f"memory {head}": partial(measure_memory, head) for head in build_variant_table()},
}


def build_row(case: str, figure: str, value: float, judged: bool) -> Row:
    """Build the line of a figure; `passed` is None where no floor is looked at."""
    floor = FLOORS.get(case, {}).get(figure) if judged else None
    return {
        "stage": case, "figure": figure, "value": value, "floor": floor,
        "predicted": PREDICTED.get(case, {}).get(figure) if judged else None,
        "passed": None if floor is None else value >= floor,
    }  # fmt: skip


def build_figures_table(rows: list[Row], title: str) -> Table:
    """Build a table with a row for each figure; a repeated figure shows its last value."""
    verdicts = {True: "pass", False: "FAIL", None: "-"}
    table = Table("stage", "figure", title=title)
    for column in ("value", "predicted", "floor", "result"):
        table.add_column(column, justify="right")
    last = {(row["stage"], row["figure"]): row for row in rows if "figure" in row}
    for row in last.values():
        numbers = (format_figure(row[name]) for name in ("value", "predicted", "floor"))
        table.add_row(row["stage"], row["figure"], *numbers, verdicts[row["passed"]])
    return table


def main() -> None:
    """Measure cases, and print their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    usual = "8b" if best_device().type == "cuda" else "cpu"
    parser.add_argument("--size", choices=SIZES, default=usual, help=f"unset: {usual}")
    options = parser.parse_args()
    rows = []
    try:
        for name in options.names:
            for figure, value in CASES[name](options.size):
                rows.append(build_row(name, figure, value, judged=options.size == "8b"))
                print(f"{name}: {figure}: {format_figure(value)}", file=sys.stderr, flush=True)
    except InputError as error:
        sys.exit(f"error: {error}")
    title = f"{format_device(best_device())}, torch {torch.__version__}"
    Console(width=110).print(build_figures_table(rows, title))


if __name__ == "__main__":
    main()
