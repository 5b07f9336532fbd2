"""Every benchmark on this machine in one table, each figure beside its floor.

`python scripts/bench/gpu.py [NAME ...] [--small]` runs the named benchmarks, or all, each in a
separate process. It prints the table and writes it to `outputs/bench_gpu.json`. Results of earlier
calls stay in that file, so benchmarks can run one by one. The exit code is 1 if a figure lies below
its floor or a benchmark failed. Small sizes, the only ones on a CPU, only show that everything
runs; no figure is compared with its floor.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conf.command.clock import Stopwatch
from scripts.bench.harness import ROOT, best_device, result_of, where

FLOORS = {
    "loss": {"textbook's time over ours": 1.0, "textbook's memory over ours": 4.0},
    "documents": {"time of a written mask over ours": 1.5, "its memory over ours": 1.5},
    "unroll": {"time of full masks over ours, 7 steps": 1.5, "their memory over ours": 2.0},
    "eagle3": {"eager over compiled, 3 steps": 1.2},
    "eagle3_7": {"eager over compiled, 7 steps": 1.2},
    "medusa": {"original's time over ours": 1.5, "original's memory over ours": 2.0},
    "train_medusa": {"FLOP/s over those of a matmul": 0.25},
    "train_eagle1": {"FLOP/s over those of a matmul": 0.2},
    "train_eagle3": {"FLOP/s over those of a matmul": 0.2},
    "train_dflash": {"FLOP/s over those of a matmul": 0.1},
    "train_peagle": {"FLOP/s over those of a matmul": 0.1},
    "engine": {"least speed-up / tau of a chain": 0.6, "least speed-up / tau of a tree": 0.5},
    "capture": {"int8, hidden over the bare pass": 0.7, "int8, top_k over pass and logits": 0.7},
}
"""Lowest allowed values by benchmark; other figures are printed only. Ratios compare measurements
of one process, so they hold on any GPU."""
PREDICTED: dict[str, int] = json.loads((ROOT / "scripts/bench/predicted.json").read_text())
"""Tokens per second of training by head, written by `scripts/bench/predict_gpu.py --save`."""
TIMEOUT_S = 240
Figures = dict[str, float]


def loss(small: bool) -> Figures:
    """Compare the fused loss with complete logits."""
    from scripts.bench.plain_forms import loss_costs

    sizes = (256, 64, 512) if small else (8192, 4096, 128256)
    costs = loss_costs(*sizes, torch.float32 if small else torch.bfloat16)
    fused, whole = costs["fused"], costs["whole"]
    return {
        "textbook's time over ours": whole.seconds / fused.seconds,
        "textbook's memory over ours": whole.peak_bytes / fused.peak_bytes,
    }


def documents(small: bool) -> Figures:
    """Compare ways to run the target over packed documents."""
    from scripts.bench.plain_forms import document_costs
    from scripts.bench.training import arguments as sizes_of

    sizes = "--max-length 512 --hidden 64 --layers 4"
    if not small:
        sizes = "--max-length 8192 --hidden 2048 --layers 8 --vocab 32000 --dtype bfloat16"
    costs = document_costs(sizes_of(sizes.split()))
    ours, mask = costs["read"], costs["mask"]
    return {
        "time of a written mask over ours": mask.seconds / ours.seconds,
        "its memory over ours": mask.peak_bytes / ours.peak_bytes,
        "milliseconds": 1000 * ours.seconds,
    }


def unroll(small: bool) -> Figures:
    """Compare ways to compute attention of the training-time test at 7 steps."""
    from scripts.bench.plain_forms import unroll_costs

    costs = unroll_costs(*((128, torch.float32) if small else (4096, torch.bfloat16)), num_steps=7)
    fused, plain, full = (costs[name] for name in ("fused", "plain", "full"))
    return {
        "time of full masks over ours, 7 steps": full.seconds / fused.seconds,
        "their memory over ours": full.peak_bytes / fused.peak_bytes,
        "time of plain torch over ours": plain.seconds / fused.seconds,
    }


def eagle3(depth: int, small: bool) -> Figures:
    """Compare EAGLE-3 steps on stored states, at a given depth."""
    eager, compiled = (_step(path, depth, small) for path in ("eagle3", "eagle3_compiled"))
    figures = {f"eager over compiled, {depth} steps": eager["seconds"] / compiled["seconds"]}
    theirs = os.environ.get("HEADSMITH_SPECULATORS_PYTHON")
    if theirs is not None:
        peer = _step("speculators", depth, small, theirs)
        ratio = peer["seconds"] / compiled["seconds"]
        figures[f"speculators' over compiled, {depth} steps"] = ratio
    return figures


def medusa(small: bool) -> Figures:
    """Compare a Medusa step on stored states with the original's."""
    ours, original = _step("medusa", 4, small), _step("original_medusa", 4, small)
    return {
        "original's time over ours": original["seconds"] / ours["seconds"],
        "original's memory over ours": original["peak_bytes"] / ours["peak_bytes"],
    }


