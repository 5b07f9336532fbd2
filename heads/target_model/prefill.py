"""Reading tokens that are sure: prompts, and what a drafter has not read of a text yet."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from heads.decoding.cache import Kept, TreeCache, upload
from heads.target_model.model import Taps, Target, TargetOutput


def prefill(
    target: Target, cache: TreeCache, rows: list[list[int]], taps: Taps | None = None
) -> TargetOutput:
    """Passes over tokens behind what a cache holds, which commit them.

    Args:
        target: or a draft model.
        cache: its own.
        rows: per text, at least one token each.
        taps: what is wanted besides the last hidden states.

    Returns:
        The states [B, n, D]; a shorter row is filled up.
    """
    return TargetOutput.joined([output for _, output in parts(target, cache, rows, taps)])


def last_states(target: Target, cache: TreeCache, rows: list[list[int]]) -> Tensor:
    """`prefill` that keeps the last hidden states [B, 1, D] of each text alone."""
    found: Tensor | None = None
    before = cache.slots.committed
    for _, output in parts(target, cache, rows):
        counts, before = cache.slots.committed - before, cache.slots.committed
        states = output.at(counts - 1).hidden_states
        found = states if found is None else torch.where(counts.unsqueeze(2) > 0, states, found)
    assert found is not None
    return found


def parts(
    target: Target, cache: TreeCache, rows: list[list[int]], taps: Taps | None = None
) -> Iterator[tuple[list[list[int]], TargetOutput]]:
    """`prefill` part by part: the tokens of each, and the states; one part if it is recurrent."""
    longest = max(map(len, rows))
    ends = [old + len(row) for old, row in zip(cache.slots.lengths, rows, strict=True)]
    # Some recurrent layers of transformers go on from a state with one token only.
    size = longest if target.is_recurrent else target.prefill_chunk
    for start in range(0, longest, size):
        new = [row[start : start + size] for row in rows]
        width = max(map(len, new))
        # What fills up a shorter row comes after its tokens, which cannot see it.
        counts = list(map(len, new))
        filled = [row + [0] * (width - len(row)) for row in new]
        both = upload([*chain.from_iterable(filled), *counts], target.device)
        ids = both[: -len(new)].view(len(new), width)
        cache.announce(counts, ends)
        output = target.extend(cache, ids, taps=taps)
        every = torch.arange(width, device=target.device).expand_as(ids)
        cache.commit([list(range(count)) for count in counts], Kept(every, both[-len(new) :]))
        yield new, output
