"""A device without numbers: tensors of any size at no cost, for what a step of a large model runs.

Inside `hollow`, memory of the emulated device is PyTorch's meta device, which knows shapes alone.
What the host reads of it is zeros. Each operation is metered: the bytes that its kernel moves and
the floating-point operations of its products.

Not seen: what a compiler fuses, caches of the device, and operations whose number depends on data.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from emulated import device
from emulated.graphs import tensors
from emulated.kernels import HALVES
from torch import Tensor
from torch.utils.flop_counter import flop_registry

READ_ROWS = {"embedding", "index", "index_select", "gather"}
WRITE_ROWS = {
    "index_put", "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_",
    "scatter_add_", "scatter", "scatter_add", "index_add", "index_copy",
}  # fmt: skip
NO_MEMORY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


@dataclass(frozen=True)
class Gpu:
    """A GPU's work in a second, and the time that any operation takes at least.

    Attributes:
        bytes_per_s: of its memory.
        flops_per_s: dense products of 16-bit numbers.
        flops32_per_s: products of float32.
        kernel_s: of the device, at least.
    """

    bytes_per_s: float = 3.35e12
    flops_per_s: float = 990e12
    flops32_per_s: float = 67e12
    kernel_s: float = 2e-6


H100 = Gpu()


@dataclass
class Meter:
    """Sums of what ran.

    Attributes:
        num_launches: operations that the host gave to the device.
        num_kernels: operations that the device ran.
        bytes: moved.
        flops: of products.
        device_s: the longest of what each kernel needs, summed.
        product_s: the part of kernels that multiply.
        attended: shapes of queries and keys that met in a kernel of attention.
    """

    gpu: Gpu = H100
    num_launches: int = 0
    num_kernels: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    device_s: float = 0.0
    product_s: float = 0.0
    attended: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def __sub__(self, earlier: "Meter") -> "Meter":
        names = [each.name for each in fields(self) if each.name != "gpu"]
        return Meter(self.gpu, *(getattr(self, name) - getattr(earlier, name) for name in names))

    def take(self, func: Any, args: Any, options: Any, found: Any) -> None:
        """An operation that has run."""
        packet = func.overloadpacket
        name = packet.__name__
        if name in device.VIEWS or name in NO_MEMORY:
            return
        moved = _moved(name, args, options, found)
        flops, wide = 0.0, True
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **options, out_val=found))
            wide = next(tensors(args)).dtype not in HALVES
        peak = self.gpu.flops32_per_s if wide else self.gpu.flops_per_s
        seconds = max(self.gpu.kernel_s, moved / self.gpu.bytes_per_s, flops / peak)
        self.num_launches += 1
        self.num_kernels += 1
        self.bytes += moved
        self.flops += flops
        self.device_s += seconds
        self.product_s += seconds if flops else 0.0
        if "attention" in name:
            self.attended[name, *(tuple(each.shape) for each in list(tensors(args))[:2])] += 1


@contextmanager
def hollow() -> Iterator[None]:
    """Inside, the emulated device has no memory."""
    before = device.memory.at
    device.memory.at = torch.device("meta")
    try:
        yield
    finally:
        device.memory.at = before


@contextmanager
def metered(gpu: Gpu = H100) -> Iterator[Meter]:
    """Meters inside."""
    meter = Meter(gpu)
    device.meters.append(meter.take)
    try:
        yield meter
    finally:
        device.meters.remove(meter.take)


def _moved(name: str, args: Any, options: Any, found: Any) -> float:
    """Bytes that a kernel reads and writes."""
    out = sum(map(_size, tensors(found)))
    if name in READ_ROWS:
        return 2.0 * out
    given = list(tensors([*args, *options.values()]))
    if name in WRITE_ROWS:
        return 2.0 * sum(map(_size, given[1:]))
    return float(out + sum(map(_size, given)))


def _size(tensor: Tensor) -> int:
    """Bytes in memory; what is expanded lies there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    number = 1
    for size, stride in sizes:
        number *= size if stride else min(size, 1)
    return number * tensor.element_size()