def _step(path: str, depth: int, small: bool, python: str = sys.executable) -> dict[str, Any]:
    job: dict[str, Any] = {
        "tokens": 256, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
        "intermediate": 96, "vocab": 512, "draft_vocab": 256,
    }  # fmt: skip
    if not small:
        job = {
            "tokens": 4096, "hidden": 2048, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128,
            "intermediate": 5632, "vocab": 32000, "draft_vocab": 32000,
        }  # fmt: skip
    job |= {"path": path, "depth": depth, "threads": torch.get_num_threads(), "repeats": 3}
    return result_of("peer_steps", job, python)


def train(head: str, small: bool) -> Figures:
    """Measure the training loop itself, with a head."""
    from scripts.bench import training as bench_train

    sizes = "--hidden 64 --layers 6 --vocab 256 --max-length 128 --steps 2"
    if not small:
        sizes = (
            "--hidden 2048 --layers 16 --vocab 32000 --max-length 4096 --batch-size 8 "
            "--micro-batch-size 2 --dtype bfloat16 --compile"
        )
    speed = bench_train.measured(bench_train.arguments([head, *sizes.split()]))
    return {
        "FLOP/s over those of a matmul": speed.utilisation,
        "tokens/s": speed.tokens_per_s,
        **({} if small else {"tokens/s, predicted at most": PREDICTED[head]}),
        "peak, GiB": speed.peak_gib,
        **{f"share of {name}": share for name, share in speed.parts.items()},
    }


def engine(small: bool) -> Figures:
    """Measure decoding with drafts of a set acceptance."""
    from scripts.bench import engine as bench_engine

    settings = ("float32", 0.8, 4) if small else ("bfloat16", 0.8, 32)
    _, texts = bench_engine.measured(*settings)
    base = texts.pop("no drafting")
    kept = {name: float(bench_engine.row(name, text, base)[3]) for name, text in texts.items()}
    least = {
        f"least speed-up / tau of a {shape}": min(v for name, v in kept.items() if shape in name)
        for shape in ("chain", "tree")
    }
    return least | {f"speed-up / tau, {name}": value for name, value in kept.items()}


def capture(small: bool) -> Figures:
    """Compare storing states of a random target with its bare pass."""
    from scripts.bench import capture as bench_capture

    with tempfile.TemporaryDirectory() as folder:
        target, data = _inputs(Path(folder), small)
        few = ["--tokens", "128", "--sequences", "6", "--group", "2"]
        given = few if small else ["--sequences", "60"]
        options = ["--target", target, "--data", data, *given]
        speeds = bench_capture.speeds(bench_capture.arguments(options))
    median = {name: statistics.median(each) for name, each in speeds.items()}
    bare, with_logits = median["target.read"], median["target.read and logits"]
    return {
        "int8, hidden over the bare pass": median["int8, hidden"] / bare,
        "int8, top_k over pass and logits": median["int8, top_k"] / with_logits,
        "tokens/s of int8, hidden": median["int8, hidden"],
    }


