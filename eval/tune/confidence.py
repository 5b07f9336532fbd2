"""Calibration of a head's confidence, and the chance below which a chain is cut.

Sequential temperature scaling: depth by depth, a temperature is chosen such that of chains with a
chance of c to be accepted down to that depth, a share of c is.

Source: DSpark, arXiv 2607.05147. Differs: an offset beside each temperature. Greedy decoding keeps
the likeliest token more often than a head says, by about as much at every chance, and no
temperature moves a chance across 0.5. Letters: S steps, D depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.decode.engine import Step
from eval.tune.step_costs import CostCurve
from heads.decoding.head_drafter import Calibration

Floats = NDArray[np.float64]
NUM_BINS = 10
"""Number of bins of chances, equally wide; thousands of steps resolve errors of hundredths."""
TEMPERATURES = sorted(np.geomspace(1 / 3, 3, 41).tolist(), key=lambda t: abs(np.log(t)))
"""Temperatures to try, the smallest change first. Far higher ones give every chain the same chance,
which is right on average but useless."""
OFFSETS = sorted((n / 10 for n in range(-20, 21)), key=abs)
THRESHOLDS = (0.01, 0.02, 0.05, *(n / 10 for n in range(1, 10)), 0.95)
"""Thresholds to try for the chance below which nothing is drafted."""


@dataclass(frozen=True)
class ChainSteps:
    """Steps of whole chains, with the head's confidence and the acceptance.

    Attributes:
        logits: [S, D] confidence in each token.
        accepted: [S] number of accepted draft tokens.
        tested: [S] number of depths that could be tested, before the end of the text or window.
        emitted: [S] number of tokens from the step.
    """

    logits: Floats
    accepted: NDArray[np.int64]
    tested: NDArray[np.int64]
    emitted: NDArray[np.int64]

    @classmethod
    def from_logits(
        cls,
        logits: Sequence[Sequence[float]],
        steps: Sequence[Step],
        drafted: Sequence[int],
        depth: int,
    ) -> "ChainSteps":
        """Build steps with the logits of their chains, which the head's window may cut."""
        filled = [[*row, *[-np.inf] * (depth - len(row))] for row in logits]
        pairs = zip(steps, drafted, strict=True)
        return cls(
            np.array(filled, float).reshape(len(steps), depth),
            np.array([step.num_accepted for step in steps], int),
            np.array([min(step.num_left, number) for step, number in pairs], int),
            np.array([step.num_emitted for step in steps], int),
        )

    def compute_path_probabilities(self, calibration: Calibration) -> Floats:
        """Compute the chances [S, D] that chains are accepted down to each depth."""
        scaled = self.logits / calibration.temperatures + calibration.offsets
        return sigmoid(scaled).cumprod(1)

    def mask_accepted(self, depth: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Mark [S] the steps that tested a depth, from 1, and which of them accepted it."""
        tested = self.tested >= depth
        return tested, self.accepted[tested] >= depth


def sigmoid(logits: Floats) -> Floats:
    """Compute the chances of logits, even far from 0."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


def _sum_bins(chances: Floats, accepted: NDArray[np.bool_]) -> tuple[Floats, ...]:
    """Sum number, chances and accepted ones per bin."""
    places = np.minimum((chances * NUM_BINS).astype(int), NUM_BINS - 1)
    weights = (np.ones_like(chances), chances, accepted.astype(float))
    return tuple(np.bincount(places, weight, NUM_BINS).astype(float) for weight in weights)


def build_reliability_bins(
    chances: Floats, accepted: NDArray[np.bool_]
) -> list[tuple[float, float, int]]:
    """List mean chance, share accepted and number of each non-empty bin.

    Args:
        chances: [n] chances that chains are accepted.
        accepted: [n] whether they were.
    """
    rows = zip(*_sum_bins(chances, accepted), strict=True)
    return [(float(c / n), float(k / n), int(n)) for n, c, k in rows if n]


def compute_ece(chances: Floats, accepted: NDArray[np.bool_]) -> float:
    """Compute the expected calibration error: the mean distance of chance and share over bins.

    Bins weigh by their numbers.
    """
    _, chance, share = _sum_bins(chances, accepted)
    return float(np.abs(chance - share).sum()) / max(1, len(chances))


def fit_calibration(steps: ChainSteps, offsets: Sequence[float] = OFFSETS) -> Calibration:
    """Fit temperature and offset depth by depth; a depth that no step tested stays unchanged."""
    fitted: list[tuple[float, float]] = []
    path = np.ones(len(steps.logits))
    for depth, logits in enumerate(steps.logits.T, start=1):
        tested, accepted = steps.mask_accepted(depth)
        tried = list(product(TEMPERATURES, offsets))
        errors = [
            compute_ece(path[tested] * sigmoid(logits[tested] / t + o), accepted) for t, o in tried
        ]
        fitted.append(tried[int(np.argmin(errors))])
        path = path * sigmoid(logits / fitted[-1][0] + fitted[-1][1])
    return Calibration(tuple(t for t, _ in fitted), tuple(o for _, o in fitted))


def by_depth(steps: ChainSteps, calibration: Calibration) -> list[tuple[Floats, NDArray[np.bool_]]]:
    """List per depth the chance in every step that tested it, and whether it was accepted."""
    chances, rows = steps.compute_path_probabilities(calibration), []
    for depth in range(1, chances.shape[1] + 1):
        tested, accepted = steps.mask_accepted(depth)
        rows.append((chances[tested, depth - 1], accepted))
    return rows


@dataclass(frozen=True)
class ChainCosts:
    """Seconds of drafts and passes over one text on this machine.

    Attributes:
        curve: seconds of passes.
        whole: seconds of chains of 1 token, 2, and so on, without a confidence.
        cut: seconds of chains that end after 0 tokens, 1, and so on to all.
    """

    curve: CostCurve
    whole: list[float]
    cut: list[float]


@dataclass(frozen=True)
class ChainForecast:
    """Forecast for other chains from the steps of whole ones.

    Attributes:
        threshold: threshold of the cut; None for whole chains.
        most_tokens: largest number of draft tokens per step.
        num_drafted: draft tokens per step.
        share_accepted: share of draft tokens that are accepted.
        tau: tokens per step.
        tokens_per_s: tokens per second, without prompts.
    """

    threshold: float | None
    most_tokens: int
    num_drafted: float
    share_accepted: float
    tau: float
    tokens_per_s: float

    @classmethod
    def from_whole_chains(
        cls, steps: ChainSteps, num_tokens: int, costs: ChainCosts
    ) -> "ChainForecast":
        """Forecast whole chains of at most the recorded length."""
        lengths = np.full(len(steps.logits), num_tokens)
        return cls._from_lengths(steps, lengths, np.array([np.nan, *costs.whole]), costs.curve)

    @classmethod
    def from_cut_chains(
        cls, steps: ChainSteps, calibration: Calibration, threshold: float, costs: ChainCosts
    ) -> "ChainForecast":
        """Forecast cut chains."""
        lengths = (steps.compute_path_probabilities(calibration) >= threshold).sum(1)
        uncut = cls._from_lengths(steps, lengths, np.array(costs.cut), costs.curve)
        return replace(uncut, threshold=threshold)

    @classmethod
    def _from_lengths(
        cls, steps: ChainSteps, lengths: NDArray[np.int64], drafts: Floats, curve: CostCurve
    ) -> "ChainForecast":
        """Replay steps, given the seconds of drafts per length."""
        passes = np.array(
            [curve.estimate_seconds(length + 1) for length in range(steps.logits.shape[1] + 1)]
        )
        accepted = np.minimum(steps.accepted, lengths)
        emitted = np.minimum(steps.emitted, accepted + 1)
        return cls(
            threshold=None,
            most_tokens=int(lengths.max()),
            num_drafted=float(lengths.mean()),
            share_accepted=float(accepted.sum() / max(1, lengths.sum())),
            tau=float(emitted.mean()),
            tokens_per_s=float(emitted.sum() / (drafts[lengths] + passes[lengths]).sum()),
        )


@dataclass(frozen=True)
class FixedLength(Calibration):
    """Ends every chain after a fixed number of tokens, to time that."""

    num_tokens: int = 0

    @classmethod
    def from_num_tokens(cls, num_tokens: int) -> "FixedLength":
        """End chains after `num_tokens`."""
        return cls((), (), 0.5, num_tokens)

    def compute_chance(self, logits: Tensor, depth: int) -> Tensor:
        """Return [B] ones down to the last token, then zeros."""
        return torch.full_like(logits, float(depth <= self.num_tokens))
