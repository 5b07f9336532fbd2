"""Acceptance lengths as other tools define them: what they count, and how they average.

Every figure is a mean of ratios. One text has n verify passes that emit E tokens; d passes have
drafts, of which A tokens are accepted:

    passes       E / n              tau: what drafting saves, in passes of the target
    drafts       (d + A) / d        vLLM: its bonus token counts even where the text ends before it
    first_token  (E + 1) / n        SGLang: with the token that the prompt's pass gives
    first_pass   (E + 1) / (n + 1)  Model-Optimizer: with that pass as well

Pooled figures divide sums over all texts. The others average the ratios of turns, or of dialogues
(sums over their turns). Draft tokens beyond the end of a text are not counted here; vLLM and SGLang
count those that a text's last pass accepts.

Sources: vLLM 0.32 `benchmarks/serve.py`, `v1/spec_decode/metrics.py`; SGLang
`managers/tokenizer_manager.py`; Model-Optimizer `examples/specdec_bench/specdec_bench/metrics`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Ratio = tuple[int, int]
LENGTH_DEFINITIONS = {
    "passes": "tau: tokens per pass",
    "drafts": "1 + accepted / drafts, as vLLM",
    "first_token": "with the prompt's token, as SGLang",
    "first_pass": "with its pass too, as Model-Optimizer",
}
MEANS = ("pooled", "turns", "dialogues")
FEWEST = 725
"""Tokens of the shortest prompts with a length name; above, the nearest power of two from 1,024 is
used."""


@dataclass(frozen=True)
class PassCounts:
    """Sums of a text, from which its acceptance lengths follow.

    Attributes:
        dialogue: dialogue of the text.
        num_passes: verify passes.
        num_drafts: verify passes with drafts.
        num_accepted: accepted draft tokens.
        num_emitted: tokens of the text after the first.
    """

    dialogue: int
    num_passes: int
    num_drafts: int
    num_accepted: int
    num_emitted: int

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "PassCounts":
        """Make the sums of a row of `PromptSteps.row`."""
        n = len(row["emitted"])
        # Passes without draft tokens are no drafts; if these were not counted, all passes are.
        drafts = sum(map(bool, row["drafted"])) if row["drafted"] else n
        return cls(row["dialogue"], n, drafts, sum(row["accepted"]), sum(row["emitted"]))

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Numerator and denominator by count."""
        drafts, n, emitted = self.num_drafts, self.num_passes, self.num_emitted
        return {
            "passes": (emitted, n),
            "drafts": (drafts + self.num_accepted, drafts),
            "first_token": (emitted + 1, n),
            "first_pass": (emitted + 1, n + 1),
        }


def compute_acceptance_lengths(texts: Sequence[PassCounts]) -> dict[str, dict[str, float | None]]:
    """All counts under all means; None if nothing was counted."""
    return {count: _compute_means(count, texts) for count in LENGTH_DEFINITIONS}


def compute_mean_acceptance_length(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """1 + accepted / drafts, as vLLM prints it."""
    return _compute_means("drafts", list(map(PassCounts.from_row, rows)))["pooled"]


def print_acceptance_lengths(
    lengths: dict[str, dict[str, float | None]], console: Console, whose: str = "the chain"
) -> None:
    """Print a row per count and a column per mean."""
    table = Table(title=f"Acceptance length of {whose}, as others define it")
    table.add_column("counted")
    for name in ("pooled", "mean over turns", "over dialogues"):
        table.add_column(name, justify="right")
    for count, means in lengths.items():
        row = (means[mean] for mean in MEANS)
        table.add_row(
            LENGTH_DEFINITIONS[count], *("-" if each is None else f"{each:.3f}" for each in row)
        )
    console.print(table)


def _compute_means(count: str, texts: Sequence[PassCounts]) -> dict[str, float | None]:
    turns = [text.ratios[count] for text in texts]
    dialogues: dict[int, list[Ratio]] = {}
    for text, ratio in zip(texts, turns, strict=True):
        dialogues.setdefault(text.dialogue, []).append(ratio)
    return {
        "pooled": _average_ratios([_sum_ratios(turns)]),
        "turns": _average_ratios(turns),
        "dialogues": _average_ratios(map(_sum_ratios, dialogues.values())),
    }


def _sum_ratios(ratios: Sequence[Ratio]) -> Ratio:
    return sum(above for above, _ in ratios), sum(below for _, below in ratios)


def _average_ratios(ratios: Iterable[Ratio]) -> float | None:
    """Average ratios. A text of one token has no pass, and engines give no figure for it."""
    values = [above / below for above, below in ratios if below]
    return sum(values) / len(values) if values else None


def count_accepted_histogram(rows: Iterable[Mapping[str, Any]], depth: int) -> list[int]:
    """[depth + 1] numbers of passes by accepted draft tokens, without bonus tokens."""
    passes = [0] * (depth + 1)
    for row in rows:
        for accepted in row["accepted"]:
            passes[accepted] += 1
    return passes


def format_length_bucket(prompt_tokens: int) -> str:
    """Name the length of a prompt by the nearest power of two: `8k` for 5,793 to 11,585 tokens."""
    if prompt_tokens < FEWEST:
        return "<1k"
    return f"{2 ** round(math.log2(prompt_tokens) - 10)}k"
