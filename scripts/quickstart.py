"""Trains, measures and exports heads of the embedded default: `make quickstart`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from time import monotonic
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf.command.forms import PACKAGE, list_arguments, name_commands
from conf.command.run_record import PARENT_COMMAND_VARIABLE

LAUNCH = [
    "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no",
]  # fmt: skip
TRAIN = [
    "data.max_length=512", "train.num_eval_sequences=8", "train.num_replay_prompts=0",
    "train.resume=auto",
]  # fmt: skip
EAGLE = [
    "head=eagle3_1", "head.num_steps=2", *TRAIN, "train.batch_size=2",
    "train.micro_batch_size=2", "train.max_steps=180", "train.decay_fraction=0.5",
    "train.save_steps=50",
]  # fmt: skip
MEDUSA = [
    *TRAIN, "train.batch_size=4", "train.micro_batch_size=4",
    "train.max_steps=30", "train.save_steps=10",
]  # fmt: skip
ACCEPTANCE = ["data.num_prompts=16", "depth=4"]
SPEEDUP = [
    "data.num_prompts=20", "num_repeats=1", "depth=2",
    "dynamic_tree.num_tokens=8",
    "methods=[generate,eagle_chain,eagle_tree,medusa_tree,suffix]",
]  # fmt: skip
EXPORT = ["format=vllm"]
TRAINED = ("EAGLE-3.1", "Medusa")
"""Heads, and names of the stages that train them."""
NUM_ANSWERS = 3
"""Number of answers to show."""
AGAIN = "headsmith quickstart" if PACKAGE else "make quickstart"
NEXT = name_commands(f"""
On your own model and conversations{"" if PACKAGE else " (source .venv/bin/activate)"}:
  accelerate launch train/eagle.py head=eagle3_1 target.path=MODEL data.path=CHATS.jsonl \\
      out_dir=outputs/mine
  python eval/acceptance.py head.path=outputs/mine/head target.path=MODEL data.path=PROMPTS.jsonl
  python eval/speedup.py head.path=outputs/mine/head target.path=MODEL data.path=PROMPTS.jsonl
  python scripts/export.py head.path=outputs/mine/head format=vllm out_dir=outputs/mine-vllm
""")


class Stage(NamedTuple):
    """Describe a command that is not run again once its result exists.

    Attributes:
        name: name of the stage.
        result: file that the command leaves.
        command: program and arguments.
    """

    name: str
    result: Path
    command: list[str]


def list_stages(out_dir: Path) -> list[Stage]:
    """List the stages from training to an export; the head of the first is exported."""
    head, medusa = f"head.path={out_dir}/head", out_dir / "medusa"
    launch = ["-m", *LAUNCH]
    speedup = [*SPEEDUP, head, f"heads=[{medusa}/head]"]
    rows: list[tuple[str, list[str], str, list[str], Path, str]] = [
        (TRAINED[0], launch, "train/eagle.py", EAGLE, out_dir, "head/config.json"),
        (TRAINED[1], launch, "train/medusa.py", MEDUSA, medusa, "head/config.json"),
        ("acceptance", [], "eval/acceptance.py", [*ACCEPTANCE, head], out_dir, "acceptance.json"),
        ("speedup", [], "eval/speedup.py", speedup, out_dir, "speedup.json"),
        ("export", [], "scripts/export.py", [*EXPORT, head], out_dir / "vllm", "config.json"),
    ]
    return [
        Stage(
            name, folder / file,
            [sys.executable, *start, *list_arguments(script), *settings, f"out_dir={folder}"],
        )
        for name, start, script, settings, folder, file in rows
    ]  # fmt: skip


def run_command(command: list[str], environ: dict[str, str]) -> None:
    """Run a command with additional variables; exit with its code if it fails."""
    env = os.environ | environ
    code = subprocess.run(command, env=env, check=False).returncode
    if code != 0:
        sys.exit(code)


def build_summary(speedup: dict[str, Any], acceptance: dict[str, Any] | None = None) -> Table:
    """Build a table of the figures of a speed-up and, if given, of replayed acceptance."""
    keys = ("tau", "tokens_per_s", "speedup")
    title = f"Held-out prompts; speed-up over the baseline, {speedup['baseline']}"
    table = Table("method", "tau", "tokens/s", "speed-up", "95% interval", title=title)
    for name, row in speedup["methods"].items():
        bounds = row["speedup_ci95"] or ()
        figures = [f"{row[key]:.2f}" for key in keys]
        table.add_row(name, *figures, "-".join(f"{bound:.2f}" for bound in bounds))
    if acceptance is not None:
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
    for name, result, command in list_stages(out_dir):
        started = monotonic()
        seconds[name] = "done before"
        if not result.exists():
            print(f"== {name}: python {' '.join(command[1:])}", flush=True)
            # Training takes up to eight cores. Decoding a model this small takes one, so that the
            # figures do not depend on other load.
            usual = str(min(8, os.cpu_count() or 1) if name in TRAINED else 1)
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", usual)}
            run_command(command, threads | {PARENT_COMMAND_VARIABLE: "quickstart"})
            seconds[name] = f"{monotonic() - started:.0f} s"
        if not result.exists():
            sys.exit(f"{name} was stopped; run `{AGAIN}` again to continue")
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
    print(f"the EAGLE-3.1 head for vLLM: {out_dir / 'vllm'}")
    print(NEXT, end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog=AGAIN, description="Train, measure and export heads of the embedded default."
    )
    parser.add_argument(
        "out_dir", nargs="?", type=Path, default="outputs/quickstart",
        help="folder of heads and results, outputs/quickstart if unset; what is done is kept",
    )  # fmt: skip
    main(parser.parse_args().out_dir.absolute())
