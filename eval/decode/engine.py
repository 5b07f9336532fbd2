"""Decoding with any drafter: one text, a batch, many texts one after another."""

from collections.abc import Callable, Iterator, Sequence

from eval.decode.batch import Batch
from eval.decode.generation import Generation, Request
from heads.decoding.drafting import Committed, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import Tree
from heads.target_model.model import Taps, Target

ROOT_ALONE = Tree.chain(0)


class NoDraft:
    """Plain decoding in the same engine: the baseline `vanilla`."""

    taps = Taps()
    static_nodes = 1

    def observe(self, seen: Committed) -> None:
        """Nothing to learn."""

    def propose(self, roots: Roots) -> Draft:
        """The roots alone."""
        return Draft.of(ROOT_ALONE, roots.tokens.new_empty(len(roots), 0))

    def keep(self, rows: list[int]) -> None:
        """Nothing to drop."""

    def take(self, row: int, other: "NoDraft") -> None:
        """Nothing to take."""


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Generation:
    """`decode_batch` of one prompt."""
    return decode_batch(target, drafter, [prompt_ids], max_new_tokens, sampling, [seed])[0]


def decode_batch(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> list[Generation]:
    """Decoding with tree verification that changes nothing about the target's texts.

    Greedy text equals the target's own; sampled text has the distribution of the target's own,
    unless `sampling` is lossy.

    Args:
        target: the frozen target.
        drafter: fresh for these prompts.
        prompts: rendered prompts, at least one token each; with `max_new_tokens` they are within
            the target's window.
        max_new_tokens: tokens to emit at most per text; a stop token ends earlier and is kept.
        sampling: how the target chooses; greedy unless told.
        seeds: of everything that sampling draws, one per text; 0 unless told.
    """
    batch = Batch(target, _requests(prompts, seeds), max_new_tokens, sampling)
    return batch.decoded(lambda _: drafter, len(prompts))


def decode_many(
    target: Target,
    make: Callable[[list[int]], Drafter],
    requests: Sequence[Request],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling = GREEDY,
) -> list[Generation]:
    """`decode_batch` of so many texts at a time: where one ends, the next takes its place.

    Args:
        target: the frozen target.
        make: a fresh drafter for texts with these seeds.
        requests: in the order in which they are begun.
        max_new_tokens: as there.
        batch_size: texts that go on together.
        sampling: as there.
    """
    return Batch(target, requests, max_new_tokens, sampling).decoded(make, batch_size)


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> Iterator[dict[int, list[int]]]:
    """Like `decode_batch`, but gives tokens as they are accepted, per text that still goes on."""
    batch = Batch(target, _requests(prompts, seeds), max_new_tokens, sampling)
    yield from batch.run(lambda _: drafter, len(prompts))


def _requests(prompts: Sequence[list[int]], seeds: Sequence[int] | None) -> list[Request]:
    return list(map(Request, prompts, seeds or [0] * len(prompts)))
