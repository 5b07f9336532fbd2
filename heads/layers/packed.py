"""Linear layers on a CPU whose weights are packed once, for products of few rows.

A verify pass multiplies a handful of rows by every matrix of the target. Torch's own products lay
each matrix out anew every time, which takes longer than the product: over 5 rows float32 ones take
2 to 3 times those of a single row. oneDNN, over weights in its own order, reads each number once
and takes as long for 5 rows as for one. With AVX2 alone, torch's own product over one is faster.

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
"""Rows of the products that weights are ordered for; orders for 5 to 512 rows multiply alike."""
FEWEST_ROWS = 4
"""Rows that are multiplied with a matrix that is not small: 1 to 3 rows take longer."""
SMALL = 1 << 19
"""Numbers of a small matrix; of float32, torch's own product with one row is as fast."""
LARGEST_SHARE = 0.25
"""Share of the machine's memory that packed models may have: their weights then lie there twice."""

_packed: dict[int, tuple[int, Tensor]] = {}
"""Address of the weights that were packed, and the packed weights, by the key of a layer."""
_keys = count()
# An operator, so that compiled regions call it as it is.
_library = torch.library.Library("headsmith", "DEF")
_library.define("packed_linear(Tensor rows, Tensor weight, Tensor? bias, int key) -> Tensor")


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:
    place, packed = _packed.get(key, (None, weight))
    if place != weight.data_ptr():  # of a layer that was copied, or cast
        return linear(rows, weight, bias)
    product, width = torch.ops.mkldnn._linear_pointwise.default, rows.shape[-1]
    number = rows.numel() // width
    if number >= FEWEST_ROWS or weight.numel() <= SMALL:
        return product(rows, packed, bias, "none", [], "")
    filled = pad(rows.reshape(-1, width), (0, 0, 0, FEWEST_ROWS - number))
    output = product(filled, packed, bias, "none", [], "")
    return output[:number].view(*rows.shape[:-1], len(weight))


def _shaped(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:  # noqa: ARG001
    return rows.new_empty((*rows.shape[:-1], len(weight)))


_library.impl("packed_linear", _multiply, "CPU")
_library.impl("packed_linear", _shaped, "Meta")


class PackedLinear(nn.Linear):
    """A linear layer whose weights lie in memory twice, once as oneDNN reads them.

    Attributes:
        key: of the packed ones.
        leaves_one: whether products of one row are left to torch.
    """

    key: int
    leaves_one: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """[..., N] of rows [..., D]; by torch itself where gradients or a cast are wanted."""
        weight = self.weight
        trained = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        cast = input.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
        if trained or cast or (self.leaves_one and input.numel() == self.in_features):
            return linear(input, weight, self.bias)
        return torch.ops.headsmith.packed_linear.default(input, weight, self.bias, self.key)


def pack(*modules: nn.Module) -> None:
    """Make the linear layers of modules multiply over packed weights.

    Only where that is faster: on x86 CPUs, in float32 and, with instructions of its own, bfloat16.
    The weights stay beside for whoever reads them, or needs their gradients; none of their numbers
    may change any more. Does nothing where they are too large, see `LARGEST_SHARE`.
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
        # Of one row, torch's own product is at least as fast then.
        small = weight.numel() <= SMALL or not this_processor().packs_for_one_row
        layer.key, layer.leaves_one = key, small and weight.dtype == torch.float32


def _can_be_packed(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """True for a plain linear layer on a CPU that multiplies packed weights of its dtype."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    return this_processor().multiplies_packed(layer.weight.dtype)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
