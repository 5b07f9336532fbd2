"""Plain decoding beside transformers' `generate`, by processor time.

`python scripts/bench/generate.py --target MODEL --data prompts.jsonl` decodes the same prompts with
both, in turns, and prints medians by batch size; without arguments with the embedded default. Who
compares with a slow baseline of his own flatters every draft.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.errors import InputError
from conf.settings.measure import SpeedupRun
from eval.decode.engine import NoDraft, decode_batch
from eval.decode.generate import hf_generate
from eval.decode.generation import Generation
from eval.measure.bench import Bench, open_bench
from heads.decoding.sampling import GREEDY
from scripts.bench.apart import markdown
from scripts.bench.footprint import add_sizes, where

COLUMNS = ("batch size", "tokens", "vanilla, ms", "generate, ms", "generate / vanilla")


def arguments() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="folder or Hub id; unset, the embedded default")
    parser.add_argument("--data", help="prompts; unset, those of the embedded default")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    add_sizes(parser, max_new_tokens=96, repeats=9, threads=1)
    return parser.parse_args()


def opened(options: argparse.Namespace) -> Bench:
    """Target and prompts."""
    run = SpeedupRun(max_new_tokens=options.max_new_tokens, num_turns=1)
    run.target.path, run.data.path = options.target, options.data
    run.data.num_prompts = max(options.batch_sizes)
    return open_bench(run, "speedup.json", need_head=False)


def ways(bench: Bench, num_texts: int, length: int) -> list[Callable[[], list[Generation]]]:
    """The engine without drafting, and `generate`, on the same prompts."""
    prompts = [prompt.token_ids for prompt in bench.prompts[:num_texts]]
    return [
        lambda: decode_batch(bench.target, NoDraft(), prompts, length),
        partial(hf_generate, bench.target, prompts, length, GREEDY, 0),
    ]


def row(bench: Bench, num_texts: int, options: argparse.Namespace) -> tuple[str, ...]:
    """One batch size.

    Raises:
        InputError: the two do not write the same.
    """
    both = ways(bench, num_texts, options.max_new_tokens)
    ours, theirs = ([text.token_ids for text in run()] for run in both)
    if ours != theirs:
        raise InputError("vanilla and generate write different texts: their times say nothing")
    seconds: list[list[float]] = [[], []]
    for _ in tqdm(range(options.repeats), desc=f"batch of {num_texts}", unit="round"):
        for run, found in zip(both, seconds, strict=True):
            watch = Stopwatch(bench.target.device)
            run()
            found.append(watch.processor_seconds())
    vanilla, generate = (1000 * statistics.median(found) for found in seconds)
    counts = f"{num_texts}", f"{sum(map(len, ours)):,}"
    return *counts, f"{vanilla:.0f}", f"{generate:.0f}", f"{generate / vanilla:.2f}"


def main() -> None:
    """Prints the table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    try:
        bench = opened(options)
        rows = [row(bench, size, options) for size in options.batch_sizes]
    except InputError as error:
        sys.exit(f"error: {error}")
    print(f"{bench.target.name}, {where(bench.target.device)}, processor time\n")
    print(markdown(COLUMNS, rows))


if __name__ == "__main__":
    main()
