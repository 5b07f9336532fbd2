"""Linear layers on a CPU whose weights are packed once, for products of few rows.

A verify pass multiplies a handful of rows by every matrix of the target. Torch's own products lay
each matrix out anew every time, which takes longer than the product: over 5 rows float32 ones take
2 to 3 times those of a single row. oneDNN, over weights in its own order, reads each number once
and takes as long for 5 rows as for one.
"""

import os
from collections.abc import Callable
from itertools import count
from typing import TypeGuard
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

NUM_ROWS = 16
"""Of the products that weights are ordered for; orders for 5 to 512 rows multiply alike."""
FEWEST_ROWS = 4
"""That are multiplied with a matrix that is not small: 1 to 3 rows take longer."""
SMALL = 1 << 19
"""Numbers of a small matrix; of float32, torch's own product with one row is as fast."""
LARGEST_SHARE = 0.25
"""Of the machine's memory: larger models are not packed, as their weights then lie there twice."""

_packed: dict[int, Tensor] = {}
_keys = count()
# An operator, so that compiled regions call it as it is.
_library = torch.library.Library("headsmith", "DEF")
_library.define("packed_linear(Tensor rows, Tensor weight, Tensor? bias, int key) -> Tensor")


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:
    product, width = torch.ops.mkldnn._linear_pointwise.default, rows.shape[-1]
    number = rows.numel() // width
    if number >= FEWEST_ROWS or weight.numel() <= SMALL:
        return product(rows, _packed[key], bias, "none", [], "")
    filled = pad(rows.reshape(-1, width), (0, 0, 0, FEWEST_ROWS - number))
    found = product(filled, _packed[key], bias, "none", [], "")
    return found[:number].view(*rows.shape[:-1], len(weight))


def _shaped(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:  # noqa: ARG001
    return rows.new_empty((*rows.shape[:-1], len(weight)))


_library.impl("packed_linear", _multiply, "CPU")
_library.impl("packed_linear", _shaped, "Meta")


def pack(*modules: nn.Module) -> None:
    """From now on their linear layers multiply over packed weights.

    Only on x86 CPUs, in float32 and, where they multiply it, bfloat16. The weights stay beside for
    whoever reads them, or needs their gradients; they must not change any more. Does nothing where
    they are too large, see `LARGEST_SHARE`.

    Args:
        modules: in eval mode, where they will stay.
    """
    layers = {each for module in modules for each in module.modules() if _is_open(each)}
    if sum(each.weight.nbytes for each in layers) <= LARGEST_SHARE * _memory_bytes():
        for layer in layers:
            layer.forward = _over_packed(layer)  # type: ignore[method-assign, assignment]


def _is_open(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is a plain one that can be packed and is not yet."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    return layer.weight.device.type == "cpu" and _is_multiplied(layer.weight.dtype)


def _is_multiplied(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of a dtype here."""
    # MKL is there on x86 alone.
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    bfloat16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or bfloat16


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _over_packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A layer's `forward` over packed weights."""
    weight, bias, key = layer.weight, layer.bias, next(_keys)
    _packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), NUM_ROWS)
    finalize(weight, _packed.pop, key)

    width = weight.shape[1]
    is_small = weight.dtype == torch.float32 and weight.numel() <= SMALL

    def forward(rows: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
        cast = rows.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
        if trained or cast or (is_small and rows.numel() == width):
            return linear(rows, weight, bias)
        return torch.ops.headsmith.packed_linear.default(rows, weight, bias, key)

    return forward
