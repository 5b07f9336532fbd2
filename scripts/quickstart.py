"""Trains and measures Medusa heads on the embedded default: `make quickstart`."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from rich.console import Console
from rich.table import Table

from eval.clock import Stopwatch

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = [
    "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no",
]  # fmt: skip
TRAIN = [
    "data.max_length=512", "train.batch_size=8", "train.micro_batch_size=8", "train.max_steps=150",
    "train.warmup_steps=20", "train.save_steps=50",
]  # fmt: skip

SPEEDUP = [
    "data.num_prompts=32", "num_repeats=2",
    "methods=[generate,medusa_chain,medusa_tree,medusa_suffix,prompt_lookup,suffix]",
]  # fmt: skip


def stages(out_dir: Path) -> list[tuple[str, Path, list[str]]]:
    """Name, result and arguments of each stage; a stage whose result exists is done."""
    measure = [f"head.path={out_dir}/head", f"out_dir={out_dir}"]
    train = ["train/medusa.py", f"out_dir={out_dir}", *TRAIN]
    if out_dir.is_dir() and any(out_dir.iterdir()):
        train.append("train.resume=auto")  # an earlier start was interrupted
    return [
        ("train", out_dir / "head/config.json", ["-m", *LAUNCH, *train]),
        ("acceptance", out_dir / "acceptance.json", ["eval/acceptance.py", *measure]),
        ("speedup", out_dir / "speedup.json", ["eval/speedup.py", *measure, *SPEEDUP]),
    ]


def run(arguments: list[str]) -> None:
    """Runs one stage.

    Training takes all cores, which the launcher would not; decoding a model this small takes
    one, so that the figures do not depend on what else the machine does.
    """
    num_threads = min(8, os.cpu_count() or 1) if "-m" in arguments else 1
    environ = {"OMP_NUM_THREADS": str(num_threads)} | os.environ
    command = [sys.executable, *arguments]
    code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    if code != 0:
        sys.exit(code)


def summary(out_dir: Path, seconds: dict[str, str]) -> Table:
    """The figures of both result files, and what each stage took."""
    keys = ("tau", "tokens_per_s", "speedup", "efficiency")
    speedup = json.loads((out_dir / "speedup.json").read_text())
    title = f"Medusa on the embedded default, held-out prompts; speed-up over {speedup['baseline']}"
    table = Table("method", *keys, title=title)
    for name, row in speedup["methods"].items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in keys))
    acceptance = json.loads((out_dir / "acceptance.json").read_text())
    alpha = " ".join(f"{rate:.2f}" for rate in acceptance["alpha"])
    times = ", ".join(f"{name} {value}" for name, value in seconds.items())
    table.caption = f"replayed tau {acceptance['tau']:.3f}, alpha per depth {alpha}\n{times}"
    return table


def main(out_dir: Path) -> None:
    """Runs what is missing, then sums up."""
    seconds = {}
    for name, result, arguments in stages(out_dir):
        watch = Stopwatch()
        seconds[name] = "done before"
        if not result.exists():
            print(f"== {name}: python {' '.join(arguments)}", flush=True)
            run(arguments)
            seconds[name] = f"{watch.seconds():.0f} s"
        if not result.exists():
            sys.exit(f"{name} was stopped: `make quickstart` again continues")
    Console().print(summary(out_dir, seconds))
    print(f"in {out_dir}: head/, acceptance.json, speedup.json, pictures, speedup.html. Next:")
    print("  accelerate launch train/medusa.py target.path=MODEL data.path=CHATS.jsonl")
    print(f"  python scripts/push.py head.path={out_dir / 'head'} repo_id=YOU/NAME dry_run=true")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]).absolute() if sys.argv[1:] else ROOT / "outputs/quickstart")
