"""Search for the layers that the target can leave out when drafting for itself.

Layers are left out one by one, each time the one that costs least; early exits are tried too. A set
is judged by its predicted speed: its tokens per step on the target's own texts, over the measured
cost of its passes. The best sets are replayed at full depth, which gives exactly the tokens per
step of decoding.

Source: SWIFT, arXiv 2410.06916, section 4, with matches on the model's own text as measure.
Differs: greedy search for speed instead of Bayesian optimisation of matches.

Letters: K draft tokens, n answer tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from conf.command.clock import measure_seconds
from conf.errors import InputError
from eval.decode.drafters.self_speculation import ReplayText, list_skipped_layers
from eval.measure.acceptance_stats import PromptSteps, compute_share, tau
from eval.measure.replay import build_steps, compute_accepted_lengths
from heads.decoding.tree import Tree
from heads.target_model.model import Target, prefill

MAX_DRAFT_TOKENS = 8
PATIENCE = 3
"""Rounds without a faster set after which the search ends."""
NUM_REPLAYED = 8
"""Number of best sets to replay at full depth."""
NUM_REPEATS = 10


@dataclass(frozen=True)
class PassCosts:
    """Seconds of the target's passes over one text.

    Attributes:
        bare: pass of one token without decoder layers: embedding, norm and output head.
        verify: passes with all layers, by draft tokens: K + 1 tokens at index K; the first is plain
            decoding.
    """

    bare: float
    verify: tuple[float, ...]

    def estimate_draft_seconds(self, share: float) -> float:
        """Estimate the seconds of one token through a share of the layers."""
        return self.bare + share * (self.verify[0] - self.bare)

    def estimate_speedup(self, tokens_per_step: float, num_tokens: int, share: float) -> float:
        """Estimate the speed-up of chains of K tokens drafted by a share of the layers."""
        step = num_tokens * self.estimate_draft_seconds(share) + self.verify[num_tokens]
        return tokens_per_step * self.verify[0] / step


@dataclass(frozen=True)
class SkipChoice:
    """Set of layers with its best chain.

    Attributes:
        skip: layers to leave out, rising.
        num_tokens: draft tokens K of the best chain.
        agreement: share of answer tokens whose first draft token is the target's own.
        tau: tokens per step.
        speedup: predicted speed-up over plain decoding.
    """

    skip: tuple[int, ...]
    num_tokens: int
    agreement: float
    tau: float
    speedup: float

    @property
    def sort_key(self) -> tuple[float, float, tuple[int, ...]]:
        """Sort key: the better choice first, with fixed ties."""
        return (-self.speedup, -self.agreement, self.skip)


def search_skipped_layers(
    target: Target,
    texts: list[list[int]],
    prompt_lengths: list[int],
    costs: PassCosts | None = None,
) -> tuple[list[SkipChoice], int]:
    """Find the layers to leave out; the same for the same texts and costs.

    Takes at most half the squared number of layers in passes over every text.

    Args:
        target: target that drafts for itself.
        texts: prompts with the target's own greedy answers.
        prompt_lengths: prompt tokens of each text.
        costs: costs of passes; measured on the longest text by default.

    Returns:
        The best choices, the best first, replayed at full depth; and the number of sets tried.

    Raises:
        InputError: the target has only one layer.
    """
    if target.num_layers == 1:
        raise InputError(
            f"target.path={target.name}: has a single layer, which cannot be left out; leave out "
            "skip_layers"
        )
    costs = costs or measure_pass_costs(target, max(texts, key=len), MAX_DRAFT_TOKENS)
    with tqdm(desc="layers left out", unit="set") as bar:
        replays = _Replays(target, texts, prompt_lengths, costs, bar)
        tried = {choice.skip: choice for choice in _estimate_sets(replays, target)}
        best = sorted(tried.values(), key=lambda choice: choice.sort_key)[:NUM_REPLAYED]
        choices = [replays.judge_set(choice.skip, MAX_DRAFT_TOKENS) for choice in best]
    return sorted(choices, key=lambda choice: choice.sort_key), len(tried)


def _estimate_sets(replays: "_Replays", target: Target) -> list[SkipChoice]:
    """Estimate all sets of layers that the search tries, by their first draft tokens."""
    num_layers = target.num_layers
    tried = [replays.judge_set(list_skipped_layers(target, n), 1) for n in range(1, num_layers)]
    skip: tuple[int, ...] = ()
    fastest, idle = 0.0, 0
    for _ in range(num_layers - 1):
        sets = [tuple(sorted((*skip, layer))) for layer in set(range(num_layers)) - set(skip)]
        choices = [replays.judge_set(layers, 1) for layers in sorted(sets)]
        choices.sort(key=lambda choice: choice.sort_key)
        tried += choices
        skip = choices[0].skip
        idle = 0 if choices[0].speedup > fastest else idle + 1
        fastest = max(fastest, choices[0].speedup)
        if idle == PATIENCE:
            break
    return tried


class _Replays:
    """Replays of drafts without sets of layers, on texts read once."""

    def __init__(
        self,
        target: Target,
        texts: list[list[int]],
        prompt_lengths: list[int],
        costs: PassCosts,
        bar: "tqdm[None]",
    ) -> None:
        self.target, self.costs, self.bar = target, costs, bar
        pairs = list(zip(texts, prompt_lengths, strict=True))
        self.replay_texts = [ReplayText(target, text, first) for text, first in pairs]
        self.responses = [text[first:] for text, first in pairs]

    def judge_set(self, skip: tuple[int, ...], depth: int) -> SkipChoice:
        """Find the best chain of a set, by drafts of `depth` tokens below every root.

        With one token, chains are assumed to last while first draft tokens are right.
        """
        self.bar.update()
        tree, accepted = Tree.make_chain(depth), list[list[int]]()  # by text and root
        for text, response in zip(self.replay_texts, self.responses, strict=True):
            drafts = text.draft_all_places(skip, depth).transpose(0, 1).tolist()
            lengths = compute_accepted_lengths(tree, drafts, response)
            if depth == 1:
                for root in reversed(range(len(lengths) - 1)):
                    lengths[root] *= 1 + lengths[root + 1]
            accepted.append(lengths)
        # The last token of an answer has no next token to agree with.
        agreement = compute_share(length > 0 for row in accepted for length in row[:-1])
        share = 1 - len(skip) / self.target.num_layers
        choices = []
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            cut = [[min(number, length) for number in row] for row in accepted]
            per_step = tau([PromptSteps("", build_steps(row, len(row))) for row in cut])
            speedup = self.costs.estimate_speedup(per_step, length, share)
            choices.append(SkipChoice(skip, length, agreement, per_step, speedup))
        return max(choices, key=lambda choice: choice.speedup)


def measure_pass_costs(target: Target, token_ids: list[int], num_tokens: int) -> PassCosts:
    """Time interleaved passes after a text, and take the fastest, as other work only adds time.

    Args:
        target: target that is timed.
        token_ids: ids of the text.
        num_tokens: draft tokens of the largest verify pass.
    """
    cache = target.new_cache(1)
    prefill(target, cache, [token_ids])

    def seconds(length: int, skip: Sequence[int] = ()) -> float:
        """Time a pass over a chain after the text, with the choice of the next tokens."""
        ids = torch.full((1, length), token_ids[0], device=target.device)
        places = torch.arange(length, device=target.device)
        causal = places.unsqueeze(1) >= places

        def run() -> None:
            output = target.run_pending(cache, ids, causal[None], places[None], skip=skip)
            target.compute_logits(output.hidden_states).argmax(-1).tolist()

        return measure_seconds(run, target.device)

    bare: list[float] = []
    verify: list[list[float]] = [[] for _ in range(num_tokens + 1)]
    for _ in range(NUM_REPEATS):
        bare.append(seconds(1, skip=list_skipped_layers(target, 0)))
        for length, samples in enumerate(verify, start=1):
            samples.append(seconds(length))
    return PassCosts(min(bare), tuple(map(min, verify)))
