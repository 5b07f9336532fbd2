r"""Holds a running vLLM, SGLang or llama.cpp server against our own decoder: texts, drafts.

    python scripts/serve_check.py endpoint=http://localhost:8000 head.path=outputs/eagle/head \
        target.path=Qwen/Qwen3-8B target.dtype=float32 data.path=prompts.jsonl

Every prompt goes to the server as token ids, greedily and one at a time. Exits with 1 if anything
falls apart by more than `tolerance`. In float32 on both sides nothing may (llama.cpp: `-fa off -ctk
f32 -ctv f32 -ctkd f32 -ctvd f32`, as it casts keys and values to float16 otherwise); in bfloat16
the first near-tie makes another text of it.
"""

import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import ServeCheckRun
from eval.refusals import check_measure

CHECK = partial(check_measure, result="serve_check.json")
COMMAND = Command(__doc__, ServeCheckRun, "serve_check", check=CHECK)
if __name__ == "__main__":
    COMMAND.begin()

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.errors import InputError
from data.servers.counts import DraftingServer
from data.servers.endpoint import Endpoint
from eval.measure.bench import Bench, open_bench, seed_of, write_result
from eval.measure.counts import Totals, divergences, drafted, problems

RESULT = "serve_check.json"


def main(config: ServeCheckRun) -> None:
    """Asks the server, decodes the same prompts, prints, writes `serve_check.json`."""
    CHECK(config)
    endpoint = Endpoint(config.endpoint, api_key=os.environ.get(config.api_key_env))
    with DraftingServer(endpoint) as engine:
        check_depth(config, engine)
        bench = open_bench(config, RESULT)
        check_room(config, bench, engine)
        theirs = [
            engine.answer(prompt.token_ids, config.max_new_tokens)
            for prompt in tqdm(bench.prompts, desc=engine.name, unit="prompt")
        ]
    depth, ours = bench.head.chain.depth, []
    for prompt in tqdm(bench.prompts, desc="our own decoder", unit="prompt"):
        drafter = bench.head.drafter("chain", bench.sampling, [seed_of(prompt, config.seed)])
        counts = drafted(
            bench.target, drafter, prompt.token_ids, config.max_new_tokens, depth, engine.within
        )
        ours.append(counts)
    differences = problems(ours, theirs, config.tolerance)
    result = {
        "engine": engine.name,
        "served_model": engine.model,
        "depth": engine.depth,
        "tolerance": config.tolerance,
        "num_texts": len(ours),
        "divergences": [asdict(one) for one in divergences(ours, theirs)],
        "ours": asdict(Totals.of(ours)),
        "theirs": asdict(Totals.of(theirs)),
        "problems": differences,
    }
    console = Console()
    show(result, console)
    console.print(f"wrote {write_result(config, RESULT, result, bench)}")
    if differences:
        print(f"differs: {'; '.join(differences)}", file=sys.stderr)
        sys.exit(1)


def check_depth(config: ServeCheckRun, engine: DraftingServer) -> None:
    """Takes the server's depth, or refuses another one.

    Raises:
        InputError: with both.
    """
    config.depth = config.depth or engine.depth
    if config.depth != engine.depth:
        raise InputError(
            f"depth={config.depth}: {config.endpoint} drafts {engine.depth} tokens; leave depth "
            "unset, or start the server with as many speculative tokens"
        )


def check_room(config: ServeCheckRun, bench: Bench, engine: DraftingServer) -> None:
    """Refuses texts near the end of the server's window, where it drafts less.

    Raises:
        InputError: with the lengths.
    """
    longest = max(len(prompt.token_ids) for prompt in bench.prompts)
    needed = longest + config.max_new_tokens + engine.depth + 1
    if engine.max_model_len is not None and needed > engine.max_model_len:
        raise InputError(
            f"max_new_tokens={config.max_new_tokens}: with the longest prompt of {longest} tokens "
            f"and drafts of {engine.depth} that is {needed}, and {config.endpoint} takes "
            f"{engine.max_model_len}; lower it, or start the server with --max-model-len {needed} "
            f"(llama.cpp: -c {needed})"
        )


def show(result: dict[str, Any], console: Console) -> None:
    """Prints counts side by side."""
    ours, theirs = result["ours"], result["theirs"]
    num_texts = result["num_texts"]
    equal = num_texts - len(result["divergences"])
    table = Table(title=f"{equal} of {num_texts} texts equal, {result['engine']} and ours")
    for column in ("", result["engine"], "ours", f"rate {result['engine']}", "rate ours"):
        table.add_column(column, justify="right" if column else "left")
    for name, key in (("drafts", "drafts"), ("draft tokens", "proposed")):
        table.add_row(name, str(theirs[key]), str(ours[key]), "", "")
    pairs = zip(theirs["accepted"], ours["accepted"], strict=True)
    for depth, (their_count, our_count) in enumerate(pairs, start=1):
        rates = (
            f"{count / max(1, total['drafts']):.4f}"
            for count, total in ((their_count, theirs), (our_count, ours))
        )
        table.add_row(f"accepted at {depth}", str(their_count), str(our_count), *rates)
    console.print(table)


if __name__ == "__main__":
    COMMAND.run(main)