def _inputs(folder: Path, small: bool) -> tuple[str, str]:
    """A random Llama with a tokenizer, and plain texts: the standard library's own source."""
    from scripts.bench import training as bench_train
    from scripts.embedded.corpus import find_source_files, read_source, train_tokenizer

    files = find_source_files(8 if small else 150)
    texts = list(read_source(files, files.train).values())
    tokenizer = train_tokenizer(texts[:20], 1024, 4096)
    shape = "--hidden 64 --layers 6" if small else "--hidden 2048 --layers 16 --dtype bfloat16"
    sizes = f"{shape} --vocab {len(tokenizer)} --max-length 4096"
    target = bench_train.random_target(bench_train.arguments(sizes.split()), torch.device("cpu"))
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    data = folder / "texts.jsonl"
    pieces = [text[at : at + 4000] for text in texts for at in range(0, len(text), 4000)]
    data.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return str(folder / "target"), str(data)


BENCHES: dict[str, Callable[[bool], Figures]] = {
    "loss": loss,
    "documents": documents,
    "unroll": unroll,
    "eagle3": partial(eagle3, 3),
    "eagle3_7": partial(eagle3, 7),
    "medusa": medusa,
    **{f"train_{head}": partial(train, head) for head in PREDICTED},
    "engine": engine,
    "capture": capture,
}


def rows_of(name: str, figures: Figures, judged: bool) -> list[dict[str, Any]]:
    """Make a row per figure with its floor; `passed` is None for figures that are not checked."""
    floors = FLOORS[name]
    missing = floors.keys() - figures.keys()
    assert not missing, f"{name} gave no {sorted(missing)}"
    rows = []
    for figure, value in figures.items():
        floor = floors.get(figure)
        passed = None if floor is None or not judged else value >= floor
        rows.append(
            {"bench": name, "figure": figure, "value": value, "floor": floor, "passed": passed}
        )
    return rows


def run(name: str, small: bool) -> list[dict[str, Any]]:
    """Return the rows of a benchmark, or one row with its error."""
    size = ["--small"] if small else []
    command = [sys.executable, __file__, "--figures-of", name, *size]
    watch = Stopwatch()
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        said, complaint = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
        child.communicate()
        return [failed(name, f"no end within {TIMEOUT_S} s")]
    if child.returncode:
        print(complaint[-3000:], file=sys.stderr)
        return [failed(name, (complaint.strip().splitlines() or ["no word"])[-1])]
    print(f"{name}: {watch.seconds():.0f} s", flush=True)
    return rows_of(name, json.loads(said.splitlines()[-1]), not small)


def failed(name: str, why: str) -> dict[str, Any]:
    """The row of a benchmark that gave no figures."""
    figure = f"failed: {why}"
    return {"bench": name, "figure": figure, "value": None, "floor": None, "passed": False}


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line per figure."""
    words = {True: "pass", False: "FAIL", None: "-"}
    made = Table("bench", "figure", title=title)
    for column in ("value", "floor", "result"):
        made.add_column(column, justify="right")
    for row in rows:
        value, floor = _shown(row["value"]), _shown(row["floor"])
        made.add_row(row["bench"], row["figure"], value, floor, words[row["passed"]])
    return made


def _shown(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,.3g}" if figure < 1000 else f"{figure:,.0f}"


def arguments() -> argparse.Namespace:
    """Read names and sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument(
        "--small", action="store_true", help=("sizes for a CPU; floors are not checked")
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench_gpu.json")
    parser.add_argument("--figures-of", choices=BENCHES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted(set(options.names) - BENCHES.keys())
    if unknown:
        parser.error(f"{unknown}: allowed: {', '.join(BENCHES)}")
    options.small |= best_device().type == "cpu"
    return options


def main() -> None:
    """Print the table and write it."""
    options = arguments()
    if options.figures_of:
        print(json.dumps(BENCHES[options.figures_of](options.small)))
        return
    about = {
        "device": where(best_device()), "torch": torch.__version__, "cuda": torch.version.cuda,
        "small": options.small,
    }  # fmt: skip
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = before.get("rows", []) if before.get("about") == about else []
    for name in options.names or BENCHES:
        rows = [row for row in rows if row["bench"] != name] + run(name, options.small)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    Console(width=110).print(table(rows, f"{about['device']}, torch {about['torch']}"))
    num_failed = sum(row["passed"] is False for row in rows)
    print(f"{num_failed} of {len(rows)} figures failed; wrote {options.out}")
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
