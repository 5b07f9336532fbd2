"""Wall-clock speed-up of real decoding, against the same engine without drafting.

`python eval/speedup.py head.path=outputs/medusa/head data.path=prompts.jsonl methods=all`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import GenerationConfig

from conf.entry import run
from conf.schema import InputError, SpeedupRun
from eval.bench import Bench, open_bench, write_result
from eval.engine import Drafter, Generation, NoDraft, Times, decode
from eval.figures import plot_speedup
from eval.stats import PromptSteps, summary

BASELINE = "vanilla"
METHODS = (BASELINE, "generate", "medusa_chain", "medusa_tree", "eagle_chain", "eagle_tree")
NUM_WARMUPS = 3

Decode = Callable[[list[int]], Generation]


@dataclass
class Runs:
    """Generations of one method: [repeat][prompt]."""

    repeats: list[list[Generation]] = field(default_factory=list)

    def tokens_per_s(self, part: str = "total") -> float:
        """Median over repeats of all tokens over all seconds, prompts read included."""
        return statistics.median(
            sum(len(g.token_ids) for g in repeat) / sum(getattr(g.times, part) for g in repeat)
            for repeat in self.repeats
        )


def check_methods(names: list[str]) -> None:
    """Refuses names that no head has.

    Raises:
        InputError: with the names there are.
    """
    unknown = set(names) - {"all", *METHODS}
    if unknown:
        raise InputError(f"methods={sorted(unknown)}: allowed: all, {', '.join(METHODS)}")


def decoders(bench: Bench, config: SpeedupRun) -> dict[str, Decode]:
    """A function from prompt ids to a generation, per chosen method, the baseline first.

    Raises:
        InputError: a method of another kind of head.
    """

    def engine(make: Callable[[], Drafter]) -> Decode:
        return lambda ids: decode(
            bench.target, make(), ids, config.max_new_tokens, bench.sampling, config.seed
        )

    known: dict[str, Decode] = {
        BASELINE: engine(NoDraft),
        "generate": lambda ids: hf_generate(bench, ids, config.max_new_tokens),
        f"{bench.family}_chain": engine(lambda: bench.drafter("chain", config.seed)),
        f"{bench.family}_tree": engine(lambda: bench.drafter("tree", config.seed)),
    }
    if "all" in config.methods:
        return known
    missing = sorted(set(config.methods) - set(known))
    if missing:
        raise InputError(f"methods={missing}: this head has {', '.join(known)}")
    return {name: known[name] for name in known if name in (BASELINE, *config.methods)}


@torch.no_grad()
def hf_generate(bench: Bench, prompt_ids: list[int], max_new_tokens: int) -> Generation:
    """transformers' own `generate`, whole and timed as one part."""
    target, sampling = bench.target, bench.sampling
    ids = torch.tensor([prompt_ids], device=target.device)
    drawn = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
    }
    settings = GenerationConfig(
        **({"do_sample": False} if sampling.greedy else drawn),
        max_new_tokens=max_new_tokens,
        eos_token_id=target.stop_ids or None,
        pad_token_id=(target.stop_ids or [0])[0],
    )
    started = time.perf_counter()
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )
    tokens = output[0, len(prompt_ids) :].tolist()
    return Generation(tokens, [], Times(total=time.perf_counter() - started))


def time_methods(bench: Bench, config: SpeedupRun, methods: dict[str, Decode]) -> dict[str, Runs]:
    """Runs every method on every prompt, interleaved, after warm-ups on the first prompt."""
    for decoder in methods.values():
        for _ in range(NUM_WARMUPS):
            decoder(bench.prompts[0].token_ids)
    runs = {name: Runs() for name in methods}
    total = config.num_repeats * len(bench.prompts)
    with tqdm(total=total, desc="decoding", unit="prompt") as progress:
        for _ in range(config.num_repeats):
            for name in methods:
                runs[name].repeats.append([])
            for prompt in bench.prompts:
                for name, decoder in methods.items():
                    runs[name].repeats[-1].append(decoder(prompt.token_ids))
                progress.update()
    return runs


