"""Choice of the next token: greedy, or sampled with separate randomness per text.

Letters: B texts, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.devices import to_device

GOLDEN, *FACTORS = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Constants of splitmix64, as signed numbers."""


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
    def is_greedy(self) -> bool:
        """Tell whether no token is drawn."""
        return self.temperature == 0

    @property
    def is_lossy(self) -> bool:
        """Tell whether the text may lose the target's distribution."""
        return self.typical is not None

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Compute probabilities [..., V] float32 to sample from logits [..., V].

        The temperature must be above 0.

        Source: transformers `generation/logits_process.py`: the temperature, top-k, top-p and min-p
            warpers in the order of `generate`.
        """
        assert not self.is_greedy
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


@dataclass(frozen=True)
class Generators:
    """Random numbers of each text, so that no text depends on another.

    Number i of a draw is a hash of the text's key, the draw's number and i. A hash needs nothing of
    the host, so a CUDA graph holds draws, and each replay draws anew. A draw of any size counts as
    one, so other texts of a batch, which set the sizes, change nothing.

    Attributes:
        keys: [B] int64.
        counts: [B] int64 draws so far, counted in place.
    """

    keys: Tensor
    counts: Tensor

    @classmethod
    def from_seeds(cls, seeds: Sequence[int], device: torch.device) -> "Generators":
        """Make the generator of each text from 64 bits of its seed, without waiting."""
        signed = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
        keys = hash_numbers(to_device(torch.tensor(signed, dtype=torch.int64), device) + GOLDEN)
        return cls(keys, torch.zeros_like(keys))

    def select_rows(self, rows: list[int]) -> "Generators":
        """Return the generators of some texts, in new memory."""
        index = to_device(rows, self.keys.device)
        return Generators(self.keys[index], self.counts[index])

    def insert_row(self, row: int, other: "Generators") -> None:
        """Insert the generator of the single text of another object into a row."""
        self.keys[row], self.counts[row] = other.keys[0], other.counts[0]

    def next_step(self) -> "Generators":
        """Make generators for one step, which counts as one draw.

        How many draws a step takes for a text may depend on the batch, but later draws must not.
        """
        return Generators(self._next_keys(), torch.zeros_like(self.counts))

    def draw_uniform(self, num_nodes: int) -> Tensor:
        """Draw [B, N] float32 in [0, 1)."""
        bits = self._draw_bits(num_nodes)
        return _shift_right(bits, 40, bits).float().mul_(2.0**-24)

    def draw_exponential(self, like: Tensor) -> Tensor:
        """Draw exponential float32 numbers above 0, of the shape [B, ...] of `like`."""
        # The weight with the smallest draw in proportion wins, so an unlikely token wins by a tiny
        # draw alone. A draw from 24 bits, as in `draw_uniform`, is 0 with a chance of 2^-24, and a
        # token of any weight would win by it. All 63 bits keep float32's relative precision down
        # to 2^-64. They are scaled to at most 1 - 2^-24, as log1p(-1) is infinite.
        bits = self._draw_bits(like.shape[1:].numel())
        draws = _shift_right(bits, 1, bits).float().add_(0.5)
        return draws.mul_((2.0**-24 - 1) * 2.0**-63).log1p_().neg_().view_as(like)

    def sample_indices(self, probs: Tensor) -> Tensor:
        """Sample [B] int64 from weights [B, V], which need not sum to 1.

        Unlike `torch.multinomial`, this never waits for the device.

        Source: gpt-fast `generate.py`, `multinomial_sample_one_no_sync`.
        """
        return (probs / self.draw_exponential(probs)).argmax(-1)

    def _draw_bits(self, num: int) -> Tensor:
        """Draw [B, num] int64, all bits random."""
        places = torch.arange(num, device=self.keys.device)
        return hash_numbers(torch.add(self._next_keys().unsqueeze(1), places, alpha=GOLDEN))

    def _next_keys(self) -> Tensor:
        """Compute the keys [B] int64 of the next draw, and count the draw."""
        keys = hash_numbers(torch.add(self.keys, self.counts, alpha=GOLDEN))
        self.counts.add_(1)
        return keys


NO_DRAWS = Generators(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
"""Generators of no text, where all choices are greedy."""


def sample_tokens(logits: Tensor, sampling: Sampling, generators: Generators) -> Tensor:
    """Choose [B] int64 tokens from logits [B, V]."""
    if sampling.is_greedy:
        return logits.argmax(-1)
    return generators.sample_indices(sampling.compute_probabilities(logits))


def drafter_seeds(seeds: Sequence[int]) -> list[int]:
    """Derive the seeds of a drafter's own draws, independent of the target's."""
    return [seed + (1 << 32) for seed in seeds]


def hash_numbers(numbers: Tensor) -> Tensor:
    """Hash int64 of any shape in place, one to one; close numbers get unrelated hashes.

    Products wrap around.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014; the factors
        are Stafford's variant 13, as in Vigna's `splitmix64.c`.
    """
    # For all shifts, as fresh memory costs a CPU more than the arithmetic.
    shifted = torch.empty_like(numbers)
    numbers.bitwise_xor_(_shift_right(numbers, 30, shifted)).mul_(FACTORS[0])
    numbers.bitwise_xor_(_shift_right(numbers, 27, shifted)).mul_(FACTORS[1])
    return numbers.bitwise_xor_(_shift_right(numbers, 31, shifted))


def _shift_right(numbers: Tensor, num_bits: int, out: Tensor) -> Tensor:
    # Shifts of int64 repeat the sign, which the mask removes.
    shifted = torch.bitwise_right_shift(numbers, num_bits, out=out)
    return shifted.bitwise_and_((1 << (64 - num_bits)) - 1)
