"""What the host learns of a step, in one copy."""

from typing import NamedTuple

import torch
from torch import Tensor

from eval.decode.accept import Accepted
from heads.decoding.drafting import PAD, Draft


class Fetched(NamedTuple):
    """What the host learns of a text's step.

    Attributes:
        path: accepted nodes, the root first.
        tokens: of these.
        bonus: the token after them.
        num_drafted: draft tokens that were checked.
    """

    path: list[int]
    tokens: list[int]
    bonus: int
    num_drafted: int


def record(accepted: Accepted, on_path: Tensor, draft: Draft) -> Tensor:
    """[B, 3 + 2 N] int64, a step on the device.

    Args:
        accepted: of B texts.
        on_path: [B, N] int64, the tokens of its nodes.
        draft: what was checked.
    """
    num_drafted = (draft.tokens != PAD).sum(1)
    numbers = torch.stack([accepted.num_accepted, accepted.bonus, num_drafted], dim=1)
    return torch.cat([numbers, accepted.nodes, on_path], dim=1)


def fetched(rows: list[list[int]]) -> list[Fetched]:
    """The steps of rows that `record` made."""
    found = []
    for num_accepted, bonus, drafted, *rest in rows:
        kept, width = num_accepted + 1, len(rest) // 2
        found.append(Fetched(rest[:kept], rest[width : width + kept], bonus, drafted))
    return found
