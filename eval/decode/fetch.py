"""What the host learns of a step, in one copy."""

from typing import NamedTuple

import torch
from torch import Tensor

from eval.decode.accept import Accepted


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


def fetch(accepted: Accepted, on_path: Tensor, num_drafted: Tensor) -> list[Fetched]:
    """Waits for the device, the only time in a step.

    Args:
        accepted: of B texts.
        on_path: [B, N] int64, the tokens of its nodes.
        num_drafted: [B] int64.
    """
    numbers = torch.stack([accepted.num_accepted, accepted.bonus, num_drafted], dim=1)
    rows = torch.cat([numbers, accepted.nodes, on_path], dim=1).tolist()
    width, found = accepted.nodes.shape[1], []
    for num_accepted, bonus, drafted, *rest in rows:
        kept = num_accepted + 1
        found.append(Fetched(rest[:kept], rest[width : width + kept], bonus, drafted))
    return found
