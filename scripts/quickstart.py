"""Trains and measures Medusa heads on the embedded default: `make quickstart`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = [
    "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no",
]  # fmt: skip
TRAIN = [
    "data.max_length=512", "train.batch_size=8", "train.micro_batch_size=8", "train.max_steps=150",
    "train.warmup_steps=20", "train.save_steps=50",
]  # fmt: skip
ACCEPTANCE = ["data.num_prompts=32"]
SPEEDUP = [
    "data.num_prompts=16", "num_repeats=2",
    "methods=[generate,medusa_chain,medusa_tree,medusa_suffix,suffix]",
]  # fmt: skip
PART_OF = {"HEADSMITH_PART_OF": "quickstart"}
"""Environment variable that keeps stages from printing the next command."""
NUM_ANSWERS = 3
"""Number of answers to show."""
NEXT = """
On your own model and conversations (source .venv/bin/activate):
  accelerate launch train/eagle.py head=eagle3_1 target.path=MODEL data.path=CHATS.jsonl \\
      out_dir=outputs/mine
  python eval/acceptance.py head.path=outputs/mine/head target.path=MODEL data.path=PROMPTS.jsonl
  python eval/speedup.py head.path=outputs/mine/head target.path=MODEL data.path=PROMPTS.jsonl
  python scripts/export.py head.path=outputs/mine/head format=vllm out_dir=outputs/mine-vllm
"""


def list_stages(out_dir: Path) -> list[tuple[str, Path, list[str]]]:
    """List name, result and arguments of each stage; a stage whose result exists is done."""
    measure = [f"head.path={out_dir}/head", f"out_dir={out_dir}"]
    train = ["train/medusa.py", f"out_dir={out_dir}", *TRAIN]
    if out_dir.is_dir() and any(out_dir.iterdir()):
        train.append("train.resume=auto")  # an earlier start was interrupted
    return [
        ("train", out_dir / "head/config.json", ["-m", *LAUNCH, *train]),
        ("acceptance", out_dir / "acceptance.json", ["eval/acceptance.py", *measure, *ACCEPTANCE]),
        ("speedup", out_dir / "speedup.json", ["eval/speedup.py", *measure, *SPEEDUP]),
    ]


def run_stage(arguments: list[str]) -> None:
    """Run one stage in a process; exit with its code if it fails.

    Training takes up to eight cores. Decoding a model this small takes one,
    so that the figures do not depend on other load.
    """
    num_threads = min(8, os.cpu_count() or 1) if "-m" in arguments else 1
    environ = {"OMP_NUM_THREADS": str(num_threads)} | os.environ | PART_OF
    command = [sys.executable, *arguments]
    code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    if code != 0:
        sys.exit(code)


def build_summary(speedup: dict[str, Any], acceptance: dict[str, Any]) -> Table:
    """Build a table of the figures of both result files."""
    keys = ("tau", "tokens_per_s", "speedup")
    title = f"Held-out prompts; speed-up over the baseline, {speedup['baseline']}"
    table = Table("method", "tau", "tokens/s", "speed-up", title=title)
    for name, row in speedup["methods"].items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in keys))
    alpha = " ".join(f"{rate:.2f}" for rate in acceptance["alpha"])
    table.caption = f"replayed tau {acceptance['tau']:.3f}, alpha per depth {alpha}"
    return table


def iter_answers(speedup: dict[str, Any]) -> Iterator[Text]:
    """Yield prompts and the target's answers, which are the same with and without drafts."""
    for row in speedup["texts"][:NUM_ANSWERS]:
        answer = "".join(piece for piece, _ in row["methods"]["vanilla"]).removesuffix("<|end|>")
        yield Text.assemble((row["question"], "dim"), "\n", answer.rstrip(), "\n")


def main(out_dir: Path) -> None:
    """Run missing stages, then print answers and figures."""
    seconds = {}
    for name, result, arguments in list_stages(out_dir):
        started = monotonic()
        seconds[name] = "done before"
        if not result.exists():
            print(f"== {name}: python {' '.join(arguments)}", flush=True)
            run_stage(arguments)
            seconds[name] = f"{monotonic() - started:.0f} s"
        if not result.exists():
            sys.exit(f"{name} was stopped; run `make quickstart` again to continue")
    console = Console()
    speedup, acceptance = (
        json.loads((out_dir / f"{name}.json").read_text()) for name in ("speedup", "acceptance")
    )
    console.print("\nThe embedded target continues code. A prompt (dim), and its answer:\n")
    console.print(*iter_answers(speedup), sep="\n")
    console.print(build_summary(speedup, acceptance))
    print(", ".join(f"{name} {value}" for name, value in seconds.items()))
    print(f"pictures: {out_dir / 'speedup.png'}, {out_dir / 'acceptance.png'}")
    print(f"every token of every answer: {out_dir / 'speedup.html'}")
    print(NEXT, end="")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]).absolute() if sys.argv[1:] else ROOT / "outputs/quickstart")
