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
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.errors import InputError
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.suffix import SuffixDrafter, SuffixTree
from eval.decode.engine import NoDraft, decode
from eval.decode.hf_generate import hf_generate
from eval.measure.results import build_markdown_table
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree, make_default_tree
from heads.devices import this_processor
from heads.kinds import HEADS, make_untrained_head
from heads.layers.fast_linear import pack_weights
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.decoding import make_certain_target
from scripts.bench.harness import WorkerProcess, take_answers
from scripts.bench.training import RunSizes, make_random_target, start_run

SIZES = {
    "hidden": 192, "layers": 10, "vocab": 1024, "rows": 2048, "length": 512, "prompt": 64,
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
    run_sizes = RunSizes(
        hidden=sizes["hidden"], layers=sizes["layers"], vocab=sizes["vocab"],
        max_length=sizes["length"], batch_size=1, dtype=sizes["dtype"], optimizer="muon",
    )  # fmt: skip
    passes, steps = build_passes(sizes, run_sizes), build_training_steps(run_sizes, folder)
    return passes | steps | build_decoding_texts(sizes)


def build_passes(sizes: dict[str, Any], run_sizes: RunSizes) -> dict[str, Run]:
    """Build passes of a target: over few packed rows, as in decoding; over many, as in training."""
    answerer = make_certain_target(
        getattr(torch, sizes["dtype"]), sizes["layers"], sizes["hidden"], sizes["vocab"]
    )
    teacher = make_random_target(run_sizes, torch.device("cpu"))

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


def build_training_steps(sizes: RunSizes, folder: Path) -> dict[str, Run]:
    """Build a step of the training loop for each head: target, head, loss, backward pass, Muon."""

    def step(run: Any) -> int:
        run.optimizer_step()
        return 1

    steps: dict[str, Run] = {}
    for name, form in TRAINED.items():
        run, _ = start_run(replace(sizes, head=form), folder / form)
        steps[f"{name}, training step"] = partial(step, run)
    return steps


def build_decoding_texts(sizes: dict[str, Any]) -> dict[str, Run]:
    """Build one part for each drafting method: it decodes a text.

    The target predicts each token by so wide a margin that rounding in bfloat16 changes no token.
    """
    dtype, vocab = getattr(torch, sizes["dtype"]), sizes["vocab"]
    target = make_certain_target(dtype, sizes["layers"], sizes["hidden"], vocab)
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
    """Answer with processor and parts, then each part's name with milliseconds and steps."""
    torch.set_num_threads(sizes["threads"])
    answer = take_answers()
    with tempfile.TemporaryDirectory() as folder:
        runs = build_parts(sizes, Path(folder))
        answer([str(this_processor()), list(runs)])
        for line in sys.stdin:
            watch = Stopwatch()
            num_steps = runs[json.loads(line)]()
            answer([1000 * watch.processor_seconds(), num_steps])


def measure_parts(
    workers: Mapping[str, WorkerProcess], names: Sequence[str], repeats: int
) -> Times:
    """Time parts, in one process after the other, after one run to warm up.

    Raises:
        InputError: the processes take different steps, so their times do not compare.
    """
    times: dict[str, dict[str, list[float]]] = {
        column: {name: [] for name in names} for column in workers
    }
    for repeat in tqdm(range(repeats + 1), unit="round"):
        for name in names:
            steps = {}
            for column, worker in workers.items():
                worker.send(name)
                milliseconds, steps[column] = worker.receive()
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
    ratios = {name: medians[1][name] / new for name, new in medians[0].items()}
    rows = []
    for name in sorted(ratios, key=ratios.__getitem__):
        new, old, *narrow = (f"{column[name]:.1f}" for column in medians)
        rows.append((name, new, old, f"{ratios[name]:.2f}", *narrow))
    return rows, max(ratios.values())


def main(given: list[str] | None = None) -> int:
    """Print the table of all parts; return 1 if a part exceeds the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in {**SIZES, "repeats": 5}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--limit", type=float, default=3.0, help="largest allowed ratio of times")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.serve:
        serve_parts(options.serve)
        return 0
    sizes = {name: getattr(options, name) for name in SIZES}
    with ExitStack() as stack:
        workers = {}
        for column, (variables, dtype) in COLUMNS.items():
            words, threads = json.dumps(sizes | {"dtype": dtype}), str(options.threads)
            worker = WorkerProcess("cpu", "--serve", words, OMP_NUM_THREADS=threads, **variables)
            stack.callback(worker.end_process)
            workers[column] = worker
        try:
            (here, names), (old, _), *_ = [each.receive() for each in workers.values()]
            times = measure_parts(workers, names, options.repeats)
        except InputError as error:
            sys.exit(f"error: {error}")
    rows, worst = build_rows(times)
    header = ("part", "as it is", "AVX2", "ratio", *list(COLUMNS)[2:])
    print(f"{here} / {old}, {options.threads} thread(s), processor time, milliseconds\n")
    print(build_markdown_table([header, *rows]))
    if worst > options.limit:
        print(f"\n{rows[-1][0]}: {worst:.1f} times as long with AVX2, {options.limit:g} allowed")
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
