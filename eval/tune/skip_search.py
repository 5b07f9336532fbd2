"""Search for the layers that the target can leave out when it drafts for itself.

Layers are given up one by one, each time the one that costs the least, and early exits are tried
beside that. A set is measured by the speed that it promises: the tokens per step that it would
have had on the target's own texts, over the measured cost of its passes. The best are replayed at
full depth, where the tokens per step are exactly those of decoding.

Source: SWIFT, arXiv 2410.06916, section 4, matches on the model's own text as the measure.
Differs: a greedy search and speed in place of Bayesian optimisation of the matches alone.

Letters: K draft tokens, n response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from conf.command.clock import timed
from conf.errors import InputError
from eval.decode.drafters.self_speculation import OwnText, early_exit
from eval.measure.replay import accepted_lengths, verify_steps
from eval.measure.stats import PromptSteps, tau
from heads.decoding.tree import Tree
from heads.target_model.model import Target, prefill

MAX_DRAFT_TOKENS = 8
PATIENCE = 3
"""Rounds without a faster set after which no more layers are given up."""
NUM_REPLAYED = 8
"""The best sets, which are replayed at full depth."""
NUM_REPEATS = 10


@dataclass(frozen=True)
class PassCosts:
    """Seconds of the target's passes over one text.

    Attributes:
        bare: one token without any decoder layer: embedding, norm and output head.
        verify: with all layers, by draft tokens: K + 1 tokens at index K. The first is plain
            decoding.
    """

    bare: float
    verify: tuple[float, ...]

    def draft(self, share: float) -> float:
        """One token through a share of the layers."""
        return self.bare + share * (self.verify[0] - self.bare)

    def speedup(self, tokens_per_step: float, num_tokens: int, share: float) -> float:
        """Against plain decoding, if chains of K tokens are drafted by a share of the layers."""
        step = num_tokens * self.draft(share) + self.verify[num_tokens]
        return tokens_per_step * self.verify[0] / step


@dataclass(frozen=True)
class SkipChoice:
    """A set of layers with its best chain.

    Attributes:
        skip: the layers left out, ascending.
        num_tokens: K of the best chain.
        agreement: share of response tokens whose first draft token is the target's own.
        tau: tokens per step.
        speedup: predicted, against plain decoding.
    """

    skip: tuple[int, ...]
    num_tokens: int
    agreement: float
    tau: float
    speedup: float

    @property
    def order(self) -> tuple[float, float, tuple[int, ...]]:
        """The better choice sorts first, and ties are no accident."""
        return (-self.speedup, -self.agreement, self.skip)


@dataclass(frozen=True)
class SkipSearch:
    """The result of a search.

    Attributes:
        choices: the best first, replayed at full depth.
        num_tried: sets of layers that were looked at.
    """

    choices: list[SkipChoice]
    num_tried: int


def search_layers(
    target: Target,
    texts: list[list[int]],
    prompt_lengths: list[int],
    costs: PassCosts | None = None,
) -> SkipSearch:
    """The layers to leave out; the same for the same texts and costs.

    At worst as many passes over every text as half the squared number of layers.

    Args:
        target: the target.
        texts: prompts with the target's own greedy responses.
        prompt_lengths: tokens of each text that are its prompt.
        costs: measured on the longest text unless given.

    Raises:
        InputError: there is only one layer.
    """
    if target.num_layers == 1:
        raise InputError(f"target.path={target.name}: its only layer cannot be left out")
    costs = costs or measure_costs(target, max(texts, key=len), MAX_DRAFT_TOKENS)
    with tqdm(desc="layers left out", unit="set") as bar:
        replays = _Replays(target, texts, prompt_lengths, costs, bar)
        tried = {choice.skip: choice for choice in _tried(replays, target)}
        best = sorted(tried.values(), key=lambda choice: choice.order)[:NUM_REPLAYED]
        choices = [replays.exact(choice.skip) for choice in best]
    return SkipSearch(sorted(choices, key=lambda choice: choice.order), len(tried))


def _tried(replays: "_Replays", target: Target) -> list[SkipChoice]:
    """Every set that is looked at, by what its first draft tokens promise."""
    num_layers = target.num_layers
    tried = [replays.estimate(early_exit(target, n)) for n in range(1, num_layers)]
    skip: tuple[int, ...] = ()
    fastest, idle = 0.0, 0
    for _ in range(num_layers - 1):
        sets = [tuple(sorted((*skip, layer))) for layer in set(range(num_layers)) - set(skip)]
        choices = [replays.estimate(layers) for layers in sorted(sets)]
        choices.sort(key=lambda choice: choice.order)
        tried += choices
        skip = choices[0].skip
        idle = 0 if choices[0].speedup > fastest else idle + 1
        fastest = max(fastest, choices[0].speedup)
        if idle == PATIENCE:
            break
    return tried


class _Replays:
    """Replays of drafts without sets of layers, on texts that were read once."""

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
        self.own = [OwnText(target, text, first) for text, first in pairs]
        self.responses = [text[first:] for text, first in pairs]

    def estimate(self, skip: tuple[int, ...]) -> SkipChoice:
        """Takes it that a chain goes on for as long as first draft tokens in a row are right."""
        rows = []
        for right in self._accepted(skip, 1):
            lengths = [0]
            for is_right in reversed(right):
                lengths.append(lengths[-1] + 1 if is_right else 0)
            rows.append(lengths[:0:-1])
        return self._best(skip, rows)

    def exact(self, skip: tuple[int, ...]) -> SkipChoice:
        """Replays what would be decoded."""
        return self._best(skip, self._accepted(skip, MAX_DRAFT_TOKENS))

    def _accepted(self, skip: tuple[int, ...], depth: int) -> list[list[int]]:
        """[text][n] draft tokens that a pass would have kept at each root."""
        self.bar.update()
        tree = Tree.chain(depth)
        drafts = [own.drafts(skip, depth).transpose(0, 1).tolist() for own in self.own]
        return [accepted_lengths(tree, *pair) for pair in zip(drafts, self.responses, strict=True)]

    def _best(self, skip: tuple[int, ...], accepted: list[list[int]]) -> SkipChoice:
        # The last token of a response has nothing after it to agree with.
        first = [length > 0 for row in accepted for length in row[:-1]]
        agreement = sum(first) / max(len(first), 1)
        share = 1 - len(skip) / self.target.num_layers
        choices = []
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            kept = [[min(number, length) for number in row] for row in accepted]
            per_step = tau([PromptSteps("", verify_steps(row, len(row))) for row in kept])
            speedup = self.costs.speedup(per_step, length, share)
            choices.append(SkipChoice(skip, length, agreement, per_step, speedup))
        return max(choices, key=lambda choice: choice.speedup)


def measure_costs(target: Target, token_ids: list[int], num_tokens: int) -> PassCosts:
    """Times interleaved passes behind a text, of which the fastest counts: other work only adds.

    Args:
        target: the target.
        token_ids: the text.
        num_tokens: draft tokens of the largest verify pass.
    """
    cache = target.new_cache(1)
    prefill(target, cache, [token_ids])

    def seconds(length: int, skip: Sequence[int] = ()) -> float:
        """Seconds of a pass over a chain behind the text, and of the choice of the next tokens."""
        ids = torch.full((1, length), token_ids[0], device=target.device)
        places = torch.arange(length, device=target.device)
        causal = places.unsqueeze(1) >= places

        def run() -> None:
            output = target.extend(cache, ids, causal[None], places[None], skip=skip)
            target.logits(output.hidden_states).argmax(-1).tolist()

        return timed(run, target.device)

    bare: list[float] = []
    verify: list[list[float]] = [[] for _ in range(num_tokens + 1)]
    for _ in range(NUM_REPEATS):
        bare.append(seconds(1, skip=early_exit(target, 0)))
        for length, samples in enumerate(verify, start=1):
            samples.append(seconds(length))
    return PassCosts(min(bare), tuple(map(min, verify)))
