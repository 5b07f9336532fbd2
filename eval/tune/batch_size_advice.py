"""Length of chains by batch size, and the size at which drafting stops paying."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.command.clock import Stopwatch
from conf.settings.measure import TreeSearchRun
from eval.decode.engine import DecodingBatch, NoDraft, Request
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.measure.measured_head import MeasuredHead
from eval.measure.measurement import Measurement
from eval.measure.prompts import Prompt
from eval.tune.step_costs import CostCurve, measure_step_costs
from eval.tune.tree_acceptance import StaticTreeReplay
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.target_model.model import Target

SIZES = (2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class BatchSizeAdvice:
    """Chains at one batch size.

    Attributes:
        batch_size: texts decoded together.
        predicted: speed-up of a chain per length, from 1.
        measured: measured speed-up per tried length.
    """

    batch_size: int
    predicted: list[float]
    measured: dict[int, float] = field(default_factory=dict)

    @property
    def fastest_length(self) -> int:
        """Return the length of the fastest chain, even if it does not pay."""
        return self.predicted.index(max(self.predicted)) + 1

    @property
    def best_length(self) -> int:
        """Return the number of tokens to draft; 0 if no chain pays."""
        return self.fastest_length if max(self.predicted) > 1 else 0


@dataclass(frozen=True)
class Advice:
    """Advice by rising batch size."""

    points: list[BatchSizeAdvice]

    @property
    def stops_paying(self) -> int | None:
        """Find the batch size from which no chain is predicted to pay; None if some always does."""
        largest = max((p.batch_size for p in self.points if p.best_length), default=0)
        return next((p.batch_size for p in self.points if p.batch_size > largest), None)

    def describe_advice(self) -> dict[str, Any]:
        """Return the advice for a results file."""
        return {
            "points": [asdict(point) | {"best_length": point.best_length} for point in self.points],
            "stops_paying_at_batch_size": self.stops_paying,
        }

    def print_advice(self, console: Console) -> None:
        """Print one row per batch size."""
        table = Table(title="Chains by batch size: speed-up while the whole batch goes on")
        for column in ("batch", "best length", "predicted", "measured"):
            table.add_column(column, justify="right")
        for point in self.points:
            lengths = point.measured or [point.fastest_length]
            table.add_row(
                str(point.batch_size),
                str(point.best_length),
                ", ".join(f"{n}: {point.predicted[n - 1]:.2f}" for n in lengths),
                ", ".join(f"{n}: {speedup:.2f}" for n, speedup in point.measured.items()) or "-",
            )
        console.print(table)
        stop = self.stops_paying
        console.print(
            "drafting pays at every batch size tried"
            if stop is None
            else f"drafting stops paying at batch size {stop}"
        )


def estimate_advice(measurement: Measurement, config: TreeSearchRun, context: list[int]) -> Advice:
    """Predict the best chain at each batch size, from acceptance and measured costs of passes.

    Args:
        measurement: measurement with one head.
        config: settings of the command.
        context: tokens of each text while times are measured.
    """
    head, target = measurement.head, measurement.target
    taus = compute_chain_taus(target, head, measurement.prompts, config.max_new_tokens)
    points = []
    for size in config.batch_sizes:
        lengths = 1, head.draft_head.max_chain_depth
        drafters = {length: make_chain_drafter(head, length, size) for length in lengths}
        curve, drafts = measure_step_costs(target, drafters, context, size, SIZES)
        points.append(BatchSizeAdvice(size, estimate_speedups(taus, curve, drafts)))
    return Advice(points)


def compute_chain_taus(
    target: Target, head: MeasuredHead, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[float]:
    """Compute tokens per verify pass of chains by length, from 1, by one replay of the longest."""
    longest = head.draft_head.max_chain_depth
    chain = Tree.make_chain(longest)
    texts = StaticTreeReplay.from_prompts(target, head.draft_head, prompts, max_new_tokens, chain)
    return [
        tau([PromptSteps("", steps) for steps in texts.replay_shape(Tree.make_chain(length))])
        for length in range(1, longest + 1)
    ]


def estimate_speedups(taus: list[float], curve: CostCurve, drafts: dict[int, float]) -> list[float]:
    """Estimate the speed-ups of chains by length, from 1.

    Args:
        taus: tokens per verify pass, by length.
        curve: seconds of passes.
        drafts: seconds of the shortest and the longest draft by length; seconds between are
            interpolated.
    """
    (first, start), (last, end) = min(drafts.items()), max(drafts.items())
    slope = (end - start) / max(1, last - first)
    return [
        tokens
        * curve.estimate_seconds(1)
        / (curve.estimate_seconds(length + 1) + start + slope * (length - first))
        for length, tokens in enumerate(taus, start=1)
    ]


def make_chain_drafter(head: MeasuredHead, length: int, num_texts: int) -> Drafter:
    """Make a drafter of greedy chains."""
    return replace(head, chain=Tree.make_chain(length)).make_drafter(
        "chain", GREEDY, [0] * num_texts
    )


def measure_advice(advice: Advice, measurement: Measurement, config: TreeSearchRun) -> Advice:
    """Measure the best chain at the smallest, the middle and the largest batch size.

    Args:
        advice: advice with predictions.
        measurement: measurement with one head, on other prompts than the predictions.
        config: settings of the command.
    """
    places = {0, len(advice.points) // 2, len(advice.points) - 1}
    prompts = [prompt.token_ids for prompt in measurement.prompts]
    points = []
    for place, point in enumerate(advice.points):
        size, length, speedup = point.batch_size, point.fastest_length, None
        if place in places and len(prompts) >= size:
            ends = range(size, len(prompts) + 1, size)
            batches = [prompts[end - size : end] for end in ends]
            speedup = _measure_speedup(measurement, config, batches, length)
        points.append(replace(point, measured={} if speedup is None else {length: speedup}))
    return Advice(points)


def _measure_speedup(
    measurement: Measurement, config: TreeSearchRun, batches: list[list[list[int]]], length: int
) -> float | None:
    """Measure the median speed-up of interleaved repeats; None if no batch outlived its prompts."""
    target, limit, ratios = measurement.target, config.max_new_tokens, []
    make_chains = partial(make_chain_drafter, measurement.head, length, len(batches[0]))
    for _ in range(config.num_repeats + 1):
        speeds = []
        for make in (NoDraft, make_chains):
            runs = [measure_full_batch(target, make(), batch, limit) for batch in batches]
            seconds = sum(took for _, took in runs)
            speeds.append(sum(done for done, _ in runs) / seconds if seconds else 0.0)
        plain, drafted = speeds
        if not plain:
            return None
        ratios.append(drafted / plain)
    return statistics.median(ratios[1:])  # the first is a warm-up


def measure_full_batch(
    target: Target, drafter: Drafter, prompts: list[list[int]], max_new_tokens: int
) -> tuple[int, float]:
    """Count tokens and seconds after the prompts, until the first text ends.

    A server would then start another text; here the others continue in a smaller batch.
    """
    requests = list(map(Request, prompts))
    batch = DecodingBatch(target, lambda _: drafter, requests, max_new_tokens, len(prompts))
    passes = batch.stream_tokens()
    next(passes)  # reads the prompts
    num_tokens, seconds, watch = 0, 0.0, Stopwatch(target.device)
    for new in passes:
        if len(new) < len(prompts):
            break
        num_tokens += sum(map(len, new.values()))
        seconds = watch.seconds()
    return num_tokens, seconds
