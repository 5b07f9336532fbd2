"""The quickstart's parts in a process of its own, which runs one whenever it is asked to.

`python -m scripts.bench.parts SIZES` takes sizes as JSON, says what its processor is, and then
answers every line with the name of a part by a line `MILLISECONDS STEPS`, processor time.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conf.command.clock import Stopwatch
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.suffix import Suffix, SuffixTree
from eval.decode.engine import NoDraft, decode
from eval.decode.generate import hf_generate
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree, usual_tree
from heads.kinds import KINDS
from heads.layers.packed import pack
from heads.processor import this_processor
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench import engine as bench_engine
from scripts.bench import training as bench_train

SIZES = {
    "hidden": 256, "layers": 4, "vocab": 1024, "rows": 2048, "length": 512, "prompt": 64,
    "new_tokens": 32, "threads": 1,
}  # fmt: skip
"""Those of the embedded default; a training step is one sequence of `length` tokens."""
TRAINED = {"Medusa": "medusa", "EAGLE-3": "eagle3"}
DEPTH = 4
Part = Callable[[], int]
"""Runs a part once, and gives its steps."""


def parts(sizes: dict[str, Any], folder: Path) -> dict[str, Part]:
    """Every part by its name.

    Args:
        sizes: `SIZES`, and `dtype`.
        folder: for what training leaves.
    """
    options = bench_train.arguments([
        "--hidden", str(sizes["hidden"]), "--layers", str(sizes["layers"]),
        "--vocab", str(sizes["vocab"]), "--max-length", str(sizes["length"]), "--batch-size", "1",
        "--dtype", sizes["dtype"], "--optimizer", "muon",
    ])  # fmt: skip
    return passes(sizes, options) | training(options, folder) | decoding(sizes)


def passes(sizes: dict[str, Any], options: argparse.Namespace) -> dict[str, Part]:
    """Of a target over few rows, packed as where it answers, and over many, as where it teaches."""
    dtype = getattr(torch, sizes["dtype"])
    answers = bench_engine.random_target(dtype, sizes["layers"], sizes["hidden"], sizes["vocab"])
    teaches = bench_train.random_target(options, torch.device("cpu"))

    def forward(target: Target, num_texts: int, num_rows: int) -> int:
        ids = torch.arange(num_texts * num_rows).view(num_texts, num_rows) % sizes["vocab"]
        with torch.inference_mode():
            target.model(ids, use_cache=False)
        return 1

    texts = sizes["rows"] // sizes["length"]
    return {
        "target, 1 row": partial(forward, answers, 1, 1),
        "target, 5 rows": partial(forward, answers, 1, 5),
        f"target, {sizes['rows']:,} rows": partial(forward, teaches, texts, sizes["length"]),
    }


def training(options: argparse.Namespace, folder: Path) -> dict[str, Part]:
    """Steps of the training loop: the target's pass, forward, loss, backward, Muon."""
    found: dict[str, Part] = {}
    for name, form in TRAINED.items():
        options.head = form
        run, _ = bench_train.start(options, folder / form)
        run.resume()

        def step(run: Any = run) -> int:
            run.optimizer_step()
            return 1

        found[f"{name}, training step"] = step
    return found


def decoding(sizes: dict[str, Any]) -> dict[str, Part]:
    """A text by each way to draft, of a target whose text no rounding changes."""
    dtype, vocab = getattr(torch, sizes["dtype"]), sizes["vocab"]
    target = bench_engine.random_target(dtype, sizes["layers"], sizes["hidden"], vocab)
    number = sizes["new_tokens"]
    # It says again what stands in its prompt, so that look-ups find it.
    start = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:1].tolist()
    said = decode(target, NoDraft(), start, number).token_ids
    prompt = (start + said) * -(-sizes["prompt"] // (number + 1)) + start
    ways: dict[str, Callable[[], Drafter]] = {
        "vanilla": NoDraft,
        "prompt_lookup": PromptLookup,
        "suffix": lambda: Suffix(SuffixTree(max_ngram=24)),
    }
    for name in ("medusa", "eagle"):
        kind = KINDS[name]
        head = kind.untrained(target, next(reversed(kind.forms)), DraftVocab.everything(vocab))
        pack(head.attach(target, target.dtype).eval())
        depth = min(DEPTH, kind.longest(head))
        ways[f"{name}_chain"] = partial(kind.drafter, head, Tree.chain(depth), GREEDY, [0])
        if kind.static:
            ways[f"{name}_tree"] = partial(kind.drafter, head, usual_tree(depth), GREEDY, [0])

    def text(make: Callable[[], Drafter]) -> int:
        return len(decode(target, make(), prompt, number).steps)

    def generate() -> int:
        return len(hf_generate(target, [prompt], number, GREEDY, 0)[0].steps)

    found = {f"text by {name}": partial(text, make) for name, make in ways.items()}
    return found | {"text by generate": generate}


def main(given: str) -> None:
    """Serves until standard input ends."""
    sizes = json.loads(given)
    torch.set_num_threads(sizes["threads"])
    # What training says goes elsewhere.
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        found = parts(sizes, Path(folder))
        print(json.dumps([str(this_processor()), list(found)]), file=answers, flush=True)
        for line in sys.stdin:
            watch = Stopwatch()
            num_steps = found[line.strip()]()
            milliseconds = 1000 * watch.processor_seconds()
            print(f"{milliseconds} {num_steps}", file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
