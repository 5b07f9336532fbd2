"""Draws of each text: a hash of its seed, of the draw's number and of the place in the draw."""

import math

import pytest
import torch
from torch import Tensor

from heads.decoding.sampling import Generators, drafter_seeds, hash_numbers

CPU = torch.device("cpu")
V = 7


def seeded(num_texts: int, first: int = 0) -> Generators:
    return Generators.from_seeds(range(first, first + num_texts), CPU)


def test_mix_is_splitmix64() -> None:
    """The first numbers of `splitmix64.c` after the seed 1234567, then both ends of int64."""
    golden = 0x9E3779B97F4A7C15
    states = [*(1234567 + golden * step for step in (1, 2, 3)), 0, 1, 1 << 63, (1 << 64) - 1]
    signed = torch.tensor([(s + (1 << 63)) % (1 << 64) - (1 << 63) for s in states])
    assert [number % (1 << 64) for number in hash_numbers(signed).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
        0, 6238072747940578789, 2720858781877447050, 13029008266876403067,
    ]  # fmt: skip


# Bits of a draw's first places, by seed and number of the draw, computed with Python's integers:
# mix(mix(mix(seed + golden) + golden * draw) + golden * place), of products modulo 2^64.
BITS = {
    (0, 0): [0x33FE8BD4F9C57863, 0x568A9B0B1A2C05EC, 0x44E5B8B147EF718B, 0x458563AB55521133],
    (0, 1): [0xB49AB477BB8685E2, 0x238275BC38FCBE91, 0xF89A2566B5822C54, 0x47200E1D9780FA44],
    (3, 0): [0xBEB1411BFB12A3D5, 0xA2D598ABF61FF95E, 0xF3ECC9BC88C7FF2A, 0x8C3FC965E7F4F937],
    (3, 1): [0x67C6D8AB15A743BD, 0x546F36061B6B1313, 0x0BC67BA2066253E9, 0xEA03772AE4951047],
    ((1 << 32) + 3, 0): [
        0x42E68CCE6D749502, 0x9E5C307FB0DA787A, 0xBBE95B25F1E0F8B6, 0x3ECED927537821B7,
    ],
    ((1 << 32) + 3, 1): [
        0x000C27A587CE7097, 0x32F3650501094382, 0x19ACE705151F1A80, 0x8F3600DF538B3F2D,
    ],
    ((1 << 64) - 1, 0): [
        0x179F01F0D2FBA97A, 0x695058899520CA9D, 0x2C4E71FF4DF252D1, 0x1A9CCD1AD1B40609,
    ],
    ((1 << 64) - 1, 1): [
        0x595CEC62B2AD5E2A, 0xFC042709560421DA, 0x493384625F4330A7, 0x912E647564AED866,
    ],
}  # fmt: skip


def test_what_a_seed_draws_is_fixed() -> None:
    """Or texts sampled by another version of this could not be had again."""
    seeds = list(dict.fromkeys(seed for seed, _ in BITS))
    uniform, exponential = Generators.from_seeds(seeds, CPU), Generators.from_seeds(seeds, CPU)
    for number in (0, 1):
        rows = [BITS[seed, number] for seed in seeds]
        found = uniform.draw_uniform(4) * 2**24
        assert found.tolist() == [[bits >> 40 for bits in row] for row in rows]
        expected = [[-math.log1p(-(bits >> 1) / 2**63) for bits in row] for row in rows]
        found = exponential.draw_exponential(torch.empty(len(seeds), 2, 2)).flatten(1)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    assert drafter_seeds([0, 5]) == [4294967296, 4294967301]


def test_seeds_that_differ_in_any_bit_draw_differently() -> None:
    seeds = [1, *(1 ^ (1 << bit) for bit in range(64))]
    generators = Generators.from_seeds(seeds, CPU)
    assert len(generators.draw_uniform(1).unique()) == 65
    assert len(generators.sample_indices(torch.ones(65, 100_000)).unique()) == 65


def test_texts_draw_the_same_alone_and_in_a_batch() -> None:
    probs = torch.rand(3, V, generator=torch.Generator().manual_seed(0))
    together, alone = seeded(3, first=7), [seeded(1, first=7 + text) for text in range(3)]
    for _ in range(2):
        assert torch.equal(
            together.draw_uniform(5), torch.cat([one.draw_uniform(5) for one in alone])
        )
        sampled = [one.sample_indices(row) for one, row in zip(alone, probs.split(1), strict=True)]
        assert torch.equal(together.sample_indices(probs), torch.cat(sampled))
        whole = together.draw_exponential(torch.empty(3, 3, 33))
        parts = [one.draw_exponential(torch.empty(1, 3, 33)) for one in alone]
        assert torch.equal(whole, torch.cat(parts))
    rest = together.select_rows([2, 0])
    together.draw_uniform(1)  # of which the others know nothing
    assert torch.equal(
        rest.draw_uniform(4), torch.cat([alone[2].draw_uniform(4), alone[0].draw_uniform(4)])
    )
    rest.insert_row(1, alone[1])
    assert torch.equal(
        rest.draw_uniform(4), torch.cat([alone[2].draw_uniform(4), alone[1].draw_uniform(4)])
    )


