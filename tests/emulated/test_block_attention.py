"""The attention of block drafters on a GPU: what is launched, in which shapes, and the numbers."""

from typing import Any

import pytest
import torch
from emulated.device import counted, off
from emulated.hollow import hollow, metered
from torch import Tensor

from heads.layers.block_attention import BlockRange, block_attention, plain_block_attention

CUDA = torch.device("cuda", 0)
NUM_LAYERS = NUM_DOCUMENTS = 3
MOST_FORWARD, MOST_BACKWARD, MOST_SHAPES = 60, 120, 16


class Drawn:
    """Blocks of a sequence of documents, and what they attend with.

    Args:
        num_blocks: A.
        size: R.
        num_tokens: S.
        seed: of anchors and numbers.
        window: see `BlockRange`.
        heads: Q, K and d.
    """

    def __init__(
        self, num_blocks: int, size: int, num_tokens: int, seed: int = 0,
        window: int | None = None, heads: tuple[int, int, int] = (4, 2, 8),
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        with off():
            anchors = torch.randperm(num_tokens - 1, generator=generator)[:num_blocks].sort().values
            length = -(-num_tokens // NUM_DOCUMENTS)
            self.host = anchors // length * length, anchors + 1
            own, text = (num_blocks, size), (1, num_tokens)
            many, few, size_of_head = heads
            shapes = [(*own, many), *[(*text, few)] * 2, *[(*own, few)] * 2, (*own, many)]
            self.numbers = [
                torch.randn(*each, size_of_head, generator=generator) for each in shapes
            ]
        self.size, self.window = size, window

    def sight(self, device: torch.device) -> BlockRange:
        first, end = (each.pin_memory().to(device, non_blocking=True) for each in self.host)
        return BlockRange(first, end, self.size, self.window is not None, self.window, self.host)

    def run(self, attend: Any, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients."""
        *leaves, grad = (each.to(device, dtype) for each in self.numbers)
        query, k, v, own_k, own_v = leaves = [each.requires_grad_() for each in leaves]
        found = attend(query, (k, v), (own_k, own_v), self.sight(device))
        return [found.detach(), *torch.autograd.grad(found, leaves, grad)]


def test_launches_of_a_layer_and_shapes_of_a_run() -> None:
    with hollow(), metered() as run:
        for step in range(4):
            # In the last one there is less to learn from than wanted.
            drawn = Drawn(300 if step == 3 else 512, 16, 4096, seed=step, heads=(32, 8, 128))
            *leaves, grad = (each.to(CUDA, torch.bfloat16) for each in drawn.numbers)
            query, k, v, own_k, own_v = (each.requires_grad_() for each in leaves)
            sight, found = drawn.sight(CUDA), query
            forward = []
            with counted() as counts:
                for _ in range(NUM_LAYERS):
                    with metered() as layer:
                        found = block_attention(found, (k, v), (own_k, own_v), sight)
                    forward.append(layer.num_launches)
                with metered() as backward:
                    torch.autograd.grad(found, query, grad)
            assert counts.num_waits == 0, str(counts)
            # What hides tokens is made in the first layer for all.
            assert max(forward[1:]) <= MOST_FORWARD
            assert forward[0] <= 2 * MOST_FORWARD
            assert backward.num_launches <= NUM_LAYERS * MOST_BACKWARD
    assert len(run.attended) <= MOST_SHAPES, run.attended


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(
    ("num_blocks", "size", "num_tokens", "heads"),
    [(70, 16, 1100, (4, 2, 8)), (5, 5, 33, (3, 3, 8)), (1, 3, 4, (4, 1, 8))],
)
def test_numbers_are_those_of_the_definition(
    num_blocks: int,
    size: int,
    num_tokens: int,
    heads: tuple[int, int, int],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    drawn = Drawn(num_blocks, size, num_tokens, window=window, heads=heads)
    with off():
        expected = drawn.run(plain_block_attention, torch.device("cpu"), torch.float32)
    found = drawn.run(block_attention, CUDA, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().float(), theirs, rtol=tolerance, atol=tolerance)
