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
import tempfile
from typing import Any

from tqdm import tqdm

from conf.errors import InputError
from scripts.bench.harness import ROOT, build_markdown_table

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
PUBLISHED = """\
Published by others, measured, tokens/s of one GPU: NeMo, EAGLE-3 of 4 steps beside Llama-3.1-8B,
packed 2,048: 7,200 (28 samples/s on 8 A100). TorchSpec, DFlash beside Qwen3-8B, up to 2,048 tokens
a sample: up to 7,700 (15 samples/s on 4 H100). SpecForge, a draft of 1.1 B beside Qwen3-8B, 256
anchors, about 550 tokens: 3,400 (50 samples/s on 8 H200), 44% of the products' peak."""
TESTS = ROOT / "tests"
WORKER = """\
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # before torch
from emulated.predicted import main
main(sys.argv[2])"""
HEADER = (
    "head", "launches", "waits", "shapes of attention", "host, ms", "device, ms", "products",
    "binds", "tokens/s", "of peak",
)  # fmt: skip
STEPS = (
    "drafter", "launches", "waits", "shapes of attention", "kernels", "GB", "ms",
    "over a plain step",
)  # fmt: skip


def count_operations(bar: tqdm, name: str, shape: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Count the operations of a step, in a separate process on the emulated GPU."""
    bar.set_postfix_str(f"{name}, {shape}")
    job = {"name": name, "shape": shape, **sizes}
    with tempfile.TemporaryDirectory() as folder:
        question = Path(folder) / "job.json"
        question.write_text(json.dumps(job))
        command = [sys.executable, "-c", WORKER, str(compile_emulator()), str(question)]
        paths = os.pathsep.join(map(str, (ROOT, TESTS)))
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    if done.returncode:
        raise InputError(f"{job} failed:\n{done.stderr[-2000:]}")
    bar.update()
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


def format_training_row(name: str, step: dict[str, Any]) -> tuple[str, ...]:
    """Format a row of the table of training steps."""
    host, device = LAUNCH_S * step["num_launches"], step["device_s"]
    seconds, products = estimate_step_seconds(step), step["product_s"]
    binds = "launches" if host > device else "products" if products > device / 2 else "memory"
    return (
        name, f"{step['num_launches']:,.0f}", f"{step['num_waits']}", f"{step['num_shapes']}",
        f"{1000 * host:.0f}", f"{1000 * device:.0f}", f"{products / seconds:.0%}", binds,
        f"{step['num_tokens'] / seconds:,.0f}", f"{step['flops'] / seconds / PEAK_FLOPS:.0%}",
    )  # fmt: skip


def format_decoding_row(name: str, step: dict[str, Any], plain: dict[str, Any]) -> tuple[str, ...]:
    """Format a row of the table of decoding steps, compared with a step that drafts nothing."""
    seconds = estimate_step_seconds(step)
    return (
        name, f"{step['num_launches']:.0f}", f"{step['num_waits']:.0f}",
        f"{step['num_shapes']:.0f}", f"{step['num_kernels']:,.0f}", f"{step['bytes'] / 1e9:.1f}",
        f"{1000 * seconds:.1f}", f"{seconds / estimate_step_seconds(plain):.2f}",
    )  # fmt: skip


def print_predictions(target: str, names: list[str], bar: tqdm) -> None:
    """Print the table of training and the table of decoding for a target."""
    sizes = TARGETS[target]
    trained = [name for name in names if name in RECIPES]
    rows = [
        format_training_row(name, count_operations(bar, name, "train", sizes | TRAINING))
        for name in trained
    ]
    tqdm.write(f"\nTraining beside a {target} target, 2 sequences of 4,096 tokens a step\n")
    tqdm.write(build_markdown_table(HEADER, rows))
    plain = count_operations(bar, "none", "chain", sizes | DECODING)
    steps = [format_decoding_row("none", plain, plain)]
    for name in names:
        for shape in list_draft_shapes(name):
            step = count_operations(bar, name, shape, sizes | DECODING)
            steps.append(format_decoding_row(f"{name}, {shape}", step, plain))
    tqdm.write(f"\nA captured step behind 2,048 tokens, {target} target, one text\n")
    tqdm.write(build_markdown_table(STEPS, steps))


def list_draft_shapes(name: str) -> tuple[str, ...]:
    """List the shapes of drafts of a method; a method without a head has one."""
    if name in ALIKE:
        return ()
    return ("chain",) if name in OTHERS else ("chain", "tree")


def write_predictions(bar: tqdm) -> None:
    """Write predictions of the stages of `scripts/bench/gpu.py` that run at 8B sizes."""
    sizes, stages = TARGETS["8b"], dict[str, dict[str, float]]()
    for name in TRAINED:
        step = count_operations(bar, name, "train", sizes | TRAINING)
        stages[f"train {name}"] = {
            "tokens/s": round(step["num_tokens"] / estimate_step_seconds(step))
        }
    plain = estimate_step_seconds(count_operations(bar, "none", "chain", sizes | DECODING))
    stages["decode"] = {"ms per token, captured": round(1000 * plain, 2)}
    for name, shape in DECODED:
        ratio = plain / estimate_step_seconds(count_operations(bar, name, shape, sizes | DECODING))
        stages["decode"][f"speed-up / tau, {name} {shape}"] = round(ratio, 2)
    text = json.dumps(stages, indent=1)
    PREDICTIONS_FILE.write_text(text + "\n")
    tqdm.write(f"{text}\nwritten to {PREDICTIONS_FILE}")


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
    names, targets = options.names, options.targets
    of_target = sum((name in RECIPES) + len(list_draft_shapes(name)) for name in names)
    num_steps = len(targets) * (of_target + 1)
    if options.save:
        num_steps = len(TRAINED) + len(DECODED) + 1
    try:
        with tqdm(total=num_steps, unit="step") as bar:
            if options.save:
                write_predictions(bar)
                return
            for target in targets:
                print_predictions(target, names, bar)
    except InputError as error:
        sys.exit(f"error: {error}")
    print(f"\n{PUBLISHED}")


if __name__ == "__main__":
    main()
