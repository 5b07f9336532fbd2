"""Runs methods side by side and turns what they did into figures."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from conf.schema_measure import SpeedupRun
from eval.compare.methods import BASELINE, Method
from eval.decode.engine import Generation
from eval.decode.texts import common_prefix
from eval.measure import processes
from eval.measure.bench import Bench, batches, seed_of
from eval.measure.prompts import Prompt, num_thinking
from eval.measure.stats import PromptSteps, interval, summary
from heads.target.model import Target
from heads.tree import Tree

PARTS = ("prefill", "draft", "verify", "accept", "host")


@dataclass(frozen=True)
class BatchRun:
    """Prompts of one category that every method decoded together.

    Attributes:
        prompts: the prompts.
        runs: by method, [repeat][prompt].
    """

    prompts: list[Prompt]
    runs: dict[str, list[list[Generation]]]

    @property
    def category(self) -> str:
        """That of all its prompts."""
        return self.prompts[0].category

    def num_tokens(self, method: str) -> int:
        """Tokens of all texts, counted from their ids."""
        return sum(len(g.token_ids) for g in self.runs[method][0])

    def seconds(self, method: str, part: str = "total") -> list[float]:
        """Per repeat, for the whole batch."""
        return [getattr(repeat[0].times, part) for repeat in self.runs[method]]


def time_methods(bench: Bench, config: SpeedupRun, methods: dict[str, Method]) -> list[BatchRun]:
    """Every method on every batch, interleaved, after warm-ups; of all processes.

    What a method remembers of texts starts anew with every repeat: a prompt asked again would
    only copy its own answer.
    """
    groups = list(batches(bench.prompts, config.batch_size))
    found = [BatchRun([bench.prompts[i] for i in g], {n: [] for n in methods}) for g in groups]
    for _ in range(config.num_warmups):
        for method in methods.values():
            _run(method, found[0].prompts, config.seed)
    total = config.num_repeats * len(found)
    with tqdm(total=total, desc="decoding", unit="batch", disable=not bench.main) as progress:
        for _ in range(config.num_repeats):
            for method in methods.values():
                method.forget()
            for batch in found:
                for name, method in methods.items():
                    batch.runs[name].append(_run(method, batch.prompts, config.seed))
                progress.update()
    return sorted(processes.gathered(found), key=_place)


def _run(method: Method, prompts: Sequence[Prompt], seed: int) -> list[Generation]:
    ids = [prompt.token_ids for prompt in prompts]
    return method.run(ids, [seed_of(prompt, seed) for prompt in prompts])


def _place(batch: BatchRun) -> tuple[int, int]:
    return batch.prompts[0].turn, batch.prompts[0].dialogue


def summarise(
    bench: Bench, config: SpeedupRun, methods: dict[str, Method], found: list[BatchRun]
) -> dict[str, Any]:
    """The contents of `speedup.json`."""
    tokenizer = bench.target.tokenizer
    figures = {
        name: _figures(name, method, found, config, tokenizer) for name, method in methods.items()
    }
    # Sampled texts differ by chance; that they keep the distribution is a matter of tests.
    lossless = _lossless(bench, methods, found) if bench.sampling.greedy else None
    return {
        "methods": figures,
        "baseline": BASELINE,
        "lossless": lossless,
        "batch_size": config.batch_size,
        "num_repeats": config.num_repeats,
        "texts": [
            _coloured(index, batch, row, methods, bench.target)
            for index, (batch, row) in enumerate(_spread(found, config.num_texts))
        ],
    }


def _figures(
    name: str, method: Method, found: list[BatchRun], config: SpeedupRun, tokenizer: Any
) -> dict[str, Any]:
    texts = [(batch, g) for batch in found for g in batch.runs[name][0]]
    asked = [prompt for batch in found for prompt in batch.prompts]
    steps = [
        PromptSteps(p.category, g.steps, num_thinking(p, g.token_ids, tokenizer))
        for p, (_, g) in zip(asked, texts, strict=True)
    ]
    num_passes = sum(_num_passes(batch.runs[name][0]) for batch in found)
    num_tokens = sum(len(g.token_ids) for _, g in texts)
    depth = max((step.num_accepted for p in steps for step in p.steps), default=0)
    measured = summary(steps, depth, config.seed)
    watched = any(p.steps for p in steps)
    speed, speedup = _speed(name, found, "total")
    mean: Any = measured["tau"] if watched else _tau_unseen(name, found)
    figures = {
        "tau": mean,
        "tokens_per_s": speed,
        "speedup": speedup,
        "speedup_ci95": _speedup_interval(name, found, config.seed),
        "num_tokens": num_tokens,
        "num_passes": num_passes,
        "breakdown": {
            part: _median_total(batch.seconds(name, part) for batch in found) for part in PARTS
        },
        "lossy": method.lossy,
        "by_category": _by_category(name, found, measured, config.seed),
        "efficiency": speedup / mean,
    }
    if watched:
        names = ("tau_ci95", "alpha", "per_position", "num_steps", "by_part")
        figures |= {key: measured[key] for key in names}
        figures["decode_tokens_per_s"], figures["decode_speedup"] = _speed(name, found, "decode")
    if method.tree is not None and method.tree.num_nodes > 1:
        figures["tree"] = _tree(method.tree, [g for _, g in texts])
    return figures


def _num_passes(batch: list[Generation]) -> int:
    """Verify passes over a whole batch, or all passes of somebody else's loop."""
    return max(max(len(g.steps), g.num_passes) for g in batch)


