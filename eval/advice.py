"""How many tokens to draft at each batch size, and from which on drafting stops paying."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.schema_measure import TreeSearchRun
from eval.accept import GREEDY
from eval.bench import Bench, device_name
from eval.cost import draft_seconds, verify_curve
from eval.engine import Drafter, NoDraft, decode, decode_batch
from eval.heads import BenchHead
from eval.prompts import Prompt
from eval.stats import PromptSteps, tau
from heads.tree import Tree

SIZES = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Point:
    """One batch size.

    Attributes:
        batch_size: texts decoded together.
        predicted: speed-up of a chain per length, from 1.
        best_length: the best length, 0 if drafting does not pay.
        measured: speed-up really measured per length that was tried.
    """

    batch_size: int
    predicted: list[float]
    best_length: int
    measured: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """Points by rising batch size."""

    points: list[Point]

    @property
    def stops_paying(self) -> int | None:
        """The first batch size looked at from which on no chain is predicted to pay."""
        paying = [point.batch_size for point in self.points if point.best_length]
        return next(
            (p.batch_size for p in self.points if p.batch_size > max(paying, default=0)), None
        )

    def described(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "points": [asdict(point) for point in self.points],
            "stops_paying_at_batch_size": self.stops_paying,
        }

    def show(self, console: Console) -> None:
        """Prints a row per batch size."""
        table = Table(title="Chains by batch size: speed-up of decoding")
        for column in ("batch", "best length", "predicted", "measured"):
            table.add_column(column, justify="right")
        for point in self.points:
            best = max(point.predicted)
            measured = ", ".join(f"{k}: {v:.2f}" for k, v in point.measured.items())
            table.add_row(
                str(point.batch_size), str(point.best_length), f"{best:.2f}", measured or "-"
            )
        console.print(table)
        stop = self.stops_paying
        console.print(
            "drafting pays at every batch size looked at"
            if stop is None
            else f"drafting stops paying at batch size {stop}"
        )


def advise(bench: Bench, config: TreeSearchRun, prompts: Sequence[Prompt]) -> Advice:
    """Predictions from the acceptance of chains and the measured cost of passes."""
    head = bench.head
    longest = head.longest
    taus = [1.0]
    for length in range(1, longest + 1):
        steps = []
        for prompt in prompts[: config.num_advice_prompts]:
            drafter = chain(head, length, 1)
            text = decode(bench.target, drafter, prompt.token_ids, config.max_new_tokens)
            steps.append(PromptSteps(prompt.category, text.steps))
        taus.append(tau(steps))
    context = sorted(prompts, key=lambda p: len(p.token_ids))[len(prompts) // 2].token_ids
    points = []
    for batch_size in config.batch_sizes:
        device = device_name(bench.target.device)
        curve = verify_curve(bench.target, context, device, batch_size, SIZES)
        ends = []
        for length in (1, longest):
            make = partial(chain, head, length)
            ends.append(draft_seconds(bench.target, make, context, batch_size))
        predicted = []
        for length in range(1, longest + 1):
            share = (length - 1) / max(1, longest - 1)
            draft_s = ends[0] + (ends[1] - ends[0]) * share
            predicted.append(taus[length] * curve.at(1) / (curve.at(length + 1) + draft_s))
        best = max(range(longest), key=lambda place: predicted[place]) + 1
        points.append(Point(batch_size, predicted, best if predicted[best - 1] > 1 else 0))
    return Advice(points)


def chain(head: BenchHead, length: int, num_texts: int) -> Drafter:
    """A drafter of greedy chains."""
    return replace(head, chain=Tree.chain(length)).drafter("chain", GREEDY, [0] * num_texts)


def check(advice: Advice, bench: Bench, config: TreeSearchRun, prompts: Sequence[Prompt]) -> Advice:
    """Measures the smallest, the middle and the largest batch size at the length advised."""
    places = {0, len(advice.points) // 2, len(advice.points) - 1}
    points = []
    for place, point in enumerate(advice.points):
        measured = {}
        if place in places and len(prompts) >= point.batch_size:
            length = point.best_length or 1
            measured[length] = _speedup(bench, config, prompts[: point.batch_size], length)
        points.append(replace(point, measured=measured))
    return Advice(points)


def _speedup(bench: Bench, config: TreeSearchRun, prompts: Sequence[Prompt], length: int) -> float:
    """Of decoding one batch, prompts not counted: the median of interleaved repeats."""
    ids, ratios = [prompt.token_ids for prompt in prompts], []
    for _ in range(config.num_repeats + 1):
        seconds = []
        for drafter in (NoDraft(), chain(bench.head, length, len(ids))):
            texts = decode_batch(bench.target, drafter, ids, config.max_new_tokens)
            seconds.append(texts[0].times.decode)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])
