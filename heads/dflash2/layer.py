"""DFlash-2's layer: each sublayer between two convolutions over the rows of a block.

Source: inco.ai/dflash2; vLLM `models/qwen3_dflash.py`. Letters: T texts, S tokens, A blocks, R
rows, H hidden, G groups of channels, K key-value heads, d head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from heads.blocks.attention import BlockRange
from heads.blocks.layer import BlockLayer

SIDES = 2
"""Convolutions of a sublayer: one before and one after."""


class BlockConvolution(nn.Module):
    """Mixes neighbouring rows of a block, with kernels that depend on the row's state.

    Starts as the identity.

    Args:
        hidden_size: H.
        taps: number of rows to mix.
        group_size: H / G.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.groups = hidden_size // group_size
        kernel = torch.zeros(SIDES, taps, hidden_size)
        kernel[:, 0] = 1
        self.base_kernel = nn.Parameter(kernel)
        size = SIDES * taps * self.groups
        self.kernel_projection = nn.Linear(hidden_size, size, bias=False)

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[A, R, H] output of a sublayer between both convolutions, of normed input [A, R, H]."""
        _, taps, _ = self.base_kernel.shape
        change = self.kernel_projection(states).unflatten(-1, (SIDES, taps, self.groups))
        before, after = change.unbind(2)
        first, second = self.base_kernel.to(states).unbind(0)
        return _mix_rows(sublayer(_mix_rows(states, first, before)), second, after)


def _mix_rows(states: Tensor, base: Tensor, change: Tensor) -> Tensor:
    """[A, R, H] sums over taps of rows [A, R, H], with kernels [taps, H] and [A, R, taps, G]."""
    num_rows, (taps, groups) = states.shape[1], change.shape[2:]
    grouped = states.unflatten(-1, (groups, -1))
    kernel = base.unflatten(-1, (groups, -1)) + change.unsqueeze(-1)
    found = kernel[:, :, 0] * grouped
    for tap in range(1, taps):
        # A block's first row has no earlier rows.
        earlier = functional.pad(grouped, (0, 0, 0, 0, tap, 0))[:, :num_rows]
        found = found + kernel[:, :, tap] * earlier
    return found.flatten(-2)


class DFlash2Layer(BlockLayer):
    """One decoder layer with convolutions around its attention and its MLP.

    Args:
        config: sizes, norms and RoPE.
        taps, group_size: see `BlockConvolution`.
    """

    def __init__(self, config: LlamaConfig, taps: int, group_size: int) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config.hidden_size, taps, group_size)
        self.mlp_conv = BlockConvolution(config.hidden_size, taps, group_size)

    def forward(
        self, states: Tensor, rotation: Tensor, text: tuple[Tensor, Tensor], sight: BlockRange
    ) -> Tensor:
        """[A, R, H] output of the layer. See `BlockLayer`."""

        def attend(inputs: Tensor) -> Tensor:
            return self.compute_attention(inputs, rotation, text, sight)

        states = states + self.attention_conv(self.input_layernorm(states), attend)
        return states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)
