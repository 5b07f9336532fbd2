"""Choice of the next token: greedy, or sampled with separate randomness per text.

Letters: B texts, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance, which changes the distribution of the text.

    A draft token passes if its probability is above min(threshold, alpha * exp(-entropy of p)).

    Source: Medusa, arXiv 2401.10774, section 2.3.1; FasterDecoding/Medusa
    `medusa/model/utils.py`, `evaluate_posterior`, with the defaults of `medusa_generate`.
    """

    threshold: float = 0.09
    alpha: float = 0.3


@dataclass(frozen=True)
class Sampling:
    """Choice of the target's next token.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keeps the likeliest tokens until their probabilities sum to this; 1 keeps all.
        top_k: number of likeliest tokens to keep, with ties; None keeps all.
        typical: Medusa's lossy acceptance; None keeps the target's distribution.
        min_p: least probability of a kept token, as a share of the likeliest's; 0 keeps all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    typical: Typical | None = None
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Tell whether no token is drawn."""
        return self.temperature == 0

    @property
    def lossy(self) -> bool:
        """Tell whether the text may lose the target's distribution."""
        return self.typical is not None

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] float32 probabilities to sample from logits [..., V]; not for temperature 0.

        Source: transformers `generation/logits_process.py`: the temperature, top-k, top-p and min-p
            warpers in the order of `generate`.
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
    """One random generator per text, so that no text depends on another.

    Attributes:
        per_text: one generator per text.
        num_steps: calls of `next_step` so far, per text.
    """

    per_text: list[torch.Generator]
    num_steps: list[int]

    @classmethod
    def seeded(cls, seeds: Sequence[int], device: torch.device) -> "Generators":
        """Make a generator per text from its seed, which must be at least 0."""
        # The CPU's generator reads 32 bits of a seed, so higher bits are mixed in.
        mixed = (seed ^ (seed >> 32) * 0x9E3779B1 for seed in seeds)
        return cls([torch.Generator(device).manual_seed(seed) for seed in mixed], [0] * len(seeds))

    def rows(self, rows: list[int]) -> "Generators":
        """Generators of some texts."""
        steps = [self.num_steps[row] for row in rows]
        return Generators([self.per_text[row] for row in rows], steps)

    def take(self, row: int, other: "Generators") -> None:
        """Start the single text of another object in a row."""
        self.per_text[row], self.num_steps[row] = other.per_text[0], other.num_steps[0]

    def next_step(self) -> "Generators":
        """Make generators for one step.

        How many numbers a step draws for a text depends on the batch, but later draws must not.
        """
        self.num_steps = [num + 1 for num in self.num_steps]
        own = []
        for generator, number in zip(self.per_text, self.num_steps, strict=True):
            seed = (generator.initial_seed() * 1_000_003 + number) % (1 << 63)
            own.append(torch.Generator(generator.device).manual_seed(seed))
        return Generators(own, [0] * len(own))

    def uniform(self, num_nodes: int) -> Tensor:
        """[B, N] float32 in [0, 1), from generators of one step."""
        own = self.next_step().per_text
        return torch.stack([torch.rand(num_nodes, generator=g, device=g.device) for g in own])

    def exponential(self, like: Tensor) -> Tensor:
        """Exponential draws of the shape [B, ...] of `like`."""
        draws = torch.empty_like(like)
        for row, generator in zip(draws, self.per_text, strict=True):
            row.exponential_(generator=generator)
        return draws

    def sample(self, probs: Tensor) -> Tensor:
        """Sample [B] int64 from weights [B, V], which need not sum to 1.

        Unlike `torch.multinomial`, this never waits for the device.

        Source: gpt-fast `generate.py`, `multinomial_sample_one_no_sync`.
        """
        return (probs / self.exponential(probs)).argmax(-1)


def sample_tokens(logits: Tensor, sampling: Sampling, generators: Generators) -> Tensor:
    """Choose [B] int64 tokens from logits [B, V]."""
    if sampling.greedy:
        return logits.argmax(-1)
    return generators.sample(sampling.probabilities(logits))


def drafter_seeds(seeds: Sequence[int]) -> list[int]:
    """Seeds of a drafter's own draws, independent of the target's."""
    return [seed + (1 << 32) for seed in seeds]
