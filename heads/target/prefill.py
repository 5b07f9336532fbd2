"""Reading tokens that are sure: prompts, and what a drafter has not read of a text yet."""

import torch

from heads.cache import TreeCache, upload
from heads.target.model import Reads, Target, TargetOutput


def prefill(
    target: Target, cache: TreeCache, rows: list[list[int]], reads: Reads | None = None
) -> TargetOutput:
    """One pass over tokens behind what a cache holds, which commits them.

    Args:
        target: or a draft model.
        cache: its own.
        rows: per text, at least one token each.
        reads: what is wanted besides the last hidden states.

    Returns:
        The states [B, n, D]; a shorter row is filled up.
    """
    longest = max(map(len, rows))
    # What fills up a shorter row comes after its tokens, which cannot see it.
    ids = upload([row + [0] * (longest - len(row)) for row in rows], target.device)
    causal = torch.ones(1, longest, longest, dtype=torch.bool, device=target.device).tril()
    depths = torch.arange(longest, device=target.device).unsqueeze(0)
    cache.announce([len(row) for row in rows])
    output = target.extend(cache, ids, causal, depths, reads or Reads())
    cache.commit([list(range(len(row))) for row in rows])
    return output
