"""Linear layers on a CPU with weights packed once, for products of few rows.

A verify pass multiplies a few rows by every matrix of the target. Torch reorders each matrix for
every product, which takes longer than the product: float32 products of 5 rows take 2 to 3 times as
long as of one row. oneDNN with packed weights reads each number once and takes as long for 5 rows
as for one. With AVX2 alone, torch's product of one row is faster.

Letters: D numbers of a row, N of its product.
"""

import os
from itertools import count
from typing import TypeGuard
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from heads.processor import this_processor

NUM_ROWS = 16
"""Rows of the products that weights are packed for; packings for 5 to 512 rows are equally fast."""
FEWEST_ROWS = 4
"""Least rows of a product with a large matrix: 1 to 3 rows take longer."""
SMALL = 1 << 19
"""Numbers of a small matrix, for which torch's float32 product of one row is as fast."""
LARGEST_SHARE = 0.25
"""Share of the machine's memory for packed models, whose weights take memory twice."""

_packed: dict[int, tuple[int, Tensor]] = {}
"""Address of the packed weights and the weights, by the key of a layer."""
_keys = count()
# An operator, so that compiled regions call it unchanged.
_library = torch.library.Library("headsmith", "DEF")
_library.define("packed_linear(Tensor rows, Tensor weight, Tensor? bias, int key) -> Tensor")


def _multiply_packed(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:
    place, packed = _packed.get(key, (None, weight))
    if place != weight.data_ptr():  # the layer was copied or cast
        return linear(rows, weight, bias)
    product, width = torch.ops.mkldnn._linear_pointwise.default, rows.shape[-1]
    number = rows.numel() // width
    if number >= FEWEST_ROWS or weight.numel() <= SMALL:
        return product(rows, packed, bias, "none", [], "")
    filled = pad(rows.reshape(-1, width), (0, 0, 0, FEWEST_ROWS - number))
    output = product(filled, packed, bias, "none", [], "")
    return output[:number].view(*rows.shape[:-1], len(weight))


def _make_empty_output(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:  # noqa: ARG001
    return rows.new_empty((*rows.shape[:-1], len(weight)))


_library.impl("packed_linear", _multiply_packed, "CPU")
_library.impl("packed_linear", _make_empty_output, "Meta")


class PackedLinear(nn.Linear):
    """Linear layer whose weights exist twice, once packed for oneDNN.

    Attributes:
        key: key of the packed weights.
        leaves_one: whether torch computes products of one row.
    """

    key: int
    leaves_one: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """[..., N] of rows [..., D]; computed by torch if gradients or a cast are needed."""
        weight = self.weight
        trained = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        cast = input.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
        if trained or cast or (self.leaves_one and input.numel() == self.in_features):
            return linear(input, weight, self.bias)
        return torch.ops.headsmith.packed_linear.default(input, weight, self.bias, self.key)


def pack_weights(*modules: nn.Module) -> None:
    """Let the linear layers of modules multiply packed weights.

    Applies where it is faster: on x86 CPUs in float32, and in bfloat16 with native instructions.
        The weights stay for other readers and gradients; their numbers must not change afterwards.
        Does nothing for models above `LARGEST_SHARE`.
    """
    layers = {layer for module in modules for layer in module.modules() if _can_be_packed(layer)}
    if sum(layer.weight.nbytes for layer in layers) > LARGEST_SHARE * _memory_bytes():
        return
    for layer in layers:
        weight, key = layer.weight, next(_keys)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), NUM_ROWS)
        _packed[key] = weight.data_ptr(), packed
        finalize(weight, _packed.pop, key)
        layer.__class__ = PackedLinear
        assert isinstance(layer, PackedLinear)
        # For one row, torch's own product is then at least as fast.
        small = weight.numel() <= SMALL or not this_processor().packs_for_one_row
        layer.key, layer.leaves_one = key, small and weight.dtype == torch.float32


def _can_be_packed(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether a layer is a plain CPU linear layer with a dtype that packs."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    return this_processor().multiplies_packed(layer.weight.dtype)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
