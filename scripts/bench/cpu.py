"""The quickstart's parts on this processor, and on it limited to AVX2.

`python scripts/bench/cpu.py` runs passes of a target, training steps of heads, and texts by each
drafting method. It uses two processes in float32 and two in bfloat16; one of each two is limited to
AVX2 by environment variables. They take turns. A table shows medians, with the part that loses most
last. The exit code is 1 if a float32 part takes more than `--limit` times as long with AVX2, which
means that it left the fast path. Other limits of old processors, such as their memory, are not
emulated.
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
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.errors import InputError
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.suffix import SuffixDrafter, SuffixTree
from eval.decode.engine import NoDraft, decode
from eval.decode.hf_generate import hf_generate
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree, make_default_tree
from heads.devices import this_processor
from heads.kinds import HEADS, make_untrained_head
from heads.layers.fast_linear import pack_weights
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench import engine, training
from scripts.bench.harness import ROOT, add_size_flags, build_markdown_table

SIZES = {
    "hidden": 256, "layers": 4, "vocab": 1024, "rows": 2048, "length": 512, "prompt": 64,
    "new_tokens": 32, "threads": 1,
}  # fmt: skip
"""Sizes of the embedded default; a training step takes one sequence of `length` tokens."""
OLD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""Variables that limit an x86 CPU to AVX2."""
COLUMNS = {
    "as it is": ({}, "float32"),
    "AVX2": (OLD, "float32"),
    "bfloat16": ({}, "bfloat16"),
    "AVX2, bfloat16": (OLD, "bfloat16"),
}
"""Variables and dtype of each process, by its column."""
TRAINED = {"Medusa": "medusa", "EAGLE-3": "eagle3"}
DRAFTING = ("medusa", "eagle")
DEPTH = 4
Times = Mapping[str, Mapping[str, Sequence[float]]]
"""Milliseconds by column and part."""
Run = Callable[[], int]
"""Function that runs a part once and returns its number of steps."""


def build_parts(sizes: dict[str, Any], folder: Path) -> dict[str, Run]:
    """Build every part of the benchmark, by its name.

    Args:
        sizes: keys of `SIZES`, and the name of a `dtype`.
        folder: folder for the output of training.
    """
    options = training.parse_arguments([
        "--hidden", str(sizes["hidden"]), "--layers", str(sizes["layers"]),
        "--vocab", str(sizes["vocab"]), "--max-length", str(sizes["length"]), "--batch-size", "1",
        "--dtype", sizes["dtype"], "--optimizer", "muon",
    ])  # fmt: skip
    return (
        build_passes(sizes, options)
        | build_training_steps(options, folder)
        | build_decoding_texts(sizes)
    )


def build_passes(sizes: dict[str, Any], options: argparse.Namespace) -> dict[str, Run]:
    """Build passes of a target: over few packed rows, as in decoding; over many, as in training."""
    answerer = engine.make_certain_target(
        getattr(torch, sizes["dtype"]), sizes["layers"], sizes["hidden"], sizes["vocab"]
    )
    teacher = training.make_random_target(options, torch.device("cpu"))

    def forward(target: Target, num_texts: int, num_rows: int) -> int:
        ids = torch.arange(num_texts * num_rows).view(num_texts, num_rows) % sizes["vocab"]
        with torch.inference_mode():
            target.model(ids, use_cache=False)
        return 1

    texts = sizes["rows"] // sizes["length"]
    return {
        "target, 1 row": partial(forward, answerer, 1, 1),
        "target, 5 rows": partial(forward, answerer, 1, 5),
        f"target, {sizes['rows']:,} rows": partial(forward, teacher, texts, sizes["length"]),
    }