def summarise(bench: Bench, config: SpeedupRun, runs: dict[str, Runs]) -> dict[str, Any]:
    """The contents of `speedup.json`."""
    baseline = runs[BASELINE].tokens_per_s()
    methods = {name: _figures(bench, config, run, baseline) for name, run in runs.items()}
    # Sampled texts differ by chance; that they keep the distribution is a matter of tests.
    lossless = _lossless(bench, runs) if bench.sampling.greedy else None
    return {"methods": methods, "baseline": BASELINE, "lossless": lossless}


def _figures(bench: Bench, config: SpeedupRun, runs: Runs, baseline: float) -> dict[str, Any]:
    first = runs.repeats[0]
    steps = [PromptSteps(p.category, g.steps) for p, g in zip(bench.prompts, first, strict=True)]
    depth = max((step.accepted for p in steps for step in p.steps), default=0)
    acceptance = summary(steps, depth, config.seed)
    speed = runs.tokens_per_s()
    figures = {
        "tau": acceptance["tau"],
        "tokens_per_s": speed,
        "speedup": speed / baseline,
        "efficiency": speed / baseline / float(acceptance["tau"]),  # type: ignore[arg-type]
        "num_tokens": sum(len(g.token_ids) for g in first),
        "breakdown": {
            part: statistics.median(sum(getattr(g.times, part) for g in r) for r in runs.repeats)
            for part in ("prefill", "draft", "verify", "accept", "host")
        },
    }
    if any(g.steps for g in first):
        figures["decode_tokens_per_s"] = runs.tokens_per_s("decode")
    return figures


def _lossless(bench: Bench, runs: dict[str, Runs]) -> dict[str, Any]:
    expected = runs[BASELINE].repeats[0]
    divergences = [
        {"prompt": index, "method": name, **_divergence(bench, index, mine, ours)}
        for name, run in runs.items()
        for index, (mine, ours) in enumerate(zip(expected, run.repeats[0], strict=True))
        if mine.token_ids != ours.token_ids
    ]
    differing = {found["prompt"] for found in divergences}
    return {
        "num_prompts": len(expected),
        "num_equal": len(expected) - len(differing),
        "first_divergences": divergences,
    }


@torch.no_grad()
def _divergence(bench: Bench, index: int, mine: Generation, ours: Generation) -> dict[str, Any]:
    """Where two texts part, and by how much the target preferred its choice there."""
    pairs = zip(mine.token_ids, ours.token_ids, strict=False)
    shorter = min(len(mine.token_ids), len(ours.token_ids))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    output = bench.target.read_text(bench.prompts[index].token_ids + mine.token_ids[:position])
    last = output.hidden_states[0, -1]
    best, second = bench.target.logits(last).float().topk(2).values.tolist()
    return {"position": position, "top2_margin": best - second}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the figures as a table."""
    table = Table(title="Speed-up over the same engine without drafting (medians)")
    for column in ("method", "tau", "tokens/s", "speed-up", "efficiency", "draft s", "verify s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in result["methods"].items():
        parts = row["breakdown"]
        table.add_row(
            name, f"{row['tau']:.3f}", f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}",
            f"{row['efficiency']:.2f}", f"{parts['draft']:.2f}", f"{parts['verify']:.2f}",
        )  # fmt: skip
    console.print(table)
    lossless = result["lossless"]
    if lossless is None:
        return
    console.print(
        f"{lossless['num_equal']} of {lossless['num_prompts']} texts equal to the target's "
        "greedy text under every method"
    )
    for found in lossless["first_divergences"][:5]:
        console.print(f"  {found}", highlight=False)


def main(config: SpeedupRun) -> None:
    """Measures, prints, writes `speedup.json` and `speedup.png`."""
    check_methods(config.methods)
    bench = open_bench(config, "speedup.json")
    runs = time_methods(bench, config, decoders(bench, config))
    result = summarise(bench, config, runs)
    console = Console()
    show(result, console)
    path = write_result(config, "speedup.json", result, bench)
    plot_speedup(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    run(main, SpeedupRun, "speedup")
