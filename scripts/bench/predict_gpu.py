"""Predicted times of a step on an H100, by arithmetic.

`python scripts/bench/predict_gpu.py [--names medusa ...] [--targets 8b 70b]` runs training steps of
every kind of head and decoding steps on a device without numbers. That needs a C++ compiler, but no
GPU. Each operation that our code dispatches costs 5 microseconds of the host (a captured step is
one operation). On the device it costs 2 microseconds, or the time of its bytes at 3.35 TB/s or of
its products at 990 TFLOP/s if longer. A step takes as long as the slower of host and device. This
is a lower bound, as kernels reach neither rate. On the other hand, every document counts as the
longest of its sequence, compilation fuses nothing, and a target is assumed to fit one GPU.
Measured on an H200: 1 to 1.45 times as long (docs/results/gpu.md).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from conf.errors import InputError
from eval.measure.results import build_markdown_table
from scripts.bench.harness import ROOT, format_figure

LAUNCH_S, PEAK_FLOPS = 5e-6, 990e12
TARGETS = {
    "8b": {"hidden": 4096, "layers": 32, "vocab": 128256},
    "70b": {"hidden": 8192, "layers": 80, "vocab": 128256},
}
PREDICTIONS_FILE = ROOT / "scripts" / "bench" / "predicted.json"
"""Figures by stage, which `scripts/bench/gpu.py` shows beside its measurements."""
TRAINED = ("medusa", "eagle1", "eagle3", "dflash", "peagle")
DECODED = (
    ("eagle3", "chain"), ("eagle3", "tree"), ("medusa", "chain"), ("dflash", "chain"),
    ("dflash", "tree"),
)  # fmt: skip
RECIPES = ("medusa", "medusa2", *sorted(file.stem for file in (ROOT / "conf/head").glob("*.yaml")))
ALIKE = ("medusa2", "hass", "eagle3_1")
"""Heads that draft like `medusa`, `eagle1` and `eagle3`."""
OTHERS = (
    "prompt_lookup", "ngram", "suffix", "recycling", "lookahead", "early_exit", "skip_layers",
    "draft_model",
)  # fmt: skip
"""Drafting without a head; the draft model has half the target's layers and half its width."""
TRAINING = {"length": 4096, "batch_size": 2, "micro_batch_size": 1}
DECODING = {"length": 2048}
TESTS = ROOT / "tests"
WORKER = """\
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # before torch
from emulated.predicted import main
main(sys.argv[2])"""


def count_operations(name: str, shape: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Count the operations of a step, in a separate process on the emulated GPU."""
    print(f"{name}, {shape}", file=sys.stderr, flush=True)
    job = {"name": name, "shape": shape, **sizes}
    command = [sys.executable, "-c", WORKER, str(compile_emulator()), json.dumps(job)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{job} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def estimate_step_seconds(step: dict[str, Any]) -> float:
    """Estimate the seconds of a step: of host or device, whichever is slower.

    The two work side by side.
    """
    return max(LAUNCH_S * step["num_launches"], step["device_s"])


def compile_emulator() -> Path:
    """Compile the library that makes PyTorch report a GPU.

    Raises:
        InputError: no compiler.
    """
    sys.path.insert(0, str(TESTS))
    from emulated.guard import compiled, compiler

    if compiler() is None:
        raise InputError("no C++ compiler found; install g++ or clang++, or name one in CXX")
    folder = ROOT / "outputs" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    return compiled(folder)


def summarise_training(step: dict[str, Any]) -> dict[str, float]:
    """Summarise a training step by the columns of the table."""
    seconds = estimate_step_seconds(step)
    return {
        "launches": step["num_launches"], "waits": step["num_waits"],
        "shapes of attention": step["num_shapes"],
        "host, ms": 1000 * LAUNCH_S * step["num_launches"], "device, ms": 1000 * step["device_s"],
        "products": step["product_s"] / seconds, "tokens/s": step["num_tokens"] / seconds,
        "of peak": step["flops"] / seconds / PEAK_FLOPS,
    }  # fmt: skip


def summarise_decoding(step: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Summarise a decoding step by the columns of the table, beside one that drafts nothing."""
    seconds = estimate_step_seconds(step)
    return {
        "launches": step["num_launches"], "waits": step["num_waits"],
        "shapes of attention": step["num_shapes"], "kernels": step["num_kernels"],
        "GB": step["bytes"] / 1e9, "ms": 1000 * seconds,
        "over a plain step": seconds / estimate_step_seconds(plain),
    }  # fmt: skip


def print_table(title: str, steps: dict[str, dict[str, float]]) -> None:
    """Print a table with a row for each step."""
    lines = [("step", *next(iter(steps.values())))]
    lines += [(name, *map(format_figure, step.values())) for name, step in steps.items()]
    print(f"\n{title}\n\n{build_markdown_table(lines)}", flush=True)


def predict_steps(
    target: str, trained: Sequence[str], decoded: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Predict training steps by head, and decoding steps by drafter and shape; `none` comes first.

    Args:
        target: key of `TARGETS`.
        trained: recipes.
        decoded: drafters, each with `chain` or `tree`.
    """
    sizes = TARGETS[target]
    steps = {
        name: summarise_training(count_operations(name, "train", sizes | TRAINING))
        for name in trained
    }
    plain = count_operations("none", "chain", sizes | DECODING)
    drafts = {"none": summarise_decoding(plain, plain)}
    for name, shape in decoded:
        step = count_operations(name, shape, sizes | DECODING)
        drafts[f"{name} {shape}"] = summarise_decoding(step, plain)
    return steps, drafts


def list_draft_shapes(name: str) -> tuple[str, ...]:
    """List the shapes of drafts of a method; a method without a head has one."""
    if name in ALIKE:
        return ()
    return ("chain",) if name in OTHERS else ("chain", "tree")


def write_predictions() -> None:
    """Write predictions of the stages of `scripts/bench/gpu.py` that run at 8B sizes."""
    steps, drafts = predict_steps("8b", TRAINED, DECODED)
    stages: dict[str, dict[str, float]] = {
        f"train {name}": {"tokens/s": round(steps[name]["tokens/s"])} for name in TRAINED
    }
    stages["decode"] = {"ms per token, captured": round(drafts.pop("none")["ms"], 2)}
    for name, step in drafts.items():
        stages["decode"][f"speed-up / tau, {name}"] = round(1 / step["over a plain step"], 2)
    text = json.dumps(stages, indent=1)
    PREDICTIONS_FILE.write_text(text + "\n")
    print(f"{text}\nwritten to {PREDICTIONS_FILE}")


def main() -> None:
    """Print the tables, or write the predictions that `scripts/bench/gpu.py` shows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = (*RECIPES, *OTHERS)
    parser.add_argument("--names", nargs="+", default=list(known), choices=known)
    parser.add_argument("--targets", nargs="+", default=["8b"], choices=tuple(TARGETS))
    parser.add_argument(
        "--save", action="store_true", help=f"write {PREDICTIONS_FILE.name} and no table"
    )
    options = parser.parse_args()
    trained = [name for name in options.names if name in RECIPES]
    decoded = [(name, shape) for name in options.names for shape in list_draft_shapes(name)]
    try:
        if options.save:
            write_predictions()
            return
        for target in options.targets:
            steps, drafts = predict_steps(target, trained, decoded)
            if steps:
                print_table(f"Training beside a {target} target, 2 x 4,096 tokens a step", steps)
            print_table(f"A captured step of one text behind 2,048 tokens, {target} target", drafts)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