def _tau_unseen(name: str, found: list[BatchRun]) -> float:
    """Tokens per pass, that over the prompt included, of the longest text of each batch."""
    batches_seen = [batch.runs[name][0] for batch in found]
    num_passes = sum(_num_passes(texts) for texts in batches_seen)
    num_tokens = sum(max(len(g.token_ids) for g in texts) for texts in batches_seen)
    return num_tokens / num_passes if num_passes else 1.0


def _median_total(seconds: Iterable[list[float]]) -> float:
    """Seconds of all batches, each at its median over repeats."""
    return sum(map(statistics.median, seconds))


def _speed(name: str, found: list[BatchRun], part: str) -> tuple[float, float]:
    """Tokens per second, and their ratio to the baseline's.

    In `total`, or in `decode`: without prompts and without the token that reading them gives.
    """
    speed = _tokens_per_s(name, found, part)
    return speed, speed / _tokens_per_s(BASELINE, found, part)


def _tokens_per_s(name: str, found: list[BatchRun], part: str) -> float:
    num_tokens = sum(batch.num_tokens(name) for batch in found)
    if part == "decode":
        num_tokens -= sum(len(batch.prompts) for batch in found)
    return num_tokens / max(_median_total(batch.seconds(name, part) for batch in found), 1e-9)


def _speedup_interval(name: str, found: list[BatchRun], seed: int) -> list[float]:
    """95% bootstrap interval of the speed-up over batches, each at its median time."""
    cells = [
        (
            batch.num_tokens(name), statistics.median(batch.seconds(name)),
            batch.num_tokens(BASELINE), statistics.median(batch.seconds(BASELINE)),
        )
        for batch in found
    ]  # fmt: skip

    def speedup(drawn: Sequence[tuple[float, ...]]) -> float:
        tokens, time, base_tokens, base_time = map(sum, zip(*drawn, strict=True))
        return (tokens / time) / (base_tokens / base_time)

    return list(interval(cells, speedup, seed))


def _by_category(
    name: str, found: list[BatchRun], measured: dict[str, Any], seed: int
) -> dict[str, Any]:
    rows = {}
    for category, row in measured["by_category"].items():
        members = [batch for batch in found if batch.category == category]
        rows[category] = {
            "tau": row["tau"],
            "tau_ci95": row["ci95"],
            "speedup": _speed(name, members, "total")[1],
            "speedup_ci95": _speedup_interval(name, members, seed),
            "num_prompts": row["num_prompts"],
        }
    return rows


def _tree(tree: Tree, texts: list[Generation]) -> dict[str, Any]:
    """A static shape with the share of passes that accepted each node."""
    counts = Counter(node for g in texts for path in g.paths for node in path)
    num_steps = max(1, sum(len(g.paths) for g in texts))
    rates = [1.0] + [counts[node] / num_steps for node in range(1, tree.num_nodes)]
    return {"parents": list(tree.parents), "ranks": list(tree.ranks), "acceptance": rates}


def _lossless(bench: Bench, methods: dict[str, Method], found: list[BatchRun]) -> dict[str, Any]:
    divergences = []
    prompts = [(batch, row) for batch in found for row in range(len(batch.prompts))]
    for index, (batch, row) in enumerate(prompts):
        expected = batch.runs[BASELINE][0][row].token_ids
        for name in methods:
            text = batch.runs[name][0][row].token_ids
            if text != expected:
                where = _divergence(bench.target, batch.prompts[row], expected, text)
                divergences.append({"prompt": index, "method": name, **where})
    differing = {found["prompt"] for found in divergences}
    return {
        "num_prompts": len(prompts),
        "num_equal": len(prompts) - len(differing),
        "first_divergences": divergences,
    }


@torch.no_grad()
def _divergence(
    target: Target, prompt: Prompt, expected: list[int], text: list[int]
) -> dict[str, Any]:
    """Where two texts part, and by how much the target preferred its choice there."""
    position = common_prefix(expected, text)
    output = target.read_text(prompt.token_ids + expected[:position])
    best, second = target.logits(output.hidden_states[0, -1]).float().topk(2).values.tolist()
    return {"position": position, "top2_margin": best - second}


def _spread(found: list[BatchRun], num_texts: int) -> list[tuple[BatchRun, int]]:
    """Prompts to show: the first of each category in turn."""
    by_category: dict[str, list[tuple[BatchRun, int]]] = {}
    for batch in found:
        members = by_category.setdefault(batch.category, [])
        members += [(batch, row) for row in range(len(batch.prompts))]
    longest = max(map(len, by_category.values()))
    rounds = [m[place] for place in range(longest) for m in by_category.values() if place < len(m)]
    return rounds[:num_texts]


def _coloured(
    index: int, batch: BatchRun, row: int, methods: dict[str, Method], target: Target
) -> dict[str, Any]:
    """A prompt's texts with the depth at which each token was accepted, 0 for the target's own."""
    texts, prompt = {}, batch.prompts[row]
    for name in methods:
        text = batch.runs[name][0][row]
        if text.steps or name == BASELINE:
            pieces = _pieces(target.tokenizer, text.token_ids)
            texts[name] = list(zip(pieces, _origins(text), strict=True))
    return {
        "prompt": index,
        "category": prompt.category,
        "turn": prompt.turn,
        "question": prompt.question,
        "methods": texts,
    }


def _origins(text: Generation) -> list[int]:
    depths = [0]
    for step in text.steps:
        depths += [*range(1, step.num_accepted + 1), 0][: step.num_emitted]
    return depths


def _pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """What each token adds to the text; a character split over tokens goes to its last one."""
    pieces, shown = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end])
        whole = end == len(token_ids) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        grown = text if whole and text.startswith(shown) else shown
        pieces.append(grown[len(shown) :])
        shown = grown
    return pieces