def test_what_is_drawn_later_does_not_depend_on_the_size_of_a_draw() -> None:
    probs = torch.rand(3, V, generator=torch.Generator().manual_seed(0))
    small, large, drawn = seeded(3), seeded(3), []
    for _ in range(3):
        drawn.append(small.draw_uniform(4))
        assert torch.equal(large.draw_uniform(40)[:, :4], drawn[-1])
        assert torch.equal(small.sample_indices(probs), large.sample_indices(probs))
    assert len(torch.cat(drawn).unique()) == 3 * 3 * 4  # every draw is new


def test_what_is_drawn_later_does_not_depend_on_how_often_a_step_draws() -> None:
    often, once, steps = seeded(3), seeded(3), []
    for _ in range(3):
        step = often.next_step()
        steps += [step.draw_uniform(4) for _ in range(5)]
        assert torch.equal(once.next_step().draw_uniform(4), steps[-5])
    assert torch.equal(often.draw_uniform(4), once.draw_uniform(4))
    # And each draw of a step is another one than those of the text.
    assert len(torch.cat([*steps, seeded(3).draw_uniform(4)]).unique()) == 3 * 4 * 16


def test_keys_stay_in_place_and_counts_rise_there() -> None:
    """As captured graphs read and write them."""
    generators = seeded(2)
    places = generators.keys.data_ptr(), generators.counts.data_ptr()
    generators.draw_uniform(3)
    generators.sample_indices(torch.ones(2, V))
    generators.next_step()
    assert generators.counts.tolist() == [3, 3]
    generators.insert_row(1, seeded(1, first=9))
    assert generators.counts.tolist() == [3, 0]
    assert (generators.keys.data_ptr(), generators.counts.data_ptr()) == places


def test_as_many_texts_as_generators_draw() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size 14"):
        seeded(2).draw_exponential(torch.ones(3, V))


NUM_DRAWS = 1 << 20


def is_mean(draws: Tensor, expected: float, deviation: float) -> bool:
    """Says whether a mean is within five standard errors of what is expected."""
    error = abs(float(draws.double().mean()) - expected)
    return error < 5 * deviation / math.sqrt(draws.numel())


def test_uniform_draws_are_uniform() -> None:
    draws = seeded(64).draw_uniform(NUM_DRAWS // 64)
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert is_mean(draws, 0.5, math.sqrt(1 / 12))
    assert is_mean((draws - 0.5) ** 2, 1 / 12, math.sqrt(1 / 180))
    shares = (draws.flatten() * 100).long().bincount(minlength=100) / NUM_DRAWS
    assert (shares - 0.01).abs().max() < 5 * math.sqrt(0.01 * 0.99 / NUM_DRAWS)


def test_draws_close_to_each_other_have_nothing_in_common() -> None:
    """Of neighbouring seeds, of one draw after the other, and of places side by side."""
    generators = seeded(300)
    draws = torch.stack([generators.draw_uniform(100) for _ in range(100)]) - 0.5
    for dim, size in enumerate(draws.shape):
        ahead, behind = draws.narrow(dim, 1, size - 1), draws.narrow(dim, 0, size - 1)
        assert is_mean(ahead * behind, 0.0, 1 / 12)


def test_exponential_draws_are_exponential_down_to_the_smallest() -> None:
    whole = seeded(2).draw_exponential(torch.empty(2, 1 << 20))
    assert is_mean(whole, 1.0, 1.0)
    assert is_mean((whole - 1) ** 2, 1.0, math.sqrt(8))
    for bound in (4.0, 1.0, 2**-4, 2**-10, 2**-20):
        chance = -math.expm1(-bound)
        assert is_mean(whole < bound, chance, math.sqrt(chance * (1 - chance)))
    small = whole[whole < 2**-10]
    # Of multiples of 2^-24, 0 among them, one in sixteen would be drawn twice.
    assert len(small.unique()) > 0.99 * len(small) > 1700
    assert float(small.min()) > 0


def test_the_smallest_and_the_largest_exponential_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither 0 nor infinite: weights of 0 over them must stay 0, others above."""
    bits = torch.tensor([[0, 1, 2, 1 << 40, -1]])
    monkeypatch.setattr(Generators, "_draw_bits", lambda _, num: bits[:, :num])
    found = seeded(1).draw_exponential(torch.empty(1, 5))
    expected = [[2.0**-64, 2.0**-64, 1.5 * 2.0**-63, 2.0**-24, 24 * math.log(2)]]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


def test_tokens_are_sampled_by_their_weights() -> None:
    """Total variation of n draws of K tokens: Jensen and McDiarmid, wrong once in a million."""
    weights = torch.tensor([5.0, 0.0, 2.5, 1.25, 1.0, 0.25])  # which need not sum to 1
    generators, num_texts, counts = seeded(50_000), 50_000, torch.zeros(6)
    for _ in range(4):
        counts += generators.sample_indices(weights.expand(num_texts, -1)).bincount(minlength=6)
    n = 4 * num_texts
    distance = float((counts / n - weights / 10).abs().sum()) / 2
    assert distance < math.sqrt(5 / n) / 2 + math.sqrt(math.log(1e6) / (2 * n))
    assert counts[1] == 0
