"""The choice of a next token: greedy, or sampled, each text with randomness of its own.

Letters: B texts, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance, which changes the distribution of the text.

    A draft token passes if p of it is above min(threshold, alpha * exp(-entropy of p)).

    Source: Medusa, arXiv 2401.10774, section 2.3.1; FasterDecoding/Medusa
    `medusa/model/utils.py`, `evaluate_posterior`, with the defaults of `medusa_generate`.
    """

    threshold: float = 0.09
    alpha: float = 0.3


@dataclass(frozen=True)
class Sampling:
    """The choice of the target's next token.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: least probability that the likeliest tokens kept must cover; 1 keeps all.
        top_k: likeliest tokens kept, ties with the last of them included; None keeps all.
        typical: accept drafts by Medusa's lossy rule; None keeps the target's distribution.
        min_p: least probability of a token kept, as a share of the likeliest's; 0 keeps all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    typical: Typical | None = None
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Nothing is drawn."""
        return self.temperature == 0

    @property
    def lossy(self) -> bool:
        """The text may not be distributed as the target's own."""
        return self.typical is not None

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] float32, what [..., V] logits are sampled by; not for temperature 0.

        Source: transformers `generation/logits_process.py`, its temperature, top-k, top-p and
        min-p warpers in the order in which `generate` applies them.
        """
        assert not self.greedy
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            tail = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[..., -1] = False
            scores = scores.masked_fill(tail.scatter(-1, order, tail), -torch.inf)
        if self.min_p > 0:
            probs = scores.softmax(-1)
            least = self.min_p * probs.amax(-1, keepdim=True)
            scores = scores.masked_fill(probs < least, -torch.inf)
        return scores.softmax(-1)


GREEDY = Sampling()


@dataclass
class Generators:
    """The randomness of texts, a generator each, so that no text depends on another.

    Attributes:
        per_text: one generator per text.
        num_steps: calls of `next_step` so far, of each text.
    """

    per_text: list[torch.Generator]
    num_steps: list[int]

    @classmethod
    def seeded(cls, seeds: Sequence[int], device: torch.device) -> "Generators":
        """Make a generator for each text from its seed, which is at least 0."""
        # The CPU's generator reads 32 bits of a seed, so the ones above are mixed into them.
        mixed = (seed ^ (seed >> 32) * 0x9E3779B1 for seed in seeds)
        return cls([torch.Generator(device).manual_seed(seed) for seed in mixed], [0] * len(seeds))

    def rows(self, rows: list[int]) -> "Generators":
        """The generators of some texts."""
        steps = [self.num_steps[row] for row in rows]
        return Generators([self.per_text[row] for row in rows], steps)

    def take(self, row: int, other: "Generators") -> None:
        """A row goes on with the one text of others."""
        self.per_text[row], self.num_steps[row] = other.per_text[0], other.num_steps[0]

    def next_step(self) -> "Generators":
        """Generators of one step alone.

        How much a step draws for a text depends on the other texts of a batch, and what is drawn
        later must not.
        """
        self.num_steps = [num + 1 for num in self.num_steps]
        own = []
        for generator, number in zip(self.per_text, self.num_steps, strict=True):
            seed = (generator.initial_seed() * 1_000_003 + number) % (1 << 63)
            own.append(torch.Generator(generator.device).manual_seed(seed))
        return Generators(own, [0] * len(own))

    def uniform(self, num_nodes: int) -> Tensor:
        """[B, N] float32 in [0, 1), of a step of their own."""
        own = self.next_step().per_text
        return torch.stack([torch.rand(num_nodes, generator=g, device=g.device) for g in own])

    def exponential(self, like: Tensor) -> Tensor:
        """Exponential draws of the shape [B, ...] of `like`."""
        draws = torch.empty_like(like)
        for row, generator in zip(draws, self.per_text, strict=True):
            row.exponential_(generator=generator)
        return draws

    def sample(self, probs: Tensor) -> Tensor:
        """[B] int64 sampled from [B, V], which need not add up to 1.

        Unlike `torch.multinomial` it never waits for the device.

        Source: gpt-fast `generate.py`, `multinomial_sample_one_no_sync`.
        """
        return (probs / self.exponential(probs)).argmax(-1)


def sample_tokens(logits: Tensor, sampling: Sampling, generators: Generators) -> Tensor:
    """[B] int64, one token each by [B, V] logits."""
    if sampling.greedy:
        return logits.argmax(-1)
    return generators.sample(sampling.probabilities(logits))


def drafter_seeds(seeds: Sequence[int]) -> list[int]:
    """Seeds of a drafter's own draws, which must not follow what the target draws."""
    return [seed + (1 << 32) for seed in seeds]
