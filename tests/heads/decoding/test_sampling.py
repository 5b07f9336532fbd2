"""Draws of each text: a hash of its seed, of the draw's number and of the place in the draw."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from heads.decoding.sampling import Generators, drafter_seeds, hash_numbers

CPU = torch.device("cpu")
GOLDEN = 0x9E3779B97F4A7C15
V = 7


def seeded(num_texts: int, first: int = 0) -> Generators:
    return Generators.from_seeds(range(first, first + num_texts), CPU)


def test_mix_is_splitmix64() -> None:
    """The first numbers of `splitmix64.c` after the seed 1234567, then both ends of int64."""
    states = [*(1234567 + GOLDEN * step for step in (1, 2, 3)), 0, 1, 1 << 63, (1 << 64) - 1]
    signed = torch.tensor([(s + (1 << 63)) % (1 << 64) - (1 << 63) for s in states])
    assert [number % (1 << 64) for number in hash_numbers(signed).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
        0, 6238072747940578789, 2720858781877447050, 13029008266876403067,
    ]  # fmt: skip


def mixed(number: int) -> int:
    """The same of one number in Python's integers, of products modulo 2^64."""
    number %= 1 << 64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    number = (number ^ number >> 27) * 0x94D049BB133111EB % (1 << 64)
    return number ^ number >> 31


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=3), st.integers(0, 2))
@example([1, *(1 ^ (1 << bit) for bit in range(64))], 1)
def test_what_a_seed_draws_is_fixed(seeds: list[int], number: int) -> None:
    """Or texts sampled by another version of this could not be had again."""
    uniform, exponential = Generators.from_seeds(seeds, CPU), Generators.from_seeds(seeds, CPU)
    for _ in range(number):
        uniform.draw_uniform(1)
        exponential.draw_uniform(1)
    of_draw = [mixed(mixed(seed + GOLDEN) + GOLDEN * number) for seed in seeds]
    rows = [[mixed(key + GOLDEN * place) for place in range(4)] for key in of_draw]
    found = uniform.draw_uniform(4) * 2**24
    assert found.tolist() == [[bits >> 40 for bits in row] for row in rows]
    drawn = exponential.draw_exponential(torch.empty(len(seeds), 2, 2)).flatten(1).double()
    shares = torch.tensor([[(bits >> 1) / 2**63 for bits in row] for row in rows]).double()
    torch.testing.assert_close(-torch.expm1(-drawn), shares, rtol=1e-6, atol=0)


def test_a_drafter_has_seeds_of_its_own() -> None:
    assert drafter_seeds([0, 5]) == [4294967296, 4294967301]


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