def build_training_steps(options: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Build a step of the training loop for each head: target, head, loss, backward pass, Muon."""

    def step(run: Any) -> int:
        run.optimizer_step()
        return 1

    steps: dict[str, Run] = {}
    for name, form in TRAINED.items():
        options.head = form
        run, _ = training.start_run(options, folder / form)
        steps[f"{name}, training step"] = partial(step, run)
    return steps


def build_decoding_texts(sizes: dict[str, Any]) -> dict[str, Run]:
    """Build one part for each drafting method: it decodes a text.

    The target predicts each token by so wide a margin that rounding in bfloat16 changes no token.
    """
    dtype, vocab = getattr(torch, sizes["dtype"]), sizes["vocab"]
    target = engine.make_certain_target(dtype, sizes["layers"], sizes["hidden"], vocab)
    length = sizes["new_tokens"]
    # Its text repeats the prompt, so that look-ups find matches.
    start = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:1].tolist()
    answer = decode(target, NoDraft(), start, length).token_ids
    prompt = (start + answer) * -(-sizes["prompt"] // (length + 1)) + start
    ways: dict[str, Callable[[], Drafter]] = {
        "vanilla": NoDraft,
        "prompt_lookup": PromptLookup,
        "suffix": lambda: SuffixDrafter(SuffixTree(max_ngram=24)),
    }
    for name in DRAFTING:
        variant = next(reversed(HEADS[name].variants))
        head = make_untrained_head(variant, target, DraftVocab.make_full(vocab))
        pack_weights(head.attach(target, target.dtype).eval())
        depth = min(DEPTH, head.max_chain_depth)
        ways[f"{name}_chain"] = partial(head.make_drafter, Tree.make_chain(depth), GREEDY, [0])
        if head.has_static_tree:
            ways[f"{name}_tree"] = partial(head.make_drafter, make_default_tree(depth), GREEDY, [0])

    def text(make: Callable[[], Drafter]) -> int:
        return len(decode(target, make(), prompt, length).steps)

    def generate() -> int:
        return len(hf_generate(target, [prompt], length, GREEDY, 0)[0].steps)

    texts = {f"text by {name}": partial(text, make) for name, make in ways.items()}
    return texts | {"text by generate": generate}


def serve_parts(sizes: dict[str, Any]) -> None:
    """Run the part that each line of standard input names; answer `MILLISECONDS STEPS`."""
    torch.set_num_threads(sizes["threads"])
    # Other output of training goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        runs = build_parts(sizes, Path(folder))
        print(json.dumps([str(this_processor()), list(runs)]), file=answers, flush=True)
        for line in sys.stdin:
            watch = Stopwatch()
            num_steps = runs[line.strip()]()
            milliseconds = 1000 * watch.processor_seconds()
            print(f"{milliseconds} {num_steps}", file=answers, flush=True)


class WorkerProcess:
    """Hold a process that runs parts, and stays open while other processes run theirs.

    Args:
        variables: environment variables to add to those of this process.
        sizes: keys of `SIZES`, and the name of a `dtype`.
    """

    def __init__(self, variables: Mapping[str, str], sizes: Mapping[str, object]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, which `end_process` closes
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(sizes)],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(sizes["threads"]), **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    @cached_property
    def about(self) -> tuple[str, list[str]]:
        """Return the processor's name and the parts' names once the process is ready.

        Raises:
            InputError: the process failed.
        """
        processor, names = json.loads(self._read_answer())
        return processor, names

    def run_part(self, part: str) -> tuple[float, int]:
        """Run a part in the process; return its milliseconds and its number of steps.

        Raises:
            InputError: the process failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(part + "\n")
        self._process.stdin.flush()
        milliseconds, num_steps = self._read_answer().split()
        return float(milliseconds), int(num_steps)

    def end_process(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read_answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise InputError(f"a process failed:\n{self._errors.read()[-2000:]}")
        return line


def measure_parts(workers: Mapping[str, WorkerProcess], repeats: int) -> Times:
    """Time all parts, in one process after the other, after one run to warm up.

    Raises:
        InputError: the processes take different steps, so their times do not compare.
    """
    names = next(iter(workers.values())).about[1]
    times: dict[str, dict[str, list[float]]] = {
        column: {name: [] for name in names} for column in workers
    }
    for repeat in tqdm(range(repeats + 1), unit="round"):
        for name in names:
            steps = {}
            for column, worker in workers.items():
                milliseconds, steps[column] = worker.run_part(name)
                if repeat:
                    times[column][name].append(milliseconds)
            if len(set(steps.values())) > 1:
                raise InputError(f"{name}: takes different steps in different processes: {steps}")
    return times


def build_rows(times: Times) -> tuple[list[tuple[str, ...]], float]:
    """Build the rows of the table: part, milliseconds as it is, with AVX2, ratio, in bfloat16.

    Args:
        times: milliseconds for all columns of `COLUMNS`.

    Returns:
        The rows, with the largest ratio last, and that ratio.
    """
    medians = [
        {name: statistics.median(repeats) for name, repeats in column.items()}
        for column in times.values()
    ]
    new, old, *narrow = medians
    ratios = {name: old[name] / new[name] for name in new}
    rows = [
        (
            name,
            f"{new[name]:.1f}",
            f"{old[name]:.1f}",
            f"{ratios[name]:.2f}",
            *(f"{column[name]:.1f}" for column in narrow),
        )
        for name in sorted(ratios, key=ratios.__getitem__)
    ]
    return rows, max(ratios.values())


def main(given: list[str] | None = None) -> int:
    """Print the table of all parts; return 1 if a part exceeds the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_size_flags(parser, **SIZES, repeats=5)
    parser.add_argument("--limit", type=float, default=3.0, help="largest allowed ratio of times")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.serve:
        serve_parts(options.serve)
        return 0
    sizes = {name: getattr(options, name) for name in SIZES}
    with ExitStack() as stack:
        workers = {
            column: WorkerProcess(variables, sizes | {"dtype": dtype})
            for column, (variables, dtype) in COLUMNS.items()
        }
        for worker in workers.values():
            stack.callback(worker.end_process)
        try:
            here, old, *_ = (worker.about[0] for worker in workers.values())
            times = measure_parts(workers, options.repeats)
        except InputError as error:
            sys.exit(f"error: {error}")
    rows, worst = build_rows(times)
    print(f"{here} / {old}, {options.threads} thread(s), processor time, milliseconds\n")
    print(build_markdown_table(("part", "as it is", "AVX2", "ratio", *list(COLUMNS)[2:]), rows))
    if worst > options.limit:
        print(f"\n{rows[-1][0]}: {worst:.1f} times as long with AVX2, {options.limit:g} allowed")
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
